"""The files of a saved policy version: trained weights, optimizer moments, and state.json. No pickle.

One process writes whole tensors; a mesh writes one file of shards per rank, through torch.distributed.checkpoint (DCP).
All are safetensors files in the layout of DCP's HuggingFaceStorageReader, which reads either into any number of ranks.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from typing_extensions import TypedDict

from storage.durable import checked, read_json
from tasks.workers.mesh import Mesh
from tasks.workers.optim import optimizer_tensors, restore_optimizer
from tasks.workers.sharding import local
from tasks.workers.weights import digests, full_disk_as_os_error, joined_digest, usual_mode

WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"

Weights = Mapping[str, torch.nn.Parameter]
Kind = tuple[torch.dtype, torch.Size]


class _State(TypedDict):
    """What state.json must say."""

    weights_digest: str
    frozen_digest: str
    policy_version: int


_STATE = TypeAdapter(_State)


def save_policy(
    folder: Path, weights: Weights, optimizer: torch.optim.AdamW, state: Mapping[str, Any], mesh: Mesh
) -> None:
    """Write the files into an existing folder that all ranks see; collective.

    Args:
        folder: where to.
        weights: trained weights by name.
        optimizer: whose moments are written as "<weight>:exp_avg", "<weight>:exp_avg_sq" and "<weight>:step".
        state: what belongs to state.json.
        mesh: this rank's.

    Raises:
        OSError: they cannot be written.
    """
    moments = dict(optimizer_tensors(optimizer, weights))
    if mesh.world_size == 1:
        for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, moments)):
            with full_disk_as_os_error(folder):
                save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, folder / name)
    else:
        _save_shards(folder, {**weights, **moments}, mesh)
    problem = None
    if mesh.rank == 0:
        try:
            for path in folder.glob("*.safetensors"):
                usual_mode(path)
            (folder / STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")
        except OSError as error:
            problem = error
    mesh.agree(problem)


def _save_shards(folder: Path, tensors: dict[str, torch.Tensor], mesh: Mesh) -> None:
    """One file per rank that holds something."""
    import torch.distributed.checkpoint as checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        checkpoint.save(tensors, storage_writer=writer, process_group=mesh.group)
    except checkpoint.CheckpointException as error:  # a BaseException, the same on all ranks
        problems = {rank: failure[0] for rank, failure in error.failures.items()}
        said = "; ".join(f"rank {rank}: {problem}" for rank, problem in sorted(problems.items()))
        number = next((each.errno for each in problems.values() if isinstance(each, OSError)), None)
        raise OSError(number, said, str(folder)) from error


class PolicyFiles:
    """A folder that `save_policy` filled, before anything is taken from it.

    Attributes:
        state: what state.json holds.
    """

    def __init__(self, folder: Path, weights: Weights, mesh: Mesh) -> None:
        """Look at the folder; collective.

        Args:
            folder: of one policy version.
            weights: trained weights by name, which are to take its values.
            mesh: this rank's.

        Raises:
            ValueError: it holds other weights than these.
            OSError: it cannot be read.
        """
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        self._folder, self._weights, self._mesh = folder, weights, mesh
        self.state: dict[str, Any] = {}
        self._files = HuggingFaceStorageReader(str(folder))
        problem: Exception | None = None
        try:
            self.state = _read_state(folder / STATE)
            known: Mapping[str, Any] = self._files.read_metadata().state_dict_metadata
            self._kinds = {name: (each.properties.dtype, each.size) for name, each in known.items()}
            self._require_same_model()
        except (OSError, ValueError) as error:
            problem = error
        except Exception as error:  # safetensors has errors of its own
            problem = ValueError(f"{folder} is damaged: {type(error).__name__}: {error}")
        mesh.agree(problem)

    def become(self, optimizer: torch.optim.AdamW, unchanging: Sequence[bytes]) -> dict[str, bytes]:
        """Give weights and optimizer the values in the files; collective.

        Args:
            optimizer: whose state is replaced.
            unchanging: digests of the frozen weights.

        Returns:
            Digests of the weights by name.

        Raises:
            ValueError: the weights do not have the digest in state.json, or moments are missing or belong to no weight;
                nothing is changed then.
        """
        tensors = {name: self._room_for(name) for name in self._kinds}
        self._read(tensors)
        values = {name: tensors.pop(name) for name in self._weights}
        found, wanted = digests(values, self._mesh), self.state["weights_digest"]
        if joined_digest([*found.values(), *unchanging]) != wanted:
            raise ValueError(f"{self._folder} is damaged: its weights do not have the digest {wanted[:12]}")
        restore_optimizer(optimizer, self._weights, tensors)
        with torch.no_grad():
            for name, weight in self._weights.items():
                local(weight).copy_(local(values[name]))
        return found

    def _room_for(self, name: str) -> torch.Tensor:
        """Where a tensor is read to, in host memory, since the device may hold no second weights and moments: sharded
        as its weight is; a step count, and what fits no weight, as it is."""
        dtype, shape = self._kinds[name]
        weight = self._weights.get(name.rpartition(":")[0] or name)
        if weight is None or (dtype, shape) != (weight.dtype, weight.shape):
            return torch.empty(shape, dtype=dtype)
        return torch.empty_like(weight.detach(), device="cpu")

    def _read(self, into: dict[str, torch.Tensor]) -> None:
        import torch.distributed.checkpoint as checkpoint

        alone = self._mesh.world_size == 1
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                checkpoint.load(into, storage_reader=self._files, process_group=self._mesh.group, no_dist=alone)
        except checkpoint.CheckpointException as error:  # a BaseException, the same on all ranks
            raise ValueError(f"{self._folder} is damaged: {error}") from error

    def _require_same_model(self) -> None:
        """Refuse weights whose names, shapes or types are not those of this run's model."""
        found = {name: kind for name, kind in self._kinds.items() if ":" not in name}
        wanted: dict[str, Kind] = {name: (weight.dtype, weight.shape) for name, weight in self._weights.items()}
        odd = sorted(found.keys() ^ wanted.keys())
        odd += [name for name in sorted(found.keys() & wanted.keys()) if found[name] != wanted[name]]
        # Room is made for what the files name: for a moment as much as for its weight, for a count next to none.
        moments = {name: self._kinds[name][1] for name in self._kinds if ":" in name}
        odd += [
            name
            for name, shape in sorted(moments.items())
            if (weight := self._weights.get(name.rpartition(":")[0])) is None
            or (shape != weight.shape and shape.numel() != 1)
        ]
        if odd:
            raise ValueError(
                f"{self._folder} is no policy of this run's model: {odd[0]} is on one side only or differs in shape or "
                f"type ({len(odd)} weights in all). Give the run the actor_rollout_ref.model it was made with, or "
                "another trainer.experiment_name."
            )


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = read_json(path)
        checked(_STATE, state)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return state
