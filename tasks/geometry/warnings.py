"""What a legal configuration does that its user may not expect: said, not refused. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tasks.config import RunConfig
from tasks.geometry.numbers import Facts, Numbers
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


@dataclass(frozen=True)
class PlanWarning:
    """Something to know; `info` where it is often intended."""

    code: str
    keys: tuple[str, ...]
    message: str
    level: Literal["warning", "info"] = "warning"

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


_Look = Callable[[RunConfig, Numbers, Facts], Iterator[PlanWarning]]


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
    if numbers.on_policy:
        yield PlanWarning(
            "ON_POLICY",
            (MINI, f"{ACTOR}.ppo_epochs"),
            "one optimizer step per step: the ratio is 1 up to rounding when it is made, so nothing is clipped.",
            "info",
        )
    filtered = cfg.algorithm.filter_groups
    if filtered.enable:
        yield PlanWarning(
            "FILTER_GROUPS",
            ("algorithm.filter_groups.enable", GEN_BATCH),
            f"a step makes as many generate calls of {numbers.gen_batch_prompts} prompts as it takes to keep "
            f"{numbers.prompts_per_step} groups with a signal; steps per epoch are the most there can be.",
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
            "OVERLONG_BUFFER_UNUSED",
            ("reward_model.overlong_buffer.enable", "reward_model.reward_manager"),
            "in verl only reward_model.reward_manager=dapo applies the overlong buffer.",
        )


def _of_sampling(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    rollout, correction = cfg.actor_rollout_ref.rollout, cfg.algorithm.rollout_correction
    filtered = [
        f"{ROLLOUT}.{name}={value}"
        for name, value, on in (
            ("top_p", rollout.top_p, rollout.top_p < 1),
            ("top_k", rollout.top_k, rollout.top_k > 0),
        )
        if on
    ]
    if filtered and (correction.bypass_mode or correction.rollout_is or correction.rollout_rs):
        yield PlanWarning(
            "FILTERED_SAMPLING",
            (f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k", "algorithm.rollout_correction"),
            f"{' and '.join(filtered)} samples from a cut distribution, so rollout correction compares log-probs of "
            "two different ones.",
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


def _of_algorithm(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    actor = cfg.actor_rollout_ref.actor
    if actor.use_kl_loss and cfg.algorithm.use_kl_in_reward:
        yield PlanWarning(
            "KL_TWICE",
            (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"),
            "KL to the reference is paid twice: in the loss and in the reward.",
        )
    if actor.clip_low > 1 and actor.policy_loss.loss_mode != "cispo":
        yield PlanWarning(
            "CLIP_LOW_ABOVE_ONE",
            (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
            f"the lower clip bound 1 - {actor.clip_low} is negative, so a falling ratio is never clipped.",
        )


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


NO_EFFECT = {
    "data.val_batch_size": "validation goes through the engine in waves of rollout.max_num_seqs",
    "algorithm.lam": "no critic-free estimator reads it",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "weights are not sharded on one device",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "weights are not sharded on one device",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": "one device has nothing to reduce over",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "the transformers engine takes the memory it needs",
    "actor_rollout_ref.rollout.enforce_eager": "the transformers engine captures no graphs",
    "actor_rollout_ref.rollout.free_cache_engine": "the transformers engine frees its cache after every call",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the transformers engine prefills whole prompts",
    "actor_rollout_ref.rollout.load_format": "the transformers engine samples from the policy's own weights",
}
"""Keys that one device with the transformers engine does not read, and why."""


def _of_keys_without_effect(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[PlanWarning]:
    if numbers.world_size > 1 or cfg.actor_rollout_ref.rollout.name != "transformers":
        return
    default = RunConfig()
    for key, why in NO_EFFECT.items():
        if _value(cfg, key) != _value(default, key):
            yield PlanWarning("NO_EFFECT", (key,), f"{key} has no effect here: {why}.", "info")


def _value(cfg: RunConfig, key: str) -> object:
    value: object = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


_LOOKS: tuple[_Look, ...] = (
    _of_batches,
    _of_micro_batches,
    _of_devices,
    _of_lengths,
    _of_sampling,
    _of_algorithm,
    _of_duration,
    _of_cadence,
    _of_keys_without_effect,
)
