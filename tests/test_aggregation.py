"""From token losses to one number: every mode by hand, and the cut into micro-batches."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.aggregation import aggregate, count_totals, masked_sum, row_weights
from tasks.config import LossAggregation

# Three sequences of 1, 3 and 0 loss tokens; the first two answer one prompt.
LOSS = torch.tensor([[6.0, 9.0, 9.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
TOTALS = count_totals(MASK.sum(dim=1).numpy(), np.array([5, 5, 2]))


def aggregated(mode, scale=10.0):
    return aggregate(LOSS, MASK, torch.from_numpy(row_weights(TOTALS, mode, scale=scale))).item()


def test_counts_leave_out_sequences_without_loss_tokens():
    assert (TOTALS.tokens, TOTALS.sequences, TOTALS.prompts) == (4, 2, 1)
    assert TOTALS.prompt_tokens.tolist() == [4, 4, 0]


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", 12 / 4),
        ("token-sum", 12),
        ("seq-mean-token-sum", (6 + 6) / 2),
        ("seq-mean-token-mean", (6 + 2) / 2),
        ("seq-mean-token-sum-norm", (6 + 6) / 2 / 10),
        ("prompt-mean", 12 / 4),
    ],
)
def test_each_mode_by_hand(mode, want):
    assert aggregated(mode) == pytest.approx(want)


def test_prompt_mean_gives_each_prompt_the_same_weight():
    totals = count_totals(np.array([1, 3, 2]), np.array([0, 0, 1]))
    assert row_weights(totals, "prompt-mean", scale=1).tolist() == [1 / 8, 1 / 8, 1 / 4]


def test_every_configured_mode_exists_and_another_is_refused():
    for mode in get_args(LossAggregation):
        assert np.isfinite(aggregated(mode))
    with pytest.raises(ValueError, match="loss_agg_mode='mean' is unknown; there are token-mean"):
        aggregated("mean")


@given(
    mode=st.sampled_from(get_args(LossAggregation)),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_sum_over_micro_batches_is_the_loss_of_the_mini_batch(mode, lengths, seed):
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(np.arange(5) < np.array(lengths)[:, None])
    loss = torch.from_numpy(rng.normal(size=(len(lengths), 5)))
    totals = count_totals(np.array(lengths), rng.integers(0, 3, len(lengths)))
    weights = torch.from_numpy(row_weights(totals, mode, scale=5.0))
    rows = rng.permutation(len(lengths))
    cuts = np.sort(rng.integers(0, len(rows) + 1, 2))
    parts = [aggregate(loss[part], mask[part], weights[part]).item() for part in np.split(rows, cuts)]
    assert sum(parts) == pytest.approx(aggregate(loss, mask, weights).item(), rel=1e-12, abs=1e-12)


def test_nan_outside_the_mask_reaches_neither_value_nor_gradient():
    loss = torch.where(MASK, LOSS, torch.nan).requires_grad_()
    weights = torch.from_numpy(row_weights(TOTALS, "token-mean", scale=1))
    total = aggregate(loss, MASK, weights)
    (gradient,) = torch.autograd.grad(total, loss)
    assert total.item() == 3
    assert torch.isfinite(gradient).all()
    assert masked_sum(loss.detach(), MASK).item() == 12


def test_bfloat16_losses_are_summed_in_float32():
    loss = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    mask = torch.ones_like(loss, dtype=torch.bool)
    weights = torch.from_numpy(row_weights(count_totals(np.array([4096]), np.array([0])), "token-sum", scale=1))
    assert aggregate(loss, mask, weights).item() == 4096


def test_a_mini_batch_without_loss_tokens_has_loss_zero():
    nothing = count_totals(np.zeros(3), np.arange(3))
    for mode in get_args(LossAggregation):
        assert row_weights(nothing, mode, scale=5).tolist() == [0, 0, 0]
