"""FSDP2 over a mesh: which weights are sharded together, in which precision they meet, and where they rest.

Every decoder layer is a unit of its own, gathered when it is computed; embedding, last norm and head are the root's and
stay gathered from the root's forward pass to the end of its backward pass. What the root computes is handed to it as a
function (`in_one_forward`), so that FSDP sees one forward pass per micro-batch although decoder and head are called
apart. Gradients are summed over all ranks and divided by nothing: the loss is already one over the global mini-batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.config import FSDPConfig
from tasks.workers import progress
from tasks.workers.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def shard(network: Any, mesh: Mesh, fsdp: FSDPConfig, compute_dtype: torch.dtype) -> None:
    """Shard a model's weights, layer by layer, onto the mesh's devices; collective.

    Args:
        network: the transformers model, whole, in host memory or on the device.
        mesh: of several ranks.
        fsdp: `…fsdp_config`.
        compute_dtype: type in which weights are gathered, where it is not their own.
    """
    dtype = network.get_input_embeddings().weight.dtype
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype if compute_dtype != dtype else None,
        # A sum is never taken in fewer digits than the weights have.
        reduce_dtype=torch.promote_types(dtype, DTYPES[fsdp.mixed_precision.reduce_dtype]),
    )
    pinned = mesh.device.type == "cuda"
    rest = CPUOffloadPolicy(pin_memory=pinned) if fsdp.offload_policy else OffloadPolicy()
    layers = [layer for layer in network.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for part in (*layers, network):
        reshard = fsdp.reshard_after_forward if part is not network else False
        fully_shard(part, mesh=mesh.fsdp, reshard_after_forward=reshard, mp_policy=precision, offload_policy=rest)
    for unit in units(network):
        unit.set_gradient_divide_factor(1.0)
        # Without it the sum is a product sum of NCCL's, which gloo does not have.
        unit.set_force_sum_reduction_for_comms(True)
    if fsdp.forward_prefetch:
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    network.compute_within = _call
    register_fsdp_forward_method(network, "compute_within")


def _call(function: Callable[[], Any]) -> Any:
    return function()


def units(network: Any) -> list[FSDPModule]:
    """The parts of a network that are gathered as one; none: it is not sharded."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def in_one_forward(network: Any, function: Callable[[], Any]) -> Any:
    """Call a function that uses the network's parts, as one forward pass of the network.

    Args:
        network: sharded or not.
        function: returns tensors, or tuples of them.
    """
    within = getattr(network, "compute_within", None)
    return function() if within is None else within(function)


def give_up_gathered(network: Any) -> None:
    """Free weights that a pass without a backward pass left gathered: they would not follow the shards."""
    for unit in units(network):
        unit.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, or the whole one that is not sharded; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; collective where it is sharded."""
    progress.note()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_alike(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part of something, as a tensor that is sharded and lies like a weight."""
    alike = torch.empty_like(weight.detach())
    local(alike).copy_(part)
    return alike


def moved_by_hand(flag: bool, fsdp: FSDPConfig, mesh: Mesh) -> bool:
    """Whether `param_offload` or `optimizer_offload` is to be done here.

    Under `offload_policy` FSDP itself keeps weights and optimizer in host memory, and optimizer steps are made there.
    In one process there is no FSDP, and it means both flags.

    Args:
        flag: `param_offload` or `optimizer_offload`.
        fsdp: `…fsdp_config`.
        mesh: this rank's.
    """
    return (flag or fsdp.offload_policy) if mesh.world_size == 1 else (flag and not fsdp.offload_policy)


class Residence:
    """Where a module's weights rest between uses: on their device, or in host memory (`param_offload`)."""

    def __init__(self, module: torch.nn.Module, device: torch.device, *, away: bool) -> None:
        self._module, self._device, self._away = module, device, away
        self._users = 0
        if away:
            module.to("cpu")

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """The weights are on their device; the outermost of nested blocks moves them."""
        if self._away and not self._users:
            self._module.to(self._device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._away and not self._users:
                self._module.to("cpu")
