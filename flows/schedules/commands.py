"""The commands of schedules on the command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

schedules_app = typer.Typer()
one_schedule = typer.Typer(no_args_is_help=True, help="List, pause, resume and run what is served or deployed.")
schedules_app.add_typer(one_schedule, name="schedules")

Root = Annotated[Path, typer.Option(help="The schedules' storage.root.")]
File = Annotated[Path, typer.Argument(help="A schedule file.", exists=True, dir_okay=False)]
Name = Annotated[str, typer.Argument(help="A schedule's name.")]


@schedules_app.command()
def serve(file: File) -> None:
    """Serve schedules: start their runs when they are due, until Ctrl-C."""
    from flows.schedules.serve import serve_command

    raise typer.Exit(serve_command(file, typer.echo))


@schedules_app.command()
def deploy(
    file: File,
    pool: Annotated[str, typer.Option(help="Work pool whose workers start the runs.")] = "grpoflow",
    kind: Annotated[str, typer.Option("--type", help="process, docker or kubernetes.")] = "process",
    image: Annotated[str | None, typer.Option(help="Image of docker and kubernetes, with grpoflow in it.")] = None,
    claim: Annotated[str | None, typer.Option(help="kubernetes: volume claim that is mounted at storage.root.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="kubernetes: GPUs of each run.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write files for `prefect deploy` instead of deploying.")
    ] = None,
) -> None:
    """Deploy schedules to a work pool, whose workers start their runs."""
    from flows.schedules.pools import deploy_command

    raise typer.Exit(deploy_command(file, pool, kind, image, claim, gpus, output, typer.echo))


@schedules_app.command()
def worker(
    pool: Annotated[str, typer.Argument(help="A work pool of the Prefect server (PREFECT_API_URL).")] = "grpoflow",
    limit: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
) -> None:
    """Start the runs of a process pool; told to end, it lets them end at their next stage first."""
    from flows.schedules.worker import worker_command

    raise typer.Exit(worker_command(pool, limit, typer.echo))


@one_schedule.command("list")
def list_schedules(root: Root = Path("runs"), as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List schedules with their next times, here and on the schedule's own clock."""
    from flows.schedules.manage import list_command

    raise typer.Exit(list_command(root, as_json, typer.echo))


@one_schedule.command()
def pause(name: Name, root: Root = Path("runs")) -> None:
    """Let a schedule's times pass. What runs goes on."""
    from flows.schedules.manage import pause_command

    raise typer.Exit(pause_command(root, name, True, typer.echo))


@one_schedule.command()
def resume(name: Name, root: Root = Path("runs")) -> None:
    """Let a schedule's times count again. Those that passed are not made up for."""
    from flows.schedules.manage import pause_command

    raise typer.Exit(pause_command(root, name, False, typer.echo))


@one_schedule.command()
def run(
    name: Name,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="key.path=value for this run alone; also steps=, seed= and experiment_name=."),
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Run a schedule now, also when it is paused."""
    from flows.schedules.manage import run_command

    raise typer.Exit(run_command(root, name, words or [], typer.echo))
