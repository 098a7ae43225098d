"""What one step moves and leaves on disk: bytes of artifacts and checkpoints, between ranks, and to the engines. Pure.

Everything is at full length, an upper bound. What is not known of texts is assumed: TEXT_BYTES_PER_TOKEN of a prompt or
response, and for the keys and small columns of a row what they are in a usual run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from tasks.config import RunConfig
from tasks.geometry.memory import optimizer_bytes
from tasks.geometry.model_weights import sizes_of
from tasks.geometry.numbers import ModelLimits, Numbers
from tasks.geometry.rank_sizes import Rank
from tasks.geometry.stages import StageShape

TEXT_BYTES_PER_TOKEN = 4
"""English, and less in other scripts; `response_text` of text that was sampled at random has more."""
_ROW_BYTES = {
    "prompts": 180,
    "rollouts": 90,
    "old_log_probs": 56,
    "ref_log_probs": 48,
    "rewards": 160,
    "advantages": 90,
}
"""Of a row: keys, offsets, seeds, reasons, scores, messages."""
_ARTIFACT = {
    "prompts": "prompts",
    "generate": "rollouts",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_probs",
    "reward": "rewards",
    "advantage": "advantages",
}
"""The artifact that a stage commits."""
_READERS = {
    "prompts": ("generate", "old_log_prob", "ref_log_prob", "reward", "update"),
    "rollouts": ("old_log_prob", "ref_log_prob", "reward", "advantage", "update"),
    "old_log_probs": ("advantage", "update"),
    "ref_log_probs": ("advantage", "update"),
    "rewards": ("advantage",),
    "advantages": ("update",),
}
"""Which stages read an artifact."""


@dataclass(frozen=True)
class ArtifactSize:
    """One artifact of one step, every row at full length; token columns as stored, without padding."""

    name: str
    rows: int
    bytes_per_step: int
    readers: int


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank receives, or sends, in one step over one kind of link."""

    name: str
    rank_bytes: int
    note: str


@dataclass(frozen=True)
class DiskUse:
    """What a run writes to its folder, and what stays."""

    artifacts: tuple[ArtifactSize, ...]
    artifacts_bytes_per_step: int
    read_bytes_per_step: int
    """Each host reads each artifact once and serves its ranks from the page cache."""
    read_without_cache_bytes_per_step: int
    """Each process reads once what its stages need, and the driver all: a digest is that of whole files."""
    steps_kept: int | None
    """Steps that keep their rows at the end, by `storage.retention` and what recovery needs; None: no end is known."""
    artifacts_kept_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Moved:
    """What weights and activations move in a step; of a model of known size."""

    transfers: tuple[Transfer, ...]
    checkpoint_bytes: int
    """Weights that are trained and both moments, all ranks."""
    checkpoints_bytes_at_most: int | None
    """On disk, while one is written; None: all are kept and the number of steps is not known."""
    engine_files_bytes: int
    """Weights that one machine writes for its engines in every step; 0: engines take none from files."""
    engine_machines: int
    """Machines that do."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)


# ----------------------------------------------------------------------------------------------------------- artifacts


def disk_use(cfg: RunConfig, numbers: Numbers, stages: tuple[StageShape, ...]) -> DiskUse:
    """The artifacts of a step and of a run. A step that filters groups may need several generate calls; one counts."""
    found = tuple(_artifact(numbers, stages, stage, name) for stage, name in _ARTIFACT.items() if _has(stages, stage))
    total = sum(one.bytes_per_step for one in found)
    on_ranks = {"generate", "old_log_prob", "ref_log_prob", "update"}
    by_ranks = sum(one.bytes_per_step for one in found if on_ranks & set(_READERS[one.name]))
    kept = _steps_kept(cfg, numbers.total_steps)
    return DiskUse(
        artifacts=found,
        artifacts_bytes_per_step=total,
        read_bytes_per_step=total * cfg.trainer.nnodes,
        read_without_cache_bytes_per_step=by_ranks * numbers.world_size + total,
        steps_kept=kept,
        artifacts_kept_bytes=None if kept is None else kept * total,
    )


def _has(stages: tuple[StageShape, ...], stage: str) -> bool:
    return any(row.stage == stage for row in stages)


def _artifact(numbers: Numbers, stages: tuple[StageShape, ...], stage: str, name: str) -> ArtifactSize:
    columns = [row for row in stages if row.stage == stage and row.stored_bytes is not None]
    rows = columns[0].global_shape[0]
    texts = {"prompts": 2 * numbers.prompt_length, "rollouts": numbers.response_length}.get(name, 0)
    stored = sum(row.stored_bytes or 0 for row in columns) + rows * (_ROW_BYTES[name] + texts * TEXT_BYTES_PER_TOKEN)
    return ArtifactSize(name, rows, stored, sum(reader in {row.stage for row in stages} for reader in _READERS[name]))


def _steps_kept(cfg: RunConfig, steps: int | None) -> int | None:
    """Steps whose rows are there at the end: those behind the oldest checkpoint always, of the others what the rule
    keeps (storage/retention.py)."""
    rule, trainer = cfg.storage.retention, cfg.trainer
    if rule.keep == "all" or trainer.save_freq < 1:
        return steps
    most = trainer.max_actor_ckpt_to_keep
    if steps is None:
        return None if most is None or rule.keep == "every" else max(most * trainer.save_freq, rule.steps)
    made = ceil(steps / trainer.save_freq)
    oldest = min((made - min(most or made, made) + 1) * trainer.save_freq, steps)
    needed = max(steps - oldest, 1)
    if rule.keep == "last":
        return min(max(needed, rule.steps), steps)
    return needed + (steps - needed) // rule.steps


# --------------------------------------------------------------------------------------------------- between the ranks


def moved(cfg: RunConfig, numbers: Numbers, model: ModelLimits) -> Moved | None:
    """What a step moves between ranks and to the engines; None: the model's sizes are not known."""
    sizes = sizes_of(model)
    if sizes is None:
        return None
    rank = Rank(cfg, numbers, sizes)
    checkpoint = (rank.trained_bytes + optimizer_bytes(rank)) * rank.shards
    trainer, steps = cfg.trainer, numbers.total_steps
    total = None if steps is None else 1 if trainer.save_freq < 1 else ceil(steps / trainer.save_freq)
    most = trainer.max_actor_ckpt_to_keep
    held = total if most is None else most + 1 if total is None else min(most + 1, total)
    vllm = cfg.actor_rollout_ref.rollout.name == "vllm"
    return Moved(
        transfers=tuple(one for one in _transfers(rank) if one.rank_bytes),
        checkpoint_bytes=checkpoint,
        checkpoints_bytes_at_most=None if held is None else held * checkpoint,
        engine_files_bytes=rank.whole_bytes if vllm else 0,
        engine_machines=min(numbers.rollout_replicas or 1, trainer.nnodes) if vllm else 0,
    )


def _transfers(rank: Rank) -> list[Transfer]:
    numbers, fsdp = rank.numbers, rank.cfg.actor_rollout_ref.actor.fsdp_config
    root, layers = rank.root_parameters, rank.sizes.layers * rank.layer_parameters
    trained = rank.trained_parameters
    others = (rank.shards - 1) / rank.shards
    log_probs = (numbers.old_log_prob_forwards_per_rank or 0) + (numbers.ref_log_prob_forwards_per_rank or 0)
    micro = sum(numbers.micro_batches_per_mini_batch) * numbers.ppo_epochs
    # The root stays gathered over a pass without gradient, and from a forward to the end of its backward pass.
    passes = (numbers.old_log_prob_cut is not None) + (numbers.ref_log_prob_cut is not None)
    gathered = layers * (log_probs + micro * (1 + fsdp.reshard_after_forward)) + root * (passes + micro)
    copies = 2 * (rank.copies - 1) / rank.copies
    return [
        Transfer(
            "all-gather of weights",
            int(gathered * rank.compute * others),
            f"received; {log_probs} log-prob forwards, {micro} micro-batches"
            + (", forward and backward" if fsdp.reshard_after_forward else ""),
        ),
        Transfer("reduce-scatter of gradients", int(micro * trained * rank.reduce * others), "sent; per micro-batch"),
        Transfer(
            "all-reduce of gradients",
            int(micro * trained / rank.shards * rank.reduce * copies),
            f"sent; over {rank.copies} copies of the weights",
        ),
        Transfer("all-to-all of sequences", _all_to_all_bytes(rank), "sent; around attention, in every pass"),
        Transfer(
            "whole weights",
            0 if rank.alone else int(2 * rank.whole_bytes * others),
            "received; for the digest after the update, and for the engine",
        ),
    ]


def _all_to_all_bytes(rank: Rank) -> int:
    """Ulysses: queries, keys, values and the mixed values of all tokens, twice more on the way back and once more where
    layers are recomputed. Fewer key heads than devices are repeated before."""
    numbers, sizes = rank.numbers, rank.sizes
    if numbers.sp_size == 1 or numbers.sequences_per_rank is None:
        return 0
    kv = max(sizes.kv_heads, numbers.sp_size) * sizes.head_dim
    per_token = sizes.layers * rank.compute * 2 * (sizes.query_size + kv) * (numbers.sp_size - 1) / numbers.sp_size
    tokens = numbers.sequences_per_rank * numbers.padded_sequence_tokens / numbers.sp_size
    passes = (numbers.old_log_prob_cut is not None) + (numbers.ref_log_prob_cut is not None)
    recomputed = rank.cfg.actor_rollout_ref.model.enable_gradient_checkpointing
    return int(per_token * tokens * (passes + numbers.ppo_epochs * (2 + recomputed)))
