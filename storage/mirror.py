"""A copy's way into the object store: what is durable here is put there in the background, in the order it became so.

The store thus always shows a state that the folder had: whatever commits something (a manifest, a step's record) comes
after what it commits. Whoever writes into a copy holds its lease (`storage.lease`) for as long. Training waits for the
store only where it would get more than a few artifacts ahead of it; while the store is away it goes on, and the store
catches up.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from storage.copies import Copy, copy_around, copy_of, is_kept, order
from storage.durable import RunLocked, StorageError
from storage.lease import Lease, acquire, read
from storage.object_store import Object, StoreAway

AHEAD = 4
"""Committed artifacts that training may be ahead of a store that answers."""

WAIT_S = 60.0
"""How long the end of a run waits for a store that takes nothing."""

_WHOLE_BYTES = 8 * 2**20
"""Files up to this size are read before they are put, so that one that grows is put as it was at one moment."""

logger = logging.getLogger("grpoflow")


@dataclass(eq=False)
class _Item:
    """One file that is to be put, or removed; a file that changes while it is put gets another one."""

    is_put: bool


class Mirror:
    """Puts a copy's files into the store for as long as this process holds its lease. `hold` makes one."""

    def __init__(self, copy: Copy, lease: Lease, there: dict[str, Object]) -> None:
        self.copy = copy
        self.say: Callable[[str], None] = logger.warning
        self._lease = lease
        self._index = {path: (one.etag, one.size) for path, one in there.items()}
        # Path in the folder -> what is to be done with it, in the order in which it is done.
        self._queue: OrderedDict[str, _Item] = OrderedDict()
        self._artifacts: list[str] = []
        self._seen: dict[str, tuple[int, int]] = {}
        self._change = threading.Condition()
        self._away: str | None = None
        self._last_done = time.monotonic()
        self._closing = False
        self._lost: str | None = None
        self._threads = [
            threading.Thread(target=self._work, name="mirror", daemon=True),
            threading.Thread(target=self._renew, name="lease", daemon=True),
        ]

    def start(self, behind: Iterable[str]) -> None:
        """Begin, with what the store does not have yet."""
        for path in behind:
            self._queue[path] = _Item(is_put=True)
        for path in self.copy.removed():
            if not (self.copy.folder / path).exists():
                self._queue[path] = _Item(is_put=False)
        for thread in self._threads:
            thread.start()

    # ----------------------------------------------------------------------------------------------- told by the writer

    def changed(self, path: Path) -> None:
        """A file, or all files of a folder, are durable here and belong into the store.

        Raises:
            RunLocked: the lease is another process's by now.
        """
        self._check()
        is_folder = path.is_dir()
        files = path.rglob("*") if is_folder else [path]
        names = [one.relative_to(self.copy.folder).as_posix() for one in files if one.is_file()]
        names = sorted(filter(is_kept, names), key=order)
        with self._change:
            for name in names:
                self._queue.pop(name, None)
                self._queue[name] = _Item(is_put=True)
            if is_folder and names:
                self._artifacts.append(names[-1])
            self._change.notify_all()
            # A store that takes what it gets is waited for, so that what this machine alone has stays small.
            self._change.wait_for(lambda: len(self._artifacts) <= AHEAD or bool(self._away or self._lost))

    def removed(self, path: Path) -> None:
        """A file, or a folder with all its files, is gone here and is to go there."""
        name = path.relative_to(self.copy.folder).as_posix()
        with self._change:
            known = {*self._index, *self._queue}
            names = [one for one in known if one == name or one.startswith(f"{name}/")]
            # What names other files goes before them.
            for one in sorted(names, key=order, reverse=True):
                self.copy.note_removed(one)
                self._queue.pop(one, None)
                self._queue[one] = _Item(is_put=False)
            self._change.notify_all()

    def scan(self, pattern: str = "*") -> None:
        """Files of a pattern that changed since the last scan belong into the store."""
        for path in sorted(self.copy.folder.glob(pattern)):
            name = path.relative_to(self.copy.folder).as_posix()
            with suppress(FileNotFoundError):
                status = path.stat()
                stamp = (status.st_size, status.st_mtime_ns)
                if is_kept(name) and path.is_file() and self._seen.get(name) != stamp:
                    self._seen[name] = stamp
                    self.changed(path)

    def known(self) -> dict[str, tuple[str, int]]:
        """ETag and size of what the store has and keeps, by path."""
        with self._change:
            gone = {name for name, item in self._queue.items() if not item.is_put}
            return {name: about for name, about in self._index.items() if name not in gone}

    @property
    def behind(self) -> int:
        """Number of files that the store does not have yet."""
        with self._change:
            return len(self._queue)

    def close(self) -> None:
        """Wait for the store to have everything, and give the lease back.

        Raises:
            StorageError: it took nothing for `WAIT_S`; what it lacks is here, and goes there with the next command that
                writes to the run. RunLocked: the lease is another process's.
        """
        try:
            if self._lost is None:
                for pattern in ("*", "logs/*", "lineages/*"):
                    self.scan(pattern)
            with self._change:
                self._last_done = time.monotonic()
                while self._queue and self._lost is None and time.monotonic() - self._last_done < WAIT_S:
                    self._change.wait(0.5)
            self._check()
            if self._queue:
                why = self._away or "it is slow"
                raise StorageError(
                    f"{self.copy.url} lacks {len(self._queue)} files of {self.copy.folder}: {why}. "
                    "They are put there by the next command that writes to the run, such as grpoflow resume."
                )
        finally:
            with self._change:
                self._closing = True
                self._change.notify_all()
            for thread in self._threads:
                thread.join(20)
            self.copy.keep_index(self._index)
            _mirrors.pop(self.copy.folder, None)
            with suppress(StorageError):
                self._lease.release()

    def _check(self) -> None:
        if self._lost is not None:
            raise RunLocked(self._lost)

    # ---------------------------------------------------------------------------------------------------- in background

    def _renew(self) -> None:
        while not self._closing and self._lost is None:
            try:
                self._lease.renew()
                if not self.behind:
                    self._back()
            except RunLocked as error:
                with self._change:
                    self._lost = str(error)
                    self._change.notify_all()
                return
            except StorageError as error:
                self._gone(error)
            with self._change:
                pause = self._lease.holder.lease_s / (12 if self._away else 3)
                self._change.wait_for(lambda: self._closing, pause)

    def _work(self) -> None:
        pause = 0.2
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing)
                if self._closing or self._lost is not None:
                    return
                name, item = next(iter(self._queue.items()))
            if not self._lease.is_valid:
                # Renewing tells whether it still is this process's.
                time.sleep(0.2)
                continue
            try:
                known = self._put(name) if item.is_put else self._remove(name)
            except (StorageError, OSError) as error:
                self._gone(error)
                time.sleep(pause)
                pause = min(pause * 2, 5.0)
                continue
            pause = 0.2
            self._back()
            self._done(name, item, known)

    def _put(self, name: str) -> tuple[str, int] | None:
        path = self.copy.folder / name
        try:
            size = path.stat().st_size
            value = path.read_bytes() if size <= _WHOLE_BYTES else path
            return self.copy.bucket.put(f"{self.copy.key}/{name}", value), size
        except FileNotFoundError:
            # Retention has removed it since.
            return None

    def _remove(self, name: str) -> tuple[str, int] | None:
        self.copy.bucket.delete([f"{self.copy.key}/{name}"])
        return None

    def _done(self, name: str, item: _Item, known: tuple[str, int] | None) -> None:
        with self._change:
            self._last_done = time.monotonic()
            # A file that was changed while it was put has another item by now, and is put again.
            if self._queue.get(name) is item:
                del self._queue[name]
            if known is None:
                self._index.pop(name, None)
            else:
                self._index[name] = known
            if name in self._artifacts:
                self._artifacts.remove(name)
            if not self._queue:
                self.copy.settle_removed()
            self._change.notify_all()

    def _gone(self, error: Exception) -> None:
        with self._change:
            first, self._away = self._away is None, str(error)
            self._change.notify_all()
        if first and not self._closing:
            more = "; what is made is kept here, and the store catches up" if isinstance(error, StoreAway) else ""
            self.say(f"warning: {error}{more}")

    def _back(self) -> None:
        with self._change:
            was, self._away = self._away, None
        if was is not None:
            self.say(f"{self.copy.url} takes files again")


# ------------------------------------------------------------------------------------------------------- this process's

_mirrors: dict[Path, Mirror] = {}


def hold(folder: Path) -> Mirror | None:
    """Take the lease of a copy, bring the copy in step with the store, and begin to mirror it; None: it is no copy.

    What this machine wrote last and did not get there goes there. Where another machine wrote last, the store's state
    is taken, and what is here alone is set aside.

    Raises:
        RunLocked: a process of this or another machine holds the lease. StoreAway: the store does not answer.
    """
    copy = copy_of(folder)
    if copy is None:
        return None
    with copy.alone():
        name, _ = copy.identity()
        last = read(copy.bucket, copy.lease_key)[0]
        mine = copy.wrote_last(last)
        lease, before = acquire(copy.bucket, copy.lease_key, name, lambda number: copy.remember(name, number))
        try:
            there = copy.listing()
            mine = mine and before is not None and last is not None and before.count == last.count
            if not mine and there:
                copy.folder.mkdir(parents=True, exist_ok=True)
                copy.bring(there)
            behind = _behind(copy, there) if mine or not there else []
            mirror = Mirror(copy, lease, there)
            mirror.start(behind)
        except BaseException:
            lease.release()
            raise
    _mirrors[copy.folder] = mirror
    return mirror


@contextmanager
def mirrored(folder: Path) -> Iterator[Mirror | None]:
    """Within the block this process holds the lease of a folder, if it is a copy, and mirrors it; see `hold`."""
    mirror = hold(folder)
    try:
        yield mirror
    except BaseException:
        if mirror is not None:
            with suppress(StorageError):
                mirror.close()
        raise
    if mirror is not None:
        mirror.close()


def _behind(copy: Copy, there: dict[str, Object]) -> list[str]:
    """Files here that the store does not have as they are, in the order in which they go there."""
    names = []
    for name, path in copy.files().items():
        one = there.get(name)
        # Rows and policies are never written anew; an ETag that is no MD5 costs a put.
        same = one is not None and one.size == path.stat().st_size
        if same and one is not None and name.endswith((".json", ".jsonl", ".yaml")):
            same = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == one.etag.strip('"')
        if not same:
            names.append(name)
    return sorted(names, key=order)


def mirror_of(path: Path) -> Mirror | None:
    """The mirror of this process that a file lies in; None: there is none."""
    return next((mirror for folder, mirror in list(_mirrors.items()) if path.is_relative_to(folder)), None)


def is_held(folder: Path) -> bool:
    """Whether this process writes from a copy."""
    return folder in _mirrors


def changed(path: Path) -> None:
    """Tell the mirror, if there is one, that a file or all files of a folder are durable; see `Mirror.changed`."""
    mirror = mirror_of(path)
    if mirror is not None:
        mirror.changed(path)


def removed(path: Path) -> None:
    """Tell the mirror, if there is one, that a file or a folder is gone."""
    mirror = mirror_of(path)
    if mirror is not None:
        mirror.removed(path)


def listed(folder: Path, pattern: str) -> dict[str, int]:
    """Files of a folder by name, with their sizes; of a copy's folder those that are only in the store, too."""
    found = {path.name: path.stat().st_size for path in folder.glob(pattern)}
    copy = copy_around(folder / "x")
    if copy is not None:
        mirror = _mirrors.get(copy.folder)
        known = mirror.known() if mirror else copy.index()
        prefix = f"{folder.relative_to(copy.folder).as_posix()}/"
        for path, (_, size) in known.items():
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and "/" not in name and fnmatch(name, pattern):
                found.setdefault(name, size)
    return found
