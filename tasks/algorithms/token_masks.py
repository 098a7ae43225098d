"""Which tokens of a mini-batch have a loss, whatever the loss is; the others stay in its divisor."""

from __future__ import annotations

import numpy as np
import torch

from tasks.algorithms.aggregation import sequence_mean


def near_the_sampler(
    log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """All tokens but those of negative advantage in a sequence that the policy has moved away from (DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1, off-policy sequence masking).

    Args:
        log_probs: [B, R] of the policy as it is now.
        sampler_log_probs: [B, R] of the policy that sampled.
        advantages: [B, R].
        mask: [B, R] bool, over which a sequence's mean is taken.
        threshold: largest mean of log sampler - log policy over a sequence, in nats.

    Returns:
        [B, R] bool.
    """
    gap = sequence_mean(sampler_log_probs - log_probs.detach(), mask).unsqueeze(-1)
    return (advantages >= 0) | (gap <= threshold)


def highest_entropy(entropy: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """The share of the mini-batch's tokens at which the policy is least certain ("forking tokens", arXiv 2506.01939).

    Args:
        entropy: [M, R] of the policy at each token, nats.
        mask: [M, R] bool, the tokens to choose from.
        share: of the tokens; those that equal the quantile, interpolated between two values, are in.

    Returns:
        [M, R] bool.
    """
    if not bool(mask.any()):
        return mask
    wide = entropy.detach().double()
    return mask & (wide >= float(np.quantile(wide[mask].cpu().numpy(), 1 - share)))
