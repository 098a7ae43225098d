"""What the words of `algorithm.rollout_correction` mean: bounds of importance weights, rejection rules and theirs.

No NumPy: the planner reads them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tasks.config import ActorConfig, RolloutCorrectionConfig

RULES = (
    *(
        f"{over}_{estimator}"
        for over in ("token", "seq_sum", "seq_mean", "seq_max")
        for estimator in ("k1", "k2", "k3")
        if (over, estimator) != ("seq_max", "k1")
    ),
    "seq_veto_k1",
)
"""All rejection rules. seq_veto_k1: one token out of bounds rejects its sequence; seq_max does so for k2 and k3."""


def loss_mode(actor: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    """Name of the policy loss in force: `policy_loss.loss_mode`, or in bypass mode the one of `loss_type`."""
    if correction.bypass_mode:
        return {"ppo_clip": "vanilla", "reinforce": "reinforce"}[correction.loss_type]
    return actor.policy_loss.loss_mode


@dataclass(frozen=True)
class Band:
    """Bounds of an importance weight.

    Attributes:
        low: lower bound; None: there is none.
        high: upper bound.
        masks: a weight outside is 0; false: it is held at the bound.
    """

    low: float | None
    high: float
    masks: bool


@dataclass(frozen=True)
class Rule:
    """One rejection rule: `<over>_k<n>`.

    Attributes:
        name: as in the configuration, such as `seq_mean_k1`.
        over: token, seq_sum, seq_mean, seq_max or seq_veto.
        estimator: k1, k2 or k3 of KL(rollout || train).
        low: lower bound of the statistic; None: there is none.
        high: upper bound of the statistic.
    """

    name: str
    over: str
    estimator: str
    low: float | None
    high: float


def parse_band(threshold: float | str, mode: Literal["truncate", "mask"] | None = None) -> Band:
    """Read `rollout_is_threshold`, one upper bound or `low_high`, and `rollout_is_mode`.

    Args:
        threshold: the bounds.
        mode: what becomes of a weight outside; None: one bound truncates and two mask, as in verl.

    Raises:
        ValueError: it is neither, or the bounds are not 0 < low < high.
    """
    key = "algorithm.rollout_correction.rollout_is_threshold"
    bounds = _numbers(key, threshold)
    if len(bounds) == 1 and bounds[0] > 0:
        return Band(None, bounds[0], mode == "mask")
    if len(bounds) == 2 and 0 < bounds[0] < bounds[1]:
        return Band(bounds[0], bounds[1], mode != "truncate")
    raise ValueError(f"{key}={threshold!r} must be a number above 0, or low_high with 0 < low < high, such as 0.5_2.0")


def parse_rules(names: str, thresholds: float | str | None) -> list[Rule]:
    """Read `rollout_rs` and `rollout_rs_threshold`: rules, and one bound for each, both comma-separated.

    k1 takes `low_high` (or one number u for 1/u_u): bounds of the inverse ratio pi_rollout / pi_train. k2 and k3 take
    an upper bound in nats. One bound serves several rules.

    Raises:
        ValueError: an unknown rule, a missing bound, or one that cannot be met.
    """
    key, bound_key = (f"algorithm.rollout_correction.rollout_rs{end}" for end in ("", "_threshold"))
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not wanted:
        raise ValueError(f"{key}={names!r} names no rule; set it to null, or to some of {', '.join(RULES)}")
    if thresholds is None:
        raise ValueError(f"{key}={names!r} needs {bound_key}: one bound for each rule, comma-separated")
    bounds = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(bounds) == 1:
        bounds = bounds * len(wanted)
    if len(bounds) != len(wanted):
        raise ValueError(f"{bound_key}={thresholds!r} has {len(bounds)} bounds for the {len(wanted)} rules of {key}")
    return [_rule(key, bound_key, name, bound) for name, bound in zip(wanted, bounds, strict=True)]


def _rule(key: str, bound_key: str, name: str, bound: str) -> Rule:
    if name not in RULES:
        raise ValueError(f"{key}: no rejection rule is called {name!r}; there are {', '.join(RULES)}")
    over, estimator = name.rsplit("_", 1)
    numbers = _numbers(bound_key, bound)
    if min(numbers) <= 0 or len(numbers) > 2 or (len(numbers) == 2 and numbers[0] >= numbers[1]):
        raise ValueError(f"{bound_key}: {bound!r} for {name} must be above 0, and low_high must have low < high")
    if estimator == "k1":
        low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
        if low >= high:
            raise ValueError(f"{bound_key}: {bound!r} for {name} stands for 1/u_u and must be above 1, or be low_high")
        return Rule(name, over, estimator, math.log(low), math.log(high))
    if len(numbers) == 2:
        raise ValueError(f"{bound_key}: {bound!r} for {name} has two bounds, but {estimator} has only an upper one")
    return Rule(name, over, estimator, None, numbers[0])


def _numbers(key: str, text: float | str) -> list[float]:
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        raise ValueError(f"{key}={text!r} is no number and no low_high") from None
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{key}={text!r} is not finite")
    return numbers
