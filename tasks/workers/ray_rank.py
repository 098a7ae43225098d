"""The process of one rank, as a Ray actor: it joins the others, holds the rank, and calls rank tasks by name.

A second thread answers whether the process is alive, however long a task takes. Nothing here imports a tensor library
before the process is set up for it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ray

from storage import Artifact
from storage.artifacts import wait_until_seen
from tasks.config import RunConfig
from tasks.workers import progress
from tasks.workers.rank import Role

STACK_LINES = 12
"""Calls that a rank tells of where it is stuck, innermost last."""


@dataclass(frozen=True)
class About:
    """Where a rank lives.

    Attributes:
        host: name of the machine.
        address: of the machine, as Ray knows it.
        pid: of the process.
        gpus: the accelerators that Ray has given it.
    """

    host: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Opening:
    """What a rank is opened with.

    Attributes:
        cfg: the run's configuration.
        total_steps: of the plan.
        role: what the rank is there for.
        device: cpu | cuda.
        ranks_on_node: ranks that share this machine.
        one_node: all ranks do.
        store: host and port where the ranks meet.
        replica_gpus: accelerators of all ranks of this rank's rollout replica.
    """

    cfg: RunConfig
    total_steps: int
    role: Role
    device: str
    ranks_on_node: int
    one_node: bool
    store: tuple[str, int]
    replica_gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """What a rank task raised: an exception of ours, or one of Python's own, comes back as itself.

    Attributes:
        kind: its class; None: one that the driver may not know.
        args: of the exception.
        told: its class and text.
        trace: where it was raised.
    """

    kind: type[Exception] | None
    args: tuple[Any, ...]
    told: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """The exception, fit to be sent."""
        kind = type(error)
        known = kind.__module__.partition(".")[0] in ("builtins", "storage", "tasks")
        args = tuple(one if isinstance(one, str | int | float | None) else str(one) for one in error.args)
        return cls(kind if known else None, args, f"{kind.__name__}: {error}", traceback.format_exc())

    def error(self, rank: int) -> Exception:
        """The exception as it was raised on a rank."""
        try:
            made: Exception = RuntimeError(self.told) if self.kind is None else self.kind(*self.args)
        except TypeError:
            made = RuntimeError(self.told)
        made.add_note(f"raised on rank {rank}:\n{self.trace}")
        return made


class RankProcess:
    """A rank's process. `run` calls rank tasks in the one thread that computes; `ping` answers beside it."""

    def __init__(self, number: int, ranks: int, name: str, logs: str, threads: str | None) -> None:
        self._number, self._ranks, self._name, self._threads = number, ranks, name, threads
        self._rank: Any = None
        self._thread = 0
        self._samples = False
        self._store: Any = None
        _end_with_parent()
        self.log_to(logs)

    def log_to(self, folder: str) -> None:
        """Write what this process prints into `NAME-N.log` of a folder from now on; also what C libraries print."""
        self._logs = Path(folder)
        self._logs.mkdir(parents=True, exist_ok=True)
        file = os.open(log_file(self._logs, self._name, self._number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))
        faulthandler.enable(sys.stderr, all_threads=False)
        if self._samples:
            self._rank.rollout.log_to(self._engine_log())

    def _engine_log(self) -> Path:
        return self._logs / f"engine-{self._number}.log"

    @ray.method(concurrency_group="watch")
    def ping(self) -> float | None:
        """Answer: the process is alive and its interpreter runs. For how many s its rank task has not got on; None:
        it has none."""
        return progress.silent_s()

    @ray.method(concurrency_group="watch")
    def print_stack(self) -> None:
        """Print where the thread that computes is."""
        frame = sys._current_frames().get(self._thread)
        print("it is here:", *traceback.format_stack(frame, STACK_LINES), sep="\n", file=sys.stderr, flush=True)

    def about(self) -> About:
        """Where it lives."""
        gpus = tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        return About(socket.gethostname(), ray.util.get_node_ip_address(), os.getpid(), gpus)

    def bind_store(self, host: str, ranks_on_node: int, timeout_s: float) -> tuple[str, int] | Failed:
        """Rank 0: listen where the ranks will meet, on a port that is free because it is taken here and now."""
        try:
            self._set_threads(ranks_on_node)
            from torch.distributed import TCPStore

            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.socket(family)
            listening.bind((host, 0))
            listening.listen(self._ranks)
            port = listening.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                self._ranks,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            return host, port
        except Exception as error:
            return Failed.of(error)

    def open(self, opening: Opening) -> Failed | None:
        """Meet the other ranks, and load what this one holds."""
        try:
            self._set_threads(opening.ranks_on_node)
            self._rank = self._joined(opening)
            self._samples = opening.role.is_rollout
            return None
        except Exception as error:
            return Failed.of(error)

    def _set_threads(self, ranks_on_node: int) -> None:
        """Share the node's cores among its ranks, where OMP_NUM_THREADS does not say; torch reads it when imported."""
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = self._threads or str(max(1, cores // ranks_on_node))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def _joined(self, opening: Opening) -> Any:
        import torch

        from tasks.workers.mesh import Mesh
        from tasks.workers.rank import open_rank

        number = cuda_number(self.about().gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        device = torch.device("cuda", number) if opening.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if opening.role.is_actor and self._ranks > 1:
            self._meet(opening)
            mesh = Mesh.join(opening.cfg, self._number, self._ranks, device)
        else:
            mesh = Mesh(self._number, self._ranks, 1, device)
        return open_rank(
            opening.cfg,
            mesh,
            role=opening.role,
            total_steps=opening.total_steps,
            devices=opening.replica_gpus,
            log=self._engine_log(),
        )

    def _meet(self, opening: Opening) -> None:
        """Become one process group with the other ranks."""
        import torch.distributed as dist

        name = _interface(opening)
        for library in ("GLOO", "NCCL"):
            if name is not None:
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
        timeout = timedelta(seconds=opening.cfg.ray.collective_timeout_s)
        if self._store is None:
            self._store = dist.TCPStore(*opening.store, self._ranks, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if opening.device == "cuda" else "gloo",
            store=self._store,
            rank=self._number,
            world_size=self._ranks,
            timeout=timeout,
        )

    def run(self, task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a rank task by `module:function`; what it raises is returned."""
        self._thread = threading.get_ident()
        progress.note()
        try:
            for artifact in _artifacts([*args, *kwargs.values()]):
                wait_until_seen(artifact.folder)
            module, _, name = task.partition(":")
            return getattr(importlib.import_module(module), name)(self._rank, *args, **kwargs)
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            return Failed.of(error)
        finally:
            progress.rest()


def cuda_number(own: Sequence[str], visible: str | None) -> int:
    """Number of a rank's accelerator among those that its process sees.

    Ray shows each process its own alone, unless it is told not to (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES).

    Args:
        own: what Ray has given it.
        visible: CUDA_VISIBLE_DEVICES; None: it sees all.
    """
    if not own:
        return 0
    if visible is None:
        return int(own[0]) if own[0].isdigit() else 0
    seen = visible.split(",")
    return seen.index(own[0]) if own[0] in seen else 0


def log_file(folder: Path, name: str, rank: int) -> Path:
    """Where a rank writes what it prints."""
    return folder / f"{name}-{rank}.log"


def _artifacts(values: list[Any]) -> Iterator[Artifact]:
    """References among arguments, and among the fields of arguments."""
    for value in values:
        if isinstance(value, Artifact):
            yield value
        elif hasattr(value, "__dataclass_fields__"):
            yield from (one for one in vars(value).values() if isinstance(one, Artifact))


def _interface(opening: Opening) -> str | None:
    """Name of the network interface over which the ranks talk: loopback where all are on one machine."""
    address = "127.0.0.1" if opening.one_node else ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


def _end_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, which is Ray's on this machine."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
