"""Rebuild the policy of a run: the newest intact checkpoint, then the stored updates after it, made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from storage import Artifact, RunWriter, StorageError
from storage.checkpoints import intact_checkpoints
from tasks.config import RunConfig
from tasks.stage import Step
from tasks.update import update

if TYPE_CHECKING:
    from tasks.workers.policy import PolicyWorker


def recover(run: RunWriter, cfg: RunConfig, worker: PolicyWorker, say: Callable[[str], None]) -> int:
    """Bring the worker to the policy after the last finished step, and return that step's number.

    No token is generated and no response scored: an update needs only the batches on disk.

    Raises:
        StorageError: a stored batch is damaged or missing.
        StageError: an update made again gives other weights than it gave before.
    """
    last = last_finished_step(run)
    for checkpoint in intact_checkpoints(run.root, skipped=say):
        if checkpoint.step <= last:
            worker.load(checkpoint.folder)
            worker.policy_version = checkpoint.step
            break
    first = worker.policy_version
    for index in range(first + 1, last + 1):
        replay(run, cfg, worker, index)
    if last:
        origin = f"checkpoint {first}" if first else "the initial weights"
        which = f"updates {first + 1} to {last}" if last > first + 1 else f"update {last}"
        repeated = f", {which} made again from the stored batches" if last > first else ""
        say(f"found {last} finished steps: {origin}{repeated}")
    return last


def replay(run: RunWriter, cfg: RunConfig, worker: PolicyWorker, index: int) -> None:
    """Make one stored update again."""
    view = run.step(index)
    found = {stage: view.artifact(stage) for stage in ("prompts", "rollouts", "old_log_probs", "advantages", "updates")}
    missing = [stage for stage, artifact in found.items() if artifact is None]
    if missing:
        raise StorageError(
            f"step {index} of {run.root} is finished but has no {', '.join(missing)}: policy {index} cannot be rebuilt "
            "from it. Restore the missing folder, or a checkpoint of this step or a later one."
        )
    inputs: dict[str, Artifact] = {stage: artifact for stage, artifact in found.items() if artifact is not None}
    update(
        Step(index, run, cfg),
        inputs["prompts"],
        inputs["rollouts"],
        inputs["old_log_probs"],
        view.artifact("ref_log_probs") if cfg.actor_rollout_ref.actor.use_kl_loss else None,
        inputs["advantages"],
        worker,
        recorded=inputs["updates"],
    )


def last_finished_step(run: RunWriter) -> int:
    """The last step up to which all steps are finished; 0: none is."""
    finished = set(run.finished_steps())
    last = 0
    while last + 1 in finished:
        last += 1
    return last
