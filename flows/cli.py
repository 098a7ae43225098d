"""The command line. Imports nothing heavy until a command needs it.

Exit codes: 0 done, 1 the run failed in a stage, 2 the request cannot be served (configuration, plan, files),
6 a check failed or something differs (`verify`, `replay`, `diff --exit-code`), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.audit.commands import audit
from flows.schedules.commands import schedules_app
from flows.sweep.commands import sweep

app = typer.Typer(
    name="grpoflow",
    help="GRPO post-training as an auditable workflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Words = Annotated[
    list[str] | None,
    typer.Argument(help="Recipe names or YAML files, in layers, then key.path=value overrides.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Until = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="STEP", help="Pause after this step of the whole run's plan; the same command goes on."
    ),
]


@app.command()
def train(
    words: Words = None,
    until: Until = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="POOL", help="Submit to this Prefect work pool, whose workers run it."),
    ] = None,
) -> None:
    """Train: plan, then run every step as a flow of committed stages. Run again to go on after a kill."""
    files, overrides = _split(words)
    if on is not None:
        from flows.schedules.submit import submit_command

        raise typer.Exit(submit_command(files, overrides, on, until, typer.echo))
    from flows.train import train_command

    raise typer.Exit(train_command(files, overrides, until))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="key.path=value overrides of the run's own configuration.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="Go back: make this step and all after it anew.")] = None,
    from_stage: Annotated[
        str | None, typer.Option(help="Of that step, keep what is made before this stage, such as advantages.")
    ] = None,
    until: Until = None,
) -> None:
    """Go on with a run under its own configuration, or go back to an earlier step in a new lineage."""
    from flows.resume import resume_command

    raise typer.Exit(resume_command(run, words or [], from_step, from_stage, until))


@app.command()
def fork(
    source: Annotated[str, typer.Argument(help="RUN or RUN@STEP: a run's folder and one of its policies.")],
    name: Annotated[str, typer.Argument(help="Name of the new run (trainer.experiment_name).")],
    words: Annotated[list[str] | None, typer.Argument(help="key.path=value that differs from the other run.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="The same; may repeat.")] = None,
) -> None:
    """Train a new run that begins with another run's policy."""
    from flows.resume import fork_command

    raise typer.Exit(fork_command(source, name, [*(words or []), *(changes or [])]))


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="RUN or RUN@STEP: a run's folder and one of its policies or steps.")],
    out: Annotated[Path, typer.Argument(help="Where to write it: a new folder; of jsonl and parquet a new file.")],
    adapter: Annotated[bool, typer.Option(help="Of a LoRA run, the adapter alone instead of merged weights.")] = False,
    what: Annotated[str, typer.Option(help="checkpoint | rollouts | samples")] = "checkpoint",
    format: Annotated[
        str | None, typer.Option(help="hf | jsonl | parquet; hf of a checkpoint and jsonl of samples by default.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Of samples, only these steps: 3, 3..7, ..7, 3..")] = None,
) -> None:
    """Write a run's policy as a Hugging Face folder that transformers and vLLM load, or its samples as rows."""
    from flows.audit.export import export_any_command

    raise typer.Exit(export_any_command(source, out, what, format, steps, adapter))


@app.command()
def plan(
    words: Words = None,
    verl: Annotated[Path | None, typer.Option(help="Explain a verl launch script instead, without running it.")] = None,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option(help="Say in words which numbers count what, per what.")] = False,
    train_prompts: Annotated[
        int | None, typer.Option(help="Size of the training set, where its files are not here.")
    ] = None,
    device_memory_gb: Annotated[
        float | None, typer.Option(help="Memory of one device, GB of 10^9 bytes; a GPU of this machine by default.")
    ] = None,
) -> None:
    """Explain and check every batch shape of a configuration. Loads no model."""
    from flows.plan_view import plan_command

    files, overrides = _split(words)
    raise typer.Exit(
        plan_command(
            files,
            overrides,
            verl=verl,
            as_json=as_json,
            explain=explain,
            train_prompts=train_prompts,
            device_memory_gb=device_memory_gb,
        )
    )


@app.command()
def preflight(
    words: Words = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many prompts, of the first epoch's order; 256 or all by default.")
    ] = None,
    pass_score: Annotated[float, typer.Option(help="A response passes from this score on.")] = 1.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the kept rows of the data here, as parquet.")
    ] = None,
    keep: Annotated[str, typer.Option(help="Lowest and highest pass rate of rows that are kept.")] = "0.05..0.95",
    as_json: Json = False,
) -> None:
    """Sample and score prompts with the first policy: how many would teach, and about what a run costs. No training."""
    from flows.preflight import preflight_command

    files, overrides = _split(words)
    raise typer.Exit(
        preflight_command(
            files, overrides, prompts=prompts, pass_score=pass_score, output=output, keep=keep, as_json=as_json
        )
    )


@app.command()
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A run's folder or a folder of runs, or recipe names and YAML files; then key.path=value overrides.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also start a local Ray and a Prefect server, and fetch what is not here.")
    ] = False,
) -> None:
    """Look for what would keep a run from starting or going on here. Exit code 2 where there is an error."""
    from flows.doctor import doctor_command

    raise typer.Exit(doctor_command(words or [], as_json=as_json, deep=deep))


@app.command()
def ls(root: Annotated[Path, typer.Argument(help="Folder of runs.")] = Path("runs"), as_json: Json = False) -> None:
    """List the runs under a folder."""
    from flows import show as views

    views.ls(root, as_json, _console())


@app.command()
def status(run: Annotated[Path, typer.Argument(help="A run's folder.")], as_json: Json = False) -> None:
    """Say where a run stands."""
    from flows import show as views

    views.status(run, as_json, _console())


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="Which step; the newest by default.")] = None,
    stage: Annotated[str | None, typer.Option(help="An artifact, such as rewards.")] = None,
    sample: Annotated[
        str | None, typer.Option(help="A sample's id: this sample through all stages of its step.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of an artifact to show.")] = 20,
    tokens: Annotated[bool, typer.Option("--tokens", help="Response tokens, coloured by one of their values.")] = False,
    by: Annotated[str, typer.Option(help="Of tokens: advantage, gap, entropy, kl, log_prob or mask.")] = "advantage",
    top: Annotated[int, typer.Option(min=0, help="Of tokens: how many of the largest values are listed.")] = 10,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Of tokens: a folder with a tokenizer.json instead of the run's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a step, one of its artifacts, or one sample through all stages; or response tokens with their values."""
    if tokens:
        from flows.audit.tokens import show_tokens

        shown = _console()
        show_tokens(run, step, sample, by, top=top, limit=limit, as_json=as_json, console=shown, tokenizer=tokenizer)
        return
    from flows import show as views

    views.show(run, step, stage, sample, as_json, limit, _console())


@app.command()
def gc(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="storage.retention other than the run's own, as key.path=value.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would go.")] = False,
    lineages: Annotated[
        bool, typer.Option("--lineages", help="Also remove futures that the run went back from, checkpoints included.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Let go of old rows as storage.retention says. What recovery needs stays, and so do all manifests."""
    from flows.gc import gc_command

    gc_command(run, words or [], dry_run=dry_run, lineages=lineages, as_json=as_json, console=_console())


@app.command()
def deliver(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    uri: Annotated[str | None, typer.Option(help="Another MLflow store than the run's own.")] = None,
) -> None:
    """Send to MLflow what it missed of a run while it was away."""
    from flows.tracking import deliver_pending, refuse_other_server
    from storage import open_run

    found = open_run(run)
    if uri is None:
        refuse_other_server(found)
    result = deliver_pending(found, uri)
    if result.problem is not None:
        typer.echo(f"error: {result.uri}: {result.problem}; {len(result.waiting)} steps are still waiting", err=True)
        raise typer.Exit(1)
    typer.echo(f"{result.sent} steps are in {result.uri}" if result.uri else f"{run} is not tracked in MLflow")


@app.command()
def copy(
    source: Annotated[str, typer.Argument(help="A run's folder, or its s3://bucket/path.")],
    target: Annotated[str, typer.Argument(help="Where the run shall be: a new folder, or s3://bucket/path.")],
) -> None:
    """Copy a run between this machine and an object store, or within either; every digest is checked."""
    from storage.transfer import copy_run

    files, size = copy_run(Path(source), Path(target))
    typer.echo(f"{files} files, {size:,} bytes")


@app.command()
def ui(root: Annotated[Path, typer.Argument(help="Folder of runs, their storage.root.")] = Path("runs")) -> None:
    """Show a folder's runs, sweeps and schedules in Prefect's pages until Ctrl-C."""
    from flows.prefect_server import show_server

    show_server(root, _console().print)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    import json

    from flows.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


@app.command()
def recipes() -> None:
    """List the recipes that `train` and `plan` know by name."""
    from flows.recipes import list_recipes

    for name, about in list_recipes():
        typer.echo(f"{name:<24} {about}")


app.add_typer(audit)
app.add_typer(schedules_app)
app.add_typer(sweep, name="sweep")


def main() -> None:
    """Entry point: a user's mistake is one readable message; a traceback is a bug of ours."""
    try:
        sys.argv[1:] = _on_this_machine(sys.argv[1:])
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from storage import StorageError
        from tasks.engines.engine_process import EngineDied, EngineFailed, WeightsNotTaken
        from tasks.rewards.calls import RewardError
        from tasks.stage import StageError
        from tasks.workers.group import RanksLost

        if isinstance(error, StageError | RewardError | RanksLost | EngineDied | EngineFailed | WeightsNotTaken):
            _fail(error, 1)
        if not isinstance(error, ValueError | StorageError | OSError):
            raise
        _fail(error, 2)


def _on_this_machine(words: list[str]) -> list[str]:
    """The words, with the folder of this machine's copy for every `s3://…`; its readers bring it up to date.

    Raises:
        ValueError: one is no place in an object store, or something is to be written there.
    """
    if not any(word.startswith("s3:/") for word in words):
        return words
    from storage.copies import local_folder

    before = ["", *words]
    for option, word in zip(before, words, strict=False):
        if word.startswith("s3:/") and option in ("-o", "--out", "--output"):
            raise ValueError(f"{option} {word}: files for people are written on this machine. Name a path here.")
    return [str(local_folder(word)) if word.startswith("s3:/") else word for word in words]


def _fail(error: Exception, code: int) -> None:
    typer.echo(f"error: {error}", err=True)
    sys.exit(code)


def _console():  # type: ignore[no-untyped-def]
    from rich.console import Console

    return Console()


def _split(words: list[str] | None) -> tuple[list[Path], list[str]]:
    """Tell files and recipe names from overrides: an override has a `=` or begins with `~`."""
    from flows.recipes import recipe_file

    overrides = [word for word in words or [] if "=" in word or word.startswith("~")]
    files = [recipe_file(word) for word in words or [] if word not in overrides]
    return files, overrides


if __name__ == "__main__":
    main()
