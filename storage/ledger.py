"""A run's folder for reading: its identity, its steps and their artifacts, its events. `storage.run_writer` writes it.

    run.json  config.yaml  plan.json  ledger.jsonl  lock
    steps/000042/rollouts/0001/{part-00000.arrow, manifest.json}      step, artifact, attempt
    steps/000042/step.json                                            the step as a whole: metrics, digests
    checkpoints/000040/                                               see storage/checkpoints.py
    lineages/0002.json                                                where and why the run went back
    steps/000042/step-0002.json  checkpoints/000040-0002/             the same for that lineage

Nothing committed is rewritten: an artifact made again is a new attempt beside the old one. Step 0 holds what happens
before the first step. A run that goes back to a step opens a lineage: it sees what its parent made before that step,
and nothing of what came after.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.artifacts import (
    DROPPED,
    MANIFEST,
    Artifact,
    Manifest,
    read_manifest,
    read_table,
    reference,
)
from storage.copies import copy_of, local_folder, refresh
from storage.durable import (
    StorageError,
    checked,
    parse_json,
    read_json,
    read_json_lines,
)
from storage.object_store import is_url
from storage.run_values import IDENTITY, LINEAGE, RECORD, STAGES, Lineage, artifact_name, depends_on, is_event
from storage.samples import run_sample_rows, sample_rows
from storage.schema import FORMAT_VERSION, without_round


def manifest_of(step: int, folder: Path) -> Manifest:
    """The manifest of an attempt; StorageError where it is that of another step or artifact than it lies in."""
    manifest = read_manifest(folder)
    if (manifest.step, manifest.stage) != (step, folder.parent.name):
        raise StorageError(
            f"{folder / MANIFEST} is of {manifest.stage} of step {manifest.step}, which is not where it lies"
        )
    return manifest


class StepView:
    """One step of a run, for reading."""

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index
        self.folder = run.root / "steps" / f"{index:06d}"

    def attempts(self, stage: str) -> list[Path]:
        """Folders of an artifact's committed attempts that the run's lineage sees, oldest first."""
        folders = (self.folder / artifact_name(stage)).glob("[0-9]*")
        there = sorted(folder for folder in folders if folder.name.isdecimal() and (folder / MANIFEST).is_file())
        if not self.run.has_lineages:
            return there
        seen = self.run.seen_lineages(self.index, stage)
        return [folder for folder in there if _lineage_of_attempt(folder) in seen]

    def used(self, stage: str) -> Path | None:
        """Folder of the attempt that the finished step used, of an open step the newest; None: nothing is committed.

        The newest is not always the one: a stage that is back to what it once was made from takes the older attempt.
        """
        attempts = self.attempts(stage)
        if len(attempts) > 1 and (record := self.record) is not None:
            wanted = record.get("artifacts", {}).get(stage)
            for folder in reversed(attempts):
                with suppress(StorageError):
                    if manifest_of(self.index, folder).digest == wanted:
                        return folder
        return attempts[-1] if attempts else None

    def manifest(self, stage: str) -> Manifest | None:
        """Manifest of the attempt that is used; None when nothing is committed."""
        folder = self.used(stage)
        return manifest_of(self.index, folder) if folder else None

    def artifact(self, stage: str) -> Artifact | None:
        """Reference to the attempt that is used; None when nothing is committed."""
        folder = self.used(stage)
        return reference(folder, manifest_of(self.index, folder)) if folder else None

    def table(self, stage: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of the attempt that is used.

        Raises:
            FileNotFoundError: this step has no such artifact.
        """
        artifact = self.artifact(stage)
        if artifact is None:
            have = ", ".join(self.stages()) or "none"
            raise FileNotFoundError(f"step {self.index} of {self.run.root} has no {stage}; it has: {have}")
        return read_table(artifact, columns)

    def samples(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per sample, all stages joined by `sample_id`; see `storage.samples.sample_rows`."""
        return sample_rows(self, columns)

    def is_dropped(self, stage: str) -> bool:
        """Whether retention has dropped the rows of the attempt that is used."""
        folder = self.used(stage)
        return folder is not None and (folder / DROPPED).exists()

    def stages(self) -> list[str]:
        """Names of the artifacts that this step has."""
        there = [path.name for path in self.folder.glob("*/") if without_round(path.name) in STAGES]
        return sorted(filter(self.attempts, there), key=lambda stage: (STAGES.index(without_round(stage)), stage))

    @property
    def record(self) -> dict[str, Any] | None:
        """The step as a whole: metrics and digests; None when the step is not finished."""
        path = self.run.record_path(self.index)
        try:
            if not path.is_file():
                return None
            values: dict[str, Any] = read_json(path)
            checked(RECORD, values)
            return values
        except ValueError as error:
            raise StorageError(
                f"{path} is damaged ({error}). Remove it: the step is then finished again from its stages."
            ) from error


class Run:
    """A run's folder, for reading. `open_run` makes one."""

    def __init__(self, root: Path, lineage: int | None = None) -> None:
        self.root = root.absolute()
        self._wanted = lineage

    @cached_property
    def lineages(self) -> dict[int, Lineage]:
        """All lineages by number.

        Raises:
            StorageError: a lineage's file is damaged.
        """
        found = {1: Lineage(1)}
        for path in sorted((self.root / "lineages").glob("[0-9]*.json")):
            try:
                values = read_json(path)
                names = {"number", "parent", "step", "stage", "changes", "config"}
                lineage = checked(LINEAGE, {name: values[name] for name in names})
                if lineage.parent not in found or lineage.number in found or lineage.number != int(path.stem):
                    raise ValueError(f"it is lineage {lineage.number} with the parent {lineage.parent}")
                found[lineage.number] = lineage
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(f"{path} is damaged: {error!r}. Restore it from a copy of the run.") from error
        return found

    @property
    def lineage(self) -> int:
        """The lineage that is read and written: the newest, unless an older one was asked for."""
        return max(self.lineages) if self._wanted is None else self._wanted

    @property
    def has_lineages(self) -> bool:
        """Whether the run has ever gone back."""
        return len(self.lineages) > 1

    def lineage_of(self, step: int, stage: str | None = None) -> int:
        """Number of the lineage that a step belongs to, or one artifact of it, in the history that this one sees."""
        return self.seen_lineages(step, stage)[-1]

    def seen_lineages(self, step: int, stage: str | None = None) -> list[int]:
        """Lineages whose artifacts of a step this one sees, its own first; `stage` None: the step as a whole.

        The last one is that which the step belongs to. The others hold what was made again, or beside it, later: a kept
        stage whose input or file had changed, or another validation.
        """
        seen = [self.lineages[self.lineage]]
        while (last := seen[-1]).parent is not None:
            kept = last.stage is not None and stage is not None and not depends_on(stage, last.stage)
            if step > last.step or (step == last.step and not kept):
                break
            seen.append(self.lineages[last.parent])
        return [lineage.number for lineage in seen]

    def document(self, name: str) -> Path:
        """Path of a text that each lineage has of its own, such as `plan.json`."""
        return self.root / self.lineages[self.lineage].file_name(name)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What never changes about a run: id, name, format, creation time."""
        try:
            identity: dict[str, Any] = read_json(self.root / "run.json")
            newer = int(identity["format_version"]) > FORMAT_VERSION
            if not newer:
                checked(IDENTITY, identity)
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(f"{self.root} is no run: it has no run.json") from None
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.root / 'run.json'} is damaged: {error!r}") from error
        if newer:
            raise StorageError(f"{self.root} was written by a newer version of grpoflow; upgrade to read it")
        return identity

    @property
    def run_id(self) -> str:
        """Unique id."""
        return self.identity["run_id"]

    def step(self, index: int) -> StepView:
        """A step by its number; it need not exist."""
        return StepView(self, index)

    def steps(self) -> list[int]:
        """Numbers of the steps that have a folder, step 0 included."""
        return sorted(int(path.name) for path in (self.root / "steps").glob("[0-9]*") if path.name.isdecimal())

    def samples(self, steps: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per sample of several steps behind a column `step`; see `storage.samples.run_sample_rows`."""
        return run_sample_rows(self, steps, columns)

    def finished_steps(self) -> list[int]:
        """Numbers of the finished training steps."""
        return [index for index in self.steps() if index and self.record_path(index).is_file()]

    def record_path(self, index: int) -> Path:
        """Where the record of a finished step is; of an open one, where this lineage would write it."""
        folder = self.root / "steps" / f"{index:06d}"
        paths = [folder / self.lineages[number].file_name("step.json") for number in self.seen_lineages(index)]
        return next((path for path in paths if path.is_file()), paths[0])

    def events(self) -> list[dict[str, Any]]:
        """The ledger: what happened to this run, oldest first."""
        return list(filter(is_event, read_json_lines(self.root / "ledger.jsonl")))

    @property
    def state(self) -> str:
        """`running`, `finished`, `paused` at a step that was asked for, `failed`, `killed`, or `crashed`.

        It is `crashed` when its process is gone without a word.
        """
        if self.owner() is not None:
            return "running"
        closed = [event["state"] for event in self.events() if event["event"] in ("opened", "closed")]
        last = closed[-1] if closed else "created"
        return "crashed" if last == "running" else last

    def owner(self) -> dict[str, Any] | None:
        """The live process that writes to this run; None when there is none."""
        path = self.root / "lock"
        if not path.exists():
            return self._owner_elsewhere()
        with path.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    owner = parse_json(file.read())
                except ValueError:
                    owner = None
                return owner if isinstance(owner, dict) else {"host": "unknown", "pid": 0}
        return self._owner_elsewhere()

    def _owner_elsewhere(self) -> dict[str, Any] | None:
        """The process of another machine that writes to the run in the object store, of which this is a copy."""
        copy = copy_of(self.root)
        return copy.owner() if copy else None


def open_run(path: str | Path, lineage: int | None = None) -> Run:
    """Open a run's folder for reading.

    Args:
        path: the folder; or `s3://bucket/key` of a run in an object store, which is read through a copy.
        lineage: which of its histories; None: the newest.

    Raises:
        StorageError: there is no run at this path, it is of a newer format, or it has no such lineage.
    """
    if is_url(path):
        path = local_folder(str(path))
    refresh(Path(path))
    run = Run(Path(path), lineage)
    _ = run.identity
    if run.lineage not in run.lineages:
        raise StorageError(f"{path} has no lineage {lineage}; it has {', '.join(map(str, run.lineages))}")
    return run


@cache
def _lineage_of_attempt(folder: Path) -> int:
    return read_manifest(folder).lineage


def list_runs(root: Path) -> Iterator[Run]:
    """All runs under a folder, by path."""
    for path in sorted(root.rglob("run.json")):
        yield Run(path.parent)
