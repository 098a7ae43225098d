"""One GRPO step: the stages in order. The first file to open.

    prompts -> generate -> { old_log_prob, ref_log_prob, reward } -> advantage -> update

Every arrow is a committed Arrow artifact; what is passed here are references. A stage whose artifact is there and was
made from the same things is not run again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import pyarrow as pa

from storage import Artifact, StorageError
from storage.artifacts import Manifest, read_manifest
from storage.durable import no_space
from storage.ledger import StepView
from storage.reuse import REUSED
from storage.schema import without_round
from tasks.advantage import advantage
from tasks.algorithms.sample_metrics import throughput_metrics, timing_metrics
from tasks.filter_groups import Call, calls_before, keep_groups, refuse_another_call, signal_groups
from tasks.generate import generate, generate_greedy, generate_validation
from tasks.log_prob import old_log_prob, ref_log_prob
from tasks.prompts import choose_candidates, choose_prompts, choose_validation_prompts
from tasks.reward import reward, reward_greedy, reward_validation
from tasks.stage import Step
from tasks.update import update
from tasks.validate import validation_metrics

if TYPE_CHECKING:
    from tasks.data import PreparedPrompts
    from tasks.rewards.pool import RewardPool
    from tasks.workers.group import WorkerGroup


@dataclass(frozen=True)
class Workers:
    """What stages work with, alive for the whole run."""

    group: WorkerGroup
    rewards: RewardPool
    train: PreparedPrompts
    val: PreparedPrompts | None


class Stages(Protocol):
    """How a stage function is called: plainly, or as a Prefect task; see flows/stages.py."""

    def run(self, stage: Callable[..., Artifact], *args: Any) -> Artifact:
        """Call a stage and wait for its artifact."""

    def start(self, stage: Callable[..., Artifact], *args: Any) -> Callable[[], Artifact]:
        """Begin a stage beside the ones that follow; calling the result waits for its artifact."""


def train_step(step: Step, workers: Workers, stages: Stages) -> dict[str, Artifact]:
    """Run one step, from policy k - 1 to policy k, and return its artifacts by name."""
    started = time.perf_counter()
    require_room(step)
    before = step.run.step(step.index - 1) if step.index > 1 else None
    made: list[Artifact] = []

    if step.cfg.algorithm.filter_groups.enable:
        drawn = calls_before(before.artifact("prompts") if before else None)
        calls = _calls_with_signal(step, workers, stages, drawn)
        made += [artifact for call in calls for artifact in (call.prompts, call.rollouts, call.rewards)]
        prompts, rollouts, rewards = (
            stages.run(keep_groups, step, name, calls, drawn) for name in ("prompts", "rollouts", "rewards")
        )
        scoring = _already(rewards)
    else:
        prompts = stages.run(choose_prompts, step, workers.train)
        rollouts = stages.run(generate, step, prompts, workers.group)
        scoring = stages.start(reward, step, prompts, rollouts, workers.rewards)
    try:
        greedy = _greedy_baseline(step, workers, stages, prompts) if step.cfg.estimator_needs("greedy_score") else None
        old = stages.run(old_log_prob, step, prompts, rollouts, workers.group)
        ref = stages.run(ref_log_prob, step, prompts, rollouts, workers.group) if step.cfg.needs_ref else None
        rewards = scoring()
    except BaseException:
        workers.rewards.stop()
        raise
    previous = before.artifact("advantages") if before else None
    advantages = stages.run(advantage, step, rollouts, rewards, old, ref, previous, greedy)
    ref_in_loss = ref if step.cfg.actor_rollout_ref.actor.use_kl_loss else None
    updates = stages.run(update, step, prompts, rollouts, old, ref_in_loss, advantages, workers.group)

    made += [prompts, rollouts, *(greedy or ()), old, *([ref] if ref else []), rewards, advantages, updates]
    artifacts = {artifact.stage: artifact for artifact in made}
    metrics = step_metrics(step, artifacts, time.perf_counter() - started)
    if step.validates:
        metrics.update(_validate(step, workers, stages, artifacts))
    _finish(step, artifacts, metrics)
    return artifacts


def require_room(step: Step) -> None:
    """Refuse to begin a step whose artifacts the disk has no room for: the samples would be lost.

    The measure is what the step before took; of the first step, its token columns at full length.

    Raises:
        StorageError: with bytes needed and free.
    """
    cfg = step.cfg
    before = _bytes_of(step.run.step(step.index - 1)) if step.index > 1 else 0
    tokens = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n * cfg.response_length
    needed = (before or tokens * BYTES_PER_TOKEN) - _bytes_of(step.run.step(step.index))
    if needed > shutil.disk_usage(step.run.root).free:
        raise StorageError(no_space(step.run.root, f"step {step.index}", needed))


BYTES_PER_TOKEN = 32
"""About what the token columns of a step's artifacts take together."""


def _bytes_of(view: StepView) -> int:
    """Bytes of a step's artifacts; damaged ones are not counted."""
    size = 0
    for stage in view.stages():
        with suppress(StorageError):
            manifest = view.manifest(stage)
            size += manifest.bytes if manifest else 0
    return size


def _calls_with_signal(step: Step, workers: Workers, stages: Stages, drawn: int) -> list[Call]:
    """Generate and score until `data.train_batch_size` groups carry a signal (dynamic sampling).

    Raises:
        StageError: `algorithm.filter_groups.max_num_gen_batches` calls do not give as many.
    """
    calls: list[Call] = []
    kept: list[str] = []
    while len(kept) < step.cfg.data.train_batch_size:
        refuse_another_call(step, calls, kept, workers.train.table.num_rows)
        number = len(calls) + 1
        prompts = stages.run(choose_candidates, step, workers.train, number, drawn)
        rollouts = stages.run(generate, step, prompts, workers.group, number)
        calls.append(Call(prompts, rollouts, stages.run(reward, step, prompts, rollouts, workers.rewards, number)))
        kept = signal_groups(step.cfg, calls)
    return calls


def _greedy_baseline(step: Step, workers: Workers, stages: Stages, prompts: Artifact) -> tuple[Artifact, Artifact]:
    """The greedy response to each prompt, and its score."""
    rollouts = stages.run(generate_greedy, step, prompts, workers.group)
    return rollouts, stages.run(reward_greedy, step, prompts, rollouts, workers.rewards)


def _already(artifact: Artifact) -> Callable[[], Artifact]:
    return lambda: artifact


def validate_policy(step: Step, workers: Workers, stages: Stages) -> dict[str, Artifact]:
    """Validate the policy as it is, before the first step or without training, and return the artifacts by name."""
    artifacts: dict[str, Artifact] = {}
    metrics = _validate(step, workers, stages, artifacts)
    before = step.run.step(step.index).record or {}
    known = before.get("artifacts", {})
    if all(known.get(stage) == artifact.digest for stage, artifact in artifacts.items()):
        # It was validated before, from the same things: its numbers stand, and MLflow may have them.
        return artifacts
    trained = before.get("metrics", {"training/global_step": float(step.index)})
    _finish(step, artifacts, {**trained, **metrics}, before.get("artifacts", {}))
    return artifacts


def _validate(step: Step, workers: Workers, stages: Stages, artifacts: dict[str, Artifact]) -> dict[str, float | None]:
    started = time.perf_counter()
    prompts = stages.run(choose_validation_prompts, step, workers.val)
    rollouts = stages.run(generate_validation, step, prompts, workers.group)
    rewards = stages.run(reward_validation, step, prompts, rollouts, workers.rewards)
    artifacts.update({artifact.stage: artifact for artifact in (prompts, rollouts, rewards)})
    metrics: dict[str, float | None] = {**validation_metrics(prompts, rollouts, rewards, step.cfg)}
    if taken := taken_over({name: read_manifest(artifact.folder) for name, artifact in artifacts.items()}):
        return {**metrics, **{name: value for name, value in taken.items() if name.startswith("reused/val_")}}
    return {**metrics, "timing_s/testing": time.perf_counter() - started}


def _finish(
    step: Step, artifacts: dict[str, Artifact], metrics: dict[str, float | None], known: dict[str, str] | None = None
) -> None:
    digests = {**(known or {}), **{stage: artifact.digest for stage, artifact in artifacts.items()}}
    step.run.finish_step(step.index, {"metrics": metrics, "artifacts": digests})


_TIMERS = {
    "prompts": "prompts",
    "rollouts": "gen",
    "greedy_rollouts": "gen_max",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref",
    "rewards": "reward",
    "greedy_rewards": "reward",
    "advantages": "adv",
    "updates": "update_actor",
}
"""verl's name of each stage's timer."""

_BY_RESPONSE_TOKEN = {"gen", "gen_max"}


def step_metrics(step: Step, artifacts: dict[str, Artifact], seconds: float) -> dict[str, float | None]:
    """The step's numbers under verl's names: what its stages measured, their times and the shapes of their artifacts.

    Several generate calls of a step add up in its timers; their own metrics stay in their manifests. A stage whose
    artifact was taken over from another run has no time here, and a step with such a stage no throughput.

    Args:
        step: the step.
        artifacts: its artifacts, by name.
        seconds: duration of the whole step.
    """
    metrics: dict[str, float | None] = {"training/global_step": float(step.index)}
    manifests = {stage: read_manifest(artifact.folder) for stage, artifact in artifacts.items()}
    response_tokens = manifests["rollouts"].shapes["tokens"]
    tokens = manifests["old_log_probs"].shapes["tokens"]
    timers: dict[str, float] = {}
    for stage, manifest in manifests.items():
        whole = without_round(stage)
        timer = _TIMERS.get(whole, whole)
        if REUSED not in manifest.notes:
            timers[timer] = timers.get(timer, 0.0) + manifest.seconds
        if whole == stage and stage != "greedy_rewards":
            metrics.update(manifest.metrics)
            metrics.update({f"shape/{stage}/{name}": float(value) for name, value in manifest.shapes.items()})
    worked = {timer: response_tokens if timer in _BY_RESPONSE_TOKEN else tokens for timer in timers}
    worked.pop("prompts", None)
    taken = taken_over(manifests)
    devices = step.cfg.trainer.n_gpus_per_node * step.cfg.trainer.nnodes
    metrics.update(timing_metrics({**timers, "step": seconds}, worked))
    metrics.update({**throughput_metrics(tokens, seconds, devices), **taken})
    if taken:
        del metrics["perf/throughput"]
    metrics["memory/resident_bytes"] = float(psutil.Process().memory_info().rss)
    metrics["memory/arrow_bytes"] = float(pa.total_allocated_bytes())
    return metrics


def taken_over(manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """`reused/<artifact>` = 1 for each artifact that another run has computed."""
    return {f"reused/{stage}": 1.0 for stage, manifest in manifests.items() if REUSED in manifest.notes}
