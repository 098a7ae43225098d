"""Memory, traffic and disk estimates of a plan: against counts by hand, against torch, against real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mesh_ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from flows.config import load_config
from flows.memory_view import device_memory_here, estimates, model_limits
from flows.plan_view import plan_command, plan_of
from storage import Ragged
from storage.retention import Retention
from storage.schema import build_table
from tasks.config import RunConfig
from tasks.engines import vllm_settings
from tasks.geometry import ModelLimits
from tasks.geometry.memory import CHUNK_LOGITS, MOST_CPU_CACHE_BYTES, RankMemory, rank_memory
from tasks.geometry.model_weights import Weight, adapters_of, sizes_of, weights_of, why_unknown
from tasks.geometry.rank_sizes import Rank, activation_bytes_per_token
from tasks.geometry.traffic import disk_use, moved
from tasks.workers import forward
from tasks.workers.mesh import Mesh
from tasks.workers.policy import PolicyWorker
from tasks.workers.sequences import MicroBatching, Sequences
from tasks.workers.sharding import local
from tasks.workers.signals import Signals

ROOT = Path(__file__).parent.parent
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 211,
}
EXPERTS = {"num_experts_per_tok": 2, "decoder_sparse_step": 1}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("mistral", {"head_dim": 12}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 8, **EXPERTS}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
]


def limits(config: Any) -> ModelLimits:
    """What `plan` reads of the config.json that transformers writes."""
    values = json.loads(config.to_json_string())
    return ModelLimits(**{field.name: values.get(field.name) for field in fields(ModelLimits)})


def tiny(kind: str = "qwen2", **more: Any) -> ModelLimits:
    return limits(AutoConfig.for_model(kind, **{**SMALL, "tie_word_embeddings": False, **more}))


def config(*overrides: str, devices: int = 1) -> RunConfig:
    defaults = [
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        f"trainer.n_gpus_per_node={devices}",
        "trainer.device=cuda",
        "trainer.total_training_steps=10",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    return load_config([], [*defaults, *overrides])


def estimate(
    *overrides: str, devices: int = 1, model: ModelLimits | None = None, gb: float | None = None
) -> RankMemory:
    cfg = config(*overrides, devices=devices)
    found = rank_memory(cfg, plan_of(cfg), model or tiny(), None if gb is None else int(gb * 1e9))
    assert found is not None
    return found


def item(memory: RankMemory, name: str) -> Any:
    return next((one for one in memory.items if one.name == name), None)


# ----------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(("kind", "more"), MODELS, ids=lambda value: value if isinstance(value, str) else None)
def test_weights_have_the_names_and_shapes_of_transformers_own(kind: str, more: dict[str, Any]) -> None:
    its = AutoConfig.for_model(kind, **{**SMALL, **more})
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(its)
    sizes = sizes_of(limits(its))
    assert sizes is not None
    ours: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for weight in weights_of(sizes):
        ours[(weight.name, weight.shape)] += max(weight.layers, 1)
    named = ((name.removesuffix(".weight"), tuple(p.shape)) for name, p in network.named_parameters())
    theirs = Counter((_last(name), shape) for name, shape in named)
    assert ours == theirs
    assert sum(weight.count for weight in weights_of(sizes)) == sum(p.numel() for p in network.parameters())


def _last(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1] == "bias" or "experts" in parts[-2:] else parts[-1]


@pytest.mark.parametrize(("name", "parameters"), [("7b", 7_615_616_512), ("72b", 72_706_203_648)])
def test_qwen25_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    cfg = config(f"actor_rollout_ref.model.path={ROOT}/tests/data/qwen2.5-{name}")
    sizes = sizes_of(model_limits(cfg))
    assert sizes is not None
    assert sum(weight.count for weight in weights_of(sizes)) == parameters


def test_lora_counts_what_peft_trains() -> None:
    from peft import LoraConfig, get_peft_model

    for targets in ("all-linear", ("q_proj", "down_proj")):
        its = AutoConfig.for_model("qwen3", **SMALL, head_dim=16)
        wanted = targets if isinstance(targets, str) else list(targets)
        module = get_peft_model(
            AutoModelForCausalLM.from_config(its), LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM")
        )
        sizes = sizes_of(limits(its))
        assert sizes is not None
        ours = sum(weight.count for weight in adapters_of(weights_of(sizes), 4, targets))
        assert ours == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_why_a_model_is_not_known_is_said() -> None:
    assert why_unknown(tiny()) is None
    assert "model_type is gemma3" in str(why_unknown(replace(tiny(), model_type="gemma3")))
    assert "lacks hidden_size" in str(why_unknown(replace(tiny(), hidden_size=None)))
    assert "decoder_sparse_step=2" in str(why_unknown(replace(tiny(), decoder_sparse_step=2)))
    assert sizes_of(ModelLimits()) is None


def test_a_weight_is_cut_by_rows_as_fsdp2_and_by_heads_as_an_engine_cuts_it() -> None:
    assert Weight("k_proj", (10, 3), 2).shard(4) == 2 * 3 * 3
    key = Weight("k_proj", (2 * 16, 5), 1, 0, 16)
    assert [key.slice(ranks) for ranks in (1, 2, 4)] == [160, 80, 80]
    assert Weight("o_proj", (5, 64), 1, 1, 16).slice(4) == 80
    assert Weight("input_layernorm", (5,), 3).slice(4) == 15


# ---------------------------------------------------------------------------------------- weights, gradients, optimizer


def test_float32_weights_are_their_own_master_copy() -> None:
    memory = estimate()
    assert memory.weights_bytes == memory.gradients_bytes == memory.reference_bytes == 4 * memory.parameters
    tensors = 3 * 12 + 3
    assert memory.optimizer_bytes == 8 * memory.parameters + 4 * tensors
    # autocast's copies: all matrices but the embeddings, which are looked up
    vectors = 3 * ((48 + 2 * 16) + 2 * 48) + 48
    assert item(memory, "cast weights").update_bytes == 2 * (memory.parameters - vectors - 211 * 48)


def test_bfloat16_weights_have_bfloat16_moments_and_no_copies() -> None:
    memory = estimate("actor_rollout_ref.model.dtype=bfloat16")
    assert memory.gradients_bytes == memory.weights_bytes == 2 * memory.parameters
    assert memory.optimizer_bytes == 4 * memory.parameters + 4 * (3 * 12 + 3)
    assert item(memory, "cast weights") is None


def test_shards_are_smaller_and_hybrid_shards_are_larger() -> None:
    whole, full = estimate(), estimate(devices=8)
    hybrid = estimate("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", devices=8)
    # 211 rows of the vocabulary are 8 pieces of 27, so that 5 rows are padding
    assert whole.weights_bytes / 8 < full.weights_bytes < whole.weights_bytes / 8 * 1.05
    assert whole.weights_bytes / 2 < hybrid.weights_bytes < whole.weights_bytes / 2 * 1.05
    assert full.loading_host_bytes == whole.weights_bytes


def test_offloaded_things_rest_in_host_memory() -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    near = estimate(devices=2)
    manual = estimate(
        f"{fsdp}.param_offload=true",
        f"{fsdp}.optimizer_offload=true",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
        devices=2,
    )
    assert item(manual, "policy weights").generate_bytes == 0
    assert item(manual, "policy weights").update_bytes == near.weights_bytes
    assert item(manual, "optimizer states").log_prob_bytes == 0
    assert item(manual, "optimizer states").update_bytes == near.optimizer_bytes
    assert item(manual, "reference weights").update_bytes == 0
    assert item(manual, "reference weights").log_prob_bytes == near.reference_bytes
    engine = item(near, "engine weights").host_bytes
    assert near.host_bytes == engine
    assert manual.host_bytes == near.weights_bytes + near.optimizer_bytes + near.reference_bytes + engine
    assert manual.phase_bytes("update") == near.phase_bytes("update") - near.reference_bytes
    policy = estimate(f"{fsdp}.offload_policy=true", devices=2)
    assert policy.host_bytes == near.weights_bytes + near.gradients_bytes + near.optimizer_bytes + engine
    assert item(policy, "optimizer states").update_bytes == 0


def test_on_cpu_everything_is_in_one_process() -> None:
    memory = estimate("trainer.device=cpu", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert item(memory, "snapshot").host_bytes == memory.weights_bytes + memory.optimizer_bytes
    assert memory.host_bytes == 0
    assert memory.phase_bytes("update") > memory.weights_bytes * 8  # weights, reference, gradient, moments, snapshot
    assert item(memory, "cast weights") is None


def test_an_adapter_has_gradients_and_moments_and_needs_no_reference() -> None:
    memory = estimate("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.dtype=bfloat16")
    assert memory.reference_bytes == 0
    assert memory.gradients_bytes == 4 * memory.trained_parameters
    assert memory.weights_bytes == 2 * (memory.parameters - memory.trained_parameters) + 4 * memory.trained_parameters


def test_gathered_units_wait_with_their_gradient() -> None:
    memory = estimate(devices=4)
    root, layer = 2 * 211 * 48 + 48, 48 * 48 * 2 + 48 + 2 * (16 * 48 + 16) + 3 * 48 * 100 + 2 * 48
    gathered = item(memory, "gathered by FSDP")
    assert gathered.log_prob_bytes == 2 * (root + 2 * layer)
    assert gathered.update_bytes - gathered.log_prob_bytes == max((2 + 4) * root, 2 * root + (2 + 4) * layer)
    kept = estimate("actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false", devices=4)
    assert item(kept, "gathered by FSDP").log_prob_bytes == 2 * (root + 3 * layer)


# --------------------------------------------------------------------------------------------------- passes and engine


SAVED = [
    ("qwen2", "float32", None),
    ("qwen2", "bfloat16", None),
    ("qwen2", "float32", "bfloat16"),
    ("qwen3", "float32", None),
    ("qwen3", "bfloat16", None),
    ("llama", "bfloat16", None),
]


@pytest.mark.parametrize(("kind", "dtype", "autocast"), SAVED)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_what_autograd_keeps(kind: str, dtype: str, autocast: str | None, attention: str) -> None:
    sizes = {**SMALL, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "head_dim": 16}
    its = AutoConfig.for_model(kind, **sizes)
    network = AutoModelForCausalLM.from_config(its, attn_implementation=attention, dtype=getattr(torch, dtype)).eval()
    tokens = 64
    cfg = config(
        f"data.max_prompt_length={tokens // 2}",
        f"data.max_response_length={tokens // 2}",
        f"actor_rollout_ref.model.dtype={dtype}",
        f"actor_rollout_ref.model.attn_implementation={attention}",
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={autocast or dtype}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    )
    found = sizes_of(limits(its))
    assert found is not None
    estimated = activation_bytes_per_token(Rank(cfg, plan_of(cfg), found))
    kept = _kept_by_autograd(network, torch.randint(0, 211, (4, tokens)), autocast is not None) / (4 * tokens)
    assert estimated == pytest.approx(kept, rel=0.08)


def _kept_by_autograd(network: Any, ids: torch.Tensor, autocast: bool) -> int:
    """Bytes of what the decoder's forward pass saves, less weights and their copies."""
    kept: dict[int, torch.UntypedStorage] = {}
    weights = {tuple(p.shape) for p in network.parameters() if p.dim() > 1}
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        if tensor.untyped_storage().data_ptr() not in own and shape not in weights and shape[::-1] not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    cast = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with cast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states = network.model(input_ids=ids, use_cache=False).last_hidden_state
    assert states.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_checkpointing_keeps_a_layers_input_and_one_layer() -> None:
    off = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    in_full, held = (item(estimate(*more), "activations").update_bytes for more in ((off,), ()))
    assert held < in_full
    tokens, hidden = 2 * 16, 48
    less = in_full - held  # two of three layers, less the three inputs in float32
    assert (less + tokens * 3 * 4 * hidden) % (2 * tokens) == 0


def test_sequence_parallel_ranks_share_tokens_and_a_token_cap_is_per_device() -> None:
    sp = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    whole = item(estimate(devices=2), "activations").update_bytes
    assert item(estimate(sp, devices=2), "activations").update_bytes == whole // 2
    capped = estimate(
        sp,
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16",
        devices=2,
    )
    assert item(capped, "activations").update_bytes == whole // 2  # a cap of 16 tokens, held twice over two devices


def test_numbers_of_other_modules_are_theirs() -> None:
    assert forward.CHUNK_LOGITS == CHUNK_LOGITS
    assert vllm_settings.MOST_CPU_CACHE_BYTES == MOST_CPU_CACHE_BYTES
    few = item(estimate(), "logits")
    assert few.update_bytes == 2 * 8 * 211 * (2 + 5 * 4)  # two responses of 8 tokens are one chunk


def test_a_cached_token_takes_what_transformers_cache_takes() -> None:
    its = AutoConfig.for_model("qwen2", **SMALL)
    network = AutoModelForCausalLM.from_config(its).eval()
    for cast in (False, True):
        cache = DynamicCache(config=its)
        context = torch.autocast("cpu", dtype=torch.bfloat16) if cast else contextlib.nullcontext()
        with torch.no_grad(), context:
            network.model(input_ids=torch.zeros(3, 5, dtype=torch.int64), past_key_values=cache)
        real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 15
        kind = "bfloat16" if cast else "float32"
        mixed = f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={kind}"
        assert estimate(mixed).kv_cache_bytes_per_token == real


def test_the_transformers_engine_alone_has_no_weights_and_a_slab_for_every_row() -> None:
    memory = estimate("actor_rollout_ref.rollout.max_num_seqs=8")
    assert item(memory, "engine weights") is None
    token = memory.kv_cache_bytes_per_token
    assert memory.kv_cache_room_bytes == (8 * 16 + 2 * 8) * token  # 8 rows of 16 tokens, 2 prompts of 8
    whole = estimate(devices=2)
    assert item(whole, "engine weights").generate_bytes == 4 * whole.parameters
    assert item(whole, "engine weights").update_bytes == 0
    assert item(whole, "engine weights").host_bytes == 4 * whole.parameters
    stays = estimate("actor_rollout_ref.rollout.free_cache_engine=false", devices=2)
    assert item(stays, "engine weights").update_bytes == 4 * whole.parameters


def test_vllm_takes_its_share_of_the_device() -> None:
    vllm = (
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    )
    memory = estimate(*vllm, devices=4, gb=1)
    weights = item(memory, "engine weights").generate_bytes
    vectors = 3 * (2 * 48) + 48
    split = memory.parameters - vectors
    # The vocabulary's 211 rows are not even.
    assert weights == 2 * (vectors + split // 2 + 48)
    assert memory.kv_cache_room_bytes == 500_000_000 - weights
    assert memory.kv_cache_bytes_per_token == 3 * 1 * 8 * 2 * 2
    assert memory.kv_cache_needed_bytes == 16 * 16 * memory.kv_cache_bytes_per_token
    assert item(memory, "engine weights").host_bytes == weights
    assert item(memory, "copy for engines").host_bytes == 4 * memory.parameters
    assert estimate(*vllm, devices=4).kv_cache_room_bytes == memory.kv_cache_needed_bytes


# ------------------------------------------------------------------------------------------------------------- warnings


def test_a_rank_that_does_not_fit_is_warned_of_with_keys() -> None:
    cfg = config(devices=2)
    plan = plan_of(cfg)
    memory = estimate(devices=2)
    (warning,) = estimates(cfg, plan, tiny(), memory.phase_bytes("update") - 1).warnings
    assert warning.code == "DEVICE_MEMORY" and warning.level == "warning"
    assert "update" in warning.message and "generate" not in warning.message.partition("Largest")[0]
    assert "param_offload" in warning.message or "optimizer_offload" in warning.message
    assert estimates(cfg, plan, tiny(), max(memory.phase_bytes(name) for name in ("generate", "update"))).warnings == ()
    assert estimates(cfg, plan, tiny(), None).warnings == ()


def test_ways_out_that_are_taken_already_are_not_named() -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    cfg = config(f"{fsdp}.optimizer_offload=true", devices=2)
    (warning,) = estimates(cfg, plan_of(cfg), tiny(), 1000).warnings
    assert "optimizer_offload" not in warning.message and "fsdp_size=-1" not in warning.message


def test_a_short_key_value_cache_says_how_many_sequences_it_holds() -> None:
    cfg = config("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2")
    weights = item(estimate("actor_rollout_ref.rollout.name=vllm"), "engine weights").generate_bytes
    sequence = 16 * (3 * 2 * 8 * 2 * 2)
    device = 5 * (weights + 3 * sequence) + 5
    found = [one for one in estimates(cfg, plan_of(cfg), tiny(), device).warnings if one.code == "KV_CACHE_SHORT"]
    assert "3 sequences of full length at a time, where 32" in found[0].message and found[0].level == "info"


def test_an_unknown_model_is_said_and_the_disk_is_estimated_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    more = [f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]
    plan_command([], more, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["memory"] is None and answer["moved"] is None
    assert answer["disk"]["artifacts_bytes_per_step"] > 0
    (note,) = [one for one in answer["warnings"] if one["code"] == "MEMORY_NOT_ESTIMATED"]
    assert "model_type is gemma3" in note["message"]


# ------------------------------------------------------------------------------------------------------ disk, and moved


def test_artifacts_are_as_large_as_real_tables_of_full_rows() -> None:
    prompts, n, width, length = 6, 4, 40, 64
    cfg = config(
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"data.max_prompt_length={width}",
        f"data.max_response_length={length}",
    )
    plan = plan_of(cfg)
    sizes = {one.name: one.bytes_per_step for one in disk_use(cfg, plan, plan.stages).artifacts}
    rows, floats = prompts * n, np.zeros
    keys = {"sample_id": [f"s000001-{i:04d}-000" for i in range(rows)], "group_id": ["s000001-0000"] * rows}

    def full(dtype: Any, count: int = rows, tokens: int = length) -> Ragged:
        return Ragged.from_lengths(floats(count * tokens, dtype=dtype), np.full(count, tokens))

    tables = {
        "rollouts": {
            **keys,
            "sample_index": [0] * rows,
            "response_ids": full(np.int32),
            "response_text": ["word" * length] * rows,
            "rollout_log_probs": full(np.float32),
            "finish_reason": ["length"] * rows,
            "seed": [1] * rows,
            "policy_version": [0] * rows,
        },
        "old_log_probs": {**keys, "old_log_probs": full(np.float32), "entropy": full(np.float32)}
        | {"sum_pi_squared": [None] * rows},
        "ref_log_probs": {**keys, "ref_log_probs": full(np.float32)},
        "prompts": {
            "group_id": ["s000001-0000"] * prompts,
            "prompt_index": [0] * prompts,
            "data_source": ["openai/gsm8k"] * prompts,
            "prompt": ["word" * width] * prompts,
            "prompt_text": ["word" * width] * prompts,
            "prompt_ids": full(np.int32, prompts, width),
            "ground_truth": ['"72"'] * prompts,
            "extra_info": ['{"index": 17, "split": "train", "level": "Level 5", "subject": "Number Theory"}'] * prompts,
        },
    }
    for name, columns in tables.items():
        assert build_table(name, columns).nbytes == pytest.approx(sizes[name], rel=0.1), name


@pytest.mark.parametrize("rule", [Retention("all"), Retention("last", 3), Retention("last", 40), Retention("every", 4)])
@pytest.mark.parametrize("most", [None, 1, 2, 9])
@pytest.mark.parametrize(("steps", "every"), [(20, 5), (20, 6), (7, 1), (5, 9), (20, -1)])
def test_steps_that_stay_are_those_retention_keeps(rule: Retention, most: int | None, steps: int, every: int) -> None:
    cfg = config(
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={every}",
        f"trainer.max_actor_ckpt_to_keep={'null' if most is None else most}",
        f"storage.retention.keep={rule.keep}",
        f"storage.retention.steps={rule.steps}",
    )
    plan = plan_of(cfg)
    saved = [*range(every, steps, every), steps] if every > 0 else []
    needed = min(saved[-(most or len(saved)) :][0] + 1, steps) if saved else 0
    kept = [step for step in range(1, steps + 1) if step >= needed or rule.keeps(step, steps)]
    assert disk_use(cfg, plan, plan.stages).steps_kept == len(kept)


def test_bytes_between_ranks_are_those_of_a_count_by_hand() -> None:
    cfg = config("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", devices=4)
    model = tiny()
    memory, step = estimate(devices=4), moved(cfg, plan_of(cfg), model)
    assert step is not None
    links = {one.name: one.rank_bytes for one in step.transfers}
    root = 2 * 211 * 48 + 48
    layers = memory.parameters - root
    # 32 sequences on 4 ranks in twos: 4 forwards each for old and reference log-probs, 4 micro-batches
    assert links["all-gather of weights"] == (layers * (4 + 4 + 2 * 4) + root * (2 + 4)) * 2 // 2
    assert links["reduce-scatter of gradients"] == 4 * memory.parameters * 4 // 2
    assert links["all-reduce of gradients"] == 4 * (memory.parameters // 2) * 4
    assert links["whole weights"] == 2 * memory.parameters * 4 // 2
    assert "all-to-all of sequences" not in links
    assert step.engine_files_bytes == 0
    assert step.checkpoint_bytes == pytest.approx(12 * memory.parameters, rel=0.05)


def test_sequence_parallel_ranks_exchange_heads_for_tokens() -> None:
    cfg = config("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", devices=2)
    step = moved(cfg, plan_of(cfg), tiny())
    assert step is not None
    (bytes_moved,) = [one.rank_bytes for one in step.transfers if one.name == "all-to-all of sequences"]
    tokens = 32 * 16 // 2
    # q, k, v there and the mixed values back, half of them to the other device; five passes
    assert bytes_moved == tokens * 3 * 2 * (2 * 48 + 2 * 16) // 2 * 5


# ---------------------------------------------------------------------------------------------------------- the command


def test_json_has_memory_traffic_and_disk_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from flows.plan_view import plan_command; plan_command([], sys.argv[1:], as_json=True); "
        "print({'torch', 'numpy', 'pyarrow', 'prefect', 'mlflow', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    more = [
        f"actor_rollout_ref.model.path={ROOT}/tests/data/qwen2.5-7b",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    ]
    result = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, cwd=ROOT, check=True)
    answer = json.loads(result.stdout)
    assert result.stderr == "set()\n"
    assert answer["memory"]["parameters"] == 7_615_616_512
    assert answer["memory"]["update_bytes"] > answer["memory"]["weights_bytes"] * 4
    assert answer["moved"]["transfers"][0]["name"] == "all-gather of weights"
    assert answer["disk"]["artifacts"][0]["name"] == "prompts"


def test_what_train_refuses_is_said_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["actor_rollout_ref.model.dtype=float64", "trainer.n_gpus_per_node=1"]
    more += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    more += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]
    plan_command([], [*more, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8"])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "NOT_TRAINED" in one]
    assert "info" in line and "actor_rollout_ref.model.dtype=float64" in line


def test_the_smallest_gpu_of_this_machine_is_what_a_device_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_memory_here() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    tool.chmod(0o755)
    assert device_memory_here() == 40960 * 2**20
    tool.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert device_memory_here() is None


# ------------------------------------------------------------------------------------------------------ docs/scaling.md


def scaling_doc() -> str:
    return (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def scaling_configs(folder: Path) -> list[Path]:
    """The configurations in the document as files, 7B and 72B."""
    texts = re.findall(r"```yaml\n(.*?)```", scaling_doc(), re.DOTALL)
    paths = [folder / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    assert len(paths) == 2
    return paths


@pytest.mark.parametrize("number", [0, 1], ids=["7B", "72B"])
def test_the_tables_in_the_scaling_doc_are_what_the_planner_says(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plan_command([scaling_configs(tmp_path)[number]], [], device_memory_gb=80) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in printed if "DEVICE_MEMORY" in line]
    shown = re.findall(r"```console\n\$ grpoflow plan [^\n]*\n(.*?)```", scaling_doc(), re.DOTALL)[number].splitlines()
    missing = [line for line in shown if line not in printed]
    assert not missing, "docs/scaling.md differs from the planner:\n" + "\n".join(missing)
    assert sum("│" in line for line in shown) > 25


def projections(folder: Path) -> dict[str, str]:
    """Tables and sentences of the document that are computed from the planner's numbers, by name."""
    step, carry, host, hand, gather, seconds = [], [[] for _ in range(4)], [], [], [], []
    sizes, driver = ("7B on 8", "72B on 64"), []
    for size, path in zip(sizes, scaling_configs(folder), strict=True):
        cfg = load_config([path])
        plan = plan_of(cfg)
        found = estimates(cfg, plan, model_limits(cfg), 80 * 10**9)
        memory, links, disk = found.memory, found.moved, found.disk
        assert memory is not None and links is not None
        tokens = plan.sequences_per_step * plan.padded_sequence_tokens
        took = 12 * memory.parameters * tokens / (plan.world_size * 0.4 * 989e12)
        seconds.append(took)
        step.append(f"| {size} | {tokens / 1e6:.1f} M | {took:,.0f} s |")
        per_step = links.checkpoint_bytes / cfg.trainer.save_freq
        rates = (
            disk.artifacts_bytes_per_step,
            disk.read_bytes_per_step,
            disk.read_without_cache_bytes_per_step,
            per_step,
        )
        for row, rate in zip(carry, rates, strict=True):
            row.append(f"{rate / took / 1e6:.1f} MB/s")
        by_name = {one.name: one.rank_bytes for one in links.transfers}
        host.append(
            f"{memory.machine_host_bytes / 1e9:,.0f} GB on a machine, {memory.machine_loading_bytes / 1e9:,.0f} GB "
            "while loading"
        )
        hand.append(
            f"{by_name['whole weights'] / 1e9:,.0f} GB per rank, {links.engine_files_bytes / 1e9:,.0f} in files"
        )
        between = by_name["all-gather of weights"] + by_name["reduce-scatter of gradients"]
        gather.append(f"{between / 50e9:,.0f} s at 50 GB/s per GPU beside {took:,.0f} s of computation")
        driver.append(f"{disk.artifacts_bytes_per_step / 1e9:.1f} GB per step")
    what = (
        "artifacts, written once",
        "artifacts, read by each machine once (page cache)",
        "artifacts, read by each process once (no page cache)",
        f"checkpoints, one in {cfg.trainer.save_freq} steps",
    )
    last = links.checkpoint_bytes / 1e9
    return {
        "STEP": "\n".join(["| | tokens of a step | training passes |", "|---|---:|---:|", *step]),
        "CARRY": "\n".join(
            [
                "| mean rate | 7B on 8 | 72B on 64 |",
                "|---|---:|---:|",
                *(f"| {name} | {' | '.join(row)} |" for name, row in zip(what, carry, strict=True)),
            ]
        ),
        "HOST": f"7B: {host[0]}; 72B: {host[1]}.",
        "HAND": f"7B: {hand[0]}; 72B: {hand[1]} on each machine.",
        "GATHER": f"72B: {gather[1]}.",
        "DRIVER": f"{driver[1]} for 72B, most of it tokens that are checked at about 1 GB/s.",
        "ARTIFACTS": f"72B writes {carry[0][1]} of them, and {last:,.0f} GB with each checkpoint.",
    }


def test_the_projections_in_the_scaling_doc_follow_from_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    doc = " ".join(scaling_doc().split())
    for name, text in projections(tmp_path).items():
        assert " ".join(text.split()) in doc, f"{name}: docs/scaling.md should say\n{text}"


# --------------------------------------------------------------------------------------------------------- real ranks


MEASURED = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 24_001,
    "tie_word_embeddings": False,
}
"""64 million parameters; an odd vocabulary, whose rows do not divide."""


def use_memory(rank: int, world_size: int, models: str) -> dict[str, int]:
    """A rank updates its policy once, and says what it then holds, and what its process has grown by.

    A small model goes first, so that what libraries take at their first use is not counted.
    """
    kept = [_update_once(Path(models) / "small", rank, world_size)]
    kept.append(_update_once(Path(models) / "measured", rank, world_size, _resident_bytes()))
    return kept[1][1]


def _update_once(folder: Path, rank: int, world_size: int, before: int = 0) -> tuple[PolicyWorker, dict[str, int]]:
    """A policy worker after its first update, and the bytes it held when the optimizer had made its step."""
    cfg = config("trainer.device=cpu", f"actor_rollout_ref.model.path={folder}", devices=world_size)
    mesh = Mesh.join(cfg, rank, world_size, torch.device("cpu")) if world_size > 1 else None
    worker = PolicyWorker(cfg, total_steps=1, with_reference=True, mesh=mesh)
    sizes: dict[str, int] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        assert worker._reference is not None
        sizes["weights"] = sum(local(weight).nbytes for weight in trained)
        sizes["reference"] = sum(local(weight).nbytes for weight in worker._reference.module.parameters())
        sizes["gradients"] = sum(local(weight.grad).nbytes for weight in trained)
        sizes["optimizer"] = sum(local(v).nbytes for state in optimizer.state.values() for v in state.values())
        sizes["process"] = _resident_bytes() - before

    worker._optimizer.register_step_post_hook(look)
    lengths = np.full(4, 2)
    rows, floats = (Ragged.from_lengths(np.full(8, 3, dtype=kind), lengths) for kind in (np.int32, np.float32))
    in_loss = Ragged.from_lengths(np.ones(8, dtype=bool), lengths)
    signals = Signals(floats, in_loss, floats, floats, None, np.arange(4))
    worker.update(Sequences(rows, np.arange(4), rows), signals, [[np.arange(4)]], MicroBatching(2, None), step=1)
    return worker, sizes


def _resident_bytes() -> int:
    import ctypes
    import gc

    import psutil

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_real_ranks_hold_what_was_estimated(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Freed memory goes back to the system, so that what is resident is what is held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    memory = estimate("trainer.device=cpu", devices=world_size, model=tiny(**MEASURED))
    assert 50e6 < memory.parameters < 100e6
    for name, sizes in (("small", SMALL), ("measured", MEASURED)):
        its = AutoConfig.for_model("qwen2", **{**sizes, "tie_word_embeddings": False})
        AutoModelForCausalLM.from_config(its, dtype=torch.float32).save_pretrained(tmp_path / name)
    ranks = run_ranks(use_memory, world_size, tmp_path / "ranks", timeout_s=400, models=str(tmp_path))
    held = memory.weights_bytes + memory.reference_bytes + memory.gradients_bytes + memory.optimizer_bytes
    print(json.dumps({"estimated": held, "ranks": ranks}))
    for rank in ranks:
        assert rank["weights"] == pytest.approx(memory.weights_bytes, rel=0.01)
        assert rank["reference"] == pytest.approx(memory.reference_bytes, rel=0.01)
        assert rank["gradients"] == pytest.approx(memory.gradients_bytes, rel=0.01)
        assert rank["optimizer"] == pytest.approx(memory.optimizer_bytes, rel=0.01)
        assert rank["process"] == pytest.approx(held, rel=0.15)
