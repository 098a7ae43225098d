"""The rules of devices, batches, mini-batches and micro-batches: exact, or refused. Pure.

verl has some of them; where it lacks one it rounds down, weights an update wrongly or crashes after generation.
Sequences are spread over ranks exactly: a remainder is refused, not padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, gcd, prod

from pydantic import BaseModel

from tasks.config import RunConfig
from tasks.geometry.numbers import Cut, Facts, Numbers, divided
from tasks.geometry.problems import MOST_TRIES, Draft, Rule, Try, divisors, multiples

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
TRAIN_BATCH = "data.train_batch_size"
GEN_BATCH = "data.gen_batch_size"
MINI = f"{ACTOR}.ppo_mini_batch_size"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
MICRO_GLOBAL = f"{ACTOR}.ppo_micro_batch_size"
SAMPLES = f"{ROLLOUT}.n"
SP = f"{ACTOR}.ulysses_sequence_parallel_size"
TP = f"{ROLLOUT}.tensor_model_parallel_size"
DEVICES = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"

# ---------------------------------------------------------------------------------------------------- devices, meshes


def _check_sequence_parallel(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    sp, world = numbers.sp_size, numbers.world_size
    tries = (Try(SP, sp, *divisors(world, sp)),)
    if world % sp:
        yield Draft(
            "SP_DIV",
            (SP, DEVICES, NODES),
            f"{SP}={sp} does not divide {world} devices: some would belong to no rank.",
            f"{DEVICES} {cfg.trainer.n_gpus_per_node} x {NODES} {cfg.trainer.nnodes} = {world}; {world} % {sp} = "
            f"{world % sp}",
            tries,
        )
    if sp > 1 and not cfg.actor_rollout_ref.model.use_remove_padding:
        key = "actor_rollout_ref.model.use_remove_padding"
        yield Draft(
            "SP_NEEDS_REMOVE_PADDING",
            (SP, key),
            f"{SP}={sp} cuts packed sequences, and {key}=false leaves them padded. Set {key}=true, or {SP}=1.",
            "sequence parallelism needs packed sequences",
            tries,
        )
    if sp > 1 and cfg.actor_rollout_ref.model.attn_implementation == "eager":
        key = "actor_rollout_ref.model.attn_implementation"
        yield Draft(
            "SP_ATTENTION",
            (SP, key),
            f"{SP}={sp} cuts packed sequences, which {key}=eager does not compute. Leave it out, set sdpa, or {SP}=1.",
            "sequence parallelism needs sdpa, flash_attention_2 or no choice of attention",
            tries,
        )
    heads, kv_heads = facts.model.num_attention_heads, facts.model.num_key_value_heads
    if heads is not None and heads % sp:
        yield Draft(
            "SP_HEADS",
            (SP,),
            f"{SP}={sp} does not divide the model's {heads} attention heads.",
            f"num_attention_heads {heads} % {sp} = {heads % sp}, must be 0",
            tries,
        )
    if kv_heads is not None and kv_heads % sp and sp % kv_heads:
        yield Draft(
            "SP_KV_HEADS",
            (SP,),
            f"{SP}={sp} and the model's {kv_heads} key-value heads do not divide each other.",
            f"num_key_value_heads {kv_heads} % {sp} = {kv_heads % sp} and {sp} % {kv_heads} = {sp % kv_heads}, one "
            "must be 0",
            tries,
        )


def _check_reference_parallel(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    ref, actor = cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.actor
    for code, name, wanted, given in (
        ("REF_SP", "ulysses_sequence_parallel_size", ref.ulysses_sequence_parallel_size, numbers.sp_size),
        ("REF_FSDP", "fsdp_config.fsdp_size", ref.fsdp_config.fsdp_size, actor.fsdp_config.fsdp_size),
    ):
        if wanted in (None, -1, given):  # as the policy
            continue
        key, other = f"{REF}.{name}", f"{ACTOR}.{name}"
        lower, upper = ((given,), ()) if given < wanted else ((), (given,))
        yield Draft(
            code,
            (key, other),
            f"{key}={wanted} differs from {other}={given}, but the reference lies on the policy's ranks as the policy "
            f"does, and gets its rows. Leave it out, or set {given}.",
            f"{wanted} != {given}",
            (Try(key, wanted, lower, upper),),
        )


def _check_fsdp_size(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    size, world = cfg.actor_rollout_ref.actor.fsdp_config.fsdp_size, numbers.world_size
    if numbers.fsdp_mesh is not None:
        return
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    rule = (
        f"{world} devices % {size} = {world % size}, must be 0" if size else "a shard group of 0 devices holds nothing"
    )
    yield Draft(
        "FSDP_SIZE",
        (key, DEVICES, NODES),
        f"{key}={size} does not divide {world} devices: some would hold no shard. -1 means all devices.",
        rule,
        (Try(key, size, *divisors(world, size)),),
    )


def _check_rollout_parallel(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    rollout, world = cfg.actor_rollout_ref.rollout, prod(cfg.sampling_devices)
    size, node = numbers.devices_per_rollout_replica, cfg.sampling_devices[1]
    stages = rollout.pipeline_model_parallel_size
    tries = (Try(TP, numbers.tp_size, *divisors(world, numbers.tp_size)),)
    keys = (TP, f"{ROLLOUT}.data_parallel_size", DEVICES, NODES)
    product = (
        f"tensor {numbers.tp_size} x data {rollout.data_parallel_size} x pipeline {stages} = {size} devices per replica"
    )
    if stages > 1:
        key = f"{ROLLOUT}.pipeline_model_parallel_size"
        yield Draft(
            "PIPELINE",
            (key,),
            f"{key}={stages}: no engine here has pipeline stages. Set 1.",
            "pipeline stages must be 1",
            (Try(key, stages, (1,)),),
        )
    if world % size:
        yield Draft(
            "TP_DIV",
            keys,
            f"rollout replicas of {size} devices do not divide {world} devices.",
            f"{product}; {world} % {size} = {world % size}, must be 0",
            tries,
        )
    elif (size <= node and node % size) or (size > node and size % node):
        yield Draft(
            "TP_NODE",
            keys,
            f"rollout replicas of {size} devices do not fit nodes of {node} devices: a replica would straddle two "
            "nodes.",
            f"{product}; neither {node} % {size} nor {size} % {node} is 0",
            tries,
        )


# ------------------------------------------------------------------------------------------------ batches, mini-batches


def _check_batch(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    ranks, sequences = numbers.dp_size, numbers.sequences_per_step
    if not ranks or sequences % ranks == 0:
        return
    key, prompts = _batch_key(cfg)
    yield Draft(
        "BATCH_DIV",
        (key, SAMPLES, DEVICES),
        f"the step's {sequences} sequences do not spread evenly over {ranks} data-parallel ranks.",
        f"{key} {prompts} x {SAMPLES} {numbers.samples_per_prompt} = {sequences}; {sequences} % {ranks} = "
        f"{sequences % ranks}, must be 0",
        (_batch_try(cfg, numbers), samples_try(numbers)),
    )


def _check_gen_batch(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    gen, train, filtered = cfg.data.gen_batch_size, cfg.data.train_batch_size, cfg.algorithm.filter_groups
    if gen is not None and gen != train and not filtered.enable:
        lower, upper = ((train,), ()) if train < gen else ((), (train,))
        yield Draft(
            "GEN_BATCH_SIZE",
            (GEN_BATCH, TRAIN_BATCH, "algorithm.filter_groups.enable"),
            f"{GEN_BATCH}={gen} and {TRAIN_BATCH}={train} both say how many prompts a step trains on (verl trains on "
            f"{gen}). Leave {GEN_BATCH} out, or set algorithm.filter_groups.enable=true, which draws {gen} prompts at "
            f"a time until {train} groups are left.",
            f"without filtered groups {gen} must equal {train}",
            (Try(GEN_BATCH, gen, lower, upper),),
        )
    most = filtered.max_num_gen_batches
    if filtered.enable and most > 0 and numbers.gen_batch_prompts * most < train:
        key = "algorithm.filter_groups.max_num_gen_batches"
        needed = ceil(train / numbers.gen_batch_prompts)
        yield Draft(
            "FILTER_CANNOT_FILL",
            (key, GEN_BATCH, TRAIN_BATCH),
            f"{key}={most} generate calls of {numbers.gen_batch_prompts} prompts can never fill a step of {train} "
            "prompts.",
            f"{numbers.gen_batch_prompts} x {most} = {numbers.gen_batch_prompts * most}, must be at least {train}",
            (Try(key, most, (), (needed,)),),
        )


def _check_mini_batch(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    mini, n, ranks = numbers.prompts_per_mini_batch, numbers.samples_per_prompt, numbers.dp_size
    key, prompts = _batch_key(cfg)
    if mini > prompts:
        period = _mini_period(numbers)
        largest = prompts // period * period
        once = ", which means one update per step" if largest == prompts else ""
        yield Draft(
            "MINI_GT_BATCH",
            (MINI, key),
            f"{MINI}={mini} is more than {key}={prompts}. Both count prompts, not sequences. The largest legal "
            f"mini-batch is {largest}{once}.",
            f"{MINI} {mini} <= {key} {prompts}",
            (
                Try(MINI, mini, range(largest, 0, -period)),
                Try(key, prompts, (), multiples(_prompt_period(ranks, numbers), mini - 1)[1]),
            ),
        )
    if ranks and mini * n % ranks:
        yield Draft(
            "MINI_DIV",
            (MINI, SAMPLES, DEVICES),
            f"a mini-batch of {mini * n} sequences does not spread evenly over {ranks} data-parallel ranks (verl "
            f"rounds down to {mini * n // ranks} per rank and makes more updates than the keys say).",
            f"{MINI} {mini} prompts x {SAMPLES} {n} = {mini * n} sequences; {mini * n} % {ranks} = "
            f"{mini * n % ranks}, must be 0",
            (_mini_try(numbers), samples_try(numbers)),
        )


# ------------------------------------------------------------------------------------------------------ micro-batches


def _check_update_micro_batch(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    actor, share = cfg.actor_rollout_ref.actor, numbers.sequences_per_mini_batch_per_rank
    size = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz:
        yield from _check_micro_keys(MICRO, size, MICRO_GLOBAL, actor.ppo_micro_batch_size, numbers)
    if share is None:
        return
    if size is not None and share % size:
        yield _mini_mod_micro(cfg, numbers, MICRO, size, size, Try(MICRO, size, *divisors(share, size)))
    if size is None and actor.ppo_micro_batch_size is not None and not actor.use_dynamic_bsz:
        ranks, total = numbers.dp_size or 1, actor.ppo_micro_batch_size
        own = divided(total, ranks)
        if own is not None and share % own:
            lower, upper = divisors(share, own)
            tries = Try(MICRO_GLOBAL, total, [part * ranks for part in lower], [part * ranks for part in upper])
            yield _mini_mod_micro(cfg, numbers, MICRO_GLOBAL, total, own, tries)


def _mini_mod_micro(cfg: RunConfig, numbers: Numbers, key: str, value: int, size: int, tries: Try) -> Draft:
    """A micro-batch that is larger than a rank's share of the mini-batch, or does not divide it."""
    share, ranks, n = numbers.sequences_per_mini_batch_per_rank or 0, numbers.dp_size or 1, numbers.samples_per_prompt
    problem = "is larger than" if size > share else "does not divide"
    unused = (
        f" {ACTOR}.use_dynamic_bsz=true does not read it: leave it out."
        if cfg.actor_rollout_ref.actor.use_dynamic_bsz
        else ""
    )
    per_rank = "" if key == MICRO else f" = {size} per rank"
    return Draft(
        "MINI_MOD_MICRO",
        (key, MINI, SAMPLES),
        f"{key}={value}{per_rank} {problem} the {share} sequences that each rank has of a mini-batch.{unused}",
        f"{MINI} {numbers.prompts_per_mini_batch} prompts x {SAMPLES} {n} / {ranks} ranks = {share} sequences; "
        f"{share} / {size} = {share / size:.4g} micro-batches, must be whole",
        (tries, _mini_try(numbers)),
    )


def _check_log_prob_micro_batches(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    for where, cut in ((ROLLOUT, numbers.old_log_prob_cut), (REF, numbers.ref_log_prob_cut)):
        if cut is not None and not cut.by_tokens:
            section = cfg.actor_rollout_ref.rollout if where == ROLLOUT else cfg.actor_rollout_ref.ref
            yield from _check_micro_keys(
                f"{where}.log_prob_micro_batch_size_per_gpu",
                section.log_prob_micro_batch_size_per_gpu,
                f"{where}.log_prob_micro_batch_size",
                section.log_prob_micro_batch_size,
                numbers,
            )


def _check_micro_keys(
    key: str, size: int | None, global_key: str, total: int | None, numbers: Numbers
) -> Iterator[Draft]:
    """Exactly one of the two spellings is set, and the global one is a whole number of sequences per rank."""
    ranks = numbers.dp_size
    if size is None and total is None:
        share = numbers.sequences_per_mini_batch_per_rank if key == MICRO else numbers.sequences_per_rank
        candidates = reversed(divisors(share, 9)[0]) if share else ()
        yield Draft(
            "MICRO_MISSING",
            (key,),
            f"{key} is not set, so nothing says how many sequences one forward holds. Set it, or cut by tokens with "
            f"{ACTOR}.use_dynamic_bsz=true.",
            "without dynamic batching a micro-batch size is needed",
            (Try(key, None, (), sorted(candidates, reverse=True)),),
        )
    if size is not None and total is not None:
        yield Draft(
            "MICRO_BOTH",
            (key, global_key),
            f"{key}={size} and {global_key}={total} are both set. Leave out {global_key}, which verl has deprecated.",
            "one of the two, not both",
        )
    if size is None and total is not None and ranks and total % ranks:
        lower, upper = multiples(ranks, total)
        yield Draft(
            "MICRO_GLOBAL_DIV",
            (global_key, key),
            f"{global_key}={total} counts sequences over all ranks and does not spread over {ranks} of them. {key} "
            "says it per rank.",
            f"{total} % {ranks} = {total % ranks}, must be 0",
            (Try(global_key, total, lower, upper),),
        )


def _check_token_caps(cfg: RunConfig, numbers: Numbers, facts: Facts) -> Iterator[Draft]:
    own_cap = f"{ACTOR}.ppo_max_token_len_per_gpu"
    old_cap, ref_cap = f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu"
    passes: tuple[tuple[str, str, Cut | None], ...] = (
        ("update", own_cap, numbers.update_cut),
        ("old log-prob pass", _set_or(cfg.actor_rollout_ref.rollout, old_cap, own_cap), numbers.old_log_prob_cut),
        ("reference pass", _set_or(cfg.actor_rollout_ref.ref, ref_cap, own_cap), numbers.ref_log_prob_cut),
    )
    refused: set[str] = set()
    for name, key, cut in passes:
        if cut is None or cut.token_budget is None or cut.token_budget >= cut.padded_sequence_tokens or key in refused:
            continue
        refused.add(key)
        cap, needed = cut.max_tokens_per_device, ceil(cut.padded_sequence_tokens / numbers.sp_size)
        yield Draft(
            "TOKEN_CAP",
            (key, "data.max_prompt_length", "data.max_response_length"),
            f"{key}={cap} is less than one sequence of full length, so the {name} may meet one that fits no "
            "micro-batch.",
            f"cap {cap} x sequence-parallel {numbers.sp_size} = {cut.token_budget} tokens; prompt "
            f"{numbers.prompt_length} + response {numbers.response_length} = {cut.padded_sequence_tokens}, must fit",
            (Try(key, cap, (), (needed,)),),
        )


def _set_or(section: BaseModel, key: str, otherwise: str) -> str:
    return otherwise if getattr(section, key.rsplit(".", 1)[1]) is None else key


# -------------------------------------------------------------------------------------------------- candidate values


def _batch_try(cfg: RunConfig, numbers: Numbers) -> Try:
    """Prompts of a step that ranks divide."""
    key, prompts = _batch_key(cfg)
    return Try(key, prompts, *multiples(_prompt_period(numbers.dp_size, numbers), prompts))


def _batch_key(cfg: RunConfig) -> tuple[str, int]:
    """Which key says how many prompts a step trains on, and what it says."""
    if cfg.data.gen_batch_size and not cfg.algorithm.filter_groups.enable:
        return GEN_BATCH, cfg.data.gen_batch_size
    return TRAIN_BATCH, cfg.data.train_batch_size


def _prompt_period(parts: int | None, numbers: Numbers) -> int:
    """Smallest number of prompts whose sequences can be cut into so many equal parts."""
    return (parts or 1) // gcd(parts or 1, numbers.samples_per_prompt)


def _mini_period(numbers: Numbers) -> int:
    """Smallest mini-batch, in prompts, that fills whole micro-batches on every rank."""
    return _prompt_period((numbers.dp_size or 1) * (numbers.sequences_per_micro_batch or 1), numbers)


def _mini_try(numbers: Numbers) -> Try:
    value = numbers.prompts_per_mini_batch
    lower, upper = multiples(_mini_period(numbers), value, most=numbers.prompts_per_step)
    return Try(MINI, value, [size for size in lower if size <= numbers.prompts_per_step], upper)


def samples_try(numbers: Numbers) -> Try:
    n = numbers.samples_per_prompt
    return Try(SAMPLES, n, range(n - 1, 0, -1), range(n + 1, n + MOST_TRIES))


SHAPE_RULES: tuple[Rule, ...] = (
    _check_sequence_parallel,
    _check_reference_parallel,
    _check_fsdp_size,
    _check_rollout_parallel,
    _check_batch,
    _check_gen_batch,
    _check_mini_batch,
    _check_update_micro_batch,
    _check_log_prob_micro_batches,
    _check_token_caps,
)
