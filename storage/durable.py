"""Durable files: written aside, synced, renamed, and the folder synced, so that a name never shows half a file."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


LARGEST_JSON_BYTES = 16 << 20
"""Of a JSON file, or a line of one. A manifest of a thousand ranks is a hundredth of it."""

DEEPEST_JSON = 64
"""Sections within sections of a JSON value: what can be read here can be written and compared, too."""


class StorageError(RuntimeError):
    """What is on disk cannot be used, or cannot be written; trying again does not help."""


class RunLocked(StorageError):
    """Another live process writes to this run."""


def sync_file(path: Path) -> None:
    """Force a file's bytes to the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Force a folder's list of names to the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON text of `value`; a reader sees the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_json_line(path: Path, value: dict[str, Any]) -> None:
    """Add one line to a JSON-lines file; a torn last line, left by a crash, is closed first."""
    line = json.dumps(value, sort_keys=True, allow_nan=False)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """The value in a JSON file, which may come from anybody.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no JSON, or JSON that nothing here writes: too long, nested too deeply, or not finite.
    """
    with path.open("rb") as file:
        text = file.read(LARGEST_JSON_BYTES + 1)
    return parse_json(text)


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text, which may come from anybody.

    Raises:
        ValueError: it is no JSON, or JSON that nothing here writes: too long, nested too deeply, or not finite.
    """
    if len(text) > LARGEST_JSON_BYTES:
        raise ValueError(f"it is longer than {LARGEST_JSON_BYTES:,} bytes")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST_JSON} deep") from None
    _refuse_what_is_not_written(value)
    return value


def checked(kind: TypeAdapter[T], value: Any) -> T:
    """A value as the kind that it must be; ValueError, in one line, where it is not."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None


def _refuse_what_is_not_written(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > DEEPEST_JSON:
            raise ValueError(f"it is nested more than {DEEPEST_JSON} deep")
        if any(isinstance(one, float) and not math.isfinite(one) for one in level):
            raise ValueError("it holds a number that is not finite")
        below = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level, depth = [one for values in below for one in values], depth + 1


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON-lines file; a torn line, left by a crash, is no line."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def all_or_nothing(folder: Path, what: str) -> Iterator[Path]:
    """Make `folder` for one writer and remove it again when the block fails.

    Raises:
        FileExistsError: another writer has this folder.
        StorageError: the disk is full; nothing of the block is left.
    """
    others = folder.exists()
    try:
        # Within the try: a signal may raise right behind it.
        folder.mkdir(parents=True)
        yield folder
    except BaseException as error:
        if not others:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(no_space(folder.parent, what)) from error
        raise


@contextmanager
def full_disk_told(folder: Path, what: str) -> Iterator[None]:
    """Within the block a full disk is a StorageError that says where and what for."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(no_space(folder, what)) from error
        raise


def no_space(folder: Path, what: str, needed_bytes: int | None = None) -> str:
    """The sentence for a full disk: path, bytes needed, bytes free, ways out."""
    free = shutil.disk_usage(folder if folder.exists() else Path("/")).free
    need = f"{needed_bytes:,} bytes are needed and " if needed_bytes is not None else ""
    return (
        f"no space left in {folder} for {what}: {need}{free:,} bytes are free. Nothing half-written was kept. "
        "Free some space or choose another storage.root, then run the same command again."
    )
