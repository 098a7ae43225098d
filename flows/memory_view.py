"""Shows what a rank holds in memory, what a step moves and what a run leaves on disk; warns where it does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from flows.config_layers import LayerError
from flows.support import refuse_unbuilt
from tasks.config import RunConfig
from tasks.geometry import ModelLimits, Plan, PlanWarning
from tasks.geometry.memory import PHASES, MemoryItem, RankMemory, rank_memory
from tasks.geometry.model_weights import why_unknown
from tasks.geometry.traffic import DiskUse, Moved, disk_use, moved

_POLICY = "actor_rollout_ref"
_FSDP = f"{_POLICY}.actor.fsdp_config"
_MORE_DEVICES = "trainer.nnodes"
_WAYS_OUT = {
    "policy weights": (f"{_FSDP}.fsdp_size=-1", f"{_FSDP}.param_offload=true", f"more devices ({_MORE_DEVICES})"),
    "gradients": (f"{_FSDP}.fsdp_size=-1", f"{_FSDP}.offload_policy=true", f"{_POLICY}.model.lora_rank"),
    "optimizer states": (f"{_FSDP}.optimizer_offload=true", f"{_FSDP}.fsdp_size=-1", f"{_POLICY}.model.lora_rank"),
    "reference weights": (f"{_POLICY}.ref.fsdp_config.param_offload=true",),
    "cast weights": (f"{_POLICY}.model.dtype=bfloat16",),
    "gathered by FSDP": (f"{_FSDP}.reshard_after_forward=true",),
    "activations": (
        f"{_POLICY}.model.enable_gradient_checkpointing=true",
        f"a smaller {_POLICY}.actor.ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu",
        f"{_POLICY}.actor.ulysses_sequence_parallel_size",
    ),
    "logits": (f"a smaller {_POLICY}.actor.ppo_micro_batch_size_per_gpu",),
    "engine weights": (
        f"a larger {_POLICY}.rollout.tensor_model_parallel_size",
        f"{_POLICY}.rollout.free_cache_engine=true",
    ),
    "copy for engines": (f"{_POLICY}.model.dtype=bfloat16",),
    "KV cache": (f"a smaller {_POLICY}.rollout.max_num_seqs or gpu_memory_utilization",),
    "sampling": (f"a smaller {_POLICY}.rollout.max_num_seqs",),
    "snapshot": (f"a larger {_POLICY}.actor.ppo_mini_batch_size, so that a step is one optimizer step",),
}
"""What makes an item smaller, best first."""


@dataclass(frozen=True)
class Estimates:
    """All that is estimated of a configuration; without a known model, what is on disk alone."""

    disk: DiskUse
    memory: RankMemory | None
    moved: Moved | None
    warnings: tuple[PlanWarning, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "disk": self.disk.as_dict(),
            "memory": self.memory.as_dict() if self.memory else None,
            "moved": self.moved.as_dict() if self.moved else None,
        }


def estimates(cfg: RunConfig, plan: Plan, model: ModelLimits, device_memory_bytes: int | None) -> Estimates:
    """Estimate what a plan takes.

    Args:
        cfg: the configuration.
        plan: its plan.
        model: the model's sizes.
        device_memory_bytes: of one device; None: not known, and nothing is compared with it.
    """
    memory = rank_memory(cfg, plan, model, device_memory_bytes)
    warnings = tuple(_of_model(cfg, model)) if memory is None else tuple(_too_large(memory, cfg))
    return Estimates(disk_use(cfg, plan, plan.stages), memory, moved(cfg, plan, model), warnings)


def not_trained(cfg: RunConfig, plan: Plan) -> Iterator[PlanWarning]:
    """What `train` would say of a configuration that this version plans but refuses to train."""
    try:
        refuse_unbuilt(cfg, plan)
    except ValueError as error:
        reasons = " ".join(line.removeprefix("- ") for line in str(error).splitlines())
        yield PlanWarning("NOT_TRAINED", (), reasons, "info")


def model_limits(cfg: RunConfig) -> ModelLimits:
    """Limits from the `config.json` of a model folder on this disk, with `override_config` on top."""
    path = Path(cfg.actor_rollout_ref.model.path or os.devnull).expanduser() / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise LayerError(f"{path}: is not JSON: {error}") from None
    values = {**values, **(values.get("text_config") or {}), **cfg.actor_rollout_ref.model.override_config}
    kinds = {"model_type": str, "tie_word_embeddings": bool, "attention_bias": bool, "mlp_bias": bool}
    names = [field.name for field in fields(ModelLimits)]
    known: dict[str, Any] = {name: values[name] for name in names if type(values.get(name)) is kinds.get(name, int)}
    return ModelLimits(**known)


def device_memory_here() -> int | None:
    """Memory of the smallest GPU of this machine, bytes, as nvidia-smi says; None: there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in output.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------- warnings


def _of_model(cfg: RunConfig, model: ModelLimits) -> Iterator[PlanWarning]:
    path = cfg.actor_rollout_ref.model.path
    if path:
        why = why_unknown(model) if model != ModelLimits() else "there is no config.json of it on this disk"
        yield PlanWarning(
            "MEMORY_NOT_ESTIMATED",
            (f"{_POLICY}.model.path",),
            f"memory and traffic of {_POLICY}.model.path={path} are not estimated: {why}.",
            "info",
        )


def _too_large(memory: RankMemory, cfg: RunConfig) -> Iterator[PlanWarning]:
    if memory.device_memory_bytes is None:
        return
    over = [phase for phase in PHASES if memory.phase_bytes(phase) > memory.device_memory_bytes]
    if over:
        phase = max(over, key=memory.phase_bytes)
        largest = sorted(memory.items, key=lambda item: -_in_phase(item, phase))[:3]
        sizes = ", ".join(f"{item.name} {_gb(_in_phase(item, phase))}" for item in largest if _in_phase(item, phase))
        ways = dict.fromkeys(way for item in largest for way in _WAYS_OUT[item.name] if not _is_set(cfg, way))
        yield PlanWarning(
            "DEVICE_MEMORY",
            tuple(way.partition("=")[0] for way in ways if way.partition("=")[0].count(".") and " " not in way),
            f"a rank needs about {_gb(memory.phase_bytes(phase))} GB in {_words(over)}, a device has "
            f"{_gb(memory.device_memory_bytes)} GB. Largest there, in GB: {sizes}. Ways out: {'; '.join(ways)}.",
        )
    yield from _small_cache(memory, cfg)


def _small_cache(memory: RankMemory, cfg: RunConfig) -> Iterator[PlanWarning]:
    rollout = cfg.actor_rollout_ref.rollout
    sequence = memory.kv_cache_bytes_per_token * (cfg.prompt_length + cfg.response_length)
    if rollout.name == "vllm" and memory.kv_cache_room_bytes < memory.kv_cache_needed_bytes:
        held = memory.kv_cache_room_bytes // sequence
        keys = (f"{_POLICY}.rollout.gpu_memory_utilization", f"{_POLICY}.rollout.tensor_model_parallel_size")
        yield PlanWarning(
            "KV_CACHE_SHORT",
            keys,
            f"the engine's share of a device leaves {_gb(memory.kv_cache_room_bytes)} GB for keys and values: {held} "
            f"sequences of full length at a time, where {memory.kv_cache_needed_bytes // sequence} may be asked for. "
            f"More wait for their turn. Ways out: a larger {keys[0]} or {keys[1]}, a smaller "
            f"{_POLICY}.rollout.max_num_seqs.",
            "info" if held else "warning",
        )


def _is_set(cfg: RunConfig, way: str) -> bool:
    """Whether a way out `key=value` is the configuration already."""
    key, _, value = way.partition("=")
    if not value:
        return False
    found: Any = cfg
    for name in key.split("."):
        found = getattr(found, name)
    return str(found).lower() == value


def _in_phase(item: MemoryItem, phase: str) -> int:
    return int(getattr(item, f"{phase}_bytes"))


def _words(phases: list[str]) -> str:
    return " and ".join(phase.replace("_", "-") for phase in phases)


# --------------------------------------------------------------------------------------------------------------- tables


def memory_table(memory: RankMemory) -> Table:
    """What one rank holds in each phase, GB (10^9 bytes)."""
    of = f"{memory.parameters:,} parameters" + (
        f", {memory.trained_parameters:,} trained" if memory.trained_parameters != memory.parameters else ""
    )
    table = Table(title=f"Memory of one rank at full length, GB of 10^9 bytes ({of})", title_justify="left")
    table.add_column("what")
    for name in ("generate", "log-prob", "update", "host"):
        table.add_column(name, justify="right")
    table.add_column("how it comes about")
    for item in memory.items:
        sizes = (*(_in_phase(item, phase) for phase in PHASES), item.host_bytes)
        table.add_row(item.name, *(_gb(size) if size else "" for size in sizes), Text(item.note))
    sums = [_gb(memory.phase_bytes(phase)) for phase in PHASES]
    note = "all in one process" if memory.on_cpu else _of_device(memory)
    table.add_section()
    table.add_row("in all", *sums, _gb(memory.host_bytes), note)
    table.add_row("while loading", "", "", "", _gb(memory.loading_host_bytes), "a rank reads the whole model first")
    loading = f"all its ranks, and the engines' files; {_gb(memory.machine_loading_bytes)} while loading"
    table.add_row("a machine", "", "", "", _gb(memory.machine_host_bytes), loading)
    return table


def _of_device(memory: RankMemory) -> str:
    if memory.device_memory_bytes is None:
        return "besides 1 to 3 GB of CUDA, NCCL and the engine's code"
    return f"of {_gb(memory.device_memory_bytes)} GB; CUDA, NCCL and the engine's code take 1 to 3"


def moved_table(step: Moved) -> Table:
    """What a step moves because of weights and activations, GB."""
    table = Table(title="Moved in one step at full length, GB", title_justify="left")
    table.add_column("what")
    table.add_column("GB", justify="right")
    table.add_column("where")
    table.add_column("how it comes about")
    for one in step.transfers:
        table.add_row(one.name, _gb(one.rank_bytes), "each rank", Text(one.note))
    if step.engine_files_bytes:
        machines = f"{step.engine_machines} machine" + ("s" if step.engine_machines > 1 else "")
        how = f"written for the engines on {machines}, in shared memory where it has room twice"
        table.add_row("weights in files", _gb(step.engine_files_bytes), "each machine", how)
    table.add_row("a checkpoint", _gb(step.checkpoint_bytes), "run folder", "trained weights and two moments")
    return table


def disk_table(use: DiskUse) -> Table:
    """What a step leaves in the run's folder, MB, and what stays of a run."""
    table = Table(title="On disk at full length, MB", title_justify="left")
    table.add_column("artifact")
    for name in ("rows", "MB per step", "read by stages"):
        table.add_column(name, justify="right")
    for one in use.artifacts:
        table.add_row(one.name, f"{one.rows:,}", _mb(one.bytes_per_step), str(one.readers))
    table.add_section()
    table.add_row("a step", "", _mb(use.artifacts_bytes_per_step), "")
    table.add_row("read back, once on each host", "", _mb(use.read_bytes_per_step), "")
    table.add_row("read back, once by each process", "", _mb(use.read_without_cache_bytes_per_step), "")
    if use.artifacts_kept_bytes is not None:
        table.add_row(f"{use.steps_kept:,} steps that stay", "", _mb(use.artifacts_kept_bytes), "")
    return table


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f}" if size_bytes < 1e10 else f"{size_bytes / 1e9:,.1f}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.2f}" if size_bytes < 1e7 else f"{size_bytes / 1e6:,.1f}"
