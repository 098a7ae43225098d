"""What decides the content of an artifact beside its key: who computed it, with which code, libraries and weights.

Within one run these are given. Between runs they are compared before one takes over what another has made.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.artifacts import Manifest
from storage.durable import sha256_json
from storage.schema import without_round
from tasks.config import RunConfig

if TYPE_CHECKING:
    from tasks.workers.group import WorkerGroup
    from tasks.workers.rank import Rank

CONDITIONS = "conditions"
"""Note of every artifact of a run: what its content depends on beside its key."""

NEVER_SHARED = ("updates",)
"""Artifacts that are always made by the run itself: its weights move with them."""

_ONLY_THE_UPDATE = {
    "ppo_mini_batch_size",
    "ppo_micro_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ppo_epochs",
    "shuffle",
    "data_loader_seed",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "loss_agg_mode",
    "loss_scale_factor",
    "policy_loss",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "use_unbiased_kl",
    "mask_truncated_responses",
    "grad_clip",
    "optim",
}
"""Keys of `actor` that no stage before the update computes with, or that are in the key of the one that does."""

_SAMPLING = {
    "n",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "calculate_log_probs",
    "stop",
    "ignore_eos",
    "val_kwargs",
}
"""Keys of `rollout` that are in the key of every artifact that depends on them."""

_NO_PART = {"engine_startup_s", "engine_silence_s"}
"""Keys of `rollout` that decide nothing."""

_PLACES = ("nnodes", "n_gpus_per_node", "device", "balance_batch")


def conditions_of(cfg: RunConfig, group: WorkerGroup, first_weights: str, code: str) -> dict[str, Any]:
    """What the content of a run's artifacts depends on beside their keys; {} where that cannot be told.

    Args:
        cfg: the run's configuration.
        group: its ranks.
        first_weights: digest of the weights that it began with, which are also those of its reference.
        code: digest of all code that computes or stores.
    """
    policy = cfg.actor_rollout_ref
    if not policy.hybrid_engine:
        # Ranks that only sample are handed the policy when they are asked for anything.
        return {}
    how = {
        "actor": policy.actor.model_dump(mode="json", exclude=_ONLY_THE_UPDATE),
        "rollout": policy.rollout.model_dump(mode="json", exclude=_SAMPLING | _NO_PART),
        "ref": policy.ref.model_dump(mode="json"),
        "trainer": cfg.trainer.model_dump(mode="json", include=set(_PLACES)),
        "compression": cfg.storage.compression,
    }
    found = {
        "first_weights": first_weights,
        "code": code,
        "config": sha256_json(how),
        "python": platform.python_version(),
        "packages": packages_digest(policy.rollout.engine_python if policy.rollout.name == "vllm" else None),
        "processor": processor(),
        "ranks": [[len(list(same)), facts] for facts, same in groupby(group.run(facts_of_rank))],
    }
    values: dict[str, Any] = json.loads(json.dumps(found))
    return values


def can_be_shared(theirs: Manifest, conditions: dict[str, Any]) -> bool:
    """Whether an artifact that another run has made with the same key has the content that this run would make.

    Scores of a batch in which a reward function failed or ran out of time are not: another time it may not.
    """
    if not conditions or without_round(theirs.stage) in NEVER_SHARED:
        return False
    failed = [theirs.metrics.get(f"reward/{status}_share") or 0 for status in ("error", "timeout")]
    return theirs.notes.get(CONDITIONS) == conditions and not any(failed)


def facts_of_rank(rank: Rank) -> dict[str, Any]:
    """Rank task: the device, settings of the tensor library by which results differ in their last digits, and files.

    Weights have a digest of their own; the model's configuration and its tokenizer lie beside them, under one path.
    """
    import torch

    device = rank.mesh.device
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "matmul": [torch.get_float32_matmul_precision(), _onednn_precision()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "model": _config_digest(rank.policy.model.network),
        "tokenizer": _tokenizer_digest(rank.tokenizer),
        **({"cudnn": torch.backends.cudnn.version()} if on_gpu else {}),
    }


def _config_digest(network: Any) -> str:
    """SHA-256 over how a model is built and how it stops."""
    found = [getattr(network, name, None) for name in ("config", "generation_config")]
    # What a model's own code puts into its configuration may be anything.
    return sha256_json([json.dumps(one.to_dict(), sort_keys=True, default=str) if one else None for one in found])


def _tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over what ids mean, in both directions."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return sha256_json([type(tokenizer).__name__, ids, str(tokenizer.special_tokens_map), tokenizer.chat_template])


def _onednn_precision() -> str:
    import torch

    setting: Any = getattr(torch.backends.mkldnn, "matmul", None)
    return str(getattr(setting, "fp32_precision", ""))


@cache
def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}".strip()


_LIST = "import importlib.metadata as m; print(sorted({(d.name, d.version) for d in m.distributions()}))"


@cache
def packages_digest(engine_python: str | None) -> str:
    """SHA-256 over names and versions of all installed packages, and of those that an engine's own Python has."""
    own = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions()})
    if engine_python is None or Path(engine_python) == Path(sys.executable):
        return sha256_json(own)
    listed = subprocess.run([engine_python, "-c", _LIST], capture_output=True, text=True, check=True, timeout=120)
    return sha256_json([own, listed.stdout])
