"""Checks of policy versions: who sampled, what an update made, and whether checkpoints hold just that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from flows.audit.verify.base import Account, Bench, Cannot
from flows.audit.verify.step import Look
from flows.run_folder import PLACES, first_weights_digest
from storage import Run, StorageError, open_run
from storage.artifacts import Manifest
from storage.checkpoints import Checkpoint, check_checkpoint, checkpoints
from storage.durable import read_json
from storage.ledger import StepView
from tasks.config import RunConfig

if TYPE_CHECKING:
    import torch


def digest_after(run: Run, step: int) -> str:
    """Digest of the weights after a step, as its update wrote it down; of step 0, of those the run began with.

    Raises:
        Cannot: it is not kept.
    """
    try:
        if step == 0:
            first = first_weights_digest(run)
            if first is None:
                raise Cannot("which weights the run began with was not written down")
            return first
        digest: str | None = run.step(step).table("updates")["weights_digest"].to_pylist()[-1]
    except (StorageError, FileNotFoundError, IndexError) as error:
        raise Cannot("the weights' digest after the step before is not kept") from error
    if digest is None:
        raise Cannot("the weights' digest after the step before was not written down")
    return digest


def policy(look: Look, account: Account) -> None:
    """Responses and log-probs are of the policy that the step before has made, and an update moves it on by one."""
    for stage in look.stages:
        with account.attempt(look.step):
            manifest = look.manifest(stage)
            wanted = _version(stage, look.step)
            account.look()
            if manifest.policy_version != wanted:
                says = f"its manifest says policy {manifest.policy_version}, of this step it is {wanted}"
                account.fail(says, look.step, stage)
    for stage in look.having("rollouts", "greedy_rollouts", "val_rollouts"):
        with account.attempt(look.step):
            _sampled_by(look, stage, account)
    for stage in look.having("updates"):
        with account.attempt(look.step):
            for column, version in (("policy_version_in", look.step - 1), ("policy_version_out", look.step)):
                for index, value in enumerate(look.table(stage)[column].to_pylist()):
                    if value != version:
                        account.fail(f"update {index}: {column} is {value}, it must be {version}", look.step, stage)


def _version(stage: str, step: int) -> int:
    """Policy that an artifact of a step uses or describes."""
    if stage.startswith("val_"):
        return step
    return 0 if stage == "ref_log_probs" else max(step - 1, 0)


def _sampled_by(look: Look, stage: str, account: Account) -> None:
    version, digest = _version(stage, look.step), look.manifest(stage).notes.get("policy_digest")
    with account.attempt(look.step):
        table = look.table(stage)
        account.look(table.num_rows)
        if table.num_rows and pc.min_max(table["policy_version"]).as_py() != {"min": version, "max": version}:
            for sample, found in zip(
                *(table[name].to_pylist() for name in ("sample_id", "policy_version")), strict=True
            ):
                if found != version:
                    says = f"it was sampled from policy {found}, this step samples from {version}"
                    account.fail(says, look.step, stage, sample)
    if digest is None:
        raise Cannot("which weights were sampled from was not written down")
    wanted = digest_after(look.run, version)
    account.look()
    if digest != wanted:
        if moved_places(look.run):
            raise Cannot("the run has changed the number of its ranks, which rounds a rebuilt policy otherwise")
        says = f"sampled from weights {digest[:12]}, those of policy {version} are {wanted[:12]}"
        account.fail(says, look.step, stage)


def moved_places(run: Run) -> bool:
    """Whether the run went on with other ranks or sums at some point: a rebuilt policy then equals the one before up to
    rounding alone."""
    changes = [key for event in run.events() for key in event.get("changes", {}) if event["event"] in _CHANGES]
    return any(key.startswith(PLACES) for key in changes)


_CHANGES = ("config_changed", "lineage")


# --------------------------------------------------------------------------------------------------------- checkpoints


def saved(bench: Bench, steps: Iterable[int], account: Account) -> None:
    """A checkpoint's files are as committed, and its weights are those that its step's update has made."""
    chosen = set(steps)
    if not checkpoints(bench.run.root):
        account.skip("no checkpoint is kept", None)

    def skipped(why: str) -> None:
        account.look()
        account.fail(why)

    for checkpoint in checkpoints(bench.run.root, skipped):
        if checkpoint.step not in chosen:
            account.skip("a checkpoint of a step that was not asked for", checkpoint.step)
            continue
        account.look()
        name = checkpoint.folder.name
        with account.attempt(checkpoint.step):
            try:
                check_checkpoint(checkpoint)
                run = open_run(bench.run.root, lineage=checkpoint.lineage)
                for what in _wrong_with(checkpoint, run, bench.cfg(run.lineage_of(checkpoint.step))):
                    account.fail(f"checkpoint {name}: {what}", checkpoint.step)
            except (StorageError, OSError, ValueError, KeyError) as error:
                if not checkpoint.folder.is_dir():
                    raise Cannot("the run has let this checkpoint go meanwhile") from error
                account.fail(f"checkpoint {name}: {error}", checkpoint.step)


def _wrong_with(checkpoint: Checkpoint, run: Run, cfg: RunConfig) -> Iterable[str]:
    """Sentences about what does not fit the run's record of the step."""
    state = read_json(checkpoint.folder / "state.json")
    about, step = checkpoint.manifest, checkpoint.step
    if about.get("run_id") != run.run_id:
        yield f"it is of run {about.get('run_id')}"
    if {about.get("policy_version"), state["policy_version"]} != {step}:
        yield f"it holds policy {state['policy_version']}, its manifest says {about.get('policy_version')}"
    if about.get("weights_digest") != state["weights_digest"]:
        yield f"state.json says weights {state['weights_digest'][:12]}, its manifest {about['weights_digest'][:12]}"
    view = run.step(step)
    made = view.manifest("updates") if step else None
    digests = tensor_digests(checkpoint.folder)
    rounded = moved_places(run)
    if state["frozen_digest"] == hashlib.sha256().hexdigest():
        found = hashlib.sha256(b"".join(digests.values())).hexdigest()
        if found != state["weights_digest"]:
            yield f"its tensors have SHA-256 {found[:12]}, state.json says {state['weights_digest'][:12]}"
    if made is not None and not rounded:
        yield from _other_weights(digests, made, state, view)
    yield from _other_counters(about, cfg, view)


def _other_weights(
    digests: Mapping[str, bytes], made: Manifest, state: Mapping[str, Any], view: StepView
) -> Iterable[str]:
    known = made.notes.get("tensors", {})
    moved = [name for name, digest in digests.items() if known.get(name) != digest.hex()[:16]]
    moved += sorted(known.keys() - digests.keys())
    if known and moved:
        yield (
            f"it does not hold the weights that update {view.index} has made: {moved[0]} is another one "
            f"({len(moved)} of {len(known)} tensors)"
        )
    elif not view.is_dropped("updates"):
        wanted = digest_after(view.run, view.index)
        if state["weights_digest"] != wanted:
            yield f"it says weights {state['weights_digest'][:12]}, update {view.index} has made {wanted[:12]}"


def _other_counters(about: Mapping[str, Any], cfg: RunConfig, view: StepView) -> Iterable[str]:
    """What a resumed run takes from a checkpoint's manifest beside the weights."""
    from tasks.advantage import kl_coef
    from tasks.filter_groups import calls_before

    wanted: dict[str, Any] = {
        "kl_coef": kl_coef(cfg, view.artifact("advantages")),
        "generate_calls": calls_before(view.artifact("prompts")),
    }
    for name, value in wanted.items():
        if name in about and about[name] != value:
            yield f"its manifest says {name} {about[name]}, after step {view.index} it is {value}"


def tensor_digests(folder: Path) -> dict[str, bytes]:
    """SHA-256 of every weight, by name, as `PolicyWorker.weights_digest` joins them; one tensor in memory at a time."""
    from tasks.workers.weights import tensor_digest

    return {name: tensor_digest(name, read()) for name, read in sorted(_weights(folder))}


def _weights(folder: Path) -> Iterable[tuple[str, Callable[[], torch.Tensor]]]:
    """Name of every weight and how to read it, from one file or the shards of several ranks."""
    from safetensors import safe_open

    whole = folder / "model.safetensors"
    if whole.is_file():
        with safe_open(whole, "pt") as file:
            names = list(file.keys())

        def read(name: str) -> torch.Tensor:
            with safe_open(whole, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
            return tensor

        for name in names:
            yield name, lambda name=name: read(name)  # type: ignore[misc]
        return
    yield from _sharded(folder)


def _sharded(folder: Path) -> Iterable[tuple[str, Callable[[], torch.Tensor]]]:
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    known = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata

    def read(name: str) -> torch.Tensor:
        kind: Any = known[name]
        into = {name: torch.empty(kind.size, dtype=kind.properties.dtype)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
        return into[name]

    for name in known:
        if ":" not in name:
            yield name, lambda name=name: read(name)  # type: ignore[misc]
