"""What the planner says of the algorithm's settings: refusals, surprises, and settings that nothing reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.config import ConfigError, load_config
from tasks.algorithms.variants import ESTIMATORS, LOSSES
from tasks.config import RunConfig
from tasks.geometry import PlanWarning, Problem, plan, with_value
from tasks.geometry.algorithm_rules import loss_in_force, reward_names
from tasks.geometry.no_effect import (
    NOWHERE,
    ON_ONE_DEVICE,
    SWITCHES,
    WITH_TRANSFORMERS,
    WITH_TRANSFORMERS_ON_ONE_DEVICE,
)

RECIPES = sorted((Path(__file__).parents[1] / "flows/recipes").glob("*.yaml"))
SHORT = {
    "actor": "actor_rollout_ref.actor",
    "loss": "actor_rollout_ref.actor.policy_loss",
    "rollout": "actor_rollout_ref.rollout",
    "correction": "algorithm.rollout_correction",
    "filter": "algorithm.filter_groups",
    "kl": "algorithm.kl_ctrl",
    "buffer": "reward_model.overlong_buffer",
}
"""Sections by a short name, as the tests below write them."""


def key(short: str) -> str:
    """The whole key of `section.name`."""
    section, _, name = short.partition(".")
    return f"{SHORT.get(section, section)}.{name}"


def one_device(**values: Any) -> RunConfig:
    """8 prompts x 4 samples on one device, two optimizer steps of 4 prompts, with some values by their short keys."""
    small = {
        "trainer.n_gpus_per_node": 1,
        "rollout.tensor_model_parallel_size": 1,
        "data.train_batch_size": 8,
        "rollout.n": 4,
        "actor.ppo_mini_batch_size": 4,
        "actor.ppo_micro_batch_size_per_gpu": 2,
        "rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
    }
    cfg = RunConfig()
    for short, value in (small | values).items():
        cfg = with_value(cfg, key(short), value)
    return RunConfig.model_validate(cfg.model_dump(warnings=False))


def problems(values: dict[str, Any]) -> dict[str, Problem]:
    return {problem.code: problem for problem in plan(one_device(**values)).problems}


def warnings(values: dict[str, Any]) -> dict[str, PlanWarning]:
    """Warnings other than those about settings without effect."""
    return {one.code: one for one in plan(one_device(**values)).warnings if one.code != "NO_EFFECT"}


def without_effect(values: dict[str, Any]) -> dict[tuple[str, ...], PlanWarning]:
    return {one.keys: one for one in plan(one_device(**values)).warnings if one.code == "NO_EFFECT"}


def functions(*names: str, weight: float = 1.0) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight} for name in names]


# ------------------------------------------------------------------------------------------------------------ refusals

FILTERED = {"filter.enable": True}
IN_REWARD = {"algorithm.use_kl_in_reward": True}
ADAPTIVE = {**IN_REWARD, "kl.type": "adaptive"}
GDPO = {"algorithm.adv_estimator": "gdpo", "reward.functions": functions("gsm8k", "mine.py:brevity")}
REFUSALS = [
    ("FILTER_GROUP_OF_ONE", {**FILTERED, "rollout.n": 1}, {**FILTERED, "rollout.n": 2}),
    ("FILTER_MOST", {**FILTERED, "filter.max_num_gen_batches": -1}, {**FILTERED, "filter.max_num_gen_batches": 1}),
    (
        "FILTER_METRIC",
        {**FILTERED, "filter.metric": "scroe", "reward.functions": functions("gsm8k")},
        {**FILTERED, "filter.metric": "gsm8k", "reward.functions": functions("gsm8k")},
    ),
    (
        "GDPO_KEYS",
        {**GDPO, "algorithm.gdpo_reward_keys": ["gsm8k", "brief"]},
        {**GDPO, "algorithm.gdpo_reward_keys": ["gsm8k", "brevity"]},
    ),
    (
        "GDPO_WEIGHTS",
        {**GDPO, "algorithm.gdpo_reward_keys": ["gsm8k"], "algorithm.gdpo_reward_weights": [1.0, 0.5]},
        {**GDPO, "algorithm.gdpo_reward_keys": ["gsm8k"], "algorithm.gdpo_reward_weights": [0.5]},
    ),
    (
        "REWARD_BOUNDS",
        {"reward.clip_low": 1.0, "reward.clip_high": -1.0},
        {"reward.clip_low": -1.0, "reward.clip_high": 1.0},
    ),
    ("REWARD_SCALE", {"reward.scale": 0.0}, {"reward.scale": 0.1}),
    (
        "ROLLOUT_IS_THRESHOLD",
        {"correction.rollout_is": "token", "correction.rollout_is_threshold": "2.0_0.5"},
        {"correction.rollout_is": "token", "correction.rollout_is_threshold": "0.5_2.0"},
    ),
    (
        "ROLLOUT_RS",
        {"correction.rollout_rs": "seq_mean_k4", "correction.rollout_rs_threshold": 0.1},
        {"correction.rollout_rs": "seq_mean_k3", "correction.rollout_rs_threshold": 0.1},
    ),
    (
        "ROLLOUT_LOG_PROBS",
        {"correction.rollout_rs": "token_k2", "correction.rollout_rs_threshold": 1, "rollout.calculate_log_probs": 0},
        {"rollout.calculate_log_probs": False},
    ),
    (
        "ROLLOUT_LOG_PROBS_FILTERED",
        {"correction.rollout_is": "token", "rollout.name": "vllm", "rollout.temperature": 0.7, "rollout.top_p": 0.9},
        {"correction.rollout_is": "token", "rollout.name": "vllm", "rollout.temperature": 1.0, "rollout.top_p": 0.9},
    ),
    (
        "TOKEN_BASELINE_IN_BYPASS",
        {"correction.bypass_mode": True, "algorithm.adv_estimator": "optimal_token_baseline"},
        {"algorithm.adv_estimator": "optimal_token_baseline"},
    ),
    ("DRO_BETA", {"loss.loss_mode": "dro"}, {"loss.loss_mode": "dro", "loss.dro_beta": 0.1}),
    (
        "CLIP_COV_BOUNDS",
        {"loss.loss_mode": "clip_cov", "loss.clip_cov_lb": 5.0},
        {"loss.loss_mode": "clip_cov", "loss.clip_cov_lb": 4.9},
    ),
    ("REWARD_PARTS", {**GDPO, "reward.scale": 0.1}, {**GDPO}),
    (
        "GDPO_KEYS_TWICE",
        {**GDPO, "algorithm.gdpo_reward_keys": ["gsm8k", "gsm8k"]},
        {**GDPO, "algorithm.gdpo_reward_keys": ["brevity", "gsm8k"]},
    ),
    (
        "GDPO_WEIGHTS_ZERO",
        {**GDPO, "algorithm.gdpo_reward_weights": [0.0, 0.0]},
        {**GDPO, "algorithm.gdpo_reward_weights": [0.0, 1.0]},
    ),
    ("REWARD_SCALE_BEYOND_FLOAT32", {"reward.scale": -1e31}, {"reward.scale": 1e30}),
    ("KL_WEIGHT", {"actor.use_kl_loss": True, "actor.kl_loss_coef": -0.1}, {"actor.kl_loss_coef": -0.1}),
    ("KL_WEIGHT", {**IN_REWARD, "kl.kl_coef": -0.1}, {**IN_REWARD, "kl.kl_coef": 0.0}),
    (
        "KL_WEIGHT",
        {"loss.loss_mode": "kl_cov", "loss.ppo_kl_coef": -1.0},
        {"loss.loss_mode": "kl_cov", "loss.ppo_kl_coef": 1.0},
    ),
    ("KL_ADAPTIVE_ZERO", {**ADAPTIVE, "kl.kl_coef": 0.0}, {**ADAPTIVE, "kl.kl_coef": 0.001}),
    ("KL_HORIZON", {**ADAPTIVE, "kl.horizon": 6}, {**ADAPTIVE, "kl.horizon": 7}),
    (
        "ROLLOUT_IS_THRESHOLD",
        {"correction.rollout_is": "token", "correction.rollout_is_threshold": "2_3"},
        {"correction.rollout_is": "token", "correction.rollout_is_threshold": "1_3"},
    ),
    (
        "ROLLOUT_IS_THRESHOLD",
        {
            "correction.rollout_is": "token",
            "correction.rollout_is_threshold": "0.5",
            "correction.rollout_is_mode": "mask",
        },
        {"correction.rollout_is": "token", "correction.rollout_is_threshold": "0.5"},
    ),
    (
        "ROLLOUT_RS",
        {"correction.rollout_rs": "token_k1", "correction.rollout_rs_threshold": "2_3"},
        {"correction.rollout_rs": "token_k1", "correction.rollout_rs_threshold": "0.5_3"},
    ),
]


@pytest.mark.parametrize(
    ("code", "refused", "legal"), REFUSALS, ids=[f"{one[0]}-{i}" for i, one in enumerate(REFUSALS)]
)
def test_what_cannot_work_is_refused_and_its_neighbour_is_not(
    code: str, refused: dict[str, Any], legal: dict[str, Any]
) -> None:
    assert code in problems(refused)
    assert problems(legal) == {}


def test_a_refusal_says_what_where_and_the_ways_out() -> None:
    text = str(problems(REFUSALS[2][1])["FILTER_METRIC"])
    assert "algorithm.filter_groups.metric=scroe" in text
    assert "score, reward, seq_reward, seq_final_reward, gsm8k" in text
    assert problems(REFUSALS[0][1])["FILTER_GROUP_OF_ONE"].upper == 2
    assert problems(REFUSALS[1][1])["FILTER_MOST"].upper == 0
    assert "0 < low < high" in str(problems(REFUSALS[7][1])["ROLLOUT_IS_THRESHOLD"])
    assert "seq_max_k3" in str(problems(REFUSALS[8][1])["ROLLOUT_RS"])


def test_rejection_without_a_bound_is_refused() -> None:
    assert "rollout_rs_threshold" in problems({"correction.rollout_rs": "token_k3"})["ROLLOUT_RS"].message


@pytest.mark.parametrize("metric", ["score", "reward", "seq_reward", "seq_final_reward"])
def test_groups_can_be_filtered_by_every_standard_metric(metric: str) -> None:
    assert problems({**FILTERED, "filter.metric": metric, "reward.functions": functions("gsm8k")}) == {}


def test_groups_can_be_filtered_by_accuracy_where_a_function_returns_it() -> None:
    values = {**FILTERED, "filter.metric": "acc"}
    assert problems(values) == {}
    assert problems({**values, "reward.functions": functions("gsm8k", "math_dapo")}) == {}
    assert "FILTER_METRIC" in problems({**values, "reward.functions": functions("gsm8k", "math")})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"reward.functions": functions("gsm8k", "mine.py:brevity")},
        {"custom_reward_function.path": "mine.py"},
    ],
)
def test_a_function_of_the_users_may_return_the_metric(values: dict[str, Any]) -> None:
    assert problems({**FILTERED, "filter.metric": "steps", **values}) == {}


def test_filtered_groups_may_be_drawn_more_or_fewer_at_a_time_than_are_trained_on() -> None:
    assert problems({**FILTERED, "data.gen_batch_size": 24}) == {}
    assert problems({**FILTERED, "data.gen_batch_size": 2}) == {}
    assert problems({**FILTERED, "algorithm.adv_estimator": "reinforce_plus_plus"}) == {}


def test_weights_of_gdpo_are_counted_against_all_functions_where_none_are_chosen() -> None:
    assert problems({**GDPO, "algorithm.gdpo_reward_weights": [1.0, 0.5]}) == {}
    assert (
        "3 weights for the 2" in problems({**GDPO, "algorithm.gdpo_reward_weights": [1, 1, 1]})["GDPO_WEIGHTS"].message
    )
    unknown = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_weights": [1, 1, 1]}
    assert "needs algorithm.gdpo_reward_keys" in problems(unknown)["GDPO_WEIGHTS"].rule
    assert problems({**unknown, "algorithm.gdpo_reward_keys": ["gsm8k", "math", "countdown"]}) == {}


def test_reward_keys_are_compared_with_the_functions_of_the_data_before_training() -> None:
    from tasks.rewards.calls import RewardError
    from tasks.rewards.functions import check_reward_keys

    cfg = one_device(**{"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["gsm8k", "exact_match"]})
    check_reward_keys(cfg, ["openai/gsm8k", "searchR1_nq"])
    with pytest.raises(RewardError, match="names exact_match, but the reward functions of the training data are gsm8k"):
        check_reward_keys(cfg, ["openai/gsm8k"])
    check_reward_keys(one_device(**{"algorithm.gdpo_reward_keys": ["nope"]}), ["openai/gsm8k"])


def test_an_adaptive_weight_that_could_turn_negative_gets_the_nearest_horizon() -> None:
    assert problems({**ADAPTIVE, "kl.horizon": 1})["KL_HORIZON"].upper == 7  # 0.2 * 32 sequences = 6.4


def test_rewards_that_are_normalised_before_the_sum_are_checked_like_those_of_gdpo() -> None:
    each = {**GDPO, "algorithm.adv_estimator": "grpo", "algorithm.multi_objective_aggregation": "normalize_then_sum"}
    assert problems({**each, "algorithm.gdpo_reward_keys": ["brief"]}).keys() == {"GDPO_KEYS"}
    weighted = {**each, "reward.functions": functions("gsm8k", weight=2.0)}
    assert "normalize_then_sum does not read the weights" in warnings(weighted)["FUNCTION_WEIGHTS"].message


def test_equal_reward_bounds_are_refused_and_one_bound_is_not() -> None:
    assert "REWARD_BOUNDS" in problems({"reward.clip_low": 1.0, "reward.clip_high": 1.0})
    assert problems({"reward.clip_low": 1.0}) == {}


def test_a_loss_that_bypass_mode_replaces_needs_nothing() -> None:
    bypass = {"correction.bypass_mode": True, "loss.loss_mode": "dro"}
    assert problems(bypass) == {}
    assert loss_in_force(one_device(**bypass)) == "vanilla"
    assert loss_in_force(one_device(**bypass, **{"correction.loss_type": "reinforce"})) == "reinforce"
    assert loss_in_force(one_device(**{"loss.loss_mode": "dro"})) == "dro"


def test_reward_functions_have_the_names_of_the_reward_stage() -> None:
    from tasks.rewards.functions import configured_functions

    target = f"{__file__}:test_reward_functions_have_the_names_of_the_reward_stage"
    for values in (
        {"reward.functions": functions("gsm8k", target, "gsm8k", target)},
        {"custom_reward_function.path": __file__, "custom_reward_function.name": "score"},
    ):
        cfg = one_device(**values)
        assert reward_names(cfg) == tuple(function.name for function in configured_functions(cfg))
    assert reward_names(one_device()) is None


# ------------------------------------------------------------------------------------------------------------ warnings

BYPASS = {"correction.bypass_mode": True}
KL = {"actor.use_kl_loss": True}
MAXRL = {"algorithm.adv_estimator": "maxrl"}
SURPRISES = [
    ("FILTERED_SAMPLING", "warning", {**BYPASS, "rollout.top_k": 50}, {"rollout.top_k": 50}),
    ("CLIP_LOW_ABOVE_ONE", "warning", {"actor.clip_ratio_low": 1.5}, {"actor.clip_ratio_low": 1.0}),
    ("DUAL_CLIP_LOW", "warning", {"actor.clip_ratio_c": 1.1}, {"actor.clip_ratio_c": 1.2}),
    (
        "GSPO_CLIP",
        "info",
        {"loss.loss_mode": "gspo"},
        {"loss.loss_mode": "gspo", "actor.clip_ratio_low": 3e-4, "actor.clip_ratio_high": 4e-4},
    ),
    (
        "LOSS_AGGREGATION",
        "info",
        {"loss.loss_mode": "sapo", "actor.loss_agg_mode": "token-sum"},
        {"loss.loss_mode": "sapo", "actor.loss_agg_mode": "seq-mean-token-mean"},
    ),
    ("KL_K1_IN_LOSS", "warning", {**KL, "actor.kl_loss_type": "k1"}, {**KL, "actor.kl_loss_type": "k1+"}),
    ("KL_ABS_IN_LOSS", "info", {**KL, "actor.kl_loss_type": "abs"}, {**KL, "actor.kl_loss_type": "abs+"}),
    (
        "KL_RATIO_NOT_UNBIASED",
        "warning",
        {**KL, "actor.kl_loss_type": "mse", "actor.use_unbiased_kl": True},
        {**KL, "actor.kl_loss_type": "k3", "actor.use_unbiased_kl": True},
    ),
    (
        "OFF_POLICY_MASK",
        "info",
        {"loss.off_policy_mask_threshold": 0.1, "rollout.calculate_log_probs": False},
        {"loss.off_policy_mask_threshold": 0.1},
    ),
    ("KL_TWICE", "warning", {**KL, "algorithm.use_kl_in_reward": True}, KL),
    ("BYPASS_MODE", "info", BYPASS, {}),
    ("FILTER_GROUPS", "info", FILTERED, {}),
    (
        "FUNCTION_WEIGHTS",
        "warning",
        {**GDPO, "reward.functions": functions("gsm8k", "mine.py:brevity", weight=0.5)},
        GDPO,
    ),
    ("DPPO_TV_CLIP", "warning", {"loss.loss_mode": "dppo_tv", "actor.clip_ratio": 1.0}, {"loss.loss_mode": "dppo_tv"}),
    ("KL_COV_OFF", "warning", {"loss.loss_mode": "kl_cov", "loss.kl_cov_ratio": 0.0}, {"loss.loss_mode": "kl_cov"}),
    ("KL_COV_OFF", "warning", {"loss.loss_mode": "kl_cov", "loss.ppo_kl_coef": 0.0}, {"loss.ppo_kl_coef": 0.0}),
    ("CLIP_COV_OFF", "warning", {"loss.loss_mode": "clip_cov", "loss.clip_cov_ratio": 0.0}, {}),
    (
        "ROLLOUT_IS_BELOW_ONE",
        "warning",
        {"correction.rollout_is": "token", "correction.rollout_is_threshold": 1e-9},
        {"correction.rollout_is": "token"},
    ),
    ("REWARD_SCALE_NEGATIVE", "warning", {"reward.scale": -1.0}, {"reward.scale": 2.0}),
    ("MAXRL_BELOW_ZERO", "warning", {**MAXRL, "reward.functions": functions("math_dapo")}, MAXRL),
    (
        "MAXRL_BELOW_ZERO",
        "warning",
        {**MAXRL, "buffer.enable": True, "buffer.len": 4},
        {**MAXRL, "buffer.enable": True, "buffer.len": 4, "reward.clip_low": 0.0},
    ),
    ("MAXRL_BELOW_ZERO", "warning", {**MAXRL, "reward.scale": -1.0, "reward.clip_low": 0.0}, {"reward.scale": -1.0}),
    ("MAXRL_BELOW_ZERO", "warning", {**MAXRL, "reward.stop_properly_coef": -1.0}, MAXRL),
    ("MAXRL_BELOW_ZERO", "warning", {**MAXRL, **IN_REWARD, "reward.clip_low": 0.0}, IN_REWARD),
    (
        "OVERLONG_BUFFER_IN_VERL",
        "info",
        {"buffer.enable": True, "buffer.len": 4},
        {"buffer.enable": True, "buffer.len": 4, "reward_model.reward_manager": "dapo"},
    ),
]


@pytest.mark.parametrize(
    ("code", "level", "odd", "usual"), SURPRISES, ids=[f"{one[0]}-{i}" for i, one in enumerate(SURPRISES)]
)
def test_a_surprise_is_said_and_the_usual_is_not(
    code: str, level: str, odd: dict[str, Any], usual: dict[str, Any]
) -> None:
    assert problems(odd) == {}
    assert warnings(odd)[code].level == level
    assert code not in warnings(usual)


def test_bounds_that_no_ratio_has_are_not_warned_of() -> None:
    for loss in ("cispo", "geo_mean", "dppo_tv", "dppo_kl", "gpg"):
        found = warnings({"loss.loss_mode": loss, "actor.clip_ratio_low": 1.5, "actor.clip_ratio_c": 1.1})
        assert found.keys().isdisjoint({"CLIP_LOW_ABOVE_ONE", "DUAL_CLIP_LOW"})


def test_k1_is_mended_by_the_ratio() -> None:
    assert "KL_K1_IN_LOSS" not in warnings({**KL, "actor.kl_loss_type": "kl", "actor.use_unbiased_kl": True})
    assert "use_unbiased_kl" in warnings({**KL, "actor.kl_loss_type": "kl"})["KL_K1_IN_LOSS"].message


def test_an_own_aggregation_leaves_kl_and_entropy_theirs() -> None:
    values = {"loss.loss_mode": "sapo", "actor.loss_agg_mode": "token-sum"}
    assert "KL and entropy" not in warnings(values)["LOSS_AGGREGATION"].message
    assert "KL and entropy" in warnings({**values, "actor.entropy_coeff": 0.01})["LOSS_AGGREGATION"].message


def test_the_ratio_of_bypass_mode_is_not_said_to_be_one() -> None:
    one_update = {"actor.ppo_mini_batch_size": 8}
    assert "ON_POLICY" in warnings(one_update)
    assert "ON_POLICY" not in warnings({**one_update, **BYPASS})


def test_filtered_groups_say_that_epochs_count_steps() -> None:
    assert "trainer.total_epochs sets the number of steps, not of passes" in warnings(FILTERED)["FILTER_GROUPS"].message


# ---------------------------------------------------------------------------------------------- settings without effect

IS, RS = {"correction.rollout_is": "token"}, {"correction.rollout_rs": "token_k2", "correction.rollout_rs_threshold": 1}
NORM = {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}
EACH = {**GDPO, "algorithm.adv_estimator": "grpo", "algorithm.multi_objective_aggregation": "normalize_then_sum"}
UNREAD = [
    ("algorithm.gamma", 0.9, {}, {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    ("algorithm.norm_adv_by_std_in_grpo", False, {"algorithm.adv_estimator": "rloo"}, {}),
    ("algorithm.gdpo_reward_keys", ("gsm8k",), {}, GDPO),
    ("algorithm.norm_adv_std_over", "batch", {"algorithm.norm_adv_by_std_in_grpo": False}, {}),
    ("algorithm.gdpo_reward_weights", (0.5,), {}, {**EACH, "algorithm.gdpo_reward_keys": ["gsm8k"]}),
    ("algorithm.multi_objective_aggregation", "normalize_then_sum", {"algorithm.adv_estimator": "rloo"}, {}),
    ("algorithm.use_leave_one_out_baseline", True, EACH, {}),
    ("algorithm.norm_adv_by_std_in_grpo", False, EACH, {}),
    ("buffer.capped", False, {}, {"buffer.enable": True, "buffer.len": 4}),
    ("loss.tau_pos", 0.5, {}, {"loss.loss_mode": "sapo"}),
    ("actor.clip_ratio_high", 0.28, {"loss.loss_mode": "gpg"}, {}),
    ("actor.clip_ratio_c", 4.0, {"loss.loss_mode": "gspo"}, {}),
    ("loss.kl_cov_ratio", 0.01, BYPASS, {"loss.loss_mode": "kl_cov"}),
    ("actor.clip_ratio", 0.3, {"actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.28}, {}),
    ("actor.kl_loss_coef", 0.01, {}, KL),
    ("actor.kl_loss_type", "k2", {}, KL),
    ("actor.use_unbiased_kl", True, {}, KL),
    ("algorithm.kl_penalty", "k2", {}, {"algorithm.use_kl_in_reward": True}),
    ("kl.kl_coef", 0.01, {}, {"algorithm.use_kl_in_reward": True}),
    ("kl.type", "adaptive", {}, {"algorithm.use_kl_in_reward": True}),
    (
        "kl.target_kl",
        0.2,
        {"algorithm.use_kl_in_reward": True},
        {"algorithm.use_kl_in_reward": True, "kl.type": "adaptive"},
    ),
    (
        "kl.horizon",
        5,
        {"algorithm.use_kl_in_reward": True},
        {"algorithm.use_kl_in_reward": True, "kl.type": "adaptive"},
    ),
    ("actor.loss_scale_factor", 100.0, {}, NORM),
    ("actor.loss_scale_factor", 100.0, {**NORM, "loss.loss_mode": "sapo"}, {**NORM, **KL, "loss.loss_mode": "sapo"}),
    ("actor.loss_scale_factor", 9.0, {**NORM, "loss.loss_mode": "geo_mean"}, {**NORM, "loss.loss_mode": "gspo"}),
    ("actor.data_loader_seed", 3, {}, {"actor.shuffle": True}),
    ("trainer.alarms.rollout_probs_diff_mean", 0.1, {"rollout.calculate_log_probs": False}, {}),
    ("trainer.alarms.rollout_actor_probs_pearson_corr", 0.9, {"rollout.calculate_log_probs": False}, {}),
    ("trainer.alarms.rollout_probs_diff_mean", 0.1, BYPASS, {}),
    ("correction.rollout_is_threshold", 3.0, {**BYPASS, **IS}, {**BYPASS, **IS, "correction.loss_type": "reinforce"}),
    ("correction.rollout_is_batch_normalize", True, {**BYPASS, **IS}, IS),
    ("correction.rollout_is_mode", "mask", {**BYPASS, **IS}, IS),
    ("correction.rollout_is_mode", "mask", {}, IS),
    ("correction.rollout_is_threshold", 3.0, {}, IS),
    ("correction.rollout_is_batch_normalize", True, {}, IS),
    ("correction.rollout_rs_threshold", 1.0, {}, RS),
    ("correction.loss_type", "reinforce", {}, BYPASS),
    ("loss.loss_mode", "gspo", BYPASS, {}),
    ("correction.rollout_is", "token", BYPASS, {**BYPASS, "correction.loss_type": "reinforce"}),
    ("filter.metric", "acc", {}, FILTERED),
    ("filter.max_num_gen_batches", 3, {}, FILTERED),
    ("buffer.len", 4, {}, {"buffer.enable": True}),
    ("buffer.penalty_factor", 2.0, {}, {"buffer.enable": True, "buffer.len": 4}),
]


@pytest.mark.parametrize(
    ("short", "value", "unread", "read"), UNREAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_setting_that_nothing_reads_is_named(
    short: str, value: Any, unread: dict[str, Any], read: dict[str, Any]
) -> None:
    named = [keys for keys in without_effect({short: value, **unread}) if key(short) in keys]
    assert len(named) == 1
    assert not [keys for keys in without_effect({short: value, **read}) if key(short) in keys]
    assert not [keys for keys in without_effect(unread) if key(short) in keys]


def test_every_switched_key_has_a_row_in_the_table_above() -> None:
    tested = {key(short) for short, *_ in UNREAD}
    assert {name for switch in SWITCHES for name in switch.keys} <= tested


def test_every_key_that_the_planner_names_is_a_key() -> None:
    keys = [f"algorithm.{name}" for variant in ESTIMATORS.values() for name in variant.reads]
    keys += [f"{SHORT['actor']}.{name}" for variant in LOSSES.values() for name in variant.reads]
    keys += [name for switch in SWITCHES for name in (switch.by, *switch.keys)]
    for name in {*keys, *NOWHERE, *ON_ONE_DEVICE, *WITH_TRANSFORMERS, *WITH_TRANSFORMERS_ON_ONE_DEVICE}:
        value: Any = RunConfig()
        for part in name.split("."):
            value = getattr(value, part)


def test_words_of_verl_that_nothing_reads_are_named() -> None:
    (one,) = without_effect({"reward_model.reward_manager": "dapo"}).values()
    assert "overlong_buffer.enable alone turns the buffer on" in one.message


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.adv_estimator=gpro", "grpo"),
        ("algorithm.adv_estimator=dr_grpo", "grpo with algorithm.norm_adv_by_std_in_grpo=false"),
        ("algorithm.adv_estimator=reinforce++", "reinforce_plus_plus"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gmpo", "geo_mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gsop", "gspo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=ppo", "vanilla"),
        ("actor_rollout_ref.actor.loss_agg_mode=token_mean", "token-mean"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_k1", "low_var_kl"),
        ("algorithm.adv_estimator=xyz", None),
    ],
)
def test_a_wrong_value_is_answered_with_the_nearest_one(override: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [override])
    (problem,) = error.value.problems
    assert problem.message.endswith(f" Nearest: {nearest}.") if nearest else "Nearest" not in problem.message


def test_who_would_read_a_setting_is_said() -> None:
    (one,) = without_effect({"algorithm.gamma": 0.9}).values()
    assert one.level == "info"
    assert one.message.startswith("algorithm.gamma has no effect with algorithm.adv_estimator=grpo; ")
    assert "reinforce_plus_plus" in one.message


def test_settings_with_the_same_readers_are_named_at_once() -> None:
    values = {"loss.loss_mode": "gpg", "actor.clip_ratio_low": 0.1, "actor.clip_ratio_high": 0.3}
    (one,) = without_effect(values).values()
    low, high = f"{SHORT['actor']}.clip_ratio_low", f"{SHORT['actor']}.clip_ratio_high"
    assert one.keys == (low, high)
    assert f"{low} and {high} have no effect with {SHORT['loss']}.loss_mode=gpg; vanilla, gspo, " in one.message


def test_a_mode_of_weights_that_are_off_is_more_than_an_info() -> None:
    (one,) = without_effect({"correction.rollout_is_mode": "truncate"}).values()
    assert (one.level, "rollout_is=null" in one.message) == ("warning", True)


def test_a_coefficient_of_zero_beside_a_switch_that_is_off_is_not_named() -> None:
    assert without_effect({"actor.kl_loss_coef": 0.0, "kl.kl_coef": 0.0}) == {}


def test_a_key_that_two_reasons_leave_unread_is_named_once() -> None:
    values = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.norm_adv_std_over": "batch",
        "kl.target_kl": 0.2,
    }
    named = [name for keys in without_effect(values) for name in keys]
    assert len(named) == len(set(named)) == 3


def test_defaults_are_never_without_effect() -> None:
    assert without_effect({}) == {}


# ------------------------------------------------------------------------------------------------- recipes and launches


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_set_nothing_in_vain_and_are_warned_of_nothing(recipe: Path) -> None:
    answer = plan(load_config([recipe]))
    assert answer.problems == ()
    found = {warning.code for warning in answer.warnings}
    assert found <= {"ON_POLICY", "TOKEN_CAP_IS_REAL", "LR_PER_STEP", "NEVER_TEST"}
