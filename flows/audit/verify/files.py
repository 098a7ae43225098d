"""Checks of what lies on disk: digests, schemas, which stages are there, and what each was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from flows.audit.verify.base import Account, Bench, Cannot
from flows.audit.verify.step import Look
from storage import Run, StorageError
from storage.artifacts import MANIFEST, PACKED, Manifest, Part, check_parts, read_manifest, stored_part, unpacked
from storage.durable import parse_json, read_json, sha256_json
from storage.schema import FORMAT_VERSION, schema_of
from tasks.config import RunConfig

VOCABULARY = {
    "finish_reason": {"stop", "length"},
    "status": {"ok", "error", "timeout", "unparsed", "not_applicable"},
}
"""Columns that hold one of a few words."""


def documents(bench: Bench, account: Account) -> None:
    """The texts a run was begun with are what `run.json` says, they are all there, and every lineage's can be read."""
    run = bench.run
    for name, digest in run.identity.get("documents", {}).items():
        path = run.root / name
        account.look()
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        if found != digest:
            what = "is missing" if found is None else f"has SHA-256 {found[:12]}, was begun with {digest[:12]}"
            account.fail(f"{name} {what}")
    for number in run.lineages:
        account.look()
        try:
            bench.cfg(number)
        except Cannot as reason:
            account.fail(f"lineage {number}: {reason}")
    for name, entries in _DOCUMENTS.items():
        for number, lineage in run.lineages.items():
            path = run.root / lineage.file_name(name)
            # The run's own is written before its first step; a later lineage has one of its own where it differs.
            if path.is_file() or (number == 1 and name in _ALWAYS and any(run.steps())):
                account.look()
                _require_json(path, entries, account)
    _check_lineages(run, account)
    _read_ledger(run.root / "ledger.jsonl", bench, account)


_DOCUMENTS = {"plan.json": ("total_steps",), "inputs.json": ("digests",), "tracking.json": ("uri",)}
"""Documents of a lineage, and the entries without which each is none."""

_ALWAYS = ("plan.json", "inputs.json")


def _require_json(path: Path, entries: Sequence[str], account: Account) -> None:
    try:
        values = read_json(path)
    except FileNotFoundError:
        account.fail(f"{path.name} is missing")
    except (ValueError, OSError) as error:
        account.fail(f"{path.name} is damaged: {error}")
    else:
        if not isinstance(values, dict) or (lacking := [name for name in entries if name not in values]):
            what = f"it has no {lacking[0]}" if isinstance(values, dict) else "it is no JSON object"
            account.fail(f"{path.name} is damaged: {what}")


def _check_lineages(run: Run, account: Account) -> None:
    """Where each lineage branched off is what the ledger tells of it."""
    told = {event["lineage"]: event for event in run.events() if event["event"] == "lineage" and "lineage" in event}
    for number, event in told.items():
        account.look()
        lineage = run.lineages.get(number)
        if lineage is None:
            account.fail(f"lineages/{number:04d}.json is missing: the ledger tells of lineage {number}")
            continue
        for name in ("parent", "step", "stage"):
            have = getattr(lineage, name)
            if name in event and event[name] != have:
                account.fail(f"lineages/{number:04d}.json says {name} {have}, the ledger {event[name]}")


def _read_ledger(path: Path, bench: Bench, account: Account) -> None:
    """A line torn by a crash is told, not counted: no reader takes it for an event."""
    if not path.is_file():
        account.fail("ledger.jsonl is missing")
        return
    lines = path.read_bytes().splitlines()
    torn = 0
    for line in lines:
        try:
            torn += not isinstance(parse_json(line), dict)
        except ValueError:
            torn += 1
    account.look(len(lines))
    if torn:
        bench.notes.append(f"ledger.jsonl holds {torn} torn lines, which count for nothing")


# ---------------------------------------------------------------------------------------------------------- each step


def files(look: Look, account: Account) -> None:
    """Every part has the size and SHA-256 of its manifest, whose own checksum holds, and reads as the rows it says."""
    _require_record(look, account)
    for stage in look.stages:
        try:
            manifest = look.manifest(stage)
        except Cannot as reason:
            account.look()
            account.fail(str(reason), look.step, stage)
            continue
        if look.is_dropped(stage):
            account.skip(f"{stage} is not kept (storage.retention)", look.step)
            continue
        account.look(len(manifest.parts))
        what = _wrong_with_parts(look, stage, manifest)
        if what is not None and (what := _wrong_with_parts(look, stage, manifest)) is not None:
            account.fail(what, look.step, stage)
    _look_at_other_attempts(look)


def _require_record(look: Look, account: Account) -> None:
    try:
        _ = look.record
    except Cannot as reason:
        account.look()
        account.fail(str(reason), look.step)


def _wrong_with_parts(look: Look, stage: str, manifest: Manifest) -> str | None:
    """What is wrong with an artifact's files; None: nothing, or retention has let them go in the meantime.

    Asked twice before it counts: the run may be compressing these very files.
    """
    folder = look.artifact(stage).folder
    try:
        check_parts(folder, manifest)
        for part in manifest.parts:
            _check_rows(folder, part)
    except (StorageError, OSError) as error:
        return None if look.is_dropped(stage) else str(error)
    return None


def _check_rows(folder: Path, part: Part) -> None:
    """A footer can list fewer batches than the file holds: a reader of files and a reader of streams then disagree."""
    path = stored_part(folder, part.name)
    source = unpacked(path, part.bytes) if path.name.endswith(PACKED) else pa.memory_map(str(path), "r").read_buffer()
    try:
        with pa.ipc.open_file(source) as reader:
            rows = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
        with pa.ipc.open_stream(pa.BufferReader(source.slice(8))) as stream:
            streamed = sum(batch.num_rows for batch in stream)
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(f"{path} is no readable Arrow file: {error}") from error
    if rows != part.rows or streamed != part.rows:
        raise StorageError(
            f"{path}: its footer lists {rows} rows, the file holds {streamed}, and the manifest says {part.rows}"
        )


def _look_at_other_attempts(look: Look) -> None:
    """Damage to an attempt that no reader takes is told: a run makes such an artifact again."""
    used = {look.artifact(stage).folder for stage in look.stages if _is_read(look, stage)}
    broken = {stage for stage in look.stages if not _is_read(look, stage)}
    for folder in sorted(look.view.folder.glob("*/[0-9]*")):
        if folder in used or folder.parent.name in broken or not (folder / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(folder)
            if not (folder / "dropped.json").exists():
                check_parts(folder, manifest)
        except StorageError as error:
            look.bench.notes.append(f"step {look.step}: an attempt that nothing reads is damaged: {error}")


def _is_read(look: Look, stage: str) -> bool:
    try:
        look.manifest(stage)
    except Cannot:
        return False
    return True


def schemas(look: Look, account: Account) -> None:
    """Every artifact has the schema of its name: types, no null where none may be, words from their vocabulary."""
    for stage in look.stages:
        with account.attempt(look.step):
            manifest, wanted = look.manifest(stage), schema_of(stage)
            account.look()
            wanted_id = wanted.metadata[b"grpoflow.schema"].decode()
            if manifest.schema_id != wanted_id or manifest.format_version > FORMAT_VERSION:
                account.fail(f"schema {manifest.schema_id}, not {wanted_id}", look.step, stage)
                continue
            table = look.table(stage)
            if not table.schema.equals(wanted):
                account.fail(f"columns are {table.schema.names}, not {wanted.names}", look.step, stage)
                continue
            _check_values(table, look.step, stage, account)


def _check_values(table: pa.Table, step: int, stage: str, account: Account) -> None:
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        account.fail(f"its arrays are inconsistent: {error}", step, stage)
        return
    for column in table.schema:
        if not column.nullable and table[column.name].null_count:
            account.fail(f"{column.name} holds {table[column.name].null_count} nulls", step, stage)
        if column.name in VOCABULARY:
            odd = set(pc.unique(table[column.name]).to_pylist()) - VOCABULARY[column.name]
            for word in sorted(map(str, odd)):
                account.fail(f"{column.name} holds {word!r}", step, stage)


def expected_stages(cfg: RunConfig) -> list[str]:
    """Artifacts that every finished training step of a configuration has."""
    names = ["prompts", "rollouts", "old_log_probs", *(["ref_log_probs"] if cfg.needs_ref else []), "rewards"]
    names += ["greedy_rollouts", "greedy_rewards"] if cfg.estimator_needs("greedy_score") else []
    if cfg.algorithm.filter_groups.enable:
        names += ["prompts-01", "rollouts-01", "rewards-01"]
    return [*names, "advantages", "updates"]


def stages(look: Look, account: Account) -> None:
    """A finished step has every artifact that it was made of, and so has every step before it."""
    expected = expected_stages(look.cfg()) if look.step else []
    record = look.record
    wanted = list(dict.fromkeys([*expected, *(record or {}).get("artifacts", {})]))
    missing = [stage for stage in wanted if stage not in look.stages]
    account.look(len(wanted))
    if record is None:
        later = [step for step in look.run.finished_steps() if step > look.step]
        if later and look.step:
            account.fail(f"step.json is missing though step {later[0]} is finished", look.step)
        elif look.step:
            have = ", ".join(look.stages) or "nothing"
            gone = f"missing: {', '.join(missing)}" if missing else "no stage is missing"
            look.bench.notes.append(f"step {look.step} is open: it has {have}; {gone}")
        return
    for stage in missing:
        account.fail(f"{stage} is missing though the step is finished", look.step, stage)
    if look.step > 1 and not look.run.step(look.step - 1).folder.is_dir():
        account.fail(f"step {look.step - 1} is missing though step {look.step} is finished", look.step - 1)


def parents(look: Look, account: Account) -> None:
    """Every artifact was made from the artifacts that the step used, and `step.json` names these."""
    for stage in look.stages:
        with account.attempt(look.step):
            manifest = look.manifest(stage)
            account.look()
            own = (manifest.run_id, manifest.step, manifest.stage)
            if own != (look.run.run_id, look.step, stage):
                account.fail(f"its manifest says run {own[0]}, step {own[1]}, stage {own[2]}", look.step, stage)
            if manifest.lineage not in look.run.lineages:
                account.fail(f"it is of lineage {manifest.lineage}, which the run has not", look.step, stage)
            _check_key(look, stage, account)
            for parent, digest in manifest.parents.items():
                with account.attempt(look.step):
                    _compare(look, stage, parent, digest, account)
    with account.attempt(look.step):
        for stage, digest in ((look.record or {}).get("artifacts", {})).items():
            if stage in look.stages:
                found = look.manifest(stage).digest
                account.look()
                if found != digest:
                    account.fail(f"step.json names {digest[:12]}, stored is {found[:12]}", look.step, stage)


def _check_key(look: Look, stage: str, account: Account) -> None:
    """The key is the digest of what the artifact says it was made from."""
    manifest = look.manifest(stage)
    if manifest.made_from is None:
        return
    made_from = {name: value for name, value in manifest.made_from.items() if name != "modules"}
    if sha256_json(made_from) != manifest.key:
        account.fail("its key is not the digest of what it says it was made from", look.step, stage)
    elif made_from.get("parents", {}) != manifest.parents:
        account.fail("it names other parents than its key was made from", look.step, stage)


def _compare(look: Look, stage: str, parent: str, digest: str, account: Account) -> None:
    found = look.manifest(parent).digest
    account.look()
    if found != digest:
        account.fail(f"it was made from {parent} {digest[:12]}, stored is {found[:12]}", look.step, stage)
