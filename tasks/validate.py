"""Validation metrics: how the policy after a step does on the held-out prompts.

The three stages are those of training, under the names `val_prompts`, `val_rollouts` and `val_rewards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from storage import Artifact, Ragged, read_table
from tasks.advantage import PASS_SCORE
from tasks.algorithms import sample_metrics
from tasks.config import RunConfig


def validation_metrics(prompts: Artifact, rollouts: Artifact, rewards: Artifact, cfg: RunConfig) -> dict[str, float]:
    """Scores by data source, and the mean response length in tokens; see `score_metrics`."""
    source_of = dict(zip(*_columns(prompts, "group_id", "data_source"), strict=True))
    group, score, extracted = _columns(rewards, "group_id", "score", "extracted")
    lengths = Ragged.from_arrow(read_table(rollouts, ["response_ids"])["response_ids"]).lengths
    return {
        **score_metrics(
            [source_of[name] for name in group],
            group,
            np.asarray(score, dtype=np.float64),
            extracted,
            cfg.actor_rollout_ref.rollout.val_kwargs.n,
        ),
        "val-aux/response_length/mean": float(lengths.mean()),
    }


def score_metrics(
    source: Sequence[str], group: Sequence[str], score: np.ndarray, extracted: Sequence[str | None], n: int
) -> dict[str, float]:
    """`val-core|val-aux/<source>/reward/<metric>`, with verl's metrics and division, and pass@k and pass^k beside them.

    A sample without a verdict counts in `val-aux/<source>/no_verdict` and in nothing else. Every other number is made
    within each prompt, from the verdicts it has, and then averaged over prompts: a prompt with 3 verdicts of n = 4 has
    a mean@3 and no mean@4 (`sample_metrics.validation_metrics` has the rule). The answer that was found in a response
    is its vote in maj@k. A sample passes from `PASS_SCORE` on. One sample per prompt gives mean@1 alone.

    Under `val-core` is what a user compares runs by: mean@n, best@n, maj@n and pass@n.

    Args:
        source: [N] data source of each sample.
        group: [N] which prompt it answers.
        score: [N] its score; NaN: no verdict.
        extracted: [N] the answer found in it.
        n: samples of each prompt.
    """
    missing = Counter(name for name, value in zip(source, score, strict=True) if np.isnan(value))
    pass_score = PASS_SCORE if n > 1 else None
    metrics = {}
    for name, numbers in sample_metrics.validation_metrics(source, group, score, extracted, pass_score).items():
        for metric, value in numbers.items():
            metrics[f"{'val-core' if _is_core(metric, n) else 'val-aux'}/{name}/reward/{metric}"] = value
        metrics[f"val-aux/{name}/no_verdict"] = float(missing[name])
    return metrics


def _is_core(metric: str, n: int) -> bool:
    name, _, size = metric.partition("/")[0].partition("@")
    return name in ("mean", "best", "maj", "pass") and size == str(n)


def _columns(artifact: Artifact, *names: str) -> list[list]:
    table = read_table(artifact, list(names))
    return [table[name].to_pylist() for name in names]
