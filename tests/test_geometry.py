"""The planner: the worked example by hand, refusals with their arithmetic, invariants over random configurations."""

from __future__ import annotations

import subprocess
import sys
from math import gcd
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config import RunConfig
from tasks.geometry import Mesh, ModelLimits, Plan, PlanError, Problem, checked_plan, plan, with_value

KEYS = {
    "batch": "data.train_batch_size",
    "gen": "data.gen_batch_size",
    "mini": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "micro": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "micro_global": "actor_rollout_ref.actor.ppo_micro_batch_size",
    "old_micro": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "old_micro_global": "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "old_dynamic": "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "old_cap": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "ref_micro": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "ref_sp": "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "n": "actor_rollout_ref.rollout.n",
    "epochs": "actor_rollout_ref.actor.ppo_epochs",
    "dynamic": "actor_rollout_ref.actor.use_dynamic_bsz",
    "cap": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "sp": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "fsdp": "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "ref_fsdp": "actor_rollout_ref.ref.fsdp_config.fsdp_size",
    "tp": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "pp": "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "gpus": "trainer.n_gpus_per_node",
    "nodes": "trainer.nnodes",
    "prompt": "data.max_prompt_length",
    "response": "data.max_response_length",
    "kl_loss": "actor_rollout_ref.actor.use_kl_loss",
    "kl_reward": "algorithm.use_kl_in_reward",
    "estimator": "algorithm.adv_estimator",
    "engine": "actor_rollout_ref.rollout.name",
    "packed": "actor_rollout_ref.model.use_remove_padding",
    "filter": "algorithm.filter_groups.enable",
    "filter_most": "algorithm.filter_groups.max_num_gen_batches",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "do_sample": "actor_rollout_ref.rollout.do_sample",
    "context": "actor_rollout_ref.rollout.max_model_len",
    "engine_prompt": "actor_rollout_ref.rollout.prompt_length",
}


def config(**values: Any) -> RunConfig:
    """A configuration with some values, named as in KEYS or by their dotted key with `__` for dots."""
    cfg = RunConfig()
    for name, value in values.items():
        cfg = with_value(cfg, KEYS.get(name) or name.replace("__", "."), value)
    return RunConfig.model_validate(cfg.model_dump())


def one_device(**values: Any) -> RunConfig:
    """8 prompts x 4 samples, mini-batches of 4 prompts, micro-batches of 2 sequences, on one device."""
    small = {
        "gpus": 1,
        "tp": 1,
        "batch": 8,
        "n": 4,
        "mini": 4,
        "micro": 2,
        "old_micro": 2,
        "prompt": 64,
        "response": 32,
    }
    return config(**(small | values))


def worked_example(**values: Any) -> RunConfig:
    """60 prompts, 6 devices, 12 samples, mini-batch 60, micro-batch 8, TP 2, prompts of 8192 and responses of 1024."""
    base = {
        "gpus": 6,
        "tp": 2,
        "batch": 60,
        "n": 12,
        "mini": 60,
        "micro": 8,
        "old_micro": 8,
        "ref_micro": 8,
        "prompt": 8192,
        "response": 1024,
    }
    return config(**(base | {"kl_loss": True, "engine": "vllm"} | values))


def only_problem(cfg: RunConfig, **facts: Any) -> Problem:
    problems = plan(cfg, **facts).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def codes(answer: Plan) -> set[str]:
    return {problem.code for problem in answer.problems}


def warning_codes(cfg: RunConfig, **facts: Any) -> set[str]:
    return {warning.code for warning in plan(cfg, **facts).warnings}


# ----------------------------------------------------------------------------------------------------- worked example


def test_the_worked_example_comes_out() -> None:
    answer = checked_plan(worked_example())
    assert (answer.prompts_per_step, answer.sequences_per_step) == (60, 720)
    assert (answer.prompts_per_rollout_replica, answer.sequences_per_rollout_replica) == (20, 240)
    assert answer.sequences_per_rank == 120
    assert answer.sequences_per_mini_batch_per_rank == 120
    assert answer.mini_batches == (120,)
    assert answer.micro_batches_per_mini_batch == (15,)
    assert answer.grad_accumulation_steps == 15
    assert answer.optimizer_steps_per_step == 1
    assert answer.old_log_prob_forwards_per_rank == answer.ref_log_prob_forwards_per_rank == 15
    assert answer.on_policy


def test_the_worked_examples_meshes_come_out() -> None:
    answer = plan(worked_example())
    assert answer.fsdp_mesh == Mesh((6,), ("fsdp",))
    assert answer.ulysses_mesh is None
    assert answer.rollout_mesh == Mesh((3, 2, 1), ("dp", "infer_tp", "infer_pp"))
    assert answer.dp_rank_of_device == (0, 1, 2, 3, 4, 5)


def test_sequence_parallelism_of_two_halves_the_ranks_and_doubles_their_rows() -> None:
    answer = checked_plan(worked_example(sp=2))
    assert answer.fsdp_mesh == Mesh((6,), ("fsdp",))
    assert answer.ulysses_mesh == Mesh((3, 2), ("dp", "sp"))
    assert answer.dp_rank_of_device == (0, 0, 1, 1, 2, 2)
    assert answer.sequences_per_rank == answer.sequences_per_mini_batch_per_rank == 240
    assert answer.old_log_prob_forwards_per_rank == 30
    assert answer.micro_batches_per_mini_batch == (30,)


def test_hybrid_sharding_changes_the_mesh_and_no_count() -> None:
    whole, hybrid = checked_plan(worked_example()), checked_plan(worked_example(fsdp=2))
    assert hybrid.fsdp_mesh == Mesh((3, 2), ("ddp", "fsdp"))
    assert hybrid.counts() == whole.counts()


def test_a_token_cap_is_real_and_verls_count_is_the_lower_bound() -> None:
    answer = checked_plan(worked_example(dynamic=True, cap=16384))
    # 16384 // 9216 = 1 sequence of full length in a micro-batch, although 120 x 9216 / 16384 = 67.5
    assert answer.micro_batches_per_mini_batch == (120,)
    assert answer.micro_batches_per_mini_batch_by_token_count == (68,)
    assert answer.grad_accumulation_steps is None
    assert answer.old_log_prob_cut is not None
    assert answer.old_log_prob_cut.micro_batches_by_token_count(answer.sequences_per_rank) == 68


def test_a_token_cap_counts_the_devices_that_share_a_sequence() -> None:
    answer = checked_plan(worked_example(dynamic=True, cap=16384, sp=2))
    assert answer.update_cut.token_budget == 32768
    assert answer.micro_batches_per_mini_batch == (80,)  # 3 sequences of 9216 in 32768; 240 / 3
    assert answer.micro_batches_per_mini_batch_by_token_count == (68,)


def test_a_larger_token_cap_holds_three_sequences() -> None:
    answer = checked_plan(worked_example(dynamic=True, cap=32768))
    assert answer.micro_batches_per_mini_batch == (40,)
    assert answer.micro_batches_per_mini_batch_by_token_count == (34,)


@pytest.mark.parametrize(
    ("values", "sizes", "optimizer_steps"),
    [
        ({"mini": 20}, (40, 40, 40), 3),
        ({"mini": 40}, (80, 40), 2),
        ({"mini": 16}, (32, 32, 32, 24), 4),
        ({"batch": 64}, (120, 8), 2),
        ({"epochs": 2}, (120,), 2),
        ({"batch": 62, "n": 9, "mini": 62, "micro": 31}, (93,), 1),
        ({"batch": 61}, (120, 2), 2),
    ],
)
def test_changes_of_the_worked_example_are_exact(
    values: dict[str, Any], sizes: tuple[int, ...], optimizer_steps: int
) -> None:
    answer = checked_plan(worked_example(**values))
    assert answer.mini_batches == sizes
    assert answer.optimizer_steps_per_step == optimizer_steps
    assert answer.on_policy == (optimizer_steps == 1)
    assert ("SHORT_LAST_MINI_BATCH" in warning_codes(worked_example(**values))) == (len(set(sizes)) > 1)


@pytest.mark.parametrize(
    ("values", "code", "key", "lower", "upper"),
    [
        ({"micro": 7}, "MINI_MOD_MICRO", "micro", 6, 8),
        ({"micro": 130}, "MINI_MOD_MICRO", "micro", 120, None),
        ({"tp": 4}, "TP_DIV", "tp", 3, 6),
        ({"sp": 4}, "SP_DIV", "sp", 3, 6),
        ({"fsdp": 4}, "FSDP_SIZE", "fsdp", 3, 6),
        ({"fsdp": 0}, "FSDP_SIZE", "fsdp", None, 1),
        ({"dynamic": True, "cap": 8192}, "TOKEN_CAP", "cap", None, 9216),
        ({"dynamic": True, "mini": 120}, "MINI_GT_BATCH", "mini", 60, None),
        ({"mini": 120}, "MINI_GT_BATCH", "mini", 60, None),
    ],
)
def test_changes_that_do_not_work_are_refused_with_the_nearest_values(
    values: dict[str, Any], code: str, key: str, lower: int | None, upper: int | None
) -> None:
    problem = only_problem(worked_example(**values))
    assert (problem.code, problem.keys[0], problem.lower, problem.upper) == (code, KEYS[key], lower, upper)


def test_one_sample_per_prompt_shows_both_of_its_problems_and_still_the_numbers() -> None:
    answer = plan(worked_example(n=1))
    assert codes(answer) == {"MINI_MOD_MICRO", "GROUP_OF_ONE"}
    assert answer.sequences_per_mini_batch_per_rank == 10
    assert next(problem for problem in answer.problems if problem.code == "MINI_MOD_MICRO").lower == 5


def test_one_tensor_of_token_ids_has_the_size_that_memory_sees() -> None:
    whole = next(row for row in plan(worked_example()).stages if row.column == "prompt + response")
    assert whole.global_shape == (720, 9216)
    assert whole.padded_bytes == 720 * 9216 * 8 == 53_084_160


# ------------------------------------------------------------------------------------------------------ the stage table


def test_the_stage_table_has_every_stage_in_order_with_global_and_local_shapes() -> None:
    rows = plan(worked_example()).stages
    stages = list(dict.fromkeys(row.stage for row in rows))
    assert stages == ["prompts", "generate", "old_log_prob", "ref_log_prob", "reward", "advantage", "update"]
    shape = {(row.stage, row.column): (row.global_shape, row.local_shape) for row in rows}
    assert shape["prompts", "prompt_ids"] == ((60, 8192), None)
    assert shape["generate", "prompts"] == ((60, 8192), (20, 8192))
    assert shape["generate", "response_ids"] == ((720, 1024), (240, 1024))
    assert shape["old_log_prob", "one forward"] == ((720, 9216), (8, 9216))
    assert shape["ref_log_prob", "ref_log_probs"] == ((720, 1024), (120, 1024))
    assert shape["update", "one mini-batch"] == ((720, 9216), (120, 9216))


def test_stored_bytes_are_values_and_offsets_without_padding() -> None:
    column = next(row for row in plan(one_device()).stages if row.column == "response_ids")
    assert column.stored_bytes == 32 * 32 * 4 + 33 * 8


def test_passes_that_do_not_run_have_no_row() -> None:
    cfg = one_device(algorithm__rollout_correction__bypass_mode=True)
    rows = [(row.stage, row.column) for row in checked_plan(cfg).stages]
    assert [row for row in rows if row[0].endswith("log_prob")] == [("old_log_prob", "old_log_probs")]


# --------------------------------------------------------------------------------------------------------- field cases


def test_the_plan_says_how_many_sequences_and_updates_a_step_holds() -> None:
    """Field case B01."""
    answer = checked_plan(one_device(), train_prompts=16)
    assert (answer.prompts_per_step, answer.sequences_per_step) == (8, 32)
    assert answer.optimizer_steps_per_step == 2
    assert answer.sequences_per_mini_batch == 16
    assert answer.micro_batches_per_mini_batch == (8, 8)
    assert answer.counts()["sequences_per_step"] == 32


@pytest.mark.parametrize(("micro", "lower", "upper"), [(8, 4, None), (3, 2, 4)])
def test_a_micro_batch_that_is_no_divisor_of_its_share_is_refused(micro: int, lower: int, upper: int | None) -> None:
    """Field case B03: four sequences per device in a mini-batch."""
    problem = only_problem(config(gpus=2, tp=1, batch=8, n=2, mini=4, micro=micro, old_micro=2))
    assert (problem.lower, problem.upper) == (lower, upper)
    assert "4 prompts" in problem.rule and "/ 2 ranks = 4 sequences" in problem.rule


def test_a_mini_batch_above_the_batch_is_refused_with_what_both_keys_count() -> None:
    """Field case B06."""
    problem = only_problem(one_device(mini=32))
    assert problem.keys == ("actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size")
    assert "Both count prompts" in problem.message
    assert "largest legal mini-batch is 8, which means one update per step" in problem.message
    assert problem.lower == 8


def test_too_few_prompts_are_refused_with_counts() -> None:
    """Field case B85: 5, 8 and 0 of 9 rows are left."""
    assert "5 training prompts are fewer than the 8" in only_problem(one_device(), train_prompts=5).message
    assert only_problem(one_device(), train_prompts=5).lower == 5
    assert checked_plan(one_device(), train_prompts=8).steps_per_epoch == 1
    assert only_problem(one_device(), train_prompts=0).lower is None


def test_prompt_and_response_must_fit_the_models_context() -> None:
    """Field case B92."""
    problem = only_problem(one_device(prompt=64, response=16), model=ModelLimits(max_position_embeddings=64))
    assert problem.code == "MODEL_CONTEXT"
    assert "64 + 16 = 80 must be <= 64" in problem.rule
    assert problem.nearest[0].key == "data.max_prompt_length" and problem.nearest[0].lower == 48
    checked_plan(one_device(prompt=48, response=16), model=ModelLimits(max_position_embeddings=64))


def test_prompt_and_response_must_fit_the_engines_context() -> None:
    problem = only_problem(one_device(prompt=64, response=16, context=64))
    assert (problem.code, problem.nearest[0].key, problem.upper) == ("CONTEXT", KEYS["context"], 80)
    larger = one_device(prompt=64, response=16, context=128)
    assert only_problem(larger, model=ModelLimits(max_position_embeddings=100)).code == "ENGINE_CONTEXT"


# ------------------------------------------------------------------------------------------------------------ refusals


def test_sequences_that_ranks_do_not_divide_are_refused() -> None:
    problem = only_problem(config(gpus=3, tp=1, batch=8, n=4, mini=6, micro=2, old_micro=2))
    assert problem.code == "BATCH_DIV"
    assert "8 x" in problem.rule and "32 % 3 = 2" in problem.rule
    assert (problem.lower, problem.upper) == (6, 9)


def test_a_mini_batch_that_ranks_do_not_divide_is_not_rounded_down() -> None:
    problem = only_problem(config(gpus=4, tp=1, batch=16, n=2, mini=3, micro=1, old_micro=2))
    assert problem.code == "MINI_DIV"
    assert (problem.lower, problem.upper) == (2, 4)
    assert plan(config(gpus=4, tp=1, batch=16, n=2, mini=3, micro=1, old_micro=2)).mini_batches == ()


def test_sequence_parallelism_needs_packed_sequences_and_matching_heads() -> None:
    example = worked_example(sp=2, packed=False)
    assert only_problem(example).code == "SP_NEEDS_REMOVE_PADDING"
    eager = worked_example(sp=2, actor_rollout_ref__model__attn_implementation="eager")
    assert only_problem(eager).code == "SP_ATTENTION"
    heads = ModelLimits(num_attention_heads=15, num_key_value_heads=5)
    assert codes(plan(worked_example(sp=2), model=heads)) == {"SP_HEADS", "SP_KV_HEADS"}
    assert not plan(worked_example(sp=3), model=ModelLimits(num_attention_heads=15, num_key_value_heads=3)).problems


def test_the_reference_shares_sequences_as_the_policy_does() -> None:
    problem = only_problem(worked_example(sp=2, ref_sp=1))
    assert (problem.code, problem.upper) == ("REF_SP", 2)
    problem = only_problem(worked_example(fsdp=3, ref_fsdp=2))
    assert (problem.code, problem.upper) == ("REF_FSDP", 3)
    assert not plan(worked_example(fsdp=3, ref_fsdp=3)).problems and not plan(worked_example(fsdp=3)).problems


def test_a_replica_must_not_straddle_nodes() -> None:
    problem = only_problem(config(gpus=8, nodes=3, tp=3, batch=24, n=2, mini=24, micro=1, old_micro=1))
    assert (problem.code, problem.lower, problem.upper) == ("TP_NODE", 2, 4)
    checked_plan(config(gpus=8, nodes=2, tp=16, batch=16, n=2, mini=16, micro=1, old_micro=1))
    assert only_problem(one_device(pp=2, gpus=2)).code == "PIPELINE"


def test_micro_batch_keys_are_needed_once_and_only_without_dynamic_batching() -> None:
    assert only_problem(one_device(micro=None)).code == "MICRO_MISSING"
    assert only_problem(one_device(micro_global=2)).code == "MICRO_BOTH"
    assert only_problem(one_device(old_micro=None)).keys == (KEYS["old_micro"],)
    assert only_problem(one_device(kl_loss=True)).keys == (KEYS["ref_micro"],)
    assert not plan(one_device(micro=None, old_micro=None, dynamic=True)).problems


def test_every_pass_is_judged_by_its_own_batching() -> None:
    """verl lets the first through to a TypeError, and refuses the second, which works."""
    assert only_problem(one_device(dynamic=True, old_dynamic=False, old_micro=None)).code == "MICRO_MISSING"
    assert not plan(one_device(old_dynamic=True, old_micro=None)).problems


def test_deprecated_global_micro_batches_are_divided_exactly_or_refused() -> None:
    two = {"gpus": 2, "tp": 1, "batch": 8, "n": 2, "mini": 4, "micro": None, "old_micro": None}
    good = config(**two, micro_global=4, old_micro_global=8)
    assert checked_plan(good).sequences_per_micro_batch == 2
    assert checked_plan(good).old_log_prob_forwards_per_rank == 2  # 8 sequences per rank in forwards of 8 / 2
    assert "MICRO_DEPRECATED" in warning_codes(good)
    problem = only_problem(config(**two, micro_global=4, old_micro_global=1))
    assert (problem.code, problem.lower, problem.upper) == ("MICRO_GLOBAL_DIV", None, 2)
    assert only_problem(config(**two, micro_global=6, old_micro_global=2)).lower == 4


def test_an_unused_micro_batch_that_contradicts_the_mini_batch_is_refused() -> None:
    problem = only_problem(one_device(dynamic=True, micro=3))
    assert problem.code == "MINI_MOD_MICRO" and "leave it out" in problem.message
    assert "MICRO_UNUSED" in warning_codes(one_device(dynamic=True, micro=2))


def test_each_token_cap_must_hold_one_sequence() -> None:
    problem = only_problem(one_device(dynamic=True, cap=96, old_cap=95))
    assert (problem.keys[0], problem.upper) == (KEYS["old_cap"], 96)
    assert len(plan(one_device(dynamic=True, cap=95)).problems) == 1  # two passes read the same key


def test_groups_of_one_are_refused_for_relative_estimators_alone() -> None:
    assert only_problem(one_device(n=1)).upper == 2
    assert not plan(one_device(n=1, estimator="reinforce_plus_plus")).problems
    assert not plan(one_device(n=1, estimator="remax")).problems


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"do_sample": False}])
def test_greedy_groups_are_refused(values: dict[str, Any]) -> None:
    assert only_problem(one_device(**values)).code == "GREEDY_GROUP"


def test_validation_sampling_is_taken_at_its_word() -> None:
    val = "actor_rollout_ref__rollout__val_kwargs__"
    assert only_problem(one_device(**{f"{val}do_sample": True})).code == "VAL_TEMPERATURE"
    assert {"VAL_IDENTICAL", "VAL_GREEDY"} <= warning_codes(one_device(**{f"{val}n": 4, f"{val}temperature": 1.0}))
    sampled = one_device(**{f"{val}n": 4, f"{val}temperature": 1.0, f"{val}do_sample": True})
    assert warning_codes(sampled).isdisjoint({"VAL_IDENTICAL", "VAL_GREEDY"})


def test_rollout_correction_needs_the_engines_log_probs() -> None:
    correction = "algorithm__rollout_correction__"
    off = {"actor_rollout_ref__rollout__calculate_log_probs": False}
    for on in ({f"{correction}bypass_mode": True}, {f"{correction}rollout_is": "token"}):
        assert only_problem(one_device(**off, **on)).code == "ROLLOUT_LOG_PROBS"
        assert "FILTERED_SAMPLING" in warning_codes(one_device(actor_rollout_ref__rollout__top_p=0.9, **on))


def test_two_batch_sizes_are_refused_unless_groups_are_filtered() -> None:
    problem = only_problem(one_device(gen=24))
    assert (problem.code, problem.lower) == ("GEN_BATCH_SIZE", 8)
    assert plan(one_device(gen=24)).prompts_per_step == 24  # what verl would train on
    filtered = checked_plan(one_device(gen=24, filter=True), train_prompts=100)
    assert (filtered.gen_batch_prompts, filtered.prompts_per_step, filtered.steps_per_epoch) == (24, 8, 4)
    never = only_problem(one_device(gen=3, filter=True, filter_most=2))
    assert (never.code, never.upper) == ("FILTER_CANNOT_FILL", 3)


def test_lengths_must_agree_with_each_other() -> None:
    assert only_problem(one_device(engine_prompt=63)).code == "PROMPT_LENGTH"
    buffer = {"reward_model__overlong_buffer__enable": True, "reward_model__overlong_buffer__len": 33}
    assert only_problem(one_device(**buffer)).lower == 32


def test_validation_without_data_is_refused() -> None:
    assert only_problem(one_device(trainer__val_only=True)).code == "NOTHING_TO_VALIDATE"
    assert only_problem(one_device(data__val_files=("a.jsonl",)), val_prompts=0).code == "NO_VAL_PROMPTS"


def test_all_problems_are_listed_in_one_error() -> None:
    with pytest.raises(PlanError) as caught:
        checked_plan(worked_example(micro=7, tp=4, fsdp=4))
    text = str(caught.value)
    assert "3 problems" in text
    assert all(code in text for code in ("MINI_MOD_MICRO", "TP_DIV", "FSDP_SIZE"))
    assert "ppo_micro_batch_size_per_gpu=6 or 8" in text


# ------------------------------------------------------------------------------------------------------------ warnings


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"kl_loss": True, "kl_reward": True, "ref_micro": 2}, "KL_TWICE"),
        ({"mini": 8}, "ON_POLICY"),
        ({}, "NEVER_SAVE"),
        ({"data__val_files": ("v.jsonl",)}, "NEVER_TEST"),
        ({"data__truncation": "left"}, "OVERLONG_NOT_FILTERED"),
        ({"actor_rollout_ref__actor__clip_ratio_low": 1.5}, "CLIP_LOW_ABOVE_ONE"),
        ({"actor_rollout_ref__actor__optim__lr_warmup_steps": 3}, "LR_PER_STEP"),
        ({"gpus": 2, "tp": 2}, "ENGINE_WITHOUT_TP"),
        ({"batch": 8, "mini": 6, "micro": 2}, "SHORT_LAST_MINI_BATCH"),
    ],
)
def test_surprises_are_said(values: dict[str, Any], code: str) -> None:
    cfg = one_device(**values)
    assert code in warning_codes(cfg)
    assert not plan(cfg).problems


def test_more_steps_than_the_epochs_have_end_with_the_epochs() -> None:
    cfg = one_device(trainer__total_training_steps=100, trainer__total_epochs=2)
    answer = checked_plan(cfg, train_prompts=81)
    assert (answer.steps_per_epoch, answer.total_steps) == (10, 20)
    assert "TOTAL_STEPS" in {warning.code for warning in answer.warnings}


def test_train_max_samples_is_the_size_that_counts() -> None:
    assert checked_plan(one_device(data__train_max_samples=17), train_prompts=100).steps_per_epoch == 2


# ---------------------------------------------------------------------------------------------------------- invariants


@st.composite
def configurations(draw: st.DrawFn) -> RunConfig:
    """Small geometries, most of them off by something."""
    small = st.integers(1, 12)
    return config(
        gpus=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        nodes=draw(st.sampled_from([1, 1, 2])),
        sp=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        tp=draw(st.sampled_from([1, 1, 2, 3])),
        fsdp=draw(st.sampled_from([-1, -1, 0, 1, 2, 4])),
        batch=draw(st.one_of(small, st.sampled_from([16, 24, 48]))),
        mini=draw(st.one_of(small, st.sampled_from([16, 24, 48]))),
        n=draw(st.integers(1, 8)),
        micro=draw(st.one_of(st.none(), small)),
        old_micro=draw(st.one_of(st.none(), small)),
        ref_micro=draw(small),
        epochs=draw(st.integers(1, 2)),
        dynamic=draw(st.booleans()),
        cap=draw(st.sampled_from([20, 48, 100, 300])),
        prompt=draw(st.sampled_from([16, 32])),
        response=draw(st.sampled_from([16, 32])),
        kl_loss=draw(st.booleans()),
    )


@st.composite
def legal_configurations(draw: st.DrawFn) -> RunConfig:
    """Geometries that are built to fit: from ranks and micro-batches up to the batch."""
    ranks, sp, n = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(2, 8))
    micro, dynamic = draw(st.integers(1, 6)), draw(st.booleans())
    fitting = ranks * micro // gcd(ranks * micro, n)
    mini = fitting * draw(st.integers(1, 3))
    remainder = ranks // gcd(ranks, n) * draw(st.integers(0, 3))
    return config(
        gpus=ranks * sp,
        sp=sp,
        tp=draw(st.sampled_from([1, ranks * sp])),
        batch=mini * draw(st.integers(1, 4)) + remainder,
        mini=mini,
        n=n,
        micro=None if dynamic else micro,
        old_micro=draw(st.integers(1, 9)),
        epochs=draw(st.integers(1, 3)),
        dynamic=dynamic,
        cap=draw(st.integers(48, 200)),
        prompt=32,
        response=16,
    )


@settings(max_examples=150)
@given(legal_configurations())
def test_an_accepted_plan_adds_up(cfg: RunConfig) -> None:
    answer = checked_plan(cfg)
    assert answer.dp_size is not None and answer.sequences_per_rank is not None
    assert answer.dp_size * answer.sp_size == answer.world_size
    assert answer.sequences_per_rank * answer.dp_size == answer.sequences_per_step
    assert sum(answer.prompts_of_mini_batches) == answer.prompts_per_step
    assert sum(answer.mini_batches) == answer.sequences_per_rank
    assert answer.optimizer_steps_per_step == answer.ppo_epochs * len(answer.mini_batches)
    for rows, micro_batches in zip(answer.mini_batches, answer.micro_batches_per_mini_batch, strict=True):
        held = answer.update_cut.full_length_sequences_per_micro_batch
        assert held is not None and (micro_batches - 1) * held < rows <= micro_batches * held
    if answer.grad_accumulation_steps is not None and answer.sequences_per_micro_batch is not None:
        share = answer.grad_accumulation_steps * answer.sequences_per_micro_batch
        assert share == answer.sequences_per_mini_batch_per_rank


@settings(max_examples=150)
@given(legal_configurations())
def test_a_token_cap_is_never_exceeded_and_never_beats_the_token_count(cfg: RunConfig) -> None:
    answer = checked_plan(cfg)
    cut = answer.update_cut
    if cut.token_budget is None:
        return
    held = cut.full_length_sequences_per_micro_batch
    assert held is not None and held * answer.padded_sequence_tokens <= cut.token_budget
    pairs = zip(answer.micro_batches_per_mini_batch, answer.micro_batches_per_mini_batch_by_token_count, strict=True)
    assert all(real >= by_count for real, by_count in pairs)


@settings(max_examples=100)
@given(configurations())
def test_every_value_that_a_refusal_offers_is_accepted(cfg: RunConfig) -> None:
    problems = plan(cfg).problems
    identities = {(problem.code, problem.keys[0]) for problem in problems}
    for problem in problems:
        for nearest in problem.nearest:
            for value in (nearest.lower, nearest.upper):
                if value is None:
                    continue
                left = plan(with_value(cfg, nearest.key, value)).problems
                assert {(one.code, one.keys[0]) for one in left} <= identities - {(problem.code, problem.keys[0])}


def test_the_planner_imports_no_tensor_library() -> None:
    code = "import sys, tasks.geometry; print({'torch', 'numpy', 'pyarrow', 'prefect', 'mlflow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
