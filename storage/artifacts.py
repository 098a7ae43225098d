"""Artifacts: Arrow tables in a folder, committed by a manifest that is written last and never rewritten."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.arrow_file import unpacked_bytes
from storage.copies import fetch
from storage.durable import (
    StorageError,
    all_or_nothing,
    read_json,
    sha256_file,
    sha256_json,
    sync_file,
    sync_folder,
    write_json,
)
from storage.mirror import changed
from storage.schema import FORMAT_VERSION, schema_of

MANIFEST = "manifest.json"
DROPPED = "dropped.json"
"""Beside the manifest of an artifact whose rows retention has dropped: when and why."""
PACKED = ".zst"
"""Ending behind the name of a part that retention has compressed: the same file in a zstd frame."""


@dataclass(frozen=True)
class Artifact:
    """A reference to a committed table: what stages and Prefect tasks hand to each other.

    Attributes:
        stage: the artifact's name, such as `rollouts`.
        folder: absolute path of its folder.
        digest: SHA-256 of its content: schema and parts, not who wrote it when.
        rows: number of rows.
        bytes: size of its parts.
    """

    stage: str
    folder: Path
    digest: str
    rows: int
    bytes: int


class Part(BaseModel):
    """One Arrow file of an artifact; one per writing rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^part-\d{5}\.arrow$")
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """What made an artifact, and how to check it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    schema_id: str
    run_id: str
    lineage: int
    step: int
    stage: str = Field(pattern=r"^[a-z_]+(-[0-9]{2,})?$")
    attempt: int
    key: str
    """Digest of all that decides the content: inputs, config keys read, policy version, code."""
    made_from: dict[str, Any] | None = None
    """What `key` is the digest of, and under `modules` the digest of each module's source; null: not written down."""
    rows: int
    bytes: int
    digest: str
    parts: tuple[Part, ...]
    parents: dict[str, str]
    """Digest of each input artifact, by name."""
    policy_version: int
    code_digest: str
    config_digest: str
    host: str
    pid: int
    started_at: datetime
    committed_at: datetime
    seconds: float
    metrics: dict[str, float | None]
    """Numbers of this stage under their tracking names; null: not finite."""
    shapes: dict[str, int]
    """Rows, tokens and bytes of this stage."""
    notes: dict[str, Any]
    """What a reader of the columns must know, such as the temperature of log-probs."""
    checksum: str | None = None
    """SHA-256 of all the rest as JSON; null: not written down."""


@dataclass(frozen=True)
class Provenance:
    """Who makes an artifact and from what: the part of the manifest that its writer does not measure."""

    run_id: str
    lineage: int
    step: int
    attempt: int
    key: str
    policy_version: int
    code_digest: str
    config_digest: str
    started_at: datetime
    parents: Mapping[str, str] = field(default_factory=dict)
    made_from: Mapping[str, Any] | None = None


def write_part(folder: Path, rank: int, table: pa.Table, compression: str = "none") -> Part:
    """Write one rank's rows as an Arrow file and sync it.

    The table's schema must be the artifact's own; build_table makes such tables.
    """
    name = f"part-{rank:05d}.arrow"
    path = folder / name
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        sink.flush()
    sync_file(path)
    part = Part(name=name, rows=table.num_rows, bytes=path.stat().st_size, sha256=sha256_file(path))
    _trust(path, part.sha256)
    return part


def commit(
    folder: Path,
    stage: str,
    tables: Sequence[pa.Table],
    made_by: Provenance,
    *,
    metrics: Mapping[str, float | None] | None = None,
    shapes: Mapping[str, int] | None = None,
    notes: Mapping[str, Any] | None = None,
    compression: str = "none",
) -> Artifact:
    """Write tables as the parts of a new artifact and commit it; on failure the folder is gone again.

    Raises:
        FileExistsError: the folder exists.
        StorageError: the disk is full.
        ValueError: a table's schema is not the artifact's.
    """
    for table in tables:
        if not table.schema.equals(schema_of(stage)):
            raise ValueError(f"artifact {stage}: the table's schema is not the artifact's; use build_table")
    with all_or_nothing(folder, f"artifact {stage} of step {made_by.step}"):
        parts = [write_part(folder, rank, table, compression) for rank, table in enumerate(tables)]
        return commit_parts(folder, stage, parts, made_by, metrics=metrics, shapes=shapes, notes=notes)


def commit_parts(
    folder: Path,
    stage: str,
    parts: Sequence[Part],
    made_by: Provenance,
    *,
    metrics: Mapping[str, float | None] | None = None,
    shapes: Mapping[str, int] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Artifact:
    """Write the manifest over parts that lie in `folder`: the moment from which the artifact exists."""
    now = datetime.now(UTC)
    rows, size = sum(part.rows for part in parts), sum(part.bytes for part in parts)
    schema_id = schema_of(stage).metadata[b"grpoflow.schema"].decode()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        schema_id=schema_id,
        run_id=made_by.run_id,
        lineage=made_by.lineage,
        step=made_by.step,
        stage=stage,
        attempt=made_by.attempt,
        key=made_by.key,
        made_from=None if made_by.made_from is None else dict(made_by.made_from),
        rows=rows,
        bytes=size,
        digest=_content_digest(schema_id, parts),
        parts=tuple(parts),
        parents=dict(made_by.parents),
        policy_version=made_by.policy_version,
        code_digest=made_by.code_digest,
        config_digest=made_by.config_digest,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=made_by.started_at,
        committed_at=now,
        seconds=(now - made_by.started_at).total_seconds(),
        metrics=dict(metrics or {}),
        shapes={"rows": rows, "bytes": size, **(shapes or {})},
        notes=dict(notes or {}),
    )
    values = manifest.model_dump(mode="json", exclude={"checksum"})
    write_json(folder / MANIFEST, {**values, "checksum": sha256_json(values)})
    sync_folder(folder.parent)
    changed(folder)
    return reference(folder, manifest)


def reference(folder: Path, manifest: Manifest) -> Artifact:
    """The reference to a committed artifact."""
    return Artifact(manifest.stage, folder, manifest.digest, manifest.rows, manifest.bytes)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate a manifest.

    Raises:
        FileNotFoundError: nothing is committed here.
        StorageError: the manifest is damaged or of a newer format.
    """
    path = folder / MANIFEST
    try:
        values = read_json(path)
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        raise StorageError(f"{path} is no valid manifest: {error.errors()[0]['msg']}") from error
    except ValueError as error:
        raise StorageError(f"{path} is no valid manifest: {error}") from error
    if manifest.format_version > FORMAT_VERSION:
        raise StorageError(
            f"{path} has format {manifest.format_version}, newer than this version's {FORMAT_VERSION}. "
            "Upgrade grpoflow."
        )
    if values.pop("checksum", None) not in (None, sha256_json(values)):
        raise StorageError(f"{path} has changed since it was committed: its checksum is not that of the rest")
    if manifest.digest != _content_digest(manifest.schema_id, manifest.parts):
        raise StorageError(f"{path} contradicts itself: its digest is not that of its parts")
    return manifest


def check_parts(folder: Path, manifest: Manifest) -> None:
    """Compare size and SHA-256 of every part with the manifest.

    A file that this process wrote or checked before, and that has not changed since, is not read again.

    Raises:
        StorageError: a part is missing, cut or changed, or retention has dropped it.
    """
    _refuse_dropped(folder)
    for part in manifest.parts:
        _check_part(folder, part)


def _check_part(folder: Path, part: Part) -> None:
    path = stored_part(folder, part.name)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise StorageError(f"{path} is missing though {MANIFEST} names it") from None
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path} is no plain file, so it is no part of an artifact")
    size, packed = status.st_size, path.name.endswith(PACKED)
    if size != part.bytes and not packed:
        raise StorageError(f"{path} has {size} bytes but was committed with {part.bytes}")
    if _trusted.get(str(path)) != (*_stamp(path), part.sha256):
        if (hashlib.sha256(unpacked(path, part.bytes)).hexdigest() if packed else sha256_file(path)) != part.sha256:
            raise StorageError(f"{path} has changed since it was committed: its SHA-256 is not the manifest's")
        _trust(path, part.sha256)


SEEN_LATE_S = 10.0
"""How long a file that another machine has written may take to show on a shared file system."""


def wait_until_seen(folder: Path, parts: Sequence[Part] | None = None, timeout_s: float = SEEN_LATE_S) -> None:
    """Wait for files that another process says it has written; what is missing at the end its reader tells.

    A network file system remembers for a while that a name was not there: reading the folder makes it look again.

    Args:
        folder: of an artifact.
        parts: files in it; None: those of its manifest, and the manifest.
        timeout_s: how long at most.
    """
    end = time.monotonic() + timeout_s
    while not _all_there(folder, parts) and time.monotonic() < end:
        time.sleep(0.1)
        with suppress(OSError):
            for path in (folder.parent, folder):
                os.listdir(path)  # noqa: PTH208


def _all_there(folder: Path, parts: Sequence[Part] | None) -> bool:
    try:
        wanted = read_manifest(folder).parts if parts is None else parts
        paths = [stored_part(folder, part.name) for part in wanted]
        sizes = [path.stat().st_size for path in paths]
    except (OSError, StorageError):
        return False
    pairs = zip(wanted, paths, sizes, strict=True)
    return all(size == part.bytes or path.name.endswith(PACKED) for part, path, size in pairs)


def read_parts(folder: Path, stage: str, parts: Sequence[Part]) -> pa.Table:
    """Read parts that are not committed yet, in their order, after checking them.

    Raises:
        StorageError: a part is not what its writer says, or not of the artifact's schema.
    """
    tables = []
    for part in parts:
        _check_part(folder, part)
        tables.append(_map(folder, stage, part, None))
    return pa.concat_tables(tables) if tables else schema_of(stage).empty_table()


def stored_part(folder: Path, name: str) -> Path:
    """Where a part lies: under its own name, or compressed beside it. Of a copy it is fetched when it is not here."""
    path = folder / name
    packed = path.with_name(name + PACKED)
    if path.exists() or packed.exists():
        return path if path.exists() else packed
    return packed if not fetch(path) and fetch(packed) else path


def unpacked(path: Path, most_bytes: int) -> pa.Buffer:
    """The bytes of a part that retention has compressed.

    Args:
        path: the compressed file.
        most_bytes: what the part was committed with: a frame that holds more is not read to its end.

    Raises:
        StorageError: the file is cut or changed.
    """
    sink = pa.BufferOutputStream()
    try:
        with pa.input_stream(str(path), compression="zstd") as stream:
            while sink.tell() <= most_bytes and (block := stream.read(_BLOCK_BYTES)):
                sink.write(block)
    except OSError as error:
        raise StorageError(f"{path} has changed since it was compressed: {error}") from error
    if sink.tell() > most_bytes:
        raise StorageError(f"{path} has changed since it was compressed: it holds more than {most_bytes} bytes")
    return sink.getvalue()


_BLOCK_BYTES = 4 << 20


def _refuse_dropped(folder: Path) -> None:
    path = folder / DROPPED
    try:
        about = read_json(path)
    except FileNotFoundError:
        return
    except ValueError:
        about = {}
    about = about if isinstance(about, dict) else {}
    when, why = about.get("at", "an unknown date"), about.get("why", "nobody knows why")
    raise StorageError(f"the rows of {folder} were dropped on {when}: {why}. Only the manifest is left.")


def read_table(artifact: Artifact | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a committed artifact through a memory map, after checking it.

    Args:
        artifact: reference or folder.
        columns: names of the columns wanted; None: all.

    Raises:
        FileNotFoundError: nothing is committed here.
        StorageError: it is damaged, is not what the reference names, or retention has dropped its rows.
    """
    folder = artifact.folder if isinstance(artifact, Artifact) else artifact
    manifest = read_manifest(folder)
    if isinstance(artifact, Artifact) and manifest.digest != artifact.digest:
        raise StorageError(f"{folder} holds {manifest.digest[:12]}, not the {artifact.digest[:12]} that is asked for")
    check_parts(folder, manifest)
    tables = [_map(folder, manifest.stage, part, columns) for part in manifest.parts]
    table = pa.concat_tables(tables) if tables else schema_of(manifest.stage).empty_table()
    if table.num_rows != manifest.rows:
        raise StorageError(f"{folder} reads as {table.num_rows} rows but was committed with {manifest.rows}")
    return table


def _map(folder: Path, stage: str, part: Part, columns: Sequence[str] | None) -> pa.Table:
    """The rows of a part that was checked.

    A digest proves that the file is what its manifest says, not who wrote the two. So nothing in the file is taken at
    its word: columns and types are those of the schema, and every offset is looked at before anything follows it.

    Raises:
        StorageError: it is no part of such an artifact.
        ValueError: no such column.
    """
    path, schema = stored_part(folder, part.name), schema_of(stage)
    if unknown := sorted(set(columns or ()) - set(schema.names)):
        raise ValueError(f"{stage} has no column {', '.join(unknown)}; it has {', '.join(schema.names)}")
    try:
        packed = path.name.endswith(PACKED)
        source = unpacked(path, part.bytes) if packed else pa.memory_map(str(path), "r").read_buffer()
        # Imported late: the GPU check uses this package where psutil is not installed, and reads nothing.
        import psutil

        needed, free = unpacked_bytes(source), psutil.virtual_memory().available
        if needed > free:
            raise StorageError(f"{path} unpacks to {needed:,} bytes of memory, and {free:,} are free")
        with pa.ipc.open_file(source) as reader:
            if not reader.schema.equals(schema):
                raise StorageError(f"{path} is no part of {stage}: its columns or their types are other ones")
            table = reader.read_all()
        table = table if columns is None else table.select(list(columns))
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise StorageError(f"{path} is no readable Arrow file: {error}") from error
    if table.num_rows != part.rows:
        raise StorageError(f"{path} has {table.num_rows} rows but was committed with {part.rows}")
    return table


def _content_digest(schema_id: str, parts: Sequence[Part]) -> str:
    return sha256_json([schema_id, [[part.rows, part.sha256] for part in parts]])


# Files this process wrote or checked: path -> (size, mtime, inode, sha256). Bounded, so that memory stays flat in the
# number of steps.
_trusted: OrderedDict[str, tuple[int, int, int, str]] = OrderedDict()
_TRUST_LIMIT = 512


def forget_checked() -> None:
    """Have every file read and compared again before this process trusts it."""
    _trusted.clear()


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _trust(path: Path, sha256: str) -> None:
    _trusted[str(path)] = (*_stamp(path), sha256)
    while len(_trusted) > _TRUST_LIMIT:
        _trusted.popitem(last=False)
