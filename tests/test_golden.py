"""Our formulas against numbers that verl, TRL, SkyRL and OpenRLHF gave for the same inputs (tests/data/golden)."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden import FOLDER, cases, check, check_metrics, ragged, square, values

from storage.ragged import Ragged
from tasks.algorithms.advantages import AdvantageInput, group_statistics, whiten
from tasks.algorithms.aggregation import aggregate, count_totals, masked_sum, row_weights, sequence_mean
from tasks.algorithms.correction import (
    correct,
    gap_metrics,
    importance_weights,
    mean_weight,
    probability_gap,
    reject,
    truncate,
)
from tasks.algorithms.correction_rules import parse_band, parse_rules
from tasks.algorithms.kl import kl_estimate, kl_in_reward, next_kl_coef
from tasks.algorithms.losses import (
    LossBatch,
    aggregation_mode,
    policy_loss,
    prepare_mini_batch,
    probability_ratio,
)
from tasks.algorithms.token_masks import near_the_sampler
from tasks.algorithms.variants import ESTIMATORS
from tasks.config import ActorConfig, AlgorithmConfig, KLControlConfig, PolicyLossConfig, RolloutCorrectionConfig
from tasks.workers.forward import token_log_probs

DIFFERS = {
    "adv.remax.holes.f64": "compared inside the mask: the reference leaves the return as advantage of unsampled tokens",
    "other.maxrl.gauss.f32": "scores below 0 are refused: the reference divides by a negative mean",
    "masked.whiten.constant.f64": "equal values give exactly 0; the reference gives rounding noise times 1e4",
    "logits.entropy_chunked.f32": "at logits of 1000 the reference's float32 is 5e-5 off its own float64",
    "trl.loss.bnpo.grad_accum.f64": "the reference averages the means of micro-batches, ours the whole mini-batch",
}
"""Cases where ours is another number on purpose, and why; docs/algorithms.md tells users.

Beside them, verl's geo_mean, TRL and SkyRL count a sequence without loss tokens in a mean over sequences and ours does
not: the tests give our function the reference's count.
"""


# --------------------------------------------------------------------------------------------------------- advantages


def advantages_of(case, given):
    params, rewards = case["params"], given["token_level_rewards"]
    known = ("norm_adv_by_std_in_grpo", "gamma", "gdpo_reward_keys", "gdpo_reward_weights")
    name = params.get("adv_estimator") or params["advantage_estimator"]
    options = ["handle_zero_tail"] if "token_baseline" in name else ["epsilon", "f_norm"]
    inputs = AdvantageInput(
        score=rewards.astype(np.float64).sum(axis=1),
        group=given["index"],
        mask=ragged(given["response_mask"].astype(bool)),
        token_rewards=ragged(rewards),
        reward_parts={key[7:]: part.astype(np.float64) for key, part in given.items() if key.startswith("reward/")},
        greedy_score=given.get("reward_baselines"),
        **{
            key: ragged(given[key]) for key in ("old_log_probs", "sum_pi_squared", "rollout_is_weights") if key in given
        },
    )
    cfg = AlgorithmConfig(**{key: params[key] for key in known if key in params})
    return ESTIMATORS[name].load()(inputs, cfg, **{key: params[key] for key in options if key in params})


@cases("advantage")
def test_advantages_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    if case["raises"]:
        with pytest.raises(ValueError):
            advantages_of(case, given)
        return
    result = advantages_of(case, given)
    like = given["token_level_rewards"]
    inside = given["response_mask"] if case["name"] in DIFFERS else 1
    check(case, square(result.advantages, like) * inside, want["advantages"] * inside)
    check(case, square(result.returns, like), want["returns"])


@cases("other", lambda case: case["function"] == "compute_maxrl_advantage")
def test_maxrl_equals_skyrls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    if case["name"] in DIFFERS:
        with pytest.raises(ValueError, match="rewards lie below 0"):
            advantages_of(case, given)
        return
    check(case, square(advantages_of(case, given).advantages, given["token_level_rewards"]), want["advantages"])


def outcome_advantage(score, group, estimator, cfg, *, parts=None, **options):
    """[N] advantage of samples of one token each."""
    mask = Ragged.from_lengths(np.ones(len(score), dtype=bool), np.ones(len(score), dtype=np.int64))
    inputs = AdvantageInput(score, group, mask, reward_parts=parts or {})
    return ESTIMATORS[estimator].load()(inputs, cfg, **options).advantages.values


def weighted_rewards(params, given):
    """[N] TRL's sum over reward functions, NaN where none applies, within the clip range."""
    rewards = given["rewards_per_func"].astype(np.float64)
    total = np.nansum(rewards * np.asarray(params["reward_weights"]), axis=1)
    if params.get("reward_clip_range"):
        total = np.clip(total, *params["reward_clip_range"])
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def by_function(given):
    return dict(zip("ab", given["rewards_per_func"].astype(np.float64).T, strict=True))


@cases("trl_advantage", lambda case: "multi_objective_aggregation" in case["params"])
def test_grpo_with_null_rewards_equals_trls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    score = weighted_rewards(params, given)
    group = np.arange(len(score)) // params["num_generations"]
    scale = params["scale_rewards"]
    cfg = AlgorithmConfig(
        norm_adv_by_std_in_grpo=scale != "none",
        norm_adv_std_over="batch" if scale == "batch" else "group",
        multi_objective_aggregation=params["multi_objective_aggregation"],
        gdpo_reward_weights=tuple(params["reward_weights"]),
    )
    got = outcome_advantage(score, group, "grpo", cfg, parts=by_function(given), epsilon=1e-4)
    check(case, got, want["advantages"])
    equal = group_statistics(score, group).equal
    if params["multi_objective_aggregation"] == "normalize_then_sum" or scale == "batch":
        equal = np.full(len(score), np.ptp(score[~np.isnan(score)]) == 0)
    np.testing.assert_array_equal(equal, want["is_std_zero"])


@cases("trl_advantage", lambda case: "rloo" in case["name"])
def test_rloo_with_kl_in_reward_equals_trls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    score = weighted_rewards(case["params"], given)
    mask = ragged(given["completion_mask"].astype(bool))
    old, ref = ragged(given["old_per_token_logps"]), ragged(given["ref_per_token_logps"])
    rewards, _ = kl_in_reward(score, old, ref, mask, "k1", case["params"]["beta"])
    inputs = AdvantageInput(score, np.arange(len(score)) // 4, mask, token_rewards=rewards)
    cfg = AlgorithmConfig(normalize_advantages=case["params"]["normalize_advantages"])
    result = ESTIMATORS["rloo"].load()(inputs, cfg)
    filled = [row for row in range(len(score)) if mask[row].any()]
    got = [result.advantages[row][mask[row]].mean() for row in filled]
    tolerance = {"rtol": 1e-5, "atol": 1e-6}  # token rewards are stored in float32
    check({"tolerance": tolerance}, got, want["advantages"][filled])


@cases("other", lambda case: case["name"].startswith("other.nemo_grpo"))
def test_grpo_against_siblings_equals_nemo_rls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    group = given["index"]
    cfg = AlgorithmConfig(
        norm_adv_by_std_in_grpo=params["normalize_rewards"],
        use_leave_one_out_baseline=params["use_leave_one_out_baseline"],
    )
    got = outcome_advantage(given["rewards"].astype(np.float64), group, "grpo", cfg)
    # The only member of a group keeps its outcome as in verl, unless it is compared with its siblings.
    compared = np.ones(len(group), dtype=bool)
    if not params["use_leave_one_out_baseline"]:
        compared = np.bincount(group)[group] > 1
    wanted = want["advantages"].max(axis=1) + want["advantages"].min(axis=1)
    filled = given["response_mask"].any(axis=1) & compared
    check(case, got[filled], np.where(given["response_mask"].all(axis=1), wanted / 2, wanted)[filled])


# ------------------------------------------------------------------------------------------------------ policy losses


def loss_of(batch, actor, correction, leaf, *, groups=None, totals=None, scale=None, dp_size=1):
    """(loss, gradient, metrics) of a whole mini-batch in one piece."""
    batch = replace(prepare_mini_batch(batch, actor, correction), log_probs=leaf)
    per_token, metrics = policy_loss(actor, correction)(batch, actor)
    row_tokens = batch.mask.sum(dim=1).numpy()
    counted = count_totals(row_tokens, np.arange(len(row_tokens)) if groups is None else groups)
    final = counted if totals is None else totals(counted)
    mode = aggregation_mode(actor, correction)
    weights = torch.from_numpy(row_weights(final, mode, scale=scale or batch.mask.shape[1]))
    loss = aggregate(per_token, batch.mask, weights) * dp_size
    (gradient,) = torch.autograd.grad(loss, leaf)
    means = {name: float(masked_sum(value, batch.mask)) / max(counted.tokens, 1) for name, value in metrics.items()}
    return loss.item(), gradient.numpy(), means


def settings_of(params):
    actor = {k: params[k] for k in params if k.startswith(("clip_ratio", "loss_agg_mode"))}
    loss = {k.split(".")[-1]: v for k, v in params.items() if k.startswith(("policy_loss.", "tau_"))}
    correction = {k.split(".")[-1]: v for k, v in params.items() if k.startswith("rollout_correction.")}
    if "bypass_mode" in params:
        return ActorConfig(**actor), RolloutCorrectionConfig(bypass_mode=True, **correction)
    loss.setdefault("loss_mode", "reinforce")
    return ActorConfig(**actor, policy_loss=PolicyLossConfig(**loss)), RolloutCorrectionConfig()


def batch_of(given):
    leaf = torch.from_numpy(given["log_prob"]).clone().requires_grad_()
    weights = given.get("rollout_is_weights")
    return leaf, LossBatch(
        log_probs=leaf,
        old_log_probs=torch.from_numpy(given["old_log_prob"]),
        advantages=torch.from_numpy(given["advantages"]),
        mask=torch.from_numpy(given["response_mask"]).bool(),
        rollout_is_weights=None if weights is None else torch.from_numpy(weights),
    )


def reference_counts(params, rows):
    """What the reference divides by: given counts, and for geo_mean all rows, empty ones too."""

    def change(counted):
        info = params.get("global_batch_info", {})
        if "batch_num_tokens" in info:
            counted = replace(counted, tokens=info["batch_num_tokens"], sequences=info["global_batch_size"])
        if params.get("policy_loss.loss_mode") == "geo_mean":
            counted = replace(counted, sequences=rows)
        return counted

    return change


@cases("policy_loss", lambda case: not case["raises"] and "loss_micro" not in case["expected"])
def test_policy_losses_gradients_and_metrics_equal_verls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    actor, correction = settings_of(params)
    leaf, batch = batch_of(given)
    info = params.get("global_batch_info", {})
    loss, gradient, metrics = loss_of(
        batch,
        actor,
        correction,
        leaf,
        totals=reference_counts(params, len(leaf)),
        scale=info.get("loss_scale_factor"),
        dp_size=info.get("dp_size", 1),
    )
    check(case, loss, want["loss"], "loss")
    check(case, gradient, want["grad_log_prob"], "gradient")
    wanted = {name: value for name, value in want["metrics"].items() if name.startswith("actor/")}
    check_metrics(case, {f"actor/{name}": value for name, value in metrics.items()}, wanted)


@cases("policy_loss", lambda case: "loss_micro" in case["expected"])
def test_micro_batch_losses_add_up_to_verls_full_loss(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    actor, _ = settings_of(params)
    _, batch = batch_of(given)
    per_token, _ = policy_loss(actor, RolloutCorrectionConfig())(batch, actor)
    info = params["global_batch_info"]
    counted = count_totals(batch.mask.sum(dim=1).numpy(), np.arange(len(batch.mask)))
    counted = replace(counted, tokens=info["batch_num_tokens"], sequences=info["global_batch_size"])
    scale = info["loss_scale_factor"]
    weights = torch.from_numpy(row_weights(counted, actor.loss_agg_mode, scale=scale))
    parts = [aggregate(per_token[rows], batch.mask[rows], weights[rows]).item() for rows in params["micro_batches"]]
    check(case, parts, want["loss_micro"])
    check(case, sum(parts), want["loss_full"])


@cases("policy_loss", lambda case: case["raises"])
def test_what_verl_refuses_as_policy_loss_is_refused(case):
    with pytest.raises(ValueError):
        actor, correction = settings_of({"policy_loss.loss_mode": "vanilla", **case["params"]})
        _, batch = batch_of(values(case, "inputs"))
        policy_loss(actor, correction)(batch, actor)


# TRL's loss types in our words; its sequence level is gspo, its delta is clip_ratio_c.
TRL_LOSSES = {
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "bnpo": ("vanilla", "token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "luspo": ("gspo", "seq-mean-token-sum"),
    "vespo": ("vespo", "token-mean"),
}


def trl_actor(params):
    kind = params["loss_type"]
    mode, aggregation = TRL_LOSSES[kind]
    at_sequence = "importance_sampling_level" in params
    options = {key: params[key] for key in ("off_policy_mask_threshold", "top_entropy_quantile") if key in params}
    if at_sequence and kind in ("cispo", "sapo"):
        options["importance_sampling_level"] = "sequence"
    elif at_sequence:
        mode = "gspo"
    return ActorConfig(
        clip_ratio_low=1.0 if kind == "cispo" else params["epsilon"],
        clip_ratio_high=params["epsilon_high"] - (1 if kind == "cispo" else 0),
        clip_ratio_c=params.get("delta", 1e9),
        loss_agg_mode=aggregation,
        policy_loss=PolicyLossConfig(loss_mode=mode, **options),
    )


def trl_batch(given, params):
    leaf = torch.from_numpy(given["per_token_logps"]).clone().requires_grad_()
    old, weights = given.get("old_per_token_logps"), given.get("importance_sampling_ratio")
    mask = given["completion_mask"].astype(bool)
    if weights is not None and params["loss_type"] == "vespo":
        # The reference multiplies the weights of padding too, which are 1 wherever it makes them itself.
        weights = np.where(mask, weights, 1.0) * np.where(
            np.arange(mask.shape[1]) == 0, np.where(mask, 1.0, weights).prod(axis=1, keepdims=True), 1.0
        )
    return leaf, LossBatch(
        log_probs=leaf,
        old_log_probs=leaf.detach() if old is None else torch.from_numpy(old),
        advantages=torch.from_numpy(given["advantages"])[:, None].expand_as(leaf),
        mask=torch.from_numpy(mask),
        rollout_is_weights=None if weights is None else torch.from_numpy(weights).expand_as(leaf),
        entropy=torch.from_numpy(given["entropies"]),
    )


def trl_weights(params, mask, aggregation):
    """Weights of rows with TRL's counts: of tokens of the step, and of all rows of all its micro-batches."""
    counted = count_totals(mask.sum(dim=1).numpy(), np.arange(len(mask)))
    rows = len(mask) * params.get("gradient_accumulation_steps", 1)
    counted = replace(counted, tokens=params.get("num_items_in_batch", counted.tokens), sequences=rows)
    # 64 is the max_completion_length that the reference was run with; the cases do not name it.
    return torch.from_numpy(row_weights(counted, aggregation, scale=64))


@cases("trl_loss", lambda case: case["function"] == "_compute_loss")
def test_losses_and_gradients_equal_trls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    actor, (leaf, batch) = trl_actor(params), trl_batch(given, params)
    batch = replace(prepare_mini_batch(batch, actor, RolloutCorrectionConfig()), log_probs=leaf)
    per_token, _ = policy_loss(actor, RolloutCorrectionConfig())(batch, actor)
    if beta := params.get("beta"):
        ratio = probability_ratio(batch)[0] if params.get("use_bias_correction_kl") else None
        per_token = per_token + beta * kl_estimate(leaf, torch.from_numpy(given["ref_per_token_logps"]), "k3", ratio)
    weights = trl_weights(params, batch.mask, actor.loss_agg_mode)
    loss = aggregate(per_token, batch.mask, weights)
    if coefficient := params.get("entropy_coef"):
        by_token = trl_weights(params, batch.mask, "token-mean")
        loss = loss - coefficient * aggregate(torch.from_numpy(given["entropies"]), batch.mask, by_token)
    (gradient,) = torch.autograd.grad(loss, leaf)
    if case["name"] in DIFFERS:
        assert loss.item() != pytest.approx(want["loss"])
        return
    check(case, loss.item(), want["loss"])
    check(case, gradient.numpy(), want["grad_per_token_logps"])


# ------------------------------------------------------------------------------------------------------------------ KL


@cases("kl", lambda case: case["function"] == "kl_penalty" and not case["raises"])
def test_kl_estimates_and_gradients_equal_verls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    leaf = torch.from_numpy(given["logprob"]).clone().requires_grad_()
    kind = params.get("kl_penalty") or params["kl_loss_type"]
    kl = kl_estimate(leaf, torch.from_numpy(given["ref_logprob"]), kind)
    (gradient,) = torch.autograd.grad(kl.sum(), leaf)
    check(case, kl.detach(), want["kl"])
    check(case, gradient, want["grad_logprob"])


@cases("kl", lambda case: case["raises"])
def test_what_verl_refuses_as_kl_is_refused(case):
    with pytest.raises(ValueError):
        if "kl_ctrl.horizon" in case["params"]:
            KLControlConfig(type="adaptive", horizon=case["params"]["kl_ctrl.horizon"])
        else:
            kl_estimate(torch.zeros(1), torch.zeros(1), case["params"]["kl_penalty"])


@cases("kl", lambda case: case["function"] in ("compute_rewards", "apply_kl_penalty"))
def test_kl_in_the_reward_equals_verls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    old = given.get("old_log_probs", given.get("old_log_prob"))
    mask = given.get("response_mask", np.ones_like(old))
    coef = params.get("kl_ratio", params.get("kl_ctrl.kl_coef"))
    rewards, kl = kl_in_reward(
        np.full(len(old), np.nan),
        ragged(old),
        ragged(given["ref_log_prob"]),
        ragged(mask.astype(bool)),
        params.get("kl_penalty", "kl"),
        coef,
    )
    check(
        case, square(rewards, old) + given["token_level_scores"], want.get("token_level_rewards", want.get("rewards"))
    )
    if "coef_after" in want:
        cfg = KLControlConfig(**{k.split(".")[1]: v for k, v in params.items() if k.startswith("kl_ctrl.")})
        check(case, kl, want["metrics"]["actor/reward_kl_penalty"])
        check(case, next_kl_coef(coef, kl, len(old), cfg), want["coef_after"])


@cases("kl", lambda case: case["function"] == "get_kl_controller" and not case["raises"])
def test_the_kl_weight_moves_as_verls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    cfg = KLControlConfig(**{k.split(".")[1]: v for k, v in params.items() if k.startswith("kl_ctrl.")})
    coef, trace = cfg.kl_coef, []
    steps = np.broadcast_to(given["n_steps"], np.shape(given["current_kl"]))
    for kl, sequences in zip(given["current_kl"], steps, strict=True):
        coef = next_kl_coef(coef, float(kl), int(sequences), cfg)
        trace.append(coef)
    check(case, trace, want["coef_trace"])


@cases("other", lambda case: case["function"] == "compute_reward")
def test_clipped_rewards_less_kl_equal_openrlhfs(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    score = given["r"] if params["reward_clip_range"] is None else np.clip(given["r"], *params["reward_clip_range"])
    mask = given["action_mask"].astype(bool)
    zeros = np.zeros_like(given["kl"])
    got, _ = kl_in_reward(score, ragged(given["kl"]), ragged(zeros), ragged(mask), "k1", params["kl_coef"])
    near = {"tolerance": {"rtol": 1e-6, "atol": 1e-7}}  # token rewards are stored in float32
    # The reference subtracts KL outside the mask too.
    check(near, square(got, mask)[mask], want["token_level_rewards"][mask])


@cases("other", lambda case: "use_unbiased_kl" in case["params"])
def test_kl_times_the_ratio_equals_slimes(case):
    given, want, kind = values(case, "inputs"), values(case, "expected"), case["params"]["kl_loss_type"]
    log_probs, base = (torch.from_numpy(given[name]) for name in ("log_probs", "log_probs_base"))
    got = kl_estimate(log_probs, base, kind, torch.from_numpy(given["importance_ratio"]))
    # Ours bounds k3 by its short name too, as verl does; slime only low_var_kl.
    check(case, got, np.minimum(want["kl"], 10) if kind == "k3" else want["kl"])


@cases("other", lambda case: case["name"] == "other.nemo_kl.k3.f64")
def test_k3_equals_nemo_rls(case):
    given = values(case, "inputs")
    got = kl_estimate(torch.from_numpy(given["logprobs"]), torch.from_numpy(given["logprobs_reference"]), "k3")
    check(case, got, values(case, "expected")["kl"])


# -------------------------------------------------------------------------------------------------------- aggregation


@cases("agg", lambda case: not case["raises"])
def test_aggregation_equals_verls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    loss, mask = torch.from_numpy(given["loss_mat"]), torch.from_numpy(np.asarray(given["loss_mask"])).bool()
    counted = count_totals(mask.sum(dim=1).numpy(), np.arange(len(mask)))
    if "batch_num_tokens" in params:
        counted = replace(counted, tokens=params["batch_num_tokens"], sequences=params["global_batch_size"])
    weights = row_weights(counted, params["loss_agg_mode"], scale=params.get("loss_scale_factor", mask.shape[1]))
    check(case, aggregate(loss, mask, torch.from_numpy(weights)) * params.get("dp_size", 1), want["loss"])


@cases("agg", lambda case: case["raises"] and case["name"] == "agg.bad_mode")
def test_an_unknown_aggregation_is_refused(case):
    with pytest.raises(ValueError, match="loss_agg_mode='batch-mean'"):
        row_weights(count_totals(np.ones(2), np.arange(2)), case["params"]["loss_agg_mode"], scale=1)


SKYRL_MODES = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
}


@cases("other", lambda case: case["params"].get("loss_reduction") in SKYRL_MODES)
def test_loss_weights_of_tokens_equal_skyrls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    mask = given["loss_mask"].astype(bool)
    group = np.repeat(np.arange(3), 4)
    mode = SKYRL_MODES[params["loss_reduction"]]
    counted = replace(count_totals(mask.sum(axis=1), group), sequences=len(mask))
    weights = row_weights(counted, mode, scale=params["max_seq_len"])
    check(case, given["advantages"] * weights[:, None] * mask, want["scaled_advantages"] * mask)


@cases("masked", lambda case: case["function"] in ("masked_sum", "masked_mean"))
def test_masked_sums_and_means_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    numbers, mask = torch.from_numpy(given["values"]), torch.from_numpy(np.asarray(given["mask"])).bool()
    by_row = torch.where(mask, numbers, 0.0).sum(dim=-1)
    if case["params"]["axis"] is None:
        total = masked_sum(numbers, mask)
        got = total if case["function"] == "masked_sum" else total / mask.sum()
    else:
        got = by_row if case["function"] == "masked_sum" else sequence_mean(numbers, mask)
    check(case, got, want["out"])


@cases("masked", lambda case: case["function"] == "masked_whiten" and case["params"]["shift_mean"])
def test_whitening_equals_verls_inside_the_mask(case):
    given, want = values(case, "inputs"), values(case, "expected")
    inside = np.asarray(given["mask"]).astype(bool)
    got = whiten(given["values"][inside].astype(np.float64))
    if case["name"] in DIFFERS:
        assert (got == 0).all()
        np.testing.assert_allclose(want["out"][inside], 0, atol=1e-3)
    else:
        check(case, got, want["out"][inside])


@cases("masked", lambda case: case["raises"])
def test_variance_of_fewer_than_two_values_is_refused(case):
    given = values(case, "inputs")
    with pytest.raises(ValueError):
        whiten(given["values"][np.asarray(given["mask"]).astype(bool)])


# --------------------------------------------------------------------------------------------------- rollout correction


def correction_inputs(given):
    return ragged(given["rollout_log_prob"]), ragged(given["old_log_prob"]), ragged(given["response_mask"].astype(bool))


@cases("rollout_corr", lambda case: case["raises"])
def test_what_verl_refuses_as_rollout_correction_is_refused(case):
    with pytest.raises(ValueError):
        correct(*correction_inputs(values(case, "inputs")), RolloutCorrectionConfig(**case["params"]))


@cases("rollout_corr", lambda case: case["function"] == "calculate_debug_metrics")
def test_probability_gap_equals_verls(case):
    check_metrics(
        case, probability_gap(*correction_inputs(values(case, "inputs"))), values(case, "expected")["metrics"]
    )


@cases("rollout_corr", lambda case: case["function"] == "compute_offpolicy_metrics")
def test_off_policy_metrics_equal_verls(case):
    check_metrics(case, gap_metrics(*correction_inputs(values(case, "inputs"))), values(case, "expected")["metrics"])


@cases(
    "rollout_corr",
    lambda case: not case["raises"] and case["function"].startswith(("compute_rollout_corr", "compute_rollout_rej")),
)
def test_weights_rejection_and_metrics_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    cfg = RolloutCorrectionConfig(**case["params"])
    rollout, train, mask = correction_inputs(given)
    result = correct(rollout, train, mask, cfg)
    metrics = dict(result.metrics)
    if case["function"] != "compute_rollout_correction_and_rejection_mask":
        metrics = {k.removeprefix("rollout_corr/"): v for k, v in metrics.items() if "_is_" in k or "_rs_" in k}
    if "rollout_is_weights" in want:
        log_ratio = np.where(mask.values, train.values.astype(np.float64) - rollout.values, 0.0)
        weights = truncate(importance_weights(log_ratio, mask, cfg.rollout_is), parse_band(cfg.rollout_is_threshold))
        np.testing.assert_array_equal(result.weights.values, weights.astype(np.float32))
        if cfg.rollout_is_batch_normalize:
            metrics["rollout_is_batch_norm_factor"] = mean_weight(weights, mask, cfg.rollout_is)
            weights = weights / metrics["rollout_is_batch_norm_factor"]
        check(case, square(weights, given["response_mask"]), want["rollout_is_weights"])
    if "modified_response_mask" in want:
        check(case, square(result.mask, given["response_mask"]), want["modified_response_mask"])
    if "metrics" in want:
        check_metrics(case, metrics, want["metrics"])


@cases("other", lambda case: case["function"] == "compute_opsm_mask")
def test_the_off_policy_mask_equals_slimes(case):
    given, want = values(case, "inputs"), values(case, "expected")
    new, old, advantages = (torch.from_numpy(given[name]) for name in ("log_prob", "old_log_prob", "advantages"))
    mask = torch.from_numpy(given["response_mask"]).bool()
    keep = near_the_sampler(new, old, advantages, mask, case["params"]["opsm_delta"])
    check(case, keep[mask], want["keep"][mask.numpy()])
    dropped = sequence_mean((~keep).double(), mask).sum()
    check(case, dropped, want["opsm_clipfrac"])


SKYRL_RULES = {"compute_token_mask": "token_k1", "compute_outlier_token_mask": "seq_veto_k1"}
SKYRL_RULES |= {"geometric": "seq_mean_k1", "product": "seq_sum_k1"}


@cases("other", lambda case: {case["function"], case["params"].get("sequence_mask_metric")} & set(SKYRL_RULES))
def test_rejection_equals_skyrls_masks(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    rollout, train, mask = correction_inputs(given)
    bounds = [v for k, v in params.items() if k.endswith("_low")] + [
        v for k, v in params.items() if k.endswith("_high")
    ]
    rule = SKYRL_RULES[params.get("sequence_mask_metric", case["function"])]
    # k1 bounds the inverse ratio.
    rules = parse_rules(rule, f"{1 / bounds[1]}_{1 / bounds[0]}")
    kept = square(reject(train.values - rollout.values, mask, rules)[0], given["response_mask"])
    filled = given["response_mask"].astype(bool)
    if rule == "token_k1":
        np.testing.assert_array_equal(kept[filled], want["token_keep"].astype(bool)[filled])
    else:
        rows = filled.any(axis=1)
        np.testing.assert_array_equal(kept.any(axis=1)[rows], want["sequence_keep"].astype(bool).reshape(-1)[rows])


@cases("trl_loss", lambda case: case["function"] == "vllm_importance_sampling")
def test_importance_weights_equal_trls(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    mask = ragged(given["completion_mask"].astype(bool))
    log_ratio = (given["old_per_token_logps"] - given["sampling_per_token_logps"]).reshape(-1) * mask.values
    bounds = [params[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max")]
    level, mode = params["vllm_importance_sampling_mode"].split("_")
    band = parse_band("_".join(str(bound) for bound in bounds if bound is not None), mode)
    weights = square(truncate(importance_weights(log_ratio, mask, level), band), given["completion_mask"])
    filled = given["completion_mask"].astype(bool)
    check(case, weights[filled], np.broadcast_to(want["importance_sampling_ratio"], filled.shape)[filled])


OPENRLHF_CORRECTIONS = {
    "tis": {"rollout_is_mode": "truncate"},
    "icepop": {"rollout_is_mode": "mask"},
    # It keeps the weights of kept sequences as they are.
    "seq-mask-tis": {"rollout_rs": "seq_mean_k1", "rollout_is_threshold": 1e6},
}


@cases("other", lambda case: "is_correction_type" in case["params"])
def test_corrected_losses_and_gradients_equal_openrlhfs(case):
    given, want, params = values(case, "inputs"), values(case, "expected"), case["params"]
    low, high = params["is_correction_threshold"]
    options = {"rollout_is_threshold": f"{low}_{high}", **OPENRLHF_CORRECTIONS[params["is_correction_type"]]}
    cfg = RolloutCorrectionConfig(rollout_is="token", rollout_rs_threshold=f"{1 / high}_{1 / low}", **options)
    mask = ragged(given["response_mask"].astype(bool))
    result = correct(ragged(given["rollout_log_probs"]), ragged(given["old_log_prob"]), mask, cfg)
    leaf, batch = batch_of(given)
    # A rejected token stays in the reference's divisor.
    weights = torch.from_numpy(square(result.weights, leaf) * square(result.mask, leaf)).double()
    actor = ActorConfig(
        clip_ratio_low=params["eps_clip_low_high"][0], clip_ratio_high=params["eps_clip_low_high"][1], clip_ratio_c=1e9
    )
    loss, gradient, metrics = loss_of(
        replace(batch, rollout_is_weights=weights), actor, RolloutCorrectionConfig(), leaf
    )
    near = {"tolerance": {"rtol": 1e-6, "atol": 1e-7}}  # weights are stored in float32
    check(near, loss, want["loss"])
    check(near, gradient, want["grad_log_prob"])
    check(near, metrics["pg_clipfrac"], want["metrics"]["ppo_clip_ratio"])
    check(near, metrics["ppo_kl"], want["metrics"]["ppo_kl"])


# --------------------------------------------------------------------------------------------------------- from logits


def from_logits(logits, targets, temperature=1.0):
    """([n] log-probs, [n] entropies) of a head whose logits are what it is fed."""
    head = SimpleNamespace(config=SimpleNamespace(vocab_size=logits.shape[-1]), logits=lambda hidden: hidden)
    flat = logits.reshape(-1, logits.shape[-1])
    return token_log_probs(head, flat, targets.reshape(-1), temperature=temperature, entropy=True)


FROM_LOGITS = (
    "logprobs_from_logits",
    "logprobs_from_logits_naive",
    "selective_log_softmax",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
)


def check_from_logits(case):
    given, want = values(case, "inputs"), values(case, "expected")
    logits = torch.from_numpy(given["logits"]).clone().requires_grad_()
    targets = torch.from_numpy(given.get("labels", given.get("index", np.zeros(logits.shape[:-1], dtype=np.int64))))
    log_probs, entropy, _ = from_logits(logits, targets, case["params"].get("temperature", 1.0))
    got = entropy if case["function"].startswith("entropy") else log_probs
    if case["name"] in DIFFERS:
        case = {**case, "tolerance": {"rtol": 1e-5, "atol": 1e-4}}
    check(case, got.detach().reshape(want["out"].shape), want["out"])
    if "grad_logits" in want:
        (gradient,) = torch.autograd.grad(got.sum(), logits)
        check(case, gradient, want["grad_logits"])


@cases("logits", lambda case: case["function"] in FROM_LOGITS)
def test_log_probs_and_entropies_equal_verls(case):
    check_from_logits(case)


@cases("trl_loss", lambda case: case["function"] in FROM_LOGITS)
def test_log_probs_and_entropies_equal_trls(case):
    check_from_logits(case)


@cases("logits", lambda case: case["function"] == "compute_entropy_loss")
def test_aggregated_entropies_equal_verls(case):
    given, want = values(case, "inputs"), values(case, "expected")
    mask = torch.from_numpy(given["response_mask"]).bool()
    logits = torch.from_numpy(given["logits"])
    _, entropy, _ = from_logits(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))
    counted = count_totals(mask.sum(dim=1).numpy(), np.arange(len(mask)))
    weights = torch.from_numpy(row_weights(counted, case["params"]["loss_agg_mode"], scale=mask.shape[1]))
    check(case, aggregate(entropy.reshape(mask.shape), mask, weights), want["entropy_loss"])


# ------------------------------------------------------------------------------------------------------------ coverage

NOT_OFFERED = {
    "other.loss_reduction.token_mean_legacy.f64": "a mean over micro-batches' means depends on how the batch is cut",
    "other.nemo_kl.k1.f64": "clamps k1, which verl leaves as it is",
    "other.nemo_kl.k2.f64": "clamps k2, which verl leaves as it is",
    "other.prime.default.f64": "dppo_tv drops by the same bounds, but has no squared log ratio beside it",
    "other.prime.ipo.f64": "a mask by |p_new - p_old| whatever the advantage, and a squared log ratio",
}
"""Cases that stand for another project's rule, and why it is not one of ours."""

READ_WHOLE_ELSEWHERE = {"reward", "schedule"}
"""test_rewards.py and test_worker_optim.py read these."""


def test_every_golden_case_is_compared_or_named_as_not_offered():
    compared = set()
    for path in Path(__file__).parent.glob("test_golden*.py"):
        for function in vars(importlib.import_module(path.stem)).values():
            for mark in getattr(function, "pytestmark", []):
                if mark.name == "parametrize" and mark.args[0] == "case":
                    compared |= {case["name"] for case in mark.args[1]}
    files = [path for path in FOLDER.glob("*.json") if path.stem not in READ_WHOLE_ELSEWHERE]
    names = {case["name"]: path.stem for path in files for case in json.loads(path.read_text())}
    assert set(names) - compared == set(NOT_OFFERED)
    assert {names[name] for name in NOT_OFFERED} == {"other"}
