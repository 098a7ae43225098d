"""How much memory the batches of an Arrow file take, from its metadata alone: pyarrow unpacks first and tells then.

A file of a kilobyte can hold gigabytes of zeros. The layout is that of Arrow's `File.fbs` and `Message.fbs`, in
flatbuffers: https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import struct

import pyarrow as pa

_MAGIC = b"ARROW1"
_RECORD_BATCHES, _HEADER, _BUFFERS, _COMPRESSION = 3, 2, 2, 3
"""Numbers of fields: of a footer, of a message, and twice of a record batch."""


def unpacked_bytes(file: pa.Buffer) -> int:
    """Bytes that the compressed buffers of all batches say they unpack to; 0 where none is compressed.

    Raises:
        ValueError: it is no Arrow file.
    """
    view = memoryview(file)
    try:
        if bytes(view[-6:]) != _MAGIC:
            raise ValueError("it does not end as an Arrow file does")
        footer = view[-10 - _number("<i", view, len(view) - 10) : -10]
        blocks = _vector(footer, _table(footer, 0), _RECORD_BATCHES, 24)
        return sum(_of_batch(view, *struct.unpack_from("<qi4xq", footer, at)) for at in blocks)
    except struct.error as error:
        raise ValueError(f"its metadata leads out of it: {error}") from error


def _of_batch(view: memoryview, offset: int, metadata_length: int, body_length: int) -> int:
    """The same of one batch, whose message begins at an offset, behind a mark and its length."""
    if min(offset, metadata_length, body_length) < 0:
        raise ValueError("a batch lies before its file")
    message = view[offset + 8 : offset + metadata_length]
    body = view[offset + metadata_length : offset + metadata_length + body_length]
    header = _field(message, _table(message, 0), _HEADER)
    batch = 0 if header is None else _table(message, header)
    if not batch or _field(message, batch, _COMPRESSION) is None:
        return 0
    buffers = [struct.unpack_from("<qq", message, at) for at in _vector(message, batch, _BUFFERS, 16)]
    # -1 stands for a buffer that is as it was; any other size is that of what it unpacks to.
    return sum(max(_number("<q", body, start), 0) for start, length in buffers if length > 0)


def _number(kind: str, view: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("its metadata leads out of it")
    number: int = struct.unpack_from(kind, view, at)[0]
    return number


def _table(view: memoryview, at: int) -> int:
    """Where a table begins that is pointed to from `at`."""
    return at + _number("<I", view, at)


def _field(view: memoryview, table: int, number: int) -> int | None:
    """Where a field of a table is; None: it is left out."""
    directory = table - _number("<i", view, table)
    entry = 4 + 2 * number
    if entry >= _number("<H", view, directory):
        return None
    offset = _number("<H", view, directory + entry)
    return table + offset if offset else None


def _vector(view: memoryview, table: int, number: int, item_bytes: int) -> range:
    """Where the items of a vector begin."""
    field = _field(view, table, number)
    if field is None:
        return range(0)
    start = _table(view, field)
    count = _number("<I", view, start)
    if count * item_bytes > len(view):
        raise ValueError("a list in its metadata is longer than the metadata")
    return range(start + 4, start + 4 + count * item_bytes, item_bytes)
