"""What vLLM is told: the configuration, the model's sizes and the platform as its arguments and its environment.

All that differs between the GPU build and the CPU build of vLLM stands here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.config import RunConfig

if TYPE_CHECKING:
    from tasks.workers.rank import Rank

ROLLOUT = "actor_rollout_ref.rollout"
BLOCK = 128
"""Tokens of a block of the key/value cache on CPU: vLLM's own choice there."""
MOST_CPU_CACHE_BYTES = 4 * 2**30
"""The key/value cache on CPU, where neither the configuration nor the environment says otherwise."""
OURS = {
    "model": "it is the policy",
    "tokenizer": "it is the run's",
    "tensor_parallel_size": f"set {ROLLOUT}.tensor_model_parallel_size",
    "max_model_len": f"set {ROLLOUT}.max_model_len",
    "logprobs_mode": "the log-probs' meaning is recorded with them",
    "worker_extension_cls": "new weights are loaded through it",
    "enable_sleep_mode": f"set {ROLLOUT}.free_cache_engine",
}
"""Arguments of vLLM that `engine_kwargs.vllm` may not set, and why."""


@dataclass(frozen=True)
class ModelSizes:
    """What of a model's config.json decides about the engine.

    Attributes:
        context_tokens: longest sequence the model is made for.
        layers: how many.
        kv_heads: of a layer.
        head_size: values of a head.
    """

    context_tokens: int
    layers: int
    kv_heads: int
    head_size: int


def model_sizes(folder: Path) -> ModelSizes:
    """Read a model's sizes; those of its text part where it has several."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    heads = config["num_attention_heads"]
    return ModelSizes(
        config.get("max_position_embeddings") or 2**31 - 2,
        config["num_hidden_layers"],
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
    )


def check_supported(cfg: RunConfig) -> None:
    """Refuse what vLLM cannot do.

    Raises:
        ValueError: with the key.
    """
    rollout, val = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.val_kwargs
    if rollout.data_parallel_size > 1:
        raise ValueError(
            f"{ROLLOUT}.data_parallel_size={rollout.data_parallel_size}: an engine holds one copy of the weights, and "
            "devices beyond its tensor-parallel ones become engines of their own without being asked. Set 1."
        )
    if rollout.pipeline_model_parallel_size > 1:
        raise ValueError(f"{ROLLOUT}.pipeline_model_parallel_size: only 1 works")
    for key, value in (("temperature", rollout.temperature), ("val_kwargs.temperature", val.temperature)):
        if value > 2 or 0 < value < 0.01:
            raise ValueError(f"{ROLLOUT}.{key}={value}: vLLM samples at 0 (greedy) and from 0.01 to 2.")
    if taken := sorted(set(rollout.engine_kwargs.get("vllm", {})) & set(OURS)):
        raise ValueError(f"{ROLLOUT}.engine_kwargs.vllm.{taken[0]} cannot be set: {OURS[taken[0]]}.")


def context_tokens(cfg: RunConfig, sizes: ModelSizes) -> int:
    """Longest prompt and response together that the engine makes room for."""
    wanted = cfg.actor_rollout_ref.rollout.max_model_len or cfg.prompt_length + cfg.response_length
    return min(wanted, sizes.context_tokens)


def log_probs_mode(cfg: RunConfig) -> str:
    """`processed_logprobs`: at the sampling temperature and after the filters. At temperature 1 the raw ones are those
    before the filters, as the transformers engine gives them."""
    rollout = cfg.actor_rollout_ref.rollout
    filtered = rollout.top_p < 1 or rollout.top_k > 0
    return "raw_logprobs" if filtered and rollout.temperature == 1 else "processed_logprobs"


def arguments(cfg: RunConfig, device: str, folder: Path, tokenizer: Path | None) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`.

    A response's last token is never fed, so a prompt may fill the context: vLLM is told one token more.

    Args:
        cfg: the run's configuration.
        device: cpu | cuda.
        folder: the policy in Hugging Face format.
        tokenizer: its tokenizer's folder; None: prompts and responses are token ids alone.
    """
    rollout, sizes = cfg.actor_rollout_ref.rollout, model_sizes(folder)
    longest = context_tokens(cfg, sizes) + 1
    chosen: dict[str, Any] = {
        "model": str(folder),
        "trust_remote_code": cfg.actor_rollout_ref.model.trust_remote_code,
        "dtype": compute_dtype(cfg, device),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": longest,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, longest),
        "logprobs_mode": log_probs_mode(cfg),
        "load_format": "auto" if rollout.load_format.startswith("dummy") else rollout.load_format,
        "generation_config": "vllm",
        "seed": 0,
        "worker_extension_cls": "vllm_process.PolicyWeights",
        "disable_log_stats": True,
    }
    chosen |= {"skip_tokenizer_init": True} if tokenizer is None else {"tokenizer": str(tokenizer)}
    if rollout.tensor_model_parallel_size > 1:
        chosen["distributed_executor_backend"] = "mp"
    chosen |= _on_cpu(cfg, sizes, longest) if device == "cpu" else _on_cuda(cfg)
    return chosen | {key: value for key, value in rollout.engine_kwargs.get("vllm", {}).items() if value is not None}


def _on_cpu(cfg: RunConfig, sizes: ModelSizes, longest: int) -> dict[str, Any]:
    """Compiling takes minutes here, and chunks of a seeded request's prompt end the CPU build."""
    rollout = cfg.actor_rollout_ref.rollout
    chosen = {"enforce_eager": True, "enable_chunked_prefill": False}
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return chosen
    blocks = -(-longest // BLOCK)
    heads = max(sizes.kv_heads // rollout.tensor_model_parallel_size, 1)
    value_bytes = 2 if compute_dtype(cfg, "cpu") == "bfloat16" else 4
    block_bytes = BLOCK * 2 * sizes.layers * heads * sizes.head_size * value_bytes
    # vLLM keeps one block for itself, and a few more let finished prompts stay.
    wanted = (rollout.max_num_seqs * blocks + 16) * block_bytes
    return chosen | {"kv_cache_memory_bytes": max(min(wanted, MOST_CPU_CACHE_BYTES), (2 * blocks + 2) * block_bytes)}


def _on_cuda(cfg: RunConfig) -> dict[str, Any]:
    rollout = cfg.actor_rollout_ref.rollout
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_sleep_mode": rollout.free_cache_engine,
    }


def compute_dtype(cfg: RunConfig, device: str) -> str:
    """Type in which the policy computes, and so the engine: bfloat16 on CUDA where nothing else is set."""
    policy = cfg.actor_rollout_ref
    wanted = policy.actor.fsdp_config.mixed_precision.param_dtype
    return wanted or ("bfloat16" if device == "cuda" and policy.model.dtype == "float32" else policy.model.dtype)


_OF_OTHER_GROUPS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK",
)  # fmt: skip
_OF_OTHER_PYTHONS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def environment(cfg: RunConfig, device: str, devices: Sequence[str] | None, own_python: bool) -> dict[str, str]:
    """The engine's whole environment: this process's, less what belongs to its process groups, and vLLM's settings.

    The engine core runs in the process itself; with tensor parallelism its workers are processes beside it.

    Args:
        cfg: the run's configuration.
        device: cpu | cuda.
        devices: what CUDA_VISIBLE_DEVICES is to be; None: as it is.
        own_python: the engine has an environment of its own, with other packages.
    """
    left_out = {*_OF_OTHER_GROUPS, *(_OF_OTHER_PYTHONS if own_python else ())}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        threads = max((os.cpu_count() or 1) // cfg.actor_rollout_ref.rollout.tensor_model_parallel_size, 1)
        settings |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", str(threads)),
        }
    elif devices is not None:
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return kept | settings


NOT_ON_CPU: Mapping[str, str] = {
    "enforce_eager": "the CPU build never captures graphs here",
    "enable_chunked_prefill": "seeded requests whose prompt comes in chunks end the CPU build",
    "gpu_memory_utilization": f"the cache holds max_num_seqs responses; {ROLLOUT}.engine_kwargs.vllm."
    "kv_cache_memory_bytes or VLLM_CPU_KVCACHE_SPACE (GiB) sets it",
    "free_cache_engine": "the CPU build cannot sleep and keeps its memory",
}
"""Settings that the CPU build does not follow, and why."""


def without_effect_here(rank: Rank, cfg: RunConfig) -> list[str]:
    """Rank task: `without_effect` on the rank's device; nothing where vLLM does not sample."""
    vllm = cfg.actor_rollout_ref.rollout.name == "vllm"
    return without_effect(cfg, rank.mesh.device.type) if vllm else []


def without_effect(cfg: RunConfig, device: str) -> list[str]:
    """Sentences about settings that were made and are not followed."""
    rollout = cfg.actor_rollout_ref.rollout
    said = [f"{ROLLOUT}.{k} has no effect: {why}" for k, why in NOT_ON_CPU.items() if k in rollout.model_fields_set]
    said = said if device == "cpu" else []
    if rollout.load_format.startswith("dummy"):
        said.append(f"{ROLLOUT}.load_format={rollout.load_format}: weights come from the policy at once; auto is taken")
    if log_probs_mode(cfg) == "processed_logprobs" and (rollout.top_p < 1 or rollout.top_k > 0):
        said.append(
            f"{ROLLOUT}.top_p and top_k: at temperature {rollout.temperature:g} vLLM's rollout_log_probs are those "
            "after the filters, which the trainer's old_log_probs are not; leave rollout correction off, or set "
            "temperature 1"
        )
    return said
