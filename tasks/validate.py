"""Validation metrics: how the policy after a step does on the held-out prompts.

The three stages are those of training, under the names `val_prompts`, `val_rollouts` and `val_rewards`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from storage import Artifact, Ragged, read_table
from tasks.config import RunConfig


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
    lengths = Ragged.from_arrow(read_table(rollouts, ["response_ids"])["response_ids"]).lengths
    metrics["val-aux/response_length/mean"] = float(lengths.mean())
    return metrics


def _columns(artifact: Artifact, *names: str) -> list[list]:
    table = read_table(artifact, list(names))
    return [table[name].to_pylist() for name in names]
