"""Numbered slots of one machine, such as its devices: a slot is held through a kernel lock, which dies with its holder.

No lease: a holder that is too busy to say a word keeps its slot, and one that is killed, however, has given it back.
The lock can be handed to a child process by an inherited descriptor; then the child's life is the lock's life. Waiting
is first come, first served. The folder should be on a disk of this machine: a network file system may lose a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

POLL_S = 0.1
"""How often somebody who waits looks whether it is their turn."""

FOREVER = float("inf")

SLOTS = ".slots"
"""Folder of this machine's slots, in `storage.root`: runs of sweeps and of schedules share them."""


@dataclass(frozen=True)
class Holder:
    """Who holds a slot.

    Attributes:
        number: the slot's, from 0.
        pid: of the process that holds it.
        since: when the slot was taken.
        about: what the holder said of itself.
    """

    number: int
    pid: int
    since: datetime
    about: Mapping[str, Any]


class Slot:
    """A slot that this process holds. Leaving it as a context manager gives it back, unless a child has it."""

    def __init__(self, number: int, descriptor: int, about: Mapping[str, Any]) -> None:
        self.number = number
        self._descriptor: int | None = descriptor
        self._about = dict(about)
        self._write(os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def say(self, **about: Any) -> None:
        """Say more of the holder, for whoever asks."""
        self._about |= about
        self._write(os.getpid())

    def start(self, command: Sequence[str], *, also: Sequence[Slot] = (), **options: Any) -> subprocess.Popen[Any]:
        """Start a process that holds the slot from now on, until it ends; this process gives it up.

        Its own children do not inherit the descriptor, unless it forks without executing a program.

        Args:
            command: of the process.
            also: other slots that it is to hold too.
            options: for `subprocess.Popen`.
        """
        handed = (self, *also)
        child = subprocess.Popen(command, pass_fds=[slot._held() for slot in handed], **options)
        for slot in handed:
            slot._write(child.pid)
            slot._close()
        return child

    def release(self) -> None:
        """Give the slot back; nothing happens when a child has it or it was given back before."""
        if self._descriptor is not None:
            # Unlocked, not only closed: a forked child may hold a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _held(self) -> int:
        assert self._descriptor is not None, "the slot was given up"
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, pid: int) -> None:
        text = json.dumps({"pid": pid, "since": datetime.now(UTC).isoformat(), "about": self._about})
        os.pwrite(self._held(), text.encode(), 0)
        os.ftruncate(self._held(), len(text.encode()))


def acquire(
    folder: Path,
    count: int,
    about: Mapping[str, Any] | None = None,
    *,
    wait_s: float = FOREVER,
    most_waiting: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> Slot | None:
    """Take a free slot, the lowest number first.

    Args:
        folder: where the slots' files are; those who share slots name the same folder.
        count: slots there are; of two callers with different counts each keeps to its own.
        about: shown to whoever asks who holds it; JSON values.
        wait_s: how long to wait for one; 0: do not wait.
        most_waiting: do not wait either when so many wait already.
        check: called while waiting; what it raises ends the wait.

    Returns:
        The slot, or None when there was none in that time.

    Raises:
        ValueError: there are no slots.
    """
    if count < 1:
        raise ValueError(f"{count} slots in {folder}: there must be one at least")
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        ticket: Path | None = None
        while True:
            check()
            with _gate(folder):
                queue = _live_tickets(folder)
                if queue[:1] == ([] if ticket is None else [ticket]) and (slot := _take(folder, count, about or {})):
                    return slot
                if ticket is None:
                    if wait_s <= 0 or (most_waiting is not None and len(queue) >= most_waiting):
                        return None
                    ticket = stack.enter_context(_queued(folder))
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)


def holders(folder: Path, count: int) -> list[Holder]:
    """Who holds which of the slots now."""
    found = []
    with _gate(folder):
        for number in range(count):
            try:
                descriptor = os.open(_file(folder, number), os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                if not _lock(descriptor):
                    found.append(_holder(number, os.read(descriptor, 1 << 20)))
            finally:
                os.close(descriptor)
    return found


def waiting(folder: Path) -> int:
    """How many processes wait for a slot."""
    with _gate(folder):
        return len(_live_tickets(folder))


def _holder(number: int, text: bytes) -> Holder:
    try:
        said = json.loads(text)
        return Holder(number, said["pid"], datetime.fromisoformat(said["since"]), said["about"])
    except (ValueError, KeyError):  # its holder was killed between taking the lock and its word
        return Holder(number, 0, datetime.now(UTC), {})


def _take(folder: Path, count: int, about: Mapping[str, Any]) -> Slot | None:
    for number in range(count):
        descriptor = os.open(_file(folder, number), os.O_RDWR | os.O_CREAT, 0o644)
        if _lock(descriptor):
            return Slot(number, descriptor, about)
        os.close(descriptor)
    return None


def _file(folder: Path, number: int) -> Path:
    return folder / f"slot-{number:03d}"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _gate(folder: Path) -> Iterator[None]:
    """One process at a time looks at the locks: a look takes them for a moment."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "gate").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _queued(folder: Path) -> Iterator[Path]:
    """Stand in the queue; called within the gate."""
    last = max((int(path.name.removeprefix("ticket-")) for path in folder.glob("ticket-*")), default=0)
    path = folder / f"ticket-{last + 1:09d}"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _live_tickets(folder: Path) -> list[Path]:
    """Tickets of those who wait, first come first; those of the dead are removed. Called within the gate."""
    live = []
    for path in sorted(folder.glob("ticket-*")):
        try:
            with path.open("r+") as file:
                if _lock(file.fileno()):
                    path.unlink(missing_ok=True)
                else:
                    live.append(path)
        except FileNotFoundError:
            continue
    return live


def visible_devices(environment: Mapping[str, str], slot: int, per_slot: int) -> str:
    """`CUDA_VISIBLE_DEVICES` of a slot.

    Raises:
        ValueError: there are not so many devices.
    """
    here = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    first, last = slot * per_slot, (slot + 1) * per_slot
    if here and last > len(here):
        raise ValueError(
            f"slot {slot} needs devices {first} to {last - 1}, and CUDA_VISIBLE_DEVICES has {len(here)}: lower slots "
            "or devices_per_slot"
        )
    return ",".join(here[first:last] or map(str, range(first, last)))
