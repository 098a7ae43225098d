"""Validation: responses to the held-out prompts by the policy after a step, scored like training responses."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from storage import Artifact, read_table
from tasks.config import RunConfig
from tasks.generate import generate_validation
from tasks.prompts import choose_validation_prompts
from tasks.reward import reward_validation
from tasks.stage import Step

if TYPE_CHECKING:
    from tasks.data import PreparedPrompts
    from tasks.engines.protocol import RolloutEngine
    from tasks.generate import Tokenizer
    from tasks.rewards.pool import RewardPool


def validate(
    step: Step, dataset: PreparedPrompts, engine: RolloutEngine, tokenizer: Tokenizer, pool: RewardPool
) -> dict[str, float]:
    """Make the three validation artifacts of a step and return its metrics."""
    prompts = choose_validation_prompts(step, dataset)
    rollouts = generate_validation(step, prompts, engine, tokenizer)
    rewards = reward_validation(step, prompts, rollouts, pool)
    return validation_metrics(prompts, rollouts, rewards, step.cfg)


def validation_metrics(prompts: Artifact, rollouts: Artifact, rewards: Artifact, cfg: RunConfig) -> dict[str, float]:
    """Mean score per data source under verl's names; a sample without a verdict counts in `no_verdict` alone."""
    n = cfg.actor_rollout_ref.rollout.val_kwargs.n
    source_of = dict(zip(*_columns(prompts, "group_id", "data_source"), strict=True))
    scores: dict[str, list[float | None]] = defaultdict(list)
    for group, score in zip(*_columns(rewards, "group_id", "score"), strict=True):
        scores[source_of[group]].append(score)
    metrics = {}
    for source, values in scores.items():
        known = [value for value in values if value is not None]
        if known:
            metrics[f"val-core/{source}/reward/mean@{n}"] = float(np.mean(known))
        metrics[f"val-aux/{source}/no_verdict"] = float(len(values) - len(known))
    lengths = [len(ids) for ids in read_table(rollouts, ["response_ids"])["response_ids"]]
    metrics["val-aux/response_length/mean"] = float(np.mean(lengths))
    return metrics


def _columns(artifact: Artifact, *names: str) -> list[list]:
    table = read_table(artifact, list(names))
    return [table[name].to_pylist() for name in names]
