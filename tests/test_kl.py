"""KL to the reference: estimators, their bounds, KL in the reward, and the weight's controller."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.ragged import Ragged
from tasks.algorithms.kl import kl_clamped, kl_estimate, kl_in_reward, next_kl_coef
from tasks.config import KLControlConfig, KLType

KINDS = get_args(KLType)


def value_and_gradient(log_prob, ref_log_prob, kind, dtype=torch.float64):
    leaf = torch.tensor([log_prob], dtype=dtype, requires_grad=True)
    kl = kl_estimate(leaf, torch.tensor([ref_log_prob], dtype=dtype), kind)
    (gradient,) = torch.autograd.grad(kl.sum(), leaf)
    return kl.item(), gradient.item()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -0.5, 1.0),
        ("kl", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("k2", 0.125, -0.5),
        ("mse", 0.125, -0.5),
        ("k3", np.exp(0.5) - 1.5, 1 - np.exp(0.5)),
        ("low_var_kl", np.exp(0.5) - 1.5, 1 - np.exp(0.5)),
        ("k1+", -0.5, -0.5),
        ("k3+", np.exp(0.5) - 1.5, -0.5),
        ("low_var_kl+", np.exp(0.5) - 1.5, -0.5),
        ("abs+", 0.5, -0.5),
    ],
)
def test_each_estimator_at_a_log_ratio_of_one_half(kind, value, gradient):
    got = value_and_gradient(-2.0, -1.5, kind)
    assert got == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -1.0, 2 * (1 - 0.5)),
        ("k2", 0.25, 2 * (0.125 - 0.5)),
        ("k3", 2 * (np.exp(0.5) - 1.5), 2 * -0.5),
        ("k1+", -1.0, 2 * -0.5),
        ("k3+", 2 * (np.exp(0.5) - 1.5), 2 * -0.5),
    ],
)
def test_an_estimate_times_the_ratio_has_the_gradient_of_the_product(kind, value, gradient):
    leaf = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    ratio = (leaf + 2 + np.log(2)).exp()
    kl = kl_estimate(leaf, torch.tensor([-1.5], dtype=torch.float64), kind, ratio)
    (got,) = torch.autograd.grad(kl.sum(), leaf)
    assert (kl.item(), got.item()) == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl", "k1+", "k3+"])
def test_times_the_ratio_the_expected_gradient_is_that_of_the_kl(kind):
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    ref, old = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.1, 0.5, -0.2], [0.6, 0.0, 0.0]))
    new = logits.log_softmax(0)
    estimate = (old.exp() * kl_estimate(new, ref, kind, (new - old).exp())).sum()
    (got,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (want,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits)
    torch.testing.assert_close(got, want)


def test_a_token_that_the_ratio_takes_past_the_bound_counts_as_clamped():
    new, ref = torch.tensor([-3.0]), torch.tensor([-1.0])
    assert kl_clamped(new, ref, "k3").tolist() == [False]
    assert kl_clamped(new, ref, "k3", torch.tensor([4.0])).tolist() == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_have_no_kl(kind):
    assert value_and_gradient(-1.0, -1.0, kind)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b32_one_far_token_leaves_value_and_gradient_finite_and_the_others_unchanged(kind, dtype):
    leaf = torch.tensor([-101.0, -1.0, -2.0], dtype=dtype, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0, -1.75], dtype=dtype)
    kl = kl_estimate(leaf, ref, kind)
    (gradient,) = torch.autograd.grad(kl.sum(), leaf)
    assert torch.isfinite(kl).all()
    assert torch.isfinite(gradient).all()
    alone = kl_estimate(leaf.detach()[1:], ref[1:], kind)
    torch.testing.assert_close(kl.detach()[1:], alone, rtol=0, atol=0)
    clamped = kl_clamped(leaf, ref, kind).tolist()
    assert clamped == [kind.startswith(("k3", "low_var")), False, False]


@settings(max_examples=200)
@given(
    log_prob=st.floats(-(2.0**127), 0, width=32),
    ref=st.floats(-(2.0**127), 0, width=32),
    kind=st.sampled_from(["k3", "low_var_kl"]),
)
def test_k3_is_within_its_bounds_for_any_two_log_probs(log_prob, ref, kind):
    value, gradient = value_and_gradient(log_prob, ref, kind, torch.float32)
    assert 0 <= value <= 10
    assert np.isfinite(gradient)


def test_k3_within_its_bounds_is_the_unclamped_formula():
    log_r = np.linspace(-9, 2.5, 50)
    got = kl_estimate(torch.zeros(50, dtype=torch.float64), torch.from_numpy(log_r), "k3")
    np.testing.assert_allclose(got.numpy(), np.exp(log_r) - log_r - 1, rtol=1e-12)


def test_k3_of_log_probs_that_differ_by_rounding_is_not_below_zero():
    step = np.float32(2**-24)
    log_r = torch.from_numpy(np.arange(-4000, 4001).astype(np.float32) * step)
    assert (kl_estimate(torch.zeros_like(log_r), log_r, "k3") >= 0).all()


def test_k3_is_unbiased_and_k1_in_a_loss_has_an_expected_gradient_of_zero():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64), dim=0)
    log_p = torch.log_softmax(logits, dim=0)
    p = log_p.detach().exp()
    exact = (log_p.exp() * (log_p - ref)).sum()
    assert (p * kl_estimate(log_p, ref, "k3")).sum().item() == pytest.approx(exact.item())

    def gradient(total):
        return torch.autograd.grad(total, logits, retain_graph=True)[0]

    assert gradient((p * kl_estimate(log_p, ref, "k1")).sum()).abs().max() < 1e-12
    torch.testing.assert_close(gradient((p * kl_estimate(log_p, ref, "k3+")).sum()), gradient(exact))


def test_an_unknown_estimator_is_refused_with_both_keys():
    with pytest.raises(ValueError, match=r"'k4'.*kl_loss_type.*kl_penalty.*k1"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def rows(*values, dtype=np.float32):
    return Ragged.from_rows(values, dtype)


def test_kl_in_the_reward_by_hand():
    old, ref = rows([-1.0, -2.0], [-1.0], []), rows([-1.5, -2.0], [-0.5], [])
    mask = rows([True, True], [True], [], dtype=bool)
    rewards, kl = kl_in_reward(np.array([1.0, 0.0, 1.0]), old, ref, mask, "k1", 0.1)
    np.testing.assert_allclose(rewards.values, [-0.05, 1.0, 0.05])
    assert kl == pytest.approx((0.25 - 0.5 + 0.0) / 3)


def test_without_a_verdict_no_score_is_written_into_the_rewards():
    mask = rows([True, True], dtype=bool)
    rewards, _ = kl_in_reward(np.array([np.nan]), rows([-1.0, -1.0]), rows([-1.0, -2.0]), mask, "k1", 0.5)
    assert rewards.values.tolist() == [0.0, -0.5]


def test_the_score_goes_to_the_last_sampled_token_and_unsampled_ones_have_no_kl():
    mask = rows([True, False, True, False], dtype=bool)
    old, ref = rows([-1.0, -1.0, -1.0, -1.0]), rows([-1.0, -9.0, -2.0, -9.0])
    rewards, kl = kl_in_reward(np.array([2.0]), old, ref, mask, "k1", 1.0)
    assert rewards.values.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert kl == 0.5


def test_a_fixed_weight_stays_and_an_adaptive_one_moves_to_its_target():
    assert next_kl_coef(0.1, 100.0, 64, KLControlConfig(type="fixed")) == 0.1
    adaptive = KLControlConfig(type="adaptive", horizon=100, target_kl=1.0)
    assert next_kl_coef(0.1, 1.1, 50, adaptive) == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert next_kl_coef(0.1, 99.0, 50, adaptive) == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert next_kl_coef(0.1, 0.0, 50, adaptive) == pytest.approx(0.1 * (1 - 0.2 * 0.5))
