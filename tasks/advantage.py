"""Stage `advantage`: from scores to the advantage of every token, and which tokens take part in the loss, how much."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from storage.artifacts import read_manifest
from tasks.algorithms.advantages import AdvantageInput, Advantages, row_of_token, row_sums
from tasks.algorithms.correction import Correction, correct
from tasks.algorithms.sample_metrics import signal_metrics
from tasks.algorithms.variants import ESTIMATORS
from tasks.config import MOST_REWARD, RunConfig
from tasks.shape_reward import SHAPING_READS, shaped_rewards, truncated
from tasks.stage import StageError, Step, aligned

_ALGORITHM = (
    "adv_estimator",
    "norm_adv_by_std_in_grpo",
    "norm_adv_std_over",
    "gdpo_reward_keys",
    "gdpo_reward_weights",
    "use_leave_one_out_baseline",
    "multi_objective_aggregation",
    "normalize_advantages",
    "use_kl_in_reward",
    "kl_penalty",
    "kl_ctrl",
    "gamma",
    "lam",
    "rollout_correction",
)
READS = (
    *(f"algorithm.{name}" for name in _ALGORITHM),
    "actor_rollout_ref.actor.mask_truncated_responses",
    *SHAPING_READS,
)
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
    greedy: tuple[Artifact, Artifact] | None = None,
) -> Artifact:
    """Commit `advantages`.

    Shaping turns scores into rewards, KL may be subtracted, the estimator compares them. Rollout correction and
    `actor.mask_truncated_responses` then take tokens out of the loss; the estimator sees all tokens.

    Args:
        step: the step.
        rollouts: its samples, whose order the result keeps.
        rewards: their scores; a null score is no verdict and stays out of statistics and loss.
        old_log_probs: read where KL is in the reward, by rollout correction, and by token baselines.
        ref_log_probs: read where KL is in the reward.
        previous: the `advantages` of the step before, which hold the adaptive KL weight; None: the first step.
        greedy: `greedy_rollouts` and `greedy_rewards`, for remax.

    Raises:
        StageError: a reward is too large, or the estimator refuses the rewards.
    """
    parents = [rollouts, rewards, old_log_probs, *([ref_log_probs] if ref_log_probs else []), *(greedy or ())]
    coef = kl_coef(step.cfg, previous)
    stage = step.open("advantages", reads=READS, code=CODE, parents=parents, also={"kl_coef": coef})
    if done := stage.committed():
        return done
    samples = read_table(rollouts, ["sample_id", "group_id", "response_ids", "rollout_log_probs", "finish_reason"])
    scored = aligned(rewards, samples["sample_id"], ["score", "parts"])
    score = scored["score"].to_numpy().astype(np.float64)
    reward, shaping_metrics = shaped_rewards(step.cfg, rollouts, score)
    _refuse_beyond_float32(step.index, samples["sample_id"], score, reward)
    response_ids = Ragged.from_arrow(samples["response_ids"])
    sampled = Ragged(np.ones(len(response_ids.values), dtype=bool), response_ids.offsets)
    group = np.unique(np.asarray(samples["group_id"].to_pylist()), return_inverse=True)[1]
    token_rewards, notes = _token_rewards(samples, reward, sampled, old_log_probs, ref_log_probs, step.cfg, coef)
    correction = _correction(samples, sampled, old_log_probs, step.cfg)
    inputs = AdvantageInput(
        reward,
        group,
        sampled,
        token_rewards=token_rewards if notes else None,
        reward_parts=reward_parts(scored["parts"]),
        greedy_score=_greedy_reward(samples, greedy, step.cfg) if greedy else None,
        **_for_token_baseline(samples, old_log_probs, correction, step.cfg),
    )
    try:
        result = ESTIMATORS[step.cfg.algorithm.adv_estimator].load()(inputs, step.cfg.algorithm)
    except ValueError as error:
        raise StageError(f"step {step.index}: {error}") from error
    cut = truncated(samples) & step.cfg.actor_rollout_ref.actor.mask_truncated_responses
    kept = sampled.values if correction is None else correction.mask.values
    loss_mask = Ragged(kept & (result.in_loss & ~cut)[row_of_token(sampled)], sampled.offsets)
    weights = correction.weights if correction else None
    metrics = _metrics(score, group, token_rewards, result, loss_mask)
    if notes:
        metrics.update({"actor/reward_kl_penalty": notes["kl"], "actor/reward_kl_penalty_coeff": coef})
    if step.cfg.actor_rollout_ref.actor.mask_truncated_responses:
        metrics["response/masked_truncated_share"] = float(cut.mean())
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
            "rollout_is_weights": [None] * len(score) if weights is None else weights,
            "no_signal": _no_signal(result, cut, loss_mask),
        },
        metrics={**metrics, **shaping_metrics, **(correction.metrics if correction else {})},
        shapes={"tokens": int(loss_mask.values.sum())},
        notes=notes,
    )


def _refuse_beyond_float32(step: int, sample_ids: pa.ChunkedArray, score: np.ndarray, reward: np.ndarray) -> None:
    """Stop at a reward whose sums or differences float32, in which advantages are kept, may not hold."""
    beyond = np.flatnonzero(np.abs(reward) > MOST_REWARD)
    if len(beyond):
        row = int(beyond[0])
        raise StageError(
            f"step {step}: the reward of sample {sample_ids[row]} is {reward[row]:g} (its score {score[row]:g}), and "
            f"{len(beyond)} of {len(reward)} lie beyond {MOST_REWARD:g}, where float32 overflows. Mend the reward "
            "function, bound rewards with reward.clip_low and reward.clip_high, or set reward.scale nearer to 0."
        )


def kl_coef(cfg: RunConfig, previous: Artifact | None) -> float:
    """Weight of the KL in this step's reward, from what the step before used and saw."""
    first = cfg.algorithm.kl_ctrl.kl_coef
    if not cfg.algorithm.use_kl_in_reward or previous is None:
        return first
    from tasks.algorithms.kl import next_kl_coef

    notes = read_manifest(previous.folder).notes
    return next_kl_coef(notes["kl_coef"], notes["kl"], int(notes["sequences"]), cfg.algorithm.kl_ctrl)


def _token_rewards(
    samples: pa.Table,
    reward: np.ndarray,
    sampled: Ragged,
    old_log_probs: Artifact,
    ref_log_probs: Artifact | None,
    cfg: RunConfig,
    coef: float,
) -> tuple[Ragged, dict[str, float]]:
    """Reward of each token; and, where KL is in it, the notes from which the next step takes its weight."""
    if not cfg.algorithm.use_kl_in_reward:
        return score_at_last_token(reward, sampled), {}
    from tasks.algorithms.kl import kl_in_reward

    assert ref_log_probs is not None
    old = aligned(old_log_probs, samples["sample_id"], ["old_log_probs"])["old_log_probs"]
    ref = aligned(ref_log_probs, samples["sample_id"], ["ref_log_probs"])["ref_log_probs"]
    kind = cfg.algorithm.kl_penalty
    rewards, kl = kl_in_reward(reward, Ragged.from_arrow(old), Ragged.from_arrow(ref), sampled, kind, coef)
    return rewards, {"kl_coef": coef, "kl": kl, "sequences": float(len(reward))}


def _correction(samples: pa.Table, sampled: Ragged, old_log_probs: Artifact, cfg: RunConfig) -> Correction | None:
    """Weights and rejection from the sampler's and the policy's log-probs; None: not asked for.

    In bypass mode both are the sampler's, and the update corrects from the policy as it then is.
    """
    wanted = cfg.algorithm.rollout_correction
    if wanted.bypass_mode or (wanted.rollout_is is None and wanted.rollout_rs is None) or not len(sampled.values):
        return None
    old = aligned(old_log_probs, samples["sample_id"], ["old_log_probs"])["old_log_probs"]
    rollout = Ragged.from_arrow(samples["rollout_log_probs"])
    return correct(rollout, Ragged.from_arrow(old), sampled, wanted)


def _greedy_reward(samples: pa.Table, greedy: tuple[Artifact, Artifact], cfg: RunConfig) -> np.ndarray:
    """[N] shaped reward of the greedy response to each sample's prompt; NaN: it has no verdict."""
    rollouts, rewards = greedy
    table = read_table(rollouts, ["sample_id", "group_id"])
    score = aligned(rewards, table["sample_id"], ["score"])["score"].to_numpy().astype(np.float64)
    by_group = dict(zip(table["group_id"].to_pylist(), shaped_rewards(cfg, rollouts, score)[0], strict=True))
    return np.asarray([by_group[name] for name in samples["group_id"].to_pylist()])


def _for_token_baseline(
    samples: pa.Table, old_log_probs: Artifact, correction: Correction | None, cfg: RunConfig
) -> dict[str, Ragged | None]:
    """What optimal token baselines read beside rewards; {} for all other estimators."""
    if not cfg.estimator_needs("sum_pi_squared"):
        return {}
    table = aligned(old_log_probs, samples["sample_id"], ["old_log_probs", "sum_pi_squared"])
    return {
        "old_log_probs": Ragged.from_arrow(table["old_log_probs"]),
        "sum_pi_squared": Ragged.from_arrow(table["sum_pi_squared"]),
        "rollout_is_weights": correction.weights if correction else None,
    }


def _no_signal(result: Advantages, cut: np.ndarray, loss_mask: Ragged) -> list[str | None]:
    """Why each sample teaches nothing; None: it does."""
    outside = np.where(cut, "truncated response", "rejected by rollout correction")
    in_loss = row_sums(loss_mask, loss_mask.values) > 0
    return [
        reason or (None if kept else str(why))
        for reason, kept, why in zip(result.no_signal, in_loss, outside, strict=True)
    ]


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
    sums = np.bincount(row_of_token(token_rewards), weights=token_rewards.values, minlength=len(score))
    in_loss = loss_mask.values
    return {
        **signal_metrics(
            score, sums, token_rewards.lengths, result.advantages.values[in_loss], result.returns.values[in_loss]
        ),
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
