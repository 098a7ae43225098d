"""Stage `reward`: every response scored by rule, in worker processes, with a status beside each score."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from storage import Artifact, read_table
from storage.schema import round_of
from tasks.rewards.pool import RewardPool, RewardRow, check_error_share
from tasks.stage import Step

READS = ("reward.functions", "reward.timeout_s", "custom_reward_function", "reward_model")
CODE = ("tasks.reward", "tasks.rewards")


def reward(step: Step, prompts: Artifact, rollouts: Artifact, pool: RewardPool, number: int | None = None) -> Artifact:
    """Commit `rewards`, or `rewards-01` and so on for one generate call of several.

    Raises:
        RewardError: a function returned something else than scores, or too many samples have no verdict through error
            or time limit (`reward.max_error_share`); the rollouts are kept.
    """
    return _score(step, "rewards" if number is None else round_of("rewards", number), prompts, rollouts, pool)


def reward_greedy(step: Step, prompts: Artifact, rollouts: Artifact, pool: RewardPool) -> Artifact:
    """Commit `greedy_rewards`: scores of `greedy_rollouts`; raises as `reward` does."""
    return _score(step, "greedy_rewards", prompts, rollouts, pool)


def reward_validation(step: Step, prompts: Artifact, rollouts: Artifact, pool: RewardPool) -> Artifact:
    """Commit `val_rewards`; raises as `reward` does."""
    return _score(step, "val_rewards", prompts, rollouts, pool, policy_version=step.index)


def _score(
    step: Step, name: str, prompts: Artifact, rollouts: Artifact, pool: RewardPool, policy_version: int | None = None
) -> Artifact:
    also = {"functions": pool.code_digest}
    parents = [prompts, rollouts]
    stage = step.open(name, reads=READS, code=CODE, parents=parents, policy_version=policy_version, also=also)
    if done := stage.committed():
        return done
    rows = reward_rows(prompts, rollouts)
    verdicts = pool.score(rows)
    check_error_share(verdicts, step.cfg)
    columns = {
        "sample_id": [row.sample_id for row in rows],
        "group_id": read_table(rollouts, ["group_id"])["group_id"],
        "score": [verdict.score for verdict in verdicts],
        "status": [verdict.status for verdict in verdicts],
        "parts": [list(verdict.parts.items()) for verdict in verdicts],
        "extracted": [verdict.extracted for verdict in verdicts],
        "extra": [json.dumps(verdict.extra) for verdict in verdicts],
        "message": [verdict.message for verdict in verdicts],
        "seconds": np.asarray([verdict.seconds for verdict in verdicts], dtype=np.float32),
    }
    parts = [verdict.parts for verdict in verdicts]
    metrics = reward_metrics([verdict.status for verdict in verdicts], parts)
    return stage.commit(columns, metrics=metrics, notes={"functions": pool.code_digest})


def reward_rows(prompts: Artifact, rollouts: Artifact) -> list[RewardRow]:
    """What the reward functions are given: each response with its prompt's columns, joined on `group_id`."""
    columns = ["group_id", "data_source", "prompt", "ground_truth", "extra_info"]
    by_group = {row["group_id"]: row for row in read_table(prompts, columns).to_pylist()}
    decoded = {
        name: {
            "data_source": row["data_source"],
            "prompt": json.loads(row["prompt"]),
            "ground_truth": None if row["ground_truth"] is None else json.loads(row["ground_truth"]),
            "extra_info": json.loads(row["extra_info"]),
            "group_id": name,
        }
        for name, row in by_group.items()
    }
    samples = read_table(rollouts, ["sample_id", "group_id", "response_text"]).to_pylist()
    return [
        RewardRow(sample_id=row["sample_id"], solution_str=row["response_text"], **decoded[row["group_id"]])
        for row in samples
    ]


def reward_metrics(statuses: Sequence[str], parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Share of samples by status, and the mean of each reward function over the samples it applies to.

    Args:
        statuses: [N] of each sample.
        parts: [N] score by reward function; None: none for this sample.
    """
    counts = Counter(statuses)
    metrics = {
        f"reward/{status}_share": counts[status] / max(len(statuses), 1)
        for status in ("ok", "error", "timeout", "unparsed")
    }
    for name in sorted({name for row in parts for name in row}):
        values = [value for row in parts if (value := row.get(name)) is not None]
        if values:
            metrics[f"reward/{name}/mean"] = float(np.mean(values))
    return metrics
