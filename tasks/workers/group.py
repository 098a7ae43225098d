"""The ranks of a run as one: `WorkerGroup` is what stages and flows work with, on one device and on many.

Nothing here loads a tensor library: the process that drives the ranks need not hold a model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from tasks.config import RunConfig

if TYPE_CHECKING:
    from tasks.workers.rank import Rank

P = ParamSpec("P")
R = TypeVar("R")


class RanksLost(RuntimeError):
    """A rank has died or answers no more. All ranks of its group have been ended: none can compute without the others.

    Attributes:
        rank: number of the rank; None: no single one is to blame.
        host: its machine.
        pid: of its process.
        reason: how it ended.
        last_lines: what it printed last.
        log: the file where it printed.
    """

    def __init__(
        self, reason: str, rank: int | None = None, host: str = "", pid: int = 0, last_lines: str = "", log: str = ""
    ) -> None:
        self.rank, self.host, self.pid, self.reason = rank, host, pid, reason
        self.last_lines, self.log = last_lines, log
        where = "the ranks are lost" if rank is None else f"rank {rank} (process {pid} on {host}) is lost"
        told = f". The last lines of {log}:\n{last_lines}" if last_lines else ""
        super().__init__(f"{where}: {reason}{told}")


class WorkerGroup(Protocol):
    """All ranks of a run. A method that asks one thing of all of them returns what rank 0 answers.

    Attributes:
        ranks: how many train.
        sampling_ranks: how many sample: the same ones, or others.
    """

    ranks: int
    sampling_ranks: int

    def run(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a rank task on every rank that trains and wait for all; results in the order of the ranks.

        Args:
            task: a module-level function.
            args: small values, the same for all.
            kwargs: the same.

        Raises:
            RanksLost: a rank died or hangs; `rebuild` makes new ones.
        """

    def sample(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """The same on the ranks that sample, from the policy as it is now."""

    def rebuild(self) -> None:
        """Replace all ranks by new ones, which hold the initial weights."""

    def log_to(self, folder: Path) -> None:
        """Let each rank write what it prints into a file `rank-N.log` of its own from now on."""

    @property
    def policy_version(self) -> int:
        """Version of the policy that the ranks hold."""
        return self.run(_policy_version)[0]

    def weights_digest(self) -> str:
        """SHA-256 of all weights, the same for every number of ranks."""
        return self.run(_weights_digest)[0]

    def follow(self, cfg: RunConfig, *, total_steps: int | None = None) -> None:
        """Compute under another configuration of the same model from now on; see `PolicyWorker.follow`."""
        self.run(_follow, cfg, total_steps)

    def save(self, folder: Path) -> None:
        """Write the policy into an existing folder."""
        self.run(_save, folder)

    def load(self, folder: Path) -> None:
        """Become the policy version that `save` wrote, with any number of ranks."""
        self.run(_load, folder)

    def checkpoint_bytes(self) -> int:
        """What `save` writes, at most."""
        return self.run(_checkpoint_bytes)[0]


class LocalGroup(WorkerGroup):
    """One rank in this process: a rank task is a plain call."""

    ranks = sampling_ranks = 1

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def run(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [task(self.rank, *args, **kwargs)]

    def sample(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.run(task, *args, **kwargs)

    def rebuild(self) -> None:
        raise AssertionError("a rank in this process is not lost alone")

    def log_to(self, folder: Path) -> None:
        """It prints where this process prints."""


def _policy_version(rank: Rank) -> int:
    return rank.policy.policy_version


def _weights_digest(rank: Rank) -> str:
    return rank.policy.weights_digest()


def _follow(rank: Rank, cfg: RunConfig, total_steps: int | None) -> None:
    rank.policy.follow(cfg, total_steps=total_steps)


def _save(rank: Rank, folder: Path) -> None:
    rank.policy.save(folder)


def _load(rank: Rank, folder: Path) -> None:
    rank.policy.load(folder)


def _checkpoint_bytes(rank: Rank) -> int:
    return rank.policy.checkpoint_bytes()
