"""What a kill costs: seconds to rebuild a policy from stored batches, and work lost, here and with checkpoints alone.

A run is made, its steps and stages are timed, and after each step a second policy makes the same update again from the
stored batch, as a resumed run does. What a kill loses is computed from those times for moments drawn evenly over the
run. Here: the stages in flight, and the time of making the updates since the last checkpoint again. With checkpoints
alone: everything since the last checkpoint, which has to be generated, scored and trained again. That second figure is
a simulation over the same run; no other program is measured. Starting the process and loading the model is the same for
both and is given apart.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from flows.config import load_config
from flows.plan_view import plan_of
from flows.progress import Progress
from flows.recipes import prepare, recipe_file
from flows.recover import replay
from flows.run_folder import open_run_for_training
from flows.stages import stage_runner
from flows.tracking import Tracker
from flows.train import Loop, Outcome, describe, load_data, open_workers
from storage import Run
from tasks.config import RunConfig
from tasks.workers.group import LocalGroup
from tasks.workers.rank import Role, open_rank

STEPS, ROUNDS, MOMENTS = 20, 3, 1000
SAVE_FREQS = (5, 10, 20)
"""A checkpoint every so many steps; the steps of the run are cycled through as if it went on."""
WARM = 3
"""First steps that are left out: they fill caches."""


@dataclass(frozen=True)
class StepTimes:
    """One step.

    Attributes:
        seconds: its duration.
        stages: start and end of each stage, s after the step's start.
        replay_s: time in which its update is made again.
    """

    seconds: float
    stages: tuple[tuple[float, float], ...]
    replay_s: float


def main() -> None:
    """Train and replay in turn, draw kills, and print tables."""
    console = Console(file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        off = ["tracking.enabled=false", "orchestration.enabled=false", f"trainer.total_training_steps={STEPS}"]
        recipe = [recipe_file("quickstart")]
        cfg = load_config(recipe, [f"storage.root={root}", *off, *sys.argv[1:]])
        cfg = prepare(recipe, cfg, console.print, None)
        report(timed_steps(cfg, console)[WARM:], *start_up(cfg))


def timed_steps(cfg: RunConfig, console: Console) -> list[StepTimes]:
    """Take the steps, each followed by the same update made again by a second policy."""
    times = []
    with ExitStack() as stack:
        progress = Progress(console, STEPS)
        data = load_data(cfg)
        plan = plan_of(cfg, train_prompts=data.train.table.num_rows)
        workers = stack.enter_context(open_workers(cfg, plan, data))
        run = stack.enter_context(open_run_for_training(cfg, progress.say))
        tracker = stack.enter_context(Tracker(run, cfg))
        runner = stack.enter_context(stage_runner(None, run.run_id))
        describe(run, cfg, plan, data, tracker)
        twin = LocalGroup(open_rank(cfg, None, data.tokenizer, role=Role.ACTOR, total_steps=plan.total_steps or 1))
        loop, outcome = Loop(run, cfg, plan, workers, runner, tracker, progress), Outcome(run.root)
        for index in range(1, STEPS + 1):
            start = time.perf_counter()
            loop.step(index, outcome, validates=False)
            middle = time.perf_counter()
            replay(run, twin, index)
            times.append(StepTimes(middle - start, stage_times(run, index), time.perf_counter() - middle))
        assert twin.weights_digest() == workers.group.weights_digest(), "a replay gives the same weights"
    return times


def stage_times(run: Run, index: int) -> tuple[tuple[float, float], ...]:
    """Start and end of each stage of a step, s after the first one's start."""
    view = run.step(index)
    manifests = [manifest for stage in view.stages() if (manifest := view.manifest(stage)) is not None]
    first = min(manifest.started_at for manifest in manifests)
    moments = [(manifest.started_at - first, manifest.committed_at - first) for manifest in manifests]
    return tuple((start.total_seconds(), end.total_seconds()) for start, end in moments)


def start_up(cfg: RunConfig) -> tuple[float, float, float]:
    """Seconds to load data, workers and model; to write a checkpoint; to load it. Medians."""
    load, save, restore = [], [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        data = load_data(cfg)
        with open_workers(cfg, plan_of(cfg, train_prompts=data.train.table.num_rows), data) as workers:
            load.append(time.perf_counter() - started)
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                workers.group.save(Path(folder))
                save.append(time.perf_counter() - started)
                started = time.perf_counter()
                workers.group.load(Path(folder))
                restore.append(time.perf_counter() - started)
    return median(load), median(save), median(restore)


def lost(times: Sequence[StepTimes], save_freq: int, draw: random.Random) -> tuple[float, float]:
    """Seconds that a kill at one random moment costs: here, and with checkpoints alone."""
    since = draw.randrange(save_freq)
    first = draw.randrange(len(times))
    done = [times[(first + i) % len(times)] for i in range(since)]
    # A long step is hit more often than a short one.
    step = draw.choices(times, weights=[each.seconds for each in times])[0]
    moment = draw.uniform(0, step.seconds)
    in_flight = sum(moment - start for start, end in step.stages if start <= moment < end)
    return sum(each.replay_s for each in done) + in_flight, sum(each.seconds for each in done) + moment


def report(times: Sequence[StepTimes], load_s: float, save_s: float, restore_s: float) -> None:
    """Print Markdown tables."""
    step_s, replay_s = median(each.seconds for each in times), median(each.replay_s for each in times)
    ratio = median(each.replay_s / each.seconds for each in times)
    print("| | s | x step |")
    print("|---|---|---|")
    for name, seconds, share in (
        ("step", step_s, 1.0),
        ("its update made again from the stored batch", replay_s, ratio),
        ("checkpoint written", save_s, save_s / step_s),
        ("checkpoint loaded", restore_s, restore_s / step_s),
        ("data, reward processes and model loaded (every start)", load_s, load_s / step_s),
    ):
        print(f"| {name} | {seconds:.3f} | {share:.2f} |")
    print()
    print(
        "| checkpoint every | lost here, s | lost with checkpoints alone, s | ratio | worst here, s | worst alone, s |"
    )
    print("|---|---|---|---|---|---|")
    for save_freq in SAVE_FREQS:
        draw = random.Random(0)
        here, alone = zip(*(lost(times, save_freq, draw) for _ in range(MOMENTS)), strict=True)
        here_s, alone_s = median(here), median(alone)
        print(
            f"| {save_freq} steps | {here_s:.2f} | {alone_s:.2f} | {alone_s / here_s:.1f} x "
            f"| {max(here):.2f} | {max(alone):.2f} |"
        )


if __name__ == "__main__":
    main()
