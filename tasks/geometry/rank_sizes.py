"""What decides the sizes on one rank: shards, types, and what a token leaves behind on its way through a layer. Pure.

The formulas of activations are those of transformers' own layers of the Llama family, checked against what autograd
really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tasks.config import RunConfig
from tasks.geometry.model_weights import Sizes, Weight, adapters_of, weights_of
from tasks.geometry.numbers import Numbers

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Rank:
    """What decides the sizes on one rank."""

    cfg: RunConfig
    numbers: Numbers
    sizes: Sizes

    @cached_property
    def on_cpu(self) -> bool:
        return self.cfg.trainer.device == "cpu"

    @cached_property
    def alone(self) -> bool:
        """One device: no FSDP, no collectives, the engine samples from the resident weights."""
        return self.numbers.world_size == 1

    @cached_property
    def shards(self) -> int:
        """Devices that share one copy of the weights."""
        return self.numbers.fsdp_mesh.shape[-1] if self.numbers.fsdp_mesh else self.numbers.world_size

    @cached_property
    def copies(self) -> int:
        """Copies of the weights: 1, or more with hybrid sharding."""
        return self.numbers.world_size // self.shards

    @cached_property
    def resident(self) -> int:
        """Bytes of a number in the resident weights."""
        return DTYPE_BYTES[self.cfg.actor_rollout_ref.model.dtype]

    @cached_property
    def compute(self) -> int:
        """Bytes of a number in the computation, as tasks/workers/model.py chooses it."""
        wanted = self.cfg.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype
        if wanted is not None:
            return DTYPE_BYTES[wanted]
        return 2 if not self.on_cpu and self.resident == 4 else self.resident

    @cached_property
    def residual(self) -> int:
        """Bytes of a number in residuals and norms: autocast leaves them in the weights' type, FSDP does not."""
        return self.resident if self.alone else self.compute

    @cached_property
    def reduce(self) -> int:
        """Bytes of a number of a gradient on its way between ranks; never fewer than the weights have."""
        wanted = self.cfg.actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype
        return max(DTYPE_BYTES[wanted], self.resident)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return weights_of(self.sizes)

    @cached_property
    def has_adapter(self) -> bool:
        model = self.cfg.actor_rollout_ref.model
        return model.lora_rank > 0 or model.lora_adapter_path is not None

    @cached_property
    def adapters(self) -> tuple[Weight, ...]:
        """LoRA's matrices; the rank of an adapter from a folder is not known here: `lora_rank`, or 8."""
        model = self.cfg.actor_rollout_ref.model
        return adapters_of(self.weights, model.lora_rank or 8, model.target_modules) if self.has_adapter else ()

    @cached_property
    def adapter_number(self) -> int:
        """Bytes of a number of an adapter: peft keeps those of bfloat16 models in float32."""
        return max(self.resident, 4)

    def shard_bytes(self, weights: tuple[Weight, ...], number: int) -> int:
        """Bytes of one rank's shard of weights, `number` bytes each."""
        return number * sum(weight.shard(self.shards) for weight in weights)

    @cached_property
    def weights_bytes(self) -> int:
        """The policy's shard, an adapter included."""
        return self.shard_bytes(self.weights, self.resident) + self.shard_bytes(self.adapters, self.adapter_number)

    @cached_property
    def trained_bytes(self) -> int:
        """The shard of what is trained; its gradient has the same size, and each moment of AdamW."""
        if self.has_adapter:
            return self.shard_bytes(self.adapters, self.adapter_number)
        return self.shard_bytes(self.weights, self.resident)

    @cached_property
    def trained_tensors(self) -> int:
        trained = self.adapters if self.has_adapter else self.weights
        return sum(max(weight.layers, 1) for weight in trained)

    @cached_property
    def parameters(self) -> int:
        return sum(weight.count for weight in (*self.weights, *self.adapters))

    @cached_property
    def trained_parameters(self) -> int:
        return sum(weight.count for weight in (self.adapters or self.weights))

    @cached_property
    def whole_bytes(self) -> int:
        """All of the model's weights as they rest, without an adapter."""
        return self.resident * sum(weight.count for weight in self.weights)

    @cached_property
    def layer_parameters(self) -> int:
        """Numbers in one layer: what FSDP gathers at a time."""
        inside = sum(weight.count for weight in (*self.weights, *self.adapters) if weight.layers)
        return inside // self.sizes.layers

    @cached_property
    def root_parameters(self) -> int:
        """Numbers outside the layers: embeddings, last norm, head."""
        return sum(weight.count for weight in self.weights if not weight.layers)


def activation_bytes_per_token(rank: Rank) -> int:
    """What autograd keeps of one token on one device, from the embeddings to the last norm."""
    norm, layers = _norm_bytes(rank, rank.sizes.hidden_size), rank.sizes.layers
    if rank.cfg.actor_rollout_ref.model.enable_gradient_checkpointing:
        return layers * rank.residual * rank.sizes.hidden_size + layer_bytes_per_token(rank) + norm
    return layers * layer_bytes_per_token(rank) + norm


def layer_bytes_per_token(rank: Rank) -> int:
    """What autograd keeps of one token in one layer of the Llama family, as transformers writes it.

    Two norms; rotated queries and keys, values, the attention's output and its log-sum-exp (no score matrix, but in
    eager attention); of the MLP gate, up, the activated gate and the product.
    """
    sizes, c, r = rank.sizes, rank.compute, rank.residual
    cast = c * sizes.hidden_size if c != r else 0
    attention = 2 * c * (sizes.query_size + sizes.kv_size) + 4 * sizes.heads + _scores_bytes(rank)
    # The norms of heads do not keep their output: rotation needs no input for its gradient.
    of_heads = (max(r, 4) + r) * (sizes.query_size + sizes.kv_size) if sizes.qk_norm else 0
    mlp = 4 * c * sizes.experts_per_token * sizes.inner_size
    return 2 * (_norm_bytes(rank, sizes.hidden_size) + cast) + attention + of_heads + mlp


def _norm_bytes(rank: Rank, width: int) -> int:
    """RMSNorm computes in float32: it keeps its input in float32, that divided by its norm, and its own output."""
    r = rank.residual
    return (max(r, 4) + 2 * r) * width


def _scores_bytes(rank: Rank) -> int:
    """Of one token: eager attention, and padded the default on CPU, keep a probability for each head and other token.
    Attention over packed sequences (`use_remove_padding` in a mesh), sdpa and flash attention keep none."""
    model = rank.cfg.actor_rollout_ref.model
    padded = rank.alone or not model.use_remove_padding
    if not (model.attn_implementation == "eager" or (model.attn_implementation is None and rank.on_cpu and padded)):
        return 0
    wide = 4 + rank.compute if rank.compute == 2 else rank.compute
    return wide * rank.sizes.heads * rank.numbers.padded_sequence_tokens
