"""Two tables of one artifact compared: joined by their ids, bit for bit, to the first row and token that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storage import Ragged

KEYS = ("sample_id", "group_id", "update_index")
"""What names a row: the first of these columns that an artifact has."""


@dataclass(frozen=True)
class Bound:
    """How far two numbers may be apart: `absolute`, or `relative` times the larger of them, whichever is more."""

    absolute: float = 0.0
    relative: float = 0.0

    def allows(self, stored: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Elementwise; infinities and NaNs are allowed nothing."""
        with np.errstate(invalid="ignore"):
            room = np.maximum(self.absolute, self.relative * np.maximum(np.abs(stored), np.abs(made)))
            return np.abs(stored - made) <= room


@dataclass(frozen=True)
class Where:
    """One place of a table.

    Attributes:
        row: its id.
        column: its column.
        token: place in the row's list, from 0; None: the column holds no lists.
        stored: the value there; None: null, or the row or token is not there.
        made: the other table's.
    """

    row: str
    column: str
    token: int | None
    stored: Any
    made: Any

    def __str__(self) -> str:
        token = "" if self.token is None else f", token {self.token}"
        return f"{self.row}, {self.column}{token}: stored {_shown(self.stored)}, made again {_shown(self.made)}"


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
        equal: every value is the same, bit for bit.
        allowed: every value is within its bound.
        measured: largest difference of two numbers.
        rows: rows with a value beyond its bound; where none is, rows that are not equal bit for bit.
        first: place of the first of them.
    """

    equal: bool
    allowed: bool
    measured: float
    rows: int
    first: Where | None


@dataclass(frozen=True)
class _Gaps:
    """[N] rows of a column that are unequal, and that are beyond the bound; and the largest difference of numbers."""

    unequal: np.ndarray
    beyond: np.ndarray
    measured: float = 0.0


def compare_tables(
    stored: pa.Table, made: pa.Table, bounds: Mapping[str, Bound], leave_out: Collection[str] = ()
) -> Comparison:
    """Compare two tables of one schema, row by row as their ids say.

    Args:
        stored: the one whose order of rows counts.
        made: the other.
        bounds: of columns of numbers; columns that are not named must be equal.
        leave_out: columns that are not looked at.
    """
    key = next(name for name in KEYS if name in stored.column_names)
    stray = _stray_row(stored, made, key)
    if stray is not None:
        return Comparison(False, False, 0.0, abs(stored.num_rows - made.num_rows) or 1, stray)
    places = {name: row for row, name in enumerate(made[key].to_pylist())}
    order = [places[name] for name in stored[key].to_pylist()]
    made = made if order == list(range(len(order))) else made.take(pa.array(order))
    names = [name for name in stored.column_names if name not in leave_out]
    gaps = {name: _gaps(_one(stored[name]), _one(made[name]), bounds.get(name, Bound())) for name in names}
    measured = max((gap.measured for gap in gaps.values()), default=0.0)
    beyond, unequal = ({name: getattr(gap, kind) for name, gap in gaps.items()} for kind in ("beyond", "unequal"))
    chosen = beyond if any(rows.any() for rows in beyond.values()) else unequal
    rows = np.logical_or.reduce(list(chosen.values()))
    if not rows.any():
        return Comparison(True, True, 0.0, 0, None)
    first = int(np.argmax(rows))
    column = next(name for name, where in chosen.items() if where[first])
    pair = (stored[column][first], made[column][first])
    where = _place(str(stored[key][first]), column, *pair, bounds.get(column, Bound()), chosen is beyond)
    return Comparison(False, chosen is unequal, measured, int(rows.sum()), where)


def _stray_row(stored: pa.Table, made: pa.Table, key: str) -> Where | None:
    """A row that only one of the tables has, or has once more than the other."""
    theirs, ours = Counter(stored[key].to_pylist()), Counter(made[key].to_pylist())
    stray = next((name for name in [*theirs, *ours] if theirs[name] != 1 or ours[name] != 1), None)
    if stray is None:
        return None
    return Where(str(stray), key, None, _times(theirs[stray]), _times(ours[stray]))


def _times(count: int) -> str | None:
    return None if count == 0 else f"{count} {'row' if count == 1 else 'rows'}"


def _one(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _gaps(stored: pa.Array, made: pa.Array, bound: Bound) -> _Gaps:
    kind = stored.type
    if pa.types.is_large_list(kind) and not stored.null_count and not made.null_count:
        return _gaps_of_lists(Ragged.from_arrow(stored), Ragged.from_arrow(made), bound)
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        return _gaps_of_numbers(stored, made, bound)
    rows = np.asarray([a != b for a, b in zip(stored.to_pylist(), made.to_pylist(), strict=True)], dtype=bool)
    return _Gaps(rows, rows)


def _gaps_of_numbers(stored: pa.Array, made: pa.Array, bound: Bound) -> _Gaps:
    nulls = stored.is_null().to_numpy(zero_copy_only=False), made.is_null().to_numpy(zero_copy_only=False)
    odd = nulls[0] != nulls[1]
    values = [array.fill_null(0).to_numpy(zero_copy_only=False) for array in (stored, made)]
    unequal, beyond, measured = _differences(bound, *values)
    both = ~nulls[0] & ~nulls[1]
    # What a null hides is no value.
    return _Gaps((unequal & both) | odd, (beyond & both) | odd, _largest(measured[both]))


def _gaps_of_lists(stored: Ragged, made: Ragged, bound: Bound) -> _Gaps:
    same = stored.lengths == made.lengths
    pairs = [rows.values[np.repeat(same, rows.lengths)] for rows in (stored, made)]
    row_of = np.repeat(np.flatnonzero(same), stored.lengths[same])
    unequal, beyond, measured = _differences(bound, *pairs)
    rows = [np.bincount(row_of[tokens], minlength=len(same)) > 0 for tokens in (unequal, beyond)]
    return _Gaps(rows[0] | ~same, rows[1] | ~same, _largest(measured))


def _differences(bound: Bound, stored: np.ndarray, made: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which values are unequal, which beyond the bound, and how far each is."""
    if stored.dtype.kind != "f":
        unequal = stored != made
        return unequal, unequal, np.zeros(len(stored))
    bits = np.dtype(f"u{stored.dtype.itemsize}")
    unequal = np.ascontiguousarray(stored).view(bits) != np.ascontiguousarray(made).view(bits)
    a, b = stored.astype(np.float64), made.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return unequal, unequal & ~bound.allows(a, b), np.where(unequal, np.abs(a - b), 0.0)


def _largest(measured: np.ndarray) -> float:
    finite = measured[np.isfinite(measured)]
    return float(finite.max(initial=0.0))


def _place(row: str, column: str, stored: pa.Scalar, made: pa.Scalar, bound: Bound, beyond: bool) -> Where:
    """The first token of a row that differs, where the column holds lists."""
    ours, theirs = made.as_py(), stored.as_py()
    if not isinstance(theirs, list) or not isinstance(ours, list) or not pa.types.is_large_list(stored.type):
        return Where(row, column, None, theirs, ours)
    length = min(len(theirs), len(ours))
    kind = stored.type.value_type.to_pandas_dtype()
    values = [np.asarray(side[:length], dtype=kind) for side in (theirs, ours)]
    unequal, too_far, _ = _differences(bound, *values)
    places = np.flatnonzero(too_far if beyond else unequal)
    token = int(places[0]) if len(places) else length
    return Where(row, column, token, _at(theirs, token), _at(ours, token))


def _at(values: list[Any], token: int) -> Any:
    return values[token] if token < len(values) else None


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
