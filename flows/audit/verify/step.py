"""One step as the checks of `verify` see it: manifests and tables, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flows.audit.verify.base import Bench, Cannot, or_raise
from storage import Artifact, Ragged, StorageError
from storage.artifacts import DROPPED, Manifest, read_manifest, read_table, reference
from storage.ledger import STAGES
from storage.schema import without_round
from tasks.config import RunConfig


class Look:
    """One step as its checks see it: manifests and tables, each read once. It holds nothing of other steps."""

    def __init__(self, bench: Bench, step: int) -> None:
        self.bench, self.step = bench, step
        self.run = bench.run
        self.view = self.run.step(step)
        self._folders: dict[str, Path | Cannot] = {}
        self._manifests: dict[str, Manifest | Cannot] = {}
        self._tables: dict[str, pa.Table | Cannot] = {}
        self.made_again: dict[str, Any] = {}
        names = {path.name for path in self.view.folder.glob("*/") if without_round(path.name) in STAGES}
        for name in sorted(names, key=lambda name: (STAGES.index(without_round(name)), name)):
            try:
                folder = self.view.used(name)
            except StorageError as error:
                self._folders[name] = Cannot(str(error))
                continue
            if folder is not None:
                self._folders[name] = folder
        self._dropped = {name for name in self._folders if self.is_dropped(name)}

    @property
    def stages(self) -> list[str]:
        """Artifacts that the step has, damaged ones included."""
        return list(self._folders)

    def having(self, *kinds: str) -> list[str]:
        """Those among them of some kinds; `rollouts` stands for `rollouts-01` too."""
        return [name for name in self._folders if without_round(name) in kinds]

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """`step.json`; None: the step is open.

        Raises:
            Cannot: it is damaged.
        """
        try:
            record = self.view.record
        except StorageError as error:
            raise Cannot(str(error)) from error
        if record is not None:
            odd = [name for name in ("metrics", "artifacts") if not isinstance(_entry(record, name), dict)]
            if odd:
                path = self.run.record_path(self.step)
                raise Cannot(f"{path} is damaged (it has no {odd[0]}). Remove it: the step is then finished again.")
        return record

    def manifest(self, stage: str) -> Manifest:
        """Manifest of the attempt that the step used.

        Raises:
            Cannot: there is none, or it is damaged.
        """
        if stage not in self._folders:
            raise Cannot(f"there is no {stage}")
        if stage not in self._manifests:
            folder = self._folders[stage]
            try:
                self._manifests[stage] = read_manifest(or_raise(folder))
            except (StorageError, OSError) as error:
                self._manifests[stage] = Cannot(str(error))
            except Cannot as error:
                self._manifests[stage] = error
        manifest: Manifest = or_raise(self._manifests[stage])
        return manifest

    def artifact(self, stage: str) -> Artifact:
        """Reference to the attempt that the step used; raises as `manifest` does."""
        manifest = self.manifest(stage)
        return reference(or_raise(self._folders[stage]), manifest)

    def is_dropped(self, stage: str) -> bool:
        """Whether retention has let its rows go."""
        folder = self._folders.get(stage)
        return isinstance(folder, Path) and (folder / DROPPED).exists()

    def dropped_since(self) -> list[str]:
        """Artifacts whose rows retention has let go since this step was first looked at: the run is going on."""
        return [stage for stage in self._folders if stage not in self._dropped and self.is_dropped(stage)]

    def table(self, stage: str) -> pa.Table:
        """Its rows, memory-mapped.

        Raises:
            Cannot: there are none to read: missing, damaged, or let go by retention.
        """
        artifact = self.artifact(stage)
        if stage not in self._tables:
            try:
                self._tables[stage] = read_table(artifact)
            except (StorageError, OSError) as error:
                why = "is not kept (storage.retention)" if self.is_dropped(stage) else "is damaged, see `files`"
                self._tables[stage] = Cannot(f"{stage} {why}" if not isinstance(error, OSError) else str(error))
        table: pa.Table = or_raise(self._tables[stage])
        return table

    def cfg(self, stage: str | None = None) -> RunConfig:
        """The configuration of the step's lineage; of a stage, with the values that it was made under."""
        if stage is None:
            return self.bench.cfg(self.run.lineage_of(self.step))
        manifest = self.manifest(stage)
        return self.bench.cfg(manifest.lineage, manifest.made_from)

    def joined(self, stage: str, to: str, columns: Sequence[str]) -> pa.Table:
        """Columns of an artifact in the order of the samples of another one, joined by id.

        Raises:
            Cannot: they do not hold the same samples, or cannot be read.
        """
        table, wanted = self.table(stage), self.table(to)["sample_id"]
        if table["sample_id"].equals(wanted):
            return table.select(list(columns))
        places = {name: row for row, name in enumerate(table["sample_id"].to_pylist())}
        rows = [places.get(name) for name in wanted.to_pylist()]
        if None in rows or len(places) != table.num_rows or len(rows) != table.num_rows:
            raise Cannot(f"{stage} does not hold the samples of {to}, see `ids`")
        return table.select(list(columns)).take(pa.array(rows))


def _entry(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else None


def place_of(rows: Ragged, value: int) -> tuple[int, int]:
    """Row and token of a place in the flat values."""
    row = int(np.searchsorted(rows.offsets, value, side="right")) - 1
    return row, int(value - rows.offsets[row])


def base_of(stage: str) -> str:
    """The responses that an artifact describes: `rollouts`, `rollouts-01`, `greedy_rollouts`, `val_rollouts`."""
    whole = without_round(stage)
    number = stage.removeprefix(whole)
    prefix = next((start for start in ("greedy_", "val_") if whole.startswith(start)), "")
    return f"{prefix}rollouts{number}"


def prompts_of(stage: str) -> str:
    """The prompts that an artifact's samples answer."""
    whole = without_round(stage)
    prefix = "val_" if whole.startswith("val_") else ""
    return f"{prefix}prompts{stage.removeprefix(whole)}"
