"""The sequences a worker computes on, and how they are cut into micro-batches. NumPy alone.

The gradient of a mini-batch does not depend on the order of its rows, so a cut may order them as it likes: samples of a
prompt side by side, which shares the prompt's computation, or by length, which saves padding; whichever is less work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.ragged import Ragged


@dataclass(frozen=True, eq=False)
class Sequences:
    """N responses and the G prompts they answer.

    Attributes:
        prompts: G rows of int32 token ids.
        group: [N] int64 row of `prompts` that each response answers.
        responses: N rows of int32 token ids; a row may be empty.
    """

    prompts: Ragged
    group: np.ndarray
    responses: Ragged

    def lengths(self) -> np.ndarray:
        """[N] tokens of prompt and response together."""
        return self.prompts.lengths[self.group] + self.responses.lengths

    def take(self, rows: np.ndarray) -> Sequences:
        """The given responses, in the given order; all prompts stay."""
        return Sequences(self.prompts, self.group[rows], self.responses.take(rows))


@dataclass(frozen=True)
class MicroBatching:
    """How large a micro-batch may be: by sequences or by tokens.

    Attributes:
        sequences: sequences of a micro-batch; None: cut by tokens.
        max_tokens: most tokens on the device, padding included; None: cut by sequences.
        key: configuration key that sets the limit, for messages.
    """

    sequences: int | None
    max_tokens: int | None
    key: str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"

    def __post_init__(self) -> None:
        if (self.sequences is None) == (self.max_tokens is None):
            raise ValueError(
                "a micro-batch is cut either by sequences or by tokens. Set "
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (and the log_prob_micro_batch_size_per_gpu of "
                "actor_rollout_ref.rollout and .ref), or actor_rollout_ref.actor.use_dynamic_bsz=true"
            )


def cut(
    sequences: Sequences, rows: np.ndarray, micro: MicroBatching, *, share_prompts: bool = True
) -> list[np.ndarray]:
    """Cut rows into micro-batches.

    Args:
        sequences: all sequences.
        rows: [M] numbers of those to cut.
        micro: the limit. Tokens count the padded rectangle of a micro-batch: rows times (longest prompt + longest
            response), what the device holds with or without shared prompts.
        share_prompts: a prompt is computed once for the rows of a micro-batch that answer it.

    Returns:
        Row numbers of each micro-batch; every row once.

    Raises:
        ValueError: one sequence alone is longer than `micro.max_tokens`.
    """
    if micro.max_tokens is not None:
        _check_longest(sequences, rows, micro.max_tokens, micro.key)
    ways = [_split(sequences, order, micro) for order in _orders(sequences, np.asarray(rows))]
    return min(ways, key=lambda parts: _computed_tokens(sequences, parts, share_prompts))


def _orders(sequences: Sequences, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows by group, groups by longest sequence; and rows by length alone. Ties keep the given order."""
    group, responses = sequences.group[rows], sequences.responses.lengths[rows]
    prompts = sequences.prompts.lengths[group]
    longest = np.zeros(len(sequences.prompts), dtype=np.int64)
    np.maximum.at(longest, group, prompts + responses)
    by_group = np.lexsort((responses, group, prompts, longest[group]))
    by_length = np.lexsort((group, prompts, responses))
    return rows[by_group], rows[by_length]


def _split(sequences: Sequences, order: np.ndarray, micro: MicroBatching) -> list[np.ndarray]:
    if micro.sequences is not None:
        return [order[start : start + micro.sequences] for start in range(0, len(order), micro.sequences)]
    assert micro.max_tokens is not None
    prompts = sequences.prompts.lengths[sequences.group[order]].tolist()
    responses = sequences.responses.lengths[order].tolist()
    starts, width_prompt, width_response = [0], 0, 0
    for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        width_prompt, width_response = max(width_prompt, prompt), max(width_response, response)
        if (place + 1 - starts[-1]) * (width_prompt + width_response) > micro.max_tokens:
            starts.append(place)
            width_prompt, width_response = prompt, response
    return [part for part in np.split(order, starts[1:]) if len(part)]


def _computed_tokens(sequences: Sequences, parts: list[np.ndarray], share_prompts: bool) -> int:
    """Tokens that go through the model, padding included, when rows are cut like this."""
    if not parts:
        return 0
    rows, sizes = np.concatenate(parts), np.asarray([len(part) for part in parts])
    starts, group = np.cumsum(sizes) - sizes, sequences.group[rows]
    prompts, responses = sequences.prompts.lengths[group], sequences.responses.lengths[rows]
    if not share_prompts:
        return int((sizes * np.maximum.reduceat(prompts + responses, starts)).sum())
    pairs = np.unique(np.repeat(np.arange(len(parts)), sizes) * len(sequences.prompts) + group)
    distinct = np.bincount(pairs // len(sequences.prompts), minlength=len(parts))
    widest, longest = np.maximum.reduceat(prompts, starts), np.maximum.reduceat(responses, starts)
    return int((distinct * widest + sizes * longest).sum())


def _check_longest(sequences: Sequences, rows: np.ndarray, max_tokens: int, key: str) -> None:
    lengths = sequences.lengths()[rows]
    if len(lengths) and lengths.max() > max_tokens:
        place = int(lengths.argmax())
        raise ValueError(
            f"sequence {rows[place]} has {lengths[place]} tokens but a micro-batch holds {max_tokens}. "
            f"Raise {key}, or lower data.max_response_length or data.max_prompt_length."
        )
