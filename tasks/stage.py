"""What all stages share: the step they work for, the key that says when a result may be used again, and the commit.

A stage reads committed artifacts, computes, commits its own and returns the reference. Opening a stage looks for an
artifact with the same key first, so that a step run again goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, RunWriter, StorageError, build_table, read_table
from storage.artifacts import Part, read_parts, wait_until_seen, write_part
from storage.durable import sha256_json
from storage.reuse import REUSED, candidates, take_over
from tasks.conditions import CONDITIONS, can_be_shared
from tasks.config import RunConfig


class StageError(ValueError):
    """A stage refuses its batch; trying again with the same inputs gives the same answer."""


class NonFiniteError(StageError):
    """A NaN or an infinity where training needs a number."""


@dataclass(frozen=True)
class Step:
    """One step of one run, as its stages see it.

    Attributes:
        index: number of the step; 0 is before training.
        run: the run's folder, held for writing.
        cfg: the run's configuration.
        validates: the policy after this step is validated as part of it.
        before_stage: called before each stage; what it raises ends the step.
    """

    index: int
    run: RunWriter
    cfg: RunConfig
    validates: bool = False
    before_stage: Callable[[], None] = lambda: None

    def open(
        self,
        stage: str,
        *,
        reads: Sequence[str],
        code: Sequence[str],
        parents: Sequence[Artifact] = (),
        policy_version: int | None = None,
        also: Mapping[str, Any] | None = None,
        policy_digest: Callable[[], str] | None = None,
    ) -> Stage:
        """Begin a stage.

        Args:
            stage: name of the artifact it makes.
            reads: configuration keys that decide its result; a section stands for all keys below it.
            code: modules and packages whose source decides its result.
            parents: the artifacts it reads.
            policy_version: the policy it uses or describes; None: the one before this step.
            also: anything else that decides its result.
            policy_digest: gives the digest of the weights it uses, which within a run follow from `policy_version`.
        """
        self.before_stage()
        version = max(self.index - 1, 0) if policy_version is None else policy_version
        values = self.cfg.model_dump(mode="json")
        made_from = {
            "stage": stage,
            "step": self.index,
            "policy_version": version,
            "config": {key: config_value(values, key) for key in reads},
            "parents": {parent.stage: parent.digest for parent in parents},
            "code": code_digest(tuple(code)),
            "also": dict(also or {}),
        }
        modules = {name: code_digest((name,)) for name in code}
        key = sha256_json(made_from)
        return Stage(self, stage, key, version, tuple(parents), {**made_from, "modules": modules}, policy_digest)


@dataclass(frozen=True)
class PartFolder:
    """Where the ranks write their parts of an artifact.

    Attributes:
        stage: name of the artifact.
        path: folder of the attempt.
        compression: inside the files.
    """

    stage: str
    path: Path
    compression: str

    def write(self, rank: int, columns: Mapping[str, Any]) -> Part:
        """Write one rank's rows and sync them."""
        return write_part(self.path, rank, build_table(self.stage, columns), self.compression)


@dataclass(frozen=True)
class Stage:
    """One stage of one step, from opening to commit.

    Attributes:
        step: the step.
        name: of the artifact it makes.
        key: digest of what the artifact is made from.
        policy_version: the policy it uses or describes.
        parents: the artifacts it reads.
        made_from: what `key` is the digest of, and under `modules` the digest of each module's source.
        policy_digest: gives the digest of the weights it uses; None: it uses none.
    """

    step: Step
    name: str
    key: str
    policy_version: int
    parents: tuple[Artifact, ...]
    made_from: Mapping[str, Any]
    policy_digest: Callable[[], str] | None = None
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def committed(self) -> Artifact | None:
        """The artifact, when it was made from exactly the same things before and is intact.

        What the run does not have itself may be in one of `storage.reuse_from`, and is then taken over.
        """
        return self.step.run.find(self.step.index, self.name, self.key) or self._taken_over()

    def _taken_over(self) -> Artifact | None:
        run, index = self.step.run, self.step.index
        if not run.donors or not run.conditions:
            return None
        conditions = self._conditions()
        for folder, theirs in candidates(run.donors, run.root, index, self.name, self.key):
            if not can_be_shared(theirs, conditions):
                continue
            try:
                artifact = take_over(
                    run,
                    folder,
                    theirs,
                    policy_version=self.policy_version,
                    started_at=self.started_at,
                    parents=self.parents,
                    made_from=self.made_from,
                )
            except StorageError as error:
                run.append("not_reused", step=index, stage=self.name, folder=str(folder), reason=str(error))
                continue
            run.append("reused", step=index, stage=self.name, run_id=theirs.run_id, folder=str(folder))
            return artifact
        return None

    def _conditions(self) -> dict[str, Any]:
        """What the content depends on beside the key; {}: it is not known."""
        known = self.step.run.conditions
        return {**known, "policy": self.policy_digest()} if known and self.policy_digest else known

    def _notes(self, notes: Mapping[str, Any] | None) -> dict[str, Any]:
        """Notes of an artifact that this run makes; those of an artifact it is made from may be among them."""
        kept = {name: value for name, value in (notes or {}).items() if name not in (REUSED, CONDITIONS)}
        conditions = self._conditions()
        return {**kept, CONDITIONS: conditions} if conditions else kept

    @contextmanager
    def parts(self) -> Iterator[PartFolder]:
        """Begin an attempt whose rows ranks write; nothing of it stays when the block fails."""
        with self.step.run.attempt(self.step.index, self.name) as folder:
            yield PartFolder(self.name, folder, self.step.run.compression)

    def read_parts(self, folder: PartFolder, parts: Sequence[Part]) -> pa.Table:
        """The rows that ranks have written, in the order of the ranks.

        Raises:
            StorageError: a part is not what its rank says it is.
            NonFiniteError: a token column holds a NaN or an infinity; the table is kept in quarantine.
        """
        wait_until_seen(folder.path, parts)
        table = read_parts(folder.path, self.name, parts)
        self._refuse_non_finite(table)
        return table

    def commit_parts(
        self,
        folder: PartFolder,
        parts: Sequence[Part],
        *,
        metrics: Mapping[str, float] | None = None,
        shapes: Mapping[str, int] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Commit what `read_parts` has read."""
        about = self._about(metrics)
        return self.step.run.commit_parts(folder.path, parts, **about, shapes=shapes, notes=self._notes(notes))

    def _about(self, metrics: Mapping[str, float] | None) -> dict[str, Any]:
        """What every manifest of this stage says."""
        return {
            "key": self.key,
            "policy_version": self.policy_version,
            "started_at": self.started_at,
            "parents": self.parents,
            "made_from": self.made_from,
            "metrics": {name: value if math.isfinite(value) else None for name, value in (metrics or {}).items()},
        }

    def commit(
        self,
        columns: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        shapes: Mapping[str, int] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Check the columns and commit them.

        Raises:
            NonFiniteError: a token column holds a NaN or an infinity; the table is kept in quarantine.
        """
        table = build_table(self.name, columns)
        self._refuse_non_finite(table)
        return self.step.run.commit(
            self.step.index, self.name, table, **self._about(metrics), shapes=shapes, notes=self._notes(notes)
        )

    def _refuse_non_finite(self, table: pa.Table) -> None:
        for column in table.schema:
            if column.type != pa.large_list(pa.float32()) or table[column.name].null_count:
                continue
            rows = Ragged.from_arrow(table[column.name])
            bad = np.flatnonzero(~np.isfinite(rows.values))
            if not len(bad):
                continue
            row = int(np.searchsorted(rows.offsets, bad[0], side="right")) - 1
            token = int(bad[0] - rows.offsets[row])
            where = (
                f"step {self.step.index}, stage {self.name}, column {column.name}: {rows.values[bad[0]]} at row {row}, "
                f"token {token} (sample {table['sample_id'][row]}, group {table['group_id'][row]}); "
                f"{len(bad)} such values in all"
            )
            folder = self.step.run.quarantine(self.step.index, self.name, table, where)
            raise NonFiniteError(
                f"{where}. The batch is refused and kept in {folder}; the policy is still version "
                f"{self.policy_version}. Look at the logits of that sample; common causes are overflow in "
                "actor_rollout_ref.model.dtype and weights that are already damaged."
            )


def config_value(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in a configuration as JSON values; a section gives all its keys."""
    value: Any = values
    for name in key.split("."):
        value = value[name]
    return value


@cache
def code_digest(modules: tuple[str, ...]) -> str:
    """SHA-256 over the source of modules; a package stands for all modules in it."""
    digest = hashlib.sha256()
    for name in sorted(modules):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"no module {name}")
        origin = Path(spec.origin)
        files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
        for path in files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def aligned(artifact: Artifact, sample_ids: pa.ChunkedArray, columns: Sequence[str]) -> pa.Table:
    """Columns of an artifact in the order of `sample_ids`: joined by id, never by position.

    Raises:
        StageError: the artifact has other samples, or one of them twice.
    """
    table = read_table(artifact, ["sample_id", *columns])
    ids = table["sample_id"]
    if ids.equals(sample_ids):
        return table
    places = {name: row for row, name in enumerate(ids.to_pylist())}
    wanted = sample_ids.to_pylist()
    missing = [name for name in wanted if name not in places]
    if missing or len(places) != len(ids) or len(wanted) != len(ids):
        raise StageError(
            f"{artifact.stage} in {artifact.folder} does not hold the same samples as the rollouts: "
            f"{len(ids)} rows with {len(places)} different ids against {len(wanted)}, missing {missing[:3]}"
        )
    return table.take(pa.array([places[name] for name in wanted]))
