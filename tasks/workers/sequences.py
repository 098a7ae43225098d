"""The sequences a worker computes on, and how they are cut into micro-batches. NumPy alone.

The gradient of a mini-batch does not depend on the order of its rows, so a cut may order them as it likes: samples of a
prompt side by side, which shares the prompt's computation, or by length, which saves padding; whichever is less work.
Packed sequences have no padding; their micro-batches are made of nearly equal cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from storage.ragged import Ragged
from tasks.balance import Partition, karmarkar_karp, micro_batches, partition_groups, sequence_cost
from tasks.workers.layout import Layout


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
        max_tokens: most tokens on one device, padding included; None: cut by sequences.
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

    def shared_by(self, ranks: int) -> MicroBatching:
        """The limit of ranks that share sequences: each has its part of every one, so that together they hold more."""
        return self if self.max_tokens is None else replace(self, max_tokens=self.max_tokens * ranks)


# ------------------------------------------------------------------------------------------ data-parallel ranks


@dataclass(frozen=True, eq=False)
class Share:
    """What the data-parallel ranks compute of M rows. Every rank works it out alike, from lengths alone.

    Attributes:
        parts: of each rank the row numbers of each of its micro-batches.
        lengths: [N] response tokens of each row.
        whole: [N] tokens of its prompt and response together.
    """

    parts: list[list[np.ndarray]]
    lengths: np.ndarray
    whole: np.ndarray

    @property
    def order(self) -> np.ndarray:
        """[M] all row numbers, rank by rank, as they stand in the micro-batches."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(part for own in self.parts for part in own)])

    @property
    def micro_batches(self) -> int:
        """Forward passes of the rank that has the most to compute; all make as many."""
        return max(sum(bool(self.lengths[part].any()) for part in own) for own in self.parts)

    @property
    def tokens(self) -> list[int]:
        """Response tokens of each rank."""
        return [sum(int(self.lengths[part].sum()) for part in own) for own in self.parts]

    def turns(self, rank: int) -> list[Turn]:
        """The forward passes of a rank: as many as every other one makes.

        Micro-batches whose responses are all empty need none. A rank that has fewer than another computes the shortest
        of all rows that have a response instead, idly; with no response token anywhere nobody computes anything.
        """
        order, count = self.order, self.micro_batches
        if not count:
            return []
        start, own = sum(len(part) for before in self.parts[:rank] for part in before), []
        for part in self.parts[rank]:
            if self.lengths[part].any():
                own.append(Turn(part, slice(start, start + len(part)), idle=False))
            start += len(part)
        place = int(np.where(self.lengths[order] > 0, self.whole[order], np.iinfo(np.int64).max).argmin())
        return own + [Turn(order[place : place + 1], slice(place, place + 1), idle=True)] * (count - len(own))


@dataclass(frozen=True, eq=False)
class Turn:
    """One forward pass of a rank.

    Attributes:
        rows: numbers of the rows it computes.
        places: where these are in `Share.order`.
        idle: it counts nothing, and is made because other ranks compute at the same time.
    """

    rows: np.ndarray
    places: slice
    idle: bool


def share_out(
    sequences: Sequences,
    rows: np.ndarray,
    micro: MicroBatching,
    ranks: int,
    *,
    balance: bool,
    layout: Layout,
) -> Share:
    """Split rows over data-parallel ranks, as many to each or one more, and cut each rank's into micro-batches.

    Args:
        sequences: all sequences.
        rows: [M] numbers of those to compute.
        micro: limit of a micro-batch of one of these ranks, on all devices that share its sequences together.
        ranks: data-parallel ranks; there may be more than rows.
        balance: `trainer.balance_batch`: by cost; else as the rows come.
        layout: of a micro-batch. With shared prompts whole groups stay together, where that leaves the ranks as many
            rows each.

    Raises:
        ValueError: as `cut`.
    """
    rows, share_prompts, packed = np.asarray(rows), layout is Layout.SHARED_PROMPTS, layout is Layout.PACKED
    if micro.max_tokens is not None:
        _check_longest(sequences, rows, micro.max_tokens, micro.key)
    if ranks == 1:
        split = [rows]
    elif not balance:
        split = np.array_split(rows, ranks)
    else:
        split = [rows[places] for places in _balanced(sequences, rows, ranks, keep_groups=share_prompts)]

    def in_parts(own: np.ndarray, at_least: int) -> list[np.ndarray]:
        least = min(at_least, len(own))
        return cut(sequences, own, micro, share_prompts=share_prompts, packed=packed, at_least=least)

    parts = [in_parts(own, 1) for own in split]
    if packed and micro.max_tokens is not None:
        # Ranks make equally many micro-batches anyway: smaller ones are better than idle turns.
        most = max(len(own) for own in parts)
        parts = [in_parts(own, most) for own in split]
    return Share(parts, sequences.responses.lengths, sequences.lengths())


def _balanced(sequences: Sequences, rows: np.ndarray, ranks: int, *, keep_groups: bool) -> Partition:
    """Places in `rows` of each rank's, balanced by cost."""
    cost, group = sequence_cost(sequences.lengths()[rows]), sequences.group[rows]
    sizes = np.unique(group, return_counts=True)[1]
    if keep_groups and len(sizes) and len(sizes) % ranks == 0 and (sizes == sizes[0]).all():
        return partition_groups(cost, group, ranks)
    return _evenly(cost, ranks) if len(rows) else [np.empty(0, dtype=np.int64)] * ranks


def _evenly(cost: np.ndarray, parts: int) -> Partition:
    """Parts of nearly equal cost, and as many rows each or one fewer."""
    # Rows that cost nothing fill up the last places, one part's at most one of them.
    filled = np.concatenate([cost, np.zeros(-len(cost) % parts, dtype=cost.dtype)])
    return [part[part < len(cost)] for part in karmarkar_karp(filled, parts, equal_sizes=True)]


# -------------------------------------------------------------------------------------------------------- micro-batches


def cut(
    sequences: Sequences,
    rows: np.ndarray,
    micro: MicroBatching,
    *,
    share_prompts: bool = True,
    packed: bool = False,
    at_least: int = 1,
) -> list[np.ndarray]:
    """Cut rows into micro-batches.

    Args:
        sequences: all sequences.
        rows: [M] numbers of those to cut.
        micro: the limit. Tokens count the padded rectangle of a micro-batch: rows times (longest prompt + longest
            response), what the device holds with or without shared prompts; packed, the sequences' own tokens.
        share_prompts: a prompt is computed once for the rows of a micro-batch that answer it.
        packed: sequences lie side by side without padding, and no prompt is shared.
        at_least: micro-batches to make at least; packed and by tokens alone.

    Returns:
        Row numbers of each micro-batch; every row once.

    Raises:
        ValueError: one sequence alone is longer than `micro.max_tokens`.
    """
    rows = np.asarray(rows)
    if micro.max_tokens is not None:
        _check_longest(sequences, rows, micro.max_tokens, micro.key)
    if packed and micro.max_tokens is not None:
        tokens = sequences.lengths()[rows]
        return [rows[places] for places in micro_batches(tokens, micro.max_tokens, at_least=at_least, key=micro.key)]
    if packed and micro.sequences is not None:
        cost = sequence_cost(sequences.lengths()[rows])
        parts = _evenly(cost, -(-len(rows) // micro.sequences)) if len(rows) else []
        # The most expensive one first: if it does not fit the device, one need not wait for it.
        return [rows[places] for places in sorted(parts, key=lambda part: -cost[part].sum())]
    ways = [_split(sequences, order, micro) for order in _orders(sequences, rows)]
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
