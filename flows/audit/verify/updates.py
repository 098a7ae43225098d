"""Checks of optimizer steps: their mini-batches, learning rates, and the losses that need no policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.step import Look
from storage import Ragged
from tasks.config import RunConfig
from tasks.update import plan_mini_batches


def first_update(cfg: RunConfig) -> str | None:
    """Why the loss of a step's first optimizer step cannot be computed without the policy; None: it can.

    There the policy has not moved, so its log-probs are the stored old ones.
    """
    from tasks.algorithms.losses import needs_current_log_probs, needs_entropy

    actor, correction = cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction
    if correction.bypass_mode:
        return "in bypass mode the old log-probs are the sampler's, not the policy's"
    if needs_current_log_probs(actor, correction) or needs_entropy(actor):
        return "this loss selects tokens by the policy's own numbers; --deep makes the update again"
    return None


def mini_batches(look: Look, account: Account) -> None:
    """Each optimizer step has the sequences and loss tokens of its mini-batch, and its place, rate and sums."""
    for stage in look.having("updates"):
        with account.attempt(look.step):
            cfg, rows = look.cfg(stage), look.table(stage).to_pylist()
            actor = cfg.actor_rollout_ref.actor
            in_loss, group = _masks(look)
            plan = plan_mini_batches(group, actor, look.step)
            wanted = [(epoch, chosen) for epoch, batches in enumerate(plan) for chosen in batches]
            account.look(len(rows))
            if len(rows) != len(wanted):
                account.fail(f"{len(rows)} optimizer steps, {len(wanted)} mini-batches", look.step, stage)
                continue
            rejects = cfg.algorithm.rollout_correction.bypass_mode
            for index, (row, (epoch, chosen)) in enumerate(zip(rows, wanted, strict=True)):
                tokens = row["tokens"] if rejects else int(in_loss[chosen].sum())
                _expect(look, index, row, {"update_index": index, "epoch": epoch}, account)
                _expect(look, index, row, {"sequences": len(chosen), "tokens": tokens}, account)
                if row["loss"] is not None and actor.entropy_coeff == 0:
                    kl = actor.kl_loss_coef * row["kl_loss"] if row["kl_loss"] is not None else 0.0
                    _near(look, index, "loss", row["loss"], row["pg_loss"] + kl, 1e-5, account)


def _masks(look: Look) -> tuple[np.ndarray, np.ndarray]:
    """[N] tokens of each sample in the loss, and which prompt each answers."""
    from tasks.algorithms.advantages import row_sums
    from tasks.log_prob import read_sequences

    mask = Ragged.from_arrow(look.joined("advantages", "rollouts", ["loss_mask"])["loss_mask"])
    _ = look.table("prompts")
    try:
        sequences, _table = read_sequences(look.artifact("prompts"), look.artifact("rollouts"))
    except KeyError as error:
        raise Cannot("a response answers no prompt, see `ids`") from error
    return row_sums(mask, mask.values), sequences.group


def _expect(look: Look, index: int, row: Mapping[str, Any], wanted: Mapping[str, Any], account: Account) -> None:
    for name, value in wanted.items():
        if row[name] != value:
            account.fail(f"update {index}: {name} is {row[name]}, it must be {value}", look.step, "updates")


def _near(look: Look, index: int, name: str, have: float, want: float, within: float, account: Account) -> None:
    account.look(1, abs(have - want))
    if not abs(have - want) <= within * max(1.0, abs(want)):
        account.fail(f"update {index}: {name} is {have:.8g}, made again {want:.8g}", look.step, "updates")


def learning_rates(look: Look, account: Account) -> None:
    """The learning rate is that of the schedule at this step."""
    from flows.recover import planned_steps
    from tasks.workers.optim import learning_rate

    for stage in look.having("updates"):
        with account.attempt(look.step):
            optim = look.cfg(stage).actor_rollout_ref.actor.optim
            total = planned_steps(look.run, look.manifest(stage).lineage)
            if total is None:
                raise Cannot("the plan, on whose length the learning rate may depend, is not there")
            wanted = learning_rate(optim, look.step, total)
            for index, stored in enumerate(look.table(stage)["lr"].to_pylist()):
                account.look(1, abs(stored - wanted))
                if not abs(stored - wanted) <= 1e-9 * max(abs(wanted), 1e-12):
                    account.fail(f"update {index}: lr is {stored:g}, the schedule has {wanted:g}", look.step, stage)


def losses(look: Look, account: Account) -> None:
    """Policy loss, KL and clipped shares of the first optimizer step follow from the stored columns.

    The policy has not moved there, so the ratio is 1 up to the rounding that the update itself has measured
    (`log_ratio_max`); the losses may be off by what that much rounding of the log-probs makes of them, and not more.
    """
    from flows.audit.verify.first_loss import first_losses

    for stage in look.having("updates"):
        with account.attempt(look.step):
            cfg, rows = look.cfg(stage), look.table(stage).to_pylist()
            if why := first_update(cfg):
                raise Cannot(why)
            if not rows or rows[0]["skipped"] is not None:
                raise Cannot("the first optimizer step was skipped")
            row = rows[0]
            bound = cfg.trainer.alarms.first_update_log_ratio_max
            account.look(1)
            if bound is not None and row["log_ratio_max"] > bound:
                says = f"update 0: log_ratio_max is {row['log_ratio_max']:.4g} though the policy has not moved yet"
                account.fail(says, look.step, stage)
            for name, (wanted, within) in first_losses(look, cfg, float(row["log_ratio_max"])).items():
                gap = float("nan") if row[name] is None else abs(row[name] - wanted)
                account.look(1, None if row[name] is None else gap)
                if not gap <= within:
                    says = f"update 0: {name} is {row[name]}, from the stored columns {wanted:.8g} (± {within:.1g})"
                    account.fail(says, look.step, stage)
