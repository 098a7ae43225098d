"""`grpoflow export --what rollouts|samples`: rows as JSON lines, Parquet, or a folder that Hugging Face datasets loads.

Every step has the same columns of the same types, whatever its values are; a stage that a step has not is null there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flows.audit.rows_out import new_path, refuse_inside, refuse_taken, write_rows
from flows.audit.sources import Source, open_source, steps_named
from flows.audit.steps import parse_steps
from storage.durable import all_or_nothing
from storage.samples import SAMPLES, STAGE_OF, sample_rows

WHAT = ("checkpoint", "rollouts", "samples")
ROW_FORMATS = ("jsonl", "parquet", "hf")

COLUMNS = {
    "rollouts": tuple(name for name in SAMPLES.names if STAGE_OF.get(name, "rollouts") in ("prompts", "rollouts")),
    "samples": tuple(SAMPLES.names),
}
"""Columns of what can be exported as rows, behind `step`: prompts and responses; or all stages joined."""


def export_any_command(source: str, out: Path, what: str, format: str | None, steps: str | None, adapter: bool) -> int:
    """Write a run's policy or its samples and return the exit code.

    Args:
        source: `RUN` or `RUN@STEP`; of samples `RUN#LINEAGE` and `RUN#LINEAGE@STEP` too.
        out: a new file; of a checkpoint and with `hf` a new folder.
        what: one of `WHAT`.
        format: one of `ROW_FORMATS`; None: `hf` of a checkpoint; of samples `parquet` where `out` is called so, else
            `jsonl`.
        steps: only these, as `A..B`; None: all that have rows.
        adapter: of a LoRA run's checkpoint, the adapter alone.

    Raises:
        StorageError: there is something at `out`, it lies in a run's folder, or an artifact is damaged.
        ValueError: these do not go together.
    """
    if what not in WHAT:
        raise ValueError(f"--what {what}: there are {', '.join(WHAT)}")
    if what != "checkpoint":
        if adapter:
            raise ValueError(f"--adapter goes with --what checkpoint, not with {what}")
        return export_rows(source, out, what, format or _by_name(out), steps)
    if format not in (None, "hf"):
        raise ValueError(f"--format {format}: a checkpoint is written as hf; --what rollouts or samples as {format}")
    if steps is not None:
        raise ValueError("--steps goes with --what rollouts or samples; a checkpoint is of one step: RUN@STEP")
    from flows.resume import export_command, parse_source

    refuse_inside(out, [parse_source(source)[0].root])
    return export_command(source, out, adapter)


def _by_name(out: Path) -> str:
    """Format of a file that is named and no format is."""
    if out.suffix == ".csv":
        raise ValueError(f"{out}: rows are exported as {', '.join(ROW_FORMATS)}; grpoflow sql --format csv writes CSV")
    return "parquet" if out.suffix == ".parquet" else "jsonl"


def export_rows(source: str, out: Path, what: str, format: str, steps: str | None) -> int:
    """Write a run's samples as rows; see `export_any_command`."""
    if format not in ROW_FORMATS:
        raise ValueError(f"--what {what} --format {format}: rows are written as {', '.join(ROW_FORMATS)}")
    named = open_source(source)
    refuse_taken(out, [named.run.root])
    chosen = _steps_with_rows(named, steps)
    rows = _write_folder(named, chosen, what, out) if format == "hf" else _write_file(named, chosen, what, format, out)
    print(f"{rows} {what} of {steps_named(chosen)} are in {out}")
    return 0


def _steps_with_rows(source: Source, steps: str | None) -> list[int]:
    """The steps that have rows to export; of those that are named one by one, each must.

    Raises:
        FileNotFoundError: none has. StorageError: the rows of the one that is named were dropped.
    """
    if source.step is not None:
        source.run.step(source.step).table("rollouts", ["sample_id"])
        return [source.step]
    have = source.run.steps() if steps is None else parse_steps(steps, source.run)
    made = [step for step in have if source.run.step(step).used("rollouts") is not None]
    dropped = [step for step in made if source.run.step(step).is_dropped("rollouts")]
    if dropped:
        print(f"note: rows of {steps_named(dropped)} were dropped by retention and are left out", file=sys.stderr)
    chosen = [step for step in made if step not in dropped]
    if not chosen:
        raise FileNotFoundError(f"{source.run.root} has no rollouts to export in {steps_named(have)}")
    return chosen


def row_schema(what: str) -> pa.Schema:
    """Columns of exported rows; the same at every step."""
    step = pa.field("step", pa.int64(), nullable=False, metadata={"doc": "number of the step"})
    return pa.schema([step, *(SAMPLES.field(name) for name in COLUMNS[what])])


def _batches(source: Source, steps: Iterable[int], what: str) -> Iterator[pa.RecordBatch]:
    """Rows step by step; one step is held at a time."""
    schema = row_schema(what)
    for step in steps:
        table = sample_rows(source.run.step(step), COLUMNS[what])
        number = pa.repeat(pa.scalar(step, pa.int64()), table.num_rows)
        yield from pa.table([number, *table.columns], schema=schema).to_batches()


def _write_file(source: Source, steps: Sequence[int], what: str, format: str, out: Path) -> int:
    reader = pa.RecordBatchReader.from_batches(row_schema(what), _batches(source, steps, what))
    return write_rows(reader, format, out, [source.run.root])


def _write_folder(source: Source, steps: Sequence[int], what: str, out: Path) -> int:
    """A data set of one Parquet file a step, and a card that says what it is."""
    rows = 0
    with new_path(out, [source.run.root]) as aside, all_or_nothing(aside, str(out)):
        (aside / "data").mkdir()
        for step in steps:
            table = _without_maps(pa.Table.from_batches(_batches(source, [step], what), row_schema(what)))
            pq.write_table(table, aside / "data" / f"train-{step:06d}.parquet", compression="zstd")
            rows += table.num_rows
        (aside / "README.md").write_text(_card(source, steps, what, rows), encoding="utf-8")
    return rows


def _without_maps(table: pa.Table) -> pa.Table:
    """Maps as lists of key and value: datasets knows no maps."""
    for place, column in enumerate(table.schema):
        if pa.types.is_map(column.type):
            pairs = pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)]))
            table = table.set_column(place, column.with_type(pairs), table[column.name].cast(pairs))
    return table


def _card(source: Source, steps: Sequence[int], what: str, rows: int) -> str:
    columns = "\n".join(
        f"| `{field.name}` | {field.type} | {field.metadata[b'doc'].decode()} |" for field in row_schema(what)
    )
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: data/train-*.parquet\n---\n\n"
        f"# {what} of {source.run.run_id}\n\n"
        f"{rows} samples of {steps_named(steps)}, lineage {source.run.lineage}, written by `grpoflow export`.\n"
        "Columns of a stage that a step has not are null.\n\n"
        f"| column | type | meaning |\n|---|---|---|\n{columns}\n"
    )
