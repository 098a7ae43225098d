"""A policy as a Hugging Face folder, which transformers, peft and vLLM load as it is. Needs no remote code."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from storage.durable import StorageError, no_space, sync_file, sync_folder
from storage.prepared import new_folder
from tasks.config import FSDPConfig
from tasks.workers.mesh import Mesh
from tasks.workers.model import CausalModel, load_model, without_progress_bar
from tasks.workers.weights import files_bytes, full_disk_as_os_error, usual_mode

if TYPE_CHECKING:
    from tasks.workers.policy import PolicyWorker

logger = logging.getLogger(__name__)

SHARD_SIZE = "5GB"


def export_policy(worker: PolicyWorker, tokenizer: Any, folder: Path, *, adapter: bool = False) -> None:
    """Write the policy as it is now, with its tokenizer; the folder has its name only when it is complete.

    Weights keep their type. A LoRA adapter is merged into a copy of the weights it belongs to, in host memory; in
    bfloat16 the sums are rounded, which the adapter alone is not. The worker is not changed.

    In a mesh all ranks call this; rank 0 gathers the weights one by one into a whole model in its host memory, and
    writes that.

    Args:
        worker: holds the policy.
        tokenizer: that of the run.
        folder: where to; must not exist, or be empty.
        adapter: write the LoRA adapter alone, for peft, or for vLLM beside the model it was trained on.

    Raises:
        ValueError: the folder is in use, or an adapter is asked for and there is none.
        StorageError: the disk is too full; nothing of the export is left.
    """
    if adapter and not worker.model.adapter:
        raise ValueError(
            "only the LoRA adapter is to be exported, but this policy has none: actor_rollout_ref.model.lora_rank is 0 "
            "and lora_adapter_path is not set. Export the whole policy."
        )
    problem: Exception | None = None
    model = _whole_model(worker)
    try:
        if model is not None:
            _write(model, tokenizer, folder, adapter, f"the export of policy {worker.policy_version}")
    except Exception as error:
        problem = error
    worker.mesh.agree(problem)


def _whole_model(worker: PolicyWorker) -> CausalModel | None:
    """The policy in one piece: on rank 0; None on the others."""
    mesh, policy = worker.mesh, worker.cfg.actor_rollout_ref
    if mesh.world_size == 1:
        return worker.model
    model, problem = None, None
    if mesh.rank == 0:
        try:
            # Host memory: the device need not hold a whole model, and its attention need not exist here.
            model_cfg = policy.model.model_copy(update={"attn_implementation": None})
            host = Mesh.alone(torch.device("cpu"))
            model = load_model(model_cfg, FSDPConfig(), host, worker.cfg.trainer.seed, frozen=True)
        except Exception as error:
            problem = error
    mesh.agree(problem)
    places = {} if model is None else dict(model.module.named_parameters())
    for name, value in worker.full_weights():
        if model is not None:
            places[name].copy_(value)
    return model


def _write(model: CausalModel, tokenizer: Any, folder: Path, adapter: bool, what: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty. Remove it, or export to another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = {n: p for n, p in model.module.named_parameters() if not adapter or "lora_" in n}
    needed = files_bytes(written)
    if shutil.disk_usage(folder.parent).free < needed:
        raise StorageError(no_space(folder.parent, what, needed))
    with new_folder(folder, what) as aside:
        with full_disk_as_os_error(aside), without_progress_bar():
            _save_adapter(model, aside) if adapter else save_whole(model, aside)
            _save_tokenizer(tokenizer, aside)
        for path in aside.iterdir():
            usual_mode(path)
            sync_file(path)
        sync_folder(aside)
        aside.rename(folder)
        sync_folder(folder.parent)


def save_whole(model: CausalModel, folder: Path) -> None:
    """config.json, generation_config.json and the weights; a weight that is tied to another is written once."""
    network = _merged(model) if model.adapter else model.network
    with _any_generation_config(network) as generation:
        network.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json")
    _name_rotary_base(folder / "config.json")


def _merged(model: CausalModel) -> Any:
    """A transformers model in host memory whose weights have the adapter in them."""
    tensors = [*model.module.parameters(), *model.module.buffers()]
    # deepcopy takes a tensor from here and does not copy it on its device, where a second model may not fit.
    copies: dict[int, Any] = {id(tensor): _host_copy(tensor) for tensor in tensors}
    return copy.deepcopy(model.module, copies).merge_and_unload(safe_merge=True)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().to("cpu", copy=True)
    return torch.nn.Parameter(values, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else values


def _save_adapter(model: CausalModel, folder: Path) -> None:
    """The adapter's weights and configuration; a base that is a local folder is named by its whole path."""
    model.module.save_pretrained(folder, save_embedding_layers=False)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    base = Path(config["base_model_name_or_path"]).expanduser()
    if base.is_dir():
        path.write_text(json.dumps({**config, "base_model_name_or_path": str(base.resolve())}, indent=2))


@contextlib.contextmanager
def _any_generation_config(network: Any) -> Iterator[GenerationConfig | None]:
    """Let a model be saved whose generation_config transformers loads but refuses to write.

    Published models have such files: a temperature without `do_sample`. They go out as they came in.
    """
    kept = getattr(network, "generation_config", None)
    if kept is not None:
        network.generation_config = GenerationConfig()
    try:
        yield kept
    finally:
        if kept is not None:
            network.generation_config = kept


def _name_rotary_base(path: Path) -> None:
    """Write the rotary embedding's base and scaling also as readers before transformers 5 look for them.

    Those, an older vLLM among them, know no `rope_parameters` and would take the base's default without a word.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    older = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type") == "default" else scaling,
    }
    path.write_text(json.dumps({**older, **config}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


PROBE = "Ann has 12 apples and buys 7 more.\n#### 19"


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer, and say so when transformers will make another one of its files, as it does of some."""
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    ids, wanted = (each(PROBE, add_special_tokens=False)["input_ids"] for each in (loaded, tokenizer))
    if ids != wanted:
        logger.warning(
            "AutoTokenizer makes %s of the exported folder, for the model type in its config.json, and that gives "
            "other ids than the run's %s. Load the tokenizer with PreTrainedTokenizerFast, which reads tokenizer.json.",
            type(loaded).__name__,
            type(tokenizer).__name__,
        )
