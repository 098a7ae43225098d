"""A bundle opened: into a temporary folder, after each name, size and digest in it has been looked at."""

from __future__ import annotations

import hashlib
import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from flows.audit.bundle import FORMAT
from flows.audit.bundle.model_files import SUFFIXES
from flows.config import to_yaml
from flows.config_layers import read_yaml
from storage import Run, StorageError, open_run
from storage.durable import LARGEST_JSON_BYTES, checked, parse_json, read_json, write_json
from tasks.config import RunConfig

ALLOWED = (*SUFFIXES, ".yaml", ".arrow", ".zst")
"""Endings of the files of a bundle."""
MOST_FILES = 10_000


class _File(TypedDict):
    bytes: int
    sha256: str


class _Table(TypedDict):
    """What bundle.json must say."""

    step: int
    stages: list[str]
    files: dict[str, _File]


_TABLE = TypeAdapter(_Table)


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Run, dict[str, Any]]]:
    """The run in a bundle, and what its bundle.json says; gone again when the block ends.

    Raises:
        StorageError: it is no bundle, is damaged, or holds something that no bundle holds.
    """
    try:
        with zipfile.ZipFile(path) as file, TemporaryDirectory(prefix="grpoflow-unpacked-") as name:
            folder = Path(name)
            entries = _checked(path, file)
            about = _table(path, file, entries)
            _refuse_more_than_fits(path, entries, folder)
            for entry in entries:
                if entry.filename != "bundle.json":
                    _extract(path, file, entry, about["files"][entry.filename], folder)
            _settle(folder)
            run = open_run(folder / "run")
            _refuse_impossible_rows(run, int(about["step"]))
            yield run, about
    except (zipfile.BadZipFile, pa.ArrowInvalid) as error:
        raise StorageError(f"{path} is no bundle of grpoflow, or is damaged: {error}") from error


def _checked(path: Path, file: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The entries, each of which is a plain file with a name that stays inside."""
    entries = file.infolist()
    if len(entries) > MOST_FILES:
        raise StorageError(f"{path} holds {len(entries)} files; a bundle has at most {MOST_FILES}")
    if len({entry.filename for entry in entries}) != len(entries):
        raise StorageError(f"{path} holds two files of one name")
    for entry in entries:
        if problem := _problem(entry):
            raise StorageError(f"{path}: {entry.filename!r} {problem}. Nothing was unpacked.")
    return entries


def _problem(entry: zipfile.ZipInfo) -> str | None:
    name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name or "\0" in name:
        return "leads out of the folder that it is unpacked into"
    if name != PurePosixPath(name).as_posix() or entry.is_dir():
        return "is no plain file's name"
    if kind not in (0, stat.S_IFREG):
        return "is no plain file"
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
        return "is compressed or encrypted, which nothing in a bundle is"
    return None if PurePosixPath(name).suffix in ALLOWED else f"is no file of a bundle ({', '.join(ALLOWED)})"


def _table(path: Path, file: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> dict[str, Any]:
    found = next((entry for entry in entries if entry.filename == "bundle.json"), None)
    if found is None or found.file_size > LARGEST_JSON_BYTES:
        raise StorageError(f"{path} is no bundle of grpoflow: it has no bundle.json of a bundle's size")
    try:
        about: dict[str, Any] = parse_json(file.read(found))
        if about.get("format") != FORMAT:
            raise StorageError(f"{path} is a bundle of format {about.get('format')!r}; this version reads {FORMAT}")
        checked(_TABLE, about)
    except (ValueError, AttributeError) as error:
        raise StorageError(f"{path}: its bundle.json is damaged: {error!r}") from error
    names = {entry.filename for entry in entries} - {"bundle.json"}
    if odd := sorted(names ^ about["files"].keys()):
        raise StorageError(f"{path} does not hold the files that its bundle.json names: {', '.join(odd[:3])}")
    return about


def _refuse_more_than_fits(path: Path, entries: list[zipfile.ZipInfo], folder: Path) -> None:
    needed, free = sum(entry.file_size for entry in entries), shutil.disk_usage(folder).free
    # Entries that overlap in the file would together be more than it is.
    if needed > path.stat().st_size:
        raise StorageError(f"{path} says that it holds {needed} bytes, more than it has")
    if needed > free:
        raise StorageError(f"{path} needs {needed} bytes; {folder} has {free} free. Set TMPDIR to another place.")


def _extract(path: Path, file: zipfile.ZipFile, entry: zipfile.ZipInfo, known: dict[str, Any], folder: Path) -> None:
    target, digest, size = folder / entry.filename, hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open(entry) as source, target.open("xb") as sink:
        while block := source.read(1 << 20):
            digest.update(block)
            size += len(block)
            sink.write(block)
    if (size, digest.hexdigest()) != (known["bytes"], known["sha256"]):
        raise StorageError(
            f"{path}: {entry.filename} has changed since the bundle was made: its SHA-256 is another one"
        )


def _refuse_impossible_rows(run: Run, step: int) -> None:
    """Look at every offset of every table: what is read through a memory map is otherwise taken at its word."""
    view = run.step(step)
    for stage in view.stages():
        view.table(stage).validate(full=True)


def _settle(folder: Path) -> None:
    """Give the run's configuration the places where the bundle's files lie now."""
    path = folder / "run" / "config.yaml"
    values = RunConfig.model_validate(read_yaml(path)).model_dump(mode="json")

    def here(place: str | None) -> str | None:
        file = (place or "").rpartition(":")[0] or place
        return str(folder / str(place)) if file and (folder / file).exists() else place

    model, custom = values["actor_rollout_ref"]["model"], values["custom_reward_function"]
    for section, keys in ((model, ("path", "tokenizer_path", "lora_adapter_path")), (custom, ("path",))):
        for key in keys:
            section[key] = here(section[key])
    for entry in values["reward"]["functions"]:
        entry["name"] = here(entry["name"])
    text = to_yaml(RunConfig.model_validate(values)).encode()
    path.write_bytes(text)
    identity = read_json(folder / "run" / "run.json")
    identity["documents"] = {"config.yaml": hashlib.sha256(text).hexdigest()}
    write_json(folder / "run" / "run.json", identity)
