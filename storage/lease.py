"""The lease of a folder in an object store: one writer at a time, on whatever machine, and none that is dead for ever.

The lease is the object `lease.json`. It is only ever put on the condition that it still is what was read (If-Match, or
If-None-Match for the first one), so of two that want it one gets it. The holder puts it anew every third of `LEASE_S`.
Who finds it held watches it: an ETag that stays the same for the whole of its time is that of a dead holder, whose
lease may be taken. Clocks of two machines are never compared. A holder that could not renew for that long uploads
nothing until it has renewed; when the lease is another's by then, its run ends.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from storage.durable import RunLocked, StorageError
from storage.object_store import Bucket, ConditionFailed, NotThere

LEASE = "lease.json"
LEASE_S = 30.0
"""How long a holder may be silent before its lease can be taken."""


@dataclass(frozen=True)
class Holder:
    """Who holds or held a lease: what the object says.

    Attributes:
        copy: id of the holder's copy of the folder.
        count: number of times that the lease was taken, this time included.
        host, pid, started, machine: its process; `machine` is one boot of one machine, or of one container on it.
        since: when it was taken.
        lease_s: how long it lasts without being renewed.
        released: the holder has given it back.
        nonce: other in every put, so that the ETag is.
    """

    copy: str
    count: int
    host: str
    pid: int
    started: float
    machine: str
    since: str
    lease_s: float
    released: bool = False
    nonce: str = ""

    def to_bytes(self) -> bytes:
        """The object."""
        return json.dumps({**asdict(self), "nonce": uuid4().hex}, indent=1).encode()

    @classmethod
    def from_bytes(cls, value: bytes, where: str) -> Holder:
        """What an object says.

        Raises:
            StorageError: it is no lease.
        """
        try:
            values: dict[str, Any] = json.loads(value)
            types = {"copy": str, "count": int, "host": str, "pid": int, "machine": str, "since": str, "released": bool}
            if not all(isinstance(values[name], kind) for name, kind in types.items()):
                raise TypeError("a value has another type")
            numbers = {name: float(values[name]) for name in ("started", "lease_s")}
            return cls(**{**{name: values[name] for name in types}, **numbers, "nonce": str(values["nonce"])})
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{where} is no lease ({error!r}). Remove it when nobody writes to the run.") from error

    @property
    def is_dead(self) -> bool:
        """Whether this machine knows that the holder's process is gone."""
        import psutil

        if self.machine != this_machine():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1
        except psutil.NoSuchProcess:
            return True


def this_machine() -> str:
    """One boot of this machine, and one space of process numbers on it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        import psutil

        return f"{socket.gethostname()}/{psutil.boot_time():.0f}"


class Lease:
    """A lease that this process holds."""

    def __init__(self, bucket: Bucket, key: str, holder: Holder, etag: str, renewed: float) -> None:
        self._bucket, self._key, self._etag = bucket, key, etag
        self.holder = holder
        self._renewed = renewed
        self.lost = False
        """Another process has it now."""

    @property
    def is_valid(self) -> bool:
        """Whether nobody else can have taken it yet."""
        return not self.lost and time.monotonic() - self._renewed < self.holder.lease_s * 0.8

    def renew(self) -> None:
        """Put it anew.

        Raises:
            RunLocked: another process has it. StoreAway: the store does not answer.
        """
        self._put(self.holder)

    def release(self) -> None:
        """Give it back; the object stays, and says who had it last."""
        if not self.lost:
            self._put(replace(self.holder, released=True))

    def _put(self, holder: Holder) -> None:
        began = time.monotonic()
        try:
            self._etag = self._bucket.put_if(self._key, holder.to_bytes(), self._etag)
        except (ConditionFailed, NotThere):
            # An earlier put of this process may have come through though its answer did not.
            value, etag = read(self._bucket, self._key)
            if value is None or (value.copy, value.count) != (holder.copy, holder.count):
                self.lost = True
                who = "another process" if value is None else f"process {value.pid} on {value.host}"
                raise RunLocked(
                    f"s3://{self._bucket.name}/{self._key} is {who}'s now: this process was silent for longer than "
                    f"{holder.lease_s:g} s, or somebody removed the lease. It ends; the other one goes on."
                ) from None
            self._etag = self._bucket.put_if(self._key, holder.to_bytes(), etag)
        self._renewed = began


def read(bucket: Bucket, key: str) -> tuple[Holder | None, str]:
    """Who holds or held a lease, and its ETag; None: nobody ever did."""
    try:
        value, etag = bucket.get(key)
    except NotThere:
        return None, ""
    return Holder.from_bytes(value, f"s3://{bucket.name}/{key}"), etag


def acquire(
    bucket: Bucket, key: str, copy: str, taking: Callable[[int], None], lease_s: float | None = None
) -> tuple[Lease, Holder | None]:
    """Take a lease, and return it with its holder before.

    Args:
        bucket: where it lies.
        key: of the object.
        copy: id of the copy that will be written from.
        taking: called with the count that the lease gets, before it is taken.
        lease_s: how long it shall last; None: `LEASE_S`.

    Raises:
        RunLocked: another process holds it. StoreAway: the store does not answer.
    """
    import psutil

    before, etag = read(bucket, key)
    if before is not None and not before.released and not before.is_dead:
        before, etag = _until_silent(bucket, key, before, etag)
    process = psutil.Process()
    holder = Holder(
        copy=copy,
        count=1 + (before.count if before else 0),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=process.create_time(),
        machine=this_machine(),
        since=datetime.now(UTC).isoformat(timespec="milliseconds"),
        lease_s=LEASE_S if lease_s is None else lease_s,
    )
    taking(holder.count)
    began = time.monotonic()
    try:
        etag = bucket.put_if(key, holder.to_bytes(), etag if before else None)
    except ConditionFailed:
        raise RunLocked(_held(bucket, key, read(bucket, key)[0])) from None
    return Lease(bucket, key, holder, etag, began), before


def _until_silent(bucket: Bucket, key: str, holder: Holder, etag: str) -> tuple[Holder | None, str]:
    """Wait until a holder that may be dead was silent for the whole of its time, or has given the lease back.

    Raises:
        RunLocked: it is alive.
    """
    if holder.machine == this_machine():
        raise RunLocked(_held(bucket, key, holder))
    end = time.monotonic() + holder.lease_s
    while time.monotonic() < end:
        time.sleep(min(1.0, holder.lease_s / 10))
        now, changed = read(bucket, key)
        if now is None or now.released:
            return now, changed
        if changed != etag:
            raise RunLocked(_held(bucket, key, now))
    return holder, etag


def _held(bucket: Bucket, key: str, holder: Holder | None) -> str:
    place = f"s3://{bucket.name}/{key.removesuffix(f'/{LEASE}')}"
    who = f"process {holder.pid} on {holder.host} since {holder.since}" if holder else "another process"
    return (
        f"{place} is being written by {who}. Wait for it, stop it, or start a new run with another "
        "trainer.experiment_name or trainer.resume_mode=disable."
    )
