"""`grpoflow replay`: a step of a run, or of a bundle, made again and told, in a table or as JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.audit.bundle import versions
from flows.audit.bundle.unpack import unpacked
from flows.audit.compare import Where
from flows.audit.replay import Replayed, Replayer
from flows.audit.replay.one_process import DEVICES
from flows.audit.sources import open_lineage
from storage import Run

DIFFERS, CANNOT = 6, 2
"""Exit codes."""


def replay_command(
    source: Path,
    step: int | None,
    stages: Sequence[str] | None,
    overrides: Sequence[str],
    *,
    lineage: int | None,
    device: str,
    trusts_code: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Replay a step and return the exit code: 0, 6 when a stage differs, 2 when none could be made again or one that
    was asked for by name could not.

    Args:
        source: a run's folder, or a bundle.
        step: number of the step; None: a bundle's.
        stages: which; None: all that the step has.
        overrides: key=value of the configuration that are other ones here.
        lineage: which of the run's histories; None: the newest.
        device: where to compute.
        trusts_code: code that came in a bundle may be run.
        as_json: print JSON.
        console: where to print.
    """
    if device not in DEVICES:
        raise ValueError(f"--device {device}: there are {', '.join(DEVICES)}")
    tell: Callable[[str], None] = (lambda _: None) if as_json else (lambda text: console.print(Text(text, style="dim")))
    with _opened(source, lineage, tell) as (run, about):
        index = _step_of(source, step, about)
        asked = stages or (None if about is None else _all_but_prompts(about["stages"]))
        options: dict[str, Any] = {"device": device, "overrides": overrides, "say": tell}
        if about is not None:
            options |= {"bundled": True, "trusts_code": trusts_code}
            if trusts_code:
                sys.path += [str(run.root.parent / folder) for folder in about.get("import_from", [])]
        with Replayer(run, **options) as replayer:
            results = replayer.step(index, asked)
    if as_json:
        print(json.dumps([_row(one) for one in results]))
    else:
        _print(results, console)
    return exit_code(results, by_name=stages is not None)


def exit_code(results: Sequence[Replayed], *, by_name: bool) -> int:
    """What the results of a replay come to; `by_name`: each stage was asked for by its name."""
    verdicts = [one.verdict for one in results]
    if "differs" in verdicts:
        return DIFFERS
    return CANNOT if set(verdicts) <= {"cannot"} or (by_name and "cannot" in verdicts) else 0


@contextmanager
def _opened(source: Path, lineage: int | None, tell: Callable[[str], None]) -> Iterator[tuple[Run, dict | None]]:
    if not source.is_file():
        yield open_lineage(source, lineage), None
        return
    with unpacked(source) as (run, about):
        then, now = about.get("versions", {}), versions()
        other = [
            f"{name} {then[name]} there, {now.get(name, 'none')} here" for name in then if then[name] != now.get(name)
        ]
        if other:
            tell(f"the bundle was made with other versions, which may round otherwise: {'; '.join(other)}")
        yield run, about


def _step_of(source: Path, step: int | None, about: dict[str, Any] | None) -> int:
    if about is None:
        if step is None:
            raise ValueError(f"which step of {source}? Say --step K")
        return step
    if step not in (None, about["step"]):
        raise ValueError(f"{source} holds step {about['step']}, not {step}")
    return int(about["step"])


def _all_but_prompts(stages: Sequence[str]) -> list[str]:
    """Without what is drawn from data files, which no bundle holds; asked for by name, it says so."""
    drawn = [stage for stage in stages if stage.startswith("prompts-")] or ["prompts"]
    return [stage for stage in stages if stage not in (*drawn, "val_prompts")]


def _row(one: Replayed) -> dict[str, Any]:
    return {**vars(one), "first": None if one.first is None else _plain(one.first)}


def _plain(where: Where) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    values = vars(where)
    odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**values, **odd}


_STYLES = {"equal": "green", "within tolerance": "yellow", "differs": "bold red", "cannot": "magenta"}


def _print(results: Sequence[Replayed], console: Console) -> None:
    table = Table("stage", "verdict", box=None)
    for name in ("largest difference", "tolerance", "took", "then"):
        table.add_column(name, justify="right")
    for one in results:
        measured = "" if one.measured is None else f"{one.measured:.3g}"
        times = ["" if value is None else f"{value:.2f} s" for value in (one.seconds, one.stored_seconds)]
        table.add_row(one.stage, Text(one.verdict, _STYLES[one.verdict]), measured, one.tolerance or "", *times)
    console.print(table)
    for one in results:
        if one.first is not None:
            rows = f"{one.rows} {'row differs' if one.rows == 1 else 'rows differ'}"
            console.print(Text(f"{one.stage}: {rows}, first {one.first}"), soft_wrap=True)
        if one.why:
            console.print(Text(f"{one.stage}: {one.why}"), soft_wrap=True)
