"""Our metrics against numbers that verl, slime, SkyRL and prime-rl gave for the same inputs (tests/data/golden)."""

from collections import defaultdict

import numpy as np
import pytest
from golden import cases, check, check_metrics, values

from tasks.algorithms.sample_metrics import (
    bootstrap,
    combine,
    length_metrics,
    majority,
    mean_by_name,
    pass_at_k,
    pass_metrics,
    reduce_metrics,
    signal_metrics,
    spread,
    throughput_metrics,
    timing_metrics,
    validation_metrics,
    variance_proxies,
)

DIFFERS = {
    "metrics.reduce": "`admin` is a mean: a name asks for max or min by a whole word, the reference takes any letters",
}
"""Cases where ours is another number on purpose, and why.

Beside them, pass@n and pass^n are ours for every n, where slime and prime-rl have them for powers of two alone.
"""

CHECKED = {
    "aggregate_dp",
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_pass_metrics",
    "compute_pass_rate",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "compute_variance_proxy_metrics",
    "_estimate_pass_at_k",
    "get_metrics_from_generator_output",
    "process_validation_metrics",
    "reduce_metrics",
}


def of(function):
    return cases("metrics", lambda case: case["function"] == function)


@cases("metrics")
def test_every_metrics_case_is_of_a_function_that_is_checked_below(case):
    assert case["function"] in CHECKED


def numbers(answers):
    return np.unique(answers, return_inverse=True)[1]


# ------------------------------------------------------------------------------------------------- one step's training


def lengths_of(given):
    """Tokens of each prompt and response; the response's places are the last of the attention mask."""
    width = given["responses"].shape[1]
    return given["attention_mask"][:, :-width].sum(axis=1), given["attention_mask"][:, -width:].sum(axis=1)


@of("compute_data_metrics")
def test_scores_and_lengths_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")["metrics"]
    prompt_lengths, lengths = lengths_of(given)
    inside = given["response_mask"].astype(bool)
    got = signal_metrics(
        given["token_level_scores"].sum(axis=1),
        given["token_level_rewards"].sum(axis=1),
        lengths,
        given["advantages"][inside],
        given["returns"][inside],
    )
    cut = lengths == given["responses"].shape[1]
    got |= length_metrics(lengths, cut, prompt_lengths, given["prompts"].shape[1])
    for key in ("__num_turns__", "tool_call_counts"):
        got |= spread(key.strip("_"), given[key]) if key in given else {}
    check_metrics(case, got, want)


@of("compute_timing_metrics")
def test_times_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")["metrics"]
    prompt_lengths, lengths = lengths_of(given)
    total = prompt_lengths.sum() + lengths.sum()
    tokens = {"gen": lengths.sum(), "ref": total, "adv": total, "update_actor": total}
    check_metrics(case, timing_metrics(case["params"]["timing_raw"], tokens), want)


@of("compute_throughout_metrics")
def test_throughput_equals_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")["metrics"]
    params = case["params"]
    got = throughput_metrics(int(given["global_token_num"].sum()), params["timing_raw"]["step"], params["n_gpus"])
    check_metrics(case, got, want)


@of("compute_variance_proxy_metrics")
def test_variance_proxies_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")["metrics"]
    inside = given["response_mask"].astype(bool)
    tokens = (given[key][inside] for key in ("advantages", "old_log_probs", "sum_pi_squared"))
    got = variance_proxies(np.nonzero(inside)[0], len(inside), *tokens, gradient_norm=case["params"]["gradient_norm"])
    check_metrics(case, got, want)


@of("aggregate_dp")
def test_parts_from_ranks_and_micro_batches_combine_as_in_verl(case):
    check(
        case, combine(values(case, "inputs")["values"], case["params"]["aggregation"]), values(case, "expected")["out"]
    )


@of("reduce_metrics")
def test_values_by_mini_batch_reduce_as_in_verl_but_by_whole_words(case):
    got, want = reduce_metrics(values(case, "inputs")["metrics"]), values(case, "expected")["out"]
    assert case["name"] in DIFFERS
    assert want.pop("admin") == 2.0
    assert got.pop("admin") == 3.0
    check_metrics(case, got, want)


# ----------------------------------------------------------------------------------------------------------- validation


@of("bootstrap_metric")
def test_resampled_statistics_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    got = bootstrap(np.asarray(given["val"]), case["params"]["subset_size"], numbers(given["pred"]))
    check_metrics(case, got, want)


@of("calc_maj_val")
def test_the_majority_value_equals_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    place = majority(numbers(given["pred"])[:, None])
    check(case, np.asarray(given["val"])[place[0]], want["maj"])


@of("process_validation_metrics")
def test_validation_by_data_source_equals_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")["metrics"]
    variables = dict(given["infos_dict"])
    votes = variables.pop("pred", None)
    got = defaultdict(dict)
    for variable in variables.keys() - {"note"}:
        column = np.asarray(variables[variable], dtype=np.float64)
        for source, metrics in validation_metrics(given["data_sources"], given["sample_uids"], column, votes).items():
            got[source][variable] = metrics
    assert got.keys() == want.keys()
    for source, by_variable in want.items():
        assert got[source].keys() == by_variable.keys()
        for variable, metrics in by_variable.items():
            check_metrics(case, got[source][variable], metrics)


@of("_estimate_pass_at_k")
def test_pass_at_k_of_a_table_equals_slimes(case):
    given, want = values(case, "inputs"), values(case, "expected")
    counts = zip(given["num_samples"].tolist(), given["num_correct"].tolist(), strict=True)
    check(case, [pass_at_k(n, passed, case["params"]["k"]) for n, passed in counts], want["out"])


@of("compute_pass_rate")
def test_pass_rates_of_groups_equal_slimes(case):
    passed = values(case, "inputs")["rewards"].reshape(-1, case["params"]["group_size"]) == 1
    want = values(case, "expected")["out"]
    got = mean_by_name(pass_metrics(len(group), int(group.sum())) for group in passed)
    check_metrics(case, {name: got[name] for name in want}, want)


@of("compute_pass_metrics")
def test_pass_at_k_and_pass_hat_k_equal_prime_rls(case):
    rewards, want = values(case, "inputs")["rewards"], values(case, "expected")["out"]
    got = pass_metrics(len(rewards), rewards.count(1))
    n = len(rewards)
    assert got.keys() - want.keys() <= {f"pass@{n}", f"pass^{n}"}
    check_metrics(case, {name: got[name] for name in want}, want)


@of("get_metrics_from_generator_output")
def test_score_and_pass_at_n_equal_skyrls(case):
    given, want = values(case, "inputs"), values(case, "expected")["out"]
    rewards, source = np.asarray(given["rewards"]), ["all"] * len(given["rewards"])
    above_zero = np.nextafter(0, 1)
    score = validation_metrics(source, given["uids"], rewards, pass_score=above_zero)["all"]
    positive = validation_metrics(source, given["uids"], np.maximum(rewards, 0))["all"]
    got = {"avg_score": score["mean@3"], "pass_at_n": score["pass@3"], "mean_positive_reward": positive["mean@3"]}
    check_metrics(case, got, want)


# ------------------------------------------------------------------------------------- where ours has a rule of its own


@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        ("actor/ratio_max", 6.0),
        ("response_length/max", 6.0),
        ("max_reward", 6.0),
        ("min_error", 1.0),
        ("score/min", 1.0),
        ("Score/Max", 6.0),
        ("admin", 3.0),
        ("minibatch/loss", 3.0),
        ("climax", 3.0),
        ("actor/loss", 3.0),
        ("max_tokens/min", 1.0),
    ],
)
def test_a_metric_is_reduced_by_the_last_word_max_or_min_in_its_name(name, reduced):
    assert reduce_metrics({name: [1.0, 2.0, 6.0]}) == {name: reduced}


def test_statistics_of_no_numbers_keep_their_names_and_are_nan():
    got = spread("critic/score", np.array([]))
    assert list(got) == ["critic/score/mean", "critic/score/max", "critic/score/min"]
    assert np.isnan(list(got.values())).all()


def test_scores_without_a_verdict_and_of_empty_responses_are_in_no_statistic():
    none = np.nan
    got = signal_metrics(
        score=np.array([1.0, none, 0.0, 8.0]),
        reward=np.array([0.5, 9.0, 0.25, 0.0]),
        lengths=np.array([3, 4, 1, 0]),
        advantages=np.array([-1.0, 1.0]),
        returns=np.array([0.5]),
    )
    assert got["critic/score/mean"] == 0.5
    assert got["critic/score/max"] == 1.0
    assert got["critic/rewards/mean"] == 0.375
    assert got["critic/advantages/mean"] == 0.0
    assert got["critic/returns/min"] == 0.5


def test_importance_weights_scale_a_samples_power_by_their_squared_mean():
    row, ones = np.array([0, 0]), np.ones(2)
    half = np.log(np.full(2, 0.5))
    plain = variance_proxies(row, 2, 2 * ones, half, 0.5 * ones, gradient_norm=0.5)
    weighted = variance_proxies(row, 2, 2 * ones, half, 0.5 * ones, weights=np.array([1.0, 3.0]))
    # Energy is 1 - 2 * 0.5 + 0.5 = 0.5 a token: W = 1, A = 2 for the first sample, nothing for the second.
    assert plain["variance_proxy/proxy2_total_power"] == pytest.approx(2.0)
    assert plain["variance_proxy/proxy3_pure_noise"] == pytest.approx(1.75)
    assert weighted["variance_proxy/proxy2_total_power"] == pytest.approx(8.0)
    assert weighted["variance_proxy/expected_w"] == pytest.approx((0.5 + 4.5) / 2)
    assert weighted["variance_proxy/proxy3_pure_noise"] == 0.0
