"""`grpoflow gc`, and what a run lets go of after each checkpoint: `storage.retention` applied to a run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.config import load_config
from flows.run_folder import config_of
from storage import Run, RunWriter, StorageError, open_run
from storage.retention import (
    CHECKPOINT,
    Aged,
    Retention,
    compress,
    drop,
    first_needed_step,
    what_is_dead,
    what_to_compress,
    what_to_drop,
)
from tasks.config import RunConfig


def retention_of(cfg: RunConfig) -> Retention:
    """The rule of a configuration. Parts that are written compressed are not compressed again."""
    rule = cfg.storage.retention
    return Retention(rule.keep, rule.steps, rule.compress and cfg.storage.compression == "none")


class Retainer:
    """Applies a run's rule after its checkpoints. Trouble with it is said and never ends the run."""

    def __init__(self, run: RunWriter, cfg: RunConfig, say: Callable[[str], None]) -> None:
        self._run, self._rule, self._say = run, retention_of(cfg), say
        self._settled = 0

    def after_checkpoint(self, step: int) -> int:
        """Let go of what is past its time, and return the bytes that are free now.

        Args:
            step: the checkpoint that has just been written.
        """
        if self._rule.keep == "all" and not self._rule.compress:
            return 0
        try:
            needed = first_needed_step(self._run)
            freed = drop(self._run, what_to_drop(self._run, self._rule, needed, begin=self._settled))
            freed += compress(self._run, what_to_compress(self._run, self._rule, needed, begin=self._settled))
        except (OSError, StorageError) as error:
            self._say(f"storage.retention could not be applied, training goes on: {error}")
            return 0
        # Steps before this one have been dealt with for good; a long run is not searched from its start each time.
        oldest_kept = step - self._rule.steps + 1 if self._rule.keep == "last" else needed
        self._settled = max(min(needed, oldest_kept), 0)
        return freed


def gc_command(
    path: Path, overrides: Sequence[str], *, dry_run: bool, lineages: bool, as_json: bool, console: Console
) -> None:
    """Apply a run's retention now, or say what it would remove.

    Args:
        path: the run's folder.
        overrides: `storage.retention` other than the run's own, as key=value.
        dry_run: change nothing; works beside a live run.
        lineages: also remove futures that the run went back from, with their checkpoints.
        as_json: print JSON.
        console: where to print.

    Raises:
        RunLocked: a live process writes to the run.
        StorageError: there is no run at this path.
        ValueError: an override is of something else.
    """
    run = open_run(path)
    other = [word for word in overrides if not word.startswith("storage.retention.")]
    if other:
        raise ValueError(f"gc reads storage.retention.keep, .steps and .compress alone, not {', '.join(other)}")
    rule = retention_of(load_config([], overrides, base=config_of(run, run.lineage)))
    if dry_run:
        needed = first_needed_step(run)
        found, packable = _find(run, rule, needed, lineages)
        freed = sum(item.bytes for item in found)
    else:
        with RunWriter(run.root) as writer:
            needed = first_needed_step(writer)
            found, packable = _find(writer, rule, needed, lineages)
            freed = drop(writer, found) + compress(writer, packable)
    if as_json:
        items = [*(_row(item, "drop") for item in found), *(_row(item, "compress") for item in packable)]
        console.out(json.dumps({"dry_run": dry_run, "bytes": freed, "needed_from_step": needed, "items": items}))
        return
    console.print(Text(f"{run.root}: {rule}"), soft_wrap=True)
    what = f"step {needed} and all after it" if needed else "all steps: there is no intact checkpoint"
    console.print(f"recovery needs {what}")
    _print(found, packable, console)
    more = ", and more by compression" if dry_run and packable else ""
    console.print(f"{freed:,} bytes {'would be' if dry_run else 'are'} freed{more}")


def _find(run: Run, rule: Retention, needed: int, lineages: bool) -> tuple[list[Aged], list[Aged]]:
    """What goes, and what is compressed."""
    found = what_to_drop(run, rule, needed) + (what_is_dead(run) if lineages else [])
    gone = {item.folder for item in found}
    return found, [item for item in what_to_compress(run, rule, needed) if item.folder not in gone]


def _row(item: Aged, how: str) -> dict[str, object]:
    names = ("step", "stage", "attempt", "bytes", "why")
    return {"how": how, **{name: getattr(item, name) for name in names}}


def _print(found: Sequence[Aged], packable: Sequence[Aged], console: Console) -> None:
    """One line per step: what goes, and why."""
    lines: dict[tuple[int, str, str], list[Aged]] = {}
    for how, items in (("drop", found), ("compress", packable)):
        for item in items:
            what = "remove" if item.stage == CHECKPOINT else how
            lines.setdefault((item.step, what, item.why), []).append(item)
    if not lines:
        console.print("nothing is past its time")
        return
    table = Table("step", "", "what", box=None)
    table.add_column("bytes", justify="right")
    table.add_column("why")
    for (step, how, why), items in sorted(lines.items()):
        names = ", ".join(dict.fromkeys(item.stage for item in items))
        table.add_row(str(step), how, Text(names), f"{sum(item.bytes for item in items):,}", Text(why))
    console.print(table)
