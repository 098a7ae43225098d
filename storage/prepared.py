"""Folders that are made once for a key and used by every later run: one maker at a time, checked before every use."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.artifacts import MANIFEST
from storage.durable import StorageError, all_or_nothing, read_json, sha256_file, sync_file, sync_folder, write_json


@contextmanager
def sole_maker(folder: Path) -> Iterator[None]:
    """Wait until no other process makes this folder, then keep others waiting.

    The kernel gives the lock back when its holder dies, so a dead maker holds nothing.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_prepared(folder: Path, key: str, damaged: Callable[[str], None]) -> dict[str, Any] | None:
    """The manifest of a folder that is committed under this key with every file as committed; else None.

    Args:
        folder: where it lies.
        key: what it must have been made from.
        damaged: told why a committed folder cannot be used.
    """
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_json(folder / MANIFEST)
        made_from, files = manifest["key"], manifest["files"]
    except (ValueError, KeyError, TypeError):
        damaged(f"{folder / MANIFEST} is damaged")
        return None
    if made_from != key:
        damaged(f"{folder} was made from something else than its name says")
        return None
    found = file_digests(folder)
    if found != files:
        names = sorted(name for name in {*found, *files} if found.get(name) != files.get(name))
        damaged(f"{folder}: not as it was committed: {', '.join(names)}")
        return None
    return manifest


@contextmanager
def new_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder to fill beside `folder`, removed again when the block fails; call within `sole_maker`.

    Raises:
        StorageError: the disk is full; nothing of the block is left.
    """
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    with all_or_nothing(aside, what):
        yield aside


def commit_prepared(aside: Path, folder: Path, key: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Sync what was made aside, write its manifest last, and put it in place of whatever has its name.

    Args:
        aside: the folder from `new_folder`.
        folder: its final name.
        key: what it was made from.
        about: kept in the manifest.

    Returns:
        The manifest.

    Raises:
        StorageError: nothing was made.
    """
    files = file_digests(aside)
    if not files:
        raise StorageError(f"{aside} is empty; nothing to commit as {folder}")
    for path in aside.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    manifest = {"key": key, "files": files, **about}
    write_json(aside / MANIFEST, manifest)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    sync_folder(folder.parent)
    return manifest


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder but its manifest, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: sha256_file(path) for name, path in named.items() if name != MANIFEST}
