"""`grpoflow sweep`: run one, see where it stands, take its results along."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from flows.config import load_config, to_yaml
from flows.interrupts import polite_end
from flows.local_paths import with_absolute_paths
from flows.prefect_server import prefect_api
from flows.progress import Progress, RunConsole
from flows.stages import StageRunner, Stages, stage_runner
from flows.sweep.book import ENDING, Sweep, open_sweep, sweep_folder, writing
from flows.sweep.mirror import Mirror
from flows.sweep.rails import cautions_of, refuse_unmeasured
from flows.sweep.run import Loop
from flows.sweep.spec import base_config, load_sweep
from flows.sweep.table import print_table, rows
from flows.sweep.trials import total_steps, trial_config
from storage import StorageError


def sweep_command(path: Path) -> int:
    """Run a sweep, or go on with it, and print its table; the exit code is 0 when it is finished or out of budget."""
    spec = load_sweep(path)
    base = with_absolute_paths(base_config(spec))
    total = total_steps(spec, base)
    refuse_unmeasured(spec, base, total)
    console = RunConsole()
    say = Progress(console).say
    for sentence in cautions_of(spec, base, total):
        say(f"caution: {sentence}")
    with ExitStack() as stack:
        check = stack.enter_context(polite_end(base.trainer.stop_grace_s, say))
        sweep = stack.enter_context(writing(spec, base, total))
        api = stack.enter_context(prefect_api(base.orchestration, base.storage.folder, say))
        say(f"sweep folder {sweep.folder}")
        mirror = stack.enter_context(Mirror(sweep.folder, say))
        if api is not None and (problem := api.wait_ready(say)):
            say(f"{problem}; the sweep goes on without it")
        runner = stack.enter_context(stage_runner(api, sweep.sweep_id, tags=[f"sweep:{spec.name}"], say=say))
        loop = Loop(sweep, say, check, mirror.changed)
        runner.call(run_sweep, loop, runner, name=sweep.sweep_id, shown={"folder": str(sweep.folder)})
    print_table(open_sweep(sweep.folder), console)
    return 0


def run_sweep(loop: Loop, runner: StageRunner, _: Stages) -> str:
    """A sweep, as a flow: each trial's runs are flow runs below it, with the sweep's tag."""
    loop.environment = runner.environment()
    state = loop.to_the_end()
    table = [{"trial": row.trial, "state": row.state, "value": row.value} for row in rows(loop.sweep)]
    runner.publish_table("leaderboard", table, f"{loop.sweep.spec.name}: best first")
    return state


def find_sweep(word: str) -> Sweep:
    """A sweep by its folder, or by its file.

    Raises:
        StorageError: there is none.
    """
    path = Path(word)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        spec = load_sweep(path)
        path = sweep_folder(spec, with_absolute_paths(base_config(spec)))
    if not (path / "sweep.json").is_file() and (path.with_name(path.name + ENDING) / "sweep.json").is_file():
        path = path.with_name(path.name + ENDING)
    return open_sweep(path)


def clone_command(word: str, trial: int, name: str, changes: Sequence[str], seed: int | None, out: Path | None) -> Path:
    """Write a trial's whole configuration, with changes and a name of its own, to be trained as any other.

    Args:
        word: the sweep's folder or file.
        trial: its number.
        name: of the new run.
        changes: `key.path=value` on top.
        seed: of the sweep's seeds; None: the first.
        out: the file; None: `<name>.yaml` here.

    Raises:
        FileExistsError: the file is there.
        ValueError: the sweep has no such trial, or a change is wrong.
    """
    sweep = find_sweep(word)
    trials = {one.number: one for one in sweep.board().trials}
    if trial not in trials:
        raise ValueError(f"{sweep.folder} has no trial {trial}; it has {len(trials)}, numbered from 0")
    seed = sweep.spec.seeds[0] if seed is None else seed
    cfg = trial_config(sweep.spec, sweep.base, trials[trial].values, name, seed)
    cfg = load_config([], changes, cfg)
    path = out or Path(f"{name}.yaml")
    if path.exists():
        raise FileExistsError(f"{path} is there already; -o names another file")
    path.write_text(to_yaml(cfg), encoding="utf-8")
    return path


def export_best_command(word: str, folder: Path) -> str:
    """Write the best trial's policy as a Hugging Face folder, with the configuration that made it beside it.

    Raises:
        StorageError: no trial has a value and a checkpoint.
    """
    from flows.resume import export_command

    sweep = find_sweep(word)
    best = next((row for row in rows(sweep) if row.best and row.state in ("done", "paused")), None)
    if best is None or best.best is None:
        raise StorageError(f"no trial of {sweep.folder} has a value and a checkpoint yet")
    export_command(best.best, folder, False)
    run = Path(best.best.rpartition("@")[0])
    (folder / "grpoflow.yaml").write_bytes((run / "config.yaml").read_bytes())
    os.sync()
    return best.best
