"""Whether a folder keeps the promises that runs rest on: rename, sync, locks. Really tried, in a temporary subfolder.

What two processes of one machine see is no proof for two machines: a network file system is named as such.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from flows.doctor.finding import Finding
from flows.doctor.subject import Subject
from storage.durable import sync_file, sync_folder

if TYPE_CHECKING:
    from storage import Run

ANSWER_TIMEOUT_S = 5.0
"""How long the second process may take; a lock that waits for a server that is away takes for ever."""

NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "fuse", "9p", "virtiofs")

_OTHER_PROCESS = """
import fcntl, os, sys
folder = sys.argv[1]
lock = open(os.path.join(folder, "lock"), "a")
fcntl.flock(lock, fcntl.LOCK_EX)
aside = os.path.join(folder, "aside")
with open(aside, "w") as file:
    file.write("new")
    file.flush()
    os.fsync(file.fileno())
os.replace(aside, os.path.join(folder, "seen"))
print("held", flush=True)
sys.stdin.read()
"""
"""Holds the lock and replaces a file, then waits; its standard input ends with its parent."""


def check_folder(subject: Subject) -> Iterator[Finding]:
    """Every promise by itself."""
    folder = subject.place
    there = folder == subject.folder.expanduser().absolute()
    where = str(folder) if there else f"{folder} ({subject.folder} is not there yet)"
    kind = _file_system(folder)
    try:
        tried = Path(tempfile.mkdtemp(prefix=".doctor-", dir=folder))
    except OSError as error:
        advice = "Mend the rights, or choose another storage.root or trainer.default_local_dir."
        yield Finding("folder", "error", f"{where} cannot be written: {error.strerror or error}", advice)
        return
    try:
        if kind.startswith(NETWORK_FILE_SYSTEMS):
            advice = "One machine at a time should write a run. On NFS, use version 4 and a short actimeo."
            yield Finding("folder", "warn", f"{where} can be written; it is a network file system ({kind})", advice)
        else:
            yield Finding("folder", "ok", f"{where} can be written ({kind})")
        yield _rename(tried)
        yield _sync(tried)
        yield from _two_processes(tried)
    finally:
        shutil.rmtree(tried, ignore_errors=True)


_ELSEWHERE = "Choose a storage.root on a local disk: {}"


def _rename(folder: Path) -> Finding:
    """Files are committed by a rename over the old one, folders by a rename that must not swallow another one."""
    old, new = folder / "file", folder / "file.aside"
    old.write_text("old")
    new.write_text("new")
    with old.open() as reader:
        try:
            new.replace(old)
        except OSError as error:
            advice = _ELSEWHERE.format("a commit replaces files.")
            return Finding("folder/rename", "error", f"over an existing file: {error.strerror}", advice)
        first, second = reader.read(), old.read_text()
    if (first, second) != ("old", "new"):
        found = f"an open reader read {first!r} after the rename and a new one {second!r}"
        advice = _ELSEWHERE.format("readers would see half a commit.")
        return Finding("folder/rename", "error", found, advice)
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    (folder / "two" / "file").touch()
    with suppress(OSError):
        (folder / "one").rename(folder / "two")
        advice = _ELSEWHERE.format("a new run could hide another one.")
        return Finding("folder/rename", "error", "a folder was renamed over one that is not empty", advice)
    return Finding("folder/rename", "ok", "replaces a file at once; does not replace a folder that is not empty")


def _sync(folder: Path) -> Finding:
    seconds = []
    try:
        for number in range(3):
            start = time.perf_counter()
            file = folder / f"synced-{number}"
            file.write_bytes(b"x" * 4096)
            sync_file(file)
            sync_folder(folder)
            seconds.append(time.perf_counter() - start)
    except OSError as error:
        advice = _ELSEWHERE.format("a commit is only safe once the folder is synced.")
        return Finding("folder/sync", "error", f"file and folder cannot be synced: {error.strerror}", advice)
    # The first one may wait for what others have written.
    took = median(seconds)
    if took > 0.5:
        advice = "Every commit waits for it about three times; a faster disk helps."
        return Finding("folder/sync", "warn", f"file and folder took {took:.1f} s", advice)
    return Finding("folder/sync", "ok", f"file and folder, {1000 * took:.0f} ms")


def _two_processes(folder: Path) -> Iterator[Finding]:
    advice = _ELSEWHERE.format("two processes could write one run.")
    (folder / "seen").write_text("old")
    with _other_process(folder) as other, (folder / "lock").open("a+") as lock:
        if not _answers(other):
            found = f"a second process could not lock a file within {ANSWER_TIMEOUT_S:g} s"
            yield Finding("folder/lock", "error", found, advice)
            return
        seen, excluded = (folder / "seen").read_text(), not _locks(lock.fileno())
        other.kill()
        other.wait()
        released = _locks_soon(lock.fileno())
    if not excluded:
        yield Finding("folder/lock", "error", "two processes hold the same lock (flock)", advice)
    elif not released:
        found = "a lock (flock) outlives the process that held it"
        yield Finding("folder/lock", "error", found, _ELSEWHERE.format("a run could not go on after a kill."))
    else:
        yield Finding("folder/lock", "ok", "excludes a second process, and ends with its process after kill -9")
    if seen == "new":
        yield Finding("folder/visibility", "ok", "what another process here renamed is seen at once")
    else:
        found = "a file that another process replaced still shows its old content"
        advice = _ELSEWHERE.format("ranks hand each other their parts through files.")
        yield Finding("folder/visibility", "error", found, advice)


@contextmanager
def _other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-I", "-S", "-c", _OTHER_PROCESS, str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _answers(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)
    return bool(ready) and process.stdout.readline() == "held\n"


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _locks_soon(descriptor: int) -> bool:
    end = time.monotonic() + 2.0
    while not (got := _locks(descriptor)) and time.monotonic() < end:
        time.sleep(0.02)
    return got


def _file_system(folder: Path) -> str:
    """Type of the file system that a folder is on, by the longest mount point above it."""
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
    # Of two mounts at one place, the later one is seen.
    return max(enumerate(mounts), key=lambda one: (len(one[1].mountpoint), one[0]))[1].fstype if mounts else "unknown"


# ------------------------------------------------------------------------------------------------------------- writers


def check_locks(subject: Subject) -> Iterator[Finding]:
    """Who writes the runs here, and which run is held by a process that is not its writer any more."""
    from storage import Run, StorageError

    if subject.run is not None:
        runs = [subject.run]
    else:
        # storage.root, its projects, their runs.
        paths = (path for depth in ("", "*/", "*/*/") for path in subject.folder.expanduser().glob(f"{depth}run.json"))
        runs = [Run(path.parent) for path in sorted(paths)]
    states: dict[str, list[str]] = {}
    for run in runs:
        try:
            state = run.state
        except StorageError as error:
            yield Finding("locks", "warn", str(error), "Restore it from a copy, or move it away.")
            continue
        states.setdefault(state, []).append(run.root.name)
        if state == "running":
            yield from _held(run)
    parts = [f"{len(names)} {state}" for state, names in sorted(states.items())]
    crashed = states.get("crashed", [])
    advice = f"`grpoflow resume RUN` goes on with {', '.join(crashed[:3])}; no lock is in its way." if crashed else ""
    yield Finding("locks", "ok", f"{len(runs)} runs{': ' + ', '.join(parts) if parts else ''}", advice)


def _held(run: Run) -> Iterator[Finding]:
    """A lock is the kernel's: whoever inherited the open file of a dead writer holds it on."""
    owner = run.owner() or {}
    pid, host = owner.get("pid", 0), owner.get("host", "unknown")
    name = f"locks/{run.root.name}"
    if host != socket.gethostname():
        yield Finding(name, "ok", f"written by process {pid} on {host} since {owner.get('since', '?')}")
    elif psutil.pid_exists(pid):
        yield Finding(name, "ok", f"written by process {pid} since {owner.get('since', '?')}")
    else:
        holders = ", ".join(map(str, _holders(run.root / "lock"))) or "none that can be seen from here"
        advice = "Nothing can write this run before they end: look what they are, and end them."
        yield Finding(name, "error", f"its writer {pid} is gone, but its lock is held; open in: {holders}", advice)


def _holders(lock: Path) -> Iterator[int]:
    """Processes that have the file open, as far as this user may look."""
    wanted = lock.stat()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(descriptor.stat(), wanted):
                        yield process.pid
                        break
