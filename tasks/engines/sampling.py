"""One token per row out of logits: temperature, filters, and a random stream for each sample.

A sample's stream is Philox keyed by its seed: one uniform number per position. The token is where that number falls in
the cumulated probabilities, in the vocabulary's order, so that a tiny change of the logits moves the choice only if the
number lies within it of a border.
"""

from __future__ import annotations

import numpy as np
import torch

from tasks.engines.protocol import Sampling

BLOCK = 64
"""Positions for which uniform numbers are drawn at a time."""


class Streams:
    """The random streams of some samples, read position by position."""

    def __init__(self, seeds: np.ndarray, device: torch.device) -> None:
        self._streams = [np.random.Generator(np.random.Philox(key=int(seed) % 2**64)) for seed in seeds]
        self._block = torch.empty(0, 0)
        self._device = device

    def at(self, position: int, rows: torch.Tensor) -> torch.Tensor:
        """[len(rows)] float64 in [0, 1): numbers of the given samples; positions come in order, from 0."""
        if position % BLOCK == 0:
            block = np.stack([stream.random(BLOCK) for stream in self._streams])
            self._block = torch.from_numpy(block).to(self._device)
        return self._block[:, position % BLOCK].index_select(0, rows)


def choose(logits: torch.Tensor, uniform: torch.Tensor | None, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row.

    Args:
        logits: [B, V].
        uniform: [B] in [0, 1); None: greedy.
        sampling: temperature and filters.

    Returns:
        ([B] token ids, [B] their log-probs at the sampling temperature, before any filter; greedy: at temperature 1).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if uniform is None:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)
    log_probs = (logits / sampling.temperature).log_softmax(dim=-1)
    probs = log_probs.exp()
    if sampling.top_k > 0 or sampling.top_p < 1:
        probs = probs * kept(probs, sampling.top_k, sampling.top_p)
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform * cumulated[:, -1]
    tokens = torch.searchsorted(cumulated, target.unsqueeze(-1), right=True).squeeze(-1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def kept(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[B, V] bool: tokens that may be sampled.

    Top-k first, then top-p over what is left: the shortest list of most likely tokens that holds `top_p` of it
    (arXiv 1904.09751). The most likely token always stays; of equals, the lower id is the more likely.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < ranked.shape[-1]:
        ranked = ranked.clone()
        ranked[:, top_k:] = 0
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    keep = (before < top_p * ranked.sum(dim=-1, dtype=torch.float64, keepdim=True)) & (ranked > 0)
    return torch.zeros_like(keep).scatter(-1, order, keep)
