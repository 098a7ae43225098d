"""Validation metrics by hand: verdicts that are missing, prompts with unequal counts, ties, pass@k and pass^k."""

from datetime import UTC, datetime
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.tracking import legal_name
from storage import Ragged, RunWriter, build_table
from tasks.algorithms.sample_metrics import (
    bootstrap,
    majority,
    pass_at_k,
    pass_hat_k,
    pass_metrics,
    prompt_metrics,
    sizes,
    validation_metrics,
)
from tasks.config import RunConfig
from tasks.validate import score_metrics
from tasks.validate import validation_metrics as metrics_of_artifacts

NONE = float("nan")


def scored(n, **prompts):
    """Metrics of one source `toy` with a prompt for each keyword: its scores."""
    group = [name for name, scores in prompts.items() for _ in scores]
    score = np.array([value for scores in prompts.values() for value in scores], dtype=np.float64)
    return score_metrics(["toy"] * len(group), group, score, [None] * len(group), n)


# --------------------------------------------------------------------------------------------------------------- names


def test_one_sample_per_prompt_gives_its_mean_and_the_count_of_missing_verdicts():
    assert scored(1, a=[1.0], b=[0.0], c=[0.5], d=[NONE]) == {
        "val-core/toy/reward/mean@1": 0.5,
        "val-aux/toy/no_verdict": 1.0,
    }


def test_core_metrics_are_those_of_all_samples_of_a_prompt():
    group, score = ["a"] * 4, np.array([1.0, 0.0, 0.0, 1.0])
    metrics = score_metrics(["openai/gsm8k"] * 4, group, score, ["1", "2", None, "1"], 4)
    core = {name.removeprefix("val-core/openai/gsm8k/reward/") for name in metrics if name.startswith("val-core")}
    spread_at_4 = {f"{name}@4/{of}" for name in ("best", "maj") for of in ("mean", "std")}
    assert core == {"mean@4", "pass@4", *spread_at_4}
    aux = {name.removeprefix("val-aux/openai/gsm8k/reward/") for name in metrics if name.startswith("val-aux")}
    assert {"std@4", "worst@4/mean", "best@2/mean", "maj@2/std", "pass@1", "pass@2", "pass^1", "pass^2", "pass^4"} < aux


def test_names_stay_apart_in_mlflow():
    group, score = ["a"] * 5, np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    metrics = score_metrics(["toy"] * 5, group, score, ["1"] * 5, 5)
    assert len({legal_name(name) for name in metrics}) == len(metrics)
    assert legal_name("val-core/toy/reward/pass@5") == "val-core/toy/reward/pass_at_5"


@pytest.mark.parametrize(
    ("n", "expected"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (16, [2, 4, 8, 16])]
)
def test_sizes_are_powers_of_two_and_the_count_itself(n, expected):
    assert sizes(n) == expected


# --------------------------------------------------------------------------------- prompts, sources, missing verdicts


def test_means_are_taken_within_prompts_first():
    metrics = scored(2, a=[1.0, 1.0], b=[0.0, 1.0])
    assert metrics["val-core/toy/reward/mean@2"] == 0.75
    assert metrics["val-aux/toy/reward/std@2"] == 0.25
    assert metrics["val-aux/toy/reward/pass@1"] == 0.75
    assert metrics["val-core/toy/reward/pass@2"] == 1.0
    assert metrics["val-aux/toy/reward/pass^2"] == 0.5


def test_a_prompt_with_fewer_verdicts_has_the_metrics_of_its_own_count():
    metrics = scored(4, a=[1.0, 0.0, 0.0, 0.0], b=[1.0, NONE, 1.0, 0.0], c=[NONE] * 4, d=[NONE, 1.0, NONE, NONE])
    assert metrics["val-core/toy/reward/mean@4"] == 0.25
    assert metrics["val-aux/toy/reward/mean@3"] == pytest.approx(2 / 3)
    assert metrics["val-aux/toy/reward/mean@1"] == 1.0
    assert metrics["val-aux/toy/no_verdict"] == 8.0
    assert metrics["val-aux/toy/reward/pass@1"] == pytest.approx((1 / 4 + 2 / 3 + 1) / 3)
    assert metrics["val-aux/toy/reward/pass@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["val-core/toy/reward/pass@4"] == 1.0
    assert metrics["val-aux/toy/reward/pass^2"] == pytest.approx((0 + 1 / 3) / 2)


def test_a_missing_verdict_changes_nothing_but_its_own_count():
    with_null = validation_metrics(["s"] * 3, ["a"] * 3, np.array([1.0, NONE, 0.0]), ["x", "y", "z"], 1.0)
    without = validation_metrics(["s"] * 2, ["a"] * 2, np.array([1.0, 0.0]), ["x", "z"], 1.0)
    assert with_null == without


def test_a_source_without_verdicts_has_only_their_count():
    metrics = score_metrics(["s", "s", "t"], ["a", "a", "b"], np.array([NONE, NONE, 1.0]), [None] * 3, 2)
    assert {name: value for name, value in metrics.items() if "/s/" in name} == {"val-aux/s/no_verdict": 2.0}
    assert metrics["val-aux/t/no_verdict"] == 0.0


def test_no_samples_give_no_metrics():
    assert score_metrics([], [], np.array([]), [], 4) == {}


def test_sources_are_kept_apart_and_siblings_need_not_be_neighbours():
    metrics = score_metrics(
        ["s", "t", "s", "t"], ["a", "b", "a", "b"], np.array([1.0, 0.0, 1.0, 0.5]), [None, "x", None, "x"], 2
    )
    assert metrics["val-core/s/reward/mean@2"] == 1.0
    assert metrics["val-core/t/reward/mean@2"] == 0.25
    assert "val-core/t/reward/maj@2/mean" in metrics
    assert "val-core/s/reward/maj@2/mean" not in metrics


def test_a_sample_passes_from_a_score_of_one_on():
    metrics = scored(2, a=[0.99, 0.5], b=[1.0, 0.0], c=[1.5, 1.0])
    assert metrics["val-aux/toy/reward/pass@1"] == 0.5
    assert metrics["val-core/toy/reward/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val-aux/toy/reward/pass^2"] == pytest.approx(1 / 3)


# ---------------------------------------------------------------------------------------------------- best, worst, maj


def test_equal_scores_have_no_spread():
    metrics = prompt_metrics(np.full(4, 0.5), ["x", "y", "x", None])
    assert {value for name, value in metrics.items() if "std" in name} == {0.0}
    assert {value for name, value in metrics.items() if "std" not in name} == {0.5}


def test_best_of_two_draws_from_a_right_and_a_wrong_answer_is_right_in_three_of_four():
    results = bootstrap(np.array([1.0, 0.0]), 2)
    assert results["best"][0] == pytest.approx(0.75, abs=0.04)
    assert results["worst"][0] == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize(
    ("ballots", "winner"),
    [([0, 1, 1], 1), ([0, 1], 0), ([1, 0], 0), ([2, 0, 1, 0, 2], 0), ([0, 1, 2, 2, 1], 1), ([3], 0), ([0, 0, 1], 0)],
)
def test_the_majority_is_the_first_ballot_of_the_most_common_answer_and_ties_go_to_the_first_seen(ballots, winner):
    assert majority(np.array(ballots)[:, None]).tolist() == [winner]


def test_votes_are_counted_each_by_itself():
    assert majority(np.array([[0, 5], [1, 3], [1, 3]])).tolist() == [1, 1]


def test_one_answer_for_all_makes_the_majority_the_first_that_is_drawn():
    values, ballots = np.array([0.0, 1.0]), np.zeros(2, dtype=np.int64)
    assert bootstrap(values, 2, ballots)["maj"][0] == pytest.approx(0.5, abs=0.06)


def test_having_no_answer_is_a_vote_like_any_other():
    no_answer = prompt_metrics(np.array([0.0, 0.0, 0.0, 1.0]), [None, None, None, "7"])
    some_answer = prompt_metrics(np.array([0.0, 0.0, 0.0, 1.0]), ["3", "3", "3", "7"])
    assert no_answer == some_answer
    assert no_answer["maj@4/mean"] < no_answer["mean@4"]


SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=8)


@given(SCORES, st.data())
def test_best_is_at_least_the_majority_is_at_least_the_worst(scores, data):
    votes = data.draw(st.lists(st.sampled_from(["1", "2", None]), min_size=len(scores), max_size=len(scores)))
    metrics = prompt_metrics(np.array(scores), votes)
    for k in sizes(len(scores)):
        assert metrics[f"best@{k}/mean"] >= metrics[f"maj@{k}/mean"] >= metrics[f"worst@{k}/mean"]


@given(SCORES)
def test_best_is_at_least_the_mean_is_at_least_the_worst(scores):
    """Up to what 1000 resamplings leave open: four standard errors of their mean."""
    n = len(scores)
    metrics = prompt_metrics(np.array(scores))
    mean, error = metrics[f"mean@{n}"], 4 * metrics[f"std@{n}"] / 1000**0.5 + 1e-12
    for k in sizes(n):
        assert metrics[f"best@{k}/mean"] >= mean - error
        assert metrics[f"worst@{k}/mean"] <= mean + error
    assert max(scores) >= metrics[f"best@{n}/mean"] - 1e-12
    assert min(scores) <= metrics[f"worst@{n}/mean"] + 1e-12


# ---------------------------------------------------------------------------------------------------- pass@k and pass^k


@pytest.mark.parametrize(
    ("n", "passed", "k", "some", "every"),
    [(4, 1, 1, 1 / 4, 1 / 4), (4, 1, 2, 1 / 2, 0), (4, 2, 2, 5 / 6, 1 / 6), (4, 3, 2, 1, 1 / 2), (3, 3, 3, 1, 1)],
)
def test_pass_at_k_and_pass_hat_k_by_hand(n, passed, k, some, every):
    assert pass_at_k(n, passed, k) == pytest.approx(some)
    assert pass_hat_k(n, passed, k) == pytest.approx(every)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_both_are_the_mean_over_all_choices_of_k_samples(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    chosen = list(combinations(passed, k))
    count = sum(passed)
    assert pass_at_k(len(passed), count, k) == pytest.approx(np.mean([any(some) for some in chosen]))
    assert pass_hat_k(len(passed), count, k) == pytest.approx(np.mean([all(some) for some in chosen]))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_pass_at_1_is_the_mean_over_prompts_of_the_share_that_passes(prompts):
    prompt = [str(number) for number, passed in enumerate(prompts) for _ in passed]
    values = np.array([float(one) for passed in prompts for one in passed])
    metrics = validation_metrics(["s"] * len(prompt), prompt, values, pass_score=1.0)["s"]
    share = pytest.approx(np.mean([np.mean(passed) for passed in prompts]))
    assert metrics["pass@1"] == share
    assert metrics["pass^1"] == share


@given(st.integers(1, 300), st.data())
def test_pass_at_k_grows_and_pass_hat_k_shrinks_with_k(n, data):
    passed = data.draw(st.integers(0, n))
    metrics = pass_metrics(n, passed)
    some, every = ([metrics[f"pass{sign}{k}"] for k in [1, *sizes(n)]] for sign in "@^")
    assert some == sorted(some)
    assert every == sorted(every, reverse=True)
    assert some[-1] == float(passed > 0)
    assert every[-1] == float(passed == n)
    assert 0 <= every[0] <= 1


# ------------------------------------------------------------------------------------------------------ from artifacts


def test_scores_find_their_source_and_prompt_by_group_id(tmp_path):
    groups, answers = ["a", "b", "a", "b"], ["1", None, "1", "2"]
    empty = Ragged.from_rows([[]] * 2, np.int32)
    prompts = {
        "group_id": ["b", "a"],
        "prompt_index": [1, 0],
        "data_source": ["t", "s"],
        "prompt_ids": empty,
        **{name: ["{}"] * 2 for name in ("prompt", "prompt_text", "ground_truth", "extra_info")},
    }
    rollouts = {
        "sample_id": ["a0", "a1", "b0", "b1"],
        "group_id": ["a", "a", "b", "b"],
        "sample_index": [0, 1, 0, 1],
        "response_ids": Ragged.from_rows([[1], [1, 2], [1], [1, 2, 3, 4]], np.int32),
        "response_text": ["x"] * 4,
        "rollout_log_probs": [None] * 4,
        "finish_reason": ["stop"] * 4,
        "seed": [0] * 4,
        "policy_version": [0] * 4,
    }
    rewards = {
        "sample_id": ["a0", "b0", "a1", "b1"],
        "group_id": groups,
        "score": [1.0, None, 0.0, 1.0],
        "status": ["ok", "error", "ok", "ok"],
        "parts": [[]] * 4,
        "extracted": answers,
        "extra": ["{}"] * 4,
        "message": [None] * 4,
        "seconds": [0.0] * 4,
    }
    sampling = {"n": 2, "do_sample": True, "temperature": 1.0}
    cfg = RunConfig.model_validate({"actor_rollout_ref": {"rollout": {"val_kwargs": sampling}}})
    with RunWriter.create(tmp_path / "run", "run") as run:
        tables = {"val_prompts": prompts, "val_rollouts": rollouts, "val_rewards": rewards}
        made = [
            run.commit(1, stage, build_table(stage, table), key=stage, policy_version=1, started_at=datetime.now(UTC))
            for stage, table in tables.items()
        ]
        metrics = metrics_of_artifacts(*made, cfg)
    assert metrics["val-core/s/reward/mean@2"] == 0.5
    assert metrics["val-core/s/reward/pass@2"] == 1.0
    assert metrics["val-aux/s/no_verdict"] == 0.0
    assert metrics["val-aux/t/reward/mean@1"] == 1.0
    assert metrics["val-aux/t/no_verdict"] == 1.0
    assert metrics["val-aux/response_length/mean"] == 2.0
