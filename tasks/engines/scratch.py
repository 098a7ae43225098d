"""Folders that a process needs while it runs. Their names tell whose they are, so that what a kill left can go."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil


def own_folder(place: Path, name: str) -> Path:
    """Make an empty folder NAME-PID-… in an existing one, and remove those of this user's processes that are gone.

    A process is known by its number within its namespace: containers that share a folder do not see each other's.

    Args:
        place: where to make it.
        name: what its name begins with.
    """
    namespace = _namespace()
    theirs = re.compile(rf"{re.escape(name)}-(\d+)-{namespace}-[^-]+")
    for left in place.iterdir():
        owner = theirs.fullmatch(left.name)
        if owner is not None and not psutil.pid_exists(int(owner[1])) and _is_ours(left):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-{namespace}-", dir=place))


def _namespace() -> str:
    """In which process numbers count, in hexadecimal; 0 where the system has but one."""
    try:
        return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return "0"


def _is_ours(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False
