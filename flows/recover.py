"""Rebuild the policy of a run: the newest intact checkpoint, then the stored updates after it, made again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from flows.run_folder import config_of
from storage import Artifact, Run, RunWriter, StorageError
from storage.checkpoints import Checkpoint, intact_checkpoints
from storage.durable import read_json
from storage.retention import last_finished_step
from tasks.config import RunConfig
from tasks.stage import Step
from tasks.update import update

if TYPE_CHECKING:
    from tasks.workers.group import WorkerGroup


def recover(run: RunWriter, cfg: RunConfig, group: WorkerGroup, say: Callable[[str], None], *, total_steps: int) -> int:
    """Bring the ranks to the policy after the last finished step, and return that step's number.

    No token is generated and no response scored: an update needs only the batches on disk.

    Args:
        run: the run.
        cfg: its configuration from now on.
        group: holds the initial weights, or an earlier policy of the run.
        say: told what was found and done.
        total_steps: of the plan, on which learning rates may depend.

    Raises:
        StorageError: a stored batch is damaged or missing.
        StageError: an update made again gives other weights than it gave before.
    """
    last = last_finished_step(run)
    told = rebuild(run, group, last, say)
    group.follow(cfg, total_steps=total_steps)
    if last:
        say(f"found {last} finished steps: {told}")
    return last


def rebuild(run: RunWriter, group: WorkerGroup, step: int, say: Callable[[str], None]) -> str:
    """Bring the ranks to the policy after a finished step, and return in words how.

    Each update is made again under the configuration that it was made under; its weights, loss and gradient norm must
    be those that were recorded.

    Raises:
        StorageError, StageError: as `recover`.
    """
    if group.policy_version == step:
        return f"the policy is version {step}"
    started = time.monotonic()
    checkpoint = newest_checkpoint(run, step, say)
    if checkpoint is not None:
        group.load(checkpoint.folder)
    first = group.policy_version
    for index in range(first + 1, step + 1):
        replay(run, group, index)
    origin = f"checkpoint {first}" if first else "the initial weights"
    if step == first:
        return origin
    which = f"update {step}" if step == first + 1 else f"updates {first + 1} to {step}"
    rounded = _recorded_digest(run, step) != group.weights_digest()
    but = ", in other places: equal up to rounding" if rounded else ""
    return f"{origin}, {which} made again from the stored batches in {time.monotonic() - started:.0f} s{but}"


def _recorded_digest(run: Run, step: int) -> str:
    digest: str = run.step(step).table("updates", ["weights_digest"])["weights_digest"].to_pylist()[-1]
    return digest


def newest_checkpoint(run: Run, step: int, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint up to a step, of a history that the run's lineage sees."""
    seen = seen_checkpoints(run)
    upto = intact_checkpoints(run.root, skipped=say, seen=lambda one: one.step <= step and seen(one))
    return next(upto, None)


def seen_checkpoints(run: Run) -> Callable[[Checkpoint], bool]:
    """Whether a checkpoint belongs to what the run's lineage sees."""
    return lambda checkpoint: checkpoint.lineage == run.lineage_of(checkpoint.step)


def replay(run: RunWriter, group: WorkerGroup, index: int) -> None:
    """Make one stored update again.

    Raises:
        StorageError: its batch is damaged or missing; with the way out.
    """
    try:
        _replay(run, group, index)
    except StorageError as error:
        raise StorageError(
            f"policy {index} cannot be rebuilt from step {index}: {str(error).rstrip('.')}. Restore it from a copy, or "
            f"make the step anew: grpoflow resume {run.root} --from-step {index}"
        ) from error


def _replay(run: RunWriter, group: WorkerGroup, index: int) -> None:
    view = run.step(index)
    lineage = run.lineage_of(index)
    cfg = config_of(run, lineage)
    needed = ["prompts", "rollouts", "old_log_probs", "advantages", "updates"]
    needed += ["ref_log_probs"] if cfg.actor_rollout_ref.actor.use_kl_loss else []
    found = {stage: view.artifact(stage) for stage in needed}
    missing = [stage for stage, artifact in found.items() if artifact is None]
    if missing:
        raise StorageError(f"step {index} of {run.root} is finished but has no {', '.join(missing)}")
    inputs: dict[str, Artifact] = {stage: artifact for stage, artifact in found.items() if artifact is not None}
    group.follow(cfg, total_steps=planned_steps(run, lineage))
    update(
        Step(index, run, cfg),
        inputs["prompts"],
        inputs["rollouts"],
        inputs["old_log_probs"],
        inputs.get("ref_log_probs"),
        inputs["advantages"],
        group,
        recorded=inputs["updates"],
    )


def planned_steps(run: Run, lineage: int) -> int | None:
    """Steps of the plan under which a lineage was trained, on which its learning rates may depend; None: unknown."""
    path = run.root / run.lineages[lineage].file_name("plan.json")
    try:
        steps: int | None = read_json(path)["total_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps
