"""The rollout engine of a rank, and how it comes by the policy's weights: it has them, copies them, or loads files."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tasks.config import RunConfig
from tasks.engines.hand_over import hand_over
from tasks.engines.policy_folder import check_of, finish
from tasks.engines.protocol import RolloutEngine
from tasks.engines.transformers_engine import OwnWeights, TransformersEngine
from tasks.engines.vllm_engine import VllmEngine
from tasks.workers.export import save_whole
from tasks.workers.mesh import Mesh
from tasks.workers.model import without_progress_bar
from tasks.workers.policy import PolicyWorker
from tasks.workers.rank import Rank
from tasks.workers.sequences import MicroBatching, Sequences
from tasks.workers.weights import files_bytes, full_disk_as_os_error


class RankEngine(Protocol):
    """An engine in its place on a rank. `follow` and `rest` are collective.

    Attributes:
        engine: samples responses; None: another rank samples for this one.
    """

    engine: RolloutEngine | None

    def follow(self, policy: PolicyWorker) -> None:
        """Be ready to sample from the policy as it is now."""

    def load(self, folder: Path, version: int, digest: str) -> None:
        """Be ready to sample from a policy that `write_policy_files` has written."""

    def log_to(self, log: Path) -> None:
        """Let a process of its own append what it prints to another file, from its next start on."""

    def rest(self) -> None:
        """Leave the device to training."""

    def close(self) -> None:
        """End what was started."""


def rank_engine(
    cfg: RunConfig,
    mesh: Mesh,
    policy: PolicyWorker | None,
    tokenizer: Any,
    *,
    devices: Sequence[str] = (),
    log: Path | None = None,
) -> RankEngine:
    """The engine that a configuration asks for.

    Args:
        cfg: the run's configuration.
        mesh: the rank's place.
        policy: the rank's; None: it only samples.
        tokenizer: of the model.
        devices: accelerators of the rank's rollout replica, as CUDA_VISIBLE_DEVICES names them; none: all in sight.
        log: file for what an engine's own process prints; None: it keeps it.
    """
    if cfg.actor_rollout_ref.rollout.name == "vllm":
        hosts = mesh.rank % cfg.replica_devices == 0
        device = mesh.device.type
        engine = VllmEngine(cfg, tokenizer, device=device, devices=devices or None, log=log) if hosts else None
        return OnVllm(cfg, mesh, engine, trains=policy is not None)
    if policy is not None and mesh.world_size == 1:
        return OnThePolicy(policy, tokenizer)
    return OnACopy(cfg, mesh.device, tokenizer)


class OnThePolicy:
    """On one device: the engine samples from the policy's own weights."""

    def __init__(self, policy: PolicyWorker, tokenizer: Any) -> None:
        self.engine: RolloutEngine | None = TransformersEngine(policy, tokenizer)

    def follow(self, policy: PolicyWorker) -> None:
        """It always does."""

    def load(self, folder: Path, version: int, digest: str) -> None:
        raise AssertionError("it has the policy")

    def log_to(self, log: Path) -> None:
        """It has no process of its own."""

    def rest(self) -> None:
        """It holds nothing between calls."""

    def close(self) -> None:
        """Nothing was started."""


class OnACopy:
    """On one of several devices: the engine samples from a whole copy, since the policy's weights may be sharded."""

    def __init__(self, cfg: RunConfig, device: torch.device, tokenizer: Any) -> None:
        self._copy = OwnWeights(cfg, device)
        self.engine: RolloutEngine | None = TransformersEngine(self._copy, tokenizer)

    def follow(self, policy: PolicyWorker) -> None:
        self._copy.cfg = policy.cfg
        version, digest = policy.policy_version, policy.weights_digest()
        if not self._copy.is_policy(version, digest):
            self._copy.take(policy.full_weights(), version, digest)

    def load(self, folder: Path, version: int, digest: str) -> None:
        self._copy.take(load_file(folder / WEIGHTS).items(), version, digest)

    def log_to(self, log: Path) -> None:
        """It has no process of its own."""

    def rest(self) -> None:
        """Between calls the copy rests where `rollout.free_cache_engine` says."""

    def close(self) -> None:
        """Nothing was started."""


class OnVllm:
    """vLLM: the first rank of each rollout replica hosts the replica's engine, which loads the policy from a folder.

    On each machine one rank writes that folder for all engines there.
    """

    def __init__(self, cfg: RunConfig, mesh: Mesh, engine: VllmEngine | None, *, trains: bool) -> None:
        self._mesh, self._vllm = mesh, engine
        self.engine: RolloutEngine | None = engine
        self._writer: FolderWriter | None = None
        if trains and mesh.world_size > 1:
            self._host = socket.gethostname()
            places = mesh.exchange((self._host, engine is not None))
            with_engine = [rank for rank, (host, hosts) in enumerate(places) if hosts and host == self._host]
            self._writer = FolderWriter(cfg, mesh, writes=mesh.rank == min(with_engine, default=None))

    def follow(self, policy: PolicyWorker) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._writer is None:
            assert self._vllm is not None
            hand_over(policy, self._vllm)
            return
        version, digest = policy.policy_version, policy.weights_digest()
        # The exchange is also what an engine waits for before it takes the memory that training has given back.
        if not any(self._mesh.exchange(self._vllm is not None and not self._vllm.holds(version, digest))):
            return
        folder = self._writer.write(policy, self._new_folder)
        folders = dict(one for one in self._mesh.exchange((self._host, str(folder)) if folder else None) if one)
        if self._vllm is not None:
            self._vllm.load(Path(folders[self._host]), version, digest)

    def _new_folder(self, version: int, needed_bytes: int) -> Path:
        assert self._vllm is not None
        return self._vllm.new_folder(version, needed_bytes)

    def load(self, folder: Path, version: int, digest: str) -> None:
        # Also where the engine holds this policy, as when another one died while it loaded: the folder it has it from
        # goes when all have the new one.
        if self._vllm is not None:
            self._vllm.load(folder, version, digest)

    def log_to(self, log: Path) -> None:
        if self._vllm is not None:
            self._vllm.log_to(log)

    def rest(self) -> None:
        if self._vllm is not None:
            self._vllm.sleep()
        if self._mesh.device.type == "cuda":
            self._mesh.agree(None)

    def close(self) -> None:
        if self._vllm is not None:
            self._vllm.close()


class FolderWriter:
    """Writes the policy of a mesh as vLLM loads it, from a whole copy in host memory of the ranks that write."""

    def __init__(self, cfg: RunConfig, mesh: Mesh, *, writes: bool) -> None:
        self._cfg, self._mesh = cfg, mesh
        self._copy = OwnWeights(cfg, torch.device("cpu")) if writes else None

    def write(self, policy: PolicyWorker, new_folder: Callable[[int, int], Path]) -> Path | None:
        """Write the policy with its check; collective.

        Args:
            policy: this rank's.
            new_folder: makes the folder, for a version and so many bytes.

        Returns:
            The folder that this rank has written; None: none.
        """
        version, digest = policy.policy_version, policy.weights_digest()
        if self._copy is None:
            for _ in policy.full_weights():
                pass
        else:
            self._copy.take(policy.full_weights(), version, digest)
        folder, check, problem = None, None, None
        try:
            if self._copy is not None:
                model = self._copy.model
                folder = new_folder(version, files_bytes(dict(model.network.named_parameters())))
                with full_disk_as_os_error(folder), without_progress_bar():
                    save_whole(model, folder)
                check = check_of(self._cfg, folder)
        except OSError as error:
            problem = error
        self._mesh.agree(problem)
        check = next(one for one in self._mesh.exchange(check) if one is not None)
        log_probs = self._log_probs(policy, check)
        if folder is not None:
            finish(folder, version, digest, check, log_probs)
        self._mesh.agree(None)
        return folder

    def _log_probs(self, policy: PolicyWorker, check: Sequences) -> np.ndarray:
        """[T] the policy's log-probs of the check, which one data-parallel rank computes."""
        result = policy.log_probs(check, MicroBatching(1, None), temperature=1.0)
        parts: Iterable[np.ndarray | None] = self._mesh.exchange(result.log_probs.values if len(result.rows) else None)
        return next(values for values in parts if values is not None)


# -------------------------------------------------------------------------------------- from ranks that train to others

WEIGHTS = "weights.safetensors"
"""The policy's weights by name, for a copy of it."""


def write_policy_files(rank: Rank, folder: Path) -> None:
    """Rank task: write the policy into an empty folder, for ranks that only sample; rank 0 writes.

    Raises:
        OSError: the files cannot be written.
    """
    policy, mesh = rank.policy, rank.mesh
    if policy.cfg.actor_rollout_ref.rollout.name == "vllm":
        FolderWriter(policy.cfg, mesh, writes=mesh.rank == 0).write(policy, lambda *_: folder)
        return
    first, problem = mesh.rank == 0, None
    weights = {name: value.cpu().clone() for name, value in policy.full_weights() if first}
    try:
        if first:
            with full_disk_as_os_error(folder):
                save_file(weights, folder / WEIGHTS)
    except OSError as error:
        problem = error
    mesh.agree(problem)


def load_policy_files(rank: Rank, folder: Path, version: int, digest: str) -> None:
    """Rank task: take the policy that `write_policy_files` has written."""
    rank.rollout.load(folder, version, digest)
