"""What a kill costs: seconds to rebuild a policy from stored batches, and work lost, here and with checkpoints alone.

A run is made and its steps, stages and checkpoints are timed; then every update is made again from its stored batch, as
a resumed run does. What a kill loses is computed from those times for moments drawn evenly over the run: here, the
stages in flight and the time of replaying the updates since the last checkpoint; with checkpoints alone, everything
since the last checkpoint, which has to be generated, scored and trained again. That second figure is a simulation over
the same run: no other program is measured. Starting the process and loading the model is the same for both and is given
apart.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from rich.console import Console

from flows.config import load_config
from flows.plan_view import plan_of
from flows.recipes import prepare, recipe_file
from flows.recover import planned_steps, replay
from flows.train import load_data, open_workers, run_training
from storage import Run, RunWriter, open_run
from tasks.config import RunConfig
from tasks.workers.policy import PolicyWorker

STEPS, ROUNDS, MOMENTS = 20, 3, 1000
SAVE_FREQS = (5, 10, 20)
"""Checkpoint every so many steps; `STEPS` of the run are cycled through as if it went on."""
WARM = 3
"""Steps that are left out: the first ones fill caches."""


@dataclass(frozen=True)
class StepTimes:
    """One step.

    Attributes:
        seconds: from its first stage's start to the next step's.
        stages: start and end of each stage, s after the step's start.
        replay_s: time in which its update is made again.
    """

    seconds: float
    stages: tuple[tuple[float, float], ...]
    replay_s: float


def main() -> None:
    """Train, replay, draw kills, and print tables."""
    console = Console(file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        off = ["tracking.enabled=false", "orchestration.enabled=false", "trainer.val_before_train=false"]
        length = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.test_freq=-1"]
        recipe = [recipe_file("quickstart")]
        cfg = load_config(recipe, [f"storage.root={root}", *off, *length, *sys.argv[1:]])
        cfg = prepare(recipe, cfg, console.print, None)
        run = open_run(run_training(cfg, console).folder)
        replays = replay_all(run, cfg)
        times = step_times(run, replays)[WARM:]
        report(times, *start_up(cfg, run))


def replay_all(run: Run, cfg: RunConfig) -> list[float]:
    """Seconds in which each update is made again, medians of several rounds from the first weights."""
    rounds = []
    with RunWriter(run.root) as writer:
        for _ in range(ROUNDS):
            worker = PolicyWorker(cfg, total_steps=planned_steps(run, 1) or 1, with_reference=False)
            seconds = []
            for index in range(1, STEPS + 1):
                started = time.perf_counter()
                replay(writer, worker, index)
                seconds.append(time.perf_counter() - started)
            rounds.append(seconds)
    return [median(values) for values in zip(*rounds, strict=True)]


def step_times(run: Run, replays: Sequence[float]) -> list[StepTimes]:
    """Times of every step but the last, whose end is not known to its start."""
    spans = []
    for index in range(1, STEPS + 1):
        view = run.step(index)
        manifests = [manifest for stage in view.stages() if (manifest := view.manifest(stage)) is not None]
        spans.append([(manifest.started_at, manifest.committed_at) for manifest in manifests])
    starts = [min(start for start, _ in stages) for stages in spans]
    times = []
    for i in range(STEPS - 1):
        stages = tuple((_after(starts[i], start), _after(starts[i], end)) for start, end in spans[i])
        times.append(StepTimes(_after(starts[i], starts[i + 1]), stages, replays[i]))
    return times


def _after(begin: datetime, moment: datetime) -> float:
    return (moment - begin).total_seconds()


def start_up(cfg: RunConfig, run: Run) -> tuple[float, float, float]:
    """Seconds to load data, workers and model; to write a checkpoint; to load it. Medians."""
    load, save, restore = [], [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        data = load_data(cfg)
        with open_workers(cfg, plan_of(cfg, train_prompts=data.train.table.num_rows), data) as workers:
            load.append(time.perf_counter() - started)
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                workers.policy.save(Path(folder))
                save.append(time.perf_counter() - started)
                started = time.perf_counter()
                workers.policy.load(Path(folder))
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
