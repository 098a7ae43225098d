"""From scores to advantages: the critic-free estimators, each a pure function over the samples of one step.

NumPy only; statistics are taken in float64. Rules that hold for all of them: groups go by id, wherever their members
stand. A sample without a verdict (NaN) takes part in no statistic and gets advantage 0. A group with fewer than two
verdicts, and a group whose verdicts are all equal, centre on exactly 0. A group that was sampled with one response has
nobody to be compared with; the planner refuses it for relative estimators, and the functions follow their reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from storage.ragged import Ragged
from tasks.config import AlgorithmConfig

EQUAL_WITHIN = 4 * float(np.finfo(np.float32).eps)
"""Scores of a group are equal when they differ by no more than this share of the largest of them."""


@dataclass(frozen=True, eq=False)
class AdvantageInput:
    """N samples of one step.

    Attributes:
        score: [N] float64; NaN: no verdict.
        group: [N] which prompt each sample answers.
        mask: N rows of bool over response tokens, true: the policy sampled the token.
        token_rewards: N rows, where KL is in the reward; None: the score at the last token.
        reward_parts: [N] score of each reward function by name, NaN where it does not apply. Read by gdpo.
        greedy_score: [N] score of the greedy response to the same prompt. Read by remax.
        old_log_probs: N rows. Read by optimal_token_baseline.
        sum_pi_squared: N rows, sum over the vocabulary of squared probabilities. Read by optimal_token_baseline.
        rollout_is_weights: N rows of importance weights. Read by optimal_token_baseline.
    """

    score: np.ndarray
    group: np.ndarray
    mask: Ragged
    token_rewards: Ragged | None = None
    reward_parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    greedy_score: np.ndarray | None = None
    old_log_probs: Ragged | None = None
    sum_pi_squared: Ragged | None = None
    rollout_is_weights: Ragged | None = None

    @property
    def outcome(self) -> np.ndarray:
        """[N] float64 reward of the whole response: the score, less KL where KL is in the reward; NaN: no verdict.

        An empty response keeps its score, though there is no token to carry it.
        """
        score = np.asarray(self.score, dtype=np.float64)
        if self.token_rewards is None:
            return score
        total = row_sums(self.token_rewards, self.token_rewards.values)
        return np.where(np.isnan(score) | (self.mask.lengths == 0), score, total)


@dataclass(frozen=True, eq=False)
class Advantages:
    """What an estimator says of N samples.

    Attributes:
        advantages: N rows float32, 0 outside the mask.
        returns: N rows float32, 0 outside the mask.
        group_mean: [N] mean outcome of the group's verdicts; NaN: it has none.
        group_std: [N] their standard deviation, ddof 1; NaN: there are fewer than two.
        in_loss: [N] bool, false: no verdict, so the sample's tokens stay out of the loss.
        no_signal: why a sample teaches nothing; None: it does.
    """

    advantages: Ragged
    returns: Ragged
    group_mean: np.ndarray
    group_std: np.ndarray
    in_loss: np.ndarray
    no_signal: list[str | None]


Estimator = Callable[[AdvantageInput, AlgorithmConfig], Advantages]


@dataclass(frozen=True, eq=False)
class Groups:
    """Statistics of each sample's group, over the members that have a verdict; all arrays are [N].

    Attributes:
        number: group of the sample, counted from 0.
        size: members, with and without a verdict.
        verdicts: members with a verdict.
        mean: NaN without any.
        std: ddof 1; NaN with fewer than two.
        equal: there are two verdicts or more, and all are equal.
        centred: outcome minus mean; exactly 0.0 without a verdict, where all are equal, and where the only verdict has
            siblings without one. The only member of a group keeps its outcome.
        scale: std; 1 with fewer than two verdicts.
    """

    number: np.ndarray
    size: np.ndarray
    verdicts: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    equal: np.ndarray
    centred: np.ndarray
    scale: np.ndarray


def group_statistics(outcome: np.ndarray, group: np.ndarray) -> Groups:
    """Mean and deviation of each group.

    Args:
        outcome: [N] NaN: no verdict.
        group: [N] group ids, in any order.
    """
    _, number = np.unique(group, return_inverse=True)
    known = ~np.isnan(outcome)
    value = np.where(known, outcome, 0.0)
    size = np.bincount(number)[number]
    verdicts = np.bincount(number, weights=known).astype(np.int64)[number]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (np.bincount(number, weights=value) / np.bincount(number, weights=known))[number]
        deviation = np.where(known, outcome - mean, 0.0)
        variance = np.bincount(number, weights=deviation**2)[number] / (verdicts - 1)
        std = np.where(verdicts >= 2, np.sqrt(variance), np.nan)
    equal = (verdicts >= 2) & _within_rounding(value, known, number)
    alone = size == 1
    centred = np.where(equal | ((verdicts < 2) & ~alone), 0.0, np.where(alone, value, deviation))
    return Groups(
        number=number,
        size=size,
        verdicts=verdicts,
        mean=mean,
        std=np.where(equal, 0.0, std),
        equal=equal,
        centred=centred,
        scale=np.where(verdicts >= 2, std, 1.0),
    )


def _within_rounding(value: np.ndarray, known: np.ndarray, number: np.ndarray) -> np.ndarray:
    """[N] whether the verdicts of each sample's group are equal but for rounding."""
    groups = int(number.max(initial=-1)) + 1
    low, high, largest = np.full(groups, np.inf), np.full(groups, -np.inf), np.zeros(groups)
    np.minimum.at(low, number[known], value[known])
    np.maximum.at(high, number[known], value[known])
    np.maximum.at(largest, number[known], np.abs(value[known]))
    return (high - low <= EQUAL_WITHIN * largest)[number]


def grpo(inputs: AdvantageInput, cfg: AlgorithmConfig, *, epsilon: float = 1e-6) -> Advantages:
    """Centre each outcome on its group's mean and divide by the group's deviation (GRPO, arXiv 2402.03300, eq. 4).

    Without the division (`algorithm.norm_adv_by_std_in_grpo=false`) it is Dr. GRPO (arXiv 2503.20783).
    """
    groups = group_statistics(inputs.outcome, inputs.group)
    advantage = groups.centred
    if cfg.norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.scale + epsilon)
    return _same_for_every_token(inputs, groups, advantage)


def _same_for_every_token(inputs: AdvantageInput, groups: Groups, advantage: np.ndarray) -> Advantages:
    """Give each sampled token of a sample the sample's advantage."""
    rows = broadcast(advantage, inputs.mask)
    return _result(inputs, groups, rows, rows, relative=True)


def _result(
    inputs: AdvantageInput, groups: Groups, advantages: np.ndarray, returns: np.ndarray, *, relative: bool
) -> Advantages:
    """Put flat per-token values together with what is known of their groups.

    Args:
        inputs: the step's samples.
        groups: their groups.
        advantages: [tokens] flat values.
        returns: [tokens] flat values.
        relative: a group needs two different verdicts to carry a signal.
    """
    verdict = ~np.isnan(inputs.outcome)
    reasons: list[str | None] = []
    for row in range(len(verdict)):
        if not verdict[row]:
            reasons.append("no verdict")
        elif inputs.mask.lengths[row] == 0:
            reasons.append("empty response")
        elif relative and groups.verdicts[row] < 2 <= groups.size[row]:
            reasons.append("fewer than two verdicts in the group")
        elif relative and groups.equal[row]:
            reasons.append("equal scores in the group")
        else:
            reasons.append(None)
    return Advantages(
        advantages=Ragged(advantages.astype(np.float32), inputs.mask.offsets),
        returns=Ragged(returns.astype(np.float32), inputs.mask.offsets),
        group_mean=groups.mean,
        group_std=groups.std,
        in_loss=verdict,
        no_signal=reasons,
    )


def row_of_token(rows: Ragged) -> np.ndarray:
    """[tokens] the row of each value in a flat buffer."""
    return np.repeat(np.arange(len(rows)), rows.lengths)


def row_sums(rows: Ragged, values: np.ndarray) -> np.ndarray:
    """[N] float64 sum of flat values over each row."""
    return np.bincount(row_of_token(rows), weights=values, minlength=len(rows))


def broadcast(per_row: np.ndarray, mask: Ragged) -> np.ndarray:
    """[tokens] a value of each row, repeated over its tokens; 0 outside the mask."""
    return np.where(mask.values, per_row[row_of_token(mask)], 0.0)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": grpo,
}
"""By `algorithm.adv_estimator`."""
