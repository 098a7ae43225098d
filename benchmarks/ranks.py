"""One rank against two on two cores: seconds of each stage, and what a call through Ray costs.

The same run, 60 prompts x 12 samples on the quickstart's model, is trained on one device and on two, in turn, one
thread per rank. On one device the engine samples from the resident weights; on two, weights are sharded, gathered for
every forward pass, and handed over to an engine on each rank after every update.
"""

import os
import sys
import tempfile
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from flows.config import load_config
from flows.plan_view import plan_of
from flows.ranks import worker_group
from flows.recipes import prepare, recipe_file
from flows.train import load_data, run_training
from storage import open_run
from tasks.config import RunConfig

STEPS, ROUNDS, CALLS = 8, 2, 200
WARM = 2
"""First steps that are left out: they fill caches."""
TIMERS = ("gen", "old_log_prob", "ref", "update_actor", "step")
BATCH = (
    "data.train_batch_size=60",
    "actor_rollout_ref.rollout.n=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=60",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    f"trainer.total_training_steps={STEPS}",
    "tracking.enabled=false",
    "orchestration.enabled=false",
)


def main() -> None:
    """Train in turn, call, and print tables."""
    console = Console(file=sys.stderr)
    seconds: dict[int, dict[str, list[float]]] = {ranks: {name: [] for name in TIMERS} for ranks in (1, 2)}
    with tempfile.TemporaryDirectory() as root:
        for number in range(ROUNDS):
            for ranks, timers in seconds.items():
                cfg = configuration(root, ranks, f"round-{number}-on-{ranks}", console)
                for metrics in trained(cfg, console):
                    for name in TIMERS:
                        timers[name].append(metrics[f"timing_s/{name}"])
        call_s = call_seconds(configuration(root, 2, "calls", console))
    report(seconds, call_s)


def configuration(root: str, ranks: int, name: str, console: Console) -> RunConfig:
    """The run on so many ranks."""
    recipe = [recipe_file("quickstart")]
    own = [f"storage.root={root}", f"trainer.experiment_name={name}", f"trainer.n_gpus_per_node={ranks}"]
    return prepare(recipe, load_config(recipe, [*BATCH, *own]), console.print, None)


def trained(cfg: RunConfig, console: Console) -> list[dict[str, float]]:
    """Metrics of the run's steps, without the first ones."""
    run = open_run(run_training(cfg, console).folder)
    return [run.step(index).record["metrics"] for index in range(1 + WARM, STEPS + 1)]


def call_seconds(cfg: RunConfig) -> float:
    """Median time of asking two ranks for their policy's version."""
    data = load_data(cfg)
    with worker_group(cfg, plan_of(cfg, train_prompts=data.train.table.num_rows), data.tokenizer) as group:
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            _ = group.policy_version
            times.append(time.perf_counter() - start)
    return median(times)


def report(seconds: dict[int, dict[str, list[float]]], call_s: float) -> None:
    """Print Markdown tables."""
    print("| stage | one rank, s | two ranks, s | ratio |")
    print("|---|---|---|---|")
    for name in TIMERS:
        one, two = (median(seconds[ranks][name]) for ranks in (1, 2))
        print(f"| {name} | {one:.3f} | {two:.3f} | {one / two:.2f} x |")
    print(f"\nAsking two ranks through Ray for their policy's version: {1000 * call_s:.1f} ms (median of {CALLS}).")


if __name__ == "__main__":
    main()
