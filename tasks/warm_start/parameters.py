"""What the word-problem warm start is made from, with the values that were tried. Loads no tensor library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Size of the model, a Llama with tied embeddings."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384


@dataclass(frozen=True)
class Schedule:
    """Length and step size of the supervised training."""

    steps: int = 450
    """Optimizer steps."""
    batch: int = 48
    """Demonstrations per optimizer step; each is new."""
    lr: float = 3e-3
    """Peak learning rate of AdamW; it rises linearly, then falls as half a cosine to 0."""
    warmup_steps: int = 20
    """Optimizer steps of the rise."""


@dataclass(frozen=True)
class WarmStartParameters:
    """Everything but the seed."""

    shape: Shape = Shape()
    schedule: Schedule = Schedule()
    mistake_share: float = 0.6
    """Share of the demonstrations that forget the carry, where there is one. Above one half, the likeliest answer is
    the wrong one while the right one is still often sampled: that is what GRPO turns round."""
    carry_share: float = 0.8
    """Share of problems that need a carry."""
    train_prompts: int = 2048
    """Prompts of the GRPO data set, from the same operand pairs as the demonstrations."""
    held_out_pairs: int = 256
    """Operand pairs that occur in no demonstration and no training prompt, in neither order; one prompt for each."""
    samples: int = 8
    """Responses to each held-out prompt when the model is measured."""
