"""Artifacts of other runs: found by the key they were made with, and taken over as a run's own.

The other run is only read, without its lock: it may be training. What is taken over is a new attempt of this run, with
a manifest of its own that says where the rows come from; its parts are hard links where the file system has them.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from storage.artifacts import MANIFEST, Artifact, Manifest, check_parts, read_manifest, stored_part
from storage.copies import local_folder, refresh
from storage.durable import LARGEST_JSON_BYTES, StorageError, sync_file
from storage.ledger import StepView
from storage.object_store import is_url
from storage.run_writer import RunWriter

REUSED = "reused_from"
"""Note of an artifact that was taken over: run, digest and attempt of the other one, and the seconds it took there."""


def candidates(patterns: Sequence[str], own: Path, step: int, stage: str, key: str) -> Iterator[tuple[Path, Manifest]]:
    """Committed attempts of other runs that were made with a key; their rows are not checked here.

    Args:
        patterns: folders of runs, or globs of such folders.
        own: folder of the run that asks.
        step: number of the step.
        stage: name of the artifact.
        key: digest of what it is made from.
    """
    for run in donors(patterns, own):
        for folder in sorted((run / "steps" / f"{step:06d}" / stage).glob("[0-9]*")):
            # What another process is still writing has no manifest yet.
            with suppress(StorageError, OSError):
                # Most are of another key: their manifests need not be understood.
                if not _mentions(folder / MANIFEST, key):
                    continue
                found = read_manifest(folder)
                # What it says of itself must be where it lies: its names become those of a folder here.
                if (found.key, found.step, found.stage) == (key, step, stage):
                    yield folder, found


def _mentions(path: Path, key: str) -> bool:
    with path.open("rb") as file:
        return key.encode() in file.read(LARGEST_JSON_BYTES)


def donors(patterns: Sequence[str], own: Path) -> Iterator[Path]:
    """Folders of runs, each once, in the order of the patterns; a pattern that matches none is no error."""
    seen = {own.resolve()}
    for pattern in patterns:
        if is_url(pattern):
            # Of runs in an object store, those that this machine has copies of; one that is named in full is brought.
            pattern = str(local_folder(pattern))
            if not glob.has_magic(pattern):
                refresh(Path(pattern))
        for path in map(Path, sorted(glob.glob(pattern))):  # noqa: PTH207 - pathlib's globs cannot be absolute
            if path.resolve() not in seen and (path / "run.json").is_file():
                seen.add(path.resolve())
                yield path


def take_over(
    run: RunWriter,
    source: Path,
    theirs: Manifest,
    *,
    policy_version: int,
    started_at: datetime,
    parents: Sequence[Artifact],
    made_from: Mapping[str, Any],
) -> Artifact:
    """Commit another run's artifact as the next attempt of this run's own.

    Args:
        run: this run.
        source: folder of the other run's attempt.
        theirs: its manifest; its key is what the artifact would be made from here.
        policy_version: see `Manifest`.
        started_at: when this run began with the stage.
        parents: this run's artifacts, whose digests are those of the other run's.
        made_from: see `Manifest`.

    Raises:
        StorageError: a part is missing, cut or changed, or retention has dropped the rows; nothing is committed.
    """
    with run.attempt(theirs.step, theirs.stage) as folder:
        for part in theirs.parts:
            there = stored_part(source, part.name)
            try:
                _link_or_copy(there, folder / there.name)
            except FileNotFoundError:
                raise StorageError(f"{there} is missing though {MANIFEST} names it") from None
        # What was checked is what this run has, whatever becomes of the other one's files.
        check_parts(folder, theirs)
        about = {name: getattr(theirs, name) for name in ("run_id", "lineage", "attempt", "digest", "seconds")}
        return run.commit_parts(
            folder,
            theirs.parts,
            key=theirs.key,
            policy_version=policy_version,
            started_at=started_at,
            parents=parents,
            made_from=made_from,
            metrics=theirs.metrics,
            shapes=theirs.shapes,
            # Its own maker may have taken it over itself: what counts is who computed it.
            notes={REUSED: about, **theirs.notes},
        )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, one without links, or too many links.
        shutil.copyfile(source, target)
        sync_file(target)


def reused(view: StepView) -> dict[str, dict[str, Any]]:
    """Artifacts of a step that were taken over, with the note about where from."""
    found = {}
    for stage in view.stages():
        with suppress(StorageError):
            manifest = view.manifest(stage)
            if manifest is not None and REUSED in manifest.notes:
                found[stage] = manifest.notes[REUSED]
    return found
