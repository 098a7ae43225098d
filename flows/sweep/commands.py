"""The commands of sweeps. `grpoflow sweep FILE` runs one; its other words look at it. Imports late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

Which = Annotated[str, typer.Argument(help="A sweep's folder or its file.", metavar="SWEEP")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class _RunIsMeant(TyperGroup):
    """`sweep FILE` is `sweep run FILE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args and (args[0] in self.commands or args[0].startswith("-"))
        return super().resolve_command(ctx, args if known else ["run", *args])


sweep = typer.Typer(
    cls=_RunIsMeant,
    no_args_is_help=True,
    help="Sweeps: grpoflow sweep FILE runs one, or goes on with it; see also its commands.",
)


@sweep.command()
def run(file: Annotated[Path, typer.Argument(help="The sweep's file.", exists=True, dir_okay=False)]) -> None:
    """Run a sweep, or go on with it after a kill."""
    from flows.sweep.command import sweep_command

    raise typer.Exit(sweep_command(file))


@sweep.command()
def status(which: Which, as_json: Json = False) -> None:
    """Say where a sweep stands."""
    from flows.sweep.command import find_sweep
    from flows.sweep.table import print_status, to_json

    found = find_sweep(which)
    typer.echo(to_json(found)) if as_json else print_status(found, _console())


@sweep.command()
def table(which: Which, as_json: Json = False) -> None:
    """Print the leaderboard."""
    from flows.sweep.command import find_sweep
    from flows.sweep.table import print_table, to_json

    found = find_sweep(which)
    typer.echo(to_json(found)) if as_json else print_table(found, _console())


@sweep.command()
def report(which: Which, out: Annotated[Path | None, typer.Option("-o", help="The file.")] = None) -> None:
    """Write one HTML file: leaderboard, space, what mattered."""
    from flows.sweep.command import find_sweep
    from flows.sweep.report import FILE_NAME, write_report

    found = find_sweep(which)
    path = out or found.folder / FILE_NAME
    write_report(found, path)
    typer.echo(f"{path}: open it in a browser")


@sweep.command()
def clone(
    which: Which,
    trial: Annotated[int, typer.Argument(help="Its number in the table.")],
    name: Annotated[str, typer.Argument(help="Name of the new run (trainer.experiment_name).")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="key.path=value that differs; may repeat.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which of the sweep's seeds; the first by default.")] = None,
    out: Annotated[Path | None, typer.Option("-o", help="File to write; NAME.yaml by default.")] = None,
) -> None:
    """Write a trial's whole configuration, to be changed and trained like any other."""
    from flows.sweep.command import clone_command

    path = clone_command(which, trial, name, changes or [], seed, out)
    typer.echo(f"grpoflow train {path}")


@sweep.command()
def export_best(
    which: Which, folder: Annotated[Path, typer.Argument(help="Where to write the policy and its configuration.")]
) -> None:
    """Write the best trial's policy as a Hugging Face folder."""
    from flows.sweep.command import export_best_command

    typer.echo(f"{export_best_command(which, folder)} is in {folder}")


def _console():  # type: ignore[no-untyped-def]
    from rich.console import Console

    return Console()
