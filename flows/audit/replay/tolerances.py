"""How far a stage that is made again may be from the stored one, and why not bit for bit.

In the same place (one rank on the CPU of the same machine, the same libraries) everything is equal bit for bit. Where
the sums of matrix products are taken in another order (other micro-batches of several ranks, another processor or
library) float32 rounds otherwise in the last digits, and bfloat16, with 8 bits, in the second.
"""

from __future__ import annotations

from flows.audit.compare import Bound
from tasks.config import RunConfig
from tasks.update import ROUNDING

NATS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.5}
"""Of one token's log-prob or entropy, by type of computation. Log-probs of the same tokens by one and by two ranks of a
small model differ by about 1e-5 in float32; a logit of 20 in bfloat16 is a multiple of 1/8."""

ENGINE_NATS = {"float64": 0.05, "float32": 0.05, "bfloat16": 2.0}
"""Of one token, between an engine of other kernels (vLLM) and the policy."""

ARITHMETIC = Bound(absolute=1e-6, relative=1e-5)
"""Of rewards and advantages of tokens: the same sums from the same inputs, by other versions of NumPy or torch."""

SHARED_OUT = ("micro_batches",)
"""Columns of `updates` that count what one rank did."""


def bounds_of(stage: str, dtype: str) -> dict[str, Bound]:
    """Bounds of an artifact's columns.

    Args:
        stage: its name, without a number.
        dtype: type that the policy computes in.
    """
    nats = Bound(absolute=NATS[dtype])
    if stage in ("rollouts", "greedy_rollouts", "val_rollouts"):
        return {"rollout_log_probs": nats}
    if stage == "old_log_probs":
        return dict.fromkeys(("old_log_probs", "entropy", "sum_pi_squared"), nats)
    if stage == "ref_log_probs":
        return {"ref_log_probs": nats}
    if stage == "advantages":
        columns = ("token_rewards", "advantages", "returns", "group_mean", "group_std", "rollout_is_weights")
        return dict.fromkeys(columns, ARITHMETIC)
    return _of_updates(ROUNDING[dtype]) if stage == "updates" else {}


def _of_updates(share: float) -> dict[str, Bound]:
    """A loss is a sum of terms of both signs and may be near 0: a tenth of the share, absolute, is always allowed."""
    sums = ("loss", "pg_loss", "kl_loss", "ppo_kl", "entropy", "pg_clipfrac", "pg_clipfrac_lower")
    ratios = ("ratio_max", "log_ratio_max")
    near_zero = Bound(absolute=0.1 * share, relative=share)
    return {**dict.fromkeys((*sums, *ratios), near_zero), "grad_norm": Bound(relative=share)}


def in_words(stage: str, dtype: str) -> str:
    """The bound as it is told."""
    if stage == "updates":
        return f"{ROUNDING[dtype]:.0%} ({dtype})"
    if stage == "advantages":
        return f"{ARITHMETIC.relative:g} of each"
    return f"{NATS[dtype]:g} nats ({dtype})" if bounds_of(stage, dtype) else "none"


def computes_in(cfg: RunConfig, *, on_cpu: bool) -> str:
    """Type that a run's policy computed in.

    Args:
        cfg: its configuration.
        on_cpu: on a CPU; elsewhere float32 weights compute in bfloat16 unless the configuration says otherwise.
    """
    weights = cfg.actor_rollout_ref.model.dtype
    named = cfg.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype
    return named or ("bfloat16" if weights == "float32" and not on_cpu else weights)
