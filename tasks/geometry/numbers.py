"""The counts of one training step, with their units in their names. Pure: no tensors, no I/O.

Nothing is rounded: a count that a configuration does not define, such as the rows of a rank where the division leaves a
remainder, is None, and the rules say why. Letters in comments: G devices, P and R tokens of the longest
prompt and response.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from tasks.config import RunConfig


@dataclass(frozen=True)
class ModelLimits:
    """What the planner has to know of a model: its limits and its sizes, by the names of `config.json`; None: unknown.

    Limits that are unknown are not checked. Sizes that are unknown leave the estimate of memory away.
    """

    max_position_embeddings: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    model_type: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    """Another word for `num_experts`."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    decoder_sparse_step: int | None = None


@dataclass(frozen=True)
class Facts:
    """What is known beside the configuration; None: unknown, and not checked."""

    train_prompts: int | None = None
    val_prompts: int | None = None
    model: ModelLimits = ModelLimits()


@dataclass(frozen=True)
class Mesh:
    """A named grid of devices, slowest axis first."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """How one pass cuts a rank's sequences into micro-batches: so many sequences, or so many tokens (a real cap)."""

    by_tokens: bool
    sequences_per_micro_batch: int | None
    """By number: sequences of a micro-batch. None under a cap, where it depends on lengths."""
    max_tokens_per_device: int | None
    token_budget: int | None
    """By tokens: tokens of a micro-batch, over the devices that share a sequence."""
    padded_sequence_tokens: int

    @property
    def full_length_sequences_per_micro_batch(self) -> int | None:
        """How many sequences of full length a micro-batch holds; 0: not one fits under the cap."""
        if self.token_budget is None:
            return self.sequences_per_micro_batch
        return self.token_budget // self.padded_sequence_tokens

    def micro_batches(self, sequences: int | None) -> int | None:
        """Micro-batches of so many sequences of full length; shorter ones need fewer under a cap."""
        held = self.full_length_sequences_per_micro_batch
        return ceil(sequences / held) if sequences is not None and held else None

    def micro_batches_by_token_count(self, sequences: int | None) -> int | None:
        """What the tokens alone would need, sequences cut at will: the lower bound, and the number verl makes."""
        if sequences is None or not self.token_budget:
            return None
        return min(sequences, ceil(sequences * self.padded_sequence_tokens / self.token_budget))


@dataclass(frozen=True)
class Numbers:
    """Every count of a step.

    A sequence is the prompt and response of one sample; a rank is a data-parallel rank: `sp_size` devices that see the
    same sequences.
    """

    world_size: int
    """Devices."""
    sp_size: int
    """Devices that share one sequence in the policy's passes (Ulysses)."""
    dp_size: int | None
    """Ranks: groups of devices that see different sequences."""
    tp_size: int
    """Devices that share one copy of the engine's weights."""
    devices_per_rollout_replica: int
    rollout_replicas: int | None
    fsdp_mesh: Mesh | None
    ulysses_mesh: Mesh | None
    """None: every device is a rank of its own."""
    rollout_mesh: Mesh | None
    dp_rank_of_device: tuple[int, ...]

    prompts_per_step: int
    gen_batch_prompts: int
    """Prompts of one generate call; with filtered groups a step may make several."""
    samples_per_prompt: int
    sequences_per_step: int
    sequences_per_gen_batch: int
    prompts_per_rollout_replica: float | None
    """Whole where replicas divide the prompts; else the mean."""
    sequences_per_rollout_replica: float | None
    sequences_per_rank: int | None

    prompts_per_mini_batch: int
    sequences_per_mini_batch: int
    """Over all devices."""
    sequences_per_mini_batch_per_rank: int | None
    mini_batches: tuple[int, ...]
    """Sequences per rank of every mini-batch of an epoch; the last may be shorter. Empty: ranks do not divide them."""
    prompts_of_mini_batches: tuple[int, ...]
    """The same in prompts over all devices: a mini-batch consists of whole groups."""
    sequences_per_micro_batch: int | None
    """None: cut by tokens."""
    micro_batches_per_mini_batch: tuple[int, ...]
    """Of every mini-batch on one rank, at full length."""
    micro_batches_per_mini_batch_by_token_count: tuple[int, ...]
    """Cut by tokens: the lower bound."""
    grad_accumulation_steps: int | None
    """Micro-batches behind one optimizer step of a full mini-batch; None: cut by tokens."""
    ppo_epochs: int
    optimizer_steps_per_step: int
    on_policy: bool
    """One optimizer step per step: the ratio is 1, up to rounding, when it is made."""

    prompt_length: int
    response_length: int
    padded_sequence_tokens: int
    update_cut: Cut
    old_log_prob_cut: Cut | None
    """None: bypass_mode skips the pass."""
    ref_log_prob_cut: Cut | None
    """None: no reference is needed."""
    old_log_prob_forwards_per_rank: int | None
    ref_log_prob_forwards_per_rank: int | None
    needs_ref: bool
    ref_in_actor: bool
    """With LoRA the reference is the policy with its adapter off."""

    train_prompts: int | None
    """Training prompts after `data.train_max_samples`; None: unknown."""
    steps_per_epoch: int | None
    """A remainder smaller than a batch is not used. With filtered groups: the most there can be."""
    total_epochs: int
    total_steps: int | None
    val_prompts: int | None
    val_sequences: int | None


def count(cfg: RunConfig, facts: Facts) -> Numbers:
    """Every count of a step, as far as the configuration defines it."""
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    world = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    sp = actor.ulysses_sequence_parallel_size
    dp = divided(world, sp)
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    replicas = divided(prod(cfg.sampling_devices), replica)
    n = rollout.n
    gen = cfg.data.gen_batch_size or cfg.data.train_batch_size
    prompts = cfg.data.train_batch_size if cfg.algorithm.filter_groups.enable else gen

    mini = actor.ppo_mini_batch_size
    mini_prompts = (mini,) * (prompts // mini) + ((prompts % mini,) if prompts % mini else ())
    mini_rows = [divided(size * n, dp) for size in mini_prompts]
    mini_batches = tuple(rows for rows in mini_rows if rows is not None) if None not in mini_rows else ()
    full_mini_rows = divided(mini * n, dp)
    rows = divided(prompts * n, dp)

    update, old, ref = update_cut(cfg, dp), old_log_prob_cut(cfg, dp), ref_log_prob_cut(cfg, dp)
    counted = [update.micro_batches(size) for size in mini_batches]
    by_tokens = [update.micro_batches_by_token_count(size) for size in mini_batches]
    train_prompts, val_prompts = (
        _used(facts.train_prompts, cfg.data.train_max_samples),
        _used(facts.val_prompts, cfg.data.val_max_samples),
    )
    per_epoch = _steps_per_epoch(train_prompts, prompts, gen)
    return Numbers(
        world_size=world,
        sp_size=sp,
        dp_size=dp,
        tp_size=rollout.tensor_model_parallel_size,
        devices_per_rollout_replica=replica,
        rollout_replicas=replicas,
        fsdp_mesh=_fsdp_mesh(world, actor.fsdp_config.fsdp_size),
        ulysses_mesh=Mesh((dp, sp), ("dp", "sp")) if sp > 1 and dp else None,
        rollout_mesh=_rollout_mesh(cfg, replicas),
        dp_rank_of_device=tuple(device // sp for device in range(world)) if dp else (),
        prompts_per_step=prompts,
        gen_batch_prompts=gen,
        samples_per_prompt=n,
        sequences_per_step=prompts * n,
        sequences_per_gen_batch=gen * n,
        prompts_per_rollout_replica=_share(gen, replicas),
        sequences_per_rollout_replica=_share(gen * n, replicas),
        sequences_per_rank=rows,
        prompts_per_mini_batch=mini,
        sequences_per_mini_batch=mini * n,
        sequences_per_mini_batch_per_rank=full_mini_rows,
        mini_batches=mini_batches,
        prompts_of_mini_batches=mini_prompts,
        sequences_per_micro_batch=update.sequences_per_micro_batch,
        micro_batches_per_mini_batch=_complete(counted),
        micro_batches_per_mini_batch_by_token_count=_complete(by_tokens),
        grad_accumulation_steps=divided(full_mini_rows, update.sequences_per_micro_batch),
        ppo_epochs=actor.ppo_epochs,
        optimizer_steps_per_step=actor.ppo_epochs * len(mini_prompts),
        on_policy=actor.ppo_epochs == 1 and len(mini_prompts) == 1,
        prompt_length=cfg.prompt_length,
        response_length=cfg.response_length,
        padded_sequence_tokens=cfg.prompt_length + cfg.response_length,
        update_cut=update,
        old_log_prob_cut=old,
        ref_log_prob_cut=ref,
        old_log_prob_forwards_per_rank=old.micro_batches(rows) if old else None,
        ref_log_prob_forwards_per_rank=ref.micro_batches(rows) if ref else None,
        needs_ref=cfg.needs_ref,
        ref_in_actor=_has_adapter(cfg),
        train_prompts=train_prompts,
        steps_per_epoch=per_epoch,
        total_epochs=cfg.trainer.total_epochs,
        total_steps=_total_steps(cfg, per_epoch),
        val_prompts=val_prompts,
        val_sequences=val_prompts * rollout.val_kwargs.n if val_prompts is not None else None,
    )


# --------------------------------------------------------------------------------------------------- micro-batches


def update_cut(cfg: RunConfig, dp: int | None) -> Cut:
    """How the update cuts a rank's share of a mini-batch."""
    actor = cfg.actor_rollout_ref.actor
    size = actor.ppo_micro_batch_size_per_gpu or divided(actor.ppo_micro_batch_size, dp)
    return _cut(cfg, actor.use_dynamic_bsz, size, actor.ppo_max_token_len_per_gpu)


def old_log_prob_cut(cfg: RunConfig, dp: int | None) -> Cut | None:
    """How the old log-prob pass cuts a rank's sequences; None: there is no such pass."""
    if cfg.algorithm.rollout_correction.bypass_mode:
        return None
    rollout = cfg.actor_rollout_ref.rollout
    size = rollout.log_prob_micro_batch_size_per_gpu or divided(rollout.log_prob_micro_batch_size, dp)
    return _log_prob_cut(cfg, rollout.log_prob_use_dynamic_bsz, size, rollout.log_prob_max_token_len_per_gpu)


def ref_log_prob_cut(cfg: RunConfig, dp: int | None) -> Cut | None:
    """How the reference pass cuts a rank's sequences, LoRA's included; None: there is no such pass."""
    if not cfg.needs_ref:
        return None
    ref = cfg.actor_rollout_ref.ref
    size = ref.log_prob_micro_batch_size_per_gpu or divided(ref.log_prob_micro_batch_size, dp)
    return _log_prob_cut(cfg, ref.log_prob_use_dynamic_bsz, size, ref.log_prob_max_token_len_per_gpu)


def _log_prob_cut(cfg: RunConfig, by_tokens: bool | None, size: int | None, cap: int | None) -> Cut:
    actor = cfg.actor_rollout_ref.actor
    return _cut(
        cfg, actor.use_dynamic_bsz if by_tokens is None else by_tokens, size, cap or actor.ppo_max_token_len_per_gpu
    )


def _cut(cfg: RunConfig, by_tokens: bool, size: int | None, cap: int) -> Cut:
    sp = cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    return Cut(
        by_tokens=by_tokens,
        sequences_per_micro_batch=None if by_tokens else size,
        max_tokens_per_device=cap if by_tokens else None,
        token_budget=cap * sp if by_tokens else None,
        padded_sequence_tokens=cfg.prompt_length + cfg.response_length,
    )


# ---------------------------------------------------------------------------------------------------------- meshes


def _fsdp_mesh(world: int, size: int) -> Mesh | None:
    """All devices on one axis, or replicas x shards where a copy of the weights takes fewer devices."""
    if size < 0 or size >= world:
        return Mesh((world,), ("fsdp",))
    copies = divided(world, size)
    return Mesh((copies, size), ("ddp", "fsdp")) if copies else None


def _rollout_mesh(cfg: RunConfig, replicas: int | None) -> Mesh | None:
    rollout = cfg.actor_rollout_ref.rollout
    if replicas is None:
        return None
    inner = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return Mesh((replicas, inner, rollout.pipeline_model_parallel_size), ("dp", "infer_tp", "infer_pp"))


def _has_adapter(cfg: RunConfig) -> bool:
    model = cfg.actor_rollout_ref.model
    return model.lora_rank > 0 or model.lora_adapter_path is not None


# ------------------------------------------------------------------------------------------------ steps and arithmetic


def _steps_per_epoch(train_prompts: int | None, prompts: int, gen: int) -> int | None:
    """Full batches of an epoch. A step that filters groups draws at least as many generate batches as fill it."""
    if train_prompts is None:
        return None
    draws_per_step = ceil(prompts / gen)
    return train_prompts // gen // draws_per_step


def _total_steps(cfg: RunConfig, steps_per_epoch: int | None) -> int | None:
    """The epochs' steps, or fewer if asked for. A run never outlasts its epochs."""
    asked = cfg.trainer.total_training_steps
    if steps_per_epoch is None:
        return asked
    available = steps_per_epoch * cfg.trainer.total_epochs
    return available if asked is None else min(asked, available)


def _used(rows: int | None, most: int) -> int | None:
    return rows if rows is None or most < 0 else min(rows, most)


def divided(whole: int | None, parts: int | None) -> int | None:
    """`whole / parts` where that is a whole number, else None."""
    if whole is None or not parts or whole % parts:
        return None
    return whole // parts


def _share(whole: int, parts: int | None) -> float | None:
    if not parts:
        return None
    return whole // parts if whole % parts == 0 else whole / parts


def _complete(counts: list[int | None]) -> tuple[int, ...]:
    known = tuple(value for value in counts if value is not None)
    return known if len(known) == len(counts) else ()
