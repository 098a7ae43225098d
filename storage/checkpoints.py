"""Checkpoints: policy versions on disk, committed by a manifest of file digests and kept by number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.artifacts import MANIFEST
from storage.durable import StorageError, all_or_nothing, no_space, sha256_file, sync_file, sync_folder, write_json
from storage.schema import FORMAT_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A committed policy version.

    Attributes:
        step: policy version: the weights after this many steps.
        folder: where it lies.
        manifest: files with sizes and digests, and what the writer said of them.
    """

    step: int
    folder: Path
    manifest: dict[str, Any]


def save_checkpoint(
    root: Path, step: int, write: Callable[[Path], None], *, expected_bytes: int, about: dict[str, Any]
) -> Checkpoint:
    """Let `write` fill a new folder, sync it and commit it.

    Args:
        root: the run's folder.
        step: policy version.
        write: writes the files, flat, into the folder it is given.
        expected_bytes: size to look for on the disk first.
        about: kept in the manifest.

    Raises:
        StorageError: the disk is too full; older checkpoints are untouched and nothing half-written is left.
    """
    folder = root / "checkpoints" / f"{step:06d}"
    folder.parent.mkdir(exist_ok=True)
    if shutil.disk_usage(folder.parent).free < expected_bytes:
        raise StorageError(no_space(folder.parent, f"checkpoint {step}", expected_bytes))
    if folder.exists():
        shutil.rmtree(folder)
    with all_or_nothing(folder, f"checkpoint {step}"):
        write(folder)
        files = {}
        for path in sorted(folder.iterdir()):
            sync_file(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files, **about}
        write_json(folder / MANIFEST, manifest)
        sync_folder(folder.parent)
    return Checkpoint(step, folder, manifest)


def checkpoints(root: Path) -> list[Checkpoint]:
    """All committed checkpoints, oldest first; their files are not checked."""
    found = []
    for path in sorted((root / "checkpoints").glob(f"[0-9]*/{MANIFEST}")):
        try:
            manifest = json.loads(path.read_bytes())
            _ = manifest["files"].items()
            found.append(Checkpoint(int(path.parent.name), path.parent, manifest))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Compare every file with the manifest.

    Raises:
        StorageError: a file is missing, cut or changed.
    """
    for name, want in checkpoint.manifest["files"].items():
        path = checkpoint.folder / Path(name).name
        if not path.is_file():
            raise StorageError(f"{path} is missing though the checkpoint's manifest names it")
        if path.stat().st_size != want["bytes"] or sha256_file(path) != want["sha256"]:
            raise StorageError(f"{path} is not the file that was committed: its size or SHA-256 differs")


def intact_checkpoints(root: Path, skipped: Callable[[str], None]) -> Iterator[Checkpoint]:
    """Checkpoints whose files are as committed, newest first; `skipped` is told of each that is not."""
    for checkpoint in reversed(checkpoints(root)):
        try:
            check_checkpoint(checkpoint)
        except StorageError as error:
            skipped(f"checkpoint {checkpoint.step} is skipped: {error}")
        else:
            yield checkpoint


def prune_checkpoints(root: Path, keep: int | None) -> list[int]:
    """Remove all but the newest `keep` committed checkpoints; return the steps removed."""
    removed = []
    for checkpoint in checkpoints(root)[: -keep if keep else None] if keep else []:
        (checkpoint.folder / MANIFEST).unlink()
        shutil.rmtree(checkpoint.folder)
        removed.append(checkpoint.step)
    return removed
