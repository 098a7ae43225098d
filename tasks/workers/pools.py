"""Which ranks a run has under Ray: one pool that trains and samples, or one that trains and one that samples."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from tasks.config import RunConfig
from tasks.engines.scratch import own_folder
from tasks.workers.group import WorkerGroup
from tasks.workers.rank import Role, training_role
from tasks.workers.ray_cluster import ray_of
from tasks.workers.ray_group import Pool, RayGroup

if TYPE_CHECKING:
    from tasks.workers.rank import Rank

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def ray_ranks(cfg: RunConfig, *, total_steps: int) -> Iterator[WorkerGroup]:
    """Ranks for all devices of a configuration; they end with the block.

    Args:
        cfg: the run's configuration.
        total_steps: of the plan, for the learning rate.

    Raises:
        ValueError: the devices are not there, or the model cannot be loaded as configured.
        RanksLost: a rank dies or hangs while it loads.
    """
    trainer = cfg.trainer
    pools = [Pool(trainer.nnodes, trainer.n_gpus_per_node, training_role(cfg))]
    if not cfg.actor_rollout_ref.hybrid_engine:
        pools.append(Pool(*cfg.sampling_devices, Role.ROLLOUT, "sampler"))
    place = cfg.storage.folder.absolute() / ".ranks"
    gpus = None if trainer.device == "auto" else trainer.device == "cuda"
    with ExitStack() as stack:
        ranks = sum(pool.nodes * pool.devices for pool in pools)
        cuda = stack.enter_context(ray_of(cfg.ray.address, ranks, gpus=gpus, startup_s=cfg.ray.startup_timeout_s))
        place.mkdir(parents=True, exist_ok=True)
        scratch = own_folder(place, socket.gethostname())
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        groups = []
        for pool in pools:
            groups.append(RayGroup(cfg, pool, scratch / "logs", cuda=cuda, total_steps=total_steps))
            stack.callback(groups[-1].end)
            groups[-1].start()
        yield groups[0] if len(groups) == 1 else TwoPools(groups[0], groups[1], scratch)


class TwoPools(WorkerGroup):
    """Ranks that train, and ranks that sample from the weights that those write into files.

    Attributes:
        ranks: how many train.
        sampling_ranks: how many sample.
    """

    def __init__(self, trainers: RayGroup, samplers: RayGroup, scratch: Path) -> None:
        self.ranks, self.sampling_ranks = trainers.ranks, samplers.ranks
        self._trainers, self._samplers, self._scratch = trainers, samplers, scratch
        self._held: tuple[int, str] | None = None

    def run(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._trainers.run(task, *args, **kwargs)

    def sample(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        self._hand_over()
        return self._samplers.sample(task, *args, **kwargs)

    def _hand_over(self) -> None:
        """Give the samplers the policy as it is now; its files stay until those of the next are loaded."""
        from tasks.workers.rank_engine import load_policy_files, write_policy_files

        version, digest = self.policy_version, self.weights_digest()
        if self._held == (version, digest):
            return
        before = list(self._scratch.glob("policy-*"))
        folder = self._scratch / f"policy-{version:06d}-{uuid4().hex[:6]}"
        folder.mkdir(parents=True)
        self._trainers.run(write_policy_files, folder)
        # As in sampling, others may go on loading when one engine dies: the stage is then made again with all of them.
        self._samplers.sample(load_policy_files, folder, version, digest)
        self._held = (version, digest)
        for one in before:
            shutil.rmtree(one, ignore_errors=True)

    def rebuild(self) -> None:
        self._held = None
        self._trainers.rebuild()
        self._samplers.rebuild()

    def log_to(self, folder: Path) -> None:
        self._trainers.log_to(folder)
        self._samplers.log_to(folder)
