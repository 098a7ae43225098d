"""One GRPO step: the stages in order. The first file to open.

    prompts -> generate -> { old_log_prob, ref_log_prob, reward } -> advantage -> update

Every arrow is a committed Arrow artifact; what is passed here are references. A stage whose artifact is there and was
made from the same things is not run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from storage import Artifact
from storage.artifacts import read_manifest
from tasks.advantage import advantage
from tasks.generate import generate, generate_validation
from tasks.log_prob import old_log_prob, ref_log_prob
from tasks.prompts import choose_prompts, choose_validation_prompts
from tasks.reward import reward, reward_validation
from tasks.stage import Step
from tasks.update import update
from tasks.validate import validation_metrics

if TYPE_CHECKING:
    from tasks.data import PreparedPrompts
    from tasks.engines.protocol import RolloutEngine
    from tasks.generate import Tokenizer
    from tasks.rewards.pool import RewardPool
    from tasks.workers.policy import PolicyWorker


@dataclass(frozen=True)
class Workers:
    """What stages work with, alive for the whole run."""

    policy: PolicyWorker
    engine: RolloutEngine
    tokenizer: Tokenizer
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
    previous = step.run.step(step.index - 1).artifact("advantages") if step.index > 1 else None

    prompts = stages.run(choose_prompts, step, workers.train)
    rollouts = stages.run(generate, step, prompts, workers.engine, workers.tokenizer)
    scoring = stages.start(reward, step, prompts, rollouts, workers.rewards)
    try:
        old = stages.run(old_log_prob, step, prompts, rollouts, workers.policy)
        ref = stages.run(ref_log_prob, step, prompts, rollouts, workers.policy) if step.cfg.needs_ref else None
        rewards = scoring()
    except BaseException:
        workers.rewards.stop()
        raise
    advantages = stages.run(advantage, step, rollouts, rewards, old, ref, previous)
    ref_in_loss = ref if step.cfg.actor_rollout_ref.actor.use_kl_loss else None
    updates = stages.run(update, step, prompts, rollouts, old, ref_in_loss, advantages, workers.policy)

    made = [prompts, rollouts, old, *([ref] if ref else []), rewards, advantages, updates]
    artifacts = {artifact.stage: artifact for artifact in made}
    metrics = step_metrics(step, artifacts, time.perf_counter() - started)
    if step.validates:
        metrics.update(_validate(step, workers, stages, artifacts))
    _finish(step, artifacts, metrics)
    return artifacts


def validate_policy(step: Step, workers: Workers, stages: Stages) -> dict[str, Artifact]:
    """Validate the policy as it is, before the first step or without training, and return the artifacts by name."""
    artifacts: dict[str, Artifact] = {}
    metrics = _validate(step, workers, stages, artifacts)
    before = step.run.step(step.index).record or {}
    trained = before.get("metrics", {"training/global_step": float(step.index)})
    _finish(step, artifacts, {**trained, **metrics}, before.get("artifacts", {}))
    return artifacts


def _validate(step: Step, workers: Workers, stages: Stages, artifacts: dict[str, Artifact]) -> dict[str, float | None]:
    started = time.perf_counter()
    prompts = stages.run(choose_validation_prompts, step, workers.val)
    rollouts = stages.run(generate_validation, step, prompts, workers.engine, workers.tokenizer)
    rewards = stages.run(reward_validation, step, prompts, rollouts, workers.rewards)
    artifacts.update({artifact.stage: artifact for artifact in (prompts, rollouts, rewards)})
    metrics = validation_metrics(prompts, rollouts, rewards, step.cfg)
    return {**metrics, "timing_s/testing": time.perf_counter() - started}


def _finish(
    step: Step, artifacts: dict[str, Artifact], metrics: dict[str, float | None], known: dict[str, str] | None = None
) -> None:
    digests = {**(known or {}), **{stage: artifact.digest for stage, artifact in artifacts.items()}}
    step.run.finish_step(step.index, {"metrics": metrics, "artifacts": digests})


_TIMERS = {
    "prompts": "prompts",
    "rollouts": "gen",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref",
    "rewards": "reward",
    "advantages": "adv",
    "updates": "update_actor",
}
"""verl's name of each stage's timer."""


def step_metrics(step: Step, artifacts: dict[str, Artifact], seconds: float) -> dict[str, float | None]:
    """The step's numbers under verl's names: what its stages measured, their times and the shapes of their artifacts.

    Args:
        step: the step.
        artifacts: its artifacts, by name.
        seconds: duration of the whole step.
    """
    metrics: dict[str, float | None] = {"training/global_step": float(step.index)}
    manifests = {stage: read_manifest(artifact.folder) for stage, artifact in artifacts.items()}
    response_tokens = manifests["rollouts"].shapes["tokens"]
    tokens = manifests["old_log_probs"].shapes["tokens"]
    for stage, manifest in manifests.items():
        timer = _TIMERS[stage]
        metrics.update(manifest.metrics)
        metrics.update({f"shape/{stage}/{name}": float(value) for name, value in manifest.shapes.items()})
        metrics[f"timing_s/{timer}"] = manifest.seconds
        counted = response_tokens if stage == "rollouts" else tokens
        if counted and stage != "prompts":
            metrics[f"timing_per_token_ms/{timer}"] = 1000 * manifest.seconds / counted
    devices = step.cfg.trainer.n_gpus_per_node * step.cfg.trainer.nnodes
    metrics["timing_s/step"] = seconds
    metrics["perf/total_num_tokens"] = float(tokens)
    metrics["perf/time_per_step"] = seconds
    metrics["perf/throughput"] = tokens / (seconds * devices)
    return metrics
