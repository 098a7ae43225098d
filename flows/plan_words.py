"""A plan in words: which numbers count prompts, which sequences, which tokens, and per what."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.geometry import Cut, Plan
from tasks.geometry.memory import RankMemory


def plan_in_words(plan: Plan) -> list[str]:
    """One sentence or two per number that users mix up, in the order in which a step meets them."""
    return [*_of_batches(plan), *_of_mini_batches(plan), *_of_micro_batches(plan), *_of_passes(plan), *_of_run(plan)]


def memory_in_words(memory: RankMemory | None) -> list[str]:
    """What the table of memory says, and what it leaves out; nothing without an estimate."""
    if memory is None:
        return []
    phases = {"generate": "generating", "log_prob": "computing log-probs", "update": "updating"}
    largest = max(phases, key=memory.phase_bytes)
    where = "in its process" if memory.on_cpu else "on its device"
    return [
        f"A rank holds at most about {memory.phase_bytes(largest) / 1e9:.1f} GB {where}, while {phases[largest]}. This "
        "is a bound: full micro-batches of sequences of full length, no prompt shared. It leaves out what torch, CUDA "
        "and NCCL take themselves, and fragmentation.",
        f"A token of a sampled sequence takes {memory.kv_cache_bytes_per_token:,} bytes of keys and values on one "
        "device.",
    ]


def plan_in_brief(plan: Plan) -> str:
    """The step in one sentence, for the start of a run."""
    sizes, counts = plan.prompts_of_mini_batches, plan.micro_batches_per_mini_batch
    sequences = plan.sequences_per_mini_batch if len(sizes) > 1 else plan.sequences_per_step
    by = "" if plan.update_cut.token_budget is None else "up to "
    micro = f" in {by}{_count(counts[0], 'micro-batch', 'micro-batches')} each" if counts else ""
    steps = f"; {_count(plan.total_steps, 'step')} in all" if plan.total_steps else ""
    return (
        f"a step is {_count(plan.prompts_per_step, 'prompt')} x {plan.samples_per_prompt} = "
        f"{_count(plan.sequences_per_step, 'sequence')}, {_count(plan.optimizer_steps_per_step, 'update')} of "
        f"{_count(sequences, 'sequence')}{micro}{steps}"
    )


def _of_batches(plan: Plan) -> Iterator[str]:
    yield (
        "data.train_batch_size, data.gen_batch_size and actor.ppo_mini_batch_size count prompts over all devices. "
        "Everything named micro_batch_size_per_gpu counts sequences on one data-parallel rank, and "
        "max_token_len_per_gpu counts tokens on one device."
    )
    yield (
        f"A step takes {_count(plan.prompts_per_step, 'prompt')} and samples {plan.samples_per_prompt} responses to "
        f"each (rollout.n): {_count(plan.sequences_per_step, 'sequence')} in {_count(plan.prompts_per_step, 'group')} "
        f"of {plan.samples_per_prompt}."
    )
    if plan.rollout_replicas and plan.prompts_per_rollout_replica and plan.sequences_per_rollout_replica:
        yield (
            f"Responses are sampled by {_count(plan.rollout_replicas, 'rollout replica')} of "
            f"{_count(plan.devices_per_rollout_replica, 'device')}: {plan.prompts_per_rollout_replica:g} prompts and "
            f"{plan.sequences_per_rollout_replica:g} sequences each."
        )
    if plan.dp_size and plan.sequences_per_rank:
        shared = f", each of {plan.sp_size} devices that share their sequences" if plan.sp_size > 1 else ""
        yield (
            f"Training spreads the {plan.sequences_per_step} sequences over "
            f"{_count(plan.dp_size, 'data-parallel rank')}{shared}: {plan.sequences_per_rank} sequences per rank. "
            "rollout.n is already in this number."
        )


def _of_mini_batches(plan: Plan) -> Iterator[str]:
    yield (
        f"A mini-batch is what one optimizer step sees: ppo_mini_batch_size={plan.prompts_per_mini_batch} prompts, "
        f"which is {_count(plan.sequences_per_mini_batch, 'sequence')} over all devices"
        + (
            f" and {plan.sequences_per_mini_batch_per_rank} per rank."
            if plan.sequences_per_mini_batch_per_rank
            else "."
        )
    )
    sizes = plan.prompts_of_mini_batches
    short = f", the last of them only {sizes[-1]} prompts" if sizes[-1] != sizes[0] else ""
    yield (
        f"So the step has {_count(len(sizes), 'mini-batch', 'mini-batches')}{short}. With ppo_epochs={plan.ppo_epochs} "
        f"that is {_count(plan.optimizer_steps_per_step, 'optimizer step')} per step."
    )


def _of_micro_batches(plan: Plan) -> Iterator[str]:
    counts, cut = plan.micro_batches_per_mini_batch, plan.update_cut
    if not counts:
        return
    if cut.by_tokens:
        fewer = plan.micro_batches_per_mini_batch_by_token_count
        yield (
            f"The update cuts micro-batches by tokens: at most {cut.token_budget} in one{_cap_in_words(plan, cut)}. At "
            f"full length a mini-batch needs {counts[0]} of them on a rank; dividing its tokens by the cap gives "
            f"{fewer[0]}, which is verl's number and is reached only by exceeding the cap. Shorter sequences need "
            "fewer."
        )
    else:
        yield (
            f"A micro-batch is {_count(cut.sequences_per_micro_batch or 0, 'sequence')} on one rank, so a mini-batch "
            f"is {_count(counts[0], 'micro-batch', 'micro-batches')} per rank, whose gradients are summed before the "
            "optimizer step. Its size changes memory and speed, not the result."
        )


def _of_passes(plan: Plan) -> Iterator[str]:
    passes = (
        ("old log-prob", plan.old_log_prob_cut, plan.old_log_prob_forwards_per_rank),
        ("reference", plan.ref_log_prob_cut, plan.ref_log_prob_forwards_per_rank),
    )
    for name, cut, forwards in passes:
        if cut is None or forwards is None:
            continue
        how = (
            f"of at most {cut.token_budget} tokens"
            if cut.by_tokens
            else f"of {cut.sequences_per_micro_batch} sequences"
        )
        yield f"The {name} pass makes {_count(forwards, 'forward')} {how} on every rank."
    if not plan.needs_ref:
        yield "There is no reference pass: neither actor.use_kl_loss nor algorithm.use_kl_in_reward is on."


def _of_run(plan: Plan) -> Iterator[str]:
    if plan.steps_per_epoch is None:
        yield "Steps per epoch are not known: the training files are not here. --train-prompts says how many there are."
    else:
        yield (
            f"{_count(plan.train_prompts or 0, 'training prompt')} make {_count(plan.steps_per_epoch, 'step')} per "
            f"epoch; {plan.total_steps} in all."
        )


def _cap_in_words(plan: Plan, cut: Cut) -> str:
    if plan.sp_size == 1:
        return ""
    return f" ({cut.max_tokens_per_device} per device x {plan.sp_size} devices that share a sequence)"


def _count(number: int, word: str, plural: str | None = None) -> str:
    return f"{number} {word if number == 1 else plural or f'{word}s'}"
