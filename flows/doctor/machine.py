"""Devices, processor, memory, disk, shared memory and limits of this machine, against what a configuration needs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from flows.doctor.finding import Finding, Status
from flows.doctor.subject import Subject, checkpoint_bytes, step_bytes

MIB, GIB = 2**20, 2**30

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = GIB
"""For several ranks or vLLM: what NVIDIA's documentation of NCCL tells containers to allow (--shm-size=1g). Docker's
default of 64 MiB makes NCCL and Ray's object store fail."""
SHARED_MEMORY_AT_LEAST_BYTES = 128 * MIB

OPEN_FILES = 1024
OPEN_FILES_OF_RAY = 4096
"""Ray warns below this; each of its actors holds some dozens."""

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


# ------------------------------------------------------------------------------------------------- processor, devices


def check_cpu(subject: Subject) -> Iterator[Finding]:
    """Cores this process may use, and the instructions that decide how fast float32 and bfloat16 are."""
    flags = _cpu_flags()
    known = [flag for flag in CPU_FLAGS if flag in flags]
    found = f"{len(os.sched_getaffinity(0))} cores; {', '.join(known) or 'no AVX'}"
    cfg = subject.cfg
    model = cfg.actor_rollout_ref.model if cfg else None
    if cfg and model and cfg.trainer.device == "cpu" and model.dtype == "bfloat16" and not _computes_bf16(flags):
        advice = "Set actor_rollout_ref.model.dtype=float32: without avx512_bf16 or amx_bf16, bfloat16 is slower."
        yield Finding("cpu", "warn", f"{found}; the model is to compute in bfloat16", advice)
    else:
        yield Finding("cpu", "ok", found)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _computes_bf16(flags: set[str]) -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & flags)


def check_devices(subject: Subject) -> Iterator[Finding]:
    """CUDA devices as torch sees them, and whether there are as many as a configuration asks for."""
    import torch

    wanted = subject.cfg.trainer.device if subject.cfg else "auto"
    build = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        driver = _driver()
        found = f"no CUDA device ({build}{f'; driver {driver}' if driver else ''})"
        if wanted == "cuda":
            advice = "Set trainer.device=cpu, or install a torch with CUDA and a driver that fits it."
            yield Finding("devices", "error", f"{found}, but trainer.device=cuda", advice)
        elif driver:
            advice = "Install a torch built for CUDA; CUDA_VISIBLE_DEVICES must not be empty."
            yield Finding("devices", "warn", f"{found}: the device is not used", advice)
        else:
            yield _as_many(subject, len(os.sched_getaffinity(0)), f"{found}; training runs on the processor", "cores")
        return
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    listed = "; ".join(f"{one.name}, {one.total_memory / GIB:.0f} GiB, sm_{one.major}{one.minor}" for one in names)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{len(names)} CUDA devices ({build}, driver {_driver() or 'unknown'}): {listed}"
    found += f"; CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    if wanted == "cpu":
        yield Finding("devices", "ok", f"{found}; trainer.device=cpu leaves them alone")
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        advice = "Set actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32."
        yield Finding("devices", "warn", f"{found}; they do not compute in bfloat16", advice)
    else:
        yield _as_many(subject, len(names), found, "devices")


def _as_many(subject: Subject, there: int, found: str, what: str) -> Finding:
    """Whether this node has what `trainer.n_gpus_per_node` asks of one; other nodes are not seen from here."""
    if subject.cfg is None or (asked := subject.cfg.trainer.n_gpus_per_node) <= there:
        return Finding("devices", "ok", found)
    advice = f"Set trainer.n_gpus_per_node={there} or less, or run on a larger machine."
    status: Status = "error" if what == "devices" else "warn"
    return Finding("devices", status, f"{found}; trainer.n_gpus_per_node={asked}, but there are {there} {what}", advice)


def _driver() -> str | None:
    """The NVIDIA driver's version; None: there is none, or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=3.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


# ----------------------------------------------------------------------------------------------- memory, disk, limits


def check_disk(subject: Subject) -> Iterator[Finding]:
    """Free space where runs are, against one step's artifacts and one checkpoint."""
    free = shutil.disk_usage(subject.place).free
    found = f"{_size(free)} free at {subject.place}"
    one_step = step_bytes(subject)
    if subject.cfg is None or one_step is None:
        if free < GIB:
            yield Finding("disk", "warn", found, "Give storage.root a place with more room.")
        else:
            yield Finding("disk", "ok", found)
        return
    checkpoint = checkpoint_bytes(subject.cfg)
    # A checkpoint is written beside the last one.
    least = one_step + (checkpoint or 0)
    whole = _whole_run(subject, one_step, checkpoint or 0)
    found += f"; a step stores up to {_size(one_step)}, a checkpoint "
    found += f"up to {_size(checkpoint)}" if checkpoint else "an amount that is not known before the model is here"
    advice = "Choose another storage.root, or set storage.retention.keep and trainer.max_actor_ckpt_to_keep."
    if free < least:
        yield Finding("disk", "error", f"{found}: not enough for one of each", advice)
    elif whole is not None and free < whole:
        yield Finding("disk", "warn", f"{found}; the whole run up to {_size(whole)}", advice)
    else:
        yield Finding("disk", "ok", f"{found}{f'; the whole run up to {_size(whole)}' if whole is not None else ''}")


def _whole_run(subject: Subject, one_step: int, checkpoint: int) -> int | None:
    """Bytes of all that a run keeps in the end; None: its steps are not known."""
    cfg, plan = subject.cfg, subject.plan
    assert cfg is not None and plan is not None
    steps = plan.total_steps
    if not steps:
        return None
    retention = cfg.storage.retention
    kept = {"all": steps, "last": min(retention.steps, steps), "every": -(-steps // retention.steps)}[retention.keep]
    checkpoints = 1 + (steps // cfg.trainer.save_freq if cfg.trainer.save_freq > 0 else 0)
    # One more than is kept while the newest is written.
    checkpoints = min(checkpoints, (cfg.trainer.max_actor_ckpt_to_keep or checkpoints) + 1)
    return kept * one_step + checkpoints * checkpoint


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Main memory that is free for new processes."""
    memory = psutil.virtual_memory()
    found = f"{_size(memory.available)} of {_size(memory.total)} available"
    if memory.available < GIB:
        yield Finding("memory", "warn", found, "torch alone takes 0.5 GiB per process; end what is not needed.")
    else:
        yield Finding("memory", "ok", found)


def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    """Room for the segments by which ranks, NCCL, Ray and vLLM's workers on one machine hand each other data."""
    yield shared_memory(SHARED_MEMORY, subject.devices > 1 or subject.wants_vllm)


def shared_memory(place: Path, needed: bool) -> Finding:
    """The same for any folder in memory.

    Args:
        place: the folder.
        needed: several processes will use it.
    """
    if not place.is_dir():
        status: Status = "error" if needed else "warn"
        return Finding("shared_memory", status, f"{place} is not there", "Mount a tmpfs there.")
    free = shutil.disk_usage(place).free
    found = f"{_size(free)} free at {place}"
    if not needed:
        return Finding("shared_memory", "ok", f"{found}; one device does not need it")
    advice = "In Docker: --shm-size=1g or --ipc=host; in Kubernetes: an emptyDir of medium Memory at /dev/shm."
    if free < SHARED_MEMORY_AT_LEAST_BYTES:
        return Finding("shared_memory", "error", f"{found}; several ranks or vLLM need {_size(GIB)}", advice)
    if free < SHARED_MEMORY_BYTES:
        return Finding("shared_memory", "warn", f"{found}; several ranks or vLLM should have {_size(GIB)}", advice)
    return Finding("shared_memory", "ok", found)


def check_open_files(subject: Subject) -> Iterator[Finding]:
    """How many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES_OF_RAY if subject.devices > 1 else OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield Finding("open_files", "ok", f"up to {soft if soft != resource.RLIM_INFINITY else 'any number'}")
        return
    way = f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else "Ask for a higher hard limit"
    yield Finding("open_files", "warn", f"up to {soft} (hard limit {hard}); {needed} are due", way)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
