"""KL between the policy and its reference, token by token: estimators, KL in the reward, the weight's controller.

With r = pi_ref / pi of the sampled token, the estimators are Schulman's (http://joschu.net/blog/kl-approx.html):
k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.
"""

from __future__ import annotations

import numpy as np
import torch

from storage.ragged import Ragged
from tasks.config import KLControlConfig, KLType

MAX_LOG_RATIO = 20.0
"""k3: the log ratio is held within this, so that its exponential stays finite, also in float32 and bfloat16."""
MAX_K3 = 10.0
"""k3: the largest value of one token; beyond it a token is a constant and has no gradient."""


def kl_estimate(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLType, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats.

    Names: kl = k1; abs = |k1|; mse = k2; low_var_kl = k3. A trailing `+` keeps the value and takes the gradient of k2,
    whose expectation is the gradient of the KL; k1 in a loss has an expected gradient of zero.

    Args:
        log_probs: of the policy, any shape.
        ref_log_probs: of the reference, same shape.
        kind: `actor.kl_loss_type` or `algorithm.kl_penalty`.
        ratio: of the policy's probability to the sampling policy's, with gradient, same shape. The estimate is
            multiplied by it, which makes it and the gradient of k1 and k3 unbiased for tokens that an older policy
            sampled (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). None: 1.

    Returns:
        Same shape, finite for finite inputs; k3, times the ratio, is within 0 .. 10.

    Raises:
        ValueError: no such estimator.
    """
    gap = log_probs - ref_log_probs
    value = _estimate(gap, kind.removesuffix("+"), ratio)
    if not kind.endswith("+"):
        return value
    # The gradient of k2 alone is that of the KL: the ratio weighs it, but adds no gradient of its own.
    k2 = _estimate(gap, "k2", None if ratio is None else ratio.detach())
    return k2 - k2.detach() + value.detach()


def _estimate(gap: torch.Tensor, kind: str, ratio: torch.Tensor | None) -> torch.Tensor:
    weight = 1.0 if ratio is None else ratio
    if kind in ("kl", "k1"):
        return weight * gap
    if kind == "abs":
        return weight * gap.abs()
    if kind in ("mse", "k2"):
        return weight * (0.5 * gap.square())
    if kind in ("low_var_kl", "k3"):
        log_r = (-gap).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (weight * (log_r.expm1() - log_r)).clamp(-MAX_K3, MAX_K3)
    raise ValueError(
        f"no KL estimator is called {kind!r} (actor_rollout_ref.actor.kl_loss_type, algorithm.kl_penalty); "
        "there are kl, k1, abs, mse, k2, low_var_kl, k3, each with or without a trailing +"
    )


def kl_clamped(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLType, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Which tokens `kl_estimate` holds at a bound: bool, same shape; sum over the loss mask for the metric."""
    log_r = (ref_log_probs - log_probs).detach()
    if kind.removesuffix("+") not in ("low_var_kl", "k3"):
        return torch.zeros_like(log_r, dtype=torch.bool)
    held = log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = 1.0 if ratio is None else ratio.detach()
    return (log_r.abs() > MAX_LOG_RATIO) | (weight * (held.expm1() - held) > MAX_K3)


def kl_in_reward(
    score: np.ndarray, old_log_probs: Ragged, ref_log_probs: Ragged, mask: Ragged, kind: KLType, coef: float
) -> tuple[Ragged, float]:
    """Subtract KL from the reward of every token (InstructGPT, arXiv 2203.02155, eq. 2, token by token).

    Args:
        score: [N] goes to the last token the policy sampled; NaN: no verdict, and it goes nowhere.
        old_log_probs: N rows, of the policy before the step.
        ref_log_probs: N rows.
        mask: N rows of bool, true: the policy sampled this token.
        kind: `algorithm.kl_penalty`.
        coef: weight of the KL in this step.

    Returns:
        (token rewards, N rows float32; the mean over sequences of their mean KL per token, nats).
    """
    old, ref = (torch.from_numpy(np.array(rows.values, dtype=np.float64)) for rows in (old_log_probs, ref_log_probs))
    kl = np.where(mask.values, kl_estimate(old, ref, kind).numpy(), 0.0)
    rewards = -coef * kl
    for row, start in enumerate(mask.offsets[:-1]):
        sampled = np.flatnonzero(mask[row])
        if len(sampled) and not np.isnan(score[row]):
            rewards[start + sampled[-1]] += score[row]
    return Ragged(rewards.astype(np.float32), mask.offsets), _mean_over_sequences(kl, mask)


def _mean_over_sequences(values: np.ndarray, mask: Ragged) -> float:
    """Mean over rows of the mean over a row's masked tokens; a row without any counts as 0."""
    row = np.repeat(np.arange(len(mask)), mask.lengths)
    sums = np.bincount(row, weights=values * mask.values, minlength=len(mask))
    counts = np.bincount(row, weights=mask.values, minlength=len(mask))
    return float((sums / np.maximum(counts, 1)).mean()) if len(mask) else 0.0


def next_kl_coef(coef: float, kl: float, sequences: int, cfg: KLControlConfig) -> float:
    """The weight of the KL in the next step's reward (adaptive: arXiv 1909.08593, section 2.2).

    Args:
        coef: weight used in this step.
        kl: this step's KL, as `kl_in_reward` returns it.
        sequences: sequences of this step.
        cfg: `algorithm.kl_ctrl`.
    """
    if cfg.type == "fixed":
        return coef
    error = min(max(kl / cfg.target_kl - 1, -0.2), 0.2)
    return coef * (1 + error * sequences / cfg.horizon)
