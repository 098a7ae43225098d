"""What the doctor examines: a configuration, a run, a folder of runs, or this machine alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from flows.doctor.finding import Finding
from tasks.config import RunConfig

if TYPE_CHECKING:
    from storage import Run
    from tasks.geometry import Plan

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        folder: where runs are or will be: a run's folder, or a folder of runs.
        cfg: a configuration; None: none was given.
        run: the run that was given; None: none.
        plan: the configuration's plan; None: there is no configuration, or none can be made.
        deep: also start what takes long.
        findings: what came to light while reading it.
    """

    folder: Path
    cfg: RunConfig | None = None
    run: Run | None = None
    plan: Plan | None = None
    deep: bool = False
    findings: tuple[Finding, ...] = ()

    @property
    def devices(self) -> int:
        """Devices the configuration asks for; 1 without one."""
        return self.cfg.trainer.nnodes * self.cfg.trainer.n_gpus_per_node if self.cfg else 1

    @property
    def wants_vllm(self) -> bool:
        """Whether the configuration samples with vLLM."""
        return self.cfg is not None and self.cfg.actor_rollout_ref.rollout.name == "vllm"

    @property
    def place(self) -> Path:
        """The nearest folder that exists: `folder`, or one above it."""
        path = self.folder.expanduser().absolute()
        return next(one for one in (path, *path.parents) if one.is_dir())


def subject_of(words: Sequence[str], deep: bool = False) -> Subject:
    """Read what the command was given; what cannot be read is a finding, and the rest is examined all the same.

    Args:
        words: a run's folder or a folder of runs, or recipe names and YAML files; then `key.path=value` overrides.
        deep: also start what takes long.
    """
    from storage import StorageError

    try:
        return _read(words, deep)
    except (ValueError, StorageError, OSError) as error:
        first = Path(words[0]) if words and Path(words[0]).is_dir() else Path("runs")
        problem = Finding("configuration", "error", str(error), "Mend it; `grpoflow plan` says the same.")
        return Subject(first, deep=deep, findings=(problem,))


def _read(words: Sequence[str], deep: bool) -> Subject:
    from flows.config import load_config
    from flows.recipes import recipe_file
    from flows.run_folder import config_of
    from storage import open_run

    overrides = [word for word in words if "=" in word or word.startswith("~")]
    names = [word for word in words if word not in overrides]
    if len(names) == 1 and Path(names[0]).is_dir():
        folder = Path(names[0])
        if not (folder / "run.json").exists():
            return Subject(folder, deep=deep)
        run = open_run(folder)
        cfg = load_config([], overrides, base=config_of(run, run.lineage))
        return _with_plan(Subject(folder, cfg, run, deep=deep))
    if not words:
        return Subject(RunConfig().storage.folder, deep=deep)
    cfg = load_config([recipe_file(name) for name in names], overrides)
    return _with_plan(Subject(_folder_of(cfg), cfg, deep=deep))


def _folder_of(cfg: RunConfig) -> Path:
    """The run's own folder where it is there already, so that its own file system is tried, else where it will be."""
    from flows.run_folder import run_folder

    folder = run_folder(cfg)
    return folder if folder.is_dir() or cfg.trainer.default_local_dir else cfg.storage.folder


def _with_plan(subject: Subject) -> Subject:
    from flows.plan_view import plan_of

    assert subject.cfg is not None
    plan = plan_of(subject.cfg)
    if plan.problems:
        found = f"problems of the plan: {len(plan.problems)}; the first: {plan.problems[0]}"
        finding = Finding("configuration", "error", found, "`grpoflow plan` shows all of them and the nearest values.")
    else:
        finding = Finding("configuration", "ok", f"devices: {plan.world_size}; the plan has no problem")
    return replace(subject, plan=plan, findings=(*subject.findings, finding))


def step_bytes(subject: Subject) -> int | None:
    """Bytes of the token columns that a step stores when every row has full length; None: there is no plan."""
    return sum(row.stored_bytes or 0 for row in subject.plan.stages) if subject.plan else None


def checkpoint_bytes(cfg: RunConfig) -> int | None:
    """Bytes of a checkpoint of all weights: they and Adam's two moments, in the weights' type.

    Returns:
        None where the model's files are not here, or an adapter alone is trained.
    """
    model = cfg.actor_rollout_ref.model
    files = sorted(Path(model.path).expanduser().glob("*.safetensors")) if model.path else []
    if not files or model.lora_rank or model.lora_adapter_path:
        return None
    return 3 * sum(map(_parameters, files)) * _ITEM_BYTES[model.dtype]


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, from its header: eight bytes of length, then JSON."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
