"""A run copied from one place to another, on this machine or in an object store, with every digest checked."""

from __future__ import annotations

import shutil
from pathlib import Path

from storage.artifacts import DROPPED, MANIFEST, check_parts, read_manifest
from storage.checkpoints import check_checkpoint, checkpoints
from storage.copies import Copy, copy_of, is_kept, local_folder, order
from storage.durable import StorageError, all_or_nothing, sync_file, sync_folder
from storage.ledger import Run, open_run
from storage.mirror import mirrored
from storage.object_store import is_url


def copy_run(source: Path, target: Path) -> tuple[int, int]:
    """Copy a run that nobody writes to; the copy appears whole or not at all.

    Args:
        source: its folder, or `s3://bucket/key`.
        target: a folder that does not exist, or a free `s3://bucket/key`.

    Returns:
        Files and bytes.

    Raises:
        StorageError: the run is being written, something in it is not what its manifest says, or the target is taken.
    """
    run = open_run(source)
    to = local_folder(str(target)) if is_url(target) else target
    if run.owner() is not None:
        raise StorageError(f"{source} is being written. Wait for it, or stop it; then copy it.")
    copy = copy_of(run.root)
    if copy is not None:
        _fetch_all(copy)
    _check(run)
    with mirrored(to) as mirror:
        if to.exists():
            raise StorageError(f"{target} is there already. Name a new place.")
        to.parent.mkdir(parents=True, exist_ok=True)
        aside = to.with_name(f".{to.name}.aside")
        shutil.rmtree(aside, ignore_errors=True)
        names = sorted(
            (path.relative_to(run.root).as_posix() for path in run.root.rglob("*") if path.is_file()), key=order
        )
        size = 0
        with all_or_nothing(aside, f"a copy of {source}"):
            for name in filter(is_kept, names):
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run.root / name, aside / name)
                sync_file(aside / name)
                size += (aside / name).stat().st_size
            _check(Run(aside))
            aside.rename(to)
        sync_folder(to.parent)
        if mirror is not None:
            mirror.changed(to)
    return sum(map(is_kept, names)), size


def _fetch_all(copy: Copy) -> None:
    """Get all files of a run that are in the store alone."""
    for name in copy.index():
        path = copy.folder / name
        if not path.exists():
            copy.fetch(path)


def _check(run: Run) -> None:
    """Compare every part and every checkpoint with its manifest.

    Raises:
        StorageError: one is not what its manifest says.
    """
    for manifest in sorted(run.root.glob(f"steps/*/*/*/{MANIFEST}")):
        if not (manifest.parent / DROPPED).exists():
            check_parts(manifest.parent, read_manifest(manifest.parent))
    for checkpoint in checkpoints(run.root):
        check_checkpoint(checkpoint)
