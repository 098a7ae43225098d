"""The language model itself: loaded, frozen or with adapters, and split into a decoder and a head over the vocabulary.

Decoder and head are called apart, because log-probs need logits at response positions only and a chunk at a time. Two
self-checks at load compare this with the model's own forward pass, so that a model which computes its logits in a way
that is unknown here is refused and not trained wrongly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from tasks.config import FSDPConfig, ModelConfig
from tasks.workers import progress
from tasks.workers.attention import GROUPED
from tasks.workers.mesh import Mesh
from tasks.workers.packed import can_pack
from tasks.workers.precision import (
    KeepFloat64,
    recompute_in_backward,
    use_fast_float32_products,
    use_one_thread_for_a_small_model,
)
from tasks.workers.sharding import DTYPES, Residence, give_up_gathered, in_one_forward, shard


class CausalModel:
    """A causal language model in evaluation mode: no dropout, also while it trains.

    Attributes:
        module: the transformers model, or peft's wrapper around it.
        network: the transformers model.
        adapter: it has a LoRA adapter.
        decoder: its layers: token ids to hidden states.
        config: the text model's configuration.
        full_attention: every layer attends to everything before it and keeps keys and values of all of it, so that a
            prompt's cache can be shared, padded in the middle and cut by rows.
        device: where it computes.
        compute_dtype: type of the computation.
        autocast: the same, where torch.autocast brings it about: it is not that of the weights, and no sharding casts.
        residence: where the weights rest.
        packs: it computes sequences side by side in one row, and `use_remove_padding` is set.
    """

    def __init__(
        self, module: Any, compute_dtype: torch.dtype, device: torch.device, *, sharded: bool, away: bool
    ) -> None:
        self.module = module.eval()
        self.adapter = hasattr(module, "disable_adapter")
        self.network = _network_of(module)
        self.decoder = self.network.get_decoder()
        self.config = self.network.config.get_text_config(decoder=True)
        self.full_attention = _keeps_everything(self.config)
        self.device, self.compute_dtype, self._sharded = device, compute_dtype, sharded
        self.autocast = compute_dtype if compute_dtype != self.dtype and not sharded else None
        self.residence = Residence(module, device, away=away)
        self.packs = False
        self._head = self.network.get_output_embeddings()
        self._finish_logits = _logit_rule(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights: the resident ones, or within a forward pass of a sharded model the gathered ones."""
        return self.network.get_input_embeddings().weight.dtype

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model is made for."""
        return int(getattr(self.config, "max_position_embeddings", None) or 2**31 - 1)

    @property
    def adds_mask(self) -> bool:
        """Attention adds its mask to the scores, so that a mask is a tensor of numbers."""
        return self.config._attn_implementation in ("eager", GROUPED)

    def hidden(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[B, T] token ids to [B, T, hidden] states after the last norm."""
        progress.note()
        kwargs.setdefault("use_cache", kwargs.get("past_key_values") is not None)
        return self.decoder(input_ids=ids, **kwargs).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] states to [..., V] logits, as the model's own forward pass makes them."""
        return self._finish_logits(self._head(hidden))

    def new_cache(self) -> Any:
        """An empty key/value cache."""
        return DynamicCache(config=self.config)

    def in_one_forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses decoder and head as one forward pass of the whole, which a sharded model needs."""
        return in_one_forward(self.network, functools.partial(function, *args, **kwargs))

    @contextlib.contextmanager
    def computing(self, *, adapter: bool = True) -> Iterator[None]:
        """The numeric setting of every forward and backward pass, with the weights at hand.

        Args:
            adapter: use the LoRA adapter; without, the model is the one training began from.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.residence.at_hand())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            if self.dtype == torch.float64:
                stack.enter_context(KeepFloat64())
            if self.adapter and not adapter:
                stack.enter_context(self.module.disable_adapter())
            if self._sharded:
                # First of all at the end: what peft switches back on must be the shards, not what was gathered of them.
                stack.callback(give_up_gathered, self.network)
            yield

    def frozen_copy(self, *, away: bool) -> CausalModel:
        """The same weights as they are now, never to change; not of a sharded model.

        Args:
            away: they rest in host memory.
        """
        module = copy.deepcopy(self.module).requires_grad_(False)
        model = CausalModel(module, self.compute_dtype, self.device, sharded=False, away=away)
        model.packs = self.packs
        return model


def load_model(
    model: ModelConfig, fsdp: FSDPConfig, mesh: Mesh, seed: int, *, away: bool = False, frozen: bool = False
) -> CausalModel:
    """Load a policy from `actor_rollout_ref.model` and check that it is computed rightly here; collective in a mesh.

    A rank of a mesh loads the whole model into its host memory, and takes its shard of each layer from there.

    Args:
        model: which weights, and what is trained of them.
        fsdp: mixed precision and sharding.
        mesh: where to.
        seed: of the LoRA adapter's first weights.
        away: the weights rest in host memory.
        frozen: nothing of it is trained.

    Raises:
        ValueError: the folder lacks weights, a setting does not fit the model, or the self-check fails.
    """
    device = mesh.device
    if device.type == "cpu":
        use_fast_float32_products()
    module = _load_weights(model, device)
    module = _with_adapter(module, model, seed) if model.lora_rank or model.lora_adapter_path else module
    module = module.requires_grad_(False) if frozen else module
    compute_dtype, sharded = _compute_dtype(model, fsdp, device), mesh.world_size > 1
    if sharded:
        shard(_network_of(module), mesh, fsdp, compute_dtype)
    loaded = CausalModel(module if sharded else module.to(device), compute_dtype, device, sharded=sharded, away=away)
    if device.type == "cpu":
        use_one_thread_for_a_small_model(loaded.module)
    _check_logits(loaded)
    if device.type == "cpu" and model.attn_implementation is None:
        _use_grouped_attention(loaded)
    loaded.packs = model.use_remove_padding and can_pack(loaded)
    if model.enable_gradient_checkpointing:
        _checkpoint_layers(loaded.network, loaded.dtype)
    return loaded


def _network_of(module: Any) -> Any:
    """The transformers model in what may be peft's wrapper around one."""
    return module.get_base_model() if hasattr(module, "disable_adapter") else module


def _load_weights(model: ModelConfig, device: torch.device) -> torch.nn.Module:
    key = "actor_rollout_ref.model"
    if not model.path:
        raise ValueError(f"{key}.path is empty. Set it to a folder in Hugging Face format or to a hub name.")
    if model.path.startswith((".", "/", "~")) and not Path(model.path).expanduser().is_dir():
        raise ValueError(f"{key}.path={model.path} is no folder")
    path = str(Path(model.path).expanduser()) if model.path.startswith("~") else model.path
    config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    for name, value in model.override_config.items():
        if not hasattr(config, name):
            raise ValueError(f"{key}.override_config.{name}: a {config.model_type} configuration has no such value")
        setattr(config, name, value)
    try:
        with without_progress_bar():
            module, report = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=DTYPES[model.dtype],
                attn_implementation=model.attn_implementation or _default_attention(config, device),
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the model at {key}.path={model.path} cannot be loaded with {key}.attn_implementation="
            f"{model.attn_implementation} and {key}.override_config={model.override_config}: {error}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{key}.path={model.path} holds no weights for {', '.join(missing[:5])} ({len(missing)} in all)"
        )
    return module


def _default_attention(config: Any, device: torch.device) -> str:
    """sdpa on CUDA; but it leaves out a soft cap on attention scores without a word."""
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return "eager" if device.type == "cpu" or capped else "sdpa"


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """A run has its own progress line."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _with_adapter(module: torch.nn.Module, model: ModelConfig, seed: int) -> torch.nn.Module:
    """Freeze the weights and put a trainable LoRA adapter beside them."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if model.lora_adapter_path:
        return PeftModel.from_pretrained(module, model.lora_adapter_path, is_trainable=True)
    targets, excluded = model.target_modules, model.exclude_modules
    adapter = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=list(excluded) if isinstance(excluded, tuple) else excluded,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(module, adapter)


def _compute_dtype(model: ModelConfig, fsdp: FSDPConfig, device: torch.device) -> torch.dtype:
    wanted, weights = fsdp.mixed_precision.param_dtype, DTYPES[model.dtype]
    if wanted is None:
        return torch.bfloat16 if device.type == "cuda" and weights == torch.float32 else weights
    if DTYPES[wanted] not in (weights, torch.bfloat16) or weights == torch.float64 != DTYPES[wanted]:
        raise ValueError(
            f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={wanted} does not fit "
            f"actor_rollout_ref.model.dtype={model.dtype}: weights in float32 compute in float32 or bfloat16, other "
            "weights in their own type. Change one of the two."
        )
    return DTYPES[wanted]


# ------------------------------------------------------------------------------------------------ decoder, head, checks


def _keeps_everything(config: Any) -> bool:
    """Whether transformers' own cache for this configuration is plain in every layer."""
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) is DynamicLayer for layer in layers)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return plain and kinds == {"full_attention"} and not getattr(config, "attention_chunk_size", None)


def _logit_rule(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the model does to its head's output: nothing, a soft cap (Gemma), a factor (Cohere), a divisor (Granite)."""
    if cap := getattr(config, "final_logit_softcapping", None):
        return lambda logits: torch.tanh(logits / cap) * cap
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return lambda logits: logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return lambda logits: logits / divisor
    return lambda logits: logits


def _use_grouped_attention(model: CausalModel) -> None:
    """Leave eager attention for the faster grouped one, if the model gives the same logits with it."""
    ids = _some_ids(model)
    if not model.network._supports_attention_backend:
        return
    with torch.no_grad(), model.computing():
        eager = model.in_one_forward(model.hidden, ids)
        model.network.set_attn_implementation(GROUPED)
        try:
            grouped = model.in_one_forward(model.hidden, ids)
            same = torch.allclose(grouped, eager, rtol=1e-2 if eager.dtype == torch.bfloat16 else 1e-4, atol=1e-3)
        except NotImplementedError:
            same = False
    if not same:
        model.network.set_attn_implementation("eager")


def _some_ids(model: CausalModel) -> torch.Tensor:
    return (torch.arange(8, device=model.device).view(2, 4) * 7 + 1) % model.config.vocab_size


def _check_logits(model: CausalModel) -> None:
    """Compare with the model's own forward pass on a few tokens, in one go and through a cache.

    Raises:
        ValueError: the logits differ.
    """
    with torch.no_grad(), model.computing():
        theirs, ours = model.in_one_forward(_logits_both_ways, model)
    coarse = model.compute_dtype == torch.bfloat16
    bound = (0.05 if coarse else 1e-3) * theirs.abs().max().clamp(min=1.0)
    for way, logits in ours.items():
        gap = (logits - theirs).abs().max()
        if not gap <= bound:
            raise ValueError(
                f"a model of type {model.config.model_type} computes its logits in a way unknown here: {way}, they "
                f"differ by {gap:.3g} from its own forward pass, whose values go up to {theirs.abs().max():.3g}. "
                "Choose another model at actor_rollout_ref.model.path."
            )


def _logits_both_ways(model: CausalModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a few tokens from the model's own forward pass, and as they are computed here, by way."""
    ids = _some_ids(model)
    # Not the call of the module, which a sharded one takes for another forward pass inside this one.
    theirs = model.module.forward(input_ids=ids, use_cache=False).logits.float()
    ours = {"decoder and head apart": model.logits(model.hidden(ids)).float()}
    if model.full_attention:
        cache = model.new_cache()
        first = model.hidden(ids[:, :2], past_key_values=cache)
        second = model.hidden(ids[:, 2:], past_key_values=cache)
        ours["through a key/value cache"] = model.logits(torch.cat([first, second], dim=1)).float()
    return theirs, ours


def _checkpoint_layers(network: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute each layer in the backward pass; transformers' own switch for it works in training mode alone."""
    for layer in network.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute_in_backward, dtype, layer.forward)
