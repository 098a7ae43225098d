"""Dynamic sampling: of a step's generate calls, the groups that carry a signal make the batch that is trained on.

Each call's prompts, rollouts and rewards are artifacts of their own (`rollouts-01`, `rollouts-02`, …). The first
`data.train_batch_size` groups with a signal, in the order in which they were drawn, are committed again as the step's
`prompts`, `rollouts` and `rewards`, from where the step goes on as any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import Artifact, Ragged, read_table
from storage.artifacts import read_manifest
from tasks.algorithms.shaping import groups_with_signal
from tasks.config import RunConfig
from tasks.generate import response_metrics, token_shapes
from tasks.reward import reward_metrics
from tasks.rewards.functions import configured_functions
from tasks.shape_reward import SHAPING_READS, shaped_rewards
from tasks.stage import StageError, Step

READS = ("algorithm.filter_groups.metric", "data.train_batch_size", "actor_rollout_ref.rollout.n", *SHAPING_READS)
CODE = ("tasks.filter_groups", "tasks.algorithms")

SCORES = ("score", "seq_reward", "reward", "seq_final_reward")
"""Names of `algorithm.filter_groups.metric` that every sample has."""


@dataclass(frozen=True)
class Call:
    """One generate call of a step: its prompts, the responses to them, and their scores."""

    prompts: Artifact
    rollouts: Artifact
    rewards: Artifact


def calls_before(previous_prompts: Artifact | None) -> int:
    """Generate calls of all steps before, from the `prompts` of the step before; None: this is the first step."""
    return 0 if previous_prompts is None else int(read_manifest(previous_prompts.folder).notes.get("generate_calls", 0))


def signal_groups(cfg: RunConfig, calls: Sequence[Call]) -> list[str]:
    """Ids of the groups with a signal, in the order in which they were drawn (see `groups_with_signal`)."""
    found: list[str] = []
    for call in calls:
        group = read_table(call.rewards, ["group_id"])["group_id"].to_pylist()
        signal = groups_with_signal(filter_values(cfg, call), np.asarray(group))
        found += [name for name, kept in zip(dict.fromkeys(group), signal, strict=True) if kept]
    return found


def filter_values(cfg: RunConfig, call: Call) -> np.ndarray:
    """[N] what the groups of a call are judged by: `algorithm.filter_groups.metric`; NaN: no verdict.

    `score` and `seq_reward` are the score; `reward` and `seq_final_reward` the shaped reward, before KL; any other name
    is that of a reward function or of a value that a function returned beside its score, such as `acc`. A sample
    without it has no verdict: functions differ by data source, and a call need not draw rows of each.
    """
    metric = cfg.algorithm.filter_groups.metric
    table = read_table(call.rewards, ["score", "parts", "extra"])
    score = table["score"].to_numpy().astype(np.float64)
    if metric in ("score", "seq_reward"):
        return score
    if metric in ("reward", "seq_final_reward"):
        return shaped_rewards(cfg, call.rollouts, score)[0]
    values = [_number(row.get(metric)) for row in _returned(table)]
    return np.where(np.isnan(score), np.nan, np.asarray(values, dtype=np.float64))


def _returned(rewards: pa.Table) -> list[dict[str, object]]:
    """[N] what the functions returned for each sample: scores by function, and values beside them."""
    columns = (rewards[name].to_pylist() for name in ("extra", "parts"))
    return [{**json.loads(extra), **dict(parts)} for extra, parts in zip(*columns, strict=True)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, bool | int | float) else None


def refuse_another_call(step: Step, calls: Sequence[Call], kept: Sequence[str], prompts: int) -> None:
    """Stop a step that has used up its generate calls without filling its batch.

    Args:
        step: the step.
        calls: the calls it has made.
        kept: groups with a signal among them.
        prompts: prompts of the training set.

    Raises:
        StageError: `max_num_gen_batches` calls are made, or at 0 as many as draw the number of training prompts; or no
            function returns a number of `filter_groups.metric`.
    """
    data, most = step.cfg.data, step.cfg.algorithm.filter_groups.max_num_gen_batches
    size = data.gen_batch_size or data.train_batch_size
    limit = most or -(-prompts // size)
    drawn = sum(call.prompts.rows for call in calls)
    # A later step's name has been returned before: there it is the prompts that were drawn that lack it.
    if len(calls) >= limit or (step.index == 1 and drawn >= data.train_batch_size):
        _refuse_unknown_metric(step.cfg, calls)
    if len(calls) < limit:
        return
    reason = f"algorithm.filter_groups.max_num_gen_batches={most}"
    reason += "" if most else f", which is one pass over the {prompts} training prompts"
    raise StageError(
        f"step {step.index}: {len(calls)} generate calls ({reason}) gave {len(kept)} groups with a signal out of "
        f"{drawn}, fewer than data.train_batch_size={data.train_batch_size}. The calls are kept in "
        f"{step.run.step(step.index).folder}; nothing was trained on them. Set max_num_gen_batches above "
        f"{limit}, raise actor_rollout_ref.rollout.n, lower data.train_batch_size, or use prompts that are neither "
        "always nor never solved."
    )


def _refuse_unknown_metric(cfg: RunConfig, calls: Sequence[Call]) -> None:
    """Stop where no sample of any call has the value that groups are filtered by, and no function has its name."""
    metric = cfg.algorithm.filter_groups.metric
    if metric in SCORES or metric in [function.name for function in configured_functions(cfg)]:
        return
    rows = [row for call in calls for row in _returned(read_table(call.rewards, ["extra", "parts"]))]
    known = sorted({name for row in rows for name, value in row.items() if _number(value) is not None})
    if rows and metric not in known:
        raise StageError(
            f"algorithm.filter_groups.metric={metric}: no reward function returned a number of that name for any of "
            f"{len(rows)} samples. There are score, reward{''.join(f', {name}' for name in known)}."
        )


def keep_groups(step: Step, name: str, calls: Sequence[Call], before: int) -> Artifact:
    """Commit the step's `prompts`, `rollouts` or `rewards`: the rows of the groups that are trained on.

    Args:
        step: the step.
        name: which of the three.
        calls: the generate calls of the step.
        before: generate calls of all steps before.
    """
    also = {"generate_calls": before + len(calls)}
    parents = [artifact for call in calls for artifact in (call.prompts, call.rollouts, call.rewards)]
    stage = step.open(name, reads=READS, code=CODE, parents=parents, also=also)
    if done := stage.committed():
        return done
    with_signal = signal_groups(step.cfg, calls)
    chosen = pa.array(with_signal[: step.cfg.data.train_batch_size], type=pa.large_string())
    table = pa.concat_tables(read_table(getattr(call, name)) for call in calls)
    rows = table.filter(pc.is_in(table["group_id"], chosen))
    made_with = read_manifest(getattr(calls[-1], name).folder).notes
    metrics: dict[str, float] = {}
    shapes: dict[str, int] = {}
    if name == "prompts":
        drawn = sum(call.prompts.rows for call in calls)
        epoch = read_manifest(calls[-1].prompts.folder).metrics["training/epoch"]
        metrics = {"train/num_gen_batches": len(calls), "group/signal_share": len(with_signal) / drawn}
        metrics["training/epoch"] = float(epoch or 0)
        shapes = token_shapes(Ragged.from_arrow(rows["prompt_ids"]))
        made_with = {**made_with, **also}
    elif name == "rollouts":
        ids = Ragged.from_arrow(rows["response_ids"])
        prompt_lengths = _prompt_lengths(calls, chosen)
        metrics = response_metrics(ids, rows["finish_reason"].to_pylist(), prompt_lengths, step.cfg)
        shapes = token_shapes(ids)
    else:
        metrics = reward_metrics(rows["status"].to_pylist(), [dict(row) for row in rows["parts"].to_pylist()])
    columns = {column: rows[column] for column in rows.column_names}
    return stage.commit(columns, metrics=metrics, shapes=shapes, notes=made_with)


def _prompt_lengths(calls: Sequence[Call], chosen: pa.Array) -> np.ndarray:
    table = pa.concat_tables(read_table(call.prompts, ["group_id", "prompt_ids"]) for call in calls)
    kept = table.filter(pc.is_in(table["group_id"], chosen))
    return Ragged.from_arrow(kept["prompt_ids"]).lengths
