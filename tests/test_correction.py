"""Rollout correction: weights, bands, rejection and the gap between sampler and trainer, on numbers done by hand."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from storage.ragged import Ragged
from tasks.algorithms.correction import (
    correct,
    gap_metrics,
    importance_weights,
    mean_weight,
    probability_gap,
    reject,
    truncate,
)
from tasks.algorithms.correction_rules import RULES, Band, parse_band, parse_rules
from tasks.algorithms.sample_metrics import reduce_metrics
from tasks.config import RolloutCorrectionConfig


def rows(*values, dtype=np.float64):
    return Ragged.from_rows(values, dtype)


# Two sequences: ratios of trainer to sampler 2 and 1/2, then 4.
RATIO = rows([2.0, 0.5], [4.0])
SAMPLER = rows([-2.0, -2.0], [-2.0])
TRAINER = Ragged(SAMPLER.values + np.log(RATIO.values), SAMPLER.offsets)
MASK = rows([True, True], [True], dtype=bool)
LOG_RATIO = np.log(RATIO.values)


def test_weights_are_ratios_of_tokens_or_of_whole_sequences():
    np.testing.assert_allclose(importance_weights(LOG_RATIO, MASK, "token"), [2, 0.5, 4])
    np.testing.assert_allclose(importance_weights(LOG_RATIO, MASK, "sequence"), [1, 1, 4])


def test_one_bound_truncates_and_a_band_zeroes_what_is_outside():
    weights = np.array([0.4, 1.0, 3.0])
    assert truncate(weights, parse_band(2.0)).tolist() == [0.4, 1.0, 2.0]
    assert truncate(weights, parse_band("0.5_2.0")).tolist() == [0.0, 1.0, 0.0]
    assert parse_band("0.5_2") == Band(0.5, 2.0, masks=True)


def test_the_mode_says_whether_weights_outside_are_held_or_zeroed():
    weights = np.array([0.0, 0.4, 1.0, 3.0])
    assert truncate(weights, parse_band("0.5_2.0", "truncate")).tolist() == [0.0, 0.5, 1.0, 2.0]
    assert truncate(weights, parse_band(2.0, "mask")).tolist() == [0.0, 0.4, 1.0, 0.0]
    cfg = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.8_3", rollout_is_mode="truncate")
    mask = rows([True, True], [False], dtype=bool)
    np.testing.assert_allclose(correct(SAMPLER, TRAINER, mask, cfg).weights.values, [2, 0.8, 0], rtol=1e-6)


def test_the_mean_weight_counts_tokens_or_sequences():
    weights = np.array([1.0, 1.0, 4.0])
    assert mean_weight(weights, MASK, "token") == 2
    assert mean_weight(weights, MASK, "sequence") == 2.5
    assert mean_weight(np.zeros(3), MASK, "token") == 1


@pytest.mark.parametrize(
    ("rule", "bound", "kept"),
    [
        ("token_k1", "0.4_3.0", [True, True, False]),  # inverse ratios 0.5, 2, 0.25
        ("token_k1", "3.0", [True, True, False]),
        ("token_k2", "0.3", [True, True, False]),
        ("token_k3", "0.4", [True, True, False]),
        ("seq_sum_k1", "0.5_2.0", [True, True, False]),
        ("seq_mean_k3", "0.3", [True, True, False]),
        ("seq_max_k3", "0.25", [False, False, False]),
        ("seq_max_k2", "1.0", [True, True, True]),
        ("seq_veto_k1", "0.4_3.0", [True, True, False]),
        ("seq_veto_k1", "0.2_1.9", [False, False, True]),
        ("seq_veto_k1", "0.6_3.0", [False, False, False]),
        ("seq_veto_k1", "5.0", [True, True, True]),
    ],
)
def test_each_rejection_rule_by_hand(rule, bound, kept):
    assert reject(LOG_RATIO, MASK, parse_rules(rule, bound))[0].tolist() == kept


def test_several_rules_must_all_be_met():
    rules = parse_rules("token_k1,seq_max_k3", "0.4_3.0,2.0")
    kept, metrics = reject(LOG_RATIO, MASK, rules)
    assert kept.tolist() == [True, True, False]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("names", "bounds", "message"),
    [
        ("token_k9", "1.0", "no rejection rule is called 'token_k9'; there are token_k1"),
        ("token_k1", None, "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ("token_k2", "0.1_0.2", "two bounds"),
        ("token_k1,token_k2,token_k3", "0.5_2,1", "2 bounds for the 3 rules"),
        ("token_k2", "-1", "above 0"),
        ("token_k1", "2_1", "low < high"),
        ("token_k1", "x", "no number"),
        (" , ", "1", "names no rule"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(names, bounds, message):
    with pytest.raises(ValueError, match=message):
        parse_rules(names, bounds)


@pytest.mark.parametrize("threshold", ["2_1", 0.0, -1, "a_b", "1_2_3", "nan"])
def test_a_weight_bound_that_cannot_be_meant_is_refused(threshold):
    with pytest.raises(ValueError, match="rollout_is_threshold"):
        parse_band(threshold)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="rollout_is='batch' is unknown"):
        importance_weights(LOG_RATIO, MASK, "batch")


def test_tokens_that_were_not_sampled_get_weight_zero_and_stay_out():
    mask = rows([True, False], [True], dtype=bool)
    cfg = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=9.0)
    result = correct(SAMPLER, TRAINER, mask, cfg)
    np.testing.assert_allclose(result.weights.values, [2, 0, 4], rtol=1e-6)
    assert result.mask.values.tolist() == [True, False, True]


def test_without_rules_the_mask_and_the_loss_stay_as_they_are():
    result = correct(SAMPLER, TRAINER, MASK, RolloutCorrectionConfig())
    assert result.weights is None
    assert result.mask.values.tolist() == [True, True, True]
    assert "rollout_corr/kl" in result.metrics


def test_sequence_weights_of_a_trainer_that_is_far_more_certain_are_held():
    sampler, trainer = rows([-1e4], [-2e4]), rows([0.0], [0.0])
    mask = rows([True], [True], dtype=bool)
    result = correct(sampler, trainer, mask, RolloutCorrectionConfig(rollout_is="sequence"))
    assert result.weights.values.tolist() == [2.0, 2.0]
    assert result.metrics["rollout_corr/rollout_is_min"] == pytest.approx(np.exp(20))


def test_a_step_without_tokens_is_refused():
    with pytest.raises(ValueError, match="the mask holds none"):
        correct(rows([], []), rows([], []), rows([], [], dtype=bool), RolloutCorrectionConfig())


def test_gap_metrics_by_hand():
    got = gap_metrics(SAMPLER, TRAINER, MASK)
    assert got["kl"] == pytest.approx(-np.log(4) / 3)
    assert got["chi2_token"] == pytest.approx((4 + 0.25 + 16) / 3 - 1)
    assert got["chi2_seq"] == pytest.approx((1 + 16) / 2 - 1)
    assert got["rollout_ppl"] == pytest.approx(np.exp(2))


def test_a_huge_gap_has_finite_measurements():
    got = gap_metrics(rows([-800.0, -1.0], dtype=np.float32), rows([-1.0, -800.0], dtype=np.float32), rows([True] * 2))
    assert np.isfinite(list(got.values())).all()
    assert got["k3_kl"] == pytest.approx((np.exp(20) - 21 + np.exp(-20) + 19) / 2)


def test_a_rule_named_after_a_maximum_is_still_averaged_over_mini_batches():
    names = [f"rollout_corr/rollout_rs_seq_max_k2_{end}" for end in ("masked_fraction", "max")]
    assert reduce_metrics({name: [0.0, 1.0] for name in names}) == dict(zip(names, (0.5, 1.0), strict=True))


def test_equal_log_probs_have_no_gap():
    got = probability_gap(TRAINER, TRAINER, MASK)
    assert got["training/rollout_probs_diff_max"] == 0
    assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1)
    assert probability_gap(rows([]), rows([]), rows([], dtype=bool)) == {"training/rollout_probs_diff_valid": 0.0}


@given(
    seed=st.integers(0, 2**32 - 1), level=st.sampled_from(["token", "sequence"]), scale=st.sampled_from([0.1, 5, 1e4])
)
def test_weights_and_mask_do_not_depend_on_the_order_of_rows_and_stay_finite(seed, level, scale):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 5)
    sampler, trainer = (Ragged.from_lengths(-scale * rng.exponential(1, lengths.sum()), lengths) for _ in range(2))
    mask = Ragged.from_lengths(rng.random(lengths.sum()) < 0.9, lengths)
    mask.values[0] = True
    cfg = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_rs=",".join(rule for rule in RULES if not rule.endswith("k1")) + ",token_k1,seq_veto_k1",
        rollout_rs_threshold="2.0",
    )
    result = correct(sampler, trainer, mask, cfg)
    order = rng.permutation(5)
    moved = correct(sampler.take(order), trainer.take(order), mask.take(order), cfg)
    np.testing.assert_allclose(moved.weights.values, result.weights.take(order).values, rtol=1e-6)
    np.testing.assert_array_equal(moved.mask.values, result.mask.take(order).values)
    assert np.isfinite(result.weights.values).all()
    assert not (result.mask.values & ~mask.values).any()


def test_the_rules_load_no_numpy():
    code = "import sys, tasks.algorithms.correction_rules; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(seed=st.integers(0, 2**32 - 1), bound=st.sampled_from(["0.5_1.5", "0.1_8", "1.2_3", "0.01_0.9"]))
def test_a_veto_rejects_exactly_the_sequences_that_have_a_rejected_token(seed, bound):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, 6)
    mask = Ragged.from_lengths(rng.random(lengths.sum()) < 0.8, lengths)
    log_ratio = rng.normal(0, 1, lengths.sum()) * mask.values
    assume(mask.values.any())
    by_token, by_row = (reject(log_ratio, mask, parse_rules(rule, bound))[0] for rule in ("token_k1", "seq_veto_k1"))
    for row in range(6):
        here = slice(mask.offsets[row], mask.offsets[row + 1])
        whole = (by_token[here] == mask[row]).all()
        assert by_row[here].tolist() == (mask[row] if whole else np.zeros_like(mask[row])).tolist()
