"""VESPO: the ratio of a whole sequence, reshaped so that its variance stays small (arXiv 2602.10693)."""

from __future__ import annotations

import math

import torch

from tasks.algorithms.losses import MAX_LOG_RATIO, LossBatch, TokenMetrics, probability_ratio, token_metrics
from tasks.algorithms.variants import loss
from tasks.config import ActorConfig

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of a sequence's log weight, and of the log of one token's rollout-correction weight."""


@loss(
    "vespo",
    reads=(
        "policy_loss.vespo_k_pos",
        "policy_loss.vespo_lambda_pos",
        "policy_loss.vespo_k_neg",
        "policy_loss.vespo_lambda_neg",
    ),
    multiplies_weights=True,
)
def vespo(batch: LossBatch, actor: ActorConfig) -> tuple[torch.Tensor, TokenMetrics]:
    """REINFORCE weighted by W^k * exp(lambda * (1 - W)), which carries no gradient (VESPO, arXiv 2602.10693).

    W is the product of the ratios of a sequence's tokens, times their rollout-correction weights, which therefore do
    not weigh the loss a second time. k and lambda differ with the sign of the advantage.
    """
    _, log_ratio = probability_ratio(batch)
    log_weight = _row_sums(log_ratio.detach(), batch.mask)
    if batch.rollout_is_weights is not None:
        token = batch.rollout_is_weights.clamp(min=1e-30).log().clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)
        log_weight = log_weight + _row_sums(token, batch.mask)
    log_weight = log_weight.clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO).unsqueeze(-1)
    cfg, zero = actor.policy_loss, torch.zeros_like(log_ratio)
    power = torch.where(batch.advantages >= 0, zero + cfg.vespo_k_pos, zero + cfg.vespo_k_neg)
    decay = torch.where(batch.advantages >= 0, zero + cfg.vespo_lambda_pos, zero + cfg.vespo_lambda_neg)
    weight = (power * log_weight + decay * (1 - log_weight.exp())).clamp(max=MAX_LOG_RATIO).exp()
    return -weight * batch.advantages * batch.log_probs, token_metrics(-log_ratio)


def _row_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=-1)
