"""Metrics as pure functions of arrays: what samples scored, how long they are, what a step cost, under verl's names.

A statistic of no numbers is NaN, which a manifest holds as null: the names are the same in every step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import comb

import numpy as np

DRAWS = 1000
"""Resamplings behind each best@k, worst@k and maj@k, as in verl."""

SEED = 42
"""Seed of every resampling, as in verl: prompts with equal counts are resampled at the same places."""


# ------------------------------------------------------------------------------------------------- one step's training


def spread(name: str, values: np.ndarray, keys: Sequence[str] = ("mean", "max", "min")) -> dict[str, float]:
    """`name/mean`, `name/max`, `name/min`, `name/std` (ddof 0) of some numbers; NaN where there are none."""
    if not len(values):
        return {f"{name}/{key}": float("nan") for key in keys}
    numbers = {"mean": values.mean(), "max": values.max(), "min": values.min(), "std": values.std()}
    return {f"{name}/{key}": float(numbers[key]) for key in keys}


def signal_metrics(
    score: np.ndarray, reward: np.ndarray, lengths: np.ndarray, advantages: np.ndarray, returns: np.ndarray
) -> dict[str, float]:
    """What the step learns from.

    Args:
        score: [N] score of each sample; NaN: no verdict.
        reward: [N] sum of its token rewards.
        lengths: [N] response tokens. As in verl, an empty response is in no statistic of scores and rewards: no token
            carries its reward.
        advantages: [T] advantage of each token in the loss.
        returns: [T] return of each token in the loss.
    """
    counted = ~np.isnan(score) & (lengths > 0)
    return {
        **spread("critic/score", score[counted]),
        **spread("critic/rewards", reward[counted]),
        **spread("critic/advantages", advantages),
        **spread("critic/returns", returns),
    }


def length_metrics(
    lengths: np.ndarray, cut: np.ndarray, prompt_lengths: np.ndarray, prompt_limit: int
) -> dict[str, float]:
    """Lengths in tokens; for responses over all and over those that are not empty.

    Args:
        lengths: [N] response tokens.
        cut: [N] true: the response ended at its length limit.
        prompt_lengths: [G] prompt tokens.
        prompt_limit: most tokens a prompt may have.
    """
    full = lengths > 0
    return {
        **spread("response_length", lengths),
        "response_length/clip_ratio": _share(cut),
        **spread("response_length_non_aborted", lengths[full]),
        "response_length_non_aborted/clip_ratio": _share(cut[full]),
        "response/aborted_ratio": _share(~full),
        **spread("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": _share(prompt_lengths >= prompt_limit),
    }


def _share(flags: np.ndarray) -> float:
    return float(flags.mean()) if len(flags) else float("nan")


def timing_metrics(seconds: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """Durations by timer, and per token for the timers whose work is counted in tokens.

    Args:
        seconds: duration by timer, s.
        tokens: tokens by timer; a timer that is not here has no time per token. No tokens give 0 ms, as in verl.
    """
    per_token = {name: 1000 * seconds[name] / count if count else 0.0 for name, count in tokens.items()}
    return {
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        **{f"timing_per_token_ms/{name}": value for name, value in per_token.items()},
    }


def throughput_metrics(tokens: int, seconds: float, devices: int) -> dict[str, float]:
    """Prompt and response tokens of the step, its duration in s, and tokens per second and device."""
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * devices),
    }


def variance_proxies(
    row: np.ndarray,
    n: int,
    advantages: np.ndarray,
    old_log_probs: np.ndarray,
    sum_pi_squared: np.ndarray,
    gradient_norm: float | None = None,
    weights: np.ndarray | None = None,
) -> dict[str, float]:
    """What the policy gradient's mean and noise are made of, as verl's `compute_variance_proxy_metrics` defines them.

    The squared gradient norm of sample i is taken as A_i^2 W_i, with A_i the mean advantage of its tokens and W_i the
    sum over them of 1 - 2 p + sum over the vocabulary of p^2: the squared norm of the gradient of log p with respect
    to the logits. Proxy 1 is the squared norm of the mean gradient, proxy 2 the mean of A^2 W, proxy 3 the variance of
    the mean gradient, (proxy 2 - proxy 1) / (N - 1), at least 0.

    Args:
        row: [T] sample of each token in the loss, 0 to n - 1.
        n: samples, those without loss tokens included: they count with A = W = 0.
        advantages: [T] advantage of each token.
        old_log_probs: [T] its log-prob under the policy before the step.
        sum_pi_squared: [T] sum of the squared probabilities of all tokens at its place.
        gradient_norm: norm of the step's gradient; None: proxies 1 and 3 are 0, as in verl.
        weights: [T] importance weights of rollout correction; a sample's power then takes the square of their mean.
    """
    tokens = np.maximum(np.bincount(row, minlength=n), 1)

    def summed(values: np.ndarray) -> np.ndarray:
        return np.bincount(row, weights=values, minlength=n)

    energy = 1 - 2 * np.exp(old_log_probs.astype(np.float64)) + sum_pi_squared
    squared_advantage = (summed(advantages) / tokens) ** 2
    power = squared_advantage * np.maximum(summed(energy), 0)
    if weights is not None:
        power = power * (summed(weights) / tokens) ** 2
        energy = energy * weights.astype(np.float64) ** 2
    signal = 0.0 if gradient_norm is None else gradient_norm**2
    total = float(power.mean())
    noise = 0.0 if gradient_norm is None or n < 2 else max(0.0, (total - signal) / (n - 1))
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": total,
        "variance_proxy/proxy3_pure_noise": noise,
        "variance_proxy/expected_a_squared": float(squared_advantage.mean()),
        "variance_proxy/expected_w": float(summed(energy).mean()),
    }


def combine(values: np.ndarray | Sequence[float], how: str) -> float:
    """One number from a metric's parts.

    Args:
        values: [M] by mini-batch or micro-batch, or [R, M] also by rank.
        how: mean | max | min over all parts; sum: over the M parts of the mean over ranks, which all hold a share of
            the same part.
    """
    table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    results = {"mean": table.mean(), "max": table.max(), "min": table.min(), "sum": table.mean(axis=0).sum()}
    return float(results[how])


def reduce_metrics(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """A step's metrics from their values by mini-batch: the largest or smallest where the name says so, else the mean.

    A name says so by the first or last word of its last part: `response_length/max`, `max_reward`, `actor/ratio_max`,
    but not `admin`, `minibatch` or `rs_seq_max_k2_masked_fraction`. The last word counts before the first.
    """
    return {name: combine(values, _reduction(name)) for name, values in parts.items()}


def _reduction(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower().rpartition("/")[2])
    return next((word for word in (words[-1], words[0]) if word in ("max", "min")), "mean")


# ----------------------------------------------------------------------------------------------------------- validation


def sizes(n: int) -> list[int]:
    """The k of best@k and its like for n samples: powers of two from 2 to below n, and n itself; none for n = 1."""
    return [*(2**power for power in range(1, (n - 1).bit_length())), n] if n > 1 else []


def validation_metrics(
    source: Sequence[str],
    prompt: Sequence[str],
    values: np.ndarray,
    votes: Sequence[str | None] | None = None,
    pass_score: float | None = None,
) -> dict[str, dict[str, float]]:
    """Statistics of one variable by data source: within each prompt first, then the mean over prompts.

    A NaN is no verdict: that sample is in no statistic, nor is its vote. A prompt has the metrics of its own count n of
    verdicts: mean@n, std@n (ddof 0) and everything @k for k in `sizes(n)`. So each metric is the mean over the prompts
    that have it; a prompt with 3 verdicts of 4 counts in mean@3, best@2 and best@3 but not in mean@4 or best@4, and one
    without a verdict counts nowhere.

    Args:
        source: [N] data source of each sample.
        prompt: [N] which prompt it answers.
        values: [N] its value; NaN: no verdict.
        votes: [N] its answer, for maj@k; None is a vote like any other: for having no answer. A source without any
            answer has no maj@k.
        pass_score: a sample passes when its value is at least this; None: no pass@k and pass^k.

    Returns:
        Metric by name, by data source; a source without a verdict has none.
    """
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, (name, about) in enumerate(zip(source, prompt, strict=True)):
        rows[name][about].append(index)
    results = {}
    for name, prompts in rows.items():
        answered = votes is not None and any(votes[i] is not None for group in prompts.values() for i in group)
        known = [kept for group in prompts.values() if (kept := [i for i in group if not np.isnan(values[i])])]
        made = []
        for group in known:
            metrics = prompt_metrics(values[group], [votes[i] for i in group] if votes and answered else None)
            if pass_score is not None:
                metrics.update(pass_metrics(len(group), int((values[group] >= pass_score).sum())))
            made.append(metrics)
        results[name] = mean_by_name(made)
    return results


def mean_by_name(made: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over those that have it."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for metrics in made:
        for name, value in metrics.items():
            by_name[name].append(value)
    return {name: float(np.mean(values)) for name, values in by_name.items()}


def prompt_metrics(values: np.ndarray, votes: Sequence[str | None] | None = None) -> dict[str, float]:
    """mean@n and, for n > 1, std@n (ddof 0) and best@k, worst@k and, given votes, maj@k of one prompt's n samples."""
    n = len(values)
    metrics = {f"mean@{n}": float(values.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(values.std())
    ballots = None if votes is None else _ballots(votes)
    for k in sizes(n):
        for name, (mean, std) in bootstrap(values, k, ballots).items():
            metrics[f"{name}@{k}/mean"], metrics[f"{name}@{k}/std"] = mean, std
    return metrics


def bootstrap(values: np.ndarray, k: int, ballots: np.ndarray | None = None) -> dict[str, tuple[float, float]]:
    """Best, worst and, given ballots, majority value of k samples: mean and std (ddof 0) over `DRAWS` resamplings.

    The k samples are drawn with replacement, as in verl, so best@n is less than the best of the n. `pass_at_k` is the
    estimate without that bias.

    Args:
        values: [n] value of each sample.
        k: samples per draw.
        ballots: [n] answer of each sample as a small number.
    """
    places = _draws(len(values), k)
    drawn = values[places]
    results = {"best": drawn.max(axis=0), "worst": drawn.min(axis=0)}
    if ballots is not None:
        results["maj"] = np.take_along_axis(drawn, majority(ballots[places])[None], axis=0)[0]
    return {name: (float(of.mean()), float(of.std())) for name, of in results.items()}


@lru_cache(maxsize=64)
def _draws(n: int, k: int) -> np.ndarray:
    """[k, DRAWS] places in 0..n-1: the numbers of verl's `np.random.seed(42); np.random.choice(n, (1000, k))`."""
    return np.ascontiguousarray(np.random.RandomState(SEED).choice(n, size=(DRAWS, k), replace=True).T)


def majority(ballots: np.ndarray) -> np.ndarray:
    """[D] place of the first ballot for each vote's winner: the answer with most ballots, among equals the first seen.

    Args:
        ballots: [k, D] the k ballots of each of D votes, as numbers from 0.
    """
    votes = ballots.shape[1]
    cells = ballots * votes + np.arange(votes)
    return np.bincount(cells.ravel())[cells].argmax(axis=0)


def _ballots(votes: Sequence[str | None]) -> np.ndarray:
    """[n] equal numbers for equal answers."""
    number = {vote: index for index, vote in enumerate(dict.fromkeys(votes))}
    return np.asarray([number[vote] for vote in votes], dtype=np.int64)


def pass_metrics(n: int, passed: int) -> dict[str, float]:
    """pass@k and pass^k of one prompt for k = 1 and `sizes(n)`."""
    metrics = {}
    for k in [1, *sizes(n)]:
        metrics[f"pass@{k}"], metrics[f"pass^{k}"] = pass_at_k(n, passed, k), pass_hat_k(n, passed, k)
    return metrics


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that one of k samples passes, 1 - C(n - c, k) / C(n, k): unbiased (arXiv 2107.03374, eq. 1).

    Args:
        n: samples of the prompt.
        passed: c, how many of them pass.
        k: samples drawn without replacement, 1 to n.
    """
    return 1.0 - comb(n - passed, k) / comb(n, k)


def pass_hat_k(n: int, passed: int, k: int) -> float:
    """Chance that all of k samples pass, C(c, k) / C(n, k): unbiased (tau-bench, arXiv 2406.12045)."""
    return comb(passed, k) / comb(n, k)
