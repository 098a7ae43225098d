"""Settings that nothing reads as the rest of the configuration stands: named with what would have to change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tasks.algorithms.variants import ESTIMATORS, LOSSES, Variant
from tasks.config import RunConfig
from tasks.geometry.algorithm_rules import CORRECTION, FILTER, KL_CTRL, loss_in_force, normalised_one_by_one
from tasks.geometry.numbers import Facts, Numbers
from tasks.geometry.problems import PlanWarning
from tasks.geometry.shape_rules import ACTOR, ROLLOUT

ALARMS = "trainer.alarms"
MANY_REWARDS = "algorithm.multi_objective_aggregation"
OVERLONG = "reward_model.overlong_buffer"

ON_ONE_DEVICE = {
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "weights are not sharded on one device",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "weights are not sharded on one device",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": "one device has nothing to reduce over",
}
"""Keys that one device does not read, and why."""

WITH_TRANSFORMERS = {
    "data.val_batch_size": "validation goes through the engine in waves of rollout.max_num_seqs",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "the transformers engine takes the memory it needs",
    "actor_rollout_ref.rollout.enforce_eager": "the transformers engine captures no graphs",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the transformers engine prefills whole prompts",
    "actor_rollout_ref.rollout.load_format": "the transformers engine samples from the policy's own weights",
    "actor_rollout_ref.rollout.engine_python": "the transformers engine has no process of its own",
    "actor_rollout_ref.rollout.engine_startup_s": "the transformers engine has no process of its own",
    "actor_rollout_ref.rollout.engine_silence_s": "the transformers engine has no process of its own",
    "actor_rollout_ref.rollout.engine_kwargs": "they are vLLM's",
}
"""Keys that the transformers engine does not read, and why."""

WITH_TRANSFORMERS_ON_ONE_DEVICE = {
    "actor_rollout_ref.rollout.free_cache_engine": "the transformers engine frees its cache after every call",
}
"""What it does not read where it samples from the policy's own weights."""

NOWHERE = {
    "algorithm.lam": "no critic-free estimator reads it",
    "reward_model.reward_manager": "naive and dapo are the same, and overlong_buffer.enable alone turns the buffer on",
}
"""verl's keys that nothing here reads, and why."""


@dataclass(frozen=True)
class Switch:
    """Settings that are read only while another one is on."""

    by: str
    """The key that switches them."""
    keys: tuple[str, ...]
    is_on: Callable[[RunConfig], bool]
    why: str = ""
    """What the switch's value alone does not say."""
    level: Literal["warning", "info"] = "info"


SWITCHES = (
    Switch(
        f"{ACTOR}.use_kl_loss",
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", f"{ACTOR}.use_unbiased_kl"),
        lambda cfg: cfg.actor_rollout_ref.actor.use_kl_loss,
    ),
    Switch(
        "algorithm.use_kl_in_reward",
        (
            "algorithm.kl_penalty",
            f"{KL_CTRL}.type",
            f"{KL_CTRL}.kl_coef",
            f"{KL_CTRL}.horizon",
            f"{KL_CTRL}.target_kl",
        ),
        lambda cfg: cfg.algorithm.use_kl_in_reward,
    ),
    Switch(
        f"{KL_CTRL}.type",
        (f"{KL_CTRL}.horizon", f"{KL_CTRL}.target_kl"),
        lambda cfg: cfg.algorithm.kl_ctrl.type == "adaptive",
    ),
    Switch(
        "algorithm.norm_adv_by_std_in_grpo",
        ("algorithm.norm_adv_std_over",),
        lambda cfg: cfg.algorithm.norm_adv_by_std_in_grpo,
    ),
    Switch(
        MANY_REWARDS,
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        lambda cfg: normalised_one_by_one(cfg) is not None,
        "normalize_then_sum reads the functions one by one",
    ),
    Switch(
        MANY_REWARDS,
        (
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.norm_adv_std_over",
            "algorithm.use_leave_one_out_baseline",
        ),
        lambda cfg: normalised_one_by_one(cfg) is None,
    ),
    Switch(
        f"{ACTOR}.loss_agg_mode",
        (f"{ACTOR}.loss_scale_factor",),
        lambda cfg: cfg.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm",
        "seq-mean-token-sum-norm reads it",
    ),
    Switch(
        f"{ACTOR}.policy_loss.loss_mode",
        (f"{ACTOR}.loss_scale_factor",),
        lambda cfg: LOSSES[loss_in_force(cfg)].aggregation is None or _aggregates_beside_the_loss(cfg),
        "the loss has an aggregation of its own, and neither KL nor entropy is added to it",
    ),
    Switch(f"{ACTOR}.shuffle", (f"{ACTOR}.data_loader_seed",), lambda cfg: cfg.actor_rollout_ref.actor.shuffle),
    Switch(
        f"{ROLLOUT}.calculate_log_probs",
        (f"{ALARMS}.rollout_probs_diff_mean", f"{ALARMS}.rollout_actor_probs_pearson_corr"),
        lambda cfg: cfg.actor_rollout_ref.rollout.calculate_log_probs,
        "there are no log-probs of the engine to compare with",
    ),
    Switch(
        f"{CORRECTION}.bypass_mode",
        (f"{ALARMS}.rollout_probs_diff_mean", f"{ALARMS}.rollout_actor_probs_pearson_corr"),
        lambda cfg: not cfg.algorithm.rollout_correction.bypass_mode,
        "the pass that would measure the gap is skipped",
    ),
    Switch(
        f"{ACTOR}.clip_ratio_high",
        (f"{ACTOR}.clip_ratio",),
        lambda cfg: (
            cfg.actor_rollout_ref.actor.clip_ratio_low is None or cfg.actor_rollout_ref.actor.clip_ratio_high is None
        ),
        "clip_ratio_low is set too",
    ),
    Switch(
        "algorithm.multi_objective_aggregation",
        (
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.norm_adv_std_over",
            "algorithm.use_leave_one_out_baseline",
        ),
        lambda cfg: cfg.algorithm.multi_objective_aggregation == "sum_then_normalize",
        "each reward function is centred and scaled by itself",
    ),
    Switch(
        f"{CORRECTION}.rollout_is",
        (f"{CORRECTION}.rollout_is_mode",),
        lambda cfg: cfg.algorithm.rollout_correction.rollout_is is not None,
        "rollout_is=token or sequence turns the weights on",
        level="warning",
    ),
    Switch(
        f"{CORRECTION}.rollout_is",
        (f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_batch_normalize"),
        lambda cfg: cfg.algorithm.rollout_correction.rollout_is is not None,
    ),
    Switch(
        f"{CORRECTION}.rollout_rs",
        (f"{CORRECTION}.rollout_rs_threshold",),
        lambda cfg: cfg.algorithm.rollout_correction.rollout_rs is not None,
    ),
    Switch(
        f"{CORRECTION}.bypass_mode",
        (f"{CORRECTION}.loss_type",),
        lambda cfg: cfg.algorithm.rollout_correction.bypass_mode,
    ),
    Switch(
        f"{CORRECTION}.bypass_mode",
        (f"{ACTOR}.policy_loss.loss_mode",),
        lambda cfg: not cfg.algorithm.rollout_correction.bypass_mode,
        "rollout_correction.loss_type names the loss",
    ),
    Switch(
        f"{CORRECTION}.loss_type",
        (
            f"{CORRECTION}.rollout_is",
            f"{CORRECTION}.rollout_is_threshold",
            f"{CORRECTION}.rollout_is_mode",
            f"{CORRECTION}.rollout_is_batch_normalize",
        ),
        lambda cfg: (
            not cfg.algorithm.rollout_correction.bypass_mode
            or cfg.algorithm.rollout_correction.loss_type == "reinforce"
        ),
        "in bypass mode the ratio holds the weights already; loss_type=reinforce reads them",
    ),
    Switch(
        f"{FILTER}.enable",
        (f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches"),
        lambda cfg: cfg.algorithm.filter_groups.enable,
    ),
    Switch(
        f"{OVERLONG}.enable",
        (f"{OVERLONG}.len", f"{OVERLONG}.penalty_factor", f"{OVERLONG}.capped"),
        lambda cfg: cfg.reward_model.overlong_buffer.enable,
    ),
)


def _aggregates_beside_the_loss(cfg: RunConfig) -> bool:
    """Whether a KL or an entropy is aggregated by `actor.loss_agg_mode`, whatever the policy loss is."""
    actor = cfg.actor_rollout_ref.actor
    return actor.use_kl_loss or actor.entropy_coeff != 0


_DEFAULTS = RunConfig()


def keys_without_effect(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    """Every setting that differs from its default and that nothing reads; each key once."""
    said: set[str] = set()
    for warning in (*_unread_by_estimator(cfg), *_unread_by_loss(cfg), *_switched_off(cfg), *_here(cfg)):
        if said.isdisjoint(warning.keys):
            yield warning
        said.update(warning.keys)


def _unread_by_estimator(cfg: RunConfig) -> Iterator[PlanWarning]:
    name = cfg.algorithm.adv_estimator
    return _unread(cfg, "algorithm", ESTIMATORS, name, f"algorithm.adv_estimator={name}")


def _unread_by_loss(cfg: RunConfig) -> Iterator[PlanWarning]:
    correction, name = cfg.algorithm.rollout_correction, loss_in_force(cfg)
    by = f"{ACTOR}.policy_loss.loss_mode={name}"
    if correction.bypass_mode:
        by = f"{CORRECTION}.loss_type={correction.loss_type}"
    return _unread(cfg, ACTOR, LOSSES, name, by)


def _unread(cfg: RunConfig, where: str, variants: Mapping[str, Variant], chosen: str, by: str) -> Iterator[PlanWarning]:
    """Settings that other variants declare to read and the chosen one does not, those with the same readers at once."""
    unread: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for variant in variants.values() for name in variant.reads):
        readers = tuple(reader for reader, variant in variants.items() if name in variant.reads)
        if chosen not in readers and _is_set(cfg, f"{where}.{name}"):
            unread.setdefault(readers, []).append(f"{where}.{name}")
    for readers, keys in unread.items():
        shown = ", ".join(readers) if len(readers) <= 3 else f"{', '.join(readers[:3])} and others"
        reads = "reads" if len(readers) == 1 else "read"
        yield _no_effect(keys, f"with {by}; {shown} {reads} {'it' if len(keys) == 1 else 'them'}")


def _switched_off(cfg: RunConfig) -> Iterator[PlanWarning]:
    for switch in SWITCHES:
        keys = [key for key in switch.keys if _is_set(cfg, key) and not _is_zero(_value(cfg, key))]
        if keys and not switch.is_on(cfg):
            why = f": {switch.why}" if switch.why else ""
            yield _no_effect(keys, f"with {switch.by}={_shown(_value(cfg, switch.by))}{why}", switch.level)


def _here(cfg: RunConfig) -> Iterator[PlanWarning]:
    for key, why in _unread_here(cfg).items():
        if _is_set(cfg, key):
            yield _no_effect([key], f"here: {why}")


def _unread_here(cfg: RunConfig) -> dict[str, str]:
    """Keys that the devices and the engine of a configuration do not read."""
    one_device = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes == 1
    transformers = cfg.actor_rollout_ref.rollout.name == "transformers"
    return {
        **NOWHERE,
        **(ON_ONE_DEVICE if one_device else {}),
        **(WITH_TRANSFORMERS if transformers else {}),
        **(WITH_TRANSFORMERS_ON_ONE_DEVICE if one_device and transformers else {}),
    }


def _no_effect(keys: list[str], when: str, level: Literal["warning", "info"] = "info") -> PlanWarning:
    has = "has" if len(keys) == 1 else "have"
    return PlanWarning("NO_EFFECT", tuple(keys), f"{' and '.join(keys)} {has} no effect {when}.", level)


def _is_set(cfg: RunConfig, key: str) -> bool:
    """Whether a key has another value than its default."""
    return _value(cfg, key) != _value(_DEFAULTS, key)


def _value(cfg: RunConfig, key: str) -> object:
    value: object = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _is_zero(value: object) -> bool:
    """Whether it is the number 0: a coefficient of 0 beside a switch that is off says the same thing twice."""
    return value == 0 and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
