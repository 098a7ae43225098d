"""Copies on this machine of folders in an object store: where they lie, brought up to date, files fetched when read.

    $GRPOFLOW_CACHE/s3/<bucket>@<hash of the address>/<key>/…        the same tree as in the bucket
    $GRPOFLOW_CACHE/s3/<bucket>@<hash of the address>/.origin.json   the address
    $GRPOFLOW_CACHE/s3/<bucket>@<hash of the address>/.state/…       of each copy: its id, what is known of the store

A run works in such a folder as in any other. What is small (manifests, records, texts) is there after `refresh`; rows
and policies are fetched when a reader asks for them, and checked by the digests in their manifests, as everywhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from storage.durable import StorageError, append_json_line, read_json_lines, write_json
from storage.lease import LEASE, Holder, read
from storage.object_store import SCHEME, Bucket, NotThere, Object, StoreAway, is_safe_key, parse_url

CACHE = "GRPOFLOW_CACHE"
"""Environment variable: the folder of all copies; ~/.cache/grpoflow by default."""

ANCHORS = ("run.json", "sweep.json")
"""What a folder that has copies begins with."""

FRESH_S = 5.0
"""How long a reader takes what it has brought up to date for the newest."""

logger = logging.getLogger("grpoflow")

_STEP = re.compile(r"^(?:steps|checkpoints)/(\d+)")
_NOT_KEPT = ("lock", LEASE)


def cache_root() -> Path:
    """The folder of all copies."""
    return Path(os.path.realpath(Path(os.environ.get(CACHE) or "~/.cache/grpoflow").expanduser()))


def local_folder(url: str, endpoint: str | None = None, region: str | None = None) -> Path:
    """The folder of this machine that stands for a place in a store; it need not exist.

    Args:
        url: `s3://bucket/key`.
        endpoint: URL of the service; None: `AWS_ENDPOINT_URL`, else that of AWS.
        region: None: `AWS_REGION`.

    Raises:
        ValueError: the URL is none, or the endpoint holds a password.
    """
    name, key = parse_url(url)
    told = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    endpoint = told.rstrip("/")
    if "@" in endpoint.partition("?")[0] or (endpoint and not endpoint.startswith(("http://", "https://"))):
        raise ValueError("storage.endpoint is a URL, http(s)://HOST:PORT, without user and password in it")
    home = cache_root() / "s3" / f"{name}@{hashlib.sha256(endpoint.encode()).hexdigest()[:8]}"
    origin = {"bucket": name, "endpoint": endpoint or None, "region": region}
    path = home / ".origin.json"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(path, origin)
    return home / key if key else home


@dataclass(frozen=True)
class Copy:
    """A folder of this machine that stands for one in a store. `copy_of` finds it.

    Attributes:
        bucket: where it comes from.
        key: of the folder in the bucket.
        folder: here.
    """

    bucket: Bucket
    key: str
    folder: Path

    @property
    def url(self) -> str:
        """The place in the store."""
        return f"{SCHEME}{self.bucket.name}/{self.key}"

    @property
    def lease_key(self) -> str:
        """Key of the folder's lease."""
        return f"{self.key}/{LEASE}"

    @cached_property
    def state(self) -> Path:
        """Where this machine keeps what it knows of the store; not a part of the copy."""
        home = cache_root() / "s3" / self.folder.relative_to(cache_root() / "s3").parts[0]
        folder = home / ".state" / hashlib.sha256(self.key.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def is_here(self) -> bool:
        """Whether anything of the run or sweep was brought here, or made here."""
        return any((self.folder / name).is_file() for name in ANCHORS)

    # ------------------------------------------------------------------------------------------------- who wrote last

    def identity(self) -> tuple[str, int]:
        """Id of this copy, and the lease's count when this copy was last written from; 0: never."""
        try:
            values = json.loads((self.state / "copy.json").read_bytes())
            return str(values["id"]), int(values["count"])
        except (OSError, ValueError, KeyError, TypeError):
            return uuid4().hex, 0

    def wrote_last(self, holder: Holder | None) -> bool:
        """Whether what this copy has is newer than what the store has, or the same: nobody else wrote since."""
        copy, count = self.identity()
        if holder is None or not self.is_here:
            # A copy that was removed to make room is brought again.
            return False
        # The count is written down before the lease is taken, and a kill may come in between.
        return holder.copy == copy and holder.count in (count, count - 1)

    def remember(self, copy: str, count: int) -> None:
        """Write down that this copy is about to be written from."""
        write_json(self.state / "copy.json", {"id": copy, "count": count, "url": self.url})

    # --------------------------------------------------------------------------------------------- what is in the store

    def listing(self) -> dict[str, Object]:
        """Objects of the folder by their path in it, as one moment had them.

        What commits other objects (a manifest, a record) is taken from a first listing, the rest from a second one: a
        writer puts it last, so that what it commits is in the second.
        """
        first = dict(self._list())
        return {
            path: one for path, one in self._list() if path in first or not path.rsplit("/", 1)[-1].endswith(".json")
        }

    def _list(self) -> Iterator[tuple[str, Object]]:
        for one in self.bucket.list(self.key):
            path = one.key.removeprefix(f"{self.key}/")
            if not is_safe_key(path):
                raise StorageError(f"{self.url} holds an object whose name leads out of its folder: {path!r}")
            if is_kept(path):
                yield path, one

    def index(self) -> dict[str, tuple[str, int]]:
        """ETag and size of what the store had when this copy was last in step with it, by path."""
        try:
            values = json.loads((self.state / "index.json").read_bytes())
            return {str(path): (str(etag), int(size)) for path, (etag, size) in values.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def keep_index(self, index: Mapping[str, tuple[str, int]]) -> None:
        """Write it down."""
        write_json(self.state / "index.json", {path: list(known) for path, known in index.items()})

    def files(self) -> dict[str, Path]:
        """Files here that belong into the store, by path."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if is_kept(name) and path.is_file() and not path.is_symlink():
                found[name] = path
        return found

    # ---------------------------------------------------------------------------------------------------- brought here

    def bring(self, there: Mapping[str, Object]) -> None:
        """Make the copy what the store has; what is here and not there is set aside."""
        index, here = self.index(), self.files()
        aside = self.state / "left" / f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
        for path in sorted(here.keys() - there.keys()):
            (aside / path).parent.mkdir(parents=True, exist_ok=True)
            here[path].rename(aside / path)
        if here.keys() - there.keys():
            logger.warning(
                "%s was written from another machine since; %d files that never got there lie in %s now",
                self.url, len(here.keys() - there.keys()), aside,
            )  # fmt: skip
        wanted = []
        for path, one in there.items():
            if path in here and index.get(path, ("",))[0] == one.etag and here[path].stat().st_size == one.size:
                continue
            if is_lazy(path):
                here[path].unlink() if path in here else None
            else:
                wanted.append(path)
        groups: dict[tuple[float, int], list[str]] = {}
        for path in wanted:
            groups.setdefault(order(path)[:2], []).append(path)
        with ThreadPoolExecutor(8) as pool:
            for _, paths in sorted(groups.items()):
                list(pool.map(self._get, paths))
        self.keep_index({path: (one.etag, one.size) for path, one in there.items()})

    def _get(self, path: str) -> None:
        self.bucket.get_file(f"{self.key}/{path}", self.folder / path)

    def fetch(self, path: Path) -> bool:
        """Get one file that is not here; whether it is here now.

        Raises:
            StoreAway: the store does not answer.
        """
        try:
            self._get(path.relative_to(self.folder).as_posix())
        except NotThere:
            return False
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no other process of this machine brings the copy up to date or begins to write from it."""
        with (self.state / "busy").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def is_written_here(self) -> bool:
        """Whether a live process of this machine writes from it."""
        try:
            with (self.folder / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def owner(self) -> dict[str, Any] | None:
        """The process of another machine that holds the lease, as it was when the copy was last brought up to date."""
        try:
            values = json.loads((self.state / "holder.json").read_bytes())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) and values else None

    def removed(self) -> list[str]:
        """Paths whose removal from the store is not finished."""
        return [str(line.get("path")) for line in read_json_lines(self.state / "removed.jsonl")]

    def note_removed(self, path: str) -> None:
        """Write down that an object is to be removed, so that a kill does not forget it."""
        append_json_line(self.state / "removed.jsonl", {"path": path})

    def settle_removed(self) -> None:
        """All of them are gone."""
        (self.state / "removed.jsonl").unlink(missing_ok=True)


def copy_of(folder: Path) -> Copy | None:
    """The copy that a folder is, or lies in the place of; None: it is no folder of the cache.

    Only folders of this machine's own cache are copies, by their place: what a folder from elsewhere says of itself is
    never asked, so that it cannot have credentials used on a server of its choice.
    """
    home = f"{cache_root()}/s3/"
    path = os.path.realpath(folder)
    if not path.startswith(home):
        return None
    name, _, key = path.removeprefix(home).partition("/")
    origin = Path(home, name, ".origin.json")
    if not key or key.startswith(".") or not origin.exists():
        return None
    try:
        values = json.loads(origin.read_bytes())
        bucket = Bucket(str(values["bucket"]), values["endpoint"], values["region"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{origin} is damaged: {error!r}. Remove it; it is made anew.") from error
    return Copy(bucket, key, Path(path))


def is_kept(path: str) -> bool:
    """Whether a file belongs into the store: no lock, and nothing that is still being written."""
    parts = path.split("/")
    return not any(part.startswith(".") for part in parts) and path not in _NOT_KEPT and not path.endswith(".aside")


def is_lazy(path: str) -> bool:
    """Whether a file is fetched when it is read: rows and policies."""
    name = path.rsplit("/", 1)[-1]
    return name.endswith((".arrow", ".arrow.zst", ".safetensors")) or (
        path.startswith("checkpoints/") and name != "manifest.json"
    )


def order(path: str) -> tuple[float, int, str]:
    """Where a file comes when all are put or fetched: nothing before what it rests on."""
    match = _STEP.match(path)
    name = path.rsplit("/", 1)[-1]
    if match is None:
        first = {"config.yaml": 0, "run.json": 1, "sweep.json": 1}
        return (-1.0, first[path], path) if path in first else (float("inf"), int(name == "ledger.jsonl"), path)
    if path.startswith("checkpoints/"):
        return int(match[1]) + 0.5, int(name == "manifest.json"), path
    rank = 2 if path.count("/") == 2 else 1 if name == "manifest.json" else 0
    return float(match[1]), rank, path


# ------------------------------------------------------------------------------------------------------------- reading

_refreshed: dict[str, float] = {}


def refresh(folder: Path) -> None:
    """Bring a folder up to date, if it is a copy; any other is left alone.

    A copy that a process of this machine writes from is the newest there is. While the store is away, what is here is
    what there is.

    Raises:
        StoreAway: the store does not answer, and nothing is here.
    """
    copy = copy_of(folder)
    if copy is None or copy.is_written_here:
        return
    if copy.is_here and time.monotonic() - _refreshed.get(str(copy.folder), -FRESH_S) < FRESH_S:
        return
    try:
        with copy.alone():
            holder, _ = read(copy.bucket, copy.lease_key)
            if not copy.wrote_last(holder):
                there = copy.listing()
                if there:
                    copy.folder.mkdir(parents=True, exist_ok=True)
                    copy.bring(there)
            alive = holder is not None and not holder.released and not holder.is_dead
            # The age is only shown: clocks of two machines decide nothing. See storage.lease for what does.
            alive = alive and holder is not None and copy.bucket.age_s(copy.lease_key) < 2 * holder.lease_s
            about = {"host": holder.host, "pid": holder.pid, "since": holder.since} if holder and alive else {}
            write_json(copy.state / "holder.json", about)
    except StoreAway as error:
        if not copy.is_here:
            raise
        logger.warning("%s; what is read is this machine's copy", error)
    _refreshed[str(copy.folder)] = time.monotonic()


def refresh_all(folder: Path) -> None:
    """Bring every run of a store below a folder up to date, if the folder is one of copies."""
    copy = copy_of(folder)
    if copy is None:
        return
    for one in copy.bucket.list(copy.key):
        name = one.key.removeprefix(f"{copy.key}/")
        if name.endswith("/run.json") and is_safe_key(name) and is_kept(name):
            refresh(copy.folder / name.removesuffix("/run.json"))


def fetch(path: Path) -> bool:
    """Get a file of a copy that is not here yet; whether it is here now. False for files of other folders."""
    copy = copy_around(path)
    return copy is not None and copy.fetch(path)


def copy_around(path: Path) -> Copy | None:
    """The copy that a file lies in: the nearest folder above it that is a run's or a sweep's."""
    home = f"{cache_root()}/s3/"
    for folder in path.parents:
        if not f"{folder}/".startswith(home):
            return None
        if any((folder / name).is_file() for name in ANCHORS):
            return copy_of(folder)
    return None
