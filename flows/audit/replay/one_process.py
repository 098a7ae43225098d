"""A run's policy in this one process, whatever it ran on: loaded and rebuilt when a stage first needs it.

Nothing is written into the run, and its lock is not taken: a live run can be read, and a read-only copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast, get_args

from flows.recover import planned_steps, rebuild
from flows.run_folder import first_weights_digest
from storage import Run, RunWriter, StorageError
from storage.artifacts import Manifest
from tasks.conditions import CONDITIONS
from tasks.config import RunConfig
from tasks.workers.group import LocalGroup, WorkerGroup
from tasks.workers.rank import Role, open_rank

if TYPE_CHECKING:
    from tasks.workers.rank import Rank

P = ParamSpec("P")
R = TypeVar("R")

Device = Literal["cpu", "cuda", "auto"]
DEVICES: tuple[Device, ...] = get_args(Device)


def for_one_process(cfg: RunConfig, device: Device) -> RunConfig:
    """The same computation by one rank of this process: other places decide a result up to rounding alone."""
    policy, alone = cfg.actor_rollout_ref, {"fsdp_size": -1, "param_offload": False, "optimizer_offload": False}
    actor, ref = (
        part.model_copy(
            update={
                "ulysses_sequence_parallel_size": 1,
                "fsdp_config": part.fsdp_config.model_copy(update=alone),
            }
        )
        for part in (policy.actor, policy.ref)
    )
    trainer = cfg.trainer.model_copy(update={"device": device, "nnodes": 1, "n_gpus_per_node": 1})
    policy = policy.model_copy(update={"actor": actor, "ref": ref, "hybrid_engine": True})
    return cfg.model_copy(update={"actor_rollout_ref": policy, "trainer": trainer})


class Policy(WorkerGroup):
    """The policy before or after a step, as the group of ranks that stages are given.

    Attributes:
        sampling_ranks: how many ranks shared out the rows that are sampled again; each share is sampled by itself.
        seconds: spent on loading and rebuilding.
        doubt: why what it holds may not be the run's policy; empty: nothing is known against it.
    """

    ranks = 1

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._group: LocalGroup | None = None
        self._role = Role.ACTOR
        self._wanted: tuple[RunConfig, int | None, int] | None = None
        self.sampling_ranks, self.seconds, self.doubt = 1, 0.0, ""

    def needs(self, role: Role) -> None:
        """Also do what this role does."""
        if role not in self._role:
            self.close()
        self._role |= role

    def expect(self, cfg: RunConfig, version: int | None, lineage: int) -> None:
        """Be this policy when a stage next asks for anything.

        Args:
            cfg: of the stage, for one process.
            version: policy version; None: any, for the reference alone is wanted.
            lineage: whose plan decides the learning rates.
        """
        self._wanted = (cfg, version, lineage)

    def run(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [task(self._ready().rank, *args, **kwargs)]

    def sample(self, task: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        rank = self._ready().rank
        meshes = [replace(rank.mesh, rank=n, world_size=self.sampling_ranks) for n in range(self.sampling_ranks)]
        return [task(replace(rank, mesh=mesh), *args, **kwargs) for mesh in meshes]

    def rebuild(self) -> None:
        raise AssertionError("a rank in this process is not lost alone")

    def log_to(self, folder: Path) -> None:
        """It prints where this process prints."""

    def close(self) -> None:
        """Let go of the model."""
        if self._group is not None:
            self._group.rank.close()
        self._group = None

    def _ready(self) -> LocalGroup:
        """The rank, holding the policy that is expected.

        Raises:
            StorageError, ValueError: it cannot be loaded or rebuilt.
        """
        if self._group is not None and self._wanted is None:
            return self._group
        started = time.perf_counter()
        try:
            assert self._wanted is not None, "a stage says which policy it is made with"
            cfg, version, lineage = self._wanted
            group = self._group
            if group is None or (version is not None and group.policy_version > version):
                self.close()
                group = self._open(cfg)
            if version is not None and group.policy_version != version:
                # It only reads, as all of recovery does until a stage is committed.
                self._say(rebuild(cast(RunWriter, self._run), group, version, self._say))
            if version is not None:
                self.doubt = self._doubt(version, group.weights_digest())
            group.follow(cfg, total_steps=planned_steps(self._run, lineage))
            self._group, self._wanted = group, None
            return group
        finally:
            self.seconds += time.perf_counter() - started

    def _doubt(self, version: int, digest: str) -> str:
        """In words, where the update that made a policy has recorded other weights."""
        try:
            table = self._run.step(version).table("updates", ["weights_digest"])
        except (FileNotFoundError, StorageError):
            return ""
        recorded = table["weights_digest"][-1].as_py()
        if recorded in (None, digest):
            return ""
        return (
            f"policy {version} here has other weights (SHA-256 {digest[:12]}) than its update recorded "
            f"({recorded[:12]}): the checkpoint is another one, or it was made in other places"
        )

    def _open(self, cfg: RunConfig) -> LocalGroup:
        """The policy that the run began with, in memory."""
        total = planned_steps(self._run, self._run.lineage) or 1
        group = LocalGroup(open_rank(cfg, None, _tokenizer(cfg), role=self._role, total_steps=total))
        begun, now = first_weights_digest(self._run), group.weights_digest()
        if begun not in (None, now):
            raise StorageError(
                f"actor_rollout_ref.model.path={cfg.actor_rollout_ref.model.path} holds other weights (SHA-256 "
                f"{now[:12]}) than those that the run began with ({str(begun)[:12]}). Put them back, or say where "
                "they are: actor_rollout_ref.model.path=FOLDER"
            )
        return group


def _tokenizer(cfg: RunConfig) -> Any:
    from tasks.tokenizer import load_tokenizer

    return load_tokenizer(cfg.actor_rollout_ref.model)


def on_cpu_for_certain(cfg: RunConfig, made: Sequence[Manifest]) -> bool:
    """Whether artifacts were computed on a CPU: they or their run say so, or it was on this machine, which has no GPU.

    Args:
        cfg: the run's configuration.
        made: the manifests of the artifacts in question.
    """
    if cfg.trainer.device != "auto":
        return cfg.trainer.device == "cpu"
    noted = [manifest.notes.get(CONDITIONS) or {} for manifest in made]
    devices = [facts["device"] == one["processor"] for one in noted for _, facts in one.get("ranks", ())]
    if devices and all(one.get("ranks") for one in noted if one):
        return all(devices)
    import socket

    import torch

    return {manifest.host for manifest in made} == {socket.gethostname()} and not torch.cuda.is_available()
