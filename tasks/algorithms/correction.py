"""Rollout correction: importance weights and rejection for the gap between the sampler's and the trainer's log-probs.

NumPy only: weights and masks are constants of the loss. The log ratio is log pi_train - log pi_rollout of each sampled
token. Truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training"; a band `low_high` that zeroes what lies outside is IcePop's (arXiv 2510.18855).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from storage.ragged import Ragged
from tasks.algorithms.correction_rules import Band, Rule, parse_band, parse_rules
from tasks.config import RolloutCorrectionConfig

MAX_LOG_RATIO = 20.0
"""Log ratios, and their sums over a sequence, are held within this before they are exponentiated."""

Level = Literal["token", "sequence"]


@dataclass(frozen=True, eq=False)
class Correction:
    """What rollout correction makes of N samples.

    Attributes:
        weights: N rows float32, 0 outside the mask, not yet normalised; None: `rollout_is` is off.
        mask: N rows of bool: the mask less the rejected tokens.
        metrics: under `rollout_corr/…`.
    """

    weights: Ragged | None
    mask: Ragged
    metrics: dict[str, float]


def correct(rollout: Ragged, train: Ragged, mask: Ragged, cfg: RolloutCorrectionConfig) -> Correction:
    """Weigh and reject the tokens of N samples.

    Weights and rejection are both worked out from the mask as it is given; neither sees the other's result.

    Args:
        rollout: N rows, the sampler's log-probs.
        train: N rows, the trainer's log-probs of the same tokens, at the same temperature and without filters.
        mask: N rows of bool, true: the policy sampled the token.
        cfg: `algorithm.rollout_correction`.

    Raises:
        ValueError: no token is in the mask, or the configuration is not valid.
    """
    rows = _Rows(mask)
    if not rows.tokens:
        raise ValueError("rollout correction needs at least one sampled token, and the mask holds none")
    log_ratio = np.where(mask.values, train.values.astype(np.float64) - rollout.values.astype(np.float64), 0.0)
    metrics = {}
    weights = None
    if cfg.rollout_is is not None:
        band = parse_band(cfg.rollout_is_threshold, cfg.rollout_is_mode)
        raw = importance_weights(log_ratio, mask, cfg.rollout_is)
        flat = truncate(raw, band)
        metrics.update(_weight_metrics(log_ratio, raw, flat, rows, cfg.rollout_is, band))
        weights = Ragged(flat.astype(np.float32), mask.offsets)
    kept = mask.values
    if cfg.rollout_rs is not None:
        kept, rejection = reject(log_ratio, mask, parse_rules(cfg.rollout_rs, cfg.rollout_rs_threshold))
        metrics.update(rejection)
    metrics.update(gap_metrics(rollout, train, mask))
    return Correction(weights, Ragged(kept, mask.offsets), {f"rollout_corr/{k}": v for k, v in metrics.items()})


# ------------------------------------------------------------------------------------------------------------ weights


def importance_weights(log_ratio: np.ndarray, mask: Ragged, level: Level) -> np.ndarray:
    """[tokens] pi_train / pi_rollout of each token, or of its whole sequence; 0 outside the mask.

    Raises:
        ValueError: no such level.
    """
    if level == "token":
        total = log_ratio
    elif level == "sequence":
        rows = _Rows(mask)
        total = rows.sums(log_ratio)[rows.row]
    else:
        raise ValueError(f"algorithm.rollout_correction.rollout_is={level!r} is unknown; there are token, sequence")
    return np.where(mask.values, np.exp(total.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)), 0.0)


def truncate(weights: np.ndarray, band: Band) -> np.ndarray:
    """Weights held within the band, or those outside it set to 0; a weight of 0, which is no token's, stays 0."""
    low = 0.0 if band.low is None else band.low
    inside = (weights >= low) & (weights <= band.high)
    return np.where(inside, weights, 0.0 if band.masks else weights.clip(low, band.high) * (weights > 0))


def mean_weight(weights: np.ndarray, mask: Ragged, level: Level) -> float:
    """Divisor of `rollout_is_batch_normalize`: mean over tokens, or over the sequences that have any.

    A mean of 0 divides by 1: zero weights stay zero, and the update is skipped.
    """
    rows = _Rows(mask)
    mean = rows.mean(weights) if level == "token" else float(rows.means(weights)[rows.counts > 0].mean())
    return mean if mean > 1e-8 else 1.0


# ---------------------------------------------------------------------------------------------------------- rejection


def reject(log_ratio: np.ndarray, mask: Ragged, rules: list[Rule]) -> tuple[np.ndarray, dict[str, float]]:
    """Drop the tokens, or whole sequences, that break any of the rules.

    Returns:
        ([tokens] bool, the mask less what is rejected; metrics).
    """
    rows = _Rows(mask)
    keep = mask.values.copy()
    metrics: dict[str, float] = {}
    for rule in rules:
        statistic, by_row = _statistic(log_ratio, rows, rule)
        low = -math.inf if rule.low is None else rule.low
        inside = (statistic >= low) & (statistic <= rule.high)
        keep &= inside
        metrics.update(_rule_metrics(statistic, by_row, inside, rows, rule))
    metrics["rollout_rs_masked_fraction"] = rows.mean(~keep)
    metrics["rollout_rs_seq_masked_fraction"] = float((rows.sums(~keep) > 0).mean())
    return keep, metrics


def _statistic(log_ratio: np.ndarray, rows: _Rows, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """([tokens] the rule's statistic at each token, [N] the statistic of each row)."""
    held = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token = {"k1": -held, "k2": 0.5 * held**2, "k3": np.exp(held) - 1 - held}[rule.estimator]
    if rule.over == "token":
        return token, rows.means(token)
    if rule.over == "seq_veto":
        by_row = rows.farthest(token, _middle(rule))
    else:
        by_row = {"seq_sum": rows.sums, "seq_mean": rows.means, "seq_max": rows.maxima}[rule.over](token)
    return by_row[rows.row], by_row


def _middle(rule: Rule) -> float:
    """Middle of the rule's bounds: a row has a token outside them when the one farthest from it is."""
    assert rule.low is not None, f"{rule.name} has two bounds"
    return (rule.low + rule.high) / 2


# ------------------------------------------------------------------------------------------------------------ metrics


class _Rows:
    """Sums and means over the masked tokens of flat values, in all and by row.

    Attributes:
        row: [tokens] row of each token.
        counts: [N] masked tokens of each row.
        tokens: masked tokens.
    """

    def __init__(self, mask: Ragged) -> None:
        self.mask = mask.values.astype(bool)
        self.row = np.repeat(np.arange(len(mask)), mask.lengths)
        self.number = len(mask)
        self.counts = self.sums(np.ones(len(self.mask)))
        self.tokens = int(self.mask.sum())

    def sums(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.row, weights=np.where(self.mask, values, 0.0), minlength=self.number)

    def means(self, values: np.ndarray) -> np.ndarray:
        """0 for a row without any."""
        return self.sums(values) / np.maximum(self.counts, 1)

    def maxima(self, values: np.ndarray) -> np.ndarray:
        """0 for a row without any."""
        largest = np.full(self.number, -np.inf)
        np.maximum.at(largest, self.row[self.mask], values[self.mask])
        return np.where(self.counts > 0, largest, 0.0)

    def farthest(self, values: np.ndarray, middle: float) -> np.ndarray:
        """The value of each row that is farthest from the middle; that itself for a row without any."""
        above, below = self.maxima(values - middle), self.maxima(middle - values)
        return middle + np.where(above >= below, above, -below)

    def mean(self, values: np.ndarray) -> float:
        return float(values[self.mask].mean())

    def spread(self, values: np.ndarray) -> float:
        """Standard deviation, ddof 0."""
        return float(values[self.mask].std())


def _deviation(values: np.ndarray) -> float:
    """Standard deviation with ddof 1; 0 for one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _weight_metrics(
    log_ratio: np.ndarray, raw: np.ndarray, weights: np.ndarray, rows: _Rows, level: Level, band: Band
) -> dict[str, float]:
    """verl's `rollout_is_*`: bounds are compared with raw weights, the rest describes the weights that are applied.

    Statistics over sequences count every row, an empty one with weight 0.
    """
    low = 1 / band.high if band.low is None else band.low
    by_row, raw_by_row = rows.means(weights), rows.means(raw)
    if level == "sequence":
        total = rows.sums(log_ratio)
        largest, smallest = (math.exp(min(bound, MAX_LOG_RATIO)) for bound in (total.max(), total.min()))
        above, below = float((total > math.log(band.high)).mean()), float((total < math.log(low)).mean())
    else:
        largest, smallest = float(weights[rows.mask].max()), float(weights[rows.mask].min())
        above, below = rows.mean(raw > band.high), rows.mean(raw < low)
    mean = rows.mean(weights)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_std": rows.spread(weights),
        "rollout_is_eff_sample_size": mean**2 / rows.mean(weights**2) if mean > 0 else 0.0,
        "rollout_is_ratio_fraction_high": above,
        "rollout_is_ratio_fraction_low": below,
        "rollout_is_seq_mean": float(by_row.mean()),
        "rollout_is_seq_std": _deviation(by_row),
        "rollout_is_seq_max": float(by_row.max()),
        "rollout_is_seq_min": float(by_row.min()),
        "rollout_is_seq_max_deviation": float(np.abs(by_row - 1).max()),
        "rollout_is_seq_fraction_high": float((raw_by_row > band.high).mean()),
        "rollout_is_seq_fraction_low": float((raw_by_row < low).mean()),
    }
    if band.low is not None:
        metrics["rollout_is_oob_ratio"] = rows.mean((raw < band.low) | (raw > band.high))
    return metrics


def _rule_metrics(
    statistic: np.ndarray, by_row: np.ndarray, inside: np.ndarray, rows: _Rows, rule: Rule
) -> dict[str, float]:
    """verl's `rollout_rs_<rule>_*`; statistics over sequences leave empty rows out."""
    filled = rows.counts > 0
    sequences = by_row[filled]
    every = statistic[rows.mask] if rule.over == "token" else sequences
    low = -math.inf if rule.low is None else rule.low
    metrics = {
        "mean": rows.mean(statistic),
        "max": float(every.max()),
        "min": float(every.min()),
        "std": rows.spread(statistic.clip(0.0 if rule.low is None else rule.low, rule.high)),
        "fraction_high": float((every > rule.high).mean()),
        "fraction_low": float((every < low).mean()),
        "masked_fraction": rows.mean(~inside),
        "seq_mean": float(sequences.mean()),
        "seq_std": _deviation(sequences),
        "seq_max": float(sequences.max()),
        "seq_min": float(sequences.min()),
        "seq_max_deviation": float(np.abs(sequences).max()),
        "seq_fraction_high": float((sequences > rule.high).mean()),
        "seq_masked_fraction": float((rows.sums(~inside)[filled] > 0).mean()),
    }
    if rule.low is not None:
        metrics["seq_fraction_low"] = float((sequences < low).mean())
    return {f"rollout_rs_{rule.name}_{name}": value for name, value in metrics.items()}


def gap_metrics(rollout: Ragged, train: Ragged, mask: Ragged) -> dict[str, float]:
    """How far the trainer's policy is from the sampler's: KL, perplexities, chi-squared; verl's names.

    A mean over sequences counts every row, an empty one with perplexity 1.
    """
    rows = _Rows(mask)
    sampled, trained = rollout.values.astype(np.float64), train.values.astype(np.float64)
    log_ratio = np.where(rows.mask, trained - sampled, 0.0)
    log_ppl, rollout_log_ppl = -rows.means(trained), -rows.means(sampled)
    difference = log_ppl - rollout_log_ppl
    held = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    total = rows.sums(log_ratio).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    with np.errstate(over="ignore"):
        return {
            "kl": rows.mean(-log_ratio),
            "k3_kl": rows.mean(np.exp(held) - 1 - held),
            "training_ppl": float(np.exp(log_ppl).mean()),
            "training_log_ppl": float(log_ppl.mean()),
            "rollout_ppl": float(np.exp(rollout_log_ppl).mean()),
            "rollout_log_ppl": float(rollout_log_ppl.mean()),
            "log_ppl_diff": float(difference.mean()),
            "log_ppl_abs_diff": float(np.abs(difference).mean()),
            "log_ppl_diff_max": float(difference.max()),
            "log_ppl_diff_min": float(difference.min()),
            "ppl_ratio": float(np.exp(difference).mean()),
            "chi2_token": rows.mean(np.exp(held) ** 2) - 1,
            "chi2_seq": float(np.exp(2 * total).mean()) - 1,
        }


def probability_gap(rollout: Ragged, train: Ragged, mask: Ragged) -> dict[str, float]:
    """verl's `training/rollout_probs_diff_*` and the correlation of the two probabilities, over sampled tokens.

    Returns:
        Metrics under their tracking names; the correlation only where both vary.
    """
    keep = mask.values.astype(bool)
    if not keep.any():
        return {"training/rollout_probs_diff_valid": 0.0}
    sampled, trained = (np.exp(rows.values[keep].astype(np.float64)) for rows in (rollout, train))
    gap = np.abs(sampled - trained)
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_std": _deviation(gap),
    }
    if sampled.std() > 0 and trained.std() > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = float(np.corrcoef(sampled, trained)[0, 1])
    return metrics
