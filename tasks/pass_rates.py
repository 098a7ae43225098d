"""How often prompts are solved, and how many groups of k samples would carry a signal: estimates from n samples each.

A group teaches something when some of its samples pass and some do not. With a prompt's pass rate p that happens with
probability 1 - p^k - (1 - p)^k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma

import numpy as np

from tasks.algorithms.sample_metrics import pass_at_k, pass_hat_k


@dataclass(frozen=True)
class Share:
    """A share of groups, and how it is known.

    Attributes:
        k: samples of a group.
        share: of groups with a signal, mean over prompts.
        error: standard error of that mean, over prompts; None: one prompt, or not known.
        prompts: how many prompts it is a mean over.
        how: `measured`, `unbiased` or `estimate`.
    """

    k: int
    share: float
    error: float | None
    prompts: int
    how: str


def signal_at(n: int, passed: int, k: int) -> float:
    """Chance that k samples of a prompt are neither all right nor all wrong, from n >= k samples of which c passed.

    1 - C(c, k) / C(n, k) - C(n - c, k) / C(n, k): the mean over all subsets of k of the n samples, and therefore
    unbiased for 1 - p^k - (1 - p)^k. It is pass@k of arXiv 2107.03374, eq. 1, without the subsets that pass as a whole
    (pass^k of arXiv 2406.12045).

    Args:
        n: samples of the prompt.
        passed: c, how many of them pass.
        k: 1 to n.
    """
    return pass_at_k(n, passed, k) - pass_hat_k(n, passed, k)


def signal_share(n: np.ndarray, passed: np.ndarray, k: int) -> Share | None:
    """Expected share of groups of k with a signal; None: there are no prompts to tell it from.

    Up to the samples that there are it is unbiased, over the prompts that have as many verdicts. Beyond, no unbiased
    estimate exists, since (1 - p)^k is no polynomial of degree n: the pass rates of the prompts are then taken to be
    beta distributed, with the parameters that make what was seen likeliest, and each prompt's own rate to be what that
    distribution and its own samples say.

    Args:
        n: [P] samples of each prompt that have a verdict.
        passed: [P] how many of them pass.
        k: size of the group.
    """
    enough = n >= max(k, 1)
    # Prompts of which some verdicts are missing do not make an unbiased number an estimate.
    if enough.any() and k <= n.max():
        values = np.asarray([signal_at(int(a), int(c), k) for a, c in zip(n[enough], passed[enough], strict=True)])
        how = "measured" if (n[enough] == k).all() else "unbiased"
        return Share(k, float(values.mean()), _standard_error(values), len(values), how)
    known = n > 0
    if not known.any():
        return None
    a, b = likeliest_beta(n[known], passed[known])
    values = np.asarray(
        [_signal_of_beta(a + c, b + m - c, k) for m, c in zip(n[known], passed[known], strict=True)], dtype=np.float64
    )
    return Share(k, float(values.mean()), None, len(values), "estimate")


def _standard_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _signal_of_beta(a: float, b: float, k: int) -> float:
    """Mean of 1 - p^k - (1 - p)^k for p ~ Beta(a, b)."""
    return 1.0 - exp(_log_beta(a + k, b) - _log_beta(a, b)) - exp(_log_beta(a, b + k) - _log_beta(a, b))


def likeliest_beta(n: np.ndarray, passed: np.ndarray) -> tuple[float, float]:
    """Parameters (a, b) of the beta distribution of pass rates under which the counts are likeliest, on a grid.

    Args:
        n: [P] samples of each prompt, at least 1.
        passed: [P] how many of them pass.
    """
    pairs, counts = np.unique(np.stack([n, passed]), axis=1, return_counts=True)
    best, found = -np.inf, (1.0, 1.0)
    for mean in _MEANS:
        for weight in _WEIGHTS:
            a, b = mean * weight, (1 - mean) * weight
            terms = [_log_beta(a + c, b + m - c) for m, c in pairs.T.tolist()]
            value = float(np.dot(counts, terms)) - float(counts.sum()) * _log_beta(a, b)
            if value > best:
                best, found = value, (a, b)
    return found


_MEANS = [float(x) for x in 1 / (1 + np.exp(-np.linspace(-7, 7, 57)))]
"""Mean pass rates that are tried: 0.001 to 0.999."""
_WEIGHTS = [float(x) for x in np.geomspace(0.05, 200, 36)]
"""a + b that are tried: from prompts that are always or never solved to prompts that are all alike."""


@lru_cache(maxsize=200_000)
def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


BINS = ((0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0))
"""Pass rates between never and always: above the first number, up to the second, 1 excluded."""


def distribution(rate: np.ndarray) -> dict[str, int]:
    """Prompts by pass rate: never, between, always.

    Args:
        rate: [P] pass rate of each prompt; NaN: it has no verdict, and is not counted.
    """
    known = rate[~np.isnan(rate)]
    inside = known[(known > 0) & (known < 1)]
    # Shares such as 3/5 are not exact: they belong to the bin that ends with them.
    bin_of = np.minimum(np.ceil(inside * len(BINS) - 1e-9).astype(int) - 1, len(BINS) - 1)
    counts = np.bincount(bin_of, minlength=len(BINS))
    between = {f"{low:g}..{high:g}": int(count) for (low, high), count in zip(BINS, counts, strict=True)}
    return {"0": int((known == 0).sum()), **between, "1": int((known == 1).sum())}
