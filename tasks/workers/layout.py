"""The three ways in which a micro-batch's sequences lie in the forward pass."""

from __future__ import annotations

from enum import Enum


class Layout(Enum):
    """How a micro-batch's sequences lie in the forward pass. The numbers are the same, but for rounding."""

    SHARED_PROMPTS = "shared prompts"
    """A prompt is computed once for all its rows; prompts and responses are padded."""
    PACKED = "packed"
    """Sequences side by side in one row, without padding."""
    PADDED = "padded"
    """Whole sequences, padded to the longest."""
