"""Ranks as Ray actors, one per device, and the watch over them.

A rank task is sent by its name with small arguments; rows stay on disk. Every rank is asked for signs of life beside
its work. When one is gone, or silent for too long, all are ended: the others would wait for it in a collective.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import psutil

from storage import StorageError
from tasks.config import RunConfig
from tasks.engines.engine_process import EngineDied
from tasks.workers.group import RanksLost, WorkerGroup
from tasks.workers.pulse import Pulse, Silence
from tasks.workers.rank import Role

if TYPE_CHECKING:
    from tasks.workers.rank import Rank
    from tasks.workers.ray_rank import About

P = ParamSpec("P")
R = TypeVar("R")
Patience = Callable[[Exception], float]
"""How long the other ranks may compute on after one has raised, in s."""

OTHERS_MAY_TAKE_S = 5.0
"""How long the other ranks may compute on after one has raised: longer, and they are waiting for it."""
END_WITHIN_S = 10.0
"""How long ended processes may take to be gone."""
LAST_LINES, LINE_CHARACTERS = 40, 300
"""Lines of a lost rank's log that are told, and how much of each."""


def _shortly(_: Exception) -> float:
    return OTHERS_MAY_TAKE_S


@dataclass(frozen=True)
class Pool:
    """Devices, and what they are there for.

    Attributes:
        nodes: how many.
        devices: of each node.
        role: of a rank.
        name: what a rank is called in the names of files: `rank`, `sampler`.
    """

    nodes: int
    devices: int
    role: Role
    name: str = "rank"


class RayGroup(WorkerGroup):
    """Ranks of a run, each in a process of its own. `pools.ray_ranks` makes them.

    Attributes:
        ranks: how many there are.
        sampling_ranks: the same.
        about: where each lives.
    """

    def __init__(self, cfg: RunConfig, pool: Pool, logs: Path, *, cuda: bool, total_steps: int) -> None:
        self.ranks = self.sampling_ranks = pool.nodes * pool.devices
        self.about: list[About] = []
        self._cfg, self._pool, self._logs, self._cuda, self._total_steps = cfg, pool, logs, cuda, total_steps
        self._actors: list[Any] = []
        self._placement: Any = None
        self._here: list[psutil.Process] = []
        self._lock = threading.RLock()
        self._lost: RanksLost | None = None

    def run(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._call(_shortly, f"{task.__module__}:{task.__qualname__}", args, kwargs)

    def sample(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._call(self._while_sampling, f"{task.__module__}:{task.__qualname__}", args, kwargs)

    def _while_sampling(self, error: Exception) -> float:
        """Replicas sample apart from each other: the others have time to finish when one of them fails.

        They have all of it when an engine died: once they have answered, the stage can be made again with them.
        """
        limits = self._cfg.ray
        return limits.collective_timeout_s if isinstance(error, EngineDied) else limits.rank_timeout_s

    def _call(self, others_may_take_s: Patience, task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            calls = {actor.run.remote(task, args, kwargs): rank for rank, actor in enumerate(self._actors)}
            done = self._gather(calls, others_may_take_s)
            return [done[rank] for rank in range(self.ranks)]

    def rebuild(self) -> None:
        with self._lock:
            self.end()
            self.start()

    def log_to(self, folder: Path) -> None:
        with self._lock:
            self._gather({actor.log_to.remote(str(folder)): i for i, actor in enumerate(self._actors)})
            self._logs = folder

    # ----------------------------------------------------------------------------------------------- starting, ending

    def start(self) -> None:
        """Start the ranks' processes, let them meet, and let each load what it holds."""
        from tasks.workers.ray_rank import Opening

        end = time.monotonic() + self._cfg.ray.startup_timeout_s
        self._lost = None
        self._start_processes(end)
        hosts = [one.host for one in self.about]
        one_node, first = len(set(hosts)) == 1, self.about[0]
        meet_at = "127.0.0.1" if one_node else first.address
        bound = self._actors[0].bind_store.remote(meet_at, hosts.count(first.host), self._cfg.ray.startup_timeout_s)
        store = self._gather({bound: 0})[0]
        openings = [
            Opening(
                self._cfg,
                self._total_steps,
                self._pool.role,
                device="cuda" if self._cuda else "cpu",
                ranks_on_node=hosts.count(host),
                one_node=one_node,
                store=store,
                replica_gpus=self._gpus_of_replica(rank),
            )
            for rank, host in enumerate(hosts)
        ]
        self._gather({self._actors[i].open.remote(opening): i for i, opening in enumerate(openings)})

    def _gpus_of_replica(self, rank: int) -> tuple[str, ...]:
        """Accelerators of all ranks of a rank's rollout replica, in their order."""
        size = self._cfg.replica_devices
        first = rank // size * size
        return tuple(gpu for one in self.about[first : first + size] for gpu in one.gpus)

    def _start_processes(self, end: float) -> None:
        """Take the devices and start one process on each.

        Raises:
            ValueError: the cluster has not got them, or does not start the processes in time.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from tasks.workers.ray_rank import RankProcess

        pool, timeout_s = self._pool, self._cfg.ray.startup_timeout_s
        node = {"CPU": pool.devices, **({"GPU": pool.devices} if self._cuda else {})}
        self._placement = placement_group(
            [node] * pool.nodes, strategy="STRICT_SPREAD" if pool.nodes > 1 else "STRICT_PACK"
        )
        problem = (
            f"Ray did not provide {pool.nodes} nodes with {node} (nnodes, n_gpus_per_node) and start a process on each "
            f"within ray.startup_timeout_s={timeout_s:g}; it has {ray.cluster_resources()}."
        )
        if not self._placement.wait(max(end - time.monotonic(), 1)):
            raise ValueError(problem)
        actor = ray.remote(concurrency_groups={"watch": 1})(RankProcess)
        self._actors = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if self._cuda else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank // pool.devices
                ),
            ).remote(rank, self.ranks, pool.name, str(self._logs), os.environ.get("OMP_NUM_THREADS"))
            for rank in range(self.ranks)
        ]
        try:
            self.about = ray.get(
                [actor.about.remote() for actor in self._actors], timeout=max(end - time.monotonic(), 1)
            )
        except ray.exceptions.GetTimeoutError as error:
            raise ValueError(problem) from error
        except ray.exceptions.RayActorError as error:
            raise RanksLost(f"a rank's process ended as it started: {error}") from error
        self._here = [psutil.Process(one.pid) for one in self.about if one.host == socket.gethostname()]

    def end(self) -> None:
        """End all ranks, whatever they do, with the processes they have started, and give their devices back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        family = [process for one in self._here for process in _with_children(one)]
        # An engine ends when its rank is gone: its watcher sees to that, and tidies up after it. Ray would kill the
        # watcher with the rank, so it comes second. What does not end is ended too.
        _kill(self._here)
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        _, left = psutil.wait_procs(family, timeout=END_WITHIN_S)
        _kill(left)
        if self._placement is not None:
            with suppress(Exception):
                remove_placement_group(self._placement)
        self._actors, self._here, self._placement = [], [], None

    # -------------------------------------------------------------------------------------------------------- watching

    def _gather(self, calls: Mapping[Any, int], others_may_take_s: Patience = _shortly) -> dict[int, Any]:
        """Wait for calls, and watch the ranks meanwhile.

        Args:
            calls: the rank of each.
            others_may_take_s: how long to wait for the others once one has raised.

        Returns:
            What each rank answered.

        Raises:
            RanksLost: a rank is gone or silent.
            Exception: what a rank raised.
        """
        import ray

        from tasks.workers.ray_rank import Failed

        waiting, done, raised = dict(calls), dict[int, Any](), dict[int, Exception]()
        pulse = Pulse(self._actors, self._cfg.ray)
        give_up: float | None = None
        while waiting and (give_up is None or time.monotonic() < give_up):
            ready, _ = ray.wait(list(waiting), timeout=pulse.every_s)
            for call in ready:
                rank = waiting.pop(call)
                try:
                    answer = ray.get(call)
                except ray.exceptions.RayActorError as error:
                    self._lose(rank, error)
                if isinstance(answer, Failed):
                    raised[rank] = answer.error(rank)
                    end = time.monotonic() + others_may_take_s(raised[rank])
                    give_up = end if give_up is None else min(give_up, end)
                done[rank] = answer
            if (lost := pulse.lost()) is not None:
                self._lose(*lost)
        if raised:
            self._raise(raised, hanging=set(waiting.values()))
        return done

    def _raise(self, raised: dict[int, Exception], *, hanging: set[int]) -> NoReturn:
        """Raise the error that says most: one of ours before a collective that failed with it.

        The ranks go on being used only when all of them have answered, and none raised what nobody foresaw. Where no
        error is one of ours, a rank that has not answered is what the others waited for in vain.
        """
        ours = [rank for rank, error in raised.items() if _foreseen(error)]
        if hanging and not ours:
            first = min(raised)
            told = f"it does not answer, and rank {first} raised {type(raised[first]).__name__}: {raised[first]}"
            self._lost = self._about_loss(min(hanging), told)
            self.end()
            raise self._lost from raised[first]
        rank = min(ours or raised)
        if hanging or len(ours) < len(raised):
            self._lost = self._about_loss(rank, f"it raised {type(raised[rank]).__name__}: {raised[rank]}")
            self.end()
        raise raised[rank]

    def _lose(self, rank: int, sign: Exception | Silence) -> NoReturn:
        """End all ranks and tell of one that is gone (what Ray says of it) or silent."""
        self._lost = self._about_loss(rank, self._reason(rank, sign))
        self.end()
        raise self._lost

    def _about_loss(self, rank: int, reason: str) -> RanksLost:
        from tasks.workers.ray_rank import log_file

        log, about = log_file(self._logs, self._pool.name, rank), self.about[rank]
        return RanksLost(reason, rank, about.host, about.pid, _last_lines(log), str(log))

    def _reason(self, rank: int, sign: Exception | Silence) -> str:
        from tasks.workers.ray_rank import log_file

        if isinstance(sign, Silence) and sign.answers:
            self._print_stack(rank)
            return (
                f"it answers, but has got no further for {sign.seconds:.0f} s (ray.collective_timeout_s and "
                "ray.rank_timeout_s), as when a driver or a file system hangs"
            )
        if isinstance(sign, Silence):
            stopped = any(one.pid == self.about[rank].pid and _is_stopped(one) for one in self._here)
            why = ": its process is stopped (SIGSTOP)" if stopped else ""
            return f"it has given no sign of life for {sign.seconds:.0f} s (ray.rank_timeout_s){why}"
        printed = "\n".join(_printed(log_file(self._logs, self._pool.name, rank)))
        if crash := re.search(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)", printed):
            return f"its process crashed ({crash[1] or crash[2]})"
        detail = re.search(r"[Ww]orker exit detail: (.*)", str(sign))
        told = f" Ray says: {detail[1]}" if detail and "connection error code 2" not in detail[1] else ""
        return (
            "its process is gone without a word, as after SIGKILL: by hand, or by the kernel for want of memory." + told
        ).rstrip(".")

    def _print_stack(self, rank: int) -> None:
        """Let a rank write into its log where it is: the last lines of that are told."""
        import ray

        with suppress(Exception):
            ray.get(self._actors[rank].print_stack.remote(), timeout=END_WITHIN_S)


def _foreseen(error: Exception) -> bool:
    """Whether an error is an answer, and not the sign of a rank in an unknown state."""
    return isinstance(error, ValueError | StorageError | OSError)


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return [process]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _last_lines(path: Path) -> str:
    """What is told of a log: its end, and no list of everything that was imported."""
    told = [line[:LINE_CHARACTERS] for line in _printed(path) if not line.startswith("Extension modules:")]
    return "\n".join(told[-LAST_LINES:])


def _printed(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 2**16, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
