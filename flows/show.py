"""`grpoflow ls`, `status` and `show`: a run read from its folder, as tables for people or JSON for programs."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage import Run, StorageError, open_run
from storage.checkpoints import checkpoints
from storage.copies import copy_of, refresh_all
from storage.ledger import STAGES, StepView, list_runs
from storage.reuse import REUSED, reused
from storage.schema import SCHEMAS, without_round

_STEP_OF_SAMPLE = re.compile(r"^(?:val-)?(\d{6})-\d{4}-\d{3}$")
_IDS = ("sample_id", "group_id")
"""Columns whose values are typed again, and therefore never cut."""
_PADDING = 2
"""Characters that a table adds to each column."""
_HEADLINE = ("critic/score/mean", "response_length/mean", "actor/kl_loss", "timing_s/step")


def ls(root: Path, as_json: bool, console: Console) -> None:
    """List the runs under a folder: state, steps, last score."""
    runs = []
    refresh_all(root)
    for found in list_runs(root):
        try:
            runs.append(_summary(found))
        except StorageError as error:
            Console(stderr=True).print(Text(f"{_short(found.root)}: {error}"), soft_wrap=True)
    if as_json:
        console.out(json.dumps(runs))
        return
    if not runs:
        console.print(Text(f"no runs under {root}"))
        return
    table = Table("run", "state", "steps", "score", "started", box=None)
    for run in runs:
        score = run["metrics"].get("critic/score/mean")
        table.add_row(
            Text(run["path"]),
            run["state"],
            str(run["last_step"]),
            "" if score is None else f"{score:.3f}",
            run["created_at"][:19].replace("T", " "),
        )
    console.print(table)


def _summary(run: Run) -> dict[str, Any]:
    steps = run.finished_steps()
    record = run.step(steps[-1]).record if steps else None
    return {
        "path": _short(run.root),
        "run_id": run.run_id,
        "state": run.state,
        "created_at": run.identity["created_at"],
        "last_step": steps[-1] if steps else 0,
        "metrics": {name: record["metrics"][name] for name in _HEADLINE if name in record["metrics"]} if record else {},
    }


def status(path: Path, as_json: bool, console: Console) -> None:
    """Say where a run stands: owner, last finished step, checkpoints, and what of the open step is used again."""
    run = open_run(path)
    summary = _summary(run)
    last = summary["last_step"]
    summary["owner"] = run.owner()
    summary["open_step"] = _open_step(run, last + 1) if last + 1 in run.steps() else None
    seen = [one for one in checkpoints(run.root) if one.lineage == run.lineage_of(one.step)]
    summary["checkpoints"] = [checkpoint.step for checkpoint in seen]
    summary["lineages"] = [
        {"number": one.number, "parent": one.parent, "step": one.step, "stage": one.stage}
        for one in run.lineages.values()
    ]
    summary["reused"] = {str(step): found for step in run.steps() if (found := reused(run.step(step)))}
    summary["events"] = run.events()[-5:]
    if as_json:
        console.out(json.dumps(summary))
        return
    owner = summary["owner"]
    console.print(Text(f"{summary['run_id']} in {summary['path']}: {summary['state']}", style="bold"))
    if owner:
        console.print(Text(f"written by process {owner['pid']} on {owner['host']} since {owner.get('since', '?')}"))
    console.print(f"finished steps: {last}; checkpoints: {', '.join(map(str, summary['checkpoints'])) or 'none'}")
    for one in summary["lineages"][1:]:
        where = f"step {one['step']}" + (f", {one['stage']}" if one["stage"] else "")
        now = " (this one)" if one["number"] == run.lineage else ""
        console.print(f"lineage {one['number']} branched off lineage {one['parent']} at {where}{now}")
    if summary["open_step"]:
        found = summary["open_step"]
        console.print(f"step {found['step']} is open; committed: {', '.join(found['committed']) or 'nothing yet'}")
        for sentence in found["told"]:
            console.print(Text(f"  {sentence}"), soft_wrap=True)
    for step, found in summary["reused"].items():
        donors = sorted({about["run_id"] for about in found.values()})
        console.print(Text(f"step {step}: {', '.join(found)} reused from {', '.join(donors)}"), soft_wrap=True)
    for event in summary["events"]:
        console.print(Text(_event_in_words(event), style="dim"), soft_wrap=True)


def _event_in_words(event: Mapping[str, Any]) -> str:
    told = []
    for name, value in event.items():
        if name in ("event", "at") or value in (None, [], {}):
            continue
        if name == "changes":
            told += [f"{key} {_plain(old)} -> {_plain(new)}" for key, (old, new) in value.items()]
        else:
            told.append(f"{name} {value[:12] if name.endswith('digest') else _plain(value)}")
    return f"{event['at'][:19]} {event['event']}: {', '.join(told)}"


def _plain(value: Any) -> str:
    """A value as a configuration has it: text bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _open_step(run: Run, step: int) -> dict[str, Any]:
    """What of a step is committed, which of it is not used again and why, and the same in sentences."""
    # Opening stages imports what they compute with, which no other view needs.
    from flows.run_folder import config_of
    from flows.stale import in_sentences, stale_reasons

    committed = run.step(step).stages()
    if not committed:
        return {"step": step, "committed": [], "stale": {}, "told": []}
    try:
        reasons = stale_reasons(run, config_of(run, run.lineage), step)
    except StorageError as error:
        told = [f"what is used again cannot be told: {error}"]
        return {"step": step, "committed": committed, "stale": {}, "told": told}
    stale = {stage: why for stage, why in reasons.items() if why}
    return {"step": step, "committed": committed, "stale": stale, "told": in_sentences(reasons)}


def show(
    path: Path, step: int | None, stage: str | None, sample: str | None, as_json: bool, limit: int, console: Console
) -> None:
    """Show a step, one of its artifacts, or one sample through all artifacts.

    Raises:
        StorageError: there is no such run, step, artifact or sample.
    """
    run = open_run(path)
    steps = [index for index in run.steps() if run.step(index).stages()]
    if not steps:
        raise StorageError(f"{path} has no steps yet")
    named = _STEP_OF_SAMPLE.match(sample or "")
    index = step if step is not None else int(named.group(1)) if named else steps[-1]
    if index not in steps:
        raise StorageError(f"{path} has no step {index}; it has steps {steps[0]} to {steps[-1]}")
    view = run.step(index)
    if sample is not None:
        _show_sample(view, sample, as_json, console)
    elif stage is not None:
        _show_stage(view, stage, as_json, limit, console)
    else:
        _show_step(view, as_json, console)


def _show_step(view: StepView, as_json: bool, console: Console) -> None:
    present = {stage: manifest for stage in view.stages() if (manifest := view.manifest(stage))}
    if as_json:
        stages = {stage: manifest.model_dump(mode="json") for stage, manifest in present.items()}
        console.out(json.dumps({"step": view.index, "record": view.record, "stages": stages}))
        return
    table = Table("artifact", "attempt", title=f"step {view.index}", box=None, title_justify="left")
    for name in ("rows", "tokens", "bytes", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("digest")
    for stage in _present_or_missing(view):
        manifest = present.get(stage)
        if manifest is None:
            table.add_row(stage, Text("missing", style="dim"))
            continue
        tokens = manifest.shapes.get("tokens")
        table.add_row(
            stage,
            str(manifest.attempt),
            f"{manifest.rows:,}",
            "" if tokens is None else f"{tokens:,}",
            f"{manifest.bytes:,}",
            "reused" if REUSED in manifest.notes else f"{manifest.seconds:.3f}",
            manifest.digest[:12],
        )
    console.print(table)
    for stage, about in reused(view).items():
        told = f"{stage}: reused from {about['run_id']}, where it took {about['seconds']:.3f} s"
        console.print(Text(told), soft_wrap=True)
    record = view.record
    if record is None:
        console.print("the step as a whole is not finished" if view.index else "before training")
        return
    width = max(map(len, record["metrics"]), default=0)
    for name, value in sorted(record["metrics"].items()):
        shown = value if value is None else format(value, ".6g")
        console.print(Text(f"{name:<{width}}  {shown}"), soft_wrap=True)


def _present_or_missing(view: StepView) -> list[str]:
    """What the step has, and in a training step what each has, in the order in which they are made."""
    names = {*view.stages(), *(SCHEMAS if view.index else ())}
    return sorted(names, key=lambda stage: (STAGES.index(without_round(stage)), stage))


def _show_stage(view: StepView, stage: str, as_json: bool, limit: int, console: Console) -> None:
    try:
        rows = view.table(stage)
    except (FileNotFoundError, ValueError) as error:
        near = _nearest_artifact(stage, view.stages())
        raise StorageError(f"{error}. Nearest: {near}" if near else str(error)) from error
    shown = rows.slice(0, limit)
    if as_json:
        console.out(json.dumps(shown.to_pylist(), default=str))
        return
    cells = {name: [_cell(value) for value in shown[name].to_pylist()] for name in shown.schema.names}
    widths = _widths(cells, console.width)
    table = Table(title=f"step {view.index}, {stage}: {rows.num_rows} rows", title_justify="left", box=None)
    for name, width in widths.items():
        table.add_column(name, overflow="ellipsis", width=width, no_wrap=True)
    for row in zip(*(cells[name] for name in widths), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    if left_out := [name for name in cells if name not in widths]:
        console.print(f"no room for {', '.join(left_out)}; --json gives whole values", soft_wrap=True)
    if rows.num_rows > limit:
        console.print(f"… {rows.num_rows - limit} more rows; --limit shows more, --json gives whole values")


def _nearest_artifact(stage: str, present: Sequence[str]) -> str | None:
    """The artifact that is most like a name, or that the stage of this name makes."""
    made = {"generate": "rollouts"}.get(stage, stage)
    return next(iter(difflib.get_close_matches(made, present, n=1)), None)


def _widths(cells: Mapping[str, Sequence[str]], room: int) -> dict[str, int]:
    """Width of each column that is shown, in characters: ids are whole, others narrower, then fewer, until they fit."""
    for widest in (32, 24, 16, 12):
        widths = {}
        for name, column in cells.items():
            longest = max(map(len, column), default=0)
            widths[name] = max(len(name), longest if name in _IDS else min(longest, widest))
        if sum(widths.values()) + _PADDING * len(widths) <= room:
            return widths
    for name in reversed([name for name in widths if name not in _IDS]):
        if sum(widths.values()) + _PADDING * len(widths) <= room:
            break
        del widths[name]
    return widths


def _show_sample(view: StepView, sample: str, as_json: bool, console: Console) -> None:
    """One sample joined over all artifacts by its id; an artifact that is not there is said to be missing."""
    found: dict[str, Any] = {}
    group = sample.rsplit("-", 1)[0]
    for stage in [stage for stage in _present_or_missing(view) if stage != "updates"]:
        if not view.attempts(stage):
            found[stage] = None
            continue
        key, value = ("group_id", group) if without_round(stage).endswith("prompts") else ("sample_id", sample)
        table = view.table(stage)
        rows = table.filter(pc.equal(table[key], pa.scalar(value, pa.large_string()))).to_pylist()
        if rows:
            found[stage] = rows[0]
    if not any(row for stage, row in found.items() if not without_round(stage).endswith("prompts")):
        raise StorageError(f"step {view.index} has no sample {sample!r}; `show --stage rollouts` lists them")
    if as_json:
        console.out(json.dumps(found, default=str))
        return
    for stage, row in found.items():
        console.print(Text(stage, style="bold") if row else Text(f"{stage}: missing", style="bold yellow"))
        for name, value in (row or {}).items():
            console.print(Text(f"  {name:<20} {_cell(value, 400)}"))


def _cell(value: Any, width: int = 80) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [_cell(item) for item in value[:64]]
        text = f"[{' '.join(parts)}]" if len(value) <= 64 else f"[{' '.join(parts)} … {len(value)}]"
    else:
        text = str(value).replace("\n", "⏎")
    return text if len(text) <= width else text[: width - 1] + "…"


def _short(path: Path) -> str:
    copy = copy_of(path)
    if copy is not None:
        return copy.url
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
