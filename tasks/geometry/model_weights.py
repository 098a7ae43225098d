"""The weights of a model by shape, from the numbers of its `config.json` alone. Pure.

Known are the model types whose layers are all alike: Llama, Mistral, Qwen2, Qwen3, and with experts Mixtral and
Qwen3-MoE. Counts and shapes are those of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from tasks.geometry.numbers import ModelLimits


@dataclass(frozen=True)
class Weight:
    """One weight, and how many layers have it.

    Attributes:
        name: last part of its name without `.weight`: `q_proj`, `q_proj.bias`, `input_layernorm`.
        shape: as torch holds it; a linear layer's is [out, in].
        layers: how many layers have one; 0: it stands outside the layers.
        split: which dimension the tensor-parallel ranks of an engine share; None: each holds all of it.
        unit: slices of the split dimension are multiples of this many rows: a head does not fall apart.
    """

    name: str
    shape: tuple[int, ...]
    layers: int
    split: int | None = None
    unit: int = 1

    @property
    def count(self) -> int:
        """Numbers in all of them."""
        return prod(self.shape) * max(self.layers, 1)

    @property
    def is_linear(self) -> bool:
        """It is the matrix of a linear layer within the layers: what LoRA's `all-linear` means."""
        return self.name.endswith("_proj") and len(self.shape) == 2

    def shard(self, shards: int) -> int:
        """Numbers in one shard of each: FSDP2 cuts the first dimension and pads the last pieces to the first one's size
        (torch.distributed.fsdp, `FSDPParam._init_sharded_param`)."""
        return ceil(self.shape[0] / shards) * prod(self.shape[1:]) * max(self.layers, 1)

    def slice(self, ranks: int) -> int:
        """Numbers on one of the tensor-parallel ranks of an engine. Fewer heads than ranks are held more than once."""
        if self.split is None:
            return self.count
        return ceil(self.shape[self.split] / self.unit / ranks) * self.unit * self.count // self.shape[self.split]


@dataclass(frozen=True)
class Sizes:
    """A model's numbers, none of them unknown. A token passes through `experts_per_token` times `inner_size`."""

    hidden_size: int
    inner_size: int
    experts: int
    experts_per_token: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim


_Bias = Literal["no", "qkv", "config"]
_BIAS: dict[str, _Bias] = {
    "llama": "config",
    "mistral": "no",
    "mixtral": "no",
    "qwen2": "qkv",
    "qwen3": "config",
    "qwen3_moe": "config",
}
"""Which linear layers of attention have a bias, by model type: none, those in, or all if `attention_bias` says so."""
KNOWN_TYPES = tuple(_BIAS)
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "qwen3_moe": ("num_experts_per_tok", "moe_intermediate_size"),
    "mixtral": ("num_experts_per_tok",),
}


def why_unknown(model: ModelLimits) -> str | None:
    """Why the weights of a model are not known; None: they are."""
    if model.model_type not in _BIAS:
        return f"its model_type is {model.model_type}; known are {', '.join(KNOWN_TYPES)}"
    missing = [name for name in (*_NEEDED, *_OF_EXPERTS.get(model.model_type, ())) if (getattr(model, name) or 0) < 1]
    if model.model_type in _OF_EXPERTS and not _experts_of(model):
        missing.append("num_experts")
    if missing:
        return f"its config.json lacks {', '.join(missing)}"
    if (model.decoder_sparse_step or 1) != 1:
        return f"decoder_sparse_step={model.decoder_sparse_step}: its layers are not all alike"
    return None


def sizes_of(model: ModelLimits) -> Sizes | None:
    """A model's numbers; None: `why_unknown` says why. What `config.json` may leave away has transformers' default."""
    if why_unknown(model) is not None:
        return None
    assert model.model_type and model.hidden_size and model.intermediate_size and model.num_hidden_layers
    assert model.num_attention_heads and model.vocab_size
    bias, qwen3 = _BIAS[model.model_type], model.model_type.startswith("qwen3")
    experts = _experts_of(model) if model.model_type in _OF_EXPERTS else 0
    by_config = bias == "config" and bool(model.attention_bias)
    own_size = model.moe_intermediate_size if model.model_type == "qwen3_moe" else None
    return Sizes(
        hidden_size=model.hidden_size,
        inner_size=own_size or model.intermediate_size,
        experts=experts,
        experts_per_token=(model.num_experts_per_tok or 1) if experts else 1,
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads or model.num_attention_heads,
        head_dim=model.head_dim or (128 if qwen3 else model.hidden_size // model.num_attention_heads),
        vocabulary=model.vocab_size,
        tied=bool(model.tie_word_embeddings),
        qkv_bias=bias == "qkv" or by_config,
        out_bias=by_config,
        mlp_bias=bool(model.mlp_bias) and model.model_type == "llama",
        qk_norm=qwen3,
    )


def _experts_of(model: ModelLimits) -> int:
    return model.num_experts or model.num_local_experts or 0


def weights_of(sizes: Sizes) -> tuple[Weight, ...]:
    """Every weight of a model, equal ones of its layers together."""
    hidden, vocabulary = sizes.hidden_size, sizes.vocabulary
    head = () if sizes.tied else (Weight("lm_head", (vocabulary, hidden), 0, 0),)
    return (
        Weight("embed_tokens", (vocabulary, hidden), 0, 0),
        *_attention(sizes),
        *(_experts(sizes) if sizes.experts else _mlp(sizes)),
        Weight("input_layernorm", (hidden,), sizes.layers),
        Weight("post_attention_layernorm", (hidden,), sizes.layers),
        Weight("norm", (hidden,), 0),
        *head,
    )


def _attention(sizes: Sizes) -> Iterator[Weight]:
    hidden, layers, head = sizes.hidden_size, sizes.layers, sizes.head_dim
    for name, width in (("q_proj", sizes.query_size), ("k_proj", sizes.kv_size), ("v_proj", sizes.kv_size)):
        yield Weight(name, (width, hidden), layers, 0, head)
        if sizes.qkv_bias:
            yield Weight(f"{name}.bias", (width,), layers, 0, head)
    yield Weight("o_proj", (hidden, sizes.query_size), layers, 1, head)
    if sizes.out_bias:
        yield Weight("o_proj.bias", (hidden,), layers)
    if sizes.qk_norm:
        yield Weight("q_norm", (head,), layers)
        yield Weight("k_norm", (head,), layers)


def _mlp(sizes: Sizes) -> Iterator[Weight]:
    hidden, inner, layers = sizes.hidden_size, sizes.inner_size, sizes.layers
    for name in ("gate_proj", "up_proj"):
        yield Weight(name, (inner, hidden), layers, 0)
        if sizes.mlp_bias:
            yield Weight(f"{name}.bias", (inner,), layers, 0)
    yield Weight("down_proj", (hidden, inner), layers, 1)
    if sizes.mlp_bias:
        yield Weight("down_proj.bias", (hidden,), layers)


def _experts(sizes: Sizes) -> Iterator[Weight]:
    """transformers 5 keeps all experts of a layer in two tensors."""
    hidden, inner, layers, experts = sizes.hidden_size, sizes.inner_size, sizes.layers, sizes.experts
    yield Weight("gate", (experts, hidden), layers)
    yield Weight("experts.gate_up_proj", (experts, 2 * inner, hidden), layers, 1)
    yield Weight("experts.down_proj", (experts, hidden, inner), layers, 2)


def adapters_of(weights: tuple[Weight, ...], rank: int, targets: str | tuple[str, ...]) -> tuple[Weight, ...]:
    """LoRA's two matrices beside each target: `rank` x in, and out x `rank`.

    Args:
        weights: of the model.
        rank: `lora_rank`.
        targets: `target_modules`: `all-linear`, or names of modules; a pattern counts as the names that stand in it.
    """
    linear = [weight for weight in weights if weight.is_linear and len(weight.shape) == 2]
    if targets != "all-linear":
        linear = [weight for weight in linear if weight.name in targets]
    pairs = ((w, (rank, w.shape[1]), (w.shape[0], rank)) for w in linear)
    return tuple(
        Weight(f"{w.name}.{part}", shape, w.layers)
        for w, down, up in pairs
        for part, shape in (("lora_A", down), ("lora_B", up))
    )
