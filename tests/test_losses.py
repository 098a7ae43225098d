"""Policy losses: by hand on one token, and what must hold for every loss, aggregation and correction."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.ragged import Ragged
from tasks.algorithms.aggregation import aggregate, count_totals, row_weights
from tasks.algorithms.losses import (
    LossBatch,
    aggregation_mode,
    loss_mode,
    needs_current_log_probs,
    needs_entropy,
    policy_loss,
    prepare_mini_batch,
    why_skipped,
)
from tasks.algorithms.token_masks import highest_entropy, near_the_sampler
from tasks.algorithms.variants import LOSSES
from tasks.config import ActorConfig, LossAggregation, PolicyLossConfig, RolloutCorrectionConfig, RunConfig
from tasks.workers.forward import Layout
from tasks.workers.mini_batch import MiniBatch, Signals

OFF = RolloutCorrectionConfig()
SEEDS = st.integers(0, 2**32 - 1)


def actor_with(mode, **options):
    loss = {key: options.pop(key) for key in list(options) if key in PolicyLossConfig.model_fields}
    loss.setdefault("dro_beta", 0.1)
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, **loss), **options)


def one_token(ratio, advantage, mode="vanilla", **options):
    """(loss, metrics) of one token with the given ratio of new to old probability; the new one is 0.5."""
    new = torch.tensor([[0.5]], dtype=torch.float64).log()
    batch = LossBatch(new, new - np.log(ratio), torch.full_like(new, advantage), torch.ones_like(new, dtype=torch.bool))
    loss, metrics = LOSSES[mode].load()(batch, actor_with(mode, **options))
    return loss.item(), {name: value.item() for name, value in metrics.items()}


def random_batch(seed, rows=6, width=7, *, weights=False, spread=0.4):
    """Rows of 0 to `width` loss tokens, with holes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, width + 1, rows)
    lengths[rng.integers(rows)] = max(1, lengths.max())
    mask = (np.arange(width) < lengths[:, None]) & (rng.random((rows, width)) > 0.1)
    mask[:, 0] = lengths > 0
    new = -rng.exponential(1.0, (rows, width))
    old = new - rng.normal(0, spread, (rows, width))
    tensors = [torch.from_numpy(np.where(mask, x, 0.0)) for x in (new, old, rng.normal(0, 1, (rows, width)))]
    importance = torch.from_numpy(np.where(mask, rng.uniform(0, 2, (rows, width)), 0.0)) if weights else None
    entropy, gap = rng.uniform(0, 3, (rows, width)), rng.normal(0, 0.1, (rows, width))
    more = {"rollout_log_probs": tensors[1] + torch.from_numpy(gap), "entropy": torch.from_numpy(entropy)}
    more["token"] = torch.arange(rows * width).view(rows, width)
    return LossBatch(*tensors, torch.from_numpy(mask), importance, **more), rng


def take(batch, rows):
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return LossBatch(**{name: value[rows] if torch.is_tensor(value) else value for name, value in tensors.items()})


def loss_and_gradient(batch, group, actor, correction, parts):
    """Loss and gradient of a mini-batch cut into the given parts."""
    prepared = prepare_mini_batch(batch, actor, correction)
    leaf = batch.log_probs.clone().requires_grad_()
    totals = count_totals(prepared.mask.sum(dim=1).numpy(), group)
    weights = torch.from_numpy(row_weights(totals, aggregation_mode(actor, correction), scale=9.0))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        piece = replace(take(prepared, part), log_probs=leaf[part])
        per_token, _ = policy_loss(actor, correction)(piece, actor)
        total = total + aggregate(per_token, piece.mask, weights[part])
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.item(), gradient


# ------------------------------------------------------------------------------------------------------------- by hand


def test_vanilla_is_the_ratio_times_the_advantage_inside_the_clip_range():
    loss, metrics = one_token(1.1, 2.0)
    assert loss == pytest.approx(-2.2)
    assert metrics == {"pg_clipfrac": 0, "pg_clipfrac_lower": 0, "ppo_kl": pytest.approx(-np.log(1.1))}


def test_vanilla_clips_above_for_positive_and_below_for_negative_advantages():
    assert one_token(1.5, 2.0, clip_ratio_high=0.28)[0] == pytest.approx(-2 * 1.28)
    assert one_token(0.5, -2.0, clip_ratio_low=0.2)[0] == pytest.approx(2 * 0.8)
    assert one_token(1.5, 2.0)[1]["pg_clipfrac"] == 1


def test_vanilla_leaves_a_ratio_that_moves_against_its_advantage():
    assert one_token(0.5, 2.0)[0] == pytest.approx(-1.0)
    assert one_token(2.5, -2.0)[0] == pytest.approx(5.0)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    loss, metrics = one_token(8.0, -2.0, clip_ratio_c=3.0)
    assert loss == pytest.approx(6.0)
    assert metrics["pg_clipfrac_lower"] == 1
    assert one_token(8.0, 2.0, clip_ratio_c=3.0)[1]["pg_clipfrac_lower"] == 0


def test_cispo_weighs_the_log_prob_by_the_clipped_ratio():
    assert one_token(2.0, 1.0, "cispo", clip_ratio_high=0.5)[0] == pytest.approx(-1.5 * np.log(0.5))


def test_sapo_is_the_plain_policy_gradient_at_ratio_one():
    batch, _ = random_batch(0, spread=0.0)
    leaf = batch.log_probs.clone().requires_grad_()
    loss, _ = LOSSES["sapo"].load()(replace(batch, log_probs=leaf), actor_with("sapo"))
    (gradient,) = torch.autograd.grad(loss[batch.mask].sum(), leaf)
    torch.testing.assert_close(gradient[batch.mask], -batch.advantages[batch.mask])


def test_dro_adds_half_beta_times_the_squared_log_ratio():
    assert one_token(2.0, 1.0, "dro", dro_beta=0.5)[0] == pytest.approx(-np.log(0.5) + 0.25 * np.log(2) ** 2)


def test_dro_without_beta_is_refused_with_its_key():
    batch, _ = random_batch(0)
    with pytest.raises(ValueError, match="dro_beta"):
        LOSSES["dro"].load()(batch, ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dro")))


def test_dppo_drops_a_token_whose_probability_rose_too_far():
    assert one_token(2.0, 1.0, "dppo_tv", clip_ratio_high=0.2)[0] == 0  # 0.25 -> 0.5
    assert one_token(2.0, 1.0, "dppo_tv", clip_ratio_high=0.3, clip_ratio_c=20.0)[0] == pytest.approx(-2 * np.log(0.5))
    assert one_token(2.0, -1.0, "dppo_tv", clip_ratio_low=0.2, clip_ratio_c=20.0)[0] != 0


def test_gspo_gives_every_token_the_ratio_of_its_sequence():
    loss, _ = LOSSES["gspo"].load()(two_tokens(), actor_with("gspo"))
    torch.testing.assert_close(loss, torch.full_like(loss, -float(np.exp(0.1))))


def two_tokens(advantage=1.0, **more):
    """Log ratios 0.3 and -0.1, mean 0.1."""
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    old = new - torch.tensor([[0.3, -0.1]], dtype=torch.float64)
    return LossBatch(new, old, torch.full_like(new, advantage), torch.ones_like(new, dtype=torch.bool), **more)


def test_cispo_and_sapo_take_the_ratio_of_the_sequence_where_told():
    batch = two_tokens()
    ratio = float(np.exp(0.1))
    loss, _ = LOSSES["cispo"].load()(batch, actor_with("cispo", importance_sampling_level="sequence"))
    torch.testing.assert_close(loss, -ratio * batch.log_probs)
    loss, _ = LOSSES["sapo"].load()(batch, actor_with("sapo", importance_sampling_level="sequence"))
    torch.testing.assert_close(loss, torch.full_like(loss, -4 / (1 + np.exp(1 - ratio))))


def test_vespo_reshapes_the_product_of_the_ratios_by_the_sign_of_the_advantage():
    assert one_token(2.0, 1.0, "vespo")[0] == pytest.approx(-(2**2) * np.exp(3 * (1 - 2)) * np.log(0.5))
    assert one_token(2.0, -1.0, "vespo")[0] == pytest.approx(2**3 * np.exp(2 * (1 - 2)) * np.log(0.5))
    assert one_token(2.0, 1.0, "vespo", vespo_k_pos=0, vespo_lambda_pos=0)[0] == pytest.approx(-np.log(0.5))
    loss, _ = LOSSES["vespo"].load()(two_tokens(), actor_with("vespo"))
    weight = np.exp(2 * 0.2 + 3 * (1 - np.exp(0.2)))
    torch.testing.assert_close(loss, torch.tensor([[weight, 2 * weight]], dtype=torch.float64))


@pytest.mark.parametrize(("level", "weights", "product"), [("token", [2.0, 0.5], 1.0), ("sequence", [2.0, 2.0], 2.0)])
def test_vespo_multiplies_the_weights_of_a_sequence_into_its_ratio(level, weights, product):
    batch = two_tokens(rollout_is_weights=torch.tensor([weights], dtype=torch.float64))
    actor = actor_with("vespo")
    batch = prepare_mini_batch(batch, actor, RolloutCorrectionConfig(rollout_is=level))
    loss, _ = LOSSES["vespo"].load()(batch, actor)
    ratio = np.exp(0.2) * product
    assert loss[0, 0].item() == pytest.approx(ratio**2 * np.exp(3 * (1 - ratio)))


def test_a_sequence_far_from_the_sampler_is_dropped_if_its_advantage_is_negative():
    new = torch.tensor([[-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    sampler = new + torch.tensor([[0.3, 0.1, 9.0], [0.3, 0.1, 0.2], [0.1, 0.1, 0.0]])
    mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    advantages = torch.tensor([[-1.0], [1.0], [-1.0]]).expand(3, 3)
    near = near_the_sampler(new, sampler, advantages, mask, 0.15)
    assert near.tolist() == [[False] * 3, [True] * 3, [True] * 3]


def test_the_mask_compares_with_the_sampler_and_without_it_with_the_old_policy():
    actor = actor_with("vanilla", off_policy_mask_threshold=0.5)
    batch = two_tokens(-1.0)
    far = replace(batch, rollout_log_probs=batch.log_probs + 1)
    for x, dropped in ((batch, 0), (far, 1)):
        loss, metrics = policy_loss(actor, OFF)(prepare_mini_batch(x, actor, OFF), actor)
        assert (loss == 0).all() == bool(dropped)
        assert metrics["off_policy_masked"].tolist() == [[dropped, dropped]]


def test_the_tokens_of_highest_entropy_are_those_above_the_quantile_of_the_mini_batch():
    entropy = torch.tensor([[0.1, 0.9, 5.0], [0.5, 0.3, 0.7]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert highest_entropy(entropy, mask, 0.4).tolist() == [[False, True, False], [False, False, True]]
    assert highest_entropy(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), 0.1).all()
    assert not highest_entropy(entropy, torch.zeros_like(mask), 0.4).any()


def test_tokens_that_are_masked_out_stay_in_the_divisor():
    actor = actor_with("gpg", top_entropy_quantile=0.5)
    batch = two_tokens(entropy=torch.tensor([[1.0, 0.0]]))
    assert needs_entropy(actor)
    assert not needs_entropy(actor_with("gpg"))
    loss, gradient = loss_and_gradient(batch, np.zeros(1), actor, OFF, [[0]])
    assert loss == pytest.approx(1.0 / 2)
    assert gradient.tolist() == [[-0.5, 0.0]]


def test_geo_mean_counts_the_mean_log_ratio_of_the_sequence():
    loss, _ = LOSSES["geo_mean"].load()(two_tokens(2.0), actor_with("geo_mean", clip_ratio=0.2))
    torch.testing.assert_close(loss, torch.full_like(loss, -2 * float(np.exp((0.2 - 0.1) / 2))))


def test_kl_cov_penalises_the_tokens_with_the_largest_covariance():
    new = torch.tensor([[-0.1, -1.0, -3.0, -2.0]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, 0.0, -0.5, 0.5]], dtype=torch.float64)
    batch = LossBatch(new, new, advantages, torch.ones_like(new, dtype=torch.bool))
    prepared = prepare_mini_batch(batch, actor_with("kl_cov", kl_cov_ratio=0.3), OFF)
    assert prepared.selected.tolist() == [[True, False, False, False]]


def test_clip_cov_takes_no_more_than_its_share_and_only_from_the_band():
    batch, _ = random_batch(3, rows=40)
    actor = actor_with("clip_cov", clip_cov_ratio=0.1, clip_cov_lb=-0.2, clip_cov_ub=0.2)
    selected = prepare_mini_batch(batch, actor, OFF).selected
    tokens = batch.mask.sum()
    centred = [x - x[batch.mask].mean() for x in (batch.advantages, batch.log_probs)]
    covariance = centred[0] * centred[1]
    assert selected.sum() == int(tokens * 0.1)
    assert (covariance[selected].abs() < 0.2).all()
    assert (batch.mask | ~selected).all()


def identical_siblings(advantages):
    """One response of four tokens, sampled once for each advantage."""
    new = torch.tensor([[-0.1, -1.0, -3.0, -2.0]], dtype=torch.float64).repeat(len(advantages), 1)
    rows = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(new).clone()
    token = torch.arange(new.numel()).view_as(new)
    return LossBatch(new, new - 0.05, rows, torch.ones_like(new, dtype=torch.bool), token=token)


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("advantages", [[1.0, -1.0] * 3, [2.0, -1, 1, 0, -2, 0]])
def test_equal_tokens_are_told_apart_by_their_number_in_the_batch(mode, advantages):
    actor = actor_with(mode, clip_cov_ratio=0.2, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0.2)
    batch = identical_siblings(advantages)
    selected = prepare_mini_batch(batch, actor, OFF).selected
    assert selected.sum() == int(0.2 * 24)
    for seed in range(5):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(6))
        assert torch.equal(prepare_mini_batch(take(batch, order), actor, OFF).selected, selected[order])


def test_clip_cov_draws_identical_siblings_one_by_one():
    actor = actor_with("clip_cov", clip_cov_ratio=0.25, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    selected = prepare_mini_batch(identical_siblings([1.0, -1.0] * 20), actor, OFF).selected
    assert len(set(selected.sum(dim=0).tolist())) > 1 or len({tuple(row) for row in selected.tolist()}) > 1
    assert selected.sum(dim=0).min() >= 5  # of 40 at each place, 10 expected


@pytest.mark.parametrize("advantage", [0.0, 0.7])
def test_kl_cov_selects_nothing_where_no_token_stands_out(advantage):
    batch = identical_siblings([advantage] * 6)
    batch = replace(batch, log_probs=batch.log_probs.float(), advantages=batch.advantages.float())
    assert not prepare_mini_batch(batch, actor_with("kl_cov", kl_cov_ratio=0.5), OFF).selected.any()


def test_log_probs_that_differ_by_rounding_have_one_covariance():
    batch = identical_siblings([1.0, -1.0] * 3)
    actor = actor_with("kl_cov", kl_cov_ratio=0.15)
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, 1e-6, (6, 4)))
    moved = replace(batch, log_probs=batch.log_probs + noise)
    assert torch.equal(*(prepare_mini_batch(x, actor, OFF).selected for x in (batch, moved)))


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_a_share_of_zero_selects_nothing(mode):
    actor = actor_with(mode, clip_cov_ratio=0, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0)
    assert not prepare_mini_batch(identical_siblings([1.0, -1.0] * 3), actor, OFF).selected.any()


@pytest.mark.parametrize(("level", "mean"), [("token", 1.5), ("sequence", 1.375)])
def test_weights_are_averaged_over_the_tokens_before_rejection_in_both_modes(level, mean):
    # Means over tokens: (0.5 + 2 + 2 + 1.5) / 4; over sequences: (1.5 + 1.25) / 2.
    weights = {"token": [[0.5, 2.0, 2.0], [1.5, 0.0, 0.0]], "sequence": [[1.5] * 3, [1.25, 0.0, 0.0]]}[level]
    before = torch.tensor([[True] * 3, [True, False, False]])
    mask = torch.tensor([[True, False, False], [False] * 3])
    new = torch.full((2, 3), -1.0, dtype=torch.float64)
    weights = torch.tensor(weights, dtype=torch.float64)
    batch = LossBatch(new, new, torch.ones_like(new), mask, weights, before_rejection=before)
    cfg = RolloutCorrectionConfig(rollout_is=level, rollout_is_batch_normalize=True)
    prepared = prepare_mini_batch(batch, actor_with("vanilla"), cfg)
    torch.testing.assert_close(prepared.rollout_is_weights, weights / mean)

    gap = torch.tensor([[np.log(0.5), np.log(2), np.log(2)], [np.log(1.5), 0, 0]], dtype=torch.float64)
    bypass = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type="reinforce",
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.9_3",
    )
    batch = LossBatch(new, new - gap, torch.ones_like(new), before)
    prepared = prepare_mini_batch(batch, actor_with("reinforce"), bypass)
    assert prepared.mask.tolist() == mask.tolist()
    assert prepared.rollout_is_weights[0, 0].item() == pytest.approx(0.5 / 1.5)


def test_a_mini_batch_knows_its_tokens_by_their_place_in_the_step_and_the_mask_before_rejection():
    lengths = [2, 3, 1]
    nothing = Ragged.from_lengths(np.zeros(6, dtype=np.float32), lengths)
    mask = Ragged.from_lengths(np.array([True, False, True, True, False, True]), lengths)
    signals = Signals(
        nothing, mask, nothing, None, nothing, np.zeros(3, np.int64), in_loss=np.array([True, False, True])
    )
    batch = MiniBatch(RunConfig(), SimpleNamespace(device="cpu"), None, signals, layout=Layout.PADDED)
    rows = np.array([2, 0, 1])
    assert batch._token_numbers(rows, 3).tolist() == [[5, 6, 7], [0, 1, 2], [2, 3, 4]]
    assert batch._before_rejection(rows, 3).tolist() == [[True, False, False], [True, True, False], [False] * 3]


# ------------------------------------------------------------------------------------------------- what holds for all


CORRECTIONS = {
    "none": OFF,
    "normalised": RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True),
    "sequence": RolloutCorrectionConfig(rollout_is="sequence"),
    "bypass_clip": RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.6"),
    "bypass_reinforce": RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type="reinforce",
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="seq_mean_k3",
        rollout_rs_threshold="0.2",
    ),
}


MASKS = {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6}
OPTIONS = {"plain": {}, "masked": {**MASKS, "importance_sampling_level": "sequence"}}

# Bypass mode chooses the loss itself.
PAIRS = [(m, c) for m in LOSSES for c in CORRECTIONS if m == "vanilla" or not CORRECTIONS[c].bypass_mode]


@pytest.mark.parametrize(("mode", "correction"), PAIRS)
@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
@settings(max_examples=4)
@given(seed=SEEDS, options=st.sampled_from(list(OPTIONS)))
def test_loss_and_gradient_do_not_depend_on_cut_and_order(mode, aggregation, correction, options, seed):
    correction = CORRECTIONS[correction]
    batch, rng = random_batch(seed, weights=correction.rollout_is is not None and not correction.bypass_mode)
    group = rng.integers(0, 3, len(batch.mask))
    options = {**OPTIONS[options], "clip_cov_lb": -1.0, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2}
    actor = actor_with(mode, loss_agg_mode=aggregation, **options)
    rows = np.arange(len(group))
    loss, gradient = loss_and_gradient(batch, group, actor, correction, [rows])
    cuts = np.sort(rng.choice(rows[1:], rng.integers(0, len(rows)), replace=False))
    cut_loss, cut_gradient = loss_and_gradient(batch, group, actor, correction, np.split(rng.permutation(rows), cuts))
    order = rng.permutation(rows)
    moved_loss, moved = loss_and_gradient(take(batch, order), group[order], actor, correction, np.split(rows, cuts))
    for other_loss, other in ((cut_loss, cut_gradient), (moved_loss, moved[np.argsort(order)])):
        assert other_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_b37_eight_rows_of_very_different_length_give_one_loss_for_every_micro_batch_size(aggregation):
    rng = np.random.default_rng(0)
    lengths = np.array([1, 2, 3, 7, 12, 20, 33, 40])
    mask = torch.from_numpy(np.arange(40) < lengths[:, None])
    new = torch.from_numpy(-rng.exponential(1.0, (8, 40))) * mask
    old = new + torch.from_numpy(rng.normal(0, 0.3, (8, 40))) * mask
    batch = LossBatch(new, old, torch.from_numpy(rng.normal(size=(8, 1))).expand(8, 40), mask)
    actor, group, rows = actor_with("vanilla", loss_agg_mode=aggregation), np.arange(8) // 4, np.arange(8)
    whole = loss_and_gradient(batch, group, actor, OFF, [rows])
    for size in (1, 2, 4):
        parts = loss_and_gradient(batch, group, actor, OFF, [rows[i : i + size] for i in range(0, 8, size)])
        assert parts[0] == pytest.approx(whole[0], rel=1e-12)
        torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-15)


LOG_PROBS = st.lists(st.one_of(st.floats(-1e4, 0, width=32), st.sampled_from([0.0, -1e-30, -1e4])), min_size=6)


@pytest.mark.parametrize("mode", LOSSES)
@settings(max_examples=30)
@given(
    seed=SEEDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    new=LOG_PROBS,
    old=LOG_PROBS,
    largest=st.sampled_from([0.0, 1.0, 1e6]),
    options=st.sampled_from(list(OPTIONS)),
    weight=st.sampled_from([None, 0.0, 1e-9, 5e8]),
)
def test_loss_and_gradient_are_finite_for_log_probs_however_far_apart(
    mode, seed, dtype, new, old, largest, options, weight
):
    rng = np.random.default_rng(seed)
    new, old = (torch.tensor(np.resize(x, (4, 6)), dtype=dtype) for x in (new, old))
    advantages = torch.from_numpy(rng.uniform(-largest, largest, (4, 6))).to(dtype)
    batch = LossBatch(
        new,
        old,
        advantages,
        torch.from_numpy(rng.random((4, 6)) > 0.2),
        None if weight is None else torch.where(torch.from_numpy(rng.random((4, 6)) > 0.5), weight, 1.0).to(dtype),
        entropy=-new,
    )
    actor = actor_with(mode, clip_cov_lb=-1e9, kl_cov_ratio=0.3, **OPTIONS[options])
    leaf = new.clone().requires_grad_()
    batch = replace(prepare_mini_batch(batch, actor, OFF), log_probs=leaf)
    loss, metrics = policy_loss(actor, OFF)(batch, actor)
    (gradient,) = torch.autograd.grad(loss.float().sum(), leaf)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value).all() for value in metrics.values())


NO_STOPPED_GRADIENT = ("vanilla", "sapo", "geo_mean", "gpg", "reinforce", "dro", "clip_cov", "kl_cov")


@pytest.mark.parametrize("mode", NO_STOPPED_GRADIENT)
@pytest.mark.parametrize("options", [{}, MASKS], ids=["plain", "masked"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_finite_differences(mode, seed, options):
    batch, _ = random_batch(seed, weights=True)
    actor = actor_with(mode, clip_cov_lb=-1.0, clip_cov_ratio=0.2, kl_cov_ratio=0.2, **options)
    prepared = prepare_mini_batch(batch, actor, OFF)

    def total(log_probs):
        loss, _ = policy_loss(actor, OFF)(replace(prepared, log_probs=log_probs), actor)
        return torch.where(batch.mask, loss, 0.0).sum()

    assert torch.autograd.gradcheck(total, batch.log_probs.clone().requires_grad_(), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("mode", sorted(set(LOSSES) - set(NO_STOPPED_GRADIENT)))
def test_where_the_weight_is_held_the_gradient_is_the_weight_times_the_advantage(mode):
    batch, _ = random_batch(5, spread=0.1)
    actor = actor_with(mode, clip_ratio=0.9, clip_ratio_c=20.0)
    leaf = batch.log_probs.clone().requires_grad_()
    loss, _ = policy_loss(actor, OFF)(replace(batch, log_probs=leaf), actor)
    (gradient,) = torch.autograd.grad(torch.where(batch.mask, loss, 0.0).sum(), leaf)
    log_ratio = batch.log_probs - batch.old_log_probs
    if mode == "gspo":
        tokens = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = ((log_ratio * batch.mask).sum(dim=1, keepdim=True) / tokens).expand_as(log_ratio)
    weight = log_ratio.exp()
    if mode == "vespo":
        whole = (log_ratio * batch.mask).sum(dim=1, keepdim=True).exp()
        positive = batch.advantages >= 0
        weight = torch.where(positive, whole**2 * (3 * (1 - whole)).exp(), whole**3 * (2 * (1 - whole)).exp())
    want = -batch.advantages * weight
    torch.testing.assert_close(gradient[batch.mask], want[batch.mask])


@pytest.mark.parametrize("mode", LOSSES)
def test_at_ratio_one_every_loss_has_the_plain_policy_gradient(mode):
    batch, _ = random_batch(7, spread=0.0)
    advantages = batch.advantages[:, :1].expand_as(batch.advantages)
    batch = replace(batch, advantages=advantages)
    actor = actor_with(mode, clip_cov_lb=1e6, clip_cov_ub=2e6, kl_cov_ratio=0.0, loss_agg_mode="seq-mean-token-mean")
    rows, group = np.arange(len(advantages)), np.arange(len(advantages))
    _, gradient = loss_and_gradient(batch, group, actor, OFF, [rows])
    _, plain = loss_and_gradient(batch, group, actor_with("gpg", loss_agg_mode="seq-mean-token-mean"), OFF, [rows])
    torch.testing.assert_close(gradient, plain)


def test_padding_outside_the_mask_changes_nothing():
    for mode in LOSSES:
        batch, _ = random_batch(11)
        actor = actor_with(mode, kl_cov_ratio=0.2)
        noise = torch.where(batch.mask, 0.0, torch.randn(batch.mask.shape, dtype=torch.float64))
        other = replace(
            batch,
            log_probs=batch.log_probs + noise,
            old_log_probs=batch.old_log_probs - noise,
            advantages=batch.advantages + noise,
        )
        rows = np.arange(len(batch.mask))
        clean, gradient = loss_and_gradient(batch, rows, actor, OFF, [rows])
        noisy, noisy_gradient = loss_and_gradient(other, rows, actor, OFF, [rows])
        assert noisy == pytest.approx(clean)
        torch.testing.assert_close(noisy_gradient, gradient)


# ------------------------------------------------------------------------------------------------------- which and when


def test_an_unknown_loss_is_refused_with_the_known_ones():
    actor = ActorConfig.model_construct(policy_loss=PolicyLossConfig.model_construct(loss_mode="nope"))
    with pytest.raises(ValueError, match="'nope' is unknown; there are vanilla, gspo"):
        policy_loss(actor, OFF)


def test_bypass_mode_reaches_the_loss():
    actor = actor_with("gspo")
    clip = RolloutCorrectionConfig(bypass_mode=True)
    plain = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
    assert loss_mode(actor, clip) == "vanilla"
    assert loss_mode(actor, plain) == "reinforce"
    assert not needs_current_log_probs(actor, clip)
    assert needs_current_log_probs(actor, plain)


def test_bypass_with_reinforce_weighs_each_token_by_the_current_policy_over_the_sampler():
    batch, _ = random_batch(2, spread=0.2)
    correction = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
    prepared = prepare_mini_batch(batch, actor_with("vanilla"), correction)
    ratio = (batch.log_probs - batch.old_log_probs).exp().clamp(max=2.0)
    torch.testing.assert_close(prepared.rollout_is_weights, torch.where(batch.mask, ratio, 0.0), rtol=1e-6, atol=1e-7)


def test_normalised_weights_have_mean_one_over_the_mini_batch():
    batch, _ = random_batch(4, weights=True)
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True)
    prepared = prepare_mini_batch(batch, actor_with("vanilla"), correction)
    assert prepared.rollout_is_weights[batch.mask].mean().item() == pytest.approx(1.0)


def test_an_empty_mini_batch_and_zero_weights_are_reasons_to_skip():
    batch, _ = random_batch(4, weights=True)
    assert why_skipped(batch) is None
    assert why_skipped(replace(batch, mask=torch.zeros_like(batch.mask))) == "no token is in the loss"
    zeros = replace(batch, rollout_is_weights=torch.zeros_like(batch.log_probs))
    assert why_skipped(zeros) == "all importance weights are 0"


@pytest.mark.parametrize(("mode", "correction"), PAIRS)
def test_a_mini_batch_without_loss_tokens_is_prepared_without_nan(mode, correction):
    batch, _ = random_batch(4, weights=True)
    batch = replace(batch, mask=torch.zeros_like(batch.mask))
    prepared = prepare_mini_batch(batch, actor_with(mode), CORRECTIONS[correction])
    assert why_skipped(prepared) is not None
