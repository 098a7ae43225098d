"""`grpoflow sql`: DuckDB over the artifacts of runs, without network, without other files, and without writing."""

from __future__ import annotations

import difflib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from flows.audit.query.rows import VIEWS
from flows.audit.query.views import LazyView, Seen
from flows.audit.rows_out import BINARY, FORMATS, write_rows
from flows.audit.sources import Source, is_run, open_sources
from flows.audit.steps import parse_steps

if TYPE_CHECKING:
    import duckdb

_LOCKED = (
    "enable_external_access=false",
    "autoinstall_known_extensions=false",
    "autoload_known_extensions=false",
    "allow_community_extensions=false",
    "python_enable_replacements=false",
    "enable_progress_bar=false",
    "lock_configuration=true",
)
"""Settings after which SQL can neither reach another file, extension, host or Python variable, nor undo this."""

NAMES_TOLD = 12
"""Columns that the message for a wrong name has."""

ROWS_PER_BATCH = 10_000
"""Rows that DuckDB hands over at a time."""


def sql_command(words: Sequence[str], steps: str | None, format: str, out: Path | None) -> int:
    """Answer a query over runs, or list the views where there is none; return the exit code.

    Args:
        words: runs as `RUN`, `RUN@STEP` or `RUN#LINEAGE`, then the query; `-` reads it from standard input.
        steps: only these, as `A..B`; None: all.
        format: one of `FORMATS`.
        out: a new file; None: standard output.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format}: there are {', '.join(FORMATS)}")
    if format in BINARY and out is None:
        raise ValueError(f"--format {format} is not for a terminal: name a new file with -o FILE")
    runs, query = _split(words)
    sources = open_sources(runs)
    if query is None:
        print(describe_views(several=len(sources) > 1))
        return 0
    with opened(sources, steps) as (connection, seen):
        write_rows(ask(connection, seen, query), format, out, [source.run.root for source in sources])
        for sentence in seen.sentences():
            print(f"note: {sentence}", file=sys.stderr)
    return 0


def _split(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The runs, and the query if there is one: the last word, when it has a space in it and is no run."""
    *runs, last = words
    if is_run(last) or (last != "-" and not re.search(r"\s", last)):
        return list(words), None
    if not runs:
        raise ValueError('name a run before the query: grpoflow sql RUN "select …"')
    return runs, sys.stdin.read() if last == "-" else last


@contextmanager
def opened(sources: Sequence[Source], steps: str | None = None) -> Iterator[tuple[duckdb.DuckDBPyConnection, Seen]]:
    """A locked-down DuckDB in memory in which `VIEWS` stand for the artifacts of runs.

    Args:
        sources: the runs; several at once have a column `run`.
        steps: only these, as `A..B`; None: all.
    """
    import duckdb

    seen = Seen()
    chosen = [(source, _steps_of(source, steps)) for source in sources]
    with tempfile.TemporaryDirectory() as folder, duckdb.connect(":memory:") as connection:
        for name, view in VIEWS.items():
            connection.register(name, LazyView(view, chosen, seen))
        # What does not fit into memory is put there, not into the folder that the command is started in.
        connection.execute(f"SET temp_directory='{folder}'")
        for setting in _LOCKED:
            connection.execute(f"SET {setting}")
        yield connection, seen


def _steps_of(source: Source, steps: str | None) -> list[int]:
    if source.step is not None:
        return [source.step]
    return source.run.steps() if steps is None else parse_steps(steps, source.run)


def ask(connection: duckdb.DuckDBPyConnection, seen: Seen, query: str) -> pa.RecordBatchReader:
    """The answer to one query, in batches, as they are worked out.

    Raises:
        ValueError: the query is wrong, or wants more than to read.
        StorageError: an artifact that it needs is damaged; a later one is found when its rows are read.
    """
    import duckdb

    with _told(seen, query):
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            raise ValueError(f"one query at a time; this is {len(statements)} statements")
        if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise ValueError(
                f"{statements[0].type.name.lower()} is not a query: runs are read only. Use select, with, from, "
                "describe, summarize, show or explain."
            )
        reader = connection.sql(query).to_arrow_reader(ROWS_PER_BATCH)
    schema = _told_apart(reader.schema)
    return pa.RecordBatchReader.from_batches(schema, _batches(reader, schema, seen, query))


def _batches(reader: pa.RecordBatchReader, schema: pa.Schema, seen: Seen, query: str) -> Iterator[pa.RecordBatch]:
    with _told(seen, query):
        for batch in reader:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _told_apart(schema: pa.Schema) -> pa.Schema:
    """Columns of one name, such as a join with `select *` gives, are numbered: `score`, `score_1`."""
    names: list[str] = []
    for name in schema.names:
        free = (f"{name}_{number}" for number in count(1))
        names.append(name if name not in names else next(each for each in free if each not in {*names, *schema.names}))
    return pa.schema([column.with_name(name) for column, name in zip(schema, names, strict=True)])


@contextmanager
def _told(seen: Seen, query: str) -> Iterator[None]:
    """Turn what DuckDB raises into one line, with the views or columns that were likely meant."""
    import duckdb

    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if seen.problem is not None:
            raise seen.problem from None
        if not isinstance(error, duckdb.Error):
            raise
        raise ValueError(_in_one_line(str(error), query)) from None


def _in_one_line(message: str, query: str) -> str:
    """DuckDB's message without its drawing of the query, and where a name is unknown, those there are."""
    lines = [line.strip() for line in message.split("\n\nLINE ")[0].splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(("Did you mean", "Candidate")))
    if match := re.search(r"Table with name (\w+) does not exist", text):
        return f"{text} The views are {', '.join(_nearest(match[1], VIEWS))}."
    if match := re.search(r'[Cc]olumn "?(?:\w+"?\.)?"?(\w+)"? not found|does not have a column named "(\w+)"', text):
        words = set(re.findall(r"\w+", query))
        named = {name: view for name, view in VIEWS.items() if name in words} or VIEWS
        have = {"step", *(column for view in named.values() for column in view.schema.names)}
        near = _nearest(match[1] or match[2], sorted(have))[:NAMES_TOLD]
        more = ", and more; without a query all are listed" if len(have) > NAMES_TOLD else ""
        return f"{text} {', '.join(named)} {'has' if len(named) == 1 else 'have'} the columns {', '.join(near)}{more}."
    return text


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """All names, those that look most like the given one first."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return [*near, *(each for each in names if each not in near)]


def describe_views(several: bool = False) -> str:
    """All views and their columns with their meaning, as text.

    Args:
        several: of several runs at once, which have a column `run`.
    """
    lines = []
    keys = [("run", "large_string", "which run")] if several else []
    keys.append(("step", "int64", "number of the step"))
    for name, view in VIEWS.items():
        columns = [*keys, *((each.name, str(each.type), each.metadata[b"doc"].decode()) for each in view.schema)]
        lines.append(f"{name}: {view.doc}")
        lines += [f"  {column:<22} {_short(kind):<16} {doc}" for column, kind, doc in columns]
        lines.append("")
    return "\n".join(lines).rstrip()


def _short(kind: str) -> str:
    """A type as DuckDB calls it."""
    names = {"large_string": "varchar", "string": "varchar", "int64": "bigint", "int32": "integer", "bool": "boolean"}
    if match := re.fullmatch(r"(?:large_)?list<(?:item|element): (\w+)>", kind):
        return f"{_short(match[1])}[]"
    return "map" if kind.startswith("map") else names.get(kind, kind)
