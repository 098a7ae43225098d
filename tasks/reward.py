"""Stage `reward`: every response scored by rule, in worker processes, with a status beside each score."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from storage import Artifact, read_table
from tasks.rewards.pool import RewardPool, RewardRow, Verdict, check_error_share
from tasks.stage import Stage, Step

READS = ("reward.functions", "reward.timeout_s", "custom_reward_function", "reward_model")
CODE = ("tasks.reward", "tasks.rewards")


def reward(step: Step, prompts: Artifact, rollouts: Artifact, pool: RewardPool) -> Artifact:
    """Commit `rewards`.

    Raises:
        RewardError: a function returned something else than scores, or too many samples have no verdict through error
            or time limit (`reward.max_error_share`); the rollouts are kept.
    """
    stage = step.open(
        "rewards", reads=READS, code=CODE, parents=[prompts, rollouts], also={"functions": pool.code_digest}
    )
    return _score(stage, step, prompts, rollouts, pool)


def reward_validation(step: Step, prompts: Artifact, rollouts: Artifact, pool: RewardPool) -> Artifact:
    """Commit `val_rewards`; raises as `reward` does."""
    stage = step.open(
        "val_rewards",
        reads=READS,
        code=CODE,
        parents=[prompts, rollouts],
        policy_version=step.index,
        also={"functions": pool.code_digest},
    )
    return _score(stage, step, prompts, rollouts, pool)


def _score(stage: Stage, step: Step, prompts: Artifact, rollouts: Artifact, pool: RewardPool) -> Artifact:
    if done := stage.committed():
        return done
    rows = reward_rows(prompts, rollouts)
    verdicts = pool.score(rows)
    check_error_share(verdicts, step.cfg)
    return stage.commit(
        {
            "sample_id": [row.sample_id for row in rows],
            "group_id": read_table(rollouts, ["group_id"])["group_id"],
            "score": [verdict.score for verdict in verdicts],
            "status": [verdict.status for verdict in verdicts],
            "parts": [list(verdict.parts.items()) for verdict in verdicts],
            "extracted": [verdict.extracted for verdict in verdicts],
            "extra": [json.dumps(verdict.extra) for verdict in verdicts],
            "message": [verdict.message for verdict in verdicts],
            "seconds": np.asarray([verdict.seconds for verdict in verdicts], dtype=np.float32),
        },
        metrics=_metrics(verdicts),
        notes={"functions": pool.code_digest},
    )


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


def _metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of samples by status, and the mean of each reward function over the samples it applies to."""
    count = max(len(verdicts), 1)
    statuses = Counter(verdict.status for verdict in verdicts)
    metrics = {f"reward/{status}_share": statuses[status] / count for status in ("ok", "error", "timeout", "unparsed")}
    names = {name for verdict in verdicts for name in verdict.parts}
    for name in sorted(names):
        values = [verdict.parts[name] for verdict in verdicts if verdict.parts.get(name) is not None]
        if values:
            metrics[f"reward/{name}/mean"] = float(np.mean([value for value in values if value is not None]))
    return metrics
