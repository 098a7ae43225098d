"""Stage `prompts`: which prompts this step works on, taken from the prepared data set in (seed, epoch) order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import Artifact
from storage.schema import round_of
from tasks.data import PreparedPrompts, prompt_order, step_rows
from tasks.stage import Step

READS = ("data.train_batch_size", "data.shuffle", "data.seed", "trainer.seed")
CANDIDATE_READS = ("data.gen_batch_size", *READS)
CODE = ("tasks.prompts", "tasks.data")


def choose_prompts(step: Step, dataset: PreparedPrompts) -> Artifact:
    """Commit `prompts` for a training step: one row per prompt, with ids that are new in every step."""
    stage = step.open("prompts", reads=READS, code=CODE, also={"data": dataset.digest})
    if done := stage.committed():
        return done
    data = step.cfg.data
    seed = step.cfg.trainer.seed if data.seed is None else data.seed
    epoch, rows = step_rows(step.index, dataset.table.num_rows, data.train_batch_size, seed, data.shuffle)
    return stage.commit(
        prompt_columns(dataset, rows, f"{step.index:06d}"),
        metrics={"training/epoch": float(epoch)},
        shapes=_token_shapes(dataset.table, rows),
    )


def choose_rest(step: Step, dataset: PreparedPrompts, start: int, count: int) -> Artifact:
    """Commit `prompts`: some consecutive prompts of the first epoch's order, where that is not done by whole steps.

    Args:
        step: the step.
        dataset: the prepared training prompts.
        start: place of the first one in the order.
        count: how many.
    """
    also = {"data": dataset.digest, "start": start, "count": count}
    stage = step.open("prompts", reads=READS, code=CODE, also=also)
    if done := stage.committed():
        return done
    data = step.cfg.data
    seed = step.cfg.trainer.seed if data.seed is None else data.seed
    rows = prompt_order(seed, 0, dataset.table.num_rows, data.shuffle)[start : start + count]
    return stage.commit(
        prompt_columns(dataset, rows, f"{step.index:06d}"),
        metrics={"training/epoch": 0.0},
        shapes=_token_shapes(dataset.table, rows),
    )


def choose_candidates(step: Step, dataset: PreparedPrompts, number: int, drawn_before: int) -> Artifact:
    """Commit `prompts-01`, `prompts-02`, …: the prompts of one generate call of a step that filters groups.

    Args:
        step: the step.
        dataset: the prepared training prompts.
        number: of the generate call within the step, from 1.
        drawn_before: generate calls of all steps before: where in the (seed, epoch) order this step begins.
    """
    also = {"data": dataset.digest, "number": number, "drawn_before": drawn_before}
    stage = step.open(round_of("prompts", number), reads=CANDIDATE_READS, code=CODE, also=also)
    if done := stage.committed():
        return done
    data = step.cfg.data
    seed = step.cfg.trainer.seed if data.seed is None else data.seed
    size = data.gen_batch_size or data.train_batch_size
    epoch, rows = step_rows(drawn_before + number, dataset.table.num_rows, size, seed, data.shuffle)
    return stage.commit(
        prompt_columns(dataset, rows, f"{step.index:06d}", first_slot=(number - 1) * size),
        metrics={"training/epoch": float(epoch)},
        shapes=_token_shapes(dataset.table, rows),
    )


def choose_validation_prompts(step: Step, dataset: PreparedPrompts) -> Artifact:
    """Commit `val_prompts`: the whole validation set, in file order."""
    stage = step.open("val_prompts", reads=READS, code=CODE, also={"data": dataset.digest}, policy_version=step.index)
    if done := stage.committed():
        return done
    rows = np.arange(dataset.table.num_rows)
    return stage.commit(
        prompt_columns(dataset, rows, f"val-{step.index:06d}"), shapes=_token_shapes(dataset.table, rows)
    )


def prompt_columns(
    dataset: PreparedPrompts, rows: np.ndarray, prefix: str, *, first_slot: int = 0
) -> dict[str, object]:
    """The columns of a `prompts` artifact for some rows of the data set; groups are numbered from `first_slot` on."""
    table = dataset.table.take(pa.array(rows))
    columns: dict[str, object] = {name: table[name] for name in table.column_names}
    columns["group_id"] = [f"{prefix}-{slot:04d}" for slot in range(first_slot, first_slot + len(rows))]
    return columns


def _token_shapes(table: pa.Table, rows: np.ndarray) -> dict[str, int]:
    lengths = pc.list_value_length(table["prompt_ids"]).to_numpy()[rows]
    return {"tokens": int(lengths.sum()), "longest": int(lengths.max(initial=0))}
