"""Runs taken up again: `resume`, from an earlier step too; `fork`, another run's policy as a start; `export`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.config import load_config
from flows.recover import last_finished_step, newest_checkpoint, planned_steps, rebuild
from flows.run_folder import GoBack, config_of, run_folder
from flows.train import train_and_tell
from storage import Run, RunWriter, StorageError, open_run
from storage.prepared import commit_prepared, find_prepared, new_folder, sole_maker
from tasks.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tasks.workers.policy import PolicyWorker

_SOURCE = re.compile(r"(?P<path>.+?)(?:@(?P<step>[0-9]+))?")


def resume_command(path: Path, overrides: Sequence[str], from_step: int | None, from_stage: str | None) -> int:
    """Go on with a run under its own configuration, or from an earlier step in a new lineage; return the exit code."""
    if from_stage is not None and from_step is None:
        raise ValueError("--from-stage needs --from-step: which step's stage?")
    run = open_run(path)
    cfg = load_config([], [*overrides, f"trainer.default_local_dir={path}"], base=config_of(run, run.lineage))
    return train_and_tell(cfg, back=None if from_step is None else GoBack(from_step, from_stage))


def fork_command(source: str, name: str, overrides: Sequence[str]) -> int:
    """Train a new run that begins with another run's policy; return the exit code.

    Args:
        source: `RUN` or `RUN@STEP`.
        name: `trainer.experiment_name` of the new run.
        overrides: what else differs from the other run's configuration.

    Raises:
        StorageError: there is no such policy, or the new run's folder is taken.
    """
    run, step = parse_source(source)
    base = config_of(run, run.lineage_of(step))
    root = Path(base.storage.root)
    begins_with = root / "origins" / f"{run.run_id}-{run.lineage_of(step)}-{step:06d}"
    cfg = load_config(
        [],
        [
            f"trainer.experiment_name={name}",
            "trainer.default_local_dir=null",
            f"actor_rollout_ref.model.path={begins_with}",
            "actor_rollout_ref.model.lora_adapter_path=null",
            *overrides,
        ],
        base=base,
    )
    if (run_folder(cfg) / "run.json").exists():
        raise StorageError(
            f"{run_folder(cfg)} is a run already. Go on with it by `grpoflow resume`, or give another name."
        )
    say = _teller(Console())
    origin = {"run_id": run.run_id, "step": step, "lineage": run.lineage_of(step)}
    with sole_maker(begins_with):
        key = f"{run.run_id}@{step}"
        made = find_prepared(begins_with, key, say)
        if made is None:
            with new_folder(begins_with, f"policy {step} of {run.run_id}") as aside:
                digest = export_policy_of(run, step, aside, say)
                made = commit_prepared(aside, begins_with, key, {**origin, "weights_digest": digest})
    return train_and_tell(cfg, origin={**origin, "weights_digest": made["weights_digest"]})


def export_command(source: str, folder: Path, adapter: bool) -> int:
    """Write a run's policy as a Hugging Face folder and return the exit code.

    Args:
        source: `RUN` or `RUN@STEP`.
        folder: a folder that is not there yet.
        adapter: of a LoRA run, the adapter alone.
    """
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty. Name another folder.")
    run, step = parse_source(source)
    console = Console()
    digest = export_policy_of(run, step, folder, _teller(console), adapter=adapter)
    console.print(Text(f"policy {step} of {run.run_id} (weights {digest[:12]}) is in {folder}"), soft_wrap=True)
    return 0


def parse_source(source: str) -> tuple[Run, int]:
    """The run and the step of `RUN@STEP`; without a step its last finished one.

    Raises:
        StorageError: there is no such run, or it has no such step.
    """
    match = _SOURCE.fullmatch(source)
    assert match is not None
    run = open_run(match["path"])
    last = last_finished_step(run)
    step = last if match["step"] is None else int(match["step"])
    if not 0 <= step <= last:
        raise StorageError(f"{run.root} has no policy {step}; its policies are 0 to {last}")
    return run, step


def export_policy_of(run: Run, step: int, folder: Path, say: Callable[[str], None], *, adapter: bool = False) -> str:
    """Rebuild a run's policy and write it as a Hugging Face folder; return the digest of its weights."""
    from tasks.workers.export import export_policy

    with policy_at(run, step, say) as worker:
        export_policy(worker, load_tokenizer(worker.cfg.actor_rollout_ref.model), folder, adapter=adapter)
        return worker.weights_digest()


@contextmanager
def policy_at(run: Run, step: int, say: Callable[[str], None]) -> Iterator[PolicyWorker]:
    """The policy of a run after a step; a live run may be read where a checkpoint of that step is there."""
    from tasks.workers.policy import PolicyWorker

    lineage = run.lineage_of(step)
    cfg = config_of(run, lineage)
    worker = PolicyWorker(cfg, total_steps=planned_steps(run, lineage) or 1, with_reference=False)
    checkpoint = newest_checkpoint(run, step, say)
    if step and (checkpoint is None or checkpoint.step < step):
        with RunWriter(run.root) as writer:
            say(rebuild(writer, worker, step, say))
    elif checkpoint is not None:
        worker.load(checkpoint.folder)
        worker.policy_version = step
    yield worker


def _teller(console: Console) -> Callable[[str], None]:
    return lambda message: console.print(Text(message), soft_wrap=True)
