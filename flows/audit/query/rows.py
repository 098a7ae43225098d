"""What SQL sees of one step: the views, their columns, and how the rows of a step are read for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import StorageError
from storage.ledger import StepView
from storage.samples import SAMPLE_STAGES, SAMPLES, STAGE_OF, sample_rows
from storage.schema import KIND, SCHEMAS, TEXT, TOKEN_FLAGS, TOKEN_FLOATS, schema_of, without_round

TOKENS_PER_BATCH = 1 << 20
"""Response tokens of one batch of `tokens`: bounds the memory of a step with long responses."""

Rows = Callable[[StepView, list[str]], Iterable[pa.Table]]
"""Gives columns of a step's rows, in batches."""


@dataclass(frozen=True)
class ViewOf:
    """One view: its columns with their meaning, and how a step's rows of it are read.

    Attributes:
        schema: its columns, without `run` and `step`.
        stage: artifact whose rows it has; None: it has rows all the same where one is missing.
        rows: reads them.
        doc: what a row is.
        joined: columns come from other stages too.
    """

    schema: pa.Schema
    stage: str | None
    rows: Rows
    doc: str
    joined: bool = False

    def stages_of(self, columns: Iterable[str]) -> set[str]:
        """The artifacts behind some of its columns."""
        inputs = [each for name in columns for each in (_DERIVED[name][1] if name in _DERIVED else (name,))]
        others = {STAGE_OF[name] for name in inputs if name in STAGE_OF} if self.joined else set()
        return others | ({self.stage} if self.stage else set())


# ------------------------------------------------------------------------------------------------------- rows of a step


def _stage_rows(stage: str) -> Rows:
    def rows(view: StepView, columns: list[str]) -> Iterator[pa.Table]:
        if view.used(stage) is not None and not view.is_dropped(stage):
            yield view.table(stage, columns or None)

    return rows


def _candidate_rows(stage: str) -> Rows:
    def rows(view: StepView, columns: list[str]) -> Iterator[pa.Table]:
        for name in view.stages():
            if name != stage and without_round(name) == stage and not view.is_dropped(name):
                table = view.table(name, [column for column in columns if column != "call"] or None)
                yield table.append_column(
                    "call", pa.repeat(pa.scalar(int(name.rsplit("-")[-1]), pa.int32()), len(table))
                )

    return rows


def _sample_rows(view: StepView, columns: list[str]) -> Iterator[pa.Table]:
    if view.used("rollouts") is None or view.is_dropped("rollouts"):
        return
    dropped = {stage for stage in SAMPLE_STAGES if view.is_dropped(stage)}
    there = [name for name in columns if STAGE_OF.get(name) not in dropped]
    table = sample_rows(view, there or ["sample_id"])
    for name in columns:
        if name not in there:
            table = table.append_column(SAMPLES.field(name), pa.nulls(len(table), SAMPLES.field(name).type))
    yield table


ALIGNED = tuple(column.name for column in SAMPLES if column.type in (TOKEN_FLOATS, TOKEN_FLAGS))
"""Columns of a sample that have a value for each response token."""

_TOKEN_OF_SAMPLE = ("sample_id", "group_id", "sample_index")


def _scalar(name: str, doc: str) -> pa.Field:
    return pa.field(name, pa.float64(), metadata={"doc": doc})


def _k3(old: Any, ref: Any) -> Any:
    """exp(-k) - 1 + k of k = old - ref (http://joschu.net/blog/kl-approx.html)."""
    return pc.add(pc.expm1(pc.subtract(ref, old)), pc.subtract(old, ref))


_DERIVED: dict[str, tuple[pa.Field, tuple[str, str], Callable[[Any, Any], Any]]] = {
    "sampler_gap": (
        _scalar("sampler_gap", "rollout_log_probs - old_log_probs: sampler minus trainer, nats"),
        ("rollout_log_probs", "old_log_probs"),
        pc.subtract,
    ),
    "sampler_ratio": (
        _scalar("sampler_ratio", "exp(old_log_probs - rollout_log_probs): probability of trainer over sampler"),
        ("old_log_probs", "rollout_log_probs"),
        lambda old, rollout: pc.exp(pc.subtract(old, rollout)),
    ),
    "ref_kl": (
        _scalar("ref_kl", "old_log_probs - ref_log_probs: the plain (k1) estimate of KL to the reference, nats"),
        ("old_log_probs", "ref_log_probs"),
        pc.subtract,
    ),
    "ref_kl_k3": (
        _scalar("ref_kl_k3", "exp(-k) - 1 + k of k = ref_kl: the low-variance (k3) estimate, nats"),
        ("old_log_probs", "ref_log_probs"),
        _k3,
    ),
}
"""Columns of `tokens` that follow from two others: what they are, from which, and how, in float64."""


def _token_schema() -> pa.Schema:
    position = pa.field("position", pa.int32(), nullable=False, metadata={"doc": "place in the response, from 0"})
    token_id = pa.field("token_id", pa.int32(), nullable=False, metadata={"doc": "token id as sampled"})
    aligned = [
        pa.field(name, SAMPLES.field(name).type.value_type, metadata=SAMPLES.field(name).metadata) for name in ALIGNED
    ]
    keys = [SAMPLES.field(name) for name in _TOKEN_OF_SAMPLE]
    return pa.schema([*keys, position, token_id, *aligned, *(column for column, _, _ in _DERIVED.values())])


TOKENS = _token_schema()


def _token_rows(view: StepView, columns: list[str]) -> Iterator[pa.Table]:
    asked = {name for column in columns for name in (_DERIVED[column][1] if column in _DERIVED else (column,))}
    needed = [name for name in SAMPLES.names if name in asked and name != "response_ids"]
    for samples in _sample_rows(view, [*needed, "response_ids"]):
        lengths = pc.list_value_length(samples["response_ids"]).to_numpy()
        ends = np.cumsum(lengths)
        start = 0
        while start < len(lengths):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + TOKENS_PER_BATCH, side="right")))
            yield _tokens_of(view, samples.slice(start, stop - start), columns)
            start = stop


def _tokens_of(view: StepView, samples: pa.Table, columns: list[str]) -> pa.Table:
    lengths = pc.list_value_length(samples["response_ids"]).to_numpy().astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    found: dict[str, Any] = {}
    for name in samples.column_names:
        if name in ALIGNED:
            found[name] = _flat(view, samples, name, lengths, row)
        elif name in columns:
            found[name] = samples[name].take(pa.array(row))
    if "position" in columns:
        starts = np.cumsum(lengths) - lengths
        found["position"] = pa.array((np.arange(len(row)) - starts[row]).astype(np.int32))
    if "token_id" in columns:
        found["token_id"] = pc.list_flatten(samples["response_ids"])
    for name in columns:
        if name in _DERIVED:
            _, inputs, formula = _DERIVED[name]
            found[name] = formula(*(found[each].cast(pa.float64()) for each in inputs))
    wanted = columns or ["position"]
    found.setdefault("position", pa.array(np.zeros(len(row), np.int32)))
    return pa.table([found[name] for name in wanted], schema=pa.schema([TOKENS.field(name) for name in wanted]))


def _flat(view: StepView, samples: pa.Table, name: str, lengths: np.ndarray, row: np.ndarray) -> Any:
    """A list column's values below one another; a null list is a null for each token.

    Raises:
        StorageError: a list is longer or shorter than the response.
    """
    column = samples[name]
    own = pc.list_value_length(column)
    valid = column.is_valid().to_numpy()
    wrong = np.flatnonzero(valid & (pc.fill_null(own, 0).to_numpy() != lengths))
    if len(wrong):
        ids = pc.take(view.table("rollouts", ["sample_id"])["sample_id"], pa.array(wrong[:1])).to_pylist()
        raise StorageError(
            f"{name} of step {view.index} of {view.run.root} is not aligned with response_ids: "
            f"{own[wrong[0]].as_py()} values for {lengths[wrong[0]]} tokens, first at sample {ids[0]}"
        )
    flat = pc.list_flatten(column)
    if valid.all():
        return flat
    there = valid[row]
    places = np.cumsum(there) - 1
    return flat.take(pa.array(places, mask=~there))


# --------------------------------------------------------------------------------------------------- about whole steps


def _about(name: str, kind: pa.DataType, doc: str) -> pa.Field:
    return pa.field(name, kind, metadata={"doc": doc})


_STEPS = pa.schema(
    [
        _about("lineage", pa.int32(), "history that it belongs to"),
        _about("finished", pa.bool_(), "the step is whole: its record was written"),
        _about("finished_at", TEXT, "when, UTC"),
        _about("seconds", pa.float64(), "duration of the whole step, s"),
        _about("samples", pa.int64(), "rows of its rollouts"),
        _about("response_tokens", pa.int64(), "tokens of its responses"),
        _about("bytes", pa.int64(), "size of its artifacts as they were committed"),
        _about("stages", pa.list_(TEXT), "artifacts that are there"),
        _about(
            "missing", pa.list_(TEXT), "artifacts that it was finished with, or that it yet lacks, and are not there"
        ),
        _about("dropped", pa.list_(TEXT), "artifacts whose rows retention has dropped"),
    ]
)
_METRICS = pa.schema(
    [
        _about("name", TEXT, "tracking name, such as critic/score/mean"),
        _about("value", pa.float64(), "the number; null: not finite"),
    ]
)


def lacking_stages(view: StepView) -> list[str]:
    """Artifacts that a step should have and has not: those it was finished with, of an open step those of any step."""
    record = view.record
    wanted = record.get("artifacts", {}) if record else [stage for stage in SCHEMAS if stage != "ref_log_probs"]
    there = set(view.stages())
    return [] if not record and not view.index else [stage for stage in wanted if stage not in there]


def _step_row(view: StepView, columns: list[str]) -> Iterator[pa.Table]:
    stages = view.stages()
    record = view.record
    manifests = {stage: view.manifest(stage) for stage in stages}
    shapes = manifests["rollouts"].shapes if manifests.get("rollouts") else {}  # type: ignore[union-attr]
    row = {
        "lineage": view.run.lineage_of(view.index),
        "finished": record is not None,
        "finished_at": record and record.get("finished_at"),
        "seconds": record and record["metrics"].get("timing_s/step"),
        "samples": shapes.get("rows"),
        "response_tokens": shapes.get("tokens"),
        "bytes": sum(manifest.bytes for manifest in manifests.values() if manifest),
        "stages": stages,
        "missing": lacking_stages(view),
        "dropped": [stage for stage in stages if view.is_dropped(stage)],
    }
    yield pa.Table.from_pylist([row], schema=_STEPS)


def _metric_rows(view: StepView, columns: list[str]) -> Iterator[pa.Table]:
    record = view.record or {"metrics": {}}
    rows = [{"name": name, "value": value} for name, value in record["metrics"].items()]
    yield pa.Table.from_pylist(rows, schema=_METRICS)


_DOCS = {
    "prompts": "one row per prompt of a step",
    "rollouts": "one row per response",
    "old_log_probs": "the policy's log-probs of each response",
    "ref_log_probs": "the reference policy's",
    "rewards": "one row per score",
    "advantages": "one row per sample",
    "updates": "one row per optimizer step",
    "greedy_rollouts": "the greedy response to each prompt, where the estimator needs one",
    "greedy_rewards": "their scores",
    "val_prompts": "validation prompts of a step that validates",
    "val_rollouts": "responses to them",
    "val_rewards": "their scores",
}


def _all_views() -> dict[str, ViewOf]:
    per_sample, per_token = "one row per sample, all stages joined by id", "one row per response token"
    views = {
        "samples": ViewOf(SAMPLES, "rollouts", _sample_rows, per_sample, joined=True),
        "tokens": ViewOf(TOKENS, "rollouts", _token_rows, per_token, joined=True),
        "steps": ViewOf(_STEPS, None, _step_row, "one row per step: what of it is there"),
        "metrics": ViewOf(_METRICS, None, _metric_rows, "one row per step and tracked number"),
    }
    for stage in (*SCHEMAS, *KIND):
        views[stage] = ViewOf(schema_of(stage), stage, _stage_rows(stage), _DOCS[stage])
    call = pa.field("call", pa.int32(), nullable=False, metadata={"doc": "number of the generate call, from 1"})
    for stage in ("prompts", "rollouts", "rewards"):
        schema = pa.schema([call, *schema_of(stage)])
        doc = f"{stage} of every generate call of dynamic sampling, kept or not"
        views[f"candidate_{stage}"] = ViewOf(schema, None, _candidate_rows(stage), doc)
    return views


VIEWS = _all_views()
"""All views by name."""
