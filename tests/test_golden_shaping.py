"""Shaping against numbers that verl, TRL, OpenRLHF and SkyRL gave for the same inputs (tests/data/golden)."""

import numpy as np
from golden import cases, check, values

from tasks.algorithms.shaping import clip_and_scale, groups_with_signal, overlong_penalty, stop_properly
from tasks.rewards import repetition, response_format

DIFFERS = {
    "shaping.zero_variance_filter.tol_1e-06": "SkyRL's tolerance is an absolute one on the deviation and can be set; "
    "here scores are equal within float32 rounding of the largest, so that 0.3 and 0.3000005 differ",
}
"""Cases where ours is another result on purpose, and why. Not in the cases: verl keeps groups of one response, which
have no signal here."""


def function_is(*names):
    return lambda case: case["function"] in names


@cases("shaping", function_is("run_single", "get_soft_overlong_punishment", "apply_overlong_penalty"))
def test_overlong_penalties_equal_verls_trls_and_openrlhfs(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    longest, buffer, factor = (
        next((params[key] for key in keys if key in params), 1.0)
        for keys in (
            ("max_resp_len", "max_completion_len", "max_new_tokens"),
            ("overlong_buffer_cfg.len", "soft_punish_cache", "overlong_buffer_len"),
            ("overlong_buffer_cfg.penalty_factor", "overlong_penalty_factor"),
        )
    )

    got = overlong_penalty(
        np.asarray(given["response_lengths"]), longest, buffer, factor, capped=case["function"] != "run_single"
    )

    check(case, got + given.get("score", 0.0), want["reward"])
    if "overlong_reward" in want:
        check(case, got, want["overlong_reward"])
        assert (got < 0).tolist() == want["overlong"]


@cases("shaping", function_is("apply_stop_properly_penalty"))
def test_stop_properly_equals_openrlhfs(case):
    given, want = values(case, "inputs"), values(case, "expected")

    got = stop_properly(given["score"], given["truncated"], case["params"]["stop_properly_penalty_coef"])

    check(case, got, want["reward"])


@cases("shaping", function_is("get_repetition_penalty_reward"))
def test_repeated_shares_of_token_ids_equal_trls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]

    shares = [repetition.repeated_share(ids, params["ngram_size"]) for ids in given["completion_ids"]]

    check(case, params["max_penalty"] * np.asarray(shares), want["reward"])


@cases("shaping", function_is("get_repetition_penalty_reward"))
def test_the_same_ids_written_as_words_get_trls_penalty(case):
    given, want = values(case, "inputs"), values(case, "expected")

    got = [repetition.compute_score(" ".join(map(str, ids)), **case["params"]) for ids in given["completion_ids"]]

    check(case, got, want["reward"])


@cases("shaping", function_is("think_format_reward"))
def test_the_think_format_equals_trls(case):
    given, want = values(case, "inputs"), values(case, "expected")

    check(case, [response_format.compute_score(text) for text in given["completions"]], want["reward"])


@cases("shaping", function_is("_dapo_filtered_keys", "zero_variance_filter"))
def test_groups_with_a_signal_are_those_verl_and_skyrl_keep(case):
    given, want = values(case, "inputs"), values(case, "expected")
    uids = np.asarray(given["uids"])
    names = list(dict.fromkeys(given["uids"]))

    signal = groups_with_signal(given["rewards"], uids)

    kept = [name for name, has_signal in zip(names, signal, strict=True) if has_signal]
    expected = want["kept_uids"] if "kept_uids" in want else list(dict.fromkeys(uids[want["kept_indices"]].tolist()))
    if case["name"] in DIFFERS:
        assert expected == ["u2"]
        expected = ["u2", "u3"]
    assert kept == expected


@cases("trl_advantage", lambda case: case["name"] == "trl.rloo.norm_false.clip_true.beta_0.0.f64")
def test_clipped_rewards_less_the_mean_of_the_others_are_trls_advantages(case):
    params, given, want = case["params"], values(case, "inputs"), values(case, "expected")
    rewards = given["rewards_per_func"].astype(np.float64)
    none = np.isnan(rewards).all(axis=1)
    score = np.where(none, np.nan, np.nansum(rewards * np.asarray(params["reward_weights"]), axis=1))

    clipped = clip_and_scale(score, *params["reward_clip_range"]).reshape(-1, params["num_generations"])

    whole = ~np.isnan(clipped).any(axis=1)
    assert whole.any() and (clipped != score.reshape(clipped.shape))[whole].any()
    others = (clipped.sum(axis=1, keepdims=True) - clipped) / (params["num_generations"] - 1)
    check(case, (clipped - others)[whole], want["advantages"].reshape(clipped.shape)[whole])
