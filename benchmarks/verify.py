"""What `grpoflow verify` costs: MB and samples a second, and whether memory grows with the number of steps.

Two real runs are made and verified: many small steps of the quickstart, and one step of long responses.
For memory, the quickstart's steps are linked again and again as later steps; these fail checks, for they are not the
steps that their folders say, and are read and computed like any other.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console

from flows.audit.verify import verify
from flows.config import load_config
from flows.recipes import prepare, recipe_file
from flows.train import run_training
from storage import Run, open_run
from tasks.config import RunConfig

STEPS, MANY, ROUNDS = 10, 100, 3
LONG, PROMPTS = 256, 16
"""Tokens of each response of the second run, and its prompts, with 8 samples each."""


def main() -> None:
    """Make the runs, verify them in turn, and print a table."""
    console = Console(file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        small, long = quickstart(Path(root), console), long_responses(Path(root), console)
        print("| run | samples | MB | checks | s | samples/s | MB/s |")
        print("|---|---|---|---|---|---|---|")
        for name, run in ((f"quickstart, {STEPS} steps", small), (f"1 step of {LONG} tokens a response", long)):
            for what, rescore in (("32 samples scored again", 32), ("all", None)):
                report_rate(name, what, run, rescore)
        print()
        print("| steps | peak resident memory, MB |")
        print("|---|---|")
        lengthen(small)
        for steps in (STEPS, MANY):
            print(f"| {steps} | {peak_of(small, steps):.0f} |")


def overrides(root: Path, steps: int) -> list[str]:
    """Nothing beside the run itself."""
    off = ["tracking.enabled=false", "orchestration.enabled=false", "trainer.val_before_train=false"]
    return [f"storage.root={root}", *off, f"trainer.total_training_steps={steps}"]


def quickstart(root: Path, console: Console) -> Run:
    """Some steps of the quickstart."""
    recipe = [recipe_file("quickstart")]
    cfg = prepare(recipe, load_config(recipe, overrides(root, STEPS)), console.print, None)
    return open_run(run_training(cfg, console).folder)


def long_responses(root: Path, console: Console) -> Run:
    """One step of a random model that never stops."""
    recipe = [recipe_file("quickstart")]
    first = prepare(recipe, load_config(recipe, overrides(root, 1)), console.print, None)
    model = root / "long"
    make_model(Path(first.actor_rollout_ref.model.path or ""), model)
    own = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={first.data.train_files[0]}",
        f"data.max_response_length={LONG}",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000",
        "trainer.experiment_name=long",
        "trainer.test_freq=-1",
    ]
    cfg: RunConfig = load_config(recipe, [*overrides(root, 1), *own])
    return open_run(run_training(cfg, console).folder)


def make_model(source: Path, folder: Path) -> None:
    """A random model with the quickstart's tokenizer and a longer context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = LONG + 64
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def report_rate(name: str, what: str, run: Run, rescore: int | None) -> None:
    """Verify a few times with libraries loaded, and print a line."""
    seconds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        report = verify(run, run.steps(), rescore=rescore)
        seconds.append(time.perf_counter() - started)
        assert not report.failed, report.failed
    taken, size = median(seconds[1:]), report.bytes / 1e6
    print(
        f"| {name} | {report.samples} | {size:.1f} | {what} | {taken:.2f} | {report.samples / taken:,.0f} "
        f"| {size / taken:.1f} |",
        flush=True,
    )


def lengthen(run: Run) -> None:
    """Link a run's steps again as later ones."""
    folder = run.root / "steps"
    for step in range(STEPS + 1, MANY + 1):
        shutil.copytree(folder / f"{(step - 1) % STEPS + 1:06d}", folder / f"{step:06d}", copy_function=os.link)


def peak_of(run: Run, steps: int) -> float:
    """Peak resident memory of a process that verifies so many steps, MB."""
    command = [sys.executable, "-m", "benchmarks.verify", str(run.root), str(steps)]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(said.stdout)


def measured(root: str, steps: str) -> float:
    """Verify in this process and return its peak, MB."""
    verify(open_run(root), range(1, int(steps) + 1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(measured(*sys.argv[1:]))
    else:
        main()
