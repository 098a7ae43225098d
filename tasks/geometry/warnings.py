"""What a legal configuration does that its user may not expect: said, not refused. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tasks.algorithms.variants import LOSSES
from tasks.config import ActorConfig, RunConfig
from tasks.geometry.algorithm_rules import (
    BELOW_ZERO,
    CORRECTION,
    FILTER,
    loss_in_force,
    normalised_one_by_one,
    users_of_rollout_log_probs,
)
from tasks.geometry.no_effect import keys_without_effect
from tasks.geometry.numbers import Facts, Numbers
from tasks.geometry.problems import Look, PlanWarning
from tasks.geometry.shape_rules import (
    ACTOR,
    DEVICES,
    GEN_BATCH,
    MICRO,
    MICRO_GLOBAL,
    MINI,
    REF,
    ROLLOUT,
    SP,
    TP,
    TRAIN_BATCH,
)


def find_warnings(cfg: RunConfig, numbers: Numbers, facts: Facts) -> tuple[PlanWarning, ...]:
    """All warnings of a configuration, warnings before infos."""
    found = [warning for look in _LOOKS for warning in look(cfg, numbers, facts)]
    return tuple(sorted(found, key=lambda warning: warning.level == "info"))


def _of_batches(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    sizes = numbers.prompts_of_mini_batches
    if len(sizes) > 1 and sizes[-1] != sizes[0]:
        per_rank = f", {list(numbers.mini_batches)} sequences per rank" if numbers.mini_batches else ""
        yield PlanWarning(
            "SHORT_LAST_MINI_BATCH",
            (MINI, TRAIN_BATCH),
            f"{numbers.prompts_per_step} prompts are {len(sizes)} mini-batches, the last one shorter: {list(sizes)} "
            f"prompts{per_rank}. Each is divided by its own count, so the short one takes an optimizer step of full "
            "size on fewer sequences.",
        )
    if numbers.on_policy and not cfg.algorithm.rollout_correction.bypass_mode:
        yield PlanWarning(
            "ON_POLICY",
            (MINI, f"{ACTOR}.ppo_epochs"),
            "one optimizer step per step: the ratio is 1 up to rounding when it is made, so nothing is clipped.",
            "info",
        )


def _of_micro_batches(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    actor, rollout, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.ref
    sizes = (
        (MICRO, actor.ppo_micro_batch_size_per_gpu, numbers.update_cut),
        (MICRO_GLOBAL, actor.ppo_micro_batch_size, numbers.update_cut),
        (
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            rollout.log_prob_micro_batch_size_per_gpu,
            numbers.old_log_prob_cut,
        ),
        (f"{ROLLOUT}.log_prob_micro_batch_size", rollout.log_prob_micro_batch_size, numbers.old_log_prob_cut),
        (f"{REF}.log_prob_micro_batch_size_per_gpu", ref.log_prob_micro_batch_size_per_gpu, numbers.ref_log_prob_cut),
        (f"{REF}.log_prob_micro_batch_size", ref.log_prob_micro_batch_size, numbers.ref_log_prob_cut),
    )
    unused = tuple(key for key, size, cut in sizes if size is not None and cut is not None and cut.by_tokens)
    if unused:
        yield PlanWarning(
            "MICRO_UNUSED", unused, f"{' and '.join(unused)} is not read: micro-batches are cut by tokens.", "info"
        )
    deprecated = tuple(
        key for key, size, _ in sizes if size is not None and not key.endswith("_per_gpu") and key not in unused
    )
    if deprecated:
        yield PlanWarning(
            "MICRO_DEPRECATED",
            deprecated,
            f"{' and '.join(deprecated)} counts sequences over all ranks and is deprecated in verl; …_per_gpu counts "
            "them per rank.",
        )
    share = numbers.micro_batches_per_mini_batch
    fewer = numbers.micro_batches_per_mini_batch_by_token_count
    if share and fewer and share != fewer:
        yield PlanWarning(
            "TOKEN_CAP_IS_REAL",
            (f"{ACTOR}.ppo_max_token_len_per_gpu",),
            f"at full length the cap makes {share[0]} micro-batches of a mini-batch; dividing tokens by the cap, as "
            f"verl does, makes {fewer[0]}, some of which exceed it.",
            "info",
        )


def _of_devices(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    rollout, node = cfg.actor_rollout_ref.rollout, cfg.trainer.n_gpus_per_node
    if rollout.name == "transformers" and numbers.devices_per_rollout_replica > 1:
        yield PlanWarning(
            "ENGINE_WITHOUT_TP",
            (TP, f"{ROLLOUT}.name"),
            f"{TP}={numbers.tp_size}: the transformers engine holds all weights on each device. Set 1, or "
            f"{ROLLOUT}.name=vllm.",
        )
    if numbers.rollout_replicas and numbers.gen_batch_prompts % numbers.rollout_replicas:
        low, replicas = numbers.gen_batch_prompts // numbers.rollout_replicas, numbers.rollout_replicas
        yield PlanWarning(
            "UNEVEN_REPLICAS",
            (TRAIN_BATCH, TP, DEVICES),
            f"{numbers.gen_batch_prompts} prompts over {replicas} rollout replicas: some get {low}, some {low + 1}.",
            "info",
        )
    if numbers.sp_size > 1 and (node % numbers.sp_size if numbers.sp_size <= node else numbers.sp_size % node):
        yield PlanWarning(
            "SP_ACROSS_NODES",
            (SP, DEVICES),
            f"{SP}={numbers.sp_size} does not divide the {node} devices of a node: some sequences are shared across "
            "nodes, which is slow.",
        )


def _of_lengths(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    data = cfg.data
    if not data.filter_overlong_prompts:
        consequence = {
            "error": "one such prompt refuses the data set before the first step",
            "left": "they lose their beginning",
            "right": "they lose their end",
            "middle": "they lose their middle",
        }[data.truncation]
        yield PlanWarning(
            "OVERLONG_NOT_FILTERED",
            ("data.filter_overlong_prompts", "data.truncation"),
            f"prompts longer than {data.max_prompt_length} tokens stay in the data set, and by "
            f"data.truncation={data.truncation} {consequence}.",
            "info" if data.truncation == "error" else "warning",
        )
    buffer = cfg.reward_model.overlong_buffer
    if buffer.enable and cfg.reward_model.reward_manager != "dapo":
        yield PlanWarning(
            "OVERLONG_BUFFER_IN_VERL",
            ("reward_model.overlong_buffer.enable", "reward_model.reward_manager"),
            "the overlong buffer is applied: here reward_model.overlong_buffer.enable alone decides. verl applies it "
            "with reward_model.reward_manager=dapo alone, so its rewards of this configuration are others.",
            "info",
        )


def _of_sampling(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    rollout = cfg.actor_rollout_ref.rollout
    filtered = [
        f"{ROLLOUT}.{name}={value}"
        for name, value, on in (
            ("top_p", rollout.top_p, rollout.top_p < 1),
            ("top_k", rollout.top_k, rollout.top_k > 0),
        )
        if on
    ]
    users = users_of_rollout_log_probs(cfg)
    if filtered and users:
        yield PlanWarning(
            "FILTERED_SAMPLING",
            (f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k", *users),
            f"{' and '.join(filtered)} cuts the distribution that tokens are drawn from, and the engine's log-probs "
            f"are those before the cut: what {' and '.join(users)} reads is not the probability of the draw, but that "
            "times the share that the cut leaves. Set top_p=1 and top_k=-1, or turn the correction off.",
        )
    if rollout.n == 1 and (rollout.temperature == 0 or not rollout.do_sample):
        yield PlanWarning(
            "GREEDY_TRAINING", (f"{ROLLOUT}.temperature", f"{ROLLOUT}.do_sample"), "training responses are greedy."
        )
    val = rollout.val_kwargs
    if val.n > 1 and (val.temperature == 0 or not val.do_sample):
        yield PlanWarning(
            "VAL_IDENTICAL",
            (f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.do_sample"),
            f"the {val.n} greedy responses to a validation prompt are identical. Set val_kwargs.do_sample=true with a "
            "temperature above 0, or n=1.",
        )
    if val.temperature > 0 and not val.do_sample:
        yield PlanWarning(
            "VAL_GREEDY",
            (f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature"),
            f"validation is greedy, whatever val_kwargs.temperature={val.temperature} says (verl samples at it). Set "
            "val_kwargs.do_sample=true to sample.",
        )


RATIO_CLIPPED = ("vanilla", "gspo", "clip_cov")
"""Losses that hold the ratio itself within 1 - clip_ratio_low .. 1 + clip_ratio_high and take its gradient. cispo's
bound has no gradient, and those of the others are on log ratios, differences of probabilities or nats."""
WIDEST_SEQUENCE_CLIP = 0.01
"""A clip range of a sequence's mean ratio above this was most likely meant for tokens."""


def _of_clipping(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    actor, loss = cfg.actor_rollout_ref.actor, loss_in_force(cfg)
    low, high, dual = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio_c"
    if loss == "dppo_tv" and max(actor.clip_low, actor.clip_high) >= 1:
        yield PlanWarning(
            "DPPO_TV_CLIP",
            (f"{ACTOR}.clip_ratio", low, high),
            f"dppo_tv bounds a difference of probabilities, which never reaches the clip range "
            f"{max(actor.clip_low, actor.clip_high):g}: no token is dropped on that side. 0.2 is usual.",
        )
    if loss not in RATIO_CLIPPED:
        return
    if actor.clip_low > 1:
        yield PlanWarning(
            "CLIP_LOW_ABOVE_ONE",
            (low, f"{ACTOR}.clip_ratio"),
            f"the lower clip bound 1 - {actor.clip_low} is negative, so a falling ratio is never clipped.",
        )
    if "clip_ratio_c" in LOSSES[loss].reads and actor.clip_ratio_c < 1 + actor.clip_high:
        yield PlanWarning(
            "DUAL_CLIP_LOW",
            (dual, high),
            f"{dual}={actor.clip_ratio_c:g} lies below the upper clip bound 1 + {actor.clip_high:g}, so negative "
            "advantages lose their gradient at ratios at which positive ones still have theirs. 3 is usual.",
        )
    widest = max(actor.clip_low, actor.clip_high)
    if loss == "gspo" and widest > WIDEST_SEQUENCE_CLIP:
        yield PlanWarning(
            "GSPO_CLIP",
            (low, high),
            "gspo clips the geometric mean of a sequence's ratios, which stays much nearer to 1 than the ratio of a "
            f"token: a clip range of {widest:g} hardly ever clips. The paper has clip_ratio_low=3e-4 and "
            "clip_ratio_high=4e-4.",
            "info",
        )


def _of_covariance(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    settings, loss, where = cfg.actor_rollout_ref.actor.policy_loss, loss_in_force(cfg), f"{ACTOR}.policy_loss"
    if loss == "kl_cov" and 0 in (settings.kl_cov_ratio, settings.ppo_kl_coef):
        off = "kl_cov_ratio" if settings.kl_cov_ratio == 0 else "ppo_kl_coef"
        yield PlanWarning(
            "KL_COV_OFF",
            (f"{where}.{off}", f"{where}.loss_mode"),
            f"{where}.{off}=0 leaves kl_cov without its penalty: what remains is the ratio times the advantage, which "
            "nothing clips. Set it above 0, or loss_mode=vanilla.",
        )
    if loss == "clip_cov" and settings.clip_cov_ratio == 0:
        yield PlanWarning(
            "CLIP_COV_OFF",
            (f"{where}.clip_cov_ratio", f"{where}.loss_mode"),
            f"{where}.clip_cov_ratio=0 selects no token: what remains is PPO's clip without the dual clip. Set it "
            "above 0, or loss_mode=vanilla.",
        )


def _of_aggregation(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    actor, loss = cfg.actor_rollout_ref.actor, loss_in_force(cfg)
    own, mode = LOSSES[loss].aggregation, actor.loss_agg_mode
    if own is not None and mode not in (own, ActorConfig().loss_agg_mode):
        others = " It holds for KL and entropy alone." if actor.use_kl_loss or actor.entropy_coeff else ""
        yield PlanWarning(
            "LOSS_AGGREGATION",
            (f"{ACTOR}.loss_agg_mode",),
            f"{ACTOR}.loss_agg_mode={mode} has no effect on the policy loss: {loss} is always {own}.{others}",
            "info",
        )


KL_LOSS_GRADIENTS: dict[tuple[str, bool], tuple[str, Literal["warning", "info"], str]] = {
    ("k1", False): (
        "KL_K1_IN_LOSS",
        "warning",
        "on the policy's own samples its expected gradient is 0, so it adds noise and holds nothing back. k2 and k1+ "
        f"have the gradient of the KL, k3 that of KL(reference || policy); {ACTOR}.use_unbiased_kl=true mends k1.",
    ),
    ("abs", False): (
        "KL_ABS_IN_LOSS",
        "info",
        "on the policy's own samples its expected gradient is that of twice the total variation distance to the "
        "reference, not that of the KL, which k2 and abs+ have.",
    ),
    ("k2", True): (
        "KL_RATIO_NOT_UNBIASED",
        "warning",
        "use_unbiased_kl=true makes the gradients of k1 and k3 that of the KL, but adds to this one's, which has it "
        "already without. Use k1 or k3, or a trailing +.",
    ),
    ("abs", True): (
        "KL_RATIO_NOT_UNBIASED",
        "warning",
        "use_unbiased_kl=true makes the gradients of k1 and k3 that of the KL, but not this one's. Use k1 or k3, or a "
        "trailing +.",
    ),
}
"""By `kl_loss_type` and `use_unbiased_kl`: estimators whose expected gradient in the loss is not that of the KL
(tasks/algorithms/kl.py), less k3, the usual one."""


def _of_kl(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    actor, key = cfg.actor_rollout_ref.actor, f"{ACTOR}.kl_loss_type"
    if actor.use_kl_loss and cfg.algorithm.use_kl_in_reward:
        yield PlanWarning(
            "KL_TWICE",
            (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"),
            "KL to the reference is paid twice: in the loss and in the reward.",
        )
    kind = {"kl": "k1", "mse": "k2"}.get(actor.kl_loss_type, actor.kl_loss_type)
    said = KL_LOSS_GRADIENTS.get((kind, actor.use_unbiased_kl)) if actor.use_kl_loss else None
    if said is not None:
        code, level, text = said
        yield PlanWarning(code, (key, f"{ACTOR}.use_unbiased_kl"), f"{key}={actor.kl_loss_type}: {text}", level)


def _of_importance_weights(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    correction, key = cfg.algorithm.rollout_correction, f"{CORRECTION}.rollout_is_threshold"
    text = str(correction.rollout_is_threshold)
    if correction.rollout_is is None or "_" in text or correction.rollout_is_mode == "mask":
        return
    try:
        bound = float(text)
    except ValueError:
        return
    if 0 < bound < 1:
        yield PlanWarning(
            "ROLLOUT_IS_BELOW_ONE",
            (key,),
            f"{key}={text} holds every weight of 1, where sampler and policy agree, at {text}, and so scales the "
            "policy loss as a whole by about that. 2 is usual.",
        )


def _of_bypass_mode(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    correction = cfg.algorithm.rollout_correction
    if correction.bypass_mode:
        yield PlanWarning(
            "BYPASS_MODE",
            (f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"),
            "the old-log-prob pass is skipped and the engine's log-probs are the ratio's denominator: from the first "
            "optimizer step on the ratio holds the gap between engine and policy. The loss is "
            f"loss_type={correction.loss_type}.",
            "info",
        )


def _of_off_policy_mask(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    threshold = cfg.actor_rollout_ref.actor.policy_loss.off_policy_mask_threshold
    if threshold is not None and not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        yield PlanWarning(
            "OFF_POLICY_MASK",
            (f"{ACTOR}.policy_loss.off_policy_mask_threshold", f"{ROLLOUT}.calculate_log_probs"),
            f"{ROLLOUT}.calculate_log_probs=false keeps no log-probs of the engine: off_policy_mask_threshold compares "
            "the policy with the old log-probs instead, and does not see the gap between engine and policy.",
            "info",
        )


def _of_filtered_groups(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    if cfg.algorithm.filter_groups.enable:
        yield PlanWarning(
            "FILTER_GROUPS",
            (f"{FILTER}.enable", GEN_BATCH, "trainer.total_epochs"),
            f"a step makes as many generate calls of {numbers.gen_batch_prompts} prompts as it takes to keep "
            f"{numbers.prompts_per_step} groups with a signal, and so may use more prompts than {TRAIN_BATCH}. "
            "They come from later passes over the data where need be: trainer.total_epochs sets the number of steps, "
            "not of passes.",
            "info",
        )


def _of_reward_parts(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    weighted = [one for one in cfg.reward.functions if one.weight != 1]
    by = normalised_one_by_one(cfg)
    if by is not None and weighted:
        yield PlanWarning(
            "FUNCTION_WEIGHTS",
            ("reward.functions", "algorithm.gdpo_reward_weights"),
            f"{by} does not read the weights in reward.functions, here of {', '.join(one.name for one in weighted)}: "
            "they count in the score alone. Its weights are algorithm.gdpo_reward_weights.",
        )


def _of_negative_rewards(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    reward = cfg.reward
    if reward.scale < 0:
        yield PlanWarning(
            "REWARD_SCALE_NEGATIVE",
            ("reward.scale",),
            f"reward.scale={reward.scale:g} turns rewards round: the responses with the lowest scores are learned.",
        )
    sources = ways_below_zero(cfg)
    if cfg.algorithm.adv_estimator == "maxrl" and sources:
        yield PlanWarning(
            "MAXRL_BELOW_ZERO",
            ("algorithm.adv_estimator", *dict.fromkeys(key for key, _ in sources)),
            "algorithm.adv_estimator=maxrl divides by the mean reward of a group and stops the step at a reward below "
            f"0, which {', '.join(text for _, text in sources)} can give. Set reward.clip_low=0 "
            "(it bounds rewards before reward.scale and KL), use other functions, or another estimator.",
        )


def ways_below_zero(cfg: RunConfig) -> list[tuple[str, str]]:
    """Settings by which a reward may lie below 0, as far as the configuration tells: (key, its value in words)."""
    reward, stop = cfg.reward, cfg.reward.stop_properly_coef
    ways = [
        ("reward.functions", f"the function {one.name}" + (f" of weight {one.weight:g}" if one.weight < 0 else ""))
        for one in reward.functions
        if one.name in BELOW_ZERO or one.weight < 0
    ]
    if cfg.reward_model.overlong_buffer.enable:
        ways.append(("reward_model.overlong_buffer.enable", "the overlong buffer"))
    if stop is not None and stop < 0:
        ways.append(("reward.stop_properly_coef", f"reward.stop_properly_coef={stop:g}"))
    if reward.clip_low is not None and reward.clip_low >= 0:
        ways = []
    if reward.scale < 0:
        ways.append(("reward.scale", f"reward.scale={reward.scale:g}"))
    if cfg.algorithm.use_kl_in_reward:
        ways.append(("algorithm.use_kl_in_reward", "KL in the reward"))
    return ways


def _of_duration(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    trainer, asked, per_epoch = cfg.trainer, cfg.trainer.total_training_steps, numbers.steps_per_epoch
    if asked is not None and per_epoch is not None and asked > per_epoch * trainer.total_epochs:
        available = per_epoch * trainer.total_epochs
        yield PlanWarning(
            "TOTAL_STEPS",
            ("trainer.total_training_steps", "trainer.total_epochs"),
            f"trainer.total_training_steps={asked}, but {trainer.total_epochs} epochs of {per_epoch} steps are "
            f"{available}: the run ends there, with its last validation and checkpoint. Raise trainer.total_epochs "
            "for more.",
        )
    optim, total = cfg.actor_rollout_ref.actor.optim, numbers.total_steps
    length = optim.total_training_steps if optim.total_training_steps > 0 else total
    if total and length and optim.lr_scheduler_type != "constant" and length != total:
        yield PlanWarning(
            "LR_LENGTH",
            (f"{ACTOR}.optim.total_training_steps",),
            f"the learning rate's schedule is {length} steps long, the run {total}.",
        )
    if length and optim.lr_warmup_steps > length:
        yield PlanWarning(
            "LR_WARMUP",
            (f"{ACTOR}.optim.lr_warmup_steps",),
            f"the warm-up of {optim.lr_warmup_steps} steps is longer than the schedule of {length}: the peak learning "
            "rate is never reached.",
        )
    moves = optim.lr_scheduler_type != "constant" or optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio > 0
    if moves and numbers.optimizer_steps_per_step > 1:
        yield PlanWarning(
            "LR_PER_STEP",
            (f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.lr_warmup_steps"),
            f"the schedule advances once per training step, so {numbers.optimizer_steps_per_step} optimizer steps "
            "share a learning rate.",
            "info",
        )


def _of_cadence(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    trainer = cfg.trainer
    if trainer.save_freq < 1 and not trainer.val_only:
        yield PlanWarning(
            "NEVER_SAVE",
            ("trainer.save_freq",),
            f"trainer.save_freq={trainer.save_freq}: the only checkpoint is the final one. A killed run replays its "
            "updates from the start.",
            "info",
        )
    if trainer.test_freq < 1 and cfg.data.val_files and not trainer.val_only:
        yield PlanWarning(
            "NEVER_TEST",
            ("trainer.test_freq",),
            f"trainer.test_freq={trainer.test_freq}: no validation while training, though data.val_files is set.",
            "info",
        )


_LOOKS: tuple[Look, ...] = (
    _of_batches,
    _of_micro_batches,
    _of_devices,
    _of_lengths,
    _of_sampling,
    _of_clipping,
    _of_covariance,
    _of_aggregation,
    _of_kl,
    _of_importance_weights,
    _of_bypass_mode,
    _of_off_policy_mask,
    _of_filtered_groups,
    _of_reward_parts,
    _of_negative_rewards,
    _of_duration,
    _of_cadence,
    keys_without_effect,
)
