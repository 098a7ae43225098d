"""The language model itself: loaded, frozen or with adapters, and split into a decoder and a head over the vocabulary.

Decoder and head are called apart, because log-probs need logits at response positions only and a chunk at a time. Two
self-checks at load compare this with the model's own forward pass, so that a model which computes its logits in a way
that is unknown here is refused and not trained wrongly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from tasks.config import FSDPConfig, ModelConfig
from tasks.workers.attention import GROUPED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


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
        autocast: type of the computation where it is not that of the weights.
    """

    def __init__(self, module: Any, compute_dtype: torch.dtype) -> None:
        self.module = module.eval()
        self.adapter = hasattr(module, "disable_adapter")
        self.network = module.get_base_model() if self.adapter else module
        self.decoder = self.network.get_decoder()
        self.config = self.network.config.get_text_config(decoder=True)
        self.full_attention = _keeps_everything(self.config)
        self.autocast = compute_dtype if compute_dtype != self.dtype else None
        self._head = self.network.get_output_embeddings()
        self._finish_logits = _logit_rule(self.config)

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the resident weights."""
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
        kwargs.setdefault("use_cache", kwargs.get("past_key_values") is not None)
        return self.decoder(input_ids=ids, **kwargs).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] states to [..., V] logits, as the model's own forward pass makes them."""
        return self._finish_logits(self._head(hidden))

    def new_cache(self) -> Any:
        """An empty key/value cache."""
        return DynamicCache(config=self.config)

    @contextlib.contextmanager
    def computing(self, *, adapter: bool = True) -> Iterator[None]:
        """The numeric setting of every forward and backward pass.

        Args:
            adapter: use the LoRA adapter; without, the model is the one training began from.
        """
        with contextlib.ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            if self.dtype == torch.float64:
                stack.enter_context(_KeepFloat64())
            if self.adapter and not adapter:
                stack.enter_context(self.module.disable_adapter())
            yield

    def frozen_copy(self) -> CausalModel:
        """The same weights as they are now, never to change."""
        return CausalModel(copy.deepcopy(self.module).requires_grad_(False), self.autocast or self.dtype)


def load_model(model: ModelConfig, fsdp: FSDPConfig, device: torch.device, seed: int) -> CausalModel:
    """Load a policy from `actor_rollout_ref.model` and check that it is computed rightly here.

    Args:
        model: which weights, and what is trained of them.
        fsdp: mixed precision.
        device: where to.
        seed: of the LoRA adapter's first weights.

    Raises:
        ValueError: the folder lacks weights, a setting does not fit the model, or the self-check fails.
    """
    if device.type == "cpu":
        use_fast_float32_products()
    module = _load_weights(model, device)
    module = _with_adapter(module, model, seed) if model.lora_rank or model.lora_adapter_path else module
    loaded = CausalModel(module.to(device), _compute_dtype(model, fsdp, device))
    if device.type == "cpu":
        use_one_thread_for_a_small_model(loaded.module)
    _check_logits(loaded)
    if device.type == "cpu" and model.attn_implementation is None:
        _use_grouped_attention(loaded)
    if model.enable_gradient_checkpointing:
        _checkpoint_layers(loaded.network, loaded.dtype)
    return loaded


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
        eager = model.hidden(ids)
        model.network.set_attn_implementation(GROUPED)
        try:
            same = torch.allclose(
                model.hidden(ids), eager, rtol=1e-2 if model.dtype == torch.bfloat16 else 1e-4, atol=1e-3
            )
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
    ids = _some_ids(model)
    with torch.no_grad(), model.computing():
        theirs = model.module(input_ids=ids, use_cache=False).logits.float()
        ours = {"decoder and head apart": model.logits(model.hidden(ids)).float()}
        if model.full_attention:
            cache = model.new_cache()
            first = model.hidden(ids[:, :2], past_key_values=cache)
            second = model.hidden(ids[:, 2:], past_key_values=cache)
            ours["through a key/value cache"] = model.logits(torch.cat([first, second], dim=1)).float()
    coarse = torch.bfloat16 in (model.dtype, model.autocast)
    bound = (0.05 if coarse else 1e-3) * theirs.abs().max().clamp(min=1.0)
    for way, logits in ours.items():
        gap = (logits - theirs).abs().max()
        if not gap <= bound:
            raise ValueError(
                f"a model of type {model.config.model_type} computes its logits in a way unknown here: {way}, they "
                f"differ by {gap:.3g} from its own forward pass, whose values go up to {theirs.abs().max():.3g}. "
                "Choose another model at actor_rollout_ref.model.path."
            )


def _checkpoint_layers(network: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute each layer in the backward pass; transformers' own switch for it works in training mode alone."""
    for layer in network.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(recompute_in_backward, dtype, layer.forward)


def recompute_in_backward(dtype: torch.dtype, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function within `computing()`, keep no intermediate value, and call it again in the backward pass.

    There is no dropout, so no random state has to be kept. Function modes do not reach into the backward pass: the one
    that belongs to the weights' type is entered again.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    contexts = functools.partial(_recompute_contexts, dtype)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _recompute_contexts(dtype: torch.dtype) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return contextlib.nullcontext(), _KeepFloat64() if dtype == torch.float64 else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------------ precision


class _KeepFloat64(TorchFunctionMode):
    """Keep float64 where model code rounds to float32, in norms and softmax.

    That rounding is larger than the differences float64 is chosen to show.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ROUNDING and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


_ROUNDING = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.softmax, torch.softmax, torch.nn.functional.softmax}


SMALL_MODEL = 10_000_000
"""Parameters below which a second thread waits more than it works."""


def use_one_thread_for_a_small_model(module: torch.nn.Module) -> None:
    """Compute a small model on one thread, unless OMP_NUM_THREADS says otherwise: a thread that waits for another one,
    which a busy neighbour holds up, makes a small product many times slower."""
    if "OMP_NUM_THREADS" not in os.environ and sum(p.numel() for p in module.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)


@functools.cache
def use_fast_float32_products() -> bool:
    """Let oneDNN compute float32 matrix products where it computes them as exactly as torch's default library.

    oneDNN is reached through a setting that allows it to round to bfloat16. A processor with AVX-512 and without AMX
    does not take that leave, and on AMD's it is about twice as fast. The product is checked, and the setting taken back
    if it rounds.
    """
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    if not torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        return False
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((64, 128, 96), (1024, 384, 128), (7, 513, 33)):
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(columns, inner, generator=generator)
        exact = a.double() @ b.double().T
        if (torch.nn.functional.linear(a, b) - exact).abs().max() > 1e-5 * exact.abs().max():
            setting.fp32_precision = before
            return False
    return True
