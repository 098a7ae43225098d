"""Which steps of a run a command looks at: `--steps 3`, `3..7`, `..7`, `3..`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from storage import Run, StorageError

_RANGE = re.compile(r"^\s*(?P<first>\d*)\s*(?P<dots>\.\.)?\s*(?P<last>\d*)\s*$")


def parse_steps(text: str | None, run: Run) -> list[int]:
    """Numbers of the steps of a run that a range names, in order; both ends belong to it.

    Only steps that have a folder are in it: of `3..9` of a run of five steps, 3 to 5. Step 0 holds what came before
    training and is in a range that has no beginning.

    Args:
        text: the range; None: all steps.
        run: the run.

    Raises:
        ValueError: it is no range.
        StorageError: the run has no step in it; with those that it has.
    """
    first, last = _ends(text) if text is not None else (None, None)
    there = run.steps()
    chosen = [step for step in there if (first is None or step >= first) and (last is None or step <= last)]
    if not chosen:
        asked = f"no step in --steps {text}" if text is not None else "no step yet"
        raise StorageError(f"{run.root} has {asked}{f'; it has {in_words(there)}' if there else ''}")
    return chosen


def _ends(text: str) -> tuple[int | None, int | None]:
    """First and last step of a range; None: open."""
    found = _RANGE.match(text)
    if found is None or not (found["first"] or found["last"]):
        raise ValueError(f"--steps {text}: no range of steps. Write 3, 3..7, ..7 or 3..")
    first, last = (int(found[end]) if found[end] else None for end in ("first", "last"))
    if found["dots"] is None:
        last = first
    if first is not None and last is not None and last < first:
        raise ValueError(f"--steps {text}: it ends before it begins. Write {last}..{first}")
    return first, last


def in_words(steps: Sequence[int]) -> str:
    """`1..3, 7` for 1, 2, 3 and 7; neighbours are joined."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
