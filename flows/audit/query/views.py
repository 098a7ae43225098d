"""The views of SQL as data sets that are read step by step, and only as far as a query needs them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from flows.audit.query.rows import ViewOf, lacking_stages
from flows.audit.sources import Source, steps_named
from storage.schema import TEXT


@dataclass
class Seen:
    """What a query met on its way that its answer does not show.

    Attributes:
        dropped: steps without rows because retention has dropped them, by run and artifact.
        missing: steps without an artifact that the step was finished with, or that others of its step have.
        problem: why reading failed; DuckDB hands on its text only.
    """

    dropped: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    missing: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    problem: Exception | None = None

    def sentences(self) -> list[str]:
        """One line for each run and artifact whose rows are not all there."""
        told = []
        for found, what in ((self.dropped, "rows dropped by retention"), (self.missing, "missing")):
            for (run, stage), steps in sorted(found.items()):
                told.append(f"{run}: {stage} of {steps_named(steps)}: {what}")
        return told


class LazyView(ds.InMemoryDataset):
    """A view as a dataset: DuckDB asks it for the columns and steps that a query needs when it needs them."""

    def __new__(cls, *_: object) -> LazyView:
        """A dataset is made by its class, without what `__init__` takes."""
        made: LazyView = super().__new__(cls)
        return made

    def __init__(self, view: ViewOf, sources: Sequence[tuple[Source, Sequence[int]]], seen: Seen) -> None:
        self.view = view
        self.keys = [pa.field("run", TEXT, nullable=False, metadata={"doc": "which run"})] if len(sources) > 1 else []
        self.keys.append(pa.field("step", pa.int64(), nullable=False, metadata={"doc": "number of the step"}))
        self.full_schema = pa.schema([*self.keys, *view.schema])
        super().__init__(self.full_schema.empty_table())
        self._seen = seen
        self._places = [(source, step) for source, steps in sources for step in steps]

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: object) -> _Scan:
        """What DuckDB calls for each time the view stands in a query."""
        wanted = self.full_schema.names if columns is None else columns
        schema = pa.schema([self.full_schema.field(name) for name in wanted])
        return _Scan(schema, self._batches(schema, filter))

    def _batches(self, schema: pa.Schema, condition: Any) -> Iterator[pa.RecordBatch]:
        # An expression does not say which columns it reads: each whose name stands in it is read.
        named = set(re.findall(r"\w+", str(condition))) if condition is not None else set()
        read = [name for name in self.full_schema.names if name in schema.names or name in named]
        own = [name for name in read if name in self.view.schema.names]
        try:
            for source, step in self._pruned(condition):
                self._note_gaps(source, step, own)
                for table in self.view.rows(source.run.step(step), own):
                    whole = self._with_keys(table, source.name, step, read)
                    if condition is not None:
                        whole = ds.dataset(whole).to_table(filter=condition, use_threads=False)
                    yield from whole.select(schema.names).cast(schema).to_batches()
        except Exception as error:
            self._seen.problem = error
            raise

    def _with_keys(self, table: pa.Table, run: str, step: int, names: list[str]) -> pa.Table:
        values = {"run": run, "step": step}
        arrays = [
            table[name]
            if name in table.column_names
            else pa.repeat(pa.scalar(values[name], self._type(name)), len(table))
            for name in names
        ]
        return pa.table(arrays, schema=pa.schema([self.full_schema.field(name) for name in names]))

    def _type(self, name: str) -> pa.DataType:
        return self.full_schema.field(name).type

    def _pruned(self, condition: Any) -> list[tuple[Source, int]]:
        """The runs and steps that can have rows under a condition, found without opening a file."""
        if condition is None or not self._places:
            return self._places
        guarantees = [
            (ds.field("step") == step) & ((ds.field("run") == source.name) if len(self.keys) > 1 else ds.scalar(True))
            for source, step in self._places
        ]
        names = [str(place) for place in range(len(self._places))]
        places = ds.FileSystemDataset.from_paths(
            names, self.full_schema, ds.IpcFileFormat(), pyarrow.fs.LocalFileSystem(), guarantees
        )
        return [self._places[int(fragment.path)] for fragment in places.get_fragments(condition)]

    def _note_gaps(self, source: Source, step: int, columns: list[str]) -> None:
        """Remember what of the stages behind these columns is not there."""
        view, needed = source.run.step(step), self.view.stages_of(columns)
        lacking = lacking_stages(view) if needed else []
        for stage in needed:
            if view.is_dropped(stage):
                self._seen.dropped.setdefault((source.name, stage), set()).add(step)
            elif stage in lacking:
                self._seen.missing.setdefault((source.name, stage), set()).add(step)


@dataclass(frozen=True)
class _Scan:
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, self.batches)
