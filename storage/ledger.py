"""A run's folder: its identity, its steps and their artifacts, its events, and the lock of its one writer.

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
import glob
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired, Self
from uuid import uuid4

import pyarrow as pa
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from storage.artifacts import (
    DROPPED,
    MANIFEST,
    Artifact,
    Manifest,
    Part,
    Provenance,
    check_parts,
    commit,
    commit_parts,
    read_manifest,
    read_table,
    reference,
)
from storage.checkpoints import drop_leftovers
from storage.copies import copy_of, local_folder, refresh
from storage.durable import (
    RunLocked,
    StorageError,
    all_or_nothing,
    append_json_line,
    checked,
    full_disk_told,
    parse_json,
    read_json,
    read_json_lines,
    sync_file,
    sync_folder,
    write_json,
)
from storage.mirror import Mirror, changed, hold
from storage.object_store import is_url
from storage.samples import run_sample_rows, sample_rows
from storage.schema import FORMAT_VERSION, KIND, SCHEMAS, schema_of, without_round

STAGES = (*SCHEMAS, *KIND)
"""Names of all artifacts a step can have; those of several generate calls carry a number behind the name."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")


@dataclass(frozen=True)
class Lineage:
    """One history of a run. The first begins with the run; each other one where an earlier one was gone back to.

    Attributes:
        number: from 1.
        parent: the lineage that it branches off; None: the first.
        step: first step that it makes itself.
        stage: first stage of that step that it makes itself; None: all of them.
        changes: configuration keys that differ from the parent's, with both values.
        config: its resolved configuration as JSON values; None: that of `config.yaml`.
    """

    number: int
    parent: int | None = None
    step: int = 0
    stage: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None

    def file_name(self, name: str) -> str:
        """Name of this lineage's file beside those of the others: `step.json`, `step-0002.json`."""
        stem, dot, ending = name.partition(".")
        return name if self.number == 1 else f"{stem}-{self.number:04d}{dot}{ending}"


AFTER = {
    "prompts": ("rollouts", "greedy_rollouts"),
    "rollouts": ("old_log_probs", "ref_log_probs", "rewards"),
    "greedy_rollouts": ("greedy_rewards",),
    "greedy_rewards": ("advantages",),
    "old_log_probs": ("advantages", "updates"),
    "ref_log_probs": ("advantages", "updates"),
    "rewards": ("advantages",),
    "advantages": ("updates",),
    "updates": ("val_prompts", "val_rollouts", "val_rewards"),
}
"""Artifacts that are made from an artifact of the same step."""


def depends_on(stage: str, first: str) -> bool:
    """Whether an artifact is made from another one of its step, or is that one."""
    stage, first = without_round(stage), without_round(first)
    return stage == first or any(depends_on(stage, after) for after in AFTER.get(first, ()))


_LINEAGE: TypeAdapter[Lineage] = TypeAdapter(Lineage)


class _Identity(TypedDict):
    """What a `run.json` must say; both names become parts of paths."""

    run_id: Annotated[str, Field(pattern=rf"^{_RUN_NAME.pattern}$")]
    name: Annotated[str, Field(pattern=rf"^{_RUN_NAME.pattern}$")]
    created_at: str
    documents: NotRequired[dict[str, str]]
    origin: NotRequired[dict[str, Any]]


class _Record(TypedDict):
    """What a finished step's record must say."""

    metrics: dict[str, float | None]
    artifacts: NotRequired[dict[str, str]]
    finished_at: NotRequired[datetime]


_IDENTITY, _RECORD = TypeAdapter(_Identity), TypeAdapter(_Record)

_MUST_SAY: dict[str, dict[str, type]] = {
    "opened": {"state": str},
    "closed": {"state": str},
    "config_changed": {"changes": dict},
    "reward_functions": {"digest": str},
    "lineage": {"lineage": int},
    "damaged": {"stage": str, "reason": str},
}
"""Members of events that are read; a line without them is no event."""


def _is_event(line: Mapping[str, Any]) -> bool:
    event = line.get("event")
    try:
        if not isinstance(event, str) or datetime.fromisoformat(line["at"]).tzinfo is None:
            return False
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(line.get(name), kind) for name, kind in _MUST_SAY.get(event, {}).items())


def _artifact_name(stage: str) -> str:
    """The name, which becomes a folder's; ValueError where no artifact has it."""
    schema_of(stage)
    return stage


def _manifest_of(step: int, folder: Path) -> Manifest:
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
        folders = (self.folder / _artifact_name(stage)).glob("[0-9]*")
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
                    if _manifest_of(self.index, folder).digest == wanted:
                        return folder
        return attempts[-1] if attempts else None

    def manifest(self, stage: str) -> Manifest | None:
        """Manifest of the attempt that is used; None when nothing is committed."""
        folder = self.used(stage)
        return _manifest_of(self.index, folder) if folder else None

    def artifact(self, stage: str) -> Artifact | None:
        """Reference to the attempt that is used; None when nothing is committed."""
        folder = self.used(stage)
        return reference(folder, _manifest_of(self.index, folder)) if folder else None

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
            checked(_RECORD, values)
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
                lineage = checked(_LINEAGE, {name: values[name] for name in names})
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
                checked(_IDENTITY, identity)
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
        return list(filter(_is_event, read_json_lines(self.root / "ledger.jsonl")))

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


class RunWriter(Run):
    """A run's folder in the hands of its one writer. Use it as a context manager: leaving it gives the lock back."""

    def __init__(self, root: Path, mirror: Mirror | None = None) -> None:
        """Take the run in a folder; of a copy of one in an object store, its lease too.

        Args:
            root: the folder.
            mirror: of the copy, where its lease is held already.

        Raises:
            RunLocked: another live process, on this machine or another, writes to it.
        """
        self.mirror = mirror or hold(root)
        super().__init__(self.mirror.copy.folder if self.mirror else root)
        try:
            self._lock_file = _take_lock(self.root)
        except BaseException:
            if self.mirror:
                self.mirror.close()
            raise
        self.code_digest = ""
        self.config_digest = ""
        self.compression = "none"
        self.donors: Sequence[str] = ()
        """Folders or globs of other runs whose artifacts may be taken over."""
        self.conditions: dict[str, Any] = {}
        """What the content of this run's artifacts depends on beside their keys; {}: it shares nothing."""
        self._drop_uncommitted()

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        documents: Mapping[str, str] | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make a new run's folder and take its lock. The folder appears with all it must have, or not at all.

        Args:
            root: the folder; it may be there, empty.
            name: the run's name.
            documents: texts that are kept with the run from its start, by file name.
            origin: which policy of which other run it begins with; None: of none.

        Raises:
            FileExistsError: there is something in the folder.
            ValueError: the name cannot be a folder's.
        """
        if not _RUN_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a run: use letters, digits and . _ - + = @, and start with a letter or digit"
            )
        root.parent.mkdir(parents=True, exist_ok=True)
        aside = root.with_name(f".{root.name}.{uuid4().hex[:8]}.aside")
        identity = {
            "run_id": f"{name}-{uuid4().hex[:8]}",
            "name": name,
            "format_version": FORMAT_VERSION,
            "created_at": _now(),
            "documents": {file: hashlib.sha256(text.encode()).hexdigest() for file, text in (documents or {}).items()},
            **({"origin": dict(origin)} if origin else {}),
        }
        mirror = hold(root)
        try:
            _make(root, aside, identity, documents or {})
        except BaseException:
            if mirror:
                mirror.close()
            raise
        changed(root)
        return cls(root, mirror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None = None, *_: object) -> None:
        try:
            if self.mirror is not None:
                self.mirror.close()
        except StorageError as error:
            if failed is None or self.mirror is None:
                raise
            self.mirror.say(f"warning: {error}")
        finally:
            self._lock_file.close()

    def append(self, event: str, **values: Any) -> None:
        """Add an event to the ledger."""
        with full_disk_told(self.root, "the ledger"):
            append_json_line(self.root / "ledger.jsonl", {"event": event, "at": _now(), **values})
        changed(self.root / "ledger.jsonl")

    def open_lineage(
        self, step: int, stage: str | None, changes: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Lineage:
        """Go back: from now on the run sees nothing of its present lineage from `step` on, or from `stage` of it on.

        Args:
            step: first step that is made anew.
            stage: first stage of it; None: all of them.
            changes: configuration keys that differ from the present lineage's, with both values.
            config: the whole configuration from now on.
        """
        parent = self.lineage
        lineage = Lineage(max(self.lineages) + 1, parent, step, stage, changes, config)
        (self.root / "lineages").mkdir(exist_ok=True)
        path = self.root / "lineages" / f"{lineage.number:04d}.json"
        write_json(path, {**asdict(lineage), "at": _now()})
        changed(path)
        del self.lineages
        self.append("lineage", lineage=lineage.number, parent=parent, step=step, stage=stage, changes=dict(changes))
        return lineage

    def write_document(self, name: str, text: str) -> None:
        """Keep a text with the run, such as its plan; other lineages keep theirs."""
        aside = self.root / f".{name}.aside"
        aside.write_text(text, encoding="utf-8")
        aside.rename(self.document(name))
        changed(self.document(name))

    def find(self, step: int, stage: str, key: str) -> Artifact | None:
        """The newest attempt of an artifact that was made from exactly this (its key) and is intact on disk."""
        for folder in reversed(self.step(step).attempts(stage)):
            try:
                manifest = _manifest_of(step, folder)
                if manifest.key == key:
                    check_parts(folder, manifest)
                    return reference(folder, manifest)
            except StorageError as error:
                self.append("damaged", step=step, stage=stage, attempt=folder.name, reason=str(error))
        return None

    @contextmanager
    def attempt(self, step: int, stage: str) -> Iterator[Path]:
        """The folder of the next attempt at a step's artifact, for parts; it is removed again when the block fails."""
        with all_or_nothing(self._next_attempt(step, stage), f"artifact {stage} of step {step}") as folder:
            yield folder

    def _next_attempt(self, step: int, stage: str) -> Path:
        folder = self.step(step).folder / _artifact_name(stage)
        attempt = 1 + max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()), default=0)
        return folder / f"{attempt:04d}"

    def commit_parts(
        self,
        folder: Path,
        parts: Sequence[Part],
        *,
        key: str,
        policy_version: int,
        started_at: datetime,
        parents: Sequence[Artifact] = (),
        made_from: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        shapes: Mapping[str, int] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Commit the parts that were written into the folder of an attempt."""
        made_by = self._provenance(folder, key, policy_version, started_at, parents, made_from)
        return commit_parts(folder, folder.parent.name, parts, made_by, metrics=metrics, shapes=shapes, notes=notes)

    def _provenance(
        self,
        folder: Path,
        key: str,
        policy_version: int,
        started_at: datetime,
        parents: Sequence[Artifact],
        made_from: Mapping[str, Any] | None,
    ) -> Provenance:
        return Provenance(
            run_id=self.run_id,
            lineage=self.lineage,
            step=int(folder.parent.parent.name),
            attempt=int(folder.name),
            key=key,
            policy_version=policy_version,
            code_digest=self.code_digest,
            config_digest=self.config_digest,
            started_at=started_at,
            parents={parent.stage: parent.digest for parent in parents},
            made_from=made_from,
        )

    def commit(
        self,
        step: int,
        stage: str,
        table: pa.Table,
        *,
        key: str,
        policy_version: int,
        started_at: datetime,
        parents: Sequence[Artifact] = (),
        made_from: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        shapes: Mapping[str, int] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Commit a table as the next attempt of a step's artifact."""
        folder = self._next_attempt(step, stage)
        made_by = self._provenance(folder, key, policy_version, started_at, parents, made_from)
        return commit(
            folder,
            stage,
            [table],
            made_by,
            metrics=metrics,
            shapes=shapes,
            notes=notes,
            compression=self.compression,
        )

    def finish_step(self, step: int, record: Mapping[str, Any]) -> None:
        """Write down a step as a whole; from now on it counts as finished."""
        self.step(step).folder.mkdir(parents=True, exist_ok=True)
        about = {"step": step, "lineage": self.lineage, "finished_at": _now()}
        with full_disk_told(self.root, f"the record of step {step}"):
            own = self.lineages[self.lineage].file_name("step.json")
            write_json(self.step(step).folder / own, {**about, **record})
        changed(self.step(step).folder / own)
        if self.mirror is not None:
            # What others keep in the folder, such as what MLflow has received.
            self.mirror.scan()

    def quarantine(self, step: int, stage: str, table: pa.Table, reason: str) -> Path:
        """Keep a table that was refused, for inspection, where no reader of the run looks."""
        folder = self.root / "quarantine" / f"{step:06d}-{stage}-{uuid4().hex[:6]}"
        folder.mkdir(parents=True)
        with pa.OSFile(str(folder / "refused.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        write_json(folder / "reason.json", {"step": step, "stage": stage, "reason": reason, "at": _now()})
        changed(folder)
        return folder

    def _drop_uncommitted(self) -> None:
        """Remove what a dead writer left half-done: attempts without a manifest and files written aside."""
        drop_leftovers(self.root)
        for folder in self.root.glob("steps/*/*/[0-9]*"):
            if not (folder / MANIFEST).is_file():
                shutil.rmtree(folder)
        for path in [
            *self.root.glob(".*.aside"),
            *self.root.glob("lineages/.*.aside"),
            *self.root.glob("steps/*/.*.aside"),
            *self.root.glob("steps/*/*/*/.*.aside"),
        ]:
            path.unlink()


def _make(root: Path, aside: Path, identity: Mapping[str, Any], documents: Mapping[str, str]) -> None:
    """Make a run's folder aside, with its identity and its first texts, and give it its name."""
    with _sole_creator(root), all_or_nothing(aside, f"run {identity['name']}"):
        for file, text in documents.items():
            (aside / file).write_text(text, encoding="utf-8")
            sync_file(aside / file)
        write_json(aside / "run.json", identity)
        try:
            aside.rename(root)
        except OSError as error:
            raise FileExistsError(f"{root} is not empty") from error
        sync_folder(root.parent)


@contextmanager
def _sole_creator(root: Path) -> Iterator[None]:
    """Let one process at a time make a run in a folder of runs; remove what one that was killed left of this run."""
    descriptor = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in root.parent.glob(f".{glob.escape(root.name)}.????????.aside"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(descriptor)


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


def _take_lock(root: Path) -> Any:
    """Hold the run's lock until the returned file is closed or this process ends, however it ends.

    The kernel gives the lock back when its holder dies, so a dead owner holds nothing.

    Raises:
        RunLocked: a live process holds it.
    """
    file = (root / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        text = file.read()
        file.close()
        try:
            owner = parse_json(text) if text.startswith("{") else {}
        except ValueError:  # it is just being written
            owner = {}
        raise RunLocked(
            f"{root} is being written by process {owner.get('pid', '?')} on {owner.get('host', '?')} since "
            f"{owner.get('since', '?')}. Wait for it, stop it, or start a new run with another trainer.experiment_name "
            "or trainer.resume_mode=disable."
        ) from None
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}))
    file.flush()
    return file


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
