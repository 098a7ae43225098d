"""One step as a report holds it: its stages against the plan, a table of samples, and token columns in flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flows.audit.pieces import pieces_of
from flows.audit.report.pack import halves, pack_array, pack_json, smallest_ints
from flows.audit.report.private import public_text
from flows.audit.token_columns import TokenColumns, per_sample
from storage import StorageError
from storage.artifacts import DROPPED
from storage.ledger import STAGES, StepView
from storage.samples import SAMPLE_STAGES, STAGE_OF
from storage.schema import SCHEMAS, without_round

_PLANNED_BY = {
    "prompts": "prompts",
    "rollouts": "generate",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref_log_prob",
    "rewards": "reward",
    "advantages": "advantage",
    "updates": "update",
}
"""The plan's name of the stage that makes an artifact."""

_OF_SAMPLE = (
    "sample_index",
    "finish_reason",
    "seed",
    "policy_version",
    "score",
    "status",
    "extracted",
    "message",
    "seconds",
    "group_mean",
    "group_std",
    "no_signal",
    "response_text",
)
_OF_GROUP = ("prompt_text", "ground_truth", "data_source", "prompt_index")


def step_data(view: StepView, plan: Mapping[str, Any], tokenizer: Path | None = None) -> dict[str, Any]:
    """What the report's script is given of a step.

    Returns:
        `index`, `stages`, `updates`, `notes`, and where there are rollouts `samples` (packed JSON), `tokens` (arrays
        by column) and `vocabulary` (packed JSON). A stage that is missing or damaged takes only its own columns away.
    """
    columns, broken = _columns(view)
    data: dict[str, Any] = {
        "index": view.index,
        "finished": view.record is not None,
        "stages": [_stage(view, stage, plan, broken.get(stage)) for stage in _present_or_missing(view)],
        "updates": _updates(view),
        "notes": _notes(view),
    }
    if "response_ids" in columns:
        tokens = TokenColumns.of(columns)
        vocabulary, places = np.unique(tokens.ids, return_inverse=True)
        pieces = pieces_of(view.run, vocabulary.tolist(), tokenizer)
        data["samples"] = pack_json(_samples(columns, tokens))
        data["tokens"] = {
            "ids": _array(smallest_ints(places)),
            **{name: _array(*halves(values)) for name, values in tokens.floats.items()},
        }
        if tokens.mask is not None:
            data["tokens"]["mask"] = _array(tokens.mask.astype(np.uint8))
        data["vocabulary"] = pack_json(
            {
                "ids": vocabulary.tolist(),
                "texts": [_text_or_bytes(pieces.texts.get(number)) for number in vocabulary.tolist()],
                "special": [number for number in vocabulary.tolist() if number in pieces.special],
            }
        )
        data["no_texts"] = public_text(pieces.why_none) if pieces.why_none else None
    return data


def _array(array: np.ndarray, factor: float = 1.0) -> dict[str, Any]:
    return {"type": array.dtype.name, "factor": factor, "data": pack_array(array)}


def _text_or_bytes(text: str | bytes | None) -> str | list[int] | None:
    return list(text) if isinstance(text, bytes) else text


def _columns(view: StepView) -> tuple[dict[str, pa.ChunkedArray], dict[str, str]]:
    """The joined columns of the stages that can be read, and why each other one that is there cannot."""
    columns: dict[str, pa.ChunkedArray] = {}
    broken: dict[str, str] = {}
    there = [stage for stage in SAMPLE_STAGES if view.attempts(stage)]
    for stage in sorted(there, key=lambda stage: stage != "rollouts"):
        if "rollouts" not in there or "rollouts" in broken:
            break
        names = [name for name, made_by in STAGE_OF.items() if made_by == stage]
        try:
            table = view.samples(["sample_id", "group_id", *names])
        except StorageError as error:
            broken[stage] = public_text(str(error))
            continue
        columns.update({name: table[name] for name in table.column_names if table[name].null_count < len(table[name])})
    return columns, broken


# ------------------------------------------------------------------------------------------------------------- samples


def _samples(columns: Mapping[str, pa.ChunkedArray], tokens: TokenColumns) -> dict[str, Any]:
    """Columns of the table of samples, and what the samples of a group share."""
    table: dict[str, Any] = {name: _plain(columns[name].to_pylist()) for name in _OF_SAMPLE if name in columns}
    if "seed" in table:  # 64 bits, more than a number in the browser holds
        table["seed"] = [str(seed) for seed in table["seed"]]
    table["sample_id"] = columns["sample_id"].to_pylist()
    table["group_id"] = columns["group_id"].to_pylist()
    table["length"] = tokens.lengths.tolist()
    for name, values in per_sample(tokens).items():
        table[name] = _plain(values.tolist())
    parts = [dict(row) if row else {} for row in columns["parts"].to_pylist()] if "parts" in columns else []
    names = sorted({name for row in parts for name in row})
    return {
        "columns": table,
        "parts": {name: _plain([row.get(name) for row in parts]) for name in names},
        "groups": _groups(columns),
    }


def _groups(columns: Mapping[str, pa.ChunkedArray]) -> dict[str, dict[str, Any]]:
    ids = columns["group_id"].to_pylist()
    first = {group: row for row, group in reversed(list(enumerate(ids)))}
    rows = pa.array(list(first.values()))
    values = {name: columns[name].take(rows).to_pylist() for name in _OF_GROUP if name in columns}
    if "prompt_ids" in columns:
        values["prompt_tokens"] = [len(ids) for ids in columns["prompt_ids"].take(rows).to_pylist()]
    return {group: {name: column[place] for name, column in values.items()} for place, group in enumerate(first)}


def _plain(values: list[Any]) -> list[Any]:
    """Numbers with 7 significant digits; what is not finite as its name, because JSON has no word for it."""
    return [_number(value) if isinstance(value, float) else value for value in values]


def _number(value: float) -> float | str | None:
    if np.isfinite(value):
        return float(f"{value:.7g}")
    return None if np.isnan(value) else str(value)


# -------------------------------------------------------------------------------------------------------------- stages


def _present_or_missing(view: StepView) -> list[str]:
    """What the step has, and in a training step what each has, in the order in which they are made."""
    names = {*view.stages(), *(SCHEMAS if view.index else ())}
    if "ref_log_probs" not in view.stages() and not _needs_ref(view):
        names.discard("ref_log_probs")
    return sorted(names, key=lambda stage: (STAGES.index(without_round(stage)), stage))


def _needs_ref(view: StepView) -> bool:
    from flows.run_folder import config_of

    try:
        return config_of(view.run, view.run.lineage_of(view.index)).needs_ref
    except StorageError:
        return True


def _stage(view: StepView, stage: str, plan: Mapping[str, Any], broken: str | None) -> dict[str, Any]:
    planned = _planned(stage, plan)
    if not view.attempts(stage):
        return {"stage": stage, "state": "missing", "planned": planned}
    try:
        folder, manifest = view.used(stage), view.manifest(stage)
    except StorageError as error:
        return {"stage": stage, "state": "damaged", "why": public_text(str(error)), "planned": planned}
    assert folder is not None and manifest is not None, "an artifact with attempts has one that is used"
    dropped = (folder / DROPPED).exists()
    return {
        "stage": stage,
        "state": "dropped" if dropped else "damaged" if broken else "there",
        "why": broken,
        "planned": planned,
        "rows": manifest.rows,
        "shapes": manifest.shapes,
        "bytes": manifest.bytes,
        "seconds": manifest.seconds,
        "started": manifest.started_at.timestamp(),
        "committed_at": manifest.committed_at.isoformat(timespec="seconds"),
        "attempt": manifest.attempt,
        "attempts": len(view.attempts(stage)),
        "lineage": manifest.lineage,
        "policy_version": manifest.policy_version,
        "digest": manifest.digest,
        "key": manifest.key,
        "parents": manifest.parents,
        "code": manifest.code_digest,
        "config": manifest.config_digest,
    }


def _planned(stage: str, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rows of an artifact, and its longest response or prompt, as the plan has them."""
    columns = set(SCHEMAS[stage].names) if stage in SCHEMAS else set()
    made_by = _PLANNED_BY.get(stage)
    for shape in plan.get("stages", ()):
        if shape["stage"] == made_by and (shape["column"] in columns or shape["column"] == stage):
            size = shape["global_shape"]
            return {"rows": size[0], "longest": size[1] if len(size) > 1 else None, "column": shape["column"]}
    return None


def _updates(view: StepView) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = view.table("updates").to_pylist() if view.attempts("updates") else []
    except StorageError:
        return []
    return [dict(zip(row, _plain(list(row.values())), strict=True)) for row in rows]


def _notes(view: StepView) -> dict[str, Any]:
    """What a reader of log-probs must know, by artifact: temperature, filters, whose they are."""
    told: dict[str, Any] = {}
    for stage in ("rollouts", "old_log_probs", "ref_log_probs"):
        try:
            manifest = view.manifest(stage)
        except StorageError:
            continue
        if manifest is not None:
            told[stage] = {key: value for key, value in manifest.notes.items() if not isinstance(value, dict | list)}
    return told
