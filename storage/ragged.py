"""Rows of unequal length as one flat array: how token columns travel between Arrow and tensors without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, eq=False)
class Ragged:
    """N rows in one buffer.

    Attributes:
        values: [sum of lengths] all rows, one after the other.
        offsets: [N + 1] int64; row i is values[offsets[i]:offsets[i + 1]].
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(
        cls, rows: Sequence[np.ndarray | Sequence[int] | Sequence[float]], dtype: np.typing.DTypeLike
    ) -> Ragged:
        """Join rows; an empty row is a row of length 0."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), offsets)

    @classmethod
    def from_lengths(cls, values: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Cut a flat array into rows of the given lengths."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(values):
            raise ValueError(f"rows of {offsets[-1]} values in all cannot be cut from {len(values)} values")
        return cls(values, offsets)

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray | pa.Array) -> Ragged:
        """View a (large) list column; several chunks are copied into one buffer, a single one is not."""
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        values, lengths = [], []
        for chunk in chunks:
            if chunk.null_count:
                raise ValueError(f"a column of type {chunk.type} holds {chunk.null_count} null rows")
            flat = chunk.flatten()
            values.append(flat.to_numpy(zero_copy_only=not pa.types.is_boolean(flat.type)))
            lengths.append(np.diff(chunk.offsets.to_numpy()))
        if not chunks:
            return cls(np.empty(0, column.type.value_type.to_pandas_dtype()), np.zeros(1, np.int64))
        flat_values = values[0] if len(values) == 1 else np.concatenate(values)
        return cls.from_lengths(flat_values, np.concatenate(lengths))

    def to_arrow(self) -> pa.LargeListArray:
        """The same rows as a large-list array."""
        return pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(self.values))

    @property
    def lengths(self) -> np.ndarray:
        """[N] length of each row."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        """The given rows, in the given order."""
        return Ragged.from_rows([self[int(i)] for i in rows], self.values.dtype)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))
