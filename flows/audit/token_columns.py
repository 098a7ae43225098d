"""Token columns of a step side by side in flat arrays, and their statistics by sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import Ragged, StorageError


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """All response tokens of a step, T in N samples.

    Attributes:
        ids: [T] token ids.
        lengths: [N] tokens of each sample.
        floats: [T] float64 by name. `log_prob`: by the trainer (old), or by the engine where the trainer's are not
            there. `gap`: rollout minus old log-prob. `ref_gap`: old minus reference log-prob. `entropy`, `advantage`,
            `token_reward`, `return`, `is_weight`. What a step has not is not among them; NaN: this sample has none.
        mask: [T] whether the token takes part in the loss; None: not there.
    """

    ids: np.ndarray
    lengths: np.ndarray
    floats: dict[str, np.ndarray]
    mask: np.ndarray | None

    @classmethod
    def of(cls, columns: Mapping[str, pa.ChunkedArray]) -> TokenColumns:
        """From the joined columns of a step; `response_ids` must be among them.

        Raises:
            StorageError: a column has more or fewer values than its response has tokens.
        """
        ids = Ragged.from_arrow(columns["response_ids"])
        lengths = ids.lengths
        for name in (*_STORED, "loss_mask"):
            if name in columns:
                _require_aligned(name, columns[name], lengths)
        raw = {name: _flat(columns[name], lengths) for name in _STORED if name in columns}
        floats: dict[str, np.ndarray] = {}
        rollout, old, ref = (raw.get(name) for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs"))
        if (log_prob := rollout if old is None else old) is not None:
            floats["log_prob"] = log_prob
            if ref is not None:
                floats["ref_gap"] = log_prob - ref
        if rollout is not None and old is not None:
            floats["gap"] = rollout - old
        floats.update({_STORED[name]: values for name, values in raw.items() if _STORED[name]})
        if "return" in floats and np.array_equal(floats["return"], floats.get("advantage", np.empty(0))):
            del floats["return"]  # as in GRPO; the script says so
        mask = None
        if "loss_mask" in columns:
            mask = Ragged.from_arrow(columns["loss_mask"]).values
        return cls(ids.values, lengths, floats, mask)


_STORED = {
    "rollout_log_probs": "",
    "old_log_probs": "",
    "ref_log_probs": "",
    "entropy": "entropy",
    "advantages": "advantage",
    "token_rewards": "token_reward",
    "returns": "return",
    "rollout_is_weights": "is_weight",
}
"""Stored token columns, and under which name each is kept as it is."""


def _require_aligned(name: str, column: pa.ChunkedArray, lengths: np.ndarray) -> None:
    own = pc.fill_null(pc.list_value_length(column), -1).to_numpy()
    wrong = np.flatnonzero((own >= 0) & (own != lengths))
    if len(wrong):
        row = int(wrong[0])
        raise StorageError(
            f"{name} is not aligned with response_ids: {own[row]} values for {lengths[row]} tokens in row {row} of the "
            "rollouts; see grpoflow verify"
        )


def _flat(column: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """[T] float64; rows that are null are NaN over the whole length of their response."""
    if not column.null_count:
        return Ragged.from_arrow(column).values.astype(np.float64)
    there = column.is_valid().to_numpy()
    values = np.full(int(lengths.sum()), np.nan)
    values[np.repeat(there, lengths)] = Ragged.from_arrow(column.drop_null()).values
    return values


def kl_k3(ref_gap: np.ndarray) -> np.ndarray:
    """The k3 estimate of KL(old || ref) at each token, in nats: exp(-g) - 1 + g for g = old minus reference log-prob.

    Never below zero (J. Schulman, "Approximating KL divergence", 2020).
    """
    with np.errstate(over="ignore"):
        return np.asarray(np.expm1(-ref_gap) + ref_gap)


def per_sample(tokens: TokenColumns) -> dict[str, np.ndarray]:
    """[N] statistics by sample, over its tokens; NaN for an empty response."""
    floats = tokens.floats
    found: dict[str, np.ndarray] = {}
    for name, source in (("log_prob_mean", "log_prob"), ("entropy_mean", "entropy"), ("advantage", "advantage")):
        if source in floats:
            found[name] = _mean(floats[source], tokens.lengths)
    if "ref_gap" in floats:
        found["kl_mean"] = _mean(kl_k3(floats["ref_gap"]), tokens.lengths)
    if "gap" in floats:
        found["gap_max"] = _largest(np.abs(floats["gap"]), tokens.lengths)
        found["gap_mean"] = _mean(floats["gap"], tokens.lengths)
    if "token_reward" in floats:
        found["reward"] = _sum(floats["token_reward"], tokens.lengths)
    if tokens.mask is not None:
        found["masked"] = (tokens.lengths - _sum(tokens.mask.astype(np.float64), tokens.lengths)).astype(np.int64)
    return found


def _sum(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths)
    total = np.zeros(len(lengths))
    filled = lengths > 0
    if filled.any():
        # Empty rows end where they begin, so that the filled ones' starts cut the whole array.
        total[filled] = np.add.reduceat(values, (ends - lengths)[filled])
    return total


def _mean(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return _sum(values, lengths) / np.where(lengths > 0, lengths, np.nan)


def _largest(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    largest = np.full(len(lengths), np.nan)
    filled = lengths > 0
    if filled.any():
        largest[filled] = np.maximum.reduceat(values, (np.cumsum(lengths) - lengths)[filled])
    return largest
