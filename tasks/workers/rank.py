"""A rank: one device with all that lives on it for the whole run. It is what a rank task is given.

A rank task is a module-level function `task(rank, *small arguments) -> small result` in the file of its stage: it reads
its rows from artifacts, computes, writes its part, and returns what the driver cannot read from it. In a mesh every
rank is called with the same arguments, and tasks that compute with the policy are collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.config import RunConfig

if TYPE_CHECKING:
    from tasks.engines.protocol import RolloutEngine
    from tasks.workers.mesh import Mesh
    from tasks.workers.policy import PolicyWorker
    from tasks.workers.rank_engine import RankEngine


class Role(Flag):
    """What a rank is there for, in verl's words. It holds what its role needs and nothing else."""

    ACTOR = auto()
    ROLLOUT = auto()
    REF = auto()
    ACTOR_REF = ACTOR | REF
    ACTOR_ROLLOUT = ACTOR | ROLLOUT
    ACTOR_ROLLOUT_REF = ACTOR | ROLLOUT | REF

    @property
    def is_actor(self) -> bool:
        """It trains: it holds the policy and its optimizer."""
        return Role.ACTOR in self

    @property
    def is_rollout(self) -> bool:
        """It samples: it has a rollout engine, or its neighbour's samples for it."""
        return Role.ROLLOUT in self

    @property
    def is_ref(self) -> bool:
        """It holds the reference; with LoRA that is the policy without its adapter."""
        return Role.REF in self


def training_role(cfg: RunConfig) -> Role:
    """The role of ranks that train, and sample too where rollout and training share the devices."""
    role = Role.ACTOR_REF if cfg.needs_ref else Role.ACTOR
    return role | Role.ROLLOUT if cfg.actor_rollout_ref.hybrid_engine else role


@dataclass
class Rank:
    """One rank of a group.

    Attributes:
        mesh: its place among the others.
        tokenizer: of the model.
    """

    mesh: Mesh
    tokenizer: Any
    _policy: PolicyWorker | None
    _rollout: RankEngine | None

    @property
    def number(self) -> int:
        """Number of the rank, from 0."""
        return self.mesh.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.mesh.world_size

    @property
    def policy(self) -> PolicyWorker:
        """The weights, or the rank's share of them."""
        assert self._policy is not None, "a rank that only samples owns no weights"
        return self._policy

    @property
    def rollout(self) -> RankEngine:
        """The rollout engine in its place."""
        assert self._rollout is not None, "a rank that only trains samples nothing"
        return self._rollout

    @property
    def engine(self) -> RolloutEngine | None:
        """Samples responses; None: another rank samples for this one."""
        return self.rollout.engine

    def ready_to_sample(self) -> None:
        """Have the engine hold the policy as it is now; collective. On a rank that only samples it was handed over."""
        if self._policy is not None:
            self.rollout.follow(self._policy)

    def ready_to_train(self) -> None:
        """Have the engine leave the device to training; collective."""
        if self._rollout is not None:
            self._rollout.rest()

    def close(self) -> None:
        """End what was started."""
        if self._rollout is not None:
            self._rollout.close()


def open_rank(
    cfg: RunConfig,
    mesh: Mesh | None,
    tokenizer: Any = None,
    *,
    role: Role,
    total_steps: int,
    devices: Sequence[str] = (),
    log: Path | None = None,
) -> Rank:
    """Load what one rank holds; collective.

    Args:
        cfg: the run's configuration.
        mesh: the rank's place; None: there is one rank, in this process.
        tokenizer: of the model; None: it is loaded.
        role: what it is there for.
        total_steps: of the plan, for the learning rate.
        devices: accelerators of the rank's rollout replica; none: all in sight.
        log: file for what an engine's own process prints; None: it keeps it.

    Raises:
        ValueError: the model cannot be loaded as configured.
    """
    # torch and transformers take seconds to import; whoever opens a rank has refused before what can be refused.
    from tasks.tokenizer import load_tokenizer
    from tasks.workers.mesh import Mesh
    from tasks.workers.policy import PolicyWorker, choose_device
    from tasks.workers.rank_engine import rank_engine

    mesh = mesh or Mesh.alone(choose_device(cfg.trainer.device))
    tokenizer = tokenizer or load_tokenizer(cfg.actor_rollout_ref.model)
    policy = None
    if role.is_actor:
        policy = PolicyWorker(cfg, total_steps=total_steps, with_reference=role.is_ref, mesh=mesh)
    rollout = rank_engine(cfg, mesh, policy, tokenizer, devices=devices, log=log) if role.is_rollout else None
    return Rank(mesh, tokenizer, policy, rollout)


def share_of(rows: int, place: int, places: int) -> np.ndarray:
    """Row numbers of one of several places: consecutive, and as many for each as the count allows.

    The first places have one more where `rows` is no multiple of `places`, and the last ones have none where there are
    fewer rows than places.
    """
    each, more = divmod(rows, places)
    start = place * each + min(place, more)
    return np.arange(start, start + each + (place < more))
