"""Sampled tokens that cannot be sampled again here, judged by what the policy says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from flows.audit.compare import Bound, Comparison, compare_tables
from flows.audit.replay.tolerances import ENGINE_NATS
from storage import Artifact, Ragged, StorageError, read_table
from tasks.config import RunConfig
from tasks.engines.policy_folder import MEAN_GAP
from tasks.log_prob import comparable, old_log_prob
from tasks.stage import Step, aligned
from tasks.workers.group import WorkerGroup


def judge_by_log_probs(
    step: Step, prompts: Artifact, rollouts: Artifact, group: WorkerGroup, dtype: str
) -> tuple[Comparison, str]:
    """Compare the engine's log-probs of the stored tokens with those of the policy that they were sampled from.

    Args:
        step: in a scratch run.
        prompts: of the responses.
        rollouts: the responses.
        group: holds the policy before the step.
        dtype: type that the policy computes in.

    Returns:
        What came of it, and what was allowed, in words. Beyond the tolerance is the first token whose log-probs differ
        by more than an engine's rounding; and, if none does, all of them where their mean does.

    Raises:
        StorageError: the log-probs were not kept, or are of another distribution than the policy's.
    """
    table = read_table(rollouts, ["sample_id", "rollout_log_probs"])
    if table["rollout_log_probs"].null_count:
        raise StorageError(
            "the tokens cannot be sampled again here, and their log-probs were not kept to judge them by "
            "(actor_rollout_ref.rollout.calculate_log_probs)"
        )
    if not comparable(rollouts):
        raise StorageError(
            "the tokens cannot be sampled again here, and the engine's log-probs are of another distribution than the "
            "policy's (raw, or behind top-p or top-k)"
        )
    made = old_log_prob(replace(step, cfg=_with_a_pass(step.cfg)), prompts, rollouts, group)
    policy = aligned(made, table["sample_id"], ["old_log_probs"])["old_log_probs"]
    theirs = pa.table({"sample_id": table["sample_id"], "rollout_log_probs": policy})
    each, mean = ENGINE_NATS[dtype], MEAN_GAP.get(dtype, MEAN_GAP["float32"])
    found = compare_tables(table, theirs, {"rollout_log_probs": Bound(absolute=each)})
    sides = [Ragged.from_arrow(column).values.astype(np.float64) for column in (table["rollout_log_probs"], policy)]
    gap = float(np.abs(sides[0] - sides[1]).mean()) if len(sides[0]) else 0.0
    # Equal log-probs are no equal tokens: the tokens were taken as they are.
    found = replace(found, equal=False, allowed=found.allowed and gap <= mean)
    return found, f"{each:g} nats each, {mean:g} on average ({dtype})"


def _with_a_pass(cfg: RunConfig) -> RunConfig:
    """With the policy's own log-probs, also where the run took the engine's for them."""
    correction = cfg.algorithm.rollout_correction.model_copy(update={"bypass_mode": False})
    return cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update={"rollout_correction": correction})})
