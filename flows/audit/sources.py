"""What a word of the command line names: a run, one of its lineages, one of its steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.audit.steps import in_words
from storage import Run, StorageError, open_run

_WORD = re.compile(r"(?P<path>.+?)(?:#(?P<lineage>[0-9]+))?(?:@(?P<step>[0-9]+))?")


@dataclass(frozen=True)
class Source:
    """A run as it was named.

    Attributes:
        run: the run, seen from one of its lineages.
        step: the one step that is meant; None: all of them.
        name: what it is called in what is shown: its folder's name, or the whole word where two would be the same.
    """

    run: Run
    step: int | None
    name: str


def is_run(word: str) -> bool:
    """Whether a word names a run that is there."""
    return _holds_run(_parts(word)[0])


def open_source(word: str) -> Source:
    """Open `RUN`, `RUN@STEP`, `RUN#LINEAGE` or `RUN#LINEAGE@STEP`.

    A folder whose own name looks like that is meant where it is a run.

    Raises:
        StorageError: there is no such run, lineage or step.
    """
    path, lineage, step = _parts(word)
    run = open_run(path, lineage)
    if step is not None and step not in run.steps():
        steps = run.steps()
        have = f"its steps are {steps[0]} to {steps[-1]}" if steps else "it has no steps yet"
        raise StorageError(f"{path} has no step {step}; {have}")
    return Source(run, step, word.rstrip("/").rsplit("/", 1)[-1])


def open_lineage(path: Path, lineage: int | None = None) -> Run:
    """Open the run that a command with `--lineage` and `--step` of its own is given: a folder, or `RUN#LINEAGE`.

    Raises:
        StorageError: there is no such run or lineage. ValueError: two lineages, or a step, are named.
    """
    folder, named, step = _parts(str(path))
    if step is not None and _holds_run(folder):
        raise ValueError(f"{path}: this command takes a step as an option, see --help: {folder}")
    if None not in (named, lineage) and named != lineage:
        raise ValueError(f"{path} is lineage {named}, --lineage says {lineage}")
    return open_run(folder, lineage if named is None else named) if _holds_run(folder) else open_run(path, lineage)


def in_commands(run: Run, name: str) -> str:
    """How a command names the history that a run is seen from, given what it calls the run."""
    return name if run.lineage == max(run.lineages) else f"'{name}#{run.lineage}'"


def open_sources(words: Sequence[str]) -> list[Source]:
    """Open several, each with a name of its own.

    Raises:
        StorageError: as `open_source`. ValueError: one is named twice.
    """
    sources = [open_source(word) for word in words]
    if len(set(words)) < len(words):
        raise ValueError(f"a run is named twice: {', '.join(words)}")
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        return [Source(source.run, source.step, word) for source, word in zip(sources, words, strict=True)]
    return sources


def steps_named(steps: Iterable[int]) -> str:
    """`step 3` or `steps 1..3, 7`."""
    numbers = sorted(set(steps))
    return f"step{'' if len(numbers) == 1 else 's'} {in_words(numbers)}"


def _parts(word: str) -> tuple[Path, int | None, int | None]:
    match = _WORD.fullmatch(word)
    if match is None or _holds_run(Path(word)):
        return Path(word), None, None
    lineage, step = match["lineage"], match["step"]
    return Path(match["path"]), int(lineage) if lineage else None, int(step) if step else None


def _holds_run(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError:  # a query is longer than a name can be
        return False
