"""Is a run sound? Named checks over its artifacts, each with a tolerance, what it measured and the rows that offend.

One step is in memory at a time. A check that fails, or cannot look, stops no other. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.audit.sources import open_lineage
from flows.audit.steps import in_words, parse_steps
from flows.audit.verify import (
    advantages,
    deep,
    files,
    metrics,
    policy,
    rewards,
    rows,
    sampler,
    tokens,
    updates,
)
from flows.audit.verify.base import Account, Bench, Cannot
from flows.audit.verify.step import Look
from storage import Run, StorageError
from storage.artifacts import forget_checked
from storage.durable import read_json

FAILED = 6
"""Exit code of a command that found something wrong."""

RESCORED = 32
"""Samples of each reward artifact that are scored again by themselves."""

ROWS_SHOWN = 5
"""Offending rows of each check that the table is followed by."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: how it is called.
        tolerance: what still passes, in words.
        step: looks at one step; None: it looks at the run as a whole, see `verify`.
        about: what it checks, in a sentence.
    """

    name: str
    tolerance: str
    step: Callable[[Look, Account], None] | None
    about: str


def _check(name: str, tolerance: str, function: Callable[..., None], *, of_run: bool = False) -> Check:
    about = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    return Check(name, tolerance, None if of_run else function, about)


CHECKS = (
    _check("documents", "equal", files.documents, of_run=True),
    _check("files", "equal, every byte", files.files),
    _check("schemas", "equal", files.schemas),
    _check("stages", "none missing", files.stages),
    _check("parents", "equal digests", files.parents),
    _check("policy", "equal digests", policy.policy),
    _check("ids", "equal, unique", rows.ids),
    _check("groups", "equal", rows.groups),
    _check("lengths", "equal", rows.lengths),
    _check("finite", f"log-probs at most {rows.GREEDIEST:g}", rows.finite),
    _check("prompts", "equal", tokens.prompts),
    _check("seeds", "equal", tokens.seeds),
    _check("text", "equal", tokens.text),
    _check("endings", "none", tokens.endings),
    _check("retokenised", f"none; {sampler.TWO_POLICIES:g} nat a token", sampler.retokenised),
    _check("rows", f"{sampler.TWO_POLICIES:g} nat a token", sampler.rows),
    _check("duplicates", f"chance of {sampler.CHANCE:g}", sampler.duplicates),
    _check("sampler gap", "bound in trainer.alarms", sampler.sampler_gap),
    _check("scores", f"{rewards.SAME_SCORE:g} of it", rewards.scores),
    _check("rewards", f"{rewards.SAME_SCORE:g} of it", rewards.rewards),
    _check("advantages", f"{advantages.SAME_ADVANTAGE:g} of it", advantages.advantages),
    _check("loss masks", "equal", advantages.loss_masks),
    _check("mini-batches", "equal; loss 1e-05", updates.mini_batches),
    _check("learning rate", "1e-09 of it", updates.learning_rates),
    _check("losses", "what log_ratio_max allows", updates.losses),
    _check("replay", "as in `grpoflow replay`", deep.replayed),
    _check("metrics", f"{metrics.SAME_METRIC:g} of it", metrics.metrics),
    _check("step.json", "1e-12 of it", metrics.record),
    _check("checkpoints", "equal digests", policy.saved, of_run=True),
    _check("MLflow", "1e-12 of it", metrics.in_mlflow, of_run=True),
)


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        run: the run.
        steps: which steps were looked at.
        accounts: what each check found, by its name.
        notes: what a reader should know and no check fails on: open steps, damage that was mended, quarantine.
        bytes: size of the parts that were looked at.
        samples: samples that were looked at.
    """

    run: Run
    steps: list[int]
    accounts: dict[str, Account]
    notes: list[str]
    bytes: int
    samples: int

    def result(self, check: Check) -> str:
        """`ok`, `failed` or `not applicable`."""
        account = self.accounts[check.name]
        if account.failures:
            return "failed"
        return "ok" if account.compared else "not applicable"

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in CHECKS if self.result(check) == "failed"]


def verify(run: Run, steps: Iterable[int], *, rescore: int | None = RESCORED, deep: bool = False) -> Report:
    """Make every check of some steps of a run.

    Args:
        run: the run, in the lineage to look at.
        steps: numbers of the steps.
        rescore: samples of each reward artifact to score again; None: all.
        deep: make stages again that need the policy, see `grpoflow replay`.
    """
    forget_checked()
    steps = list(steps)
    accounts = {check.name: Account() for check in CHECKS}
    recorded = metrics.Recorded()
    size = samples = 0
    with Bench(run, rescore=rescore, deep=deep) as bench:
        _guarded(accounts["documents"], None, lambda one: files.documents(bench, one))
        for step in steps:
            look = Look(bench, step)
            for check in CHECKS:
                if check.step is not None:
                    _guarded(accounts[check.name], look, partial(check.step, look))
            _keep_metrics(look, recorded)
            taken = _measure(look)
            size, samples = size + taken[0], samples + taken[1]
        _guarded(accounts["checkpoints"], None, lambda one: policy.saved(bench, steps, one))
        _guarded(accounts["MLflow"], None, lambda one: metrics.in_mlflow(bench, recorded, one))
        notes = [*bench.notes, *_events(run, steps)]
    return Report(run, steps, accounts, notes, size, samples)


def _guarded(account: Account, look: Look | None, check: Callable[[Account], None]) -> None:
    """Make a check; whatever stops it is part of its account."""
    step = None if look is None else look.step
    try:
        check(account)
    except Cannot as reason:
        account.skip(str(reason), step)
    except Exception as error:
        if isinstance(error, StorageError | OSError) and look is not None and (gone := look.dropped_since()):
            account.skip(f"{', '.join(gone)} was let go by storage.retention meanwhile", step)
            return
        # What a check trips over is a value that no check expects: the artifact is not what it should be.
        account.fail(f"the check could not be made: {type(error).__name__}: {error}", step)


def _keep_metrics(look: Look, recorded: metrics.Recorded) -> None:
    try:
        if look.record is not None:
            recorded.add(look.step, look.record["metrics"])
    except Cannot:
        return


def _measure(look: Look) -> tuple[int, int]:
    """Bytes of a step's parts, and its samples."""
    size = samples = 0
    for stage in look.stages:
        try:
            manifest = look.manifest(stage)
        except Cannot:
            continue
        size += 0 if look.is_dropped(stage) else manifest.bytes
        samples += manifest.rows if stage in ("rollouts", "val_rollouts") else 0
    return size, samples


def _events(run: Run, steps: list[int]) -> Iterable[str]:
    """What the ledger tells of damage and refusals in these steps."""
    for event in run.events():
        if event["event"] == "damaged" and event.get("step") in steps:
            yield f"step {event['step']}: {event['stage']} was found damaged at {event['at']}: {event['reason']}"
    for path in sorted((run.root / "quarantine").glob("*/reason.json")):
        try:
            about = read_json(path)
            if about["step"] in steps:
                yield f"step {about['step']}: {about['stage']} was refused at {about['at']}: {about['reason']}"
        except (ValueError, KeyError, TypeError):
            yield f"{path} is damaged"


# ------------------------------------------------------------------------------------------------------------- showing


def verify_command(
    path: Path, steps: str | None, *, lineage: int | None, rescore: str, deep: bool, as_json: bool, console: Console
) -> int:
    """Verify a run, show what was found, and return the exit code: 6 where a check failed.

    Raises:
        ValueError: `rescore` or `steps` cannot be read.
        StorageError: there is no run, or it has no such step.
    """
    run = open_lineage(path, lineage)
    report = verify(run, parse_steps(steps, run), rescore=_number(rescore), deep=deep)
    if as_json:
        print(json.dumps(as_values(report, deep), indent=1))
    else:
        show(report, console)
    return FAILED if report.failed else 0


def _number(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--rescore {text}: give a number of samples a step, or all")
    return int(text)


def as_values(report: Report, deep: bool) -> dict[str, Any]:
    """The report as JSON values."""
    checks = [
        {
            "name": check.name,
            "about": check.about,
            "tolerance": check.tolerance,
            "result": report.result(check),
            **asdict(report.accounts[check.name]),
        }
        for check in CHECKS
    ]
    return {
        "run": report.run.run_id,
        "lineage": report.run.lineage,
        "steps": report.steps,
        "deep": deep,
        "bytes": report.bytes,
        "samples": report.samples,
        "failed": report.failed,
        "checks": checks,
        "notes": report.notes,
    }


def show(report: Report, console: Console) -> None:
    """A line for each check, the rows that offend, and what else a reader should know."""
    which = f"{report.run.run_id}, lineage {report.run.lineage}: steps {in_words(report.steps)}"
    console.print(f"{which}, {report.samples:,} samples, {report.bytes / 1e6:.1f} MB", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("check", "left"), ("result", "left"), ("compared", "right"), ("largest", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("tolerance")
    for check in CHECKS:
        account, result = report.accounts[check.name], report.result(check)
        style = {"failed": "bold red", "ok": "green"}.get(result, "dim")
        largest = "" if account.measured is None else f"{account.measured:.3g}"
        told = f"{result} ({account.failures:,})" if account.failures else result
        row = (check.name, f"[{style}]{told}[/]", f"{account.compared:,}", largest, escape(check.tolerance))
        table.add_row(*row)
    console.print(table)
    _show_rows(report, console)
    _show_reasons(report, console)


def _show_rows(report: Report, console: Console) -> None:
    for check in CHECKS:
        account = report.accounts[check.name]
        if not account.failures:
            continue
        console.print(f"\n{check.name} failed: {check.about}", style="bold", markup=False)
        for row in account.rows[:ROWS_SHOWN]:
            places = [f"step {row.step}" if row.step is not None else "", row.stage or "", row.sample_id or ""]
            places.append(f"token {row.token}" if row.token is not None else "")
            where = ", ".join(place for place in places if place)
            console.print(f"  {where}: {row.what}" if where else f"  {row.what}", markup=False, soft_wrap=True)
        if account.failures > ROWS_SHOWN:
            console.print(
                f"  and {account.failures - ROWS_SHOWN:,} more (--json names {len(account.rows)})", markup=False
            )


def _show_reasons(report: Report, console: Console) -> None:
    told = [(check.name, why, steps) for check in CHECKS for why, steps in report.accounts[check.name].cannot.items()]
    if told:
        console.print("\nnot looked at:", style="bold")
        by_reason: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, why, steps in told:
            by_reason.setdefault((why, tuple(steps)), []).append(name)
        for (why, steps_of), names in by_reason.items():
            where = f" (steps {in_words(steps_of)})" if steps_of else ""
            console.print(f"  {', '.join(names)}: {why}{where}", markup=False, soft_wrap=True)
    if report.notes:
        console.print("\nto know:", style="bold")
        for note in report.notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)
    failed = ", ".join(report.failed)
    console.print(f"\nfailed: {failed}" if failed else "\nnothing failed", style="bold red" if failed else "bold green")
