"""Retention: which artifacts let go of their rows, by rule, and never one that recovery may need.

Nothing committed is rewritten. A dropped artifact keeps its manifest, beside which `dropped.json` says when and why its
parts went. A compressed part is the same file in a zstd frame: the manifest's digests hold for what comes out of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pyarrow as pa

from storage.artifacts import DROPPED, MANIFEST, PACKED, read_manifest, unpacked
from storage.checkpoints import Checkpoint, checkpoints, intact_checkpoints, remove_checkpoint
from storage.durable import StorageError, no_space, sync_file, sync_folder, write_json
from storage.ledger import Run
from storage.mirror import changed, listed, removed
from storage.run_writer import RunWriter

CHECKPOINT = "checkpoint"
"""Stands for the name of an artifact where a checkpoint is meant."""


@dataclass(frozen=True)
class Retention:
    """A rule.

    Attributes:
        keep: `all` steps keep their rows, the `last` ones, or one in `every` so many.
        steps: how many last ones; or one in how many.
        compress: rows that are kept though recovery does not need them are compressed.
    """

    keep: Literal["all", "last", "every"] = "all"
    steps: int = 1
    compress: bool = False

    def keeps(self, step: int, last: int) -> bool:
        """Whether a step keeps its rows when `last` is the last finished one."""
        if self.keep == "last":
            return step > last - self.steps
        return self.keep == "all" or step % self.steps == 0

    def __str__(self) -> str:
        kept = {"all": "all steps", "last": f"the last {self.steps} steps", "every": f"one step in {self.steps}"}
        return f"storage.retention keeps {kept[self.keep]}"


@dataclass(frozen=True)
class Aged:
    """An artifact that has rows on disk which nobody needs; or a checkpoint that nobody needs.

    Attributes:
        step: the step it belongs to.
        stage: its name; `checkpoint`: a checkpoint.
        attempt: number of the attempt; of a checkpoint, its lineage.
        bytes: what it takes on disk now.
        why: in words.
        folder: where it lies.
    """

    step: int
    stage: str
    attempt: int
    bytes: int
    why: str
    folder: Path


def last_finished_step(run: Run) -> int:
    """The last step up to which all steps are finished; 0: none is."""
    finished = set(run.finished_steps())
    last = 0
    while last + 1 in finished:
        last += 1
    return last


def first_needed_step(run: Run) -> int:
    """First step whose rows recovery may need; 0: all of them.

    The policy can be rebuilt from any checkpoint of the run's lineage as long as the steps behind the oldest one have
    their rows. The last finished step always keeps them.
    """
    last = last_finished_step(run)

    def is_seen(checkpoint: Checkpoint) -> bool:
        return checkpoint.step <= last and _is_seen(run, checkpoint)

    if next(intact_checkpoints(run.root, lambda _: None, is_seen), None) is None:
        return 0
    return min(checkpoints(run.root, seen=is_seen)[0].step + 1, last)


def what_to_drop(run: Run, rule: Retention, needed: int, *, begin: int = 0) -> list[Aged]:
    """Artifacts whose rows the rule lets go, oldest first. Decides alone; changes nothing.

    Args:
        run: the run.
        rule: what to keep.
        needed: first step that recovery may need: `first_needed_step`.
        begin: look at steps from here on.
    """
    last = last_finished_step(run)
    steps = [step for step in run.steps() if begin <= step < needed and not rule.keeps(step, last)]
    return [aged for step in steps for aged in _rows_of(run, step, str(rule)) if _attempt_is_seen(run, aged)]


def what_to_compress(run: Run, rule: Retention, needed: int, *, begin: int = 0) -> list[Aged]:
    """Artifacts whose rows the rule keeps though recovery does not need them, and that are not compressed yet."""
    last = last_finished_step(run)
    steps = [step for step in run.steps() if rule.compress and begin <= step < needed and rule.keeps(step, last)]
    why = "storage.retention.compress"
    return [aged for step in steps for aged in _rows_of(run, step, why, "part-*.arrow") if not _is_dropped(aged)]


def what_is_dead(run: Run) -> list[Aged]:
    """Artifacts and checkpoints that the run's newest lineage does not see: futures that were gone back from."""
    if not run.has_lineages:
        return []
    why = "it belongs to a future that the run went back from"
    found = [aged for step in run.steps() for aged in _rows_of(run, step, why) if not _attempt_is_seen(run, aged)]
    for checkpoint in checkpoints(run.root):
        if not _is_seen(run, checkpoint):
            size = _size(checkpoint.folder.iterdir())
            found.append(Aged(checkpoint.step, CHECKPOINT, checkpoint.lineage, size, why, checkpoint.folder))
    return found


def drop(run: RunWriter, items: Sequence[Aged]) -> int:
    """Remove rows and checkpoints, write it into the ledger, and return the bytes that are free now.

    A kill on the way leaves each artifact either whole or marked as dropped; a marked one whose parts are still there
    is found again by `what_to_drop` and `what_is_dead`.
    """
    folders = {item.folder for item in items if item.stage == CHECKPOINT}
    for checkpoint in checkpoints(run.root):
        if checkpoint.folder in folders:
            remove_checkpoint(checkpoint)
    for item in items:
        if item.stage != CHECKPOINT:
            _drop_rows(item)
    freed = sum(item.bytes for item in items)
    if items:
        steps = sorted({item.step for item in items})
        run.append("dropped", first=steps[0], last=steps[-1], steps=len(steps), bytes=freed, reason=items[0].why)
    return freed


def compress(run: RunWriter, items: Sequence[Aged]) -> int:
    """Put parts into zstd frames and return the bytes that are free now; a damaged part stays as it is.

    Raises:
        StorageError: the disk is full; the part in question is still there as it was.
    """
    freed = sum(_compress_part(item, part) for item in items for part in sorted(item.folder.glob("part-*.arrow")))
    if freed:
        steps = sorted({item.step for item in items})
        run.append("compressed", first=steps[0], last=steps[-1], steps=len(steps), bytes=freed)
    return freed


def _rows_of(run: Run, step: int, why: str, pattern: str = "part-*") -> Iterator[Aged]:
    """All committed attempts of a step that have parts on disk."""
    for folder in sorted(run.step(step).folder.glob("*/[0-9]*")):
        parts = listed(folder, pattern) if folder.name.isdecimal() and (folder / MANIFEST).is_file() else {}
        if parts:
            yield Aged(step, folder.parent.name, int(folder.name), sum(parts.values()), why, folder)


def _attempt_is_seen(run: Run, aged: Aged) -> bool:
    if not run.has_lineages:
        return True
    try:
        return read_manifest(aged.folder).lineage in run.seen_lineages(aged.step, aged.stage)
    except StorageError:
        return True


def _is_seen(run: Run, checkpoint: Checkpoint) -> bool:
    return checkpoint.lineage == run.lineage_of(checkpoint.step)


def _is_dropped(aged: Aged) -> bool:
    return (aged.folder / DROPPED).exists()


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _drop_rows(item: Aged) -> None:
    about = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "why": item.why, "bytes": item.bytes}
    try:
        if not _is_dropped(item):
            write_json(item.folder / DROPPED, about)
            changed(item.folder / DROPPED)
        _remove_parts(item.folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # On a full disk the room for the note has to come from the rows.
        _remove_parts(item.folder)
        write_json(item.folder / DROPPED, about)
        changed(item.folder / DROPPED)
    sync_folder(item.folder)


def _remove_parts(folder: Path) -> None:
    for name in listed(folder, "part-*"):
        (folder / name).unlink(missing_ok=True)
        removed(folder / name)


def _compress_part(item: Aged, part: Path) -> int:
    known = {it.name: it for it in read_manifest(item.folder).parts}.get(part.name)
    size = part.stat().st_size
    if known is None or known.bytes != size:
        return 0
    packed = part.with_name(part.name + PACKED)
    aside = part.with_name(f".{packed.name}.{os.getpid()}.aside")
    try:
        with pa.memory_map(str(part), "r") as source, pa.output_stream(str(aside), compression="zstd") as sink:
            sink.write(source.read_buffer())
        sync_file(aside)
        if hashlib.sha256(unpacked(aside, size)).hexdigest() != known.sha256:
            return 0
        aside.rename(packed)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(no_space(item.folder, f"compressing {part.name}", size)) from error
        raise
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(item.folder)
    changed(packed)
    part.unlink()
    removed(part)
    return size - packed.stat().st_size
