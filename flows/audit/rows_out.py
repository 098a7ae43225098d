"""Rows as text and files: a table for people, JSON, JSON lines, CSV, Parquet and Arrow, batch by batch.

What JSON has no form for is written by the rule of `tasks.json_values.jsonable`: a NaN or an infinity is null.
"""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from rich.cells import cell_len, set_cell_size

from storage import StorageError
from tasks.json_values import json_text, jsonable

FORMATS = ("table", "json", "jsonl", "csv", "parquet", "arrow")
BINARY = ("parquet", "arrow")
TABLE_ROWS = 100
"""Rows that a table on a terminal has at most."""
CELL = 60
"""Characters of a cell of such a table."""


def write_rows(batches: pa.RecordBatchReader, format: str, out: Path | None, runs: Sequence[Path]) -> int:
    """Write all rows and return how many.

    Args:
        batches: the rows.
        format: one of `FORMATS`.
        out: a new file; None: standard output.
        runs: folders of runs, in which nothing is written.

    Raises:
        StorageError: the file is there already, or lies in a run's folder.
    """
    if out is None:
        return _write_text(batches, format, sys.stdout)
    with new_path(out, runs) as aside:
        if format in BINARY:
            return _write_binary(batches, format, aside)
        with aside.open("w", encoding="utf-8", newline="") as file:
            return _write_text(batches, format, file)


@contextmanager
def new_path(path: Path, runs: Sequence[Path]) -> Iterator[Path]:
    """A path beside the wanted one, which takes its name when the block is done and is removed when it fails.

    Raises:
        StorageError: something is there already, or it lies in a run's folder.
    """
    refuse_taken(path, runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}.aside")
    try:
        yield aside
        refuse_taken(path, runs)
        aside.rename(path)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            aside.unlink()


def refuse_taken(path: Path, runs: Sequence[Path]) -> None:
    """Raise where nothing may be written.

    Raises:
        StorageError: something is there already, or it lies in a run's folder.
    """
    if path.exists() or path.is_symlink():
        raise StorageError(f"{path} is there already and is not overwritten. Name another one.")
    refuse_inside(path, runs)


def refuse_inside(path: Path, runs: Sequence[Path]) -> None:
    """Raise for a path in the folder of a run: of one of these, or of any other.

    Raises:
        StorageError: it lies there.
    """
    whole = path.resolve()
    for folder in whole.parents:
        if folder in {run.resolve() for run in runs} or (folder / "run.json").is_file():
            raise StorageError(
                f"{path} lies in the folder of a run, which holds only what the run wrote. Name another."
            )


def rows_of(batch: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """Rows as Python values; a map is a dict."""
    maps = [field.name for field in batch.schema if pa.types.is_map(field.type)]
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (OverflowError, ValueError) as error:  # a date before year 1, an interval of a million years
        raise ValueError(f"a value cannot be shown ({error}); cast it to varchar, or use --format parquet") from error
    for name in maps:
        for row in rows:
            row[name] = None if row[name] is None else dict(row[name])
    return rows


def json_line(row: Any) -> str:
    """A row, or a value of one, as JSON by the written rule."""
    try:
        return json_text(row)
    except (ValueError, TypeError):
        return json_text(jsonable(row, longest_text=None)[0])


def _write_text(batches: pa.RecordBatchReader, format: str, file: TextIO) -> int:
    if format == "table":
        return _write_table(batches, file)
    if format == "csv":
        return _write_csv(batches, file)
    lines = (json_line(row) for batch in batches for row in rows_of(batch))
    return _write_lines(lines, file) if format == "jsonl" else _write_array(lines, file)


def _write_lines(lines: Iterable[str], file: TextIO) -> int:
    count = 0
    for line in lines:
        file.write(f"{line}\n")
        count += 1
    return count


def _write_array(lines: Iterable[str], file: TextIO) -> int:
    count = 0
    file.write("[")
    for count, line in enumerate(lines, 1):
        file.write(f"{',' if count > 1 else ''}\n{line}")
    file.write("\n]\n" if count else "]\n")
    return count


def _write_csv(batches: pa.RecordBatchReader, file: TextIO) -> int:
    """Lists, maps and truth values are JSON in a cell; a null is an empty cell."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(batches.schema.names)
    count = 0
    for batch in batches:
        for row in rows_of(batch):
            writer.writerow(
                [json_line(value) if isinstance(value, list | dict | bool) else value for value in row.values()]
            )
            count += 1
    return count


def _write_table(batches: pa.RecordBatchReader, file: TextIO) -> int:
    rows: list[dict[str, Any]] = []
    more = False
    for batch in batches:
        rows += rows_of(batch.slice(0, TABLE_ROWS + 1 - len(rows)))
        if more := len(rows) > TABLE_ROWS:
            break
    if batches.schema.names == ["explain_key", "explain_value"]:
        file.writelines(f"{row['explain_value']}\n" for row in rows)
        return len(rows)
    _print_table(batches.schema, [[_cell(value) for value in row.values()] for row in rows[:TABLE_ROWS]], file)
    if more:
        print(f"note: the first {TABLE_ROWS} rows; --format csv or json gives all", file=sys.stderr)
    return min(len(rows), TABLE_ROWS)


def _print_table(schema: pa.Schema, rows: list[list[str]], file: TextIO) -> None:
    """Rows side by side, or each as a list of its columns where a terminal is too narrow for that."""
    cells = [schema.names, *rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    if file.isatty() and sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns and rows:
        widest = max(map(cell_len, schema.names))
        for number, row in enumerate(rows, 1):
            file.write(f"row {number}\n")
            file.writelines(
                f"  {set_cell_size(name, widest)}  {cell}\n" for name, cell in zip(schema.names, row, strict=True)
            )
        return
    right = [pa.types.is_integer(field.type) or pa.types.is_floating(field.type) for field in schema]
    for row in cells:
        padded = (
            " " * (width - cell_len(cell)) + cell if number else set_cell_size(cell, width)
            for cell, width, number in zip(row, widths, right, strict=True)
        )
        file.write("  ".join(padded).rstrip() + "\n")


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    text = json_line(value) if isinstance(value, list | dict) else str(value)
    text = text.replace("\n", "\\n")
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"


def _write_binary(batches: pa.RecordBatchReader, format: str, path: Path) -> int:
    count = 0
    with _binary_writer(format, path, batches.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _binary_writer(format: str, path: Path, schema: pa.Schema) -> Any:
    return pq.ParquetWriter(path, schema, compression="zstd") if format == "parquet" else pa.ipc.new_file(path, schema)
