"""A run as a report holds it: every metric at every step, its plan and configuration, its lineages and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flows.audit.report.pack import pack_array
from flows.audit.report.private import public, public_text
from storage import Run, StorageError
from storage.checkpoints import checkpoints
from storage.durable import sha256_json

_NOT_TOLD = {"pid", "host", "owner"}
"""Values of events that are of use only on the machine they come from."""


def curves(run: Run) -> dict[str, Any]:
    """Each metric at each step, as MLflow is sent them.

    Returns:
        `steps`, `names` sorted, and `values`: packed float32 [names x steps], NaN where a step has no value.
    """
    records: list[tuple[int, Mapping[str, Any]]] = []
    for step in run.steps():
        try:
            record = run.step(step).record
        except StorageError:
            continue
        if record is not None:
            records.append((step, record["metrics"]))
    names = sorted({name for _, metrics in records for name in metrics})
    place = {name: row for row, name in enumerate(names)}
    values = np.full((len(names), len(records)), np.nan, np.float32)
    for column, (_, metrics) in enumerate(records):
        for name, value in metrics.items():
            values[place[name], column] = np.nan if value is None else value
    return {"steps": [step for step, _ in records], "names": names, "values": pack_array(values.reshape(-1))}


def about_run(run: Run, state: str | None = None) -> dict[str, Any]:
    """Identity, state (as given, or as the folder says) and history of a run."""
    finished = run.finished_steps()
    return {
        "id": run.run_id,
        "name": run.identity["name"],
        "created_at": run.identity["created_at"],
        "state": state or run.state,
        "lineage": run.lineage,
        "last_step": finished[-1] if finished else 0,
        "lineages": _lineages(run),
        "checkpoints": [
            {"step": one.step, "lineage": one.lineage, "digest": str(one.manifest.get("weights_digest", ""))}
            for one in checkpoints(run.root)
            if one.lineage in run.lineages
        ],
        "events": list(_events(run)),
    }


def _lineages(run: Run) -> list[dict[str, Any]]:
    seen = {run.lineage}
    while (parent := run.lineages[min(seen)].parent) is not None:
        seen.add(parent)
    return [
        {
            "number": one.number,
            "parent": one.parent,
            "step": one.step,
            "stage": one.stage,
            "changes": {key: [_word(old), _word(new)] for key, (old, new) in public(one.changes).items()},
            "seen": one.number in seen,
        }
        for one in run.lineages.values()
    ]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _events(run: Run) -> Iterator[dict[str, Any]]:
    for event in run.events():
        told = {name: public(value, name) for name, value in event.items() if name not in ("event", "at", *_NOT_TOLD)}
        words = {
            name: value[:12] if name.endswith("digest") else _word(value)
            for name, value in told.items()
            if value not in _NOTHING
        }
        yield {"event": event["event"], "at": event["at"], "told": words}


_NOTHING: tuple[Any, ...] = (None, [], {}, "")


def plan_of_run(run: Run) -> dict[str, Any]:
    """The plan that was kept with the run; empty where there is none."""
    try:
        plan: dict[str, Any] = json.loads(run.document("plan.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return plan


def config_of_run(run: Run) -> dict[str, Any]:
    """The run's configuration by dotted key, without folders and secrets; empty where it cannot be read."""
    from flows.run_folder import config_of

    try:
        values = config_of(run, run.lineage).model_dump(mode="json")
    except StorageError:
        return {}
    return dict(_leaves(values, ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, public(value, key)


def config_rows(config: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Keys and values as text, with the other run's where there is one.

    Args:
        config: by dotted key.
        other: the same of the run it is compared with; None: it is not compared.
    """
    keys = [*config, *(key for key in other or {} if key not in config)]
    return [
        {
            "key": key,
            "value": _as_text(config, key),
            "other": None if other is None else _as_text(other, key),
            "differs": other is not None and sha256_json(config.get(key)) != sha256_json(other.get(key)),
        }
        for key in keys
    ]


def _as_text(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return ""
    value = config[key]
    return public_text(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plan_counts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The plan's counts with their units, those of lists as lists."""
    plain = [(name, value) for name, value in plan.items() if _is_count(value)]
    return [(name, ", ".join(map(str, value)) if isinstance(value, list) else f"{value:,}") for name, value in plain]


def _is_count(value: Any) -> bool:
    if isinstance(value, bool) or not value:
        return False
    return isinstance(value, int) or (isinstance(value, list) and all(isinstance(item, int) for item in value))
