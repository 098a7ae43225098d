"""What every rollout engine takes and gives: prompts and seeds in, token ids and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from storage.ragged import Ragged


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled.

    Attributes:
        temperature: logits are divided by it.
        top_p: sample among the most likely tokens that hold this much probability; 1: all.
        top_k: sample among this many most likely tokens; below 1: all.
        greedy: take the most likely token, whatever the three above say.
        max_tokens: longest response.
        max_model_len: longest prompt and response together; None: the model's own limit.
        stop: texts that end a response, which keeps them.
        ignore_eos: go on after an end token.
        log_probs: also return log-probs of the sampled tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    greedy: bool = False
    max_tokens: int = 512
    max_model_len: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    log_probs: bool = True

    @property
    def is_greedy(self) -> bool:
        """Whether no chance is involved: asked for, or at temperature 0."""
        return self.greedy or self.temperature == 0


@dataclass(frozen=True, eq=False)
class Responses:
    """N sampled responses.

    Attributes:
        response_ids: N rows of int32 token ids as sampled; an end token is part of them.
        log_probs: N rows of float32, aligned; None: not asked for.
        finish_reason: stop (end token or stop text) | length.
        notes: how the log-probs were made: processed or raw, temperature, filters.
    """

    response_ids: Ragged
    log_probs: Ragged | None
    finish_reason: list[str]
    notes: dict[str, Any] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """Samples responses from one policy version."""

    @property
    def policy_version(self) -> int:
        """Version of the weights it samples from."""

    @property
    def policy_digest(self) -> str:
        """Digest of the weights it samples from."""

    def generate(self, prompts: Ragged, group: np.ndarray, seeds: np.ndarray, sampling: Sampling) -> Responses:
        """Sample N responses.

        Args:
            prompts: G rows of token ids.
            group: [N] row of `prompts` that each response answers.
            seeds: [N] int64 seed of each response's own random stream.
            sampling: how.

        Raises:
            ValueError: a prompt is empty or longer than the context.
        """


def response_limits(prompts: Ragged, group: np.ndarray, sampling: Sampling, context: int) -> np.ndarray:
    """[N] most tokens of each response. The last one is never fed, so a prompt may fill the context.

    Args:
        prompts: G rows of token ids.
        group: [N] row of `prompts` that each response answers.
        sampling: how; its `max_model_len` narrows the context.
        context: tokens of prompt and response that the engine holds.

    Raises:
        ValueError: a prompt is empty or longer than the context.
    """
    context = min(sampling.max_model_len or context, context)
    lengths = prompts.lengths[group]
    if len(lengths) and lengths.min() == 0:
        raise ValueError(f"prompt {group[int(lengths.argmin())]} has no tokens; there is nothing to answer")
    if len(lengths) and lengths.max() > context:
        raise ValueError(
            f"prompt {group[int(lengths.argmax())]} has {lengths.max()} tokens but the context holds {context}. "
            "Lower data.max_prompt_length with data.filter_overlong_prompts=true, or raise "
            "actor_rollout_ref.rollout.max_model_len up to the model's own limit."
        )
    limits: np.ndarray = np.clip(context - lengths, 1, sampling.max_tokens).astype(np.int64)
    return limits
