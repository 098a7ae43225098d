"""Policy losses: from log-probs and advantages to a loss per token.

A loss function sees one micro-batch and returns the loss of every token and, under its metrics' names, a value of every
token whose mean over the mini-batch's loss tokens is the metric (`actor/<name>` in tracking). Sums of both add up over
micro-batches and ranks. What depends on the whole mini-batch is worked out once per optimizer step by
`prepare_mini_batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasks.config import ActorConfig

MAX_LOG_RATIO = 20.0
"""Log ratios of new to old probability are held within this, so that the ratio stays finite in float32."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The same for gspo's sequence ratio."""


@dataclass(frozen=True, eq=False)
class LossBatch:
    """B sequences, right-padded to R response tokens.

    Attributes:
        log_probs: [B, R] of the policy that is trained, with gradient.
        old_log_probs: [B, R] of the policy that the ratio compares with.
        advantages: [B, R].
        mask: [B, R] bool, true: the token takes part in the loss. Padding must be finite in all tensors.
        rollout_is_weights: [B, R] importance weights for the gap between sampler and trainer; None: all 1.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    rollout_is_weights: torch.Tensor | None = None


TokenMetrics = dict[str, torch.Tensor]
PolicyLoss = Callable[[LossBatch, ActorConfig], tuple[torch.Tensor, TokenMetrics]]


def vanilla(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 10) and the
    dual clip (arXiv 1912.09729, eq. 5): with a negative advantage, the ratio counts as `clip_ratio_c` at most."""
    ratio, log_ratio = probability_ratio(batch)
    free = -batch.advantages * ratio
    held = -batch.advantages * ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high)
    clipped = torch.maximum(free, held)
    ceiling = -batch.advantages * actor.clip_ratio_c
    negative = batch.advantages < 0
    loss = torch.where(negative, torch.minimum(ceiling, clipped), clipped)
    metrics = {
        "pg_clipfrac": held > free,
        "pg_clipfrac_lower": negative & (clipped > ceiling),
        "ppo_kl": -log_ratio,
    }
    return weighted(loss, batch), as_floats(metrics)


def gspo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """The sequence's geometric-mean ratio, clipped; each token carries its gradient (GSPO-token, arXiv 2507.18071,
    eqs. 12 to 14). Meant for small clip ranges, such as 3e-4 and 4e-4, and `seq-mean-token-mean`."""
    log_ratio = batch.log_probs - batch.old_log_probs
    sequence = sequence_mean(log_ratio, batch.mask).unsqueeze(-1)
    combined = batch.log_probs - batch.log_probs.detach() + sequence.detach()
    ratio = combined.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    free = -batch.advantages * ratio
    held = -batch.advantages * ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high)
    metrics = {"pg_clipfrac": held > free, "pg_clipfrac_lower": torch.zeros_like(free), "ppo_kl": -log_ratio}
    return weighted(torch.maximum(free, held), batch), as_floats(metrics)


def sapo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """A soft gate 4/tau * sigmoid(tau * (ratio - 1)) in place of the clip (SAPO, arXiv 2511.20347, eqs. 5 and 6)."""
    ratio, log_ratio = probability_ratio(batch)
    tau = torch.where(batch.advantages > 0, actor.policy_loss.tau_pos, actor.policy_loss.tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    zero = torch.zeros_like(ratio)
    metrics = {"pg_clipfrac": zero, "pg_clipfrac_lower": zero, "ppo_kl": -log_ratio}
    return weighted(-gate * batch.advantages, batch), as_floats(metrics)


def cispo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """REINFORCE weighted by the clipped ratio, which carries no gradient (CISPO, arXiv 2506.13585, eqs. 4 and 5)."""
    ratio, log_ratio = probability_ratio(batch)
    held = ratio.clamp(1 - actor.clip_low, 1 + actor.clip_high)
    metrics = {"pg_clipfrac": held != ratio, "pg_clipfrac_lower": torch.zeros_like(ratio), "ppo_kl": -log_ratio}
    return weighted(-held.detach() * batch.advantages * batch.log_probs, batch), as_floats(metrics)


def geo_mean(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """Geometric mean of the ratios, each clipped in log space on the side that its advantage moves to (GMPO, arXiv
    2507.20673, eq. 4). One loss for the sequence, held by each of its tokens; aggregated as a mean over sequences."""
    log_ratio = batch.log_probs - batch.old_log_probs
    held = log_ratio.clamp(-actor.clip_low, actor.clip_high)
    sign = batch.advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * held)
    ratio = sequence_mean(bounded, batch.mask).clamp(max=MAX_LOG_RATIO).exp()
    loss = -sequence_mean(batch.advantages, batch.mask) * ratio
    if batch.rollout_is_weights is not None:
        loss = loss * sequence_mean((batch.rollout_is_weights + 1e-10).log(), batch.mask).exp()
    outside = held != log_ratio
    metrics = {
        "pg_clipfrac": outside & (batch.advantages > 0),
        "pg_clipfrac_lower": outside & (batch.advantages < 0),
        "ppo_kl": -log_ratio,
    }
    return loss.unsqueeze(-1).expand_as(log_ratio), as_floats(metrics)


def gpg(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """The plain policy gradient, -advantage * log-prob (GPG, arXiv 2504.02546, eq. 5)."""
    return weighted(-batch.log_probs * batch.advantages, batch), {}


def reinforce(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """REINFORCE with importance weights in place of a ratio (arXiv 2402.14740, eq. 5)."""
    metrics = {"ppo_kl": batch.old_log_probs - batch.log_probs}
    return weighted(-batch.log_probs * batch.advantages, batch), as_floats(metrics)


def dppo_tv(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """Mask by the difference of probabilities, a bound on total variation (DPPO)."""
    gap = batch.log_probs.exp() - batch.old_log_probs.exp()
    return _masked_by_divergence(batch, actor, gap <= actor.clip_high, gap >= -actor.clip_low)


def dppo_kl(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """Mask by the binary KL."""
    p, q = batch.log_probs.exp(), batch.old_log_probs.exp()
    kl = q * (batch.old_log_probs - batch.log_probs) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    return _masked_by_divergence(
        batch, actor, (kl <= actor.clip_high) | (p <= q), (kl <= actor.clip_low) | (p >= q)
    )


def _masked_by_divergence(
    batch: LossBatch, actor: ActorConfig, keep_positive: torch.Tensor, keep_negative: torch.Tensor
) -> tuple[torch.Tensor, TokenMetrics]:
    ratio, log_ratio = probability_ratio(batch)
    keep = torch.where(batch.advantages > 0, keep_positive, keep_negative)
    held = ratio.clamp(max=actor.clip_ratio_c).detach()
    loss = -batch.advantages * held * batch.log_probs * keep
    metrics = {"pg_clipfrac": ~keep, "pg_clipfrac_lower": torch.zeros_like(ratio), "ppo_kl": -log_ratio}
    return weighted(loss, batch), as_floats(metrics)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] mean of [B, R] values over each row's mask; 0 for an empty row."""
    kept = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def probability_ratio(batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, R] (ratio of new to old probability of each token, its logarithm), the latter within +-20."""
    log_ratio = (batch.log_probs - batch.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp(), log_ratio


def weighted(loss: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    """[B, R] loss times the rollout-correction weights, where there are any."""
    return loss if batch.rollout_is_weights is None else loss * batch.rollout_is_weights


def as_floats(metrics: TokenMetrics) -> TokenMetrics:
    """Metrics without gradient, flags as 0 and 1."""
    return {name: value.detach().float() for name, value in metrics.items()}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
"""By `actor_rollout_ref.actor.policy_loss.loss_mode`."""
