"""How per-token losses become one number: a weight for each sequence, taken over the whole mini-batch.

Every mode has the form `sum over rows of weight[row] * sum over the row's loss tokens of loss`, with weights that
depend on the mini-batch alone. The sum over micro-batches and ranks is therefore the mini-batch's loss, however it is
cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tasks.config import LossAggregation


@dataclass(frozen=True, eq=False)
class Totals:
    """Counts over one optimizer step's global mini-batch of M sequences, all ranks together.

    Attributes:
        row_tokens: [M] loss tokens of each sequence.
        prompt_tokens: [M] loss tokens of all sequences that answer the same prompt.
        tokens: loss tokens.
        sequences: sequences with at least one loss token.
        prompts: prompts with at least one loss token.
    """

    row_tokens: np.ndarray
    prompt_tokens: np.ndarray
    tokens: int
    sequences: int
    prompts: int


def count_totals(row_tokens: np.ndarray, group: np.ndarray) -> Totals:
    """Count a mini-batch.

    Args:
        row_tokens: [M] loss tokens of each sequence; a sequence left out of the loss has 0 and counts nowhere.
        group: [M] which prompt each sequence answers.
    """
    row_tokens = np.asarray(row_tokens, dtype=np.int64)
    _, prompt = np.unique(group, return_inverse=True)
    by_prompt = np.bincount(prompt, weights=row_tokens).astype(np.int64)
    return Totals(
        row_tokens=row_tokens,
        prompt_tokens=by_prompt[prompt],
        tokens=int(row_tokens.sum()),
        sequences=int(np.count_nonzero(row_tokens)),
        prompts=int(np.count_nonzero(by_prompt)),
    )


def row_weights(totals: Totals, mode: LossAggregation, *, scale: float) -> np.ndarray:
    """The weight of each sequence's summed token losses.

    Modes: token-mean (DAPO, arXiv 2503.14476, eq. 12), seq-mean-token-mean (GRPO, arXiv 2402.03300, eq. 3),
    seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783, a constant divisor), prompt-mean (the token mean of each
    prompt's sequences, then the mean over prompts).

    Args:
        totals: counts of the mini-batch.
        mode: `actor_rollout_ref.actor.loss_agg_mode`.
        scale: divisor of seq-mean-token-sum-norm: `actor.loss_scale_factor`, else the longest response in tokens.

    Returns:
        [M] float64; 0 for sequences without loss tokens.

    Raises:
        ValueError: no such mode.
    """
    in_loss = totals.row_tokens > 0
    sequences = max(totals.sequences, 1)
    divisor: np.ndarray | float
    if mode == "token-mean":
        divisor = max(totals.tokens, 1)
    elif mode == "token-sum":
        divisor = 1.0
    elif mode == "seq-mean-token-sum":
        divisor = sequences
    elif mode == "seq-mean-token-sum-norm":
        divisor = sequences * scale
    elif mode == "seq-mean-token-mean":
        divisor = sequences * np.maximum(totals.row_tokens, 1)
    elif mode == "prompt-mean":
        divisor = max(totals.prompts, 1) * np.maximum(totals.prompt_tokens, 1)
    else:
        raise ValueError(f"actor_rollout_ref.actor.loss_agg_mode={mode!r} is unknown; there are {_MODES}")
    return in_loss / divisor


_MODES = "token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm, prompt-mean"


def aggregate(loss: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A micro-batch's share of the mini-batch's loss.

    Args:
        loss: [B, R] per-token loss; whatever it holds outside the mask, NaN too, does not count.
        mask: [B, R] bool, true: the token takes part in the loss.
        weights: [B] this micro-batch's rows of `row_weights`.

    Returns:
        Scalar in the loss's type, or float32 where that has fewer digits.
    """
    wide = torch.promote_types(loss.dtype, torch.float32)
    rows = torch.where(mask, loss, torch.zeros((), dtype=loss.dtype, device=loss.device)).to(wide).sum(dim=-1)
    return (rows * weights.to(device=rows.device, dtype=wide)).sum()


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] mean of [B, R] values over each row's mask; 0 for an empty row."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of [B, R] values where the mask is true, as float64: the part of a metric that adds up over micro-batches."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).double().sum()
