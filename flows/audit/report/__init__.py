"""`grpoflow report`: a run in one HTML file, from its curves down to the single token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.audit.report.checks import checks_of
from flows.audit.report.page import render
from flows.audit.report.private import public_text
from flows.audit.report.run_data import about_run, config_of_run, config_rows, curves, plan_counts, plan_of_run
from flows.audit.report.step_data import step_data
from flows.audit.rows_out import refuse_inside
from flows.audit.sources import in_commands, open_lineage, steps_named
from flows.audit.steps import in_words
from storage import Run, StorageError
from storage.durable import full_disk_told

FILE_NAME = "report.html"

TOKENS_UNASKED = 200_000
"""So many response tokens of earlier steps are put in beside the last step's without being asked for."""
STEPS_UNASKED = 20
LARGEST_UNASKED = 2_000_000
"""Response tokens of a last step that is put in without being asked for, about 25 MB; a larger one must be named."""


@dataclass(frozen=True)
class Written:
    """A report's file.

    Attributes:
        path: where it is.
        bytes: its size.
        steps: whose batches are in it.
    """

    path: Path
    bytes: int
    steps: tuple[int, ...]


def report_command(
    path: Path,
    steps: Sequence[int] | None,
    compare: Path | None,
    out: Path | None,
    *,
    verified: bool = False,
    tokenizer: Path | None = None,
    lineage: int | None = None,
) -> str:
    """Write a report and say what is in it; see `write_report`.

    Raises:
        StorageError: there is no such run or step, or the file lies in a run's folder.
    """
    run = open_lineage(path, lineage)
    other = open_lineage(compare) if compare is not None else None
    file = out if out is not None else Path(f"{run.root.name}-report.html")
    refuse_inside(file, [run.root])
    if file.is_dir():
        raise StorageError(f"{file} is a folder. Name a file in it.")
    file.parent.mkdir(parents=True, exist_ok=True)
    made = write_report(run, file, steps=steps, compare=other, verified=verified, tokenizer=tokenizer)
    inside = f"with the batches of {steps_named(made.steps)}" if made.steps else "with no step's batch"
    return f"{made.path}: {made.bytes / 1e6:.1f} MB, {inside}. Open it in a browser."


def write_report(
    run: Run,
    path: Path,
    *,
    steps: Sequence[int] | None = None,
    compare: Run | None = None,
    verified: bool = False,
    tokenizer: Path | None = None,
    state: str | None = None,
) -> Written:
    """Write a run's report. The run is only read, and may be running.

    Args:
        run: the run.
        path: the file; one that is there is replaced.
        steps: whose batches to put in; None: the last, and of a small run earlier ones too.
        compare: a run whose curves and configuration are shown beside.
        verified: also make the checks of `verify` on these steps. It runs the run's reward functions.
        tokenizer: a folder with a tokenizer.json instead of the run's own.
        state: how the run ends, where its own writer makes the report; None: as its folder says.

    Raises:
        StorageError: a step that is asked for is not there, or the disk is full.
    """
    chosen = _chosen(run, steps)
    plan = plan_of_run(run)
    batches = [step_data(run.step(index), plan, tokenizer) for index in chosen]
    lines = {"curves": curves(run), **({"other_curves": curves(compare)} if compare else {})}
    shown = {**_shown(run, plan, chosen, compare), "checks": checks_of(run, chosen) if verified else None}
    text = render(about_run(run, state), shown, batches, lines)
    aside = path.with_name(f".{path.name}.aside")
    with full_disk_told(path.parent, "the report"):
        try:
            aside.write_text(text, encoding="utf-8")
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)
    return Written(path, path.stat().st_size, tuple(chosen))


def _chosen(run: Run, steps: Sequence[int] | None) -> list[int]:
    """Numbers of the steps whose batches are put in, in order."""
    there = [index for index in run.steps() if index]
    if steps is not None:
        if unknown := sorted(set(steps) - set(there)):
            raise StorageError(
                f"{run.root} has no step {', '.join(map(str, unknown))}; it has {in_words(there) or 'none yet'}"
            )
        return sorted(set(steps))
    chosen: list[int] = []
    tokens = 0
    for index in reversed(there):
        tokens += _response_tokens(run, index)
        if tokens > (TOKENS_UNASKED if chosen else LARGEST_UNASKED) or len(chosen) == STEPS_UNASKED:
            break
        chosen.append(index)
    return chosen[::-1]


def _response_tokens(run: Run, index: int) -> int:
    try:
        manifest = run.step(index).manifest("rollouts")
    except StorageError:
        return 0
    return manifest.shapes.get("tokens", 0) if manifest else 0


def _shown(run: Run, plan: dict[str, Any], chosen: Sequence[int], compare: Run | None) -> dict[str, Any]:
    """What the template shows of plan, configuration and checks."""
    config = config_of_run(run)
    return {
        "folder": in_commands(run, run.root.name),
        "compare": _other_name(run, compare),
        "steps_in_words": in_words(chosen),
        "planned_steps": plan.get("total_steps"),
        "model": public_text(str(config.get("actor_rollout_ref.model.path") or "")).removeprefix("…/"),
        "counts": plan_counts(plan),
        "shapes": plan.get("stages", []),
        "warnings": plan.get("warnings", []),
        "config": config_rows(config, config_of_run(compare) if compare else None),
    }


def _other_name(run: Run, compare: Run | None) -> str | None:
    """Name of the run that is compared with; its id where both runs have one name."""
    if compare is None:
        return None
    name: str = compare.identity["name"]
    return name if name != run.identity["name"] else compare.run_id
