"""From scores to advantages: the critic-free estimators, each a pure function over the samples of one step.

NumPy only; statistics are taken in float64. Rules that hold for all of them: groups go by id, wherever their members
stand. A sample without a verdict (NaN) takes part in no statistic and gets advantage 0. A group with fewer than two
verdicts, and a group whose verdicts are all equal, centre on exactly 0. A group that was sampled with one response has
nobody to be compared with; the planner refuses it for relative estimators, and the functions follow their reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from storage.ragged import Ragged
from tasks.algorithms.variants import estimator
from tasks.config import AlgorithmConfig

EQUAL_WITHIN = 4 * float(np.finfo(np.float32).eps)
"""Scores of a group are equal when they differ by no more than this share of the largest of them."""

NO_VERDICT = "no verdict"
"""Why a sample without a score teaches nothing, in `advantages.no_signal`."""


@dataclass(frozen=True, eq=False)
class AdvantageInput:
    """N samples of one step.

    Attributes:
        score: [N] float64; NaN: no verdict.
        group: [N] which prompt each sample answers.
        mask: N rows of bool over response tokens, true: the policy sampled the token.
        token_rewards: N rows, where KL is in the reward; None: the score at the last token.
        reward_parts: [N] score of each reward function by name, NaN where it does not apply. Read by gdpo.
        greedy_score: [N] score of the greedy response to the same prompt, NaN without a verdict. Read by remax.
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
        return np.where(np.isnan(score) | self.empty, score, total)

    @property
    def empty(self) -> np.ndarray:
        """[N] bool, true: the response has no token that the policy sampled."""
        return row_sums(self.mask, self.mask.values) == 0


@dataclass(frozen=True, eq=False)
class Advantages:
    """What an estimator says of N samples.

    Attributes:
        advantages: N rows float32, 0 outside the mask.
        returns: N rows float32.
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


# -------------------------------------------------------------------------------------------------- one per estimator


@estimator(
    "grpo",
    "grpo_vectorized",
    reads=(
        "norm_adv_by_std_in_grpo",
        "norm_adv_std_over",
        "use_leave_one_out_baseline",
        "multi_objective_aggregation",
        "gdpo_reward_keys",
        "gdpo_reward_weights",
    ),
)
def grpo(inputs: AdvantageInput, cfg: AlgorithmConfig, *, epsilon: float = 1e-6) -> Advantages:
    """Centre each outcome on its group's mean and divide by a standard deviation (GRPO, arXiv 2402.03300, section
    4.1.2): (r - mean) / (std + epsilon).

    `algorithm.norm_adv_by_std_in_grpo=false` does not divide: Dr. GRPO (arXiv 2503.20783). The deviation is the
    group's, or with `algorithm.norm_adv_std_over=batch` that of all outcomes of the step (arXiv 2508.08221).
    `algorithm.use_leave_one_out_baseline` takes mean and deviation over the sample's siblings alone, and
    `algorithm.multi_objective_aggregation=normalize_then_sum` normalises each reward function by itself.
    """
    outcome = inputs.outcome
    groups = group_statistics(outcome, inputs.group)
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        # Each part sums to 0 over a group, so that the mean over the step is 0 too.
        advantage = _normalised_parts(inputs, cfg, epsilon)
        advantage = advantage / (_deviation(advantage[~np.isnan(outcome)]) + epsilon)
        return same_for_every_token(inputs, groups, advantage)
    advantage, scale = groups.centred, groups.scale + epsilon
    if cfg.use_leave_one_out_baseline:
        advantage, scale = _against_siblings(groups, outcome, epsilon)
    if cfg.norm_adv_by_std_in_grpo:
        over_batch = cfg.norm_adv_std_over == "batch"
        advantage = advantage / (_deviation(outcome[~np.isnan(outcome)]) + epsilon if over_batch else scale)
    return same_for_every_token(inputs, groups, advantage)


def _against_siblings(groups: Groups, outcome: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """[N] (outcome less its siblings' mean, their standard deviation + epsilon), as NeMo-RL has it: ddof 1; where the
    siblings are equal or fewer than two, the divisor is 1. Nobody's sibling gets 0."""
    n = np.maximum(groups.verdicts, 2)
    centred = np.where(groups.verdicts >= 2, groups.centred * n / (n - 1), 0.0)
    squares = np.bincount(groups.number, weights=groups.centred**2)[groups.number] - groups.centred**2 * n / (n - 1)
    largest = np.zeros(len(outcome))
    np.maximum.at(largest, groups.number, np.abs(np.nan_to_num(outcome)))
    differ = (n > 2) & (squares > (n - 1) * (EQUAL_WITHIN * largest[groups.number]) ** 2)
    deviation = np.sqrt(np.where(differ, squares, 0.0) / np.maximum(n - 2, 1))
    return centred, np.where(differ, deviation + epsilon, 1.0)


@estimator("grpo_passk", reads=("norm_adv_by_std_in_grpo",))
def grpo_passk(inputs: AdvantageInput, cfg: AlgorithmConfig, *, epsilon: float = 1e-6) -> Advantages:
    """Only a group's best response learns, by its lead over the second best (Pass@k training, arXiv 2503.19595).

    Raises:
        ValueError: a group was sampled with one response.
    """
    outcome = inputs.outcome
    groups = group_statistics(outcome, inputs.group)
    if (groups.size < 2).any():
        raise ValueError(
            "algorithm.adv_estimator=grpo_passk compares the best two of a group, but a group has one response. "
            "Set actor_rollout_ref.rollout.n to 2 or more"
        )
    advantage = np.zeros(len(outcome))
    for number in range(int(groups.number.max(initial=-1)) + 1):
        members = np.flatnonzero((groups.number == number) & ~np.isnan(outcome))
        if len(members) >= 2 and not groups.equal[members[0]]:
            second, best = members[np.argsort(outcome[members], kind="stable")[-2:]]
            advantage[best] = outcome[best] - outcome[second]
    if cfg.norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.scale + epsilon)
    return same_for_every_token(inputs, groups, advantage)


@estimator("rloo", reads=("normalize_advantages",))
def rloo(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """Compare each outcome with the mean of the group's others (RLOO, arXiv 2402.14740): (r - mean) * n / (n - 1).

    `algorithm.normalize_advantages` then divides them by their standard deviation over the step, plus 1e-4, as TRL
    does; their mean is 0 already.
    """
    outcome = inputs.outcome
    groups = group_statistics(outcome, inputs.group)
    others = np.maximum(groups.verdicts - 1, 1)
    advantage = groups.centred * np.where(groups.verdicts >= 2, groups.verdicts / others, 1.0)
    if cfg.normalize_advantages:
        advantage = advantage / (_deviation(advantage[~np.isnan(outcome)]) + 1e-4)
    return same_for_every_token(inputs, groups, advantage)


@estimator("rloo_vectorized")
def rloo_vectorized(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """As rloo, but the only member of a group gets 0 instead of its outcome."""
    groups = group_statistics(inputs.outcome, inputs.group)
    factor = np.where(groups.verdicts >= 2, groups.verdicts / np.maximum(groups.verdicts - 1, 1), 0.0)
    return same_for_every_token(inputs, groups, groups.centred * factor)


@estimator("opo")
def opo(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """Centre on the group's mean weighted by response length, sum(l * r) / sum(l) (OPO, arXiv 2505.23585)."""
    outcome = inputs.outcome
    groups = group_statistics(outcome, inputs.group)
    length = row_sums(inputs.mask, inputs.mask.values) * ~np.isnan(outcome)
    weighted = np.bincount(groups.number, weights=length * np.nan_to_num(outcome))
    with np.errstate(invalid="ignore"):
        baseline = (weighted / np.bincount(groups.number, weights=length))[groups.number]
    baseline = np.where(np.isnan(baseline), groups.mean, baseline)
    usable = ~np.isnan(outcome) & ~groups.equal & (groups.verdicts >= 2)
    advantage = np.where(usable, outcome - baseline, np.where(groups.size == 1, groups.centred, 0.0))
    return same_for_every_token(inputs, groups, advantage)


@estimator("gpg")
def gpg(inputs: AdvantageInput, cfg: AlgorithmConfig, *, f_norm: float = 1.0) -> Advantages:
    """Centre on the group's mean and scale by all samples / those with an outcome other than 0 (GPG, arXiv
    2504.02546)."""
    outcome = inputs.outcome
    groups = group_statistics(outcome, inputs.group)
    known = outcome[~np.isnan(outcome)]
    alpha = len(known) / max(int(np.count_nonzero(known)), 1)
    return same_for_every_token(inputs, groups, alpha * groups.centred / f_norm)


@estimator("maxrl")
def maxrl(inputs: AdvantageInput, cfg: AlgorithmConfig, *, epsilon: float = 1e-6) -> Advantages:
    """Centre on the group's mean and divide by that mean, so that rare success weighs more (MaxRL, arXiv
    2602.02710): (r - mean) / (mean + epsilon).

    Raises:
        ValueError: an outcome lies below 0. A group's mean may then be negative, and dividing by it would make worse
            responses more likely; near 0 it would have no bound.
    """
    outcome = inputs.outcome
    if below := int((outcome < 0).sum()):
        raise ValueError(
            f"algorithm.adv_estimator=maxrl divides by the mean reward of a group, and {below} of {len(outcome)} "
            f"rewards lie below 0, the lowest at {np.nanmin(outcome):g}: it would teach the worse responses of a group "
            "whose mean is negative. Set reward.clip_low=0, use reward functions of 0 and above without KL in the "
            "reward, or another estimator."
        )
    groups = group_statistics(outcome, inputs.group)
    divisor = np.where(groups.verdicts >= 2, groups.mean + epsilon, 1.0)
    return same_for_every_token(inputs, groups, groups.centred / divisor)


@estimator("reinforce_plus_plus", relative=False, reads=("gamma",))
def reinforce_plus_plus(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """Whiten the discounted returns over all sampled tokens of the step (REINFORCE++, arXiv 2501.03262).

    No group is compared with itself, so that a sample learns without siblings. A token the policy did not sample has
    no return, and no discount passes over it.
    """
    groups = group_statistics(inputs.outcome, inputs.group)
    returns = discounted_returns(_token_rewards(inputs), inputs.mask, cfg.gamma)
    usable = inputs.mask.values & ~np.isnan(inputs.outcome)[row_of_token(inputs.mask)]
    return _result(inputs, groups, _whitened(returns, usable, inputs.mask), returns)


@estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """Centre on the group's mean, then whiten over all sampled tokens of the step (arXiv 2501.03262).

    Whitening moves all samples, those of groups with equal scores too.
    """
    groups = group_statistics(inputs.outcome, inputs.group)
    tokens = broadcast(groups.centred, inputs.mask)
    advantages = _whitened(tokens, _comparable_tokens(inputs, groups), inputs.mask)
    return _result(inputs, groups, advantages, advantages)


@estimator("remax", relative=False, needs=("greedy_score",))
def remax(inputs: AdvantageInput, cfg: AlgorithmConfig) -> Advantages:
    """Subtract the score of the greedy response to the same prompt (ReMax, arXiv 2310.10505).

    A sample whose greedy response has no verdict gets 0, and so does a token whose return equals that score but for
    rounding.
    """
    assert inputs.greedy_score is not None, "remax needs greedy_score"
    groups = group_statistics(inputs.outcome, inputs.group)
    returns = rewards_to_go(_token_rewards(inputs), inputs.mask)
    judged = ~np.isnan(inputs.outcome) & ~np.isnan(inputs.greedy_score)
    baseline = np.nan_to_num(inputs.greedy_score)[row_of_token(inputs.mask)]
    differ = np.abs(returns - baseline) > EQUAL_WITHIN * np.abs(baseline)
    counted = inputs.mask.values & judged[row_of_token(inputs.mask)] & differ
    advantages = np.where(counted, returns - baseline, 0.0)
    return _result(inputs, groups, advantages, returns)


@estimator("gdpo", needs=("reward_parts",), reads=("gdpo_reward_keys", "gdpo_reward_weights"))
def gdpo(inputs: AdvantageInput, cfg: AlgorithmConfig, *, epsilon: float = 1e-6) -> Advantages:
    """Normalise each reward function within the group, add them up, whiten over the step (GDPO, arXiv 2601.05242).

    `algorithm.gdpo_reward_keys` chooses the functions, all by default, and `algorithm.gdpo_reward_weights` weighs them.
    A function without a value for a sample adds 0 to it and leaves it out of its statistics, and so does one that
    scored no sample of the step.
    """
    groups = group_statistics(inputs.outcome, inputs.group)
    tokens = broadcast(_normalised_parts(inputs, cfg, epsilon), inputs.mask)
    advantages = _whitened(tokens, _comparable_tokens(inputs, groups), inputs.mask)
    return _result(inputs, groups, advantages, advantages)


def _normalised_parts(inputs: AdvantageInput, cfg: AlgorithmConfig, epsilon: float) -> np.ndarray:
    """[N] weighted sum of the reward functions, each normalised within the group.

    Raises:
        ValueError: `gdpo_reward_weights` does not weigh each function.
    """
    names = cfg.gdpo_reward_keys or tuple(inputs.reward_parts)
    weights = cfg.gdpo_reward_weights or (1.0,) * len(names)
    if len(weights) != len(names):
        raise ValueError(f"algorithm.gdpo_reward_weights has {len(weights)} weights for the {len(names)} rewards")
    total = np.zeros(len(inputs.group))
    silent = np.full(len(total), np.nan)
    for name, weight in zip(names, weights, strict=True):
        score = np.where(np.isnan(inputs.outcome), np.nan, inputs.reward_parts.get(name, silent))
        part = group_statistics(score, inputs.group)
        total += weight * part.centred / (part.scale + epsilon)
    return total


@estimator("optimal_token_baseline", needs=("old_log_probs", "sum_pi_squared"))
def optimal_token_baseline(
    inputs: AdvantageInput, cfg: AlgorithmConfig, *, handle_zero_tail: bool = True
) -> Advantages:
    """Subtract a baseline of each position: the group's returns weighted by the squared gradient norm so far (OTB,
    arXiv 2602.07078). Positions count all response tokens."""
    everyone = np.ones(len(inputs.group), dtype=bool)
    return _token_baseline(inputs, position_in_row(inputs.mask), everyone, handle_zero_tail)


@estimator("tir_optimal_token_baseline", needs=("old_log_probs", "sum_pi_squared"))
def tir_optimal_token_baseline(
    inputs: AdvantageInput, cfg: AlgorithmConfig, *, handle_zero_tail: bool = True
) -> Advantages:
    """As optimal_token_baseline, for responses with tool output: positions count sampled tokens alone, and an empty
    response is no member of its group."""
    position = _running_sums(inputs.mask.values, inputs.mask).astype(np.int64) - inputs.mask.values
    return _token_baseline(inputs, position, row_sums(inputs.mask, inputs.mask.values) > 0, handle_zero_tail)


def _token_baseline(
    inputs: AdvantageInput, position: np.ndarray, member: np.ndarray, handle_zero_tail: bool, epsilon: float = 1e-8
) -> Advantages:
    """Returns less sum(W * G) / (sum(W) + epsilon) over the group's members at each position.

    W is the running sum of 1 - 2 p + sum of squared p over the vocabulary, the squared norm of the logits' gradient,
    times the squared rollout-correction weight where there is one. The only member of a group has baseline 0.

    Args:
        inputs: the step's samples.
        position: [tokens] what counts as the same place in two responses.
        member: [N] bool, whether the sample takes part in its group.
        handle_zero_tail: baseline 0 where a response is longer than all others of its group.
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None, "needs sum_pi_squared"
    mask, row = inputs.mask.values, row_of_token(inputs.mask)
    groups = group_statistics(inputs.outcome, inputs.group)
    judged = member & ~np.isnan(inputs.outcome)
    returns = rewards_to_go(_token_rewards(inputs), inputs.mask)
    energy = 1 - 2 * np.exp(inputs.old_log_probs.values.astype(np.float64)) + inputs.sum_pi_squared.values
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.rollout_is_weights.values.astype(np.float64) ** 2
    weight = _running_sums(energy * mask, inputs.mask) * mask * judged[row]
    key = groups.number[row] * (int(position.max(initial=0)) + 1) + position
    baseline = (np.bincount(key, weights=returns * weight) / (np.bincount(key, weights=weight) + epsilon))[key]
    rounding = groups.equal[row] & (np.abs(returns - baseline) <= EQUAL_WITHIN * np.abs(returns))
    baseline = np.where(rounding, returns, baseline)
    members = np.bincount(groups.number, weights=judged)[groups.number][row]
    tail = handle_zero_tail & (position >= _compared_length(inputs.mask, groups, judged)[row])
    lost = (groups.verdicts < 2) & (groups.size >= 2)
    advantages = returns - np.where((members < 2) | tail, 0.0, baseline)
    return _result(inputs, groups, np.where(mask & (judged & ~lost)[row], advantages, 0.0), returns)


def _compared_length(mask: Ragged, groups: Groups, judged: np.ndarray) -> np.ndarray:
    """[N] sampled tokens of the group's second longest response, for its longest one; infinite for all others."""
    length = np.where(judged, row_sums(mask, mask.values), -1)
    limit = np.full(len(length), np.inf)
    for number in range(int(groups.number.max(initial=-1)) + 1):
        members = np.flatnonzero((groups.number == number) & judged)
        if len(members) >= 2:
            second, longest = members[np.argsort(length[members], kind="stable")[-2:]]
            if length[longest] > length[second]:
                limit[longest] = length[second]
    return limit


# ---------------------------------------------------------------------------------------------------------- the pieces


def same_for_every_token(inputs: AdvantageInput, groups: Groups, advantage: np.ndarray) -> Advantages:
    """Give each sampled token of a sample the sample's advantage."""
    rows = broadcast(advantage, inputs.mask)
    return _result(inputs, groups, rows, rows)


def _result(inputs: AdvantageInput, groups: Groups, advantages: np.ndarray, returns: np.ndarray) -> Advantages:
    """Put flat per-token values together with what is known of their groups; samples without a verdict get 0."""
    verdict = ~np.isnan(inputs.outcome)
    known = verdict[row_of_token(inputs.mask)]
    advantages, returns = (np.where(known, values, 0.0).astype(np.float32) for values in (advantages, returns))
    silent = row_sums(inputs.mask, advantages != 0) == 0
    conditions = [~verdict, inputs.empty, ~silent, groups.verdicts < 2, groups.equal]
    reasons = [NO_VERDICT, "empty response", "", "fewer than two verdicts in the group", "equal scores in the group"]
    why = np.select(conditions, reasons, default="its advantage is 0")
    return Advantages(
        advantages=Ragged(advantages, inputs.mask.offsets),
        returns=Ragged(returns, inputs.mask.offsets),
        group_mean=groups.mean,
        group_std=groups.std,
        in_loss=verdict,
        no_signal=[reason or None for reason in why.tolist()],
    )


def _token_rewards(inputs: AdvantageInput) -> np.ndarray:
    """[tokens] float64 reward of each token; 0 for samples without a verdict."""
    known = ~np.isnan(inputs.outcome)
    if inputs.token_rewards is not None:
        return np.where(known[row_of_token(inputs.mask)], inputs.token_rewards.values.astype(np.float64), 0.0)
    rewards = np.zeros(len(inputs.mask.values))
    for row in np.flatnonzero(known).tolist():
        sampled = np.flatnonzero(inputs.mask[row])
        if len(sampled):
            rewards[inputs.mask.offsets[row] + sampled[-1]] = inputs.score[row]
    return rewards


def discounted_returns(rewards: np.ndarray, mask: Ragged, gamma: float) -> np.ndarray:
    """[tokens] float64 reward of each sampled token and of those after it, discounted by gamma a token; 0 elsewhere."""
    sampled = np.flatnonzero(mask.values)
    counts = row_sums(mask, mask.values).astype(np.int64)
    ends = np.cumsum(counts)
    returns, running = np.zeros(len(rewards)), np.zeros(len(mask))
    for back in range(1, int(counts.max(initial=0)) + 1):
        rows = np.flatnonzero(counts >= back)
        places = sampled[ends[rows] - back]
        running[rows] = rewards[places] + gamma * running[rows]
        returns[places] = running[rows]
    return returns


def rewards_to_go(rewards: np.ndarray, mask: Ragged) -> np.ndarray:
    """[tokens] float64 reward of each token's place and of the sampled tokens after it, outside the mask too.

    Summed from the end, row by row: a reward at the last token is the return of all tokens exactly, and no other row's
    rewards round it.
    """
    backwards = Ragged(np.where(mask.values, rewards, 0.0)[::-1], len(rewards) - mask.offsets[::-1])
    return _running_sums(backwards.values, backwards)[::-1]


def _running_sums(values: np.ndarray, rows: Ragged) -> np.ndarray:
    """[tokens] float64 sum of each value and those before it in its row."""
    sums = np.empty(len(values))
    for start, end in pairwise(rows.offsets.tolist()):
        np.cumsum(values[start:end], out=sums[start:end])
    return sums


def _comparable_tokens(inputs: AdvantageInput, groups: Groups) -> np.ndarray:
    """[tokens] bool: sampled tokens of samples that have a verdict and somebody to be compared with."""
    comparable = ~np.isnan(inputs.outcome) & ((groups.verdicts >= 2) | (groups.size == 1))
    return inputs.mask.values & comparable[row_of_token(inputs.mask)]


def _whitened(values: np.ndarray, usable: np.ndarray, mask: Ragged) -> np.ndarray:
    """[tokens] the usable values whitened, 0 elsewhere and where fewer than two are usable.

    Raises:
        ValueError: the step has no sampled token at all.
    """
    if not mask.values.any():
        raise ValueError("the step's responses hold no sampled token, so that no advantage can be whitened")
    whitened = np.zeros(len(values))
    if usable.sum() >= 2:
        whitened[usable] = whiten(values[usable])
    return whitened


def whiten(values: np.ndarray) -> np.ndarray:
    """Values with mean 0 and variance 1 (ddof 1, with 1e-8 added to it); equal values give exactly 0.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no variance")
    if np.ptp(values) <= EQUAL_WITHIN * np.abs(values).max():
        return np.zeros(len(values))
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def _deviation(values: np.ndarray) -> float:
    """Standard deviation with ddof 1; 1 for fewer than two values."""
    return float(values.std(ddof=1)) if len(values) >= 2 else 1.0


def position_in_row(rows: Ragged) -> np.ndarray:
    """[tokens] place of each value in its row, from 0."""
    return np.arange(len(rows.values)) - rows.offsets[:-1][row_of_token(rows)]


def row_of_token(rows: Ragged) -> np.ndarray:
    """[tokens] the row of each value in a flat buffer."""
    return np.repeat(np.arange(len(rows)), rows.lengths)


def row_sums(rows: Ragged, values: np.ndarray) -> np.ndarray:
    """[N] float64 sum of flat values over each row."""
    return np.bincount(row_of_token(rows), weights=values, minlength=len(rows))


def broadcast(per_row: np.ndarray, mask: Ragged) -> np.ndarray:
    """[tokens] a value of each row, repeated over its tokens; 0 outside the mask."""
    return np.where(mask.values, per_row[row_of_token(mask)], 0.0)
