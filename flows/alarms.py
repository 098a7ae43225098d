"""Measurements of a step that say that something is wrong though training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.config import RunConfig

_SAMPLER = (
    "the engine does not sample from the distribution that is trained. Look at dtype and attention of the two and at "
    "top-p and top-k; algorithm.rollout_correction corrects for it"
)
_RATIO = "the old log-probs are not those of the policy that is trained, although it has not moved yet"


def alarms(metrics: Mapping[str, float | None], cfg: RunConfig) -> Iterator[str]:
    """Sentences for the measurements that pass a bound of `trainer.alarms`."""
    bounds, bypass = cfg.trainer.alarms, cfg.algorithm.rollout_correction.bypass_mode
    checks = (
        ("training/rollout_probs_diff_mean", bounds.rollout_probs_diff_mean, "above", _SAMPLER),
        ("training/rollout_actor_probs_pearson_corr", bounds.rollout_actor_probs_pearson_corr, "below", _SAMPLER),
        # In bypass mode the old log-probs are the engine's.
        (
            "actor/first_update_log_ratio_max",
            bounds.first_update_log_ratio_max,
            "above",
            _SAMPLER if bypass else _RATIO,
        ),
    )
    for name, bound, side, why in checks:
        value = metrics.get(name)
        if value is not None and bound is not None and (value > bound if side == "above" else value < bound):
            key = name.rsplit("/", 1)[1]
            yield f"{name} is {value:.4g}, {side} trainer.alarms.{key}={bound:g}: {why}."
