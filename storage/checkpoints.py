"""Checkpoints: policy versions on disk, written aside, committed by a manifest of file digests, and kept by number.

What a checkpoint has to hold is what later steps take from earlier ones and no stored batch can give back: the trained
weights, Adam's moments and step counts, the policy version, which is the place in the learning-rate schedule, and the
counters in its manifest (see `save_checkpoint`). There is no random state: every seed is a function of the run's seed,
the step and the prompt, and no generator belongs to the process.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from storage.artifacts import MANIFEST
from storage.copies import fetch
from storage.durable import (
    StorageError,
    all_or_nothing,
    checked,
    no_space,
    read_json,
    sha256_file,
    sha256_json,
    sync_file,
    sync_folder,
    write_json,
)
from storage.mirror import changed, removed
from storage.schema import FORMAT_VERSION

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A committed policy version.

    Attributes:
        step: policy version: the weights after this many steps.
        lineage: the lineage whose step it is.
        folder: where it lies: `checkpoints/000040`, of a later lineage `checkpoints/000040-0002`.
        manifest: files with sizes and digests, and what the writer said of them.
    """

    step: int
    lineage: int
    folder: Path
    manifest: dict[str, Any]


Seen = Callable[[Checkpoint], bool]


class _File(TypedDict):
    bytes: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
"""A name that lies in the manifest's folder and nowhere else."""

_FILES: TypeAdapter[dict[_FileName, _File]] = TypeAdapter(dict[_FileName, _File])


def _everything(_: Checkpoint) -> bool:
    return True


def _nobody(_: str) -> None:
    pass


# -------------------------------------------------------------------------------------------------------------- writing


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    expected_bytes: int,
    about: Mapping[str, Any],
    lineage: int = 1,
) -> Checkpoint:
    """Let `write` fill a folder that no reader sees, sync it, commit it by a manifest, and give it its name.

    A folder that has the name already is replaced, and stays until the new one is complete.

    Args:
        root: the run's folder.
        step: policy version.
        write: writes the files, flat, into the folder it is given.
        expected_bytes: size to look for on the disk first.
        about: kept in the manifest. The training loop puts there `run_id`, `policy_version`, `weights_digest`,
            `kl_coef`, the KL controller's weight of the next step, and `generate_calls`, those made up to this step.
        lineage: the lineage that the step belongs to.

    Raises:
        StorageError: the disk is too full, or nothing was written; older checkpoints are untouched and nothing
            half-written is left.
    """
    folder = root / "checkpoints" / folder_name(step, lineage)
    folder.parent.mkdir(exist_ok=True)
    drop_leftovers(root)
    what = f"checkpoint {folder.name}"
    if shutil.disk_usage(folder.parent).free < expected_bytes:
        raise StorageError(no_space(folder.parent, what, expected_bytes))
    with _written_aside(folder, what, expected_bytes) as aside:
        write(aside)
        files = {path.name: _synced(path) for path in sorted(aside.iterdir())}
        manifest = {**about, "format_version": FORMAT_VERSION, "step": step, "lineage": lineage, "files": files}
        write_json(aside / MANIFEST, {**manifest, "checksum": sha256_json(manifest)})
        _require_files(files, aside)
        _put_in_place(aside, folder)
    return Checkpoint(step, lineage, folder, manifest)


def folder_name(step: int, lineage: int) -> str:
    """Name of a checkpoint's folder."""
    return f"{step:06d}" if lineage == 1 else f"{step:06d}-{lineage:04d}"


@contextmanager
def _written_aside(folder: Path, what: str, needed_bytes: int) -> Iterator[Path]:
    """A folder beside `folder`, removed again when the block fails; the error of a full disk says what is needed."""
    try:
        with all_or_nothing(_aside(folder), what) as aside:
            yield aside
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            raise StorageError(no_space(folder.parent, what, needed_bytes)) from error.__cause__
        raise


def _synced(path: Path) -> dict[str, Any]:
    sync_file(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _put_in_place(aside: Path, folder: Path) -> None:
    """Give a complete folder its name; from here on it is the checkpoint."""
    if folder.exists():
        folder.rename(_aside(folder, "replaced"))
    aside.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(_aside(folder, "replaced"), ignore_errors=True)
    changed(folder)


def _aside(folder: Path, why: str = "new") -> Path:
    return folder.with_name(f".{folder.name}.{why}.aside")


def drop_leftovers(root: Path) -> list[str]:
    """Remove what a killed save or pruning left, and return the names; none of it has the name of a checkpoint."""
    left = sorted((root / "checkpoints").glob(".*.aside"))
    for folder in left:
        shutil.rmtree(folder)
    return [folder.name for folder in left]


# -------------------------------------------------------------------------------------------------------------- reading


def checkpoints(root: Path, skipped: Say = _nobody, seen: Seen = _everything) -> list[Checkpoint]:
    """All committed checkpoints, oldest step first; their files are not checked.

    Args:
        root: the run's folder.
        skipped: told of every folder that is no checkpoint, or whose manifest cannot be used.
        seen: which of them exist for the reader's lineage.
    """
    found = []
    for folder in sorted((root / "checkpoints").glob("[!.]*")):
        try:
            found.append(_read(folder))
        except StorageError as error:
            skipped(f"checkpoint {folder.name} is skipped: {error}")
    return sorted(filter(seen, found), key=lambda checkpoint: (checkpoint.step, checkpoint.lineage))


def _read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, by its manifest.

    Raises:
        StorageError: there is none, or the manifest is damaged, newer, or of another step or lineage.
    """
    path = folder / MANIFEST
    named = re.fullmatch(r"(\d{6,})(?:-(\d{4,}))?", folder.name)
    if not path.is_file():
        raise StorageError(f"{folder} has no {MANIFEST}, so it was never committed")
    try:
        manifest = read_json(path)
        checksum = manifest.pop("checksum", None)
        version, step = int(manifest["format_version"]), int(manifest["step"])
        lineage = int(manifest.get("lineage", 1))
        files = checked(_FILES, manifest["files"])
        _require_files(files, folder)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StorageError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if version > FORMAT_VERSION:
        raise StorageError(f"{path} has format {version}, newer than this version's {FORMAT_VERSION}. Upgrade grpoflow")
    if not named or (int(named[1]), int(named[2] or 1)) != (step, lineage):
        raise StorageError(f"{path} is of step {step} and lineage {lineage}, which its folder's name does not say")
    if checksum not in (None, sha256_json(manifest)):
        raise StorageError(f"{path} has changed since it was committed: its checksum is not that of the rest")
    return Checkpoint(step, lineage, folder, manifest)


def _require_files(files: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Refuse a checkpoint without files or with an empty one: neither can hold a policy.

    Raises:
        StorageError: it is one.
    """
    empty = sorted(name for name, file in files.items() if file["bytes"] == 0)
    if empty or not files:
        raise StorageError(f"{folder / empty[0]} is empty" if empty else f"{folder / MANIFEST} names no file")


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Compare every file with the manifest.

    A file that this process compared before, and that has not changed since, is not read again.

    Raises:
        StorageError: a file is missing, cut or changed.
    """
    for name, want in checkpoint.manifest["files"].items():
        path = checkpoint.folder / name
        if not path.is_file() and not fetch(path):
            raise StorageError(f"{path} is missing though the checkpoint's manifest names it")
        status = path.stat()
        if status.st_size != want["bytes"]:
            raise StorageError(f"{path} has {status.st_size} bytes but was committed with {want['bytes']}")
        if _sha256(path, status.st_ino, status.st_mtime_ns, status.st_ctime_ns) != want["sha256"]:
            raise StorageError(f"{path} has changed since it was committed: its SHA-256 is not the manifest's")


@functools.lru_cache(maxsize=256)
def _sha256(path: Path, *_: int) -> str:
    """SHA-256 of a file, read once for the inode and times that are given with it."""
    return sha256_file(path)


def intact_checkpoints(root: Path, skipped: Say, seen: Seen = _everything) -> Iterator[Checkpoint]:
    """Checkpoints whose files are as committed, newest step first; `skipped` is told of each that is not."""
    for checkpoint in reversed(checkpoints(root, skipped, seen)):
        try:
            check_checkpoint(checkpoint)
        except StorageError as error:
            skipped(f"checkpoint {checkpoint.folder.name} is skipped: {error}")
        else:
            yield checkpoint


# -------------------------------------------------------------------------------------------------------------- keeping


def prune_checkpoints(root: Path, keep: int | None, skipped: Say = _nobody, seen: Seen = _everything) -> list[int]:
    """Remove the checkpoints before the newest `keep` intact ones; return their steps.

    A damaged one never counts towards `keep`, and a folder without a usable manifest is left alone: who put it there
    may want it.

    Args:
        root: the run's folder.
        keep: how many; None: all.
        skipped: told of every one that does not count.
        seen: which exist for the writer's lineage; others are left alone.
    """
    drop_leftovers(root)
    if keep is None:
        return []
    kept = [checkpoint for _, checkpoint in zip(range(keep), intact_checkpoints(root, skipped, seen), strict=False)]
    if len(kept) < keep:
        return []
    oldest = (kept[-1].step, kept[-1].lineage)
    gone = [each for each in checkpoints(root, seen=seen) if (each.step, each.lineage) < oldest]
    for checkpoint in gone:
        remove_checkpoint(checkpoint)
    return [checkpoint.step for checkpoint in gone]


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Remove one checkpoint; it loses its name first, so that no kill leaves half of it under that name."""
    aside = _aside(checkpoint.folder, "removed")
    checkpoint.folder.rename(aside)
    sync_folder(aside.parent)
    removed(checkpoint.folder)
    shutil.rmtree(aside)
