"""One rank's view of the devices that train one policy: how many share a sequence, who holds which shard, who agrees.

Ranks that share a sequence (`sp_size`) are neighbours; `dp_rank = rank // sp_size`. Weights are sharded over all ranks,
or over `actor.fsdp_config.fsdp_size` of them with copies in between. The few numbers that ranks exchange beside weights
and activations go through host memory. How long a rank waits for the others is the process group's timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from tasks.config import RunConfig
from tasks.stage import NonFiniteError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where this rank is among the others.

    Attributes:
        rank: number of this rank.
        world_size: ranks.
        sp_size: ranks that share a sequence.
        device: of this rank.
        fsdp: ranks by which weights are sharded, dimensions ("fsdp",) or ("ddp", "fsdp"); None: one process.
        group: all ranks; None: one process.
        dp_group: one rank of each data-parallel rank: those with the same `sp_rank`.
        sp_group: the ranks that share sequences with this one.
    """

    rank: int
    world_size: int
    sp_size: int
    device: torch.device
    fsdp: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    sp_group: dist.ProcessGroup | None = None

    @classmethod
    def alone(cls, device: torch.device) -> Mesh:
        """One process without torch.distributed."""
        return cls(rank=0, world_size=1, sp_size=1, device=device)

    @classmethod
    def join(cls, cfg: RunConfig, rank: int, world_size: int, device: torch.device) -> Mesh:
        """Take a place among the ranks of an initialised process group; collective.

        The group's backend must carry tensors in host memory too: "cpu:gloo,cuda:nccl", or gloo.

        Raises:
            ValueError: the ranks cannot be divided as `fsdp_size` and `ulysses_sequence_parallel_size` ask.
        """
        actor = cfg.actor_rollout_ref.actor
        sp, shards = actor.ulysses_sequence_parallel_size, actor.fsdp_config.fsdp_size
        shards = world_size if shards < 0 else min(shards, world_size)
        for key, size in (("ulysses_sequence_parallel_size", sp), ("fsdp_config.fsdp_size", shards)):
            if world_size % size:
                raise ValueError(
                    f"{world_size} devices (trainer.nnodes x trainer.n_gpus_per_node) cannot be divided by "
                    f"actor_rollout_ref.actor.{key}={size}. Change one of them."
                )
        from torch.distributed.device_mesh import init_device_mesh

        if device.type == "cuda":
            torch.cuda.set_device(device)
        shape: tuple[int, ...] = (world_size,)
        names: tuple[str, ...] = ("fsdp",)
        if shards < world_size:
            shape, names = (world_size // shards, shards), ("ddp", "fsdp")
        return cls(
            rank=rank,
            world_size=world_size,
            sp_size=sp,
            device=device,
            fsdp=init_device_mesh(device.type, shape, mesh_dim_names=names),
            group=dist.group.WORLD,
            dp_group=_own_group(rank, [list(range(first, world_size, sp)) for first in range(sp)]),
            sp_group=_own_group(rank, [list(range(first, first + sp)) for first in range(0, world_size, sp)]),
        )

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.sp_size

    @property
    def dp_rank(self) -> int:
        """Number of this one's."""
        return self.rank // self.sp_size

    @property
    def sp_rank(self) -> int:
        """Place among the ranks that share a sequence."""
        return self.rank % self.sp_size

    # ------------------------------------------------------------------------------------- over data-parallel ranks

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[K] float64 sums over data-parallel ranks; the same on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: np.ndarray) -> np.ndarray:
        """[K] float64 greatest values over data-parallel ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: np.ndarray, how: dist.ReduceOp.RedOpType) -> np.ndarray:
        if self.dp_size == 1:
            return values
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        dist.all_reduce(tensor, how, group=self.dp_group)
        return tensor.numpy()

    def gather(self, values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Values of all data-parallel ranks, one rank's behind the other's.

        Args:
            values: [lengths[dp_rank]] of this rank.
            lengths: how many values each data-parallel rank has, known to all.

        Returns:
            [sum of lengths] on the device of `values`.
        """
        if self.dp_size == 1:
            return values
        own = torch.zeros(max(lengths), dtype=values.dtype)
        own[: len(values)] = values.cpu()
        everyone = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(everyone, own, group=self.dp_group)
        joined = torch.cat([part[:length] for part, length in zip(everyone, lengths, strict=True)])
        return joined.to(values.device)

    # ------------------------------------------------------------------------------------------------ over all ranks

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank what one of them ran into, that of the lowest rank; nothing where all went well.

        A rank that meets a problem between two collectives notes it and goes on, so that nobody waits for it, and all
        meet here.
        """
        if self.world_size == 1:
            if problem is not None:
                raise problem
            return
        bad = torch.tensor([problem is not None], dtype=torch.int32)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group)
        if not bad.item():
            return
        everyone = self.exchange(None if problem is None else _told(problem))
        rank, (kind, arguments) = next((rank, one) for rank, one in enumerate(everyone) if one is not None)
        if problem is not None and rank == self.rank:
            raise problem
        raise _KINDS[kind](*arguments) from problem

    def exchange(self, small: object) -> list:
        """A small object of every rank, by rank."""
        if self.world_size == 1:
            return [small]
        everyone: list = [None] * self.world_size
        dist.all_gather_object(everyone, small, group=self.group)
        return everyone


def _own_group(rank: int, groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all of the groups, which every rank must do alike, and return the one with this rank."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if rank in ranks)


_KINDS: dict[str, type[Exception]] = {
    "NonFiniteError": NonFiniteError,
    "ValueError": ValueError,
    "OSError": OSError,
    "RuntimeError": RuntimeError,
}
"""Kinds of problems that ranks tell each other of, narrow ones first."""


def _told(problem: Exception) -> tuple[str, tuple[object, ...]]:
    """A problem as the name of its kind, and what makes another one like it."""
    kind = next((name for name, each in _KINDS.items() if isinstance(problem, each)), None)
    if isinstance(problem, OSError) and problem.errno is not None:
        return "OSError", (problem.errno, problem.strerror, problem.filename)
    return (kind, (str(problem),)) if kind else ("RuntimeError", (f"{type(problem).__name__}: {problem}",))
