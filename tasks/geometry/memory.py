"""What one rank holds in memory while it generates, computes log-probs and updates: an estimate before anything loads.

Pure. Sizes are bytes; "device" is a rank's GPU, or on CPU the process. What is assumed:

- Sequences have full length, micro-batches hold as many as they may, and no prompt is shared: an upper bound.
- `trainer.device=auto` is planned as CUDA; `cpu` is what says otherwise. There offloading moves nothing.
- FSDP2 cuts the first dimension of every weight and pads the last pieces. Its shards keep the resident type
  (`actor_rollout_ref.model.dtype`), and so do gradients after their reduction and both moments of AdamW: with float32
  weights and bfloat16 computation the shard itself is the master copy and there is no other. A gathered unit (one
  layer; embeddings, last norm and head) is in the type of the computation.
- On one device there is no FSDP: torch's autocast keeps a copy of every trained matrix in the type of the computation
  as long as a pass lasts, and norms and residuals stay in the weights' type.
- Not counted: what torch, CUDA, NCCL, Ray and the engine's own code take (1 to 3 GB on a GPU), and fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil

from tasks.config import RunConfig
from tasks.geometry.model_weights import sizes_of
from tasks.geometry.numbers import Cut, ModelLimits, Numbers
from tasks.geometry.rank_sizes import Rank, activation_bytes_per_token, layer_bytes_per_token

CHUNK_LOGITS = 2**24
"""Logits that are held at a time: tasks/workers/forward.py's own number."""
MOST_CPU_CACHE_BYTES = 4 * 2**30
"""vLLM's key/value cache on CPU: tasks/engines/vllm_settings.py's own number."""
COPY = "copy for engines"
PHASES = ("generate", "log_prob", "update")


@dataclass(frozen=True)
class MemoryItem:
    """One thing a rank holds, in each phase of a step; what rests in host memory is counted there at its most."""

    name: str
    generate_bytes: int = 0
    log_prob_bytes: int = 0
    update_bytes: int = 0
    host_bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class RankMemory:
    """The estimate for one rank."""

    parameters: int
    """Of the whole model, an adapter included."""
    trained_parameters: int
    weights_bytes: int
    """The policy's weights on this rank, wherever they rest."""
    gradients_bytes: int
    optimizer_bytes: int
    reference_bytes: int
    loading_host_bytes: int
    """In host memory while it loads: every rank reads the whole model there before it keeps its shard."""
    machine_host_bytes: int
    """In host memory of one machine, all its ranks and the files for its engines together."""
    machine_loading_bytes: int
    """The same while they load."""
    kv_cache_bytes_per_token: int
    """On one device of a replica."""
    kv_cache_needed_bytes: int
    """So that all sequences that may be sampled at the same time reach full length."""
    kv_cache_room_bytes: int
    """What the engine takes for it: vLLM what is left of its share of the device; else what is needed."""
    items: tuple[MemoryItem, ...]
    device_memory_bytes: int | None
    on_cpu: bool

    def phase_bytes(self, phase: str) -> int:
        """Of all items on the device in a phase; on CPU what rests in host memory is of the same process."""
        name = f"{phase}_bytes"
        return sum(getattr(item, name) + (item.host_bytes if self.on_cpu else 0) for item in self.items)

    @property
    def host_bytes(self) -> int:
        """In host memory beside the device."""
        return 0 if self.on_cpu else sum(item.host_bytes for item in self.items)

    def as_dict(self) -> dict[str, object]:
        """Everything as plain values, for JSON."""
        answer: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        answer["items"] = [{field.name: getattr(item, field.name) for field in fields(item)} for item in self.items]
        sums: dict[str, object] = {f"{phase}_bytes": self.phase_bytes(phase) for phase in PHASES}
        return answer | sums | {"host_bytes": self.host_bytes}


def rank_memory(
    cfg: RunConfig, numbers: Numbers, model: ModelLimits, device_memory_bytes: int | None = None
) -> RankMemory | None:
    """Estimate what one rank holds; None: the model's sizes are not known.

    Args:
        cfg: the configuration.
        numbers: its plan.
        model: the model's sizes.
        device_memory_bytes: of one device; None: not known.
    """
    sizes = sizes_of(model)
    if sizes is None:
        return None
    rank = Rank(cfg, numbers, sizes)
    token, needed, room = _kv_cache(rank, device_memory_bytes)
    reference = rank.shard_bytes(rank.weights, rank.resident) if numbers.needs_ref and not rank.has_adapter else 0
    items = (
        *_of_weights(rank, reference),
        *_of_passes(rank),
        *_of_engine(rank, needed, room),
    )
    return RankMemory(
        parameters=rank.parameters,
        trained_parameters=rank.trained_parameters,
        weights_bytes=rank.weights_bytes,
        gradients_bytes=rank.trained_bytes,
        optimizer_bytes=optimizer_bytes(rank),
        reference_bytes=reference,
        loading_host_bytes=rank.whole_bytes,
        machine_host_bytes=_machine_host_bytes(rank, items),
        machine_loading_bytes=cfg.trainer.n_gpus_per_node * rank.whole_bytes,
        kv_cache_bytes_per_token=token,
        kv_cache_needed_bytes=needed,
        kv_cache_room_bytes=room,
        items=tuple(item for item in items if any(getattr(item, f"{name}_bytes") for name in (*PHASES, "host"))),
        device_memory_bytes=device_memory_bytes,
        on_cpu=rank.on_cpu,
    )


# ----------------------------------------------------------------------------------------- weights, optimizer, gradient


def optimizer_bytes(rank: Rank) -> int:
    """AdamW's two moments in the weights' type, and a float32 step count of each tensor."""
    return 2 * rank.trained_bytes + 4 * rank.trained_tensors


def _of_weights(rank: Rank, reference: int) -> Iterator[MemoryItem]:
    fsdp, ref = rank.cfg.actor_rollout_ref.actor.fsdp_config, rank.cfg.actor_rollout_ref.ref.fsdp_config
    weights, gradients, optimizer = rank.weights_bytes, rank.trained_bytes, optimizer_bytes(rank)
    shard = f"1/{rank.shards} of {rank.parameters:,} numbers" if rank.shards > 1 else f"{rank.parameters:,} numbers"
    if fsdp.offload_policy:
        yield MemoryItem("policy weights", host_bytes=weights, note=f"{shard}, in host memory (offload_policy)")
        yield MemoryItem("gradients", host_bytes=gradients, note="in host memory")
        yield MemoryItem("optimizer states", host_bytes=optimizer, note="AdamW runs on the CPU")
    else:
        away = fsdp.param_offload and not rank.on_cpu
        at_rest = 0 if away and not rank.alone else weights
        yield MemoryItem("policy weights", at_rest, weights, weights, weights if away else 0, shard)
        yield MemoryItem("gradients", 0, 0, gradients, note="reduced, in the weights' type; freed after the update")
        rests = 0 if fsdp.optimizer_offload and not rank.on_cpu else optimizer
        yield MemoryItem(
            "optimizer states", rests, rests, optimizer, optimizer - rests, "AdamW: two moments in the weights' type"
        )
    away = ref.offload_policy or (ref.param_offload and not rank.on_cpu)
    at_rest, at_work = (0 if away else reference), (0 if ref.offload_policy else reference)
    yield MemoryItem(
        "reference weights", at_rest, at_work, at_rest, reference if away else 0, "a frozen copy, sharded alike"
    )
    yield _computed_with(rank)
    if rank.numbers.optimizer_steps_per_step > 1:
        note = "weights and moments as before the step, to go back to when a later optimizer step fails"
        yield MemoryItem("snapshot", host_bytes=rank.trained_bytes + optimizer, note=note)


def _computed_with(rank: Rank) -> MemoryItem:
    """Weights in the form in which they are multiplied: autocast's copies, or what FSDP has gathered.

    FSDP holds the root unit from its forward to the end of its backward pass, and of the layers the one that is
    computed and the next one. In the backward pass a layer's gradient waits whole, in the type of the computation and
    once more in that of the reduction; at its end the root's does.
    """
    fsdp, layer, root = rank.cfg.actor_rollout_ref.actor.fsdp_config, rank.layer_parameters, rank.root_parameters
    if rank.alone:
        matrices = [w for w in rank.weights if len(w.shape) > 1 and (w.name != "embed_tokens" or rank.sizes.tied)]
        cast = rank.compute * sum(w.count for w in matrices) if rank.compute != rank.resident else 0
        copies = 0 if rank.has_adapter else cast
        return MemoryItem("cast weights", copies, copies, copies, note="autocast's copies in the computation's type")
    whole = root + rank.sizes.layers * layer
    held = rank.compute * (root + 2 * layer if fsdp.reshard_after_forward else whole)
    wide = rank.compute + rank.reduce
    trained_root = 0 if rank.has_adapter else root
    trained_layer = sum(w.count // w.layers for w in (rank.adapters or rank.weights) if w.layers)
    waiting = max(wide * trained_root, rank.compute * trained_root + wide * trained_layer)
    note = "embeddings and head, two layers; in the update a unit's whole gradient too"
    return MemoryItem("gathered by FSDP", 0, held, held + waiting, note=note)


def _machine_host_bytes(rank: Rank, items: tuple[MemoryItem, ...]) -> int:
    copies = sum(item.host_bytes for item in items if item.name == COPY)
    others = sum(item.host_bytes for item in items if item.name != COPY)
    files = rank.whole_bytes if rank.cfg.actor_rollout_ref.rollout.name == "vllm" else 0
    return rank.cfg.trainer.n_gpus_per_node * others + copies + files


# ------------------------------------------------------------------------------------------------------------- passes


def _of_passes(rank: Rank) -> Iterator[MemoryItem]:
    numbers = rank.numbers
    cuts = [cut for cut in (numbers.old_log_prob_cut, numbers.ref_log_prob_cut) if cut is not None]
    forward = [_tokens(rank, cut) for cut in cuts]
    update = _tokens(rank, numbers.update_cut)
    held = rank.cfg.actor_rollout_ref.model.enable_gradient_checkpointing
    note = "each layer's input, one layer in full" if held else "every layer in full"
    yield MemoryItem(
        "activations",
        0,
        max((tokens * layer_bytes_per_token(rank) for tokens, _ in forward), default=0),
        update[0] * (activation_bytes_per_token(rank)) + update[1] * rank.compute * rank.sizes.hidden_size,
        note=f"{update[0]:,} tokens of a micro-batch; {note}",
    )
    yield MemoryItem(
        "logits",
        0,
        max((_logits_bytes(rank, responses, backward=False) for _, responses in forward), default=0),
        _logits_bytes(rank, update[1], backward=True),
        note="a chunk of response tokens at a time",
    )


def _tokens(rank: Rank, cut: Cut) -> tuple[int, int]:
    """Tokens of a micro-batch on one device, and how many of them are of responses."""
    numbers = rank.numbers
    held = cut.full_length_sequences_per_micro_batch or 1
    if cut.max_tokens_per_device is not None:
        tokens = min(cut.max_tokens_per_device, held * numbers.padded_sequence_tokens // numbers.sp_size)
    else:
        tokens = ceil(held * numbers.padded_sequence_tokens / numbers.sp_size)
    return tokens, min(tokens, ceil(held * numbers.response_length / numbers.sp_size))


def _logits_bytes(rank: Rank, responses: int, *, backward: bool) -> int:
    """One chunk: its logits, once more in float32 and divided by the temperature; entropy and the way back take two
    more in float32 each."""
    held = min(responses * rank.sizes.vocabulary, max(CHUNK_LOGITS, rank.sizes.vocabulary))
    wide = max(rank.compute, 4)
    return held * (rank.compute + (5 if backward else 4) * wide)


# -------------------------------------------------------------------------------------------------------------- engine


def _engine_weights_bytes(rank: Rank) -> int:
    """The engine's own weights on one device; 0: it samples from the policy's.

    vLLM holds them in the type of the computation, cut over the tensor-parallel ranks of a replica; the transformers
    engine of a mesh holds them whole.
    """
    rollout = rank.cfg.actor_rollout_ref.rollout
    if rollout.name == "vllm":
        return rank.compute * sum(weight.slice(rollout.tensor_model_parallel_size) for weight in rank.weights)
    return 0 if rank.alone else rank.whole_bytes


def _kv_cache(rank: Rank, device_memory_bytes: int | None) -> tuple[int, int, int]:
    """Bytes per token on one device, bytes that are needed, bytes that the engine takes."""
    rollout, numbers, sizes = rank.cfg.actor_rollout_ref.rollout, rank.numbers, rank.sizes
    own = rollout.name != "vllm"
    heads = sizes.kv_heads if own else ceil(sizes.kv_heads / rollout.tensor_model_parallel_size)
    # Under autocast keys are rotated in the weights' type, and the cache joins values to them in it.
    token = 2 * sizes.layers * heads * sizes.head_dim * (max(rank.resident, rank.compute) if own else rank.compute)
    sequences = _sampled_at_a_time(rank)
    needed = sequences * numbers.padded_sequence_tokens * token
    if own:
        # A prompt's cache is computed once and stays until it has been repeated for its samples.
        needed += ceil(sequences / numbers.samples_per_prompt) * numbers.prompt_length * token
        return token, needed, needed
    if rank.on_cpu:
        return token, needed, min(needed, MOST_CPU_CACHE_BYTES)
    if device_memory_bytes is None:
        return token, needed, needed
    share = int(rollout.gpu_memory_utilization * device_memory_bytes)
    return token, needed, max(share - _engine_weights_bytes(rank), 0)


def _sampled_at_a_time(rank: Rank) -> int:
    """Most sequences that one engine has in its batch."""
    numbers, rollout = rank.numbers, rank.cfg.actor_rollout_ref.rollout
    replica = numbers.sequences_per_rollout_replica or numbers.sequences_per_gen_batch
    return min(rollout.max_num_seqs, ceil(replica / rollout.data_parallel_size))


def _of_engine(rank: Rank, needed: int, room: int) -> Iterator[MemoryItem]:
    """An engine that sleeps leaves its weights in host memory and no cache (vLLM's sleep level 1); on CPU none sleeps.
    For vLLM one rank of each machine has a copy of the policy in host memory, from which it writes the engines' files.
    """
    rollout, weights = rank.cfg.actor_rollout_ref.rollout, _engine_weights_bytes(rank)
    vllm, sleeps = rollout.name == "vllm", rollout.free_cache_engine and not rank.on_cpu
    awake = 0 if sleeps else weights
    how = "cut over tensor-parallel ranks" if vllm else "the whole model, a copy of its own"
    how += ", in host memory while the policy trains" if sleeps else ""
    yield MemoryItem("engine weights", weights, awake, awake, weights - awake, how)
    if vllm:
        note = f"{needed / 1e9:.1f} GB hold all sequences at full length"
        stays = 0 if sleeps else room
        yield MemoryItem("KV cache", room, stays, stays, note=note)
        if not rank.alone:
            yield MemoryItem(COPY, host_bytes=rank.whole_bytes, note="on one rank of each machine")
        return
    yield MemoryItem("KV cache", room, note="of the sequences sampled at a time, at full length")
    logits = _sampled_at_a_time(rank) * rank.sizes.vocabulary * (rank.compute + 3 * 4)
    yield MemoryItem("sampling", logits, note="logits of the newest token, in float32")
