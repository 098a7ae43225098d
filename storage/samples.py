"""One row per sample, all stages of a step joined by id; and a digest of a table's values alone.

Every other reader of samples (SQL, report, diff, export) takes its rows from here, so that nothing is joined by place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.durable import StorageError
from storage.schema import SCHEMAS

if TYPE_CHECKING:
    from storage.ledger import Run, StepView

SAMPLE_STAGES = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages")
"""Stages whose columns a sample's row has; those of `prompts` come by `group_id`, the others by `sample_id`."""

_KEYS = ("sample_id", "group_id")


def _sample_schema() -> pa.Schema:
    rollouts = [SCHEMAS["rollouts"].field(name) for name in (*_KEYS, "sample_index")]
    known = {field.name for field in rollouts}
    rest = [field for stage in SAMPLE_STAGES for field in SCHEMAS[stage] if field.name not in known]
    own = set(SCHEMAS["rollouts"].names)
    return pa.schema([*rollouts, *(field if field.name in own else field.with_nullable(True) for field in rest)])


SAMPLES = _sample_schema()
"""Columns of a sample's row, the same at every step: of stages that a step has not, they are null."""

STAGE_OF = {field.name: stage for stage in SAMPLE_STAGES for field in SCHEMAS[stage] if field.name not in _KEYS}
"""Which stage a column of `SAMPLES` comes from."""

UNMEASURED = ("seconds",)
"""Columns that differ between two makings of the same thing; `content_digest` leaves them out."""


def sample_rows(view: StepView, columns: Sequence[str] | None = None) -> pa.Table:
    """One row per sample of a step, in the order of its rollouts; other stages are joined by `sample_id`.

    Args:
        view: the step.
        columns: which columns of `SAMPLES`, in this order; None: all. Only the stages they come from are read.

    Returns:
        [N] rows. Columns of a stage that the step has not are null, and its metadata names these stages: `missing`,
        a JSON list. A null elsewhere is one that the stage wrote.

    Raises:
        FileNotFoundError: the step has no rollouts.
        StorageError: an artifact is damaged, its rows are dropped, or it does not hold exactly the rollouts' samples.
        ValueError: no such column.
    """
    wanted = list(SAMPLES.names if columns is None else columns)
    refuse_unknown(wanted, SAMPLES.names)
    by_stage: dict[str, list[str]] = {stage: [] for stage in SAMPLE_STAGES}
    for name in wanted:
        if name not in _KEYS:
            by_stage[STAGE_OF[name]].append(name)
    base = view.table("rollouts", [*_KEYS, *by_stage.pop("rollouts")])
    if pc.count_distinct(base["sample_id"]).as_py() < base.num_rows:
        raise StorageError(
            f"rollouts of step {view.index} of {view.run.root} has a sample_id twice; nothing joins to it"
        )
    found = {name: base[name] for name in base.column_names}
    there = set(view.stages())
    for stage, names in by_stage.items():
        if names and stage in there:
            found.update(_joined(view, stage, names, base))
    arrays = [found[name] if name in found else pa.nulls(base.num_rows, SAMPLES.field(name).type) for name in wanted]
    missing = json.dumps([stage for stage in SAMPLE_STAGES if stage not in there])
    schema = pa.schema([SAMPLES.field(name) for name in wanted], metadata={"missing": missing})
    return pa.table(arrays, schema=schema)


def run_sample_rows(run: Run, steps: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of several steps below one another, behind a column `step`.

    Args:
        run: the run.
        steps: which steps; None: all that have rollouts whose rows were not dropped.
        columns: as for `sample_rows`.

    Returns:
        The rows. Metadata `missing` is a JSON object of the stages that steps have not, by step, and `dropped` the
        JSON list of the steps that were left out because retention has dropped their rows.

    Raises:
        FileNotFoundError: a step that is asked for has no rollouts, or none has.
        StorageError, ValueError: as `sample_rows`.
    """
    dropped: list[int] = []
    if steps is None:
        have = [step for step in run.steps() if "rollouts" in run.step(step).stages()]
        dropped = [step for step in have if run.step(step).is_dropped("rollouts")]
        steps = [step for step in have if step not in dropped]
        if not steps:
            why = f"retention has dropped those of steps {dropped}" if dropped else "no step has any"
            raise FileNotFoundError(f"{run.root} has no rollouts to read: {why}")
    tables, missing = [], {}
    for step in steps:
        table = sample_rows(run.step(step), columns)
        if lacking := json.loads(table.schema.metadata[b"missing"]):
            missing[str(step)] = lacking
        number = pa.array(np.full(table.num_rows, step), pa.int64())
        tables.append(table.add_column(0, pa.field("step", pa.int64(), nullable=False), number))
    if not tables:
        raise ValueError("no step is asked for")
    told = {"missing": json.dumps(missing), "dropped": json.dumps(dropped)}
    return pa.concat_tables([table.replace_schema_metadata(told) for table in tables])


def refuse_unknown(wanted: Iterable[str], known: Sequence[str]) -> None:
    """Raise for a column that is not among those known.

    Raises:
        ValueError: with the columns there are.
    """
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no column {', '.join(map(repr, unknown))}; there are {', '.join(known)}")


def _joined(view: StepView, stage: str, names: Sequence[str], base: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Columns of a stage in the order of the rollouts.

    Raises:
        StorageError: samples are missing, twice, too many, or of another group than their rollout.
    """
    key = "group_id" if stage == "prompts" else "sample_id"
    keys = [key] if stage == "prompts" else list(_KEYS)
    table = view.table(stage, [*keys, *names])
    if not (stage != "prompts" and table[key].equals(base[key])):
        places = pc.index_in(base[key], value_set=table[key].combine_chunks())
        missing = base[key].filter(pc.is_null(places))
        twice = table.num_rows - pc.count_distinct(table[key]).as_py()
        too_many = table.num_rows > base.num_rows and stage != "prompts"
        if len(missing) or twice or too_many:
            raise StorageError(
                f"{stage} of step {view.index} of {view.run.root} cannot be joined to the rollouts by {key}: "
                f"{table.num_rows} rows ({twice} of them with an id that another row has) for {base.num_rows} samples, "
                f"of which {len(missing)} are missing {missing.slice(0, 3).to_pylist()}. Look at it by itself: "
                f"grpoflow show {view.run.root} --step {view.index} --stage {stage}"
            )
        table = table.take(places)
    if not table["group_id"].equals(base["group_id"]):
        raise StorageError(
            f"{stage} of step {view.index} of {view.run.root} has a sample in another group than rollouts"
        )
    return {name: table[name] for name in names}


# ------------------------------------------------------------------------------------------------------------- digests


def content_digest(table: pa.Table, leave_out: Sequence[str] = UNMEASURED) -> str:
    """SHA-256 over a table's column names, types and values.

    Equal for equal rows in equal order, however they are cut into chunks and files, and whatever lies under a null.
    Floats are compared by their bits: 0.0 and -0.0 differ, a NaN equals itself.

    Args:
        table: any table of this project's schemas.
        leave_out: columns that do not count; measured seconds by default.
    """
    digest = hashlib.sha256()
    for name in sorted(set(table.column_names) - set(leave_out)):
        column = table[name]
        digest.update(f"{name}\0{column.type}\0{len(column)}\0".encode())
        digest.update(column_digest(column).encode())
    return digest.hexdigest()


def column_digest(column: pa.ChunkedArray | pa.Array) -> str:
    """SHA-256 over the values of one column, as `content_digest` takes them."""
    streams: dict[str, Any] = {}

    def feed(path: str, data: Any) -> None:
        streams.setdefault(path, hashlib.sha256()).update(data)

    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        _feed(chunk, "", feed)
    return hashlib.sha256(
        "".join(f"{path}{streams[path].hexdigest()}" for path in sorted(streams)).encode()
    ).hexdigest()


def _feed(array: pa.Array, path: str, feed: Callable[[str, Any], None]) -> None:
    """Hand on which values there are, how long they are, and their bytes, each as a stream of its own."""
    kind = array.type
    feed(f"{path}/valid", np.ascontiguousarray(array.is_valid().to_numpy(zero_copy_only=False)))
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array).cast(pa.int64()), 0)
        feed(f"{path}/lengths", lengths.to_numpy())
        _feed(array.flatten(), f"{path}/values", feed)
    elif pa.types.is_large_string(kind) or pa.types.is_string(kind):
        texts = pc.fill_null(array, "").cast(pa.large_string())
        offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
        feed(f"{path}/lengths", np.diff(offsets))
        if len(texts) and offsets[-1] > offsets[0]:
            feed(f"{path}/values", memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]])
    elif pa.types.is_boolean(kind):
        feed(f"{path}/values", np.ascontiguousarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False)))
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        feed(f"{path}/values", np.ascontiguousarray(pc.fill_null(array, 0).to_numpy(zero_copy_only=False)))
    else:  # maps: a few entries a row
        feed(f"{path}/values", "".join(f"{json.dumps(row)}\n" for row in array.to_pylist()).encode())
