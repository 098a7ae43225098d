"""Stage `update`: optimizer steps over the step's mini-batches, from policy version k - 1 to version k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage import Artifact, Ragged, read_table
from storage.artifacts import read_manifest
from tasks.algorithms.advantages import NO_VERDICT, row_of_token
from tasks.algorithms.sample_metrics import reduce_metrics, variance_proxies
from tasks.config import ActorConfig, RunConfig
from tasks.log_prob import actor_micro_batching, read_sequences
from tasks.seeds import hashed
from tasks.shape_reward import truncated
from tasks.stage import StageError, Step, aligned

if TYPE_CHECKING:
    from tasks.workers.group import WorkerGroup
    from tasks.workers.policy import Signals
    from tasks.workers.rank import Rank

READS = (
    "algorithm.rollout_correction",
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.do_sample",
    "actor_rollout_ref.rollout.response_length",
    "data.max_response_length",
)
CODE = ("tasks.update", "tasks.workers", "tasks.algorithms", "tasks.shape_reward")


def update(
    step: Step,
    prompts: Artifact,
    rollouts: Artifact,
    old_log_probs: Artifact,
    ref_log_probs: Artifact | None,
    advantages: Artifact,
    group: WorkerGroup,
    recorded: Artifact | None = None,
) -> Artifact:
    """Train on the step's batch and commit `updates`: one row per optimizer step.

    A committed update is not skipped but made again while the weights are behind it: that is how a policy version is
    rebuilt from stored batches. The weights' digest must then be the recorded one.

    Args:
        step: the step.
        prompts: its prompts.
        rollouts: its samples.
        old_log_probs: denominator of the ratio.
        ref_log_probs: for the KL in the loss; None: there is none.
        advantages: advantage and loss mask of each token.
        group: owns the weights, which move.
        recorded: the update that is made again; None: look for it by key.

    Raises:
        StageError: the ranks' policy is not the one this step starts from, or a repeated update gives other weights.
        NonFiniteError: a loss or gradient is NaN or infinite; the weights are those from before the step.
    """
    parents = [prompts, rollouts, old_log_probs, *([ref_log_probs] if ref_log_probs else []), advantages]
    stage = step.open("updates", reads=READS, code=CODE, parents=parents)
    done = recorded or stage.committed()
    version = group.policy_version
    if done and version >= step.index:
        return done
    if version != step.index - 1:
        raise StageError(f"update {step.index} starts from policy {step.index - 1}, not {version}")
    batch = Batch(step.index, prompts, rollouts, old_log_probs, ref_log_probs, advantages)
    made = group.run(take_steps, batch)[0]
    if done:
        _compare(done, made, step.index)
        return done
    rows, dp_ranks = made.rows, group.ranks // step.cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    versions = {"policy_version_in": step.index - 1, "policy_version_out": step.index}
    digests = [None] * (len(rows) - 1) + [made.weights_digest]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "more"}
    return stage.commit(
        {**columns, **{name: [value] * len(rows) for name, value in versions.items()}, "weights_digest": digests},
        metrics={**update_metrics(rows), **_variance(batch, step.cfg, rows)},
        shapes={
            "tokens": sum(row["tokens"] for row in rows),
            "sequences": sum(row["sequences"] for row in rows),
            "micro_batches": sum(row["micro_batches"] for row in rows),
            "optimizer_steps": len(rows),
            "ranks": group.ranks,
            "rows_per_rank": sum(-(-row["sequences"] // dp_ranks) for row in rows),
        },
        notes={"tensors": made.tensor_digests, "places": list(made.places)},
    )


# ------------------------------------------------------------------------------------------------------- on the ranks


@dataclass(frozen=True)
class Batch:
    """The artifacts that an update is made from.

    Attributes:
        step: number of the step.
        prompts: its prompts.
        rollouts: its samples.
        old_log_probs: denominator of the ratio.
        ref_log_probs: for the KL in the loss; None: there is none.
        advantages: advantage and loss mask of each token.
    """

    step: int
    prompts: Artifact
    rollouts: Artifact
    old_log_probs: Artifact
    ref_log_probs: Artifact | None
    advantages: Artifact


@dataclass(frozen=True)
class Updated:
    """What came of an update, the same on every rank.

    Attributes:
        rows: one per optimizer step; see `PolicyWorker.update`.
        weights_digest: of the new weights.
        tensor_digests: of each trained weight.
        places: what decides in which order is summed; see `_places`.
        dtype: type that the policy computes in.
    """

    rows: list[dict[str, Any]]
    weights_digest: str
    tensor_digests: dict[str, str]
    places: tuple[int, int, int, bool]
    dtype: str


def take_steps(rank: Rank, batch: Batch) -> Updated:
    """Rank task: one optimizer step per mini-batch; afterwards the rank holds the next policy version."""
    rank.ready_to_train()
    policy, cfg = rank.policy, rank.policy.cfg
    sequences, table = read_sequences(batch.prompts, batch.rollouts)
    signals = _signals(batch, table, sequences.group, cfg)
    mini_batches = plan_mini_batches(sequences.group, cfg.actor_rollout_ref.actor, batch.step)
    rows = policy.update(sequences, signals, mini_batches, actor_micro_batching(cfg), step=batch.step)
    policy.policy_version = batch.step
    dtype = str(policy.model.compute_dtype).removeprefix("torch.")
    return Updated(rows, policy.weights_digest(), policy.tensor_digests(), _places(rank), dtype)


def _places(rank: Rank) -> tuple[int, int, int, bool]:
    """Ranks, how many share a sequence, over how many the weights are sharded, and whether rows are balanced."""
    mesh = rank.mesh
    shards = 1 if mesh.fsdp is None else mesh.fsdp.size(mesh.fsdp.ndim - 1)
    return mesh.world_size, mesh.sp_size, shards, rank.policy.cfg.trainer.balance_batch


def _signals(batch: Batch, rollouts: pa.Table, group: np.ndarray, cfg: RunConfig) -> Signals:
    masks = cfg.actor_rollout_ref.actor.mask_truncated_responses
    return read_signals(rollouts, group, batch.old_log_probs, batch.ref_log_probs, batch.advantages, masks)


def read_signals(
    rollouts: pa.Table,
    group: np.ndarray,
    old_log_probs: Artifact,
    ref_log_probs: Artifact | None,
    advantages: Artifact,
    masks_truncated: bool,
) -> Signals:
    """What the loss needs of each token, joined by sample id.

    `masks_truncated` is `actor.mask_truncated_responses`: what `advantages.loss_mask` leaves out beside rejected tokens
    is the responses it stands for, and those without a verdict.
    """
    from tasks.workers.policy import Signals

    sample_ids, sampled = rollouts["sample_id"], rollouts["rollout_log_probs"]
    table = aligned(advantages, sample_ids, ["advantages", "loss_mask", "rollout_is_weights", "no_signal"])
    verdict = np.asarray([reason != NO_VERDICT for reason in table["no_signal"].to_pylist()], dtype=bool)
    old = aligned(old_log_probs, sample_ids, ["old_log_probs"])
    ref = aligned(ref_log_probs, sample_ids, ["ref_log_probs"]) if ref_log_probs else None
    weights = table["rollout_is_weights"]
    return Signals(
        advantages=Ragged.from_arrow(table["advantages"]),
        loss_mask=Ragged.from_arrow(table["loss_mask"]),
        old_log_probs=Ragged.from_arrow(old["old_log_probs"]),
        ref_log_probs=Ragged.from_arrow(ref["ref_log_probs"]) if ref else None,
        rollout_is_weights=None if weights.null_count else Ragged.from_arrow(weights),
        rollout_log_probs=None if sampled.null_count else Ragged.from_arrow(sampled),
        group=group,
        in_loss=verdict & ~(truncated(rollouts) & masks_truncated),
    )


def plan_mini_batches(group: np.ndarray, actor: ActorConfig, step: int) -> list[list[np.ndarray]]:
    """Rows of each mini-batch of each epoch: `ppo_mini_batch_size` whole groups, in order or shuffled.

    Args:
        group: [N] which prompt each row answers.
        actor: `ppo_mini_batch_size`, `ppo_epochs`, `shuffle`, `data_loader_seed`.
        step: number of the step; decides the shuffle together with the seed and the epoch.

    Returns:
        For each epoch a list of row numbers per mini-batch; the last mini-batch may be short.
    """
    groups = list(dict.fromkeys(group.tolist()))
    rows = {name: np.flatnonzero(group == name) for name in groups}
    epochs = []
    for epoch in range(actor.ppo_epochs):
        order = groups
        if actor.shuffle:
            order = sorted(groups, key=lambda name: hashed(actor.data_loader_seed, step, epoch, name))
        size = actor.ppo_mini_batch_size
        cuts = [order[start : start + size] for start in range(0, len(order), size)]
        epochs.append([np.concatenate([rows[name] for name in cut]) for cut in cuts])
    return epochs


def update_metrics(rows: list[dict]) -> dict[str, float]:
    """The step's numbers under verl's names: means over optimizer steps; the learning rate is the last one's."""
    names = {
        "actor/loss": "loss",
        "actor/pg_loss": "pg_loss",
        "actor/pg_clipfrac": "pg_clipfrac",
        "actor/pg_clipfrac_lower": "pg_clipfrac_lower",
        "actor/ppo_kl": "ppo_kl",
        "actor/kl_loss": "kl_loss",
        "actor/grad_norm": "grad_norm",
        "actor/ratio_max": "ratio_max",
    }
    made = [row for row in rows if row["skipped"] is None]
    parts = {metric: [row[column] for row in made if row[column] is not None] for metric, column in names.items()}
    metrics = {"actor/lr": float(rows[-1]["lr"]), "actor/skipped_updates": float(len(rows) - len(made))}
    for name in dict.fromkeys(name for row in rows for name in row["more"]):
        parts[name] = [row["more"][name] for row in rows if name in row["more"]]
    metrics.update(reduce_metrics({metric: values for metric, values in parts.items() if values}))
    if rows[0]["kl_clamped"] is not None:
        metrics["actor/kl_clamped_tokens"] = float(sum(row["kl_clamped"] for row in rows))
    if made:
        metrics["actor/first_update_log_ratio_max"] = float(made[0]["log_ratio_max"])
    return metrics


def _variance(batch: Batch, cfg: RunConfig, rows: list[dict]) -> dict[str, float]:
    """verl's variance proxies, where the old log-prob pass kept the sums of squared probabilities."""
    if read_table(batch.old_log_probs, ["sum_pi_squared"])["sum_pi_squared"].null_count:
        return {}
    sequences, table = read_sequences(batch.prompts, batch.rollouts)
    signals = _signals(batch, table, sequences.group, cfg)
    column = aligned(batch.old_log_probs, table["sample_id"], ["sum_pi_squared"])["sum_pi_squared"]
    inside = signals.loss_mask.values
    norms = [row["grad_norm"] for row in rows if row["skipped"] is None]
    return variance_proxies(
        row_of_token(signals.loss_mask)[inside],
        len(signals.loss_mask),
        signals.advantages.values[inside],
        signals.old_log_probs.values[inside],
        Ragged.from_arrow(column).values[inside],
        gradient_norm=float(np.mean(norms)) if norms else None,
        weights=None if signals.rollout_is_weights is None else signals.rollout_is_weights.values[inside],
    )


ROUNDING = {"float32": 1e-2, "bfloat16": 0.2, "float64": 1e-6}
"""Largest relative difference of losses and gradient norms of the same update in other places, by type of computation.

A loss is a sum of terms of both signs and may be near 0: a tenth of it, absolute, is always allowed there.
"""


def _compare(done: Artifact, made: Updated, step: int) -> None:
    """Refuse a repetition that differs from what was recorded: at which optimizer step, and in which tensors.

    In the places of then it must be the same bit for bit; sums in another order are rounded otherwise.
    """
    recorded = read_table(done, ["weights_digest", "loss", "grad_norm"]).to_pylist()
    digest, manifest = made.weights_digest, read_manifest(done.folder)
    if recorded[-1]["weights_digest"] == digest:
        return
    bound = rounding(manifest.notes, manifest.shapes, made.places, made.dtype)
    differ = steps_that_differ(recorded, made.rows, bound)
    if bound and not differ:
        return
    first = f"from its optimizer step {differ[0]} on" if differ else "though every loss and gradient norm is the same"
    known = manifest.notes.get("tensors", {})
    moved = [name for name, value in made.tensor_digests.items() if known.get(name, value) != value]
    tensors = f", first in {moved[0]} ({len(moved)} of {len(known)} tensors)" if moved else ""
    why = (
        f"With other ranks, or rows shared out otherwise, losses and gradient norms may differ by {bound:g} of them"
        if bound
        else "Bit equality needs the same device type, library versions and thread count as the run had"
    )
    raise StageError(
        f"update {step} was made again from its stored batch and gives other weights {first}{tensors}: SHA-256 "
        f"{digest[:12]} against the recorded {recorded[-1]['weights_digest'][:12]}. {why}; a checkpoint of this step "
        "or a later one needs no repetition."
    )


def rounding(
    notes: Mapping[str, Any], shapes: Mapping[str, int], places: tuple[int, int, int, bool], dtype: str
) -> float:
    """How far a repeated update may be from the recorded one, as a share; 0: not at all.

    Args:
        notes: of the recorded update's manifest.
        shapes: the same; for one that was written without `places`.
        places: of the repetition.
        dtype: type that the policy computes in.
    """
    ranks = shapes.get("ranks", 1)
    then = tuple(notes.get("places") or (ranks, 1, ranks, True))
    return 0.0 if then == places else ROUNDING.get(dtype, ROUNDING["bfloat16"])


def steps_that_differ(recorded: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]], bound: float) -> list:
    """Numbers of the optimizer steps whose loss or gradient norm is another one, by more than a share `bound`."""
    floors = {"loss": 0.1 * bound, "grad_norm": 0.0}
    pairs = enumerate(zip(recorded, made, strict=False))
    return [i for i, (old, new) in pairs if not all(_same(old[n], new[n], bound, floors[n]) for n in floors)]


def _same(old: float | None, new: float | None, bound: float, floor: float) -> bool:
    if old is None or new is None:
        return old is new
    return abs(old - new) <= max(bound * max(abs(old), abs(new)), floor)
