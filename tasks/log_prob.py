"""Stages `old_log_prob` and `ref_log_prob`: log-probs of the sampled tokens, recomputed by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from storage.artifacts import Part, read_manifest
from tasks.algorithms.correction import probability_gap
from tasks.balance import balance_metrics
from tasks.config import RunConfig
from tasks.stage import PartFolder, Stage, StageError, Step, aligned

if TYPE_CHECKING:
    from tasks.workers.group import WorkerGroup
    from tasks.workers.policy import LogProbs
    from tasks.workers.rank import Rank
    from tasks.workers.sequences import MicroBatching, Sequences

READS = (
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor.use_prefix_grouper",
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.do_sample",
)
CODE = ("tasks.log_prob", "tasks.workers")


def old_log_prob(step: Step, prompts: Artifact, rollouts: Artifact, group: WorkerGroup) -> Artifact:
    """Commit `old_log_probs`: the ratio's denominator, and how far the sampler's own log-probs are from it.

    Raises:
        StageError: the ranks hold another policy than the one the rollouts were sampled from.
        NonFiniteError: a log-prob is NaN or infinite.
    """
    bypass, with_squares = step.cfg.algorithm.rollout_correction.bypass_mode, step.cfg.estimator_needs("sum_pi_squared")
    also = {"bypass_mode": bypass, "sum_pi_squared": with_squares}
    policy = group.weights_digest
    stage = step.open(
        "old_log_probs", reads=READS, code=CODE, parents=[prompts, rollouts], also=also, policy_digest=policy
    )
    if done := stage.committed():
        return done
    if bypass:
        return _commit_samplers(stage, rollouts)
    if group.policy_version != stage.policy_version:
        raise StageError(
            f"step {step.index} needs log-probs of policy {stage.policy_version}, not {group.policy_version}"
        )
    request = Request(prompts, rollouts, old_micro_batching(step.cfg), temperature(step.cfg), False, with_squares)
    return _compute_and_commit(stage, group, request, "policy")


def _commit_samplers(stage: Stage, rollouts: Artifact) -> Artifact:
    """`rollout_correction.bypass_mode`: the engine's log-probs are the denominator, and no forward pass is made."""
    table = read_table(rollouts, ["sample_id", "group_id", "rollout_log_probs"])
    nulls = [None] * table.num_rows
    return stage.commit(
        {**_ids(table), "old_log_probs": table["rollout_log_probs"], "entropy": nulls, "sum_pi_squared": nulls},
        shapes={"tokens": len(table["rollout_log_probs"].combine_chunks().flatten()), "micro_batches": 0},
        notes=_notes(stage.step.cfg, "engine"),
    )


def ref_log_prob(step: Step, prompts: Artifact, rollouts: Artifact, group: WorkerGroup) -> Artifact:
    """Commit `ref_log_probs`: the same tokens under the frozen reference policy.

    Raises:
        NonFiniteError: a log-prob is NaN or infinite.
    """
    stage = step.open("ref_log_probs", reads=READS, code=CODE, parents=[prompts, rollouts], policy_version=0)
    if done := stage.committed():
        return done
    request = Request(prompts, rollouts, ref_micro_batching(step.cfg), temperature(step.cfg), True)
    return _compute_and_commit(stage, group, request, "reference")


# ------------------------------------------------------------------------------------------------------- on the ranks


@dataclass(frozen=True)
class Request:
    """What log-probs are asked for.

    Attributes:
        prompts: of the step.
        rollouts: its samples.
        micro: how a rank cuts its rows.
        temperature: logits are divided by it.
        reference: under the reference policy, without entropy.
        sum_pi_squared: also sums of squared probabilities.
    """

    prompts: Artifact
    rollouts: Artifact
    micro: MicroBatching
    temperature: float
    reference: bool
    sum_pi_squared: bool = False


@dataclass(frozen=True)
class Computed:
    """What a rank has done.

    Attributes:
        part: rows that it wrote; None: another rank wrote them.
        micro_batches: forward passes it took.
        tokens: of all sequences, its own and those of the other ranks.
    """

    part: Part | None
    micro_batches: int
    tokens: int


def compute_log_probs(rank: Rank, folder: PartFolder, request: Request) -> Computed:
    """Rank task: log-probs of this rank's rows, as its part of the artifact."""
    rank.ready_to_train()
    sequences, table = read_sequences(request.prompts, request.rollouts)
    result = rank.policy.log_probs(
        sequences,
        request.micro,
        temperature=request.temperature,
        reference=request.reference,
        sum_pi_squared=request.sum_pi_squared,
    )
    part = None
    # Ranks that share their sequences have the same numbers.
    if rank.mesh.sp_rank == 0:
        own = table if len(result.rows) == table.num_rows else table.take(pa.array(result.rows))
        part = folder.write(rank.number, _columns(own, result, request))
    return Computed(part, result.micro_batches, int(sequences.lengths().sum()))


def _columns(rows: pa.Table, result: LogProbs, request: Request) -> dict[str, object]:
    if request.reference:
        return {**_ids(rows), "ref_log_probs": result.log_probs}
    nulls = [None] * rows.num_rows
    return {
        **_ids(rows),
        "old_log_probs": result.log_probs,
        "entropy": nulls if result.entropy is None else result.entropy,
        "sum_pi_squared": nulls if result.sum_pi_squared is None else result.sum_pi_squared,
    }


def _compute_and_commit(stage: Stage, group: WorkerGroup, request: Request, of: str) -> Artifact:
    """Let the ranks compute, look at what they wrote, and commit it."""
    with stage.parts() as folder:
        done = group.run(compute_log_probs, folder, request)
        parts = [one.part for one in done if one.part is not None]
        table = stage.read_parts(folder, parts)
        metrics = {}
        if not request.reference:
            metrics = {**_metrics(table, request.rollouts), **_balance(stage, parts, table, request)}
        return stage.commit_parts(
            folder,
            parts,
            metrics=metrics,
            shapes={
                "tokens": done[0].tokens,
                "micro_batches": max(one.micro_batches for one in done),
                "ranks": group.ranks,
                "rows_per_rank": max(part.rows for part in parts),
            },
            notes=_notes(stage.step.cfg, of),
        )


def _balance(stage: Stage, parts: Sequence[Part], table: pa.Table, request: Request) -> dict[str, float]:
    """Tokens of data-parallel ranks under verl's names, as the rows came and as they are shared out by cost."""
    if not 1 < len(parts) <= table.num_rows or not stage.step.cfg.trainer.balance_batch:
        return {}
    sequences, rollouts = read_sequences(request.prompts, request.rollouts)
    row_of = {name: row for row, name in enumerate(rollouts["sample_id"].to_pylist())}
    rows = np.asarray([row_of[name] for name in table["sample_id"].to_pylist()], dtype=np.int64)
    ends = np.cumsum([part.rows for part in parts])
    return balance_metrics(sequences.lengths(), np.split(rows, ends[:-1]))


def _metrics(table: pa.Table, rollouts: Artifact) -> dict[str, float]:
    """Entropy, and the gap to the sampler, in the order of the ranks' rows.

    Log-probs that the engine took behind top-p or top-k, or without the temperature, are not comparable.
    """
    entropy = None if table["entropy"].null_count else Ragged.from_arrow(table["entropy"])
    if not comparable(rollouts):
        return _entropy(entropy)
    sampled = aligned(rollouts, table["sample_id"], ["rollout_log_probs"])
    return {**_entropy(entropy), **sampler_gap(sampled, Ragged.from_arrow(table["old_log_probs"]))}


def read_sequences(prompts: Artifact, rollouts: Artifact) -> tuple[Sequences, pa.Table]:
    """Prompts and responses as the worker takes them, and the rollouts' table; joined on `group_id`."""
    from tasks.workers.sequences import Sequences

    groups = read_table(prompts, ["group_id", "prompt_ids"])
    table = read_table(rollouts, ["sample_id", "group_id", "response_ids", "rollout_log_probs", "finish_reason"])
    places = {name: row for row, name in enumerate(groups["group_id"].to_pylist())}
    group = np.asarray([places[name] for name in table["group_id"].to_pylist()], dtype=np.int64)
    prompt_ids, response_ids = Ragged.from_arrow(groups["prompt_ids"]), Ragged.from_arrow(table["response_ids"])
    return Sequences(prompt_ids, group, response_ids), table


def temperature(cfg: RunConfig) -> float:
    """What logits are divided by in every log-prob; greedy sampling is compared at 1."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0


def old_micro_batching(cfg: RunConfig) -> MicroBatching:
    """How the old-log-prob pass is cut on this rank."""
    rollout, actor = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor
    return _micro_batching(
        actor.use_dynamic_bsz if rollout.log_prob_use_dynamic_bsz is None else rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_micro_batch_size_per_gpu or rollout.log_prob_micro_batch_size,
        rollout.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    )


def ref_micro_batching(cfg: RunConfig) -> MicroBatching:
    """How the reference pass is cut on this rank."""
    ref, actor = cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.actor
    return _micro_batching(
        actor.use_dynamic_bsz if ref.log_prob_use_dynamic_bsz is None else ref.log_prob_use_dynamic_bsz,
        ref.log_prob_micro_batch_size_per_gpu or ref.log_prob_micro_batch_size,
        ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    )


def actor_micro_batching(cfg: RunConfig) -> MicroBatching:
    """How the update is cut on this rank."""
    actor = cfg.actor_rollout_ref.actor
    return _micro_batching(
        actor.use_dynamic_bsz,
        actor.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size,
        actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )


def _micro_batching(by_tokens: bool, sequences: int | None, tokens: int, key: str) -> MicroBatching:
    from tasks.workers.sequences import MicroBatching

    if by_tokens:
        return MicroBatching(sequences=None, max_tokens=tokens, key=key)
    return MicroBatching(sequences=sequences, max_tokens=None, key=key)


def comparable(rollouts: Artifact) -> bool:
    """Whether the engine's log-probs are of the distribution that the policy's are of."""
    notes = read_manifest(rollouts.folder).notes
    return notes.get("log_probs", "processed") == "processed" and notes.get("filters", "none") == "none"


def sampler_gap(rollouts: pa.Table, old_log_probs: Ragged) -> dict[str, float]:
    """How far the engine's probabilities of the sampled tokens are from the worker's, under verl's names.

    Both are at the same temperature and before top-p and top-k, so that like is compared with like.
    """
    if rollouts["rollout_log_probs"].null_count or not len(old_log_probs.values):
        return {}
    sampled = Ragged.from_arrow(rollouts["rollout_log_probs"])
    gap = np.abs(sampled.values.astype(np.float64) - old_log_probs.values)
    everything = Ragged(np.ones(len(gap), dtype=bool), old_log_probs.offsets)
    return {
        **probability_gap(sampled, old_log_probs, everything),
        "training/rollout_log_probs_gap_mean": float(gap.mean()),
        "training/rollout_log_probs_gap_max": float(gap.max()),
    }


def _notes(cfg: RunConfig, of: str) -> dict[str, object]:
    """What a reader of the log-probs must know; the same words as in `rollouts`."""
    return {"log_probs": "processed", "temperature": temperature(cfg), "filters": "none", "of": of}


def _ids(table: pa.Table) -> dict[str, object]:
    return {"sample_id": table["sample_id"], "group_id": table["group_id"]}


def _entropy(entropy: Ragged | None) -> dict[str, float]:
    if entropy is None or not len(entropy.values):
        return {}
    return {"actor/entropy": float(entropy.values.mean(dtype=np.float64))}
