"""Advantage estimators: by hand on small groups, and what must hold for all of them."""

import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.ragged import Ragged
from tasks.algorithms.advantages import (
    AdvantageInput,
    group_statistics,
    rewards_to_go,
    whiten,
)
from tasks.algorithms.kl import kl_in_reward
from tasks.algorithms.variants import ESTIMATORS
from tasks.config import AlgorithmConfig

NAN = float("nan")
CFG = AlgorithmConfig()


RELATIVE = {name for name, variant in ESTIMATORS.items() if variant.relative}


def inputs(score, group, lengths=None, **more):
    lengths = np.ones(len(score), dtype=np.int64) if lengths is None else np.asarray(lengths)
    mask = Ragged.from_lengths(np.ones(lengths.sum(), dtype=bool), lengths)
    return AdvantageInput(np.asarray(score, dtype=np.float64), np.asarray(group), mask, **more)


def per_sample(name, score, group, cfg=CFG, lengths=None, **more):
    """Advantage of each sample's first token."""
    result = ESTIMATORS[name].load()(inputs(score, group, lengths, **more), cfg)
    return [float(row[0]) for row in result.advantages]


def everything(seed, samples=12):
    """Random input that serves every estimator: groups of two or more, some samples without a verdict."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.concatenate([np.arange(4), np.arange(4), rng.integers(0, 4, samples - 8)]))
    lengths = rng.integers(1, 6, samples)
    tokens = int(lengths.sum())
    score = np.where(rng.random(samples) < 0.15, NAN, rng.choice([0.0, 1.0, abs(rng.normal())], samples))
    old = -rng.exponential(1.0, tokens)
    return inputs(
        score,
        group,
        lengths,
        reward_parts={
            "a": np.where(rng.random(samples) < 0.2, NAN, rng.random(samples)),
            "b": rng.normal(size=samples),
        },
        greedy_score=np.where(rng.random(samples) < 0.2, NAN, rng.random(samples)),
        old_log_probs=Ragged.from_lengths(old, lengths),
        sum_pi_squared=Ragged.from_lengths(np.exp(old) ** 2 + 0.1, lengths),
    )


def reorder(x, order):
    changes = {}
    for f in fields(x):
        value = getattr(x, f.name)
        if isinstance(value, Ragged):
            changes[f.name] = value.take(order)
        elif isinstance(value, np.ndarray):
            changes[f.name] = value[order]
        elif isinstance(value, dict):
            changes[f.name] = {name: part[order] for name, part in value.items()}
    return replace(x, **changes)


# ------------------------------------------------------------------------------------------------------------- by hand


def test_grpo_centres_on_the_group_and_divides_by_its_deviation():
    got = per_sample("grpo", [1, 0, 0, 1, 5, 3], [7, 7, 7, 7, 2, 2])
    deviation = np.sqrt(1 / 3)
    assert got == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation, 2**-0.5, -(2**-0.5)], rel=1e-5
    )


def test_dr_grpo_does_not_divide():
    cfg = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    assert per_sample("grpo", [1, 0, 0, 1, 5, 3], [7, 7, 7, 7, 2, 2], cfg) == [0.5, -0.5, -0.5, 0.5, 1, -1]


def test_the_deviation_of_the_whole_step_serves_all_groups():
    cfg = AlgorithmConfig(norm_adv_std_over="batch")
    score = [1, 0, 5, 3]
    assert per_sample("grpo", score, [0, 0, 1, 1], cfg) == pytest.approx(
        np.array([0.5, -0.5, 1, -1]) / np.std(score, ddof=1), rel=1e-5
    )


def test_siblings_need_not_be_adjacent_and_twins_do_not_merge():
    cfg = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    assert per_sample("grpo", [1, 5, 0, 3], [0, 1, 0, 1], cfg) == [0.5, 1, -0.5, -1]


def test_rloo_compares_with_the_mean_of_the_others():
    assert per_sample("rloo", [4, 1, 1], [0, 0, 0]) == [3, -1.5, -1.5]


def test_rloo_normalised_has_deviation_one_over_the_step():
    cfg = AlgorithmConfig(normalize_advantages=True)
    got = per_sample("rloo", [4, 1, 1, NAN, 0, 0], [0, 0, 0, 0, 1, 1], cfg)
    plain = np.array([3, -1.5, -1.5, 0, 0])
    assert got[3] == 0
    assert np.delete(got, 3) == pytest.approx(plain / (plain.std(ddof=1) + 1e-4))
    assert per_sample("rloo", [1, 1, 0, 0], [0, 0, 1, 1], cfg) == [0, 0, 0, 0]


def test_grpo_against_siblings_leaves_the_sample_out_of_mean_and_deviation():
    cfg = AlgorithmConfig(use_leave_one_out_baseline=True)
    got = per_sample("grpo", [4, 1, 2, 7], [0, 0, 0, 0], cfg)
    others = [np.delete([4.0, 1, 2, 7], i) for i in range(4)]
    want = [(x - o.mean()) / o.std(ddof=1) for x, o in zip([4, 1, 2, 7], others, strict=True)]
    assert got == pytest.approx(want, rel=1e-5)
    plain = AlgorithmConfig(use_leave_one_out_baseline=True, norm_adv_by_std_in_grpo=False)
    assert per_sample("grpo", [4, 1, 1], [0, 0, 0], plain) == [3, -1.5, -1.5]


def test_grpo_against_equal_siblings_or_a_single_one_is_not_scaled():
    cfg = AlgorithmConfig(use_leave_one_out_baseline=True)
    got = per_sample("grpo", [1, 0.3, 0.3, 0.3], [0, 0, 0, 0], cfg)
    assert got[0] == pytest.approx(0.7)
    assert got[1] == pytest.approx((0.3 - 1.6 / 3) / np.std([1, 0.3, 0.3], ddof=1), rel=1e-5)
    assert per_sample("grpo", [1, 0, 5], [0, 0, 1], cfg) == [1, -1, 0]
    assert per_sample("grpo", [0.1] * 5, [0] * 5, cfg) == [0] * 5


def test_grpo_can_normalise_each_reward_before_it_adds_them():
    parts = {"big": np.array([100.0, 0.0, 0.0, 0.0]), "small": np.array([0.0, 0.1, 0.0, 0.0])}
    cfg = AlgorithmConfig(multi_objective_aggregation="normalize_then_sum")
    got = per_sample("grpo", parts["big"] + parts["small"], [0, 0, 0, 0], cfg, reward_parts=parts)
    assert got[0] == pytest.approx(got[1], rel=1e-4)
    assert np.std(got, ddof=1) == pytest.approx(1, rel=1e-4)
    weighed = cfg.model_copy(update={"gdpo_reward_weights": (1.0, 0.0)})
    got = per_sample("grpo", parts["big"] + parts["small"], [0, 0, 0, 0], weighed, reward_parts=parts)
    assert got == pytest.approx(per_sample("grpo", parts["big"], [0, 0, 0, 0]), rel=1e-4)


def test_opo_weighs_the_baseline_by_length():
    assert per_sample("opo", [1, 0], [0, 0], lengths=[3, 1]) == [0.25, -0.75]


def test_passk_gives_the_best_its_lead_over_the_second():
    cfg = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    assert per_sample("grpo_passk", [1, 5, 2, 0], [0, 0, 0, 0], cfg) == [0, 3, 0, 0]


def test_gpg_scales_by_the_share_of_samples_that_scored():
    assert per_sample("gpg", [1, 0, 0, 0], [0, 0, 1, 1]) == [2, -2, 0, 0]


def test_maxrl_divides_by_the_mean():
    assert per_sample("maxrl", [1, 0, 0, 0], [0, 0, 0, 0]) == pytest.approx([3, -1, -1, -1], rel=1e-5)
    assert per_sample("maxrl", [0, 0], [0, 0]) == [0, 0]


def test_maxrl_refuses_scores_below_zero_instead_of_teaching_the_worse_responses():
    with pytest.raises(ValueError, match=r"3 of 4 rewards lie below 0, the lowest at -1.*reward\.clip_low=0"):
        per_sample("maxrl", [1, -1, -1, -1], [0, 0, 0, 0])
    assert per_sample("maxrl", [1, NAN], [0, 0]) == [0, 0]


@pytest.mark.parametrize("score", [0.1, 0.3, 0.7])
def test_remax_gives_exactly_zero_at_the_greedy_score_whatever_other_rows_hold(score):
    scores = np.array([score] * 4 + [1e6])
    x = inputs(scores, np.zeros(5), [5] * 5, greedy_score=np.full(5, score))
    advantages = ESTIMATORS["remax"].load()(x, CFG).advantages.values
    assert advantages.tolist() == [0.0] * 20 + [np.float32(1e6 - score)] * 5


def test_remax_takes_scores_that_differ_by_rounding_for_equal():
    assert per_sample("remax", [0.1 + 0.2], [0], greedy_score=np.array([0.3])) == [0]


def test_rewards_to_go_are_summed_from_the_end_of_each_row():
    mask = Ragged.from_rows([[True, True, False], [], [True]], bool)
    rewards = np.array([1e9, 0.1, 7.0, 0.2])
    assert rewards_to_go(rewards, mask).tolist() == [1e9 + 0.1, 0.1, 0.0, 0.2]


def test_remax_subtracts_the_greedy_score():
    got = per_sample("remax", [1, 0, 1], [0, 0, 1], greedy_score=np.array([1.0, 1.0, 0.0]))
    assert got == [0, -1, 1]


def test_reinforce_plus_plus_discounts_over_tokens_and_whitens_over_the_step():
    x = inputs([1.0, 0.0], [0, 1], lengths=[2, 1])
    result = ESTIMATORS["reinforce_plus_plus"].load()(x, AlgorithmConfig(gamma=0.5))
    assert result.returns.values.tolist() == [0.5, 1.0, 0.0]
    np.testing.assert_allclose(result.advantages.values, np.array([0, 0.5, -0.5]) / 0.5, atol=1e-6)


def test_reinforce_plus_plus_baseline_whitens_what_the_group_centres():
    got = per_sample("reinforce_plus_plus_baseline", [1, 0, 4, 0], [0, 0, 1, 1])
    centred = np.array([0.5, -0.5, 2, -2])
    assert got == pytest.approx(centred / centred.std(ddof=1), rel=1e-6)


def test_gdpo_normalises_each_reward_before_it_adds_them():
    parts = {"big": np.array([100.0, 0.0, 0.0, 0.0]), "small": np.array([0.0, 0.1, 0.0, 0.0])}
    got = per_sample("gdpo", parts["big"] + parts["small"], [0, 0, 0, 0], reward_parts=parts)
    assert got[0] == pytest.approx(got[1], rel=1e-4)


def test_gdpo_takes_a_function_that_scored_nothing_in_this_step_for_one_without_a_verdict():
    parts = {"a": np.array([1.0, 0.0])}
    alone = per_sample("gdpo", [1, 0], [0, 0], AlgorithmConfig(gdpo_reward_keys=("a",)), reward_parts=parts)
    both = AlgorithmConfig(gdpo_reward_keys=("a", "style"))
    assert per_sample("gdpo", [1, 0], [0, 0], both, reward_parts=parts) == alone
    silent = AlgorithmConfig(gdpo_reward_keys=("style",))
    assert per_sample("gdpo", [1, 0], [0, 0], silent, reward_parts=parts) == [0, 0]


def test_gdpo_refuses_weights_of_another_number():
    with pytest.raises(ValueError, match="gdpo_reward_weights has 2 weights for the 1 rewards"):
        per_sample(
            "gdpo",
            [1, 0],
            [0, 0],
            AlgorithmConfig(gdpo_reward_weights=(1, 2)),
            reward_parts={"a": np.array([1.0, 0.0])},
        )


def test_the_token_baseline_weighs_returns_by_the_gradient_norm_so_far():
    half = np.log(0.5)
    x = inputs(
        [1.0, 0.0],
        [0, 0],
        lengths=[1, 1],
        old_log_probs=Ragged.from_rows([[half], [np.log(0.9)]], np.float64),
        sum_pi_squared=Ragged.from_rows([[0.5], [0.82]], np.float64),
    )
    weights = np.array([1 - 1.0 + 0.5, 1 - 1.8 + 0.82])
    baseline = weights[0] / weights.sum()
    got = ESTIMATORS["optimal_token_baseline"].load()(x, CFG).advantages.values
    np.testing.assert_allclose(got, [1 - baseline, -baseline], rtol=1e-5)


# -------------------------------------------------------------------------------- equal scores, null scores, no tokens


@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e-30, 1e30, -7.7, 0.0])
@pytest.mark.parametrize("name", sorted(RELATIVE - {"gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"}))
def test_equal_scores_give_exactly_zero_whatever_the_float(name, score):
    score = abs(score) if name == "maxrl" else score
    assert per_sample(name, [score] * 7, [0] * 7) == [0.0] * 7


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rloo", {"normalize_advantages": True}),
        ("grpo", {"use_leave_one_out_baseline": True}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
    ],
)
def test_a_group_of_equal_scores_beside_others_gives_exactly_zero(name, options):
    score = np.array([0.1] * 3 + [0.1, 0.7, 3.1])
    got = per_sample(name, score, [0] * 3 + [1] * 3, AlgorithmConfig(**options), reward_parts={"a": score})
    assert got[:3] == [0.0] * 3
    assert all(got[3:])


def test_scores_that_differ_by_rounding_alone_are_equal():
    assert 0.1 + 0.2 != 0.3
    assert per_sample("grpo", [0.1 + 0.2, 0.3, np.float32(0.3)], [0, 0, 0]) == [0.0, 0.0, 0.0]
    assert per_sample("grpo", [0.3, 0.3001], [0, 0])[0] < -0.6


def test_equal_scores_give_the_token_baseline_exactly_zero():
    x = replace(everything(0), score=np.full(12, 0.7))
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        got = ESTIMATORS[name].load()(x, CFG, handle_zero_tail=False).advantages.values
        assert (got == 0).all()


def test_b79_a_null_score_stays_out_of_statistics_and_out_of_the_loss():
    result = ESTIMATORS["grpo"].load()(
        inputs([1, NAN, 0, NAN], [0, 0, 0, 0]), AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    )
    assert result.advantages.values.tolist() == [0.5, 0, -0.5, 0]
    assert result.in_loss.tolist() == [True, False, True, False]
    assert result.no_signal == [None, "no verdict", None, "no verdict"]
    assert result.group_mean.tolist() == [0.5] * 4


@pytest.mark.parametrize("name", sorted(RELATIVE))
def test_a_group_with_one_verdict_carries_no_signal(name):
    x = everything(1)
    x = replace(x, group=np.arange(12) // 6, score=np.array([1.0, *[NAN] * 5, 1, 0, 1, 0, 0, 1]))
    result = ESTIMATORS[name].load()(x, CFG)
    assert result.advantages[0].tolist() == [0.0] * x.mask.lengths[0]
    assert result.no_signal[0] == "fewer than two verdicts in the group"
    assert result.in_loss[0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_without_any_verdict_gives_zeros_and_says_so(name):
    result = ESTIMATORS[name].load()(replace(everything(2), score=np.full(12, NAN)), CFG)
    assert (result.advantages.values == 0).all()
    assert result.no_signal == ["no verdict"] * 12
    assert np.isnan(result.group_mean).all()


def test_b28_an_empty_response_counts_in_the_mean_and_writes_nothing():
    result = ESTIMATORS["grpo"].load()(
        inputs([1, 0, 0, 1], [0] * 4, lengths=[2, 3, 6, 0]), AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    )
    assert [row.tolist() for row in result.advantages] == [[0.5] * 2, [-0.5] * 3, [-0.5] * 6, []]
    assert result.no_signal[3] == "empty response"


def test_an_empty_response_keeps_its_score_with_kl_in_the_reward():
    mask = Ragged.from_rows([[True], []], bool)
    log_probs = Ragged.from_rows([[-1.0], []], np.float32)
    rewards, _ = kl_in_reward(np.array([0.0, 1.0]), log_probs, log_probs, mask, "k1", 0.1)
    x = AdvantageInput(np.array([0.0, 1.0]), np.array([0, 0]), mask, token_rewards=rewards)
    assert x.outcome.tolist() == [0.0, 1.0]


def test_kl_in_the_reward_moves_the_outcome():
    mask = Ragged.from_rows([[True, True], [True]], bool)
    rewards = Ragged.from_rows([[-0.25, 1.0], [0.5]], np.float32)
    x = AdvantageInput(np.array([1.0, 0.5]), np.array([0, 0]), mask, token_rewards=rewards)
    got = ESTIMATORS["grpo"].load()(x, AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert got.advantages.values.tolist() == [0.125, 0.125, -0.125]


def test_a_sample_at_the_mean_says_that_its_advantage_is_zero():
    assert ESTIMATORS["grpo"].load()(inputs([0, 1, 2], [0, 0, 0]), CFG).no_signal == [None, "its advantage is 0", None]


def test_group_statistics_are_those_of_the_verdicts():
    groups = group_statistics(np.array([1.0, NAN, 4.0, 2.0, 2.0]), np.array([0, 0, 0, 1, 1]))
    assert groups.mean.tolist() == [2.5, 2.5, 2.5, 2, 2]
    np.testing.assert_allclose(groups.std, [np.std([1, 4], ddof=1)] * 3 + [0, 0])
    assert groups.size.tolist() == [3, 3, 3, 2, 2]
    assert groups.verdicts.tolist() == [2, 2, 2, 2, 2]


def test_passk_refuses_groups_of_one_with_the_key():
    with pytest.raises(ValueError, match=r"grpo_passk.*rollout\.n"):
        per_sample("grpo_passk", [1, 0, 0], [0, 0, 1])


def test_whitening_needs_a_sampled_token():
    with pytest.raises(ValueError, match="no sampled token"):
        ESTIMATORS["reinforce_plus_plus"].load()(inputs([1, 0], [0, 0], lengths=[0, 0]), CFG)
    with pytest.raises(ValueError, match="1 values have no variance"):
        whiten(np.ones(1))


# ------------------------------------------------------------------------------------------------- what holds for all


OPTIONS = (
    {},
    {"use_leave_one_out_baseline": True, "normalize_advantages": True},
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"norm_adv_std_over": "batch"},
)
CONFIGURATIONS = st.sampled_from([AlgorithmConfig(**options) for options in OPTIONS])


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), cfg=CONFIGURATIONS)
def test_advantages_do_not_depend_on_the_order_of_samples(name, seed, cfg):
    x = everything(seed)
    order = np.random.default_rng(seed).permutation(len(x.score))
    result, moved = ESTIMATORS[name].load()(x, cfg), ESTIMATORS[name].load()(reorder(x, order), cfg)
    np.testing.assert_allclose(moved.advantages.values, result.advantages.take(order).values, rtol=1e-6, atol=1e-7)
    assert moved.no_signal == [result.no_signal[i] for i in order]


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    score=st.lists(st.one_of(st.just(NAN), st.floats(-(2.0**100), 2.0**100, width=32)), min_size=12, max_size=12),
    cfg=CONFIGURATIONS,
)
def test_advantages_are_finite_for_any_scores_and_zero_without_a_verdict(name, seed, score, cfg):
    # maxrl refuses scores below 0.
    x = replace(everything(seed), score=np.abs(score) if name == "maxrl" else np.array(score))
    result = ESTIMATORS[name].load()(x, cfg)
    assert np.isfinite(result.advantages.values).all()
    assert np.isfinite(result.returns.values).all()
    for row in np.flatnonzero(np.isnan(score)):
        assert (result.advantages[int(row)] == 0).all()
        assert not result.in_loss[row]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"norm_adv_std_over": "batch"}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
        ("grpo", {"use_leave_one_out_baseline": True, "norm_adv_by_std_in_grpo": False}),
        ("rloo", {}),
        ("rloo", {"normalize_advantages": True}),
        ("gpg", {}),
    ],
)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_advantages_of_a_group_sum_to_zero(name, options, seed):
    x = everything(seed)
    result = ESTIMATORS[name].load()(x, AlgorithmConfig(**options))
    first = np.array([row[0] for row in result.advantages], dtype=np.float64)
    np.testing.assert_allclose(np.bincount(x.group, weights=first), 0, atol=1e-5)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_grpo_does_not_change_when_scores_are_shifted_and_scaled(seed):
    x = everything(seed)
    x = replace(x, score=np.round(x.score, 1))
    one, other = (ESTIMATORS["grpo"].load()(y, CFG) for y in (x, replace(x, score=x.score * 8 + 16)))
    np.testing.assert_allclose(other.advantages.values, one.advantages.values, rtol=1e-3)


# ------------------------------------------------------------------------------------------------------------ registry


def test_estimators_load_no_tensor_library():
    code = "import sys, tasks.algorithms.advantages, tasks.algorithms.correction; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
