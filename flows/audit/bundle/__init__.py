"""One step in one file: a zip of what a replay of it needs, without what is personal, and the same file opened safely.

    bundle.json                what is in it: step, files with SHA-256, what was left out
    run/…                      a run of this one step: its artifacts, the policy before it as a checkpoint
    model/…  tokenizer/…       files of the model that the run began with
    rewards/0/reward.py        the user's own files of reward functions

Rows are as they are, byte for byte, so that their digests hold. Manifests lose host, process and paths, and are signed
anew; which steps came before, the ledger, data files and log files are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from flows.audit.bundle.model_files import files_of_model
from flows.audit.bundle.user_code import files_of_rewards
from flows.audit.replay.inputs import as_it_was
from flows.audit.replay.one_process import Policy, for_one_process, on_cpu_for_certain
from flows.audit.rows_out import refuse_inside
from flows.audit.sources import open_lineage
from flows.config import to_yaml
from flows.recover import newest_checkpoint, planned_steps
from flows.run_folder import config_of, first_weights_digest
from storage import Run, StorageError
from storage.artifacts import MANIFEST, check_parts, read_manifest, stored_part
from storage.checkpoints import Checkpoint, folder_name, save_checkpoint
from storage.durable import read_json, sha256_json
from tasks.advantage import kl_coef
from tasks.config import RunConfig
from tasks.filter_groups import calls_before
from tasks.stage import code_digest

FORMAT = "grpoflow.bundle/1"
LIBRARIES = ("numpy", "pyarrow", "torch", "transformers")

_SECRET = re.compile(r"(^|_)(api_?key|key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)
LEFT_OUT = "(left out)"

Member = Path | bytes
"""A file of the bundle: one on disk, or its bytes."""


@dataclass
class _Bundle:
    """What goes into the file, by its name there; and what a reader is told."""

    members: dict[str, Member] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    import_from: list[str] = field(default_factory=list)

    def put_json(self, name: str, value: Any) -> None:
        self.members[name] = json.dumps(value, indent=1, sort_keys=True).encode()


def write_bundle(
    run: Run, step: int, target: Path, *, overrides: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Write a bundle of one step, from which each of its stages but `prompts` can be replayed.

    Args:
        run: the run; it is only read.
        step: number of the step; 0: the validation before training.
        target: the file, which is not there yet.
        overrides: key=value of the configuration that are other ones here, such as the model's path.
        say: told how the policy was rebuilt.

    Returns:
        What `bundle.json` holds.

    Raises:
        StorageError, ValueError: the step, its rows, the policy before it or the model are not there, or the file
            would lie in a run's folder.
        FileExistsError: the file is there.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already. Give -o another name.")
    refuse_inside(target, [run.root])
    view, lineage = run.step(step), run.lineage_of(step)
    if not view.stages():
        raise StorageError(f"{run.root} has no step {step}; it has steps {run.steps()}")
    cfg = as_it_was(config_of(run, lineage), None, overrides)
    bundle = _Bundle()
    on_cpu = on_cpu_for_certain(cfg, [manifest for stage in view.stages() if (manifest := view.manifest(stage))])
    with TemporaryDirectory(prefix="grpoflow-bundle-") as made:
        # What may be refused comes before the policy, which takes longest.
        _put_step(bundle, run, step)
        _put_documents(bundle, run, lineage, _with_files(bundle, cfg, on_cpu))
        weights = _put_policy(bundle, run, step - 1, cfg, Path(made), say) if step > 1 else first_weights_digest(run)
        about = {
            "format": FORMAT,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "run_id": run.run_id,
            "step": step,
            "lineage": lineage,
            "stages": view.stages(),
            "policy": {"version": max(step - 1, 0), "weights_digest": weights},
            "code_digest": code_digest(("tasks", "storage")),
            "versions": versions(),
            "import_from": bundle.import_from,
            "left_out": bundle.told,
        }
        return _write(bundle, about, target)


def versions() -> dict[str, str]:
    """Versions of the libraries that decide the last digits."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# ------------------------------------------------------------------------------------------------------------ the parts


def _put_step(bundle: _Bundle, run: Run, step: int) -> None:
    """The step's artifacts as they are used, and of the step before the manifests that a stage reads."""
    view = run.step(step)
    for stage in view.stages():
        _put_artifact(bundle, view.used(stage), rows=True)
    if step > 1:
        for stage in ("prompts", "advantages"):
            _put_artifact(bundle, run.step(step - 1).used(stage), rows=False)
    if view.record is not None:
        bundle.put_json(f"run/steps/{step:06d}/step.json", {**view.record, "lineage": 1})


def _put_artifact(bundle: _Bundle, folder: Path | None, *, rows: bool) -> None:
    if folder is None:
        return
    manifest = read_manifest(folder)
    place = f"run/steps/{manifest.step:06d}/{manifest.stage}/{folder.name}"
    if rows:
        check_parts(folder, manifest)
        for part in manifest.parts:
            path = stored_part(folder, part.name)
            bundle.members[f"{place}/{path.name}"] = path
    values = read_json(folder / MANIFEST)
    bundle.put_json(f"{place}/{MANIFEST}", impersonal_manifest(values))


def impersonal_manifest(values: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without host, process and paths, of the bundle's only lineage; key and checksum are made anew."""
    kept = {name: value for name, value in values.items() if name != "checksum"}
    kept |= {"host": "", "pid": 0, "lineage": 1, "notes": _impersonal(kept["notes"], [])}
    if kept.get("made_from") is not None:
        made_from = _impersonal(kept["made_from"], [])
        key = sha256_json({name: value for name, value in made_from.items() if name != "modules"})
        kept |= {"made_from": made_from, "key": key}
    return {**kept, "checksum": sha256_json(kept)}


def _put_policy(
    bundle: _Bundle, run: Run, step: int, cfg: RunConfig, made: Path, say: Callable[[str], None]
) -> str | None:
    """The policy after a step, as a checkpoint; return the digest of its weights."""
    found = newest_checkpoint(run, step, say)
    if found is None or found.step != step:
        found = _made_checkpoint(run, step, cfg, made, say)
    manifest = {**found.manifest, "lineage": 1}
    manifest.pop("checksum", None)
    place = f"run/checkpoints/{folder_name(step, 1)}"
    for name in manifest["files"]:
        bundle.members[f"{place}/{Path(name).name}"] = found.folder / Path(name).name
    bundle.put_json(f"{place}/{MANIFEST}", {**manifest, "checksum": sha256_json(manifest)})
    digest: str | None = manifest.get("weights_digest")
    return digest


def _made_checkpoint(run: Run, step: int, cfg: RunConfig, made: Path, say: Callable[[str], None]) -> Checkpoint:
    policy, view = Policy(run, say), run.step(step)
    policy.expect(for_one_process(cfg, "cpu"), step, run.lineage_of(step))
    about = {
        "run_id": run.run_id,
        "policy_version": step,
        "weights_digest": policy.weights_digest(),
        "kl_coef": kl_coef(cfg, view.artifact("advantages")),
        "generate_calls": calls_before(view.artifact("prompts")),
    }
    try:
        return save_checkpoint(made, step, policy.save, expected_bytes=policy.checkpoint_bytes(), about=about)
    finally:
        policy.close()


def _with_files(bundle: _Bundle, cfg: RunConfig, on_cpu: bool) -> RunConfig:
    """Put in the files that the configuration names, and return it with their places in the bundle."""
    model, code = files_of_model(cfg.actor_rollout_ref.model), files_of_rewards(cfg)
    bundle.members.update({**model.members, **code.members})
    bundle.told += [*model.told, *code.told]
    bundle.import_from = code.import_from
    values = _impersonal(cfg.model_dump(mode="json"), bundle.told)
    values["actor_rollout_ref"]["model"].update(model.places)
    values["custom_reward_function"]["path"] = code.custom_path
    for entry, name in zip(values["reward"]["functions"], code.names, strict=True):
        entry["name"] = name
    values["trainer"] |= {"default_local_dir": None, **({"device": "cpu"} if on_cpu else {})}
    values["tracking"]["uri"] = values["orchestration"]["api_url"] = values["ray"]["address"] = None
    return RunConfig.model_validate(values)


def _put_documents(bundle: _Bundle, run: Run, lineage: int, cfg: RunConfig) -> None:
    config = to_yaml(cfg).encode()
    kept = ("run_id", "name", "format_version", "created_at")
    identity = {name: run.identity[name] for name in kept}
    documents = {"config.yaml": hashlib.sha256(config).hexdigest()}
    bundle.members["run/config.yaml"] = config
    bundle.put_json("run/run.json", {**identity, "documents": documents})
    bundle.put_json("run/plan.json", {"total_steps": planned_steps(run, lineage)})
    path = run.document("inputs.json")
    path = path if path.exists() else run.root / "inputs.json"
    if path.exists():
        bundle.put_json("run/inputs.json", _impersonal(read_json(path), []))


def _impersonal(value: Any, told: list[str], key: str = "") -> Any:
    """JSON values with the last name of each absolute path, and without addresses and what a key calls a secret."""
    if isinstance(value, Mapping):
        return {name: _impersonal(inner, told, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_impersonal(inner, told, key) for inner in value]
    if not isinstance(value, str):
        return value
    name = key.rpartition(".")[2]
    of_functions = ".reward_kwargs." in key or ".kwargs." in key
    if of_functions and (_SECRET.search(name) or "://" in value):
        told.append(f"{key}, which may be a secret")
        return LEFT_OUT
    if "://" in value and "\n" not in value and name != "stop":
        return LEFT_OUT
    # Stop texts are texts, whatever they begin with.
    if value.startswith(("/", "~")) and "\n" not in value and len(value) > 1 and name != "stop":
        if of_functions:
            told.append(f"the file of {key}")
        return Path(value).name
    return value


# ------------------------------------------------------------------------------------------------------------- the file


def _write(bundle: _Bundle, about: dict[str, Any], target: Path) -> dict[str, Any]:
    """Write the zip aside and give it its name. Nothing is compressed: weights do not shrink, and a reader need not
    fear what unpacks to more than it is."""
    aside = target.with_name(f".{target.name}.aside")
    files: dict[str, dict[str, Any]] = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_STORED) as file:
            for name, member in sorted(bundle.members.items()):
                files[name] = _add(file, name, member)
            about = {**about, "files": files}
            file.writestr(_entry("bundle.json"), json.dumps(about, indent=1, sort_keys=True))
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)
    return about


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry that tells nothing of this machine."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o100644 << 16
    return entry


def _add(file: zipfile.ZipFile, name: str, member: Member) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with file.open(_entry(name), "w", force_zip64=True) as sink:
        for block in _blocks(member):
            sink.write(block)
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _blocks(member: Member) -> Iterator[bytes]:
    if isinstance(member, bytes):
        yield member
        return
    with member.open("rb") as source:
        while block := source.read(1 << 20):
            yield block


# ---------------------------------------------------------------------------------------------------------- the command


def bundle_command(
    path: Path, step: int, overrides: Sequence[str], out: Path | None, lineage: int | None, console: Console
) -> None:
    """Write a bundle and say what is in it.

    Args:
        path: the run's folder.
        step: number of the step.
        overrides: key=value of the configuration that are other ones here.
        out: the file; None: in the working directory, named after run and step.
        lineage: which of the run's histories; None: the newest.
        console: where to print.
    """
    run = open_lineage(path, lineage)
    target = out or Path(f"{run.identity['name']}-step-{step:06d}.zip")
    about = write_bundle(run, step, target, overrides=overrides, say=lambda text: console.print(Text(text, "dim")))
    size, policy = target.stat().st_size, about["policy"]["version"]
    lines = [f"{target}: step {step} of {run.run_id} with policy {policy}, {len(about['files'])} files, {size:,} bytes"]
    lines += [f"left out: {told}" for told in about["left_out"]]
    if any(name.startswith("rewards/") for name in about["files"]):
        lines.append("it holds code (rewards/), which a replay runs only with --trust-code")
    lines += ["rows are as they are: texts of prompts, responses and error messages are in it", "look at it anywhere:"]
    for line in [*lines, f"  grpoflow replay {target.name}"]:
        console.print(Text(line), soft_wrap=True)
