"""What came of a sweep: one row per trial, best first, with what it cost and where its best policy lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from flows.sweep.board import Board
from flows.sweep.book import Attempt, Sweep
from flows.sweep.rails import cautions
from storage import StorageError
from storage.artifacts import read_manifest
from storage.checkpoints import checkpoints
from storage.reuse import REUSED

ORDER = ("done", "paused", "running", "waiting", "same", "failed", "refused")


@dataclass(frozen=True)
class Row:
    """One trial.

    Attributes:
        trial: its number.
        values: its configuration keys.
        state: done (trained to the end), paused (stopped where it is, and can go on), running, waiting, same (as an
            earlier trial), failed, or refused (by the plan).
        value: mean of the objective over seeds, at the newest step that all runs have reached; None: none yet.
        spread: standard deviation over seeds (ddof 1); None: one seed, or no value.
        runs: runs behind the value.
        step: that step.
        trained_steps: training steps of all its runs together.
        seconds: device time of its processes, s.
        resumed: how often a run of it that was killed went on.
        reused: artifacts that its runs took over from others instead of making them.
        best: newest checkpoint of its best run, as RUN@STEP; None: there is none.
        reason: why it failed or was refused, or which trial it is the same as.
    """

    trial: int
    values: Mapping[str, Any]
    state: str
    value: float | None
    spread: float | None
    runs: int
    step: int
    trained_steps: int
    seconds: float
    resumed: int
    reused: int
    best: str | None
    reason: str | None


def rows(sweep: Sweep) -> list[Row]:
    """The trials, best first: those at their end, then the paused ones that got farthest, then the rest."""
    board, attempts = sweep.board(), sweep.attempts()
    # What nobody runs is not running, though the end of its processes was never written down.
    under_way = [attempt for attempt in attempts if attempt.end is None] if sweep.owner() is not None else []
    sign = -1 if sweep.spec.objective.mode == "max" else 1

    def place(row: Row) -> tuple[int, int, float, int]:
        worth = sign * row.value if row.value is not None else 0.0
        return ORDER.index(row.state), -row.step if row.value is not None else 0, worth, row.trial

    return sorted((_row(sweep, board, attempts, under_way, trial.number) for trial in board.trials), key=place)


def _row(sweep: Sweep, board: Board, attempts: list[Attempt], under_way: list[Attempt], number: int) -> Row:
    trial, advances = board.trials[number], board.of_trial(number)
    failure = board.failure(number)
    reached = [advance for advance in advances if board.value(advance) is not None]
    last = reached[-1] if reached else None
    own = [attempt for attempt in attempts if board.advances[attempt.advance].trial == number]
    if trial.refused is not None:
        state, reason = "refused", trial.refused
    elif trial.same_as is not None:
        state, reason = "same", f"the same as trial {trial.same_as}"
    elif failure is not None:
        state, reason = "failed", failure
    elif last is not None and last == advances[-1]:
        state, reason = ("done" if last.until == sweep.total else "paused"), None
    else:
        state, reason = ("running" if any(attempt in under_way for attempt in own) else "waiting"), None
    return Row(
        trial=number,
        values=trial.values,
        state=state,
        value=board.value(last) if last else None,
        spread=board.spread(last) if last else None,
        runs=len(board.values(last)) if last else 0,
        step=last.until if last else 0,
        trained_steps=sum(sweep.finished_steps(number, seed) for seed in sweep.spec.seeds) if advances else 0,
        seconds=sum(attempt.seconds for attempt in own) * max(1, sweep.spec.devices_per_slot),
        resumed=sum(attempt.end in ("died", "stopped") for attempt in own),
        reused=sum(_reused(sweep, number, seed) for seed in sweep.spec.seeds) if advances else 0,
        best=_best(sweep, board, number) if last else None,
        reason=reason,
    )


def _reused(sweep: Sweep, trial: int, seed: int) -> int:
    """Artifacts of steps 0 and 1 that a run took over."""
    run, count = sweep.run(trial, seed), 0
    if run is None:
        return 0
    for step in (0, 1):
        for stage in run.step(step).stages():
            with suppress(StorageError):
                folder = run.step(step).used(stage)
                count += folder is not None and REUSED in read_manifest(folder).notes
    return count


def _best(sweep: Sweep, board: Board, trial: int) -> str | None:
    """Newest checkpoint of the run with the best value."""
    last = [advance for advance in board.of_trial(trial) if board.value(advance) is not None][-1]
    worth = {seed: board.results[last.index, seed].value for seed in sweep.spec.seeds}
    sign = -1 if sweep.spec.objective.mode == "max" else 1
    seed = min(worth, key=lambda one: (sign * (worth[one] or 0.0), one))
    run = sweep.run(trial, seed)
    there = checkpoints(run.root) if run is not None else []
    return f"{run.root}@{max(one.step for one in there)}" if run is not None and there else None


def as_json(sweep: Sweep) -> dict[str, Any]:
    """The whole result for programs."""
    board = sweep.board()
    return {
        "sweep": sweep.sweep_id,
        "folder": str(sweep.folder),
        "state": sweep.state,
        "objective": sweep.spec.objective.model_dump(mode="json"),
        "seeds": list(sweep.spec.seeds),
        "total_steps": sweep.total,
        "planned_steps": board.planned_steps(),
        "trials": [asdict(row) for row in rows(sweep)],
        "cautions": cautions(sweep),
    }


def print_table(sweep: Sweep, console: Console) -> None:
    """The leaderboard for people."""
    spec, found = sweep.spec, rows(sweep)
    title = f"{spec.name}: {spec.objective.metric}, {spec.objective.of} value, {spec.objective.mode} is best"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("trial", "state"):
        table.add_column(name, justify="right" if name == "trial" else "left")
    for key in spec.space:
        table.add_column(key.rpartition(".")[2], justify="right")
    for name in ("value", "± over seeds", "runs", "step", "steps", "device s", "resumed", "reused"):
        table.add_column(name, justify="right")
    for row in found:
        values = [cell(row.values[key]) if key in row.values else "" for key in spec.space]
        numbers = [cell(row.value), cell(row.spread), row.runs or "", row.step or ""]
        cost = [
            row.trained_steps or "",
            f"{row.seconds:.0f}" if row.seconds else "",
            row.resumed or "",
            row.reused or "",
        ]
        table.add_row(*map(str, (row.trial, row.state, *values, *numbers, *cost)))
    # A number that is cut is a wrong one: where a terminal is too narrow, lines run on.
    wide = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.size = ConsoleDimensions(max(console.width, wide), console.height)
    console.print(table)
    for row in found:
        if row.reason:
            console.print(Text(f"trial {row.trial} {row.state}: {row.reason}"), soft_wrap=True)
    for sentence in cautions(sweep):
        console.print(Text(f"caution: {sentence}"), soft_wrap=True)
    best = next((row for row in found if row.best and row.state in ("done", "paused")), None)
    if best is not None:
        console.print(Text(f"best policy: {best.best}"), soft_wrap=True)


def print_status(sweep: Sweep, console: Console) -> None:
    """Where the sweep stands."""
    board, found = sweep.board(), rows(sweep)
    counts = {state: sum(row.state == state for row in found) for state in ORDER}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none yet"
    console.print(Text(f"{sweep.spec.name}: {sweep.state}; trials: {told}"), soft_wrap=True)
    done = sum(row.trained_steps for row in found)
    limits = sweep.spec.budget.model_dump(exclude_none=True)
    limit = f"; budget: {', '.join(f'{name} {value}' for name, value in limits.items())}" if limits else ""
    console.print(Text(f"{done} of {board.planned_steps()} decided training steps are done{limit}"), soft_wrap=True)
    if (owner := sweep.owner()) is not None:
        console.print(Text(f"run by process {owner.get('pid', '?')} on {owner.get('host', '?')}"))
    for attempt in sweep.attempts():
        if attempt.end is None and sweep.owner() is not None:
            advance = board.advances[attempt.advance]
            at = sweep.finished_steps(advance.trial, attempt.seed)
            line = f"  trial {advance.trial}, seed {attempt.seed}: step {at} of {advance.until}"
            console.print(Text(line), soft_wrap=True)


def to_json(sweep: Sweep) -> str:
    """`as_json` as text."""
    return json.dumps(as_json(sweep), indent=1)


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
