"""The losses of a step's first optimizer step, computed from stored columns: there the policy has not moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flows.audit.verify.base import Cannot
from flows.audit.verify.step import Look
from storage import Ragged
from tasks.algorithms.aggregation import aggregate, count_totals, masked_sum, row_weights
from tasks.algorithms.kl import kl_estimate
from tasks.algorithms.losses import LossBatch, aggregation_mode, policy_loss, prepare_mini_batch, probability_ratio
from tasks.config import RunConfig
from tasks.log_prob import read_sequences
from tasks.stage import StageError
from tasks.update import plan_mini_batches, read_signals
from tasks.workers.signals import Signals

ROUNDING = 2e-5
"""Relative rounding of a float32 sum over the tokens of a mini-batch, cut into micro-batches in any way."""

CLIPPED_BY_ROUNDING = 1e-3
"""Share of tokens that may be clipped at a ratio of 1: none, but where a clip range is as narrow as rounding."""


def first_losses(look: Look, cfg: RunConfig, log_ratio: float) -> dict[str, tuple[float, float]]:
    """`pg_loss`, `kl_loss`, `ppo_kl`, `pg_clipfrac` and `pg_clipfrac_lower` of the first mini-batch.

    Args:
        look: the step.
        cfg: the configuration of its update.
        log_ratio: by how much a log-prob of the update may differ from the stored one, nats.

    Returns:
        By name the value, and how far the recorded one may be from it.

    Raises:
        Cannot: a column is not there, or is not aligned with the responses.
    """
    actor, correction = cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction
    signals, rows = _first_batch(look, cfg)
    batch, reference = _padded(signals, rows)
    batch = prepare_mini_batch(batch, actor, correction)
    totals = count_totals(batch.mask.sum(dim=-1).numpy(), signals.group[rows])
    scale = float(actor.loss_scale_factor or cfg.response_length)
    own, usual = (
        torch.from_numpy(row_weights(totals, mode, scale=scale))
        for mode in (aggregation_mode(actor, correction), actor.loss_agg_mode)
    )

    def losses(shift: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return policy_loss(actor, correction)(replace(batch, log_probs=batch.old_log_probs + shift), actor)

    per_token, metrics = losses(0.0)
    moved = torch.stack([(losses(shift)[0] - per_token).abs() for shift in (log_ratio, -log_ratio)]).amax(dim=0)
    slack = float(aggregate(moved + ROUNDING * per_token.abs(), batch.mask, own.abs()))
    found = {"pg_loss": (float(aggregate(per_token, batch.mask, own)), slack + 1e-9)}
    tokens = max(int(batch.mask.sum()), 1)
    clips = 1.0 if min(actor.clip_low, actor.clip_high) <= log_ratio else CLIPPED_BY_ROUNDING
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        value = float(masked_sum(metrics[name], batch.mask)) / tokens if name in metrics else 0.0
        found[name] = (value, log_ratio + 1e-6 if name == "ppo_kl" else clips)
    if actor.use_kl_loss and reference is not None:
        found["kl_loss"] = _kl(cfg, batch, reference, usual, log_ratio)
    return found


def _kl(
    cfg: RunConfig, batch: LossBatch, reference: torch.Tensor, weights: torch.Tensor, log_ratio: float
) -> tuple[float, float]:
    actor = cfg.actor_rollout_ref.actor

    def estimate(shift: float) -> torch.Tensor:
        moved = replace(batch, log_probs=batch.old_log_probs + shift)
        ratio = probability_ratio(moved)[0] if actor.use_unbiased_kl else None
        return kl_estimate(moved.log_probs, reference, actor.kl_loss_type, ratio)

    here = estimate(0.0)
    off = torch.stack([(estimate(shift) - here).abs() for shift in (log_ratio, -log_ratio)]).amax(dim=0)
    # An estimate of nearly equal log-probs is a difference of nearly equal numbers in float32.
    slack = aggregate(off + ROUNDING * here.abs() + 2e-7, batch.mask, weights.abs())
    return float(aggregate(here, batch.mask, weights)), float(slack) + 1e-9


def _first_batch(look: Look, cfg: RunConfig) -> tuple[Signals, np.ndarray]:
    """What the loss needs of all samples, and the rows of the first mini-batch."""
    names = ["prompts", "rollouts", "old_log_probs", "advantages"]
    names += ["ref_log_probs"] if cfg.actor_rollout_ref.actor.use_kl_loss else []
    for name in names:
        _ = look.table(name)
    artifacts = {name: look.artifact(name) for name in names}
    actor = cfg.actor_rollout_ref.actor
    try:
        sequences, table = read_sequences(artifacts["prompts"], artifacts["rollouts"])
        signals = read_signals(
            table,
            sequences.group,
            artifacts["old_log_probs"],
            artifacts.get("ref_log_probs"),
            artifacts["advantages"],
            actor.mask_truncated_responses,
        )
    except (StageError, KeyError) as error:
        raise Cannot("the stages do not hold the same samples, see `ids`") from error
    columns: list[Ragged | None] = [signals.advantages, signals.loss_mask, signals.old_log_probs]
    columns += [signals.ref_log_probs, signals.rollout_is_weights]
    if any(one is not None and not np.array_equal(one.offsets, sequences.responses.offsets) for one in columns):
        raise Cannot("a column is not as long as the responses, see `lengths`")
    return signals, plan_mini_batches(sequences.group, actor, look.step)[0][0]


def _padded(signals: Signals, rows: np.ndarray) -> tuple[LossBatch, torch.Tensor | None]:
    """[M, R] tensors of some rows, and their reference log-probs."""

    def pad(column: Ragged | None) -> Any:
        if column is None:
            return None
        width = int(signals.loss_mask.lengths[rows].max(initial=0))
        padded = np.zeros((len(rows), width), dtype=column.values.dtype)
        for place, row in enumerate(rows):
            padded[place, : len(column[int(row)])] = column[int(row)]
        return torch.from_numpy(padded)

    old, mask = pad(signals.old_log_probs), pad(signals.loss_mask)
    before = None
    if signals.in_loss is not None:
        lengths = signals.loss_mask.lengths[rows] * signals.in_loss[rows]
        before = torch.from_numpy(np.arange(mask.shape[1]) < lengths[:, None])
    batch = LossBatch(
        log_probs=old,
        old_log_probs=old,
        advantages=pad(signals.advantages),
        mask=mask,
        rollout_is_weights=pad(signals.rollout_is_weights),
        rollout_log_probs=pad(signals.rollout_log_probs),
        before_rejection=before,
    )
    return batch, pad(signals.ref_log_probs)
