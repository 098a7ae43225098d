"""A run's folder in the hands of its one writer: made, locked, added to. `storage.ledger` says what is where."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pyarrow as pa

from storage.artifacts import (
    MANIFEST,
    Artifact,
    Part,
    Provenance,
    check_parts,
    commit,
    commit_parts,
    reference,
)
from storage.checkpoints import drop_leftovers
from storage.durable import (
    RunLocked,
    StorageError,
    all_or_nothing,
    append_json_line,
    full_disk_told,
    parse_json,
    sync_file,
    sync_folder,
    write_json,
)
from storage.ledger import Run, manifest_of
from storage.mirror import Mirror, changed, hold
from storage.run_values import RUN_NAME, Lineage, artifact_name
from storage.schema import FORMAT_VERSION


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
        if not RUN_NAME.fullmatch(name):
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
                manifest = manifest_of(step, folder)
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
        folder = self.step(step).folder / artifact_name(stage)
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
