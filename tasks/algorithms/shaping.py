"""From scores to rewards: what length and truncation take away, bounds and scale; and which groups carry a signal.

NumPy only, float64. A sample without a verdict (NaN) keeps none, whatever is added to it or put in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.algorithms.advantages import group_statistics


@dataclass(frozen=True)
class Shaping:
    """The rules of a run by which a score becomes a reward; as they stand they change nothing.

    Attributes:
        longest: tokens of the longest response that can be sampled.
        overlong_buffer: tokens before it in which the penalty grows; None: no penalty
            (`reward_model.overlong_buffer.enable`, `len`).
        penalty_factor: the penalty at `longest` (`reward_model.overlong_buffer.penalty_factor`).
        capped: it grows no further beyond (`reward_model.overlong_buffer.capped`).
        stop_properly_coef: see stop_properly; None: off (`reward.stop_properly_coef`).
        clip_low: lowest reward; None: no bound (`reward.clip_low`).
        clip_high: highest reward; None: no bound (`reward.clip_high`).
        scale: factor of the clipped reward (`reward.scale`).
    """

    longest: int
    overlong_buffer: int | None = None
    penalty_factor: float = 1.0
    capped: bool = True
    stop_properly_coef: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    scale: float = 1.0


def shape_scores(
    score: np.ndarray, response_tokens: np.ndarray, truncated: np.ndarray, rules: Shaping
) -> tuple[np.ndarray, dict[str, float]]:
    """Rewards of N samples: score plus overlong penalty, then stop_properly, then bounds, then scale.

    Args:
        score: [N] what the reward functions returned; NaN: no verdict.
        response_tokens: [N] tokens of each response.
        truncated: [N] bool, true: the response ended at the length limit.
        rules: which of the four are on.

    Returns:
        [N] float64 rewards, and metrics over the samples with a verdict, of the rules that are on:
        `reward/overlong_penalty/mean`, `reward/overlong_share` (the penalty is below 0), `reward/stop_properly_share`
        (the response was truncated), `reward/clipped_share` (a bound changed the reward). No verdicts, no metrics.

    Raises:
        ValueError: as overlong_penalty and clip_and_scale.
    """
    reward = np.asarray(score, dtype=np.float64)
    known = ~np.isnan(reward)
    changes: dict[str, np.ndarray] = {}
    if rules.overlong_buffer is not None:
        penalty = overlong_penalty(
            response_tokens, rules.longest, rules.overlong_buffer, rules.penalty_factor, capped=rules.capped
        )
        reward = reward + penalty
        changes |= {"reward/overlong_penalty/mean": penalty, "reward/overlong_share": penalty < 0}
    if rules.stop_properly_coef is not None:
        reward = stop_properly(reward, truncated, rules.stop_properly_coef)
        changes["reward/stop_properly_share"] = np.asarray(truncated, dtype=bool)
    if rules.clip_low is not None or rules.clip_high is not None:
        clipped = clip_and_scale(reward, rules.clip_low, rules.clip_high)
        changes["reward/clipped_share"] = clipped != reward
        reward = clipped
    metrics = {name: float(values[known].mean()) for name, values in changes.items()} if known.any() else {}
    return clip_and_scale(reward, scale=rules.scale), metrics


def overlong_penalty(
    response_tokens: np.ndarray, longest: int, buffer: int, penalty_factor: float, *, capped: bool
) -> np.ndarray:
    """Soft penalty of long responses (DAPO, arXiv 2503.14476, eq. 13).

    0 up to longest - buffer tokens, from there linear, -penalty_factor at `longest`. Beyond it the paper, TRL and
    OpenRLHF stay there (`capped`), while verl's reward manager goes on along the line.

    Args:
        response_tokens: [N] tokens of each response.
        longest: tokens of the longest response that can be sampled.
        buffer: tokens before it in which the penalty grows.
        penalty_factor: the penalty at `longest`, 0 or above.
        capped: never below -penalty_factor.

    Returns:
        [N] float64, 0 or below.

    Raises:
        ValueError: the buffer does not lie within the longest response.
    """
    if not 0 < buffer <= longest:
        raise ValueError(
            f"reward_model.overlong_buffer.len={buffer} must lie within the longest response, {longest} tokens. Set it "
            f"to 1 to {longest}, raise data.max_response_length, or set reward_model.overlong_buffer.enable=false."
        )
    excess = np.maximum(np.asarray(response_tokens, dtype=np.float64) - (longest - buffer), 0.0) / buffer
    return 0.0 - penalty_factor * (np.minimum(excess, 1.0) if capped else excess)


def stop_properly(reward: np.ndarray, truncated: np.ndarray, coef: float) -> np.ndarray:
    """Rewards in which responses that were cut at the length limit pay for it (OpenRLHF, `stop_properly_penalty_coef`).

    Args:
        reward: [N] NaN: no verdict.
        truncated: [N] bool.
        coef: 0 to 1: factor of a truncated response's reward, which brings a negative reward nearer to 0. Below
            0: put in place of it.

    Returns:
        [N] float64.
    """
    reward = np.asarray(reward, dtype=np.float64)
    paid = coef * reward if coef >= 0 else np.where(np.isnan(reward), np.nan, coef)
    return np.where(truncated, paid, reward)


def clip_and_scale(
    reward: np.ndarray, low: float | None = None, high: float | None = None, scale: float = 1.0
) -> np.ndarray:
    """Rewards within bounds, then times `scale` (TRL and OpenRLHF, `reward_clip_range`).

    Args:
        reward: [N] NaN: no verdict.
        low: lowest reward before scaling; None: no bound.
        high: highest one.
        scale: factor of what the bounds leave.

    Returns:
        [N] float64.

    Raises:
        ValueError: the bounds are in the wrong order.
    """
    lower, upper = (-np.inf if low is None else low), (np.inf if high is None else high)
    if lower > upper:
        raise ValueError(
            f"reward.clip_low={low:g} lies above reward.clip_high={high:g}, so that no reward lies between them. "
            "Exchange them, or set one to null."
        )
    return np.clip(np.asarray(reward, dtype=np.float64), lower, upper) * scale


def groups_with_signal(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Which groups teach something (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2, eq. 11).

    A group has a signal where two of its verdicts differ by more than rounding (advantages.EQUAL_WITHIN, relative to
    the largest): those that every relative estimator centres on something other than 0. A group with fewer than two
    verdicts has none; verl keeps a group that was sampled with one response.

    Args:
        values: [N] score, reward or whatever the groups are judged by; NaN: no verdict.
        group: [N] group ids, in any order.

    Returns:
        [G] bool, in the order in which the groups first appear.
    """
    groups = group_statistics(np.asarray(values, dtype=np.float64), group)
    signal = (groups.verdicts >= 2) & ~groups.equal
    _, first = np.unique(groups.number, return_index=True)
    return signal[np.sort(first)]
