"""Grouped-query attention for CPUs: query heads that share keys and values are multiplied with them in one product.

transformers' eager attention copies keys and values for every query head, at every generated token. The numbers are
those of eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

GROUPED = "grpoflow_grouped"
"""Name under which transformers finds it."""

_HARMLESS = {"sliding_window", "position_ids", "use_cache", "output_attentions", "is_causal"}


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer; not used.
        query: [B, heads, Q, size].
        key: [B, key heads, K, size]; `heads` is a multiple of `key heads`, and neighbours share.
        value: as `key`.
        attention_mask: [B or 1, 1, Q, K] numbers to add to the scores; sliding windows and causality are in it.
        scaling: of the scores; None: size^-1/2.
        dropout: must be 0.
        others: what else the model passes.

    Returns:
        ([B, Q, heads, size], None).

    Raises:
        NotImplementedError: the model asks for something that is not done here, such as a soft cap or sinks.
    """
    asked = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if dropout or asked:
        raise NotImplementedError(f"grouped attention knows nothing of {', '.join(asked) or 'dropout'}")
    rows, heads, queries, size = query.shape
    shared, keys = key.shape[1], key.shape[2]
    scores = query.reshape(rows, shared, -1, size) @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        by_head = scores.view(rows, shared, heads // shared, queries, keys)
        scores = (by_head + attention_mask.unsqueeze(2)).view(scores.shape)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(query.dtype)
    return (weights @ value).view(rows, heads, queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, eager_mask)
