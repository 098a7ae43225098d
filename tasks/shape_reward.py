"""From the score of a response to its reward: the shaping that the configuration asks for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from tasks.algorithms.shaping import Shaping, shape_scores
from tasks.config import RunConfig

SHAPING_READS = (
    "reward_model.overlong_buffer",
    "reward.clip_low",
    "reward.clip_high",
    "reward.scale",
    "reward.stop_properly_coef",
    "data.max_response_length",
    "actor_rollout_ref.rollout.response_length",
)


def shaping_rules(cfg: RunConfig) -> Shaping:
    """The rules in force."""
    buffer, reward = cfg.reward_model.overlong_buffer, cfg.reward
    return Shaping(
        longest=cfg.response_length,
        overlong_buffer=buffer.len if buffer.enable else None,
        penalty_factor=buffer.penalty_factor,
        capped=buffer.capped,
        stop_properly_coef=reward.stop_properly_coef,
        clip_low=reward.clip_low,
        clip_high=reward.clip_high,
        scale=reward.scale,
    )


def shaped_rewards(cfg: RunConfig, rollouts: Artifact, score: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """[N] reward of each response, and what shaping did to them.

    Args:
        cfg: the run's configuration.
        rollouts: N responses.
        score: [N] their scores, in the same order; NaN: no verdict.
    """
    table = read_table(rollouts, ["response_ids", "finish_reason"])
    return shape_scores(score, Ragged.from_arrow(table["response_ids"]).lengths, truncated(table), shaping_rules(cfg))


def truncated(rollouts: pa.Table) -> np.ndarray:
    """[N] bool: the response was cut by its length limit."""
    return np.asarray([reason == "length" for reason in rollouts["finish_reason"].to_pylist()], dtype=bool)
