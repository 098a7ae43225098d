"""The audit commands of the command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

audit = typer.Typer()


@audit.command(rich_help_panel="Audit")
def sql(
    words: Annotated[
        list[str],
        typer.Argument(help='Runs (RUN, RUN@STEP, RUN#LINEAGE), then the query, such as "select … from samples".'),
    ],
    steps: Annotated[str | None, typer.Option(help="Only these steps: 3, 3..7, ..7, 3..")] = None,
    format: Annotated[str, typer.Option(help="table | json | jsonl | csv | parquet | arrow")] = "table",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new file instead of the terminal.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Ask a run's artifacts in SQL. Without a query: list the views and their columns."""
    from flows.audit.query import sql_command

    raise typer.Exit(sql_command(words, steps, "json" if as_json else format, out))


@audit.command(rich_help_panel="Audit")
def diff(
    a: Annotated[str, typer.Argument(help="RUN, RUN@STEP, RUN#LINEAGE or RUN#LINEAGE@STEP.")],
    b: Annotated[str, typer.Argument(help="The same: what A is compared with.")],
    steps: Annotated[str | None, typer.Option(help="Only these steps: 3, 3..7, ..7, 3..")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 6 when something differs.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows of each list that are shown.")] = 10,
) -> None:
    """Find where two runs, lineages or steps part: first stage, prompt and token that differ, and what came of it."""
    from flows.audit.diff import diff_command

    raise typer.Exit(diff_command((a, b), steps, as_json, exit_code, limit))


@audit.command(rich_help_panel="Audit")
def verify(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    steps: Annotated[str | None, typer.Option(help="Only these steps: 3, 3..7, ..7, 3..")] = None,
    lineage: Annotated[int | None, typer.Option(help="Which history; the newest by default.")] = None,
    rescore: Annotated[str, typer.Option(help="Samples of each reward artifact to score again, or all.")] = "32",
    deep: Annotated[
        bool, typer.Option("--deep", help="Rebuild the policy and make log-probs and updates again, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that a run is sound: files, rows, tokens, rewards, advantages, losses, metrics. Exit code 6 if not."""
    from rich.console import Console

    from flows.audit.verify import verify_command

    console = Console()
    code = verify_command(run, steps, lineage=lineage, rescore=rescore, deep=deep, as_json=as_json, console=console)
    raise typer.Exit(code)


@audit.command(rich_help_panel="Audit")
def replay(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a bundle.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="key.path=value that is another one here, such as the model's path.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which step; a bundle has one.")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="generate, old_log_prob, ref_log_prob, reward, advantage, update, prompts; may repeat."),
    ] = None,
    lineage: Annotated[int | None, typer.Option(help="Which history; the newest by default.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda or auto.")] = "cpu",
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run reward functions and model code that came in a bundle.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a stored step again and compare. Exit code 6 where a stage differs; the run is only read."""
    from rich.console import Console

    from flows.audit.replay.command import replay_command

    code = replay_command(
        source,
        step,
        stage,
        words or [],
        lineage=lineage,
        device=device,
        trusts_code=trust_code,
        as_json=as_json,
        console=Console(),
    )
    raise typer.Exit(code)


@audit.command(rich_help_panel="Audit")
def bundle(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[int, typer.Option(help="Which step.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="key.path=value that is another one here, such as the model's path.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file; in this folder by default.")] = None,
    lineage: Annotated[int | None, typer.Option(help="Which history; the newest by default.")] = None,
) -> None:
    """Put what a replay of one step needs into one file, without hosts, paths and secrets."""
    from rich.console import Console

    from flows.audit.bundle import bundle_command

    bundle_command(run, step, words or [], out, lineage, Console())


@audit.command(rich_help_panel="Audit")
def rescore(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    reward: Annotated[str, typer.Option(help="FILE.py, FILE.py:name, module:function, or a built-in one's name.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="reward.* and custom_reward_function.reward_kwargs.* as key.path=value.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps: 3, 3..7, ..7, 3..")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Samples whose score changes most that are shown.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score kept responses by another reward function and show what flips. Nothing is written into the run."""
    from rich.console import Console

    from flows.audit.rescore import rescore_command

    raise typer.Exit(rescore_command(run, steps, reward, words or [], limit=limit, as_json=as_json, console=Console()))


@audit.command(rich_help_panel="Audit")
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[
        list[int] | None,
        typer.Option(help="A step whose batch is put in; may repeat. The last by default, of small runs all."),
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Another run, shown on the same axes.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file; NAME-report.html here by default.")] = None,
    checks: Annotated[
        bool, typer.Option("--verify", help="Put in what `verify` says of these steps. Runs the reward functions.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with a tokenizer.json, where the run's is not on this machine.")
    ] = None,
    lineage: Annotated[int | None, typer.Option(help="Which history; the newest by default.")] = None,
) -> None:
    """Write a run into one HTML file: curves, steps, groups and tokens, to be read without a network."""
    from flows.audit.report import report_command

    typer.echo(report_command(run, step or None, compare, out, verified=checks, tokenizer=tokenizer, lineage=lineage))


@audit.command(rich_help_panel="Audit")
def diagnose(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    steps: Annotated[str | None, typer.Option(help="Only these steps: 3, 3..7, ..7, 3..")] = None,
    lineage: Annotated[int | None, typer.Option(help="Which history; the newest by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for the usual failure signs in a run, each told with its evidence and the query that shows more."""
    from rich.console import Console

    from flows.audit.diagnose import diagnose_command

    raise typer.Exit(diagnose_command(run, steps, lineage=lineage, as_json=as_json, console=Console()))
