"""Stage `advantage`: from scores to the advantage of every token, relative to the other samples of its group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from storage.artifacts import read_manifest
from tasks.algorithms.advantages import AdvantageInput, Advantages, row_of_token
from tasks.algorithms.variants import ESTIMATORS
from tasks.config import RunConfig
from tasks.stage import Step, aligned, spread

READS = ("algorithm", "actor_rollout_ref.actor.use_kl_loss")
CODE = ("tasks.advantage", "tasks.algorithms")

PASS_SCORE = 1.0
"""A sample passes when its score is at least this: what rule rewards give for a right answer."""


def advantage(
    step: Step,
    rollouts: Artifact,
    rewards: Artifact,
    old_log_probs: Artifact,
    ref_log_probs: Artifact | None,
    previous: Artifact | None = None,
) -> Artifact:
    """Commit `advantages`.

    Args:
        step: the step.
        rollouts: its samples, whose order the result keeps.
        rewards: their scores; a null score is no verdict and stays out of statistics and loss.
        old_log_probs: read where KL is in the reward.
        ref_log_probs: read where KL is in the reward.
        previous: the `advantages` of the step before, which hold the adaptive KL weight; None: the first step.
    """
    parents = [rollouts, rewards, old_log_probs, *([ref_log_probs] if ref_log_probs else [])]
    coef = kl_coef(step.cfg, previous)
    stage = step.open("advantages", reads=READS, code=CODE, parents=parents, also={"kl_coef": coef})
    if done := stage.committed():
        return done
    samples = read_table(rollouts, ["sample_id", "group_id", "response_ids"])
    scored = aligned(rewards, samples["sample_id"], ["score", "parts"])
    score = scored["score"].to_numpy().astype(np.float64)
    response_ids = Ragged.from_arrow(samples["response_ids"])
    mask = Ragged(np.ones(len(response_ids.values), dtype=bool), response_ids.offsets)
    notes: dict[str, float] = {}
    if step.cfg.algorithm.use_kl_in_reward:
        assert ref_log_probs is not None
        token_rewards, kl = _rewards_less_kl(samples, score, mask, old_log_probs, ref_log_probs, step.cfg, coef)
        notes = {"kl_coef": coef, "kl": kl, "sequences": float(len(score))}
    else:
        token_rewards = score_at_last_token(score, mask)
    group = np.unique(np.asarray(samples["group_id"].to_pylist()), return_inverse=True)[1]
    inputs = AdvantageInput(
        score,
        group,
        mask,
        token_rewards=token_rewards if step.cfg.algorithm.use_kl_in_reward else None,
        reward_parts=reward_parts(scored["parts"]),
    )
    result = ESTIMATORS[step.cfg.algorithm.adv_estimator].load()(inputs, step.cfg.algorithm)
    loss_mask = Ragged(mask.values & result.in_loss[row_of_token(mask)], mask.offsets)
    metrics = _metrics(score, group, token_rewards, result, loss_mask)
    if notes:
        metrics.update({"actor/reward_kl_penalty": notes["kl"], "actor/reward_kl_penalty_coeff": coef})
    return stage.commit(
        {
            "sample_id": samples["sample_id"],
            "group_id": samples["group_id"],
            "token_rewards": token_rewards,
            "advantages": result.advantages,
            "returns": result.returns,
            "loss_mask": loss_mask,
            "group_mean": _nulls_for_nan(result.group_mean),
            "group_std": _nulls_for_nan(result.group_std),
            "rollout_is_weights": [None] * len(score),
            "no_signal": result.no_signal,
        },
        metrics=metrics,
        shapes={"tokens": int(loss_mask.values.sum())},
        notes=notes,
    )


def kl_coef(cfg: RunConfig, previous: Artifact | None) -> float:
    """Weight of the KL in this step's reward, from what the step before used and saw."""
    first = cfg.algorithm.kl_ctrl.kl_coef
    if not cfg.algorithm.use_kl_in_reward or previous is None:
        return first
    from tasks.algorithms.kl import next_kl_coef

    notes = read_manifest(previous.folder).notes
    return next_kl_coef(notes["kl_coef"], notes["kl"], int(notes["sequences"]), cfg.algorithm.kl_ctrl)


def _rewards_less_kl(
    samples: pa.Table,
    score: np.ndarray,
    mask: Ragged,
    old_log_probs: Artifact,
    ref_log_probs: Artifact,
    cfg: RunConfig,
    coef: float,
) -> tuple[Ragged, float]:
    from tasks.algorithms.kl import kl_in_reward

    old = aligned(old_log_probs, samples["sample_id"], ["old_log_probs"])["old_log_probs"]
    ref = aligned(ref_log_probs, samples["sample_id"], ["ref_log_probs"])["ref_log_probs"]
    return kl_in_reward(score, Ragged.from_arrow(old), Ragged.from_arrow(ref), mask, cfg.algorithm.kl_penalty, coef)


def score_at_last_token(score: np.ndarray, mask: Ragged) -> Ragged:
    """N rows float32: the score at each response's last token, 0 before it; an empty response has no token for it."""
    rewards = np.zeros(len(mask.values), dtype=np.float32)
    carried = (mask.lengths > 0) & ~np.isnan(score)
    rewards[mask.offsets[1:][carried] - 1] = score[carried]
    return Ragged(rewards, mask.offsets)


def reward_parts(parts: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """[N] score of each reward function by name; NaN where it has none for a sample."""
    rows = [dict(row) for row in parts.to_pylist()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.asarray([row.get(name) for row in rows], dtype=np.float64) for name in names}


def _metrics(
    score: np.ndarray, group: np.ndarray, token_rewards: Ragged, result: Advantages, loss_mask: Ragged
) -> dict[str, float]:
    """verl's names, over samples with a verdict; the health of the groups; how many samples teach nothing."""
    known = ~np.isnan(score)
    sums = np.bincount(row_of_token(token_rewards), weights=token_rewards.values, minlength=len(score))
    in_loss = loss_mask.values
    return {
        **spread("critic/score", score[known]),
        **spread("critic/rewards", sums[known]),
        **spread("critic/advantages", result.advantages.values[in_loss]),
        **spread("critic/returns", result.returns.values[in_loss]),
        **group_health(score, group),
        "group/no_signal_samples": float(np.mean([reason is not None for reason in result.no_signal])),
        "response/empty": float((loss_mask.lengths == 0).sum()),
    }


def group_health(score: np.ndarray, group: np.ndarray) -> dict[str, float]:
    """Share of groups in which all samples pass, all fail, or some of both; a group without verdicts is in none."""
    known = ~np.isnan(score)
    members = np.bincount(group[known], minlength=int(group.max(initial=-1)) + 1)
    passed = np.bincount(group[known], weights=score[known] >= PASS_SCORE, minlength=len(members))
    judged = members > 0
    if not judged.any():
        return {}
    all_pass, all_fail = (passed == members)[judged], (passed == 0)[judged]
    return {
        "group/all_pass": float(all_pass.mean()),
        "group/all_fail": float(all_fail.mean()),
        "group/mixed": float((~all_pass & ~all_fail).mean()),
    }


def _nulls_for_nan(values: np.ndarray) -> pa.Array:
    return pa.array(values, type=pa.float64(), from_pandas=True)
