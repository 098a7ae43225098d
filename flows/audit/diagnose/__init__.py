"""What is wrong with a run? Failure signs of the field, looked for in its artifacts, each told with its evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.audit.diagnose import batch, update
from flows.audit.diagnose.base import Found, History, TooLittle, gather
from flows.audit.sources import in_commands, open_lineage
from flows.audit.steps import in_words, parse_steps
from flows.run_folder import config_of, short
from storage import Run, StorageError


@dataclass(frozen=True)
class Sign:
    """One failure sign.

    Attributes:
        name: how it is called.
        about: why it matters, in a sentence.
        look: finds it in a history, or not; raises TooLittle where it cannot be looked for.
    """

    name: str
    about: str
    look: Callable[[History], Found | None]


def _sign(name: str, look: Callable[[History], Found | None]) -> Sign:
    return Sign(name, " ".join((look.__doc__ or "").split()), look)


SIGNS = (
    _sign("no-signal groups", batch.no_signal),
    _sign("reward collapse", batch.reward_collapse),
    _sign("reward through length", batch.reward_by_length),
    _sign("reward through form", batch.reward_by_form),
    _sign("entropy", batch.entropy),
    _sign("length explosion", batch.length),
    _sign("truncation", batch.truncation),
    _sign("duplicates within groups", batch.duplicates),
    _sign("dead prompts", batch.dead_prompts),
    _sign("KL", update.kl),
    _sign("ratios", update.ratios),
    _sign("sampler gap", update.sampler_gap),
    _sign("learning rate", update.learning_rate),
    _sign("gradients", update.gradients),
    _sign("reward errors", update.reward_errors),
)


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        run: the run.
        steps: training steps that were looked at.
        found: the signs that are there, by name.
        absent: names of those that are not.
        cannot: why others could not be looked for, by name.
        unread: why rows of a step could not be read, by step; its record may still have been.
    """

    run: Run
    steps: list[int]
    found: dict[str, Found]
    absent: list[str]
    cannot: dict[str, str]
    unread: dict[int, str]


def diagnose(run: Run, steps: Iterable[int]) -> Diagnosis:
    """Look for every sign in some training steps of a run, one step in memory at a time.

    Raises:
        StorageError: the run's configuration cannot be read, or there is no training step among them.
    """
    history = History(config_of(run, run.lineage))
    for step in steps:
        if step:
            gather(history, run.step(step))
    if not history.steps:
        raise StorageError(f"{run.root} has no training step among those asked for")
    found: dict[str, Found] = {}
    absent: list[str] = []
    cannot: dict[str, str] = {}
    for sign in SIGNS:
        try:
            result = sign.look(history)
        except TooLittle as reason:
            cannot[sign.name] = str(reason)
            continue
        if result is None:
            absent.append(sign.name)
        else:
            found[sign.name] = result
    return Diagnosis(run, [one.step for one in history.steps], found, absent, cannot, history.unread)


def diagnose_command(path: Path, steps: str | None, *, lineage: int | None, as_json: bool, console: Console) -> int:
    """Look for failure signs, show them, and return exit code 0.

    Raises:
        ValueError: `steps` cannot be read.
        StorageError: there is no run, or it has no such step.
    """
    run = open_lineage(path, lineage)
    result = diagnose(run, parse_steps(steps, run))
    if as_json:
        print(json.dumps(as_values(result), indent=1))
    else:
        show(result, in_commands(run, short(run.root)), console)
    return 0


def as_values(result: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON values."""
    about = {sign.name: sign.about for sign in SIGNS}
    return {
        "run": result.run.run_id,
        "lineage": result.run.lineage,
        "steps": result.steps,
        "found": [{"name": name, "about": about[name], **asdict(found)} for name, found in result.found.items()],
        "absent": result.absent,
        "cannot": result.cannot,
        "unread": result.unread,
    }


def show(result: Diagnosis, run: str, console: Console) -> None:
    """The signs that are there first, with how to see more, then those that are not."""
    which = f"{result.run.run_id}, lineage {result.run.lineage}: steps {in_words(result.steps)}"
    console.print(which, markup=False)
    for name, found in result.found.items():
        console.print(f"\n{name}", style="bold red", markup=False)
        console.print(f"  {found.says}.", markup=False, soft_wrap=True)
        console.print(f'  grpoflow sql {run} "{found.query}"', style="dim", markup=False, soft_wrap=True)
    if result.absent:
        console.print(f"\nno sign of: {', '.join(result.absent)}", markup=False, soft_wrap=True)
    for name, why in result.cannot.items():
        console.print(f"not looked for: {name} ({why})", style="dim", markup=False, soft_wrap=True)
    for step, why in result.unread.items():
        console.print(f"step {step} was not read in full: {why}", style="dim", markup=False, soft_wrap=True)
