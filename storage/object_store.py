"""Objects of an S3-compatible store by key: read, written, listed, and put on a condition.

Credentials come from the environment alone (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, or what
the machine gives its programs); the address from the configuration or `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from storage.durable import StorageError, sync_file

SCHEME = "s3://"
_URL = re.compile(r"^s3:/+([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?$")
_BAD_PARTS = ("", ".", "..")
_BY_PARTS_FROM_BYTES = 64 * 2**20
"""Files from this size on are put in parts."""


class StoreAway(StorageError):
    """The store does not answer, or answers that it cannot serve now; trying again later may help."""


class NotThere(StorageError):
    """There is no object with this key."""


class ConditionFailed(StorageError):
    """The object is not what the condition of a put says: somebody else has written it."""


@dataclass(frozen=True)
class Object:
    """What a listing says of an object.

    Attributes:
        key: in the bucket.
        size: bytes.
        etag: changes whenever the object is written.
    """

    key: str
    size: int
    etag: str


def is_url(place: str | Path) -> bool:
    """Whether a place is one in an object store; `Path` has taken a slash from it."""
    return str(place).startswith("s3:/")


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key`.

    Raises:
        ValueError: it is none, or a part of the key could lead out of a folder.
    """
    match = _URL.match(url)
    key = (match[2] or "").rstrip("/") if match else ""
    if match is None or ".." in match[1] or (key and not is_safe_key(key)):
        raise ValueError(
            f"{url!r} is no place in an object store; such a place is s3://BUCKET/PATH, without . and .. in it"
        )
    return match[1], key


def is_safe_key(key: str) -> bool:
    """Whether every part of a key can be the name of a file below a folder."""
    return len(key) <= 900 and all(
        part not in _BAD_PARTS and len(part) <= 255 and not set(part) & set("\\\0\n\r") for part in key.split("/")
    )


@dataclass(frozen=True)
class Bucket:
    """A bucket of a store.

    Attributes:
        name: the bucket.
        endpoint: URL of the service; None: that of AWS.
        region: None: `AWS_REGION`, else us-east-1.
    """

    name: str
    endpoint: str | None = None
    region: str | None = None

    @cached_property
    def _store(self) -> Any:
        from obstore.store import S3Store

        region = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        return S3Store(
            self.name,
            endpoint=self.endpoint,
            region=region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "connect_timeout": timedelta(seconds=5), "timeout": "10 minutes"},
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=10)},
        )

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f" at {self.endpoint}" if self.endpoint else "")

    def get(self, key: str) -> tuple[bytes, str]:
        """An object's bytes and its ETag.

        Raises:
            NotThere: there is none. StoreAway: the store does not answer.
        """
        import obstore

        with self._told(key):
            found = obstore.get(self._store, key)
            return bytes(found.bytes()), found.meta["e_tag"] or ""

    def get_file(self, key: str, path: Path) -> str:
        """Write an object into a file, which appears whole or not at all; its ETag."""
        import obstore

        aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._told(key), aside.open("wb") as file:
                found = obstore.get(self._store, key)
                for chunk in found.stream(min_chunk_size=4 * 2**20):
                    file.write(chunk)
            sync_file(aside)
            aside.rename(path)
            return found.meta["e_tag"] or ""
        finally:
            aside.unlink(missing_ok=True)

    def age_s(self, key: str) -> float:
        """How long ago an object was written, by this machine's clock.

        Raises:
            NotThere: there is none. StoreAway: the store does not answer.
        """
        import obstore

        with self._told(key):
            return time.time() - obstore.head(self._store, key)["last_modified"].timestamp()

    def put(self, key: str, value: bytes | Path) -> str:
        """Write an object, bytes or a file, and return its ETag. Others see the old object or the new one."""
        import obstore

        with self._told(key):
            parts = isinstance(value, Path) and value.stat().st_size >= _BY_PARTS_FROM_BYTES
            return obstore.put(self._store, key, value, use_multipart=parts)["e_tag"] or ""

    def put_if(self, key: str, value: bytes, etag: str | None) -> str:
        """Write an object if it is still the one with this ETag; None: if there is none. Its new ETag.

        Raises:
            ConditionFailed: somebody else has written it.
        """
        import obstore

        with self._told(key):
            mode: Any = "create" if etag is None else {"e_tag": etag}
            return obstore.put(self._store, key, value, mode=mode, use_multipart=False)["e_tag"] or ""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""
        import obstore

        for key in keys:
            try:
                with self._told(key):
                    obstore.delete(self._store, key)
            except NotThere:
                continue

    def list(self, prefix: str) -> Iterator[Object]:
        """All objects whose key begins with a prefix and a slash."""
        import obstore

        with self._told(prefix):
            for batch in obstore.list(self._store, prefix):
                for one in batch:
                    yield Object(one["path"], one["size"], one["e_tag"] or "")

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Within the block the library's errors are told apart, and say what and where."""
        from obstore import exceptions as known

        where = f"{SCHEME}{self.name}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            # A missing bucket is one of these, too.
            if "NoSuchBucket" in str(error):
                raise StorageError(f"{self} has no bucket {self.name}. Make it, or set another storage.root.") from None
            raise NotThere(f"there is no {where}") from None
        except (known.AlreadyExistsError, known.PreconditionError):
            raise ConditionFailed(f"{where} was written by somebody else") from None
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            raise StorageError(
                f"{where} is refused: {_brief(error)}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
                "environment; in the configuration, storage.endpoint and storage.region."
            ) from None
        except (known.BaseError, TimeoutError, ConnectionError) as error:
            text = _brief(error)
            if "NoSuchBucket" in text:
                raise StorageError(f"{self} has no bucket {self.name}. Make it, or set another storage.root.") from None
            if "InvalidAccessKeyId" in text or "SignatureDoesNotMatch" in text or "AccessDenied" in text:
                raise StorageError(f"{where} is refused: {text}. Look at AWS_ACCESS_KEY_ID and its secret.") from None
            raise StoreAway(f"{where} cannot be reached: {text}") from error


def _brief(error: BaseException) -> str:
    """The library's message on one line, without its debug dump."""
    text = " ".join(str(error).split("Debug source")[0].split())
    return text if len(text) <= 300 else f"{text[:297]}…"
