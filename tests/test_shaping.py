"""Shaping: what length, truncation, bounds and scale make of a score, and which groups carry a signal."""

import numpy as np
import pytest

from tasks.algorithms.advantages import EQUAL_WITHIN, group_statistics
from tasks.algorithms.shaping import (
    Shaping,
    clip_and_scale,
    groups_with_signal,
    overlong_penalty,
    shape_scores,
    stop_properly,
)

NAN = float("nan")


def test_the_overlong_penalty_grows_over_the_buffer_and_stops_only_if_capped():
    lengths = np.asarray([0, 6, 8, 10, 15])

    capped = overlong_penalty(lengths, longest=10, buffer=4, penalty_factor=2.0, capped=True)
    uncapped = overlong_penalty(lengths, longest=10, buffer=4, penalty_factor=2.0, capped=False)

    assert capped.tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]
    assert uncapped.tolist() == [0.0, 0.0, -1.0, -2.0, -4.5]
    assert not np.signbit(capped[:2]).any()


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_a_buffer_outside_the_response_is_refused(buffer):
    with pytest.raises(ValueError, match=rf"overlong_buffer\.len={buffer} .*data\.max_response_length"):
        overlong_penalty(np.asarray([5]), 10, buffer, 1.0, capped=True)


def test_a_buffer_as_long_as_the_response_penalises_from_the_first_token():
    assert overlong_penalty(np.asarray([0, 5, 10]), 10, 10, 1.0, capped=True).tolist() == [0.0, -0.5, -1.0]


def test_truncated_responses_are_scaled_by_a_coefficient_of_0_and_above_and_replaced_by_a_negative_one():
    reward, truncated = np.asarray([1.0, 1.0, -0.4]), np.asarray([True, False, True])

    assert stop_properly(reward, truncated, 0.5).tolist() == [0.5, 1.0, -0.2]
    assert stop_properly(reward, truncated, 0.0).tolist() == [0.0, 1.0, 0.0]
    assert stop_properly(reward, truncated, -2.0).tolist() == [-2.0, 1.0, -2.0]


def test_bounds_come_before_scale_and_one_may_be_missing():
    reward = np.asarray([-3.0, 0.5, 3.0, NAN])

    np.testing.assert_equal(clip_and_scale(reward, -1.0, 1.0, 10.0), [-10.0, 5.0, 10.0, NAN])
    np.testing.assert_equal(clip_and_scale(reward, low=0.0), [0.0, 0.5, 3.0, NAN])
    np.testing.assert_equal(clip_and_scale(reward, high=0.0), [-3.0, 0.0, 0.0, NAN])


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"reward\.clip_low=1 .* reward\.clip_high=-1"):
        clip_and_scale(np.asarray([0.0]), 1.0, -1.0)


def test_rules_that_are_off_change_nothing_and_have_no_metrics():
    score = np.asarray([1.5, NAN, -1.0])

    reward, metrics = shape_scores(score, np.asarray([4, 5, 10]), np.asarray([False, False, True]), Shaping(longest=10))

    np.testing.assert_equal(reward, score)
    assert reward is not score and metrics == {}


def test_a_score_goes_through_penalty_truncation_bounds_and_scale_in_this_order():
    rules = Shaping(longest=10, overlong_buffer=4, stop_properly_coef=0.5, clip_low=-0.25, clip_high=0.75, scale=4.0)
    # + penalty:      1.0   0.5    0.0    -1.0   none
    # stop properly:  1.0   0.5    0.0    -0.5
    # bounds:         0.75  0.5    0.0    -0.25
    score = np.asarray([1.0, 1.0, 1.0, 0.0, NAN])
    tokens = np.asarray([6, 8, 10, 10, 10])
    truncated = np.asarray([False, False, True, True, True])

    reward, metrics = shape_scores(score, tokens, truncated, rules)

    np.testing.assert_equal(reward, [3.0, 2.0, 0.0, -1.0, NAN])
    assert metrics == {
        "reward/overlong_penalty/mean": (0.0 - 0.5 - 1.0 - 1.0) / 4,
        "reward/overlong_share": 3 / 4,
        "reward/stop_properly_share": 2 / 4,
        "reward/clipped_share": 2 / 4,
    }


def test_a_sample_without_a_verdict_gets_none_from_any_rule():
    rules = Shaping(longest=10, overlong_buffer=4, stop_properly_coef=-1.0, clip_low=-1.0, clip_high=1.0, scale=0.0)

    reward, metrics = shape_scores(np.asarray([NAN, NAN]), np.asarray([10, 2]), np.asarray([True, False]), rules)

    assert np.isnan(reward).all() and metrics == {}


def test_a_group_has_a_signal_where_two_verdicts_differ():
    values = [1, 0, 1, 1, NAN, 1, NAN, NAN, 0.5, 0, NAN, 1]
    group = ["c", "c", "a", "a", "b", "b", "e", "e", "one", "d", "d", "d"]

    assert groups_with_signal(np.asarray(values), np.asarray(group)).tolist() == [
        True,
        False,
        False,
        False,
        False,
        True,
    ]


def test_groups_are_named_in_the_order_of_their_first_member_wherever_the_others_stand():
    values, group = np.asarray([1.0, 2.0, 1.0, 3.0, 5.0, 5.0]), np.asarray([9, 3, 9, 3, 7, 7])

    assert groups_with_signal(values, group).tolist() == [False, True, False]
    assert groups_with_signal(values[[1, 3, 0, 2, 4, 5]], group[[1, 3, 0, 2, 4, 5]]).tolist() == [True, False, False]


@pytest.mark.parametrize(("share", "signal"), [(0.5, False), (2.0, True)])
def test_a_difference_within_rounding_is_none(share, signal):
    values = np.asarray([1000.0, 1000.0 * (1 - share * EQUAL_WITHIN)])

    assert groups_with_signal(values, np.zeros(2)).tolist() == [signal]


def test_groups_without_a_signal_are_those_that_centre_on_exactly_0():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(50), 3)
    values = np.where(rng.random(150) < 0.3, NAN, rng.integers(0, 2, 150))

    moved = np.bincount(group, weights=group_statistics(values, group).centred != 0) > 0

    assert groups_with_signal(values, group).tolist() == moved.tolist()


def test_no_samples_have_no_groups():
    assert groups_with_signal(np.zeros(0), np.zeros(0)).tolist() == []
