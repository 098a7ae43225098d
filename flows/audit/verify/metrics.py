"""Checks of the numbers that people look at: recomputed from columns, in the manifests, in `step.json`, in MLflow."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from flows.audit.verify.advantages import advantages_again
from flows.audit.verify.base import Account, Bench, Cannot
from flows.audit.verify.step import Look, prompts_of
from flows.mlflow_history import History, NoStore, stored_history
from flows.mlflow_store import legal_name
from storage import Artifact, Ragged, Run
from storage.durable import read_json, read_json_lines
from storage.schema import without_round
from tasks.stage import Step

Metrics = Mapping[str, float | None]

SAME_METRIC = 1e-6
"""Relative difference of a metric recomputed from columns: means of the same float32 numbers in another order."""

NOT_AGAIN = ("memory/", "perf/throughput")
"""Metrics of the machine, and one that divides by the number of devices, which may have changed since."""

SEVERAL_TIMES = ("val-", "timing_s/testing")
"""Metrics of a step that may be measured again later, by `trainer.val_only`."""


def differ(stored: float | None, wanted: float | None, within: float = SAME_METRIC) -> bool:
    """Whether two values of a metric are different numbers; null and NaN are both none."""
    none = [value is None or not math.isfinite(value) for value in (stored, wanted)]
    if stored is None or wanted is None or any(none):
        return none[0] != none[1]
    return abs(stored - wanted) > within * max(1.0, abs(wanted))


def metrics(look: Look, account: Account) -> None:
    """The numbers in the manifests are what the columns give."""
    for stage in look.stages:
        with account.attempt(look.step):
            stored = look.manifest(stage).metrics
            wanted = {**_recomputed(look, stage), **_shapes(look, stage)}
            _compare(look, stage, {**stored, **_shape_metrics(look, stage)}, wanted, account, "its manifest")
    with account.attempt(look.step):
        record = look.record
        if record is not None and "val_rewards" in look.stages:
            _compare(look, "val_rewards", record["metrics"], _validation(look), account, "step.json")


def _compare(look: Look, stage: str, stored: Metrics, wanted: Metrics, account: Account, where: str) -> None:
    for name, value in wanted.items():
        if name not in stored:
            if value is not None and math.isfinite(value):
                account.fail(f"{where} has no {name}, the columns give {value:.8g}", look.step, stage)
            continue
        have = stored[name]
        gap = abs(have - value) if have is not None and value is not None and math.isfinite(value) else 0.0
        account.look(1, gap)
        if differ(have, value):
            account.fail(f"{name} is {have} in {where}, the columns give {value:.8g}", look.step, stage)


def _recomputed(look: Look, stage: str) -> Metrics:
    """What a stage's own metrics are by its columns; those that need more than these are not in it."""
    whole = without_round(stage)
    if whole == "rollouts":
        return _of_rollouts(look, stage)
    if whole == "rewards":
        from tasks.reward import reward_metrics

        table = look.table(stage)
        return reward_metrics(table["status"].to_pylist(), [dict(row) for row in table["parts"].to_pylist()])
    if stage == "old_log_probs":
        return _of_old_log_probs(look)
    if stage == "advantages":
        return advantages_again(look)[1].metrics
    if stage == "updates":
        return _of_updates(look)
    return {}


def _of_rollouts(look: Look, stage: str) -> Metrics:
    from tasks.generate import response_metrics

    table = look.table(stage)
    lengths = Ragged.from_arrow(look.table(prompts_of(stage))["prompt_ids"]).lengths
    ids = Ragged.from_arrow(table["response_ids"])
    return response_metrics(ids, table["finish_reason"].to_pylist(), lengths, look.cfg(stage))


def _of_old_log_probs(look: Look) -> Metrics:
    from tasks.log_prob import comparable, sampler_gap

    table = look.table("old_log_probs")
    found: dict[str, float | None] = {}
    if not table["entropy"].null_count and len(values := Ragged.from_arrow(table["entropy"]).values):
        found["actor/entropy"] = float(values.mean(dtype=np.float64))
    if look.manifest("old_log_probs").notes.get("of") == "engine":
        return found
    sampled = look.joined("rollouts", "old_log_probs", ["rollout_log_probs"])
    old = Ragged.from_arrow(table["old_log_probs"])
    if comparable(look.artifact("rollouts")) and not sampled["rollout_log_probs"].null_count:
        if not np.array_equal(Ragged.from_arrow(sampled["rollout_log_probs"]).offsets, old.offsets):
            raise Cannot("log-probs have other lengths, see `lengths`")
        found.update(sampler_gap(sampled, old))
    return found


def _of_updates(look: Look) -> Metrics:
    from tasks.update import update_metrics

    rows = look.table("updates").to_pylist()
    if not rows:
        raise Cannot("updates has no rows")
    return update_metrics([{**row, "more": {}} for row in rows])


def _shapes(look: Look, stage: str) -> Metrics:
    """Rows, bytes and tokens, under the names that `_shape_metrics` gives the manifest's."""
    artifact = look.artifact(stage)
    found: dict[str, float | None] = {"shape rows": float(artifact.rows), "shape bytes": float(artifact.bytes)}
    whole, table = without_round(stage), look.table(stage)
    column = {"rollouts": "response_ids", "prompts": "prompt_ids"}.get(whole.split("_")[-1])
    if column is not None:
        lengths = Ragged.from_arrow(table[column]).lengths
        found.update({"shape tokens": float(lengths.sum()), "shape longest": float(lengths.max(initial=0))})
    elif stage == "advantages":
        found["shape tokens"] = float(Ragged.from_arrow(table["loss_mask"]).values.sum())
    elif stage == "updates":
        for name in ("tokens", "sequences", "micro_batches"):
            found[f"shape {name}"] = float(sum(table[name].to_pylist()))
        found["shape optimizer_steps"] = float(table.num_rows)
    return found


def _shape_metrics(look: Look, stage: str) -> Metrics:
    return {f"shape {name}": float(value) for name, value in look.manifest(stage).shapes.items()}


def _validation(look: Look) -> Metrics:
    from tasks.validate import validation_metrics

    for stage in ("val_prompts", "val_rollouts", "val_rewards"):
        _ = look.table(stage)
    artifacts = [look.artifact(stage) for stage in ("val_prompts", "val_rollouts", "val_rewards")]
    try:
        return validation_metrics(artifacts[0], artifacts[1], artifacts[2], look.cfg("val_rollouts"))
    except KeyError as error:
        raise Cannot("a validation response answers no prompt, see `ids`") from error


def record(look: Look, account: Account) -> None:
    """The numbers in `step.json` are those of the manifests: metrics, shapes, times, tokens per second."""
    from flows.step import step_metrics

    with account.attempt(look.step):
        stored = look.record
        if stored is None:
            raise Cannot("the step is open")
        names = [name for name in stored.get("artifacts", {}) if not name.startswith("val_")]
        artifacts: dict[str, Artifact] = {name: look.artifact(name) for name in names}
        if not {"rollouts", "old_log_probs"} <= artifacts.keys():
            return
        seconds = stored["metrics"].get("perf/time_per_step")
        if not seconds:
            account.fail("perf/time_per_step is missing", look.step)
            return
        step: Any = Step(look.step, look.run, look.cfg())  # type: ignore[arg-type]
        wanted = step_metrics(step, artifacts, seconds)
        for name, value in wanted.items():
            if name.startswith(NOT_AGAIN):
                continue
            account.look()
            have = stored["metrics"].get(name)
            if differ(have, value, 1e-12):
                account.fail(f"{name} is {have} in step.json, by the manifests it is {value}", look.step)


# -------------------------------------------------------------------------------------------------------------- MLflow


class Recorded:
    """The metrics of all finished steps by name, as packed numbers: eight bytes a value."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}

    def add(self, step: int, metrics: Metrics) -> None:
        """Take one step's metrics; steps come in order."""
        self.steps.append(step)
        for name, value in metrics.items():
            row = self.values.setdefault(name, array("d", [math.nan] * (len(self.steps) - 1)))
            row.append(math.nan if value is None else value)
        for row in self.values.values():
            if len(row) < len(self.steps):
                row.append(math.nan)

    def of(self, name: str) -> Iterator[tuple[int, float]]:
        """Step and value of a metric, where it has a finite one."""
        for step, value in zip(self.steps, self.values[name], strict=True):
            if math.isfinite(value):
                yield step, value


def in_mlflow(bench: Bench, recorded: Recorded, account: Account) -> None:
    """MLflow has the values of `step.json`, for every step that it has been sent."""
    run = bench.run
    path = run.document("tracking.json")
    if not path.is_file():
        raise Cannot("the run is not tracked in MLflow")
    try:
        uri = read_json(path)["uri"]
    except (ValueError, KeyError, TypeError) as error:
        raise Cannot("tracking.json is damaged, see `documents`") from error
    if not _holds_tables(uri, account):
        return
    from sqlalchemy.exc import DatabaseError, OperationalError

    try:
        with stored_history(run, uri) as history:
            _compare_history(run, history, recorded, account)
    except OperationalError as error:
        raise Cannot(f"MLflow's store does not answer: {error.orig}") from error
    except DatabaseError as error:
        account.fail(f"MLflow's store is damaged: {error.orig}")
    except (NoStore, ValueError, KeyError) as error:
        raise Cannot(f"MLflow's values cannot be read: {error}") from error


def _holds_tables(uri: str, account: Account) -> bool:
    """Whether a store can be opened; False where it is damaged, which is told.

    MLflow makes its tables in an SQLite file that has none, and nothing is written here, so this is asked of the file.

    Raises:
        Cannot: it holds nothing of MLflow's, or does not answer.
    """
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or not path.is_file():
        return True
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as store:
            found = store.execute("select count(*) from sqlite_master where name = 'metrics'").fetchone()[0]
    except sqlite3.OperationalError as error:
        raise Cannot(f"MLflow's store does not answer: {error}") from error
    except sqlite3.DatabaseError as error:
        account.fail(f"MLflow's store is damaged: {error}")
        return False
    if not found:
        raise Cannot("MLflow's store is empty")
    return True


def _compare_history(run: Run, history: History, recorded: Recorded, account: Account) -> None:
    sent = {line["step"] for line in read_json_lines(run.document("tracking.jsonl")) if "step" in line}
    made = {*run.steps(), *sent}
    if waiting := [step for step in recorded.steps if step not in sent]:
        account.skip("MLflow has not been sent this step yet (grpoflow deliver)", waiting[0])
    for name in recorded.values:
        key = legal_name(name)
        stored: dict[int, list[float]] = {}
        for step, value in history.values(key):
            stored.setdefault(step, []).append(value)
        for step, value in recorded.of(name):
            if step in sent:
                _compare_stored(name, step, value, stored.get(step, []), account)
        for step in sorted(stored.keys() - made):
            account.fail(f"{name} is {stored[step][0]} in MLflow, and the run has no such step", step)
        latest = history.latest.get(key)
        if latest is not None and stored and not any(latest in values for values in stored.values()):
            account.fail(f"{name} is shown as {latest} by MLflow, no step has this value")


def _compare_stored(name: str, step: int, value: float, stored: list[float], account: Account) -> None:
    account.look()
    if not stored:
        account.fail(f"{name} is {value} in step.json and not in MLflow", step)
        return
    wrong = [have for have in stored if differ(have, value, 1e-12)]
    if len(wrong) == len(stored) or (wrong and not name.startswith(SEVERAL_TIMES)):
        account.look(0, abs(wrong[0] - value))
        account.fail(f"{name} is {wrong[0]} in MLflow, {value} in step.json", step)
