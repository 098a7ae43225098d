"""Which sequences go to which data-parallel rank, and into which micro-batch, so that all take about as long.

A partition is a list of arrays of row numbers: every row in exactly one of them, ascending within each. The gradient of
a mini-batch does not depend on it; the time does, since ranks wait for the slowest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

Partition = list[np.ndarray]
Subset = tuple[float, list[int]]
"""Cost and rows of one part while it grows."""


def sequence_cost(tokens: np.ndarray, hidden_size: int = 4096) -> np.ndarray:
    """Relative time of a forward and backward pass over each sequence.

    A transformer layer of hidden size h, with 12 h^2 weights, takes 24 h^2 operations per token and 4 h per pair of
    tokens; divided by 4 h that is 6 h tokens + tokens^2.

    Args:
        tokens: [N] tokens of prompt and response together.
        hidden_size: of the model; the default is that of a model of 7 billion weights.

    Returns:
        [N] int64.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    return 6 * hidden_size * tokens + tokens**2


# ---------------------------------------------------------------------------------------------------------- partitions


def karmarkar_karp(cost: np.ndarray, parts: int, *, equal_sizes: bool = False) -> Partition:
    """Split rows into parts of nearly equal cost by the largest differencing method (Karmarkar and Karp, 1982).

    Begin with many partial partitions, each of `parts` subsets: one row and empty subsets, or with `equal_sizes` rows
    of neighbouring cost, one in each. Join the two whose subsets differ most in cost, the heaviest subset of one with
    the lightest of the other, until one is left. A join makes no difference greater than that of the two it joins, so
    the costs of two parts differ by no more than the greatest cost of a row.

    Args:
        cost: [N] cost of each row, not negative.
        parts: data-parallel ranks, or micro-batches.
        equal_sizes: every part has N / parts rows.

    Raises:
        ValueError: fewer rows than parts, or N is no multiple of parts and sizes must be equal.
    """
    _check_parts(len(cost), parts, equal_sizes, "sequences")
    rows, costs = np.argsort(cost, kind="stable").tolist(), np.asarray(cost).tolist()
    size = parts if equal_sizes else 1
    heap = []
    for start in range(0, len(rows), size):
        subsets: list[Subset] = [(costs[row], [row]) for row in reversed(rows[start : start + size])]
        subsets += [(0, [])] * (parts - size)
        heap.append(_ranked(subsets, start))
    heapq.heapify(heap)
    for number in range(len(rows), len(rows) + len(heap) - 1):
        one, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        heapq.heappush(heap, _ranked(sorted(joined, reverse=True), number))
    return [np.sort(np.asarray(subset, dtype=np.int64)) for _, subset in heap[0][-1]]


def _ranked(subsets: list[Subset], number: int) -> tuple[float, float, int, list[Subset]]:
    """Subsets, heaviest first, behind their rank in the heap: greatest difference, then heaviest, then last made."""
    heaviest, lightest = subsets[0][0], subsets[-1][0]
    return lightest - heaviest, -heaviest, -number, subsets


def greedy_partition(cost: np.ndarray, parts: int, *, equal_sizes: bool = False) -> Partition:
    """Give each row, in the given order, to the part with the least cost so far.

    Much less work than `karmarkar_karp`, and less even, unless rows come in order of falling cost.

    Args:
        cost: [N] cost of each row, not negative.
        parts: data-parallel ranks, or micro-batches.
        equal_sizes: every part has N / parts rows; the part with the fewest rows comes first.

    Raises:
        ValueError: as `karmarkar_karp`.
    """
    _check_parts(len(cost), parts, equal_sizes, "sequences")
    chosen: list[list[int]] = [[] for _ in range(parts)]
    heap: list[tuple[int, float, int]] = [(0, 0, part) for part in range(parts)]
    for row, weight in enumerate(np.asarray(cost).tolist()):
        rows, load, part = heap[0]
        chosen[part].append(row)
        heapq.heapreplace(heap, (rows + equal_sizes, load + weight, part))
    return [np.asarray(rows, dtype=np.int64) for rows in chosen]


def partition_groups(cost: np.ndarray, group: np.ndarray, parts: int) -> Partition:
    """Split rows into parts of nearly equal cost and as many groups each, all samples of a prompt in one part.

    Args:
        cost: [N] cost of each row.
        group: [N] which prompt each answers (uid); siblings need not be adjacent.
        parts: data-parallel ranks.

    Raises:
        ValueError: the number of groups is no multiple of parts.
    """
    names, index = np.unique(group, return_inverse=True)
    _check_parts(len(names), parts, True, "groups")
    total = np.zeros(len(names), dtype=np.asarray(cost).dtype)
    np.add.at(total, index, cost)
    return [np.flatnonzero(np.isin(index, chosen)) for chosen in karmarkar_karp(total, parts, equal_sizes=True)]


def _check_parts(count: int, parts: int, equal_sizes: bool, what: str) -> None:
    if not 0 < parts <= count:
        raise ValueError(
            f"{count} {what} cannot be split into {parts} parts with something in each. Raise data.train_batch_size or "
            "actor_rollout_ref.rollout.n, or train on fewer data-parallel ranks (trainer.n_gpus_per_node, "
            "trainer.nnodes)."
        )
    if equal_sizes and count % parts:
        raise ValueError(
            f"{count} {what} cannot be split into {parts} parts of equal size. Make data.train_batch_size (prompts; in "
            "sequences times actor_rollout_ref.rollout.n) a multiple of the data-parallel ranks, or change "
            "trainer.n_gpus_per_node or trainer.nnodes."
        )


# -------------------------------------------------------------------------------------------------------- micro-batches


def micro_batches(
    tokens: np.ndarray,
    max_tokens: int,
    *,
    at_least: int = 1,
    cost: Callable[[np.ndarray], np.ndarray] = sequence_cost,
    key: str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
) -> Partition:
    """Cut one rank's rows into micro-batches of nearly equal cost, none of them with more tokens than allowed.

    The fewest that the tokens need are tried first. If balancing them puts too many tokens into one, rows are packed,
    longest first, into the micro-batch with the fewest tokens, and a new one is begun where that has no room. Packing
    begins a micro-batch only when all are more than half full or the row is longer than half of one, so there are at
    most about twice as many as the tokens need.

    Args:
        tokens: [N] tokens of each sequence, without padding.
        max_tokens: most tokens of a micro-batch. With sequence parallelism: of all devices of a rank together.
        at_least: micro-batches to make at least. Ranks that exchange gradients or shards in every pass need the same
            number: the largest that any of them needs alone.
        cost: [N] tokens to [N] cost.
        key: configuration key that sets the limit, for messages.

    Returns:
        Micro-batches in order of falling cost, so that one that does not fit the device fails first.

    Raises:
        ValueError: a sequence is longer than max_tokens, or there are fewer sequences than `at_least`.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    if not len(tokens) and at_least <= 1:
        return []
    _check_longest(tokens, max_tokens, key)
    weight = cost(tokens)
    parts = karmarkar_karp(weight, max(at_least, -(-int(tokens.sum()) // max_tokens), 1))
    if not _fits(parts, tokens, max_tokens):
        packed = _pack(tokens, max_tokens, len(parts))
        parts = karmarkar_karp(weight, len(packed))
        parts = parts if _fits(parts, tokens, max_tokens) else packed
    return sorted(parts, key=lambda part: -weight[part].sum())


def _fits(parts: Partition, tokens: np.ndarray, max_tokens: int) -> bool:
    return max(int(tokens[part].sum()) for part in parts) <= max_tokens


def _pack(tokens: np.ndarray, max_tokens: int, at_least: int) -> Partition:
    """Longest first into the part with the fewest tokens: if that has no room, no other has."""
    chosen: list[list[int]] = [[] for _ in range(at_least)]
    heap = [(0, part) for part in range(at_least)]
    for row in np.argsort(-tokens, kind="stable").tolist():
        load, part = heap[0]
        if load + tokens[row] <= max_tokens:
            heapq.heapreplace(heap, (load + int(tokens[row]), part))
        else:
            part = len(chosen)
            chosen.append([])
            heapq.heappush(heap, (int(tokens[row]), part))
        chosen[part].append(row)
    return [np.sort(np.asarray(rows, dtype=np.int64)) for rows in chosen]


def _check_longest(tokens: np.ndarray, max_tokens: int, key: str) -> None:
    longest = int(tokens.argmax()) if len(tokens) else 0
    if len(tokens) and tokens[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {tokens[longest]} tokens but a micro-batch holds {max_tokens}. "
            f"Raise {key}, or lower data.max_response_length or data.max_prompt_length."
        )


# -------------------------------------------------------------------------------------------------------------- metrics


def balance_metrics(tokens: np.ndarray, parts: Partition, prefix: str = "global_seqlen") -> dict[str, float]:
    """Tokens of data-parallel ranks, before balancing and after.

    Args:
        tokens: [N] tokens of each sequence.
        parts: rows of each rank.
        prefix: of the names.

    Returns:
        min, max, minmax_diff: over consecutive chunks of N // ranks rows (and a rest, if any), as the rows came;
        balanced_min, balanced_max: over the ranks' rows; mean: tokens per rank.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    before = np.add.reduceat(tokens, np.arange(0, len(tokens), len(tokens) // len(parts)))
    after = [int(tokens[part].sum()) for part in parts]
    numbers = {
        "min": before.min(),
        "max": before.max(),
        "minmax_diff": before.max() - before.min(),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": tokens.sum() / len(parts),
    }
    return {f"{prefix}/{name}": float(value) for name, value in numbers.items()}
