"""A sweep as Optuna and MLflow show it: brought up to date from the sweep's folder, on a thread of its own.

The folder is the truth. What is told is found again by the trial's number and the run's id, so that telling it twice
changes nothing, and what was missed while a server was away is told by the next time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flows.sweep.book import Sweep, open_sweep
from flows.sweep.space import direction, distribution, optuna_value, silent
from flows.sweep.table import Row, rows
from storage import Run
from storage.durable import read_json_lines

if TYPE_CHECKING:
    import optuna

NUMBER, STATE = "trial", "state"
"""User attributes of a trial in Optuna: its number in the sweep, and its state there."""


class Mirror:
    """Tells Optuna and MLflow of a sweep while it runs. Use it as a context manager; leaving it tells the rest."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._wake, self._closing = threading.Event(), threading.Event()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="sweep-mirror", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(60.0)

    def changed(self) -> None:
        """There is something new."""
        self._wake.set()

    def _work(self) -> None:
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last = self._closing.is_set()
            for name, tell in (("Optuna", to_optuna), ("MLflow", to_mlflow)):
                try:
                    tell(open_sweep(self._folder))
                except Exception as error:
                    sentence = f"{name} was not told of the sweep: {type(error).__name__}: {str(error).splitlines()[0]}"
                    if sentence not in self._said:
                        self._say(f"{sentence}; it will be with the next change")
                        self._said.add(sentence)


# ------------------------------------------------------------------------------------------------------------- Optuna


def study_of(sweep: Sweep) -> optuna.Study:
    """The Optuna study of a sweep, made if it is not there: for optuna-dashboard and for importances."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with silent():
        url = sweep.spec.optuna_storage
        storage: Any = url or JournalStorage(JournalFileBackend(str(sweep.folder / "study.log")))
        return optuna.create_study(
            study_name=sweep.sweep_id, storage=storage, direction=direction(sweep.spec), load_if_exists=True
        )


def to_optuna(sweep: Sweep) -> None:
    """Bring the study up to the sweep: every trial once, with its values by step and its end.

    A paused trial stays `RUNNING` there while the sweep can still promote it, and is `PRUNED` when the sweep is over.
    """
    import optuna

    study, board = study_of(sweep), sweep.board()
    over = sweep.told_state != "running"
    with silent():
        known = {trial.user_attrs.get(NUMBER): trial for trial in study.trials}
        for row in sorted(rows(sweep), key=lambda one: one.trial):
            frozen = known.get(row.trial)
            if frozen is not None and frozen.state.is_finished():
                continue
            trial = optuna.Trial(study, frozen._trial_id) if frozen is not None else _begin(sweep, study, row)
            for advance in board.of_trial(row.trial):
                value = board.value(advance)
                if value is not None and (frozen is None or advance.until not in frozen.intermediate_values):
                    trial.report(value, advance.until)
            _end(study, trial, row, over)


def _begin(sweep: Sweep, study: optuna.Study, row: Row) -> optuna.Trial:
    space = sweep.spec.space
    params = {key: optuna_value(space[key], value) for key, value in row.values.items()}
    study.enqueue_trial(params, user_attrs={NUMBER: row.trial, "values": dict(row.values)})
    trial = study.ask({key: distribution(space[key]) for key in row.values})
    assert trial.user_attrs[NUMBER] == row.trial, "one process alone asks"
    return trial


def _end(study: optuna.Study, trial: optuna.Trial, row: Row, over: bool) -> None:
    from optuna.trial import TrialState

    trial.set_user_attr(STATE, row.state)
    if row.reason:
        trial.set_user_attr("reason", row.reason)
    if row.state == "done":
        study.tell(trial, row.value)
    elif row.state == "failed":
        study.tell(trial, state=TrialState.FAIL)
    elif row.state in ("refused", "same") or (row.state == "paused" and over):
        study.tell(trial, state=TrialState.PRUNED)


# ------------------------------------------------------------------------------------------------------------- MLflow


def to_mlflow(sweep: Sweep) -> None:
    """Make the sweep's parent run, and hang the trials' runs below it with their tags.

    What MLflow has missed of runs that are over is brought there first: nothing else would come back to them.

    Raises:
        ConnectionError: MLflow is away.
    """
    if not sweep.base.tracking.enabled:
        return
    from flows.mlflow_family import FamilyMember, tell_family
    from flows.tracking import deliver_pending

    root = sweep.base.storage.folder
    uri = sweep.base.tracking.uri or f"sqlite:///{root / 'mlflow.db'}"
    found = rows(sweep)
    over = sweep.told_state != "running"
    for run in (run for row in found if over or row.state in ("done", "failed") for run in _runs(sweep, row).values()):
        if run.owner() is None and (problem := deliver_pending(run).problem):
            raise ConnectionError(problem)
    members = [member for row in found for member in _members(sweep, row, FamilyMember)]
    best = next((row for row in found if row.value is not None), None)
    tags = {
        "grpoflow.sweep": sweep.sweep_id,
        "grpoflow.folder": str(sweep.folder),
        "grpoflow.objective": sweep.spec.objective.metric,
        "grpoflow.state": sweep.told_state,
        "grpoflow.best_trial": "" if best is None else str(best.trial),
    }
    params = {key: repr(parameter.model_dump(exclude_defaults=True)) for key, parameter in sweep.spec.space.items()}
    states = {"finished": "FINISHED", "running": "RUNNING", "stopped": "KILLED"}
    tell_family(
        uri,
        experiment=sweep.project,
        artifacts=None if sweep.base.tracking.uri else (root / "mlflow-artifacts").as_uri(),
        name=sweep.spec.name,
        own_tag=("grpoflow.sweep", sweep.sweep_id),
        tags=tags,
        params=params,
        metrics={} if best is None or best.value is None else {"sweep/best": best.value},
        state=states[sweep.told_state],
        members=members,
    )


def _members(sweep: Sweep, row: Row, member: Any) -> list[Any]:
    """The runs of a trial that MLflow has, with what the sweep says of them."""
    found = []
    for seed, run in _runs(sweep, row).items():
        lines = read_json_lines(run.root / "tracking.jsonl")
        ids = [line["mlflow_run"] for line in lines if "mlflow_run" in line]
        tags = {
            "grpoflow.sweep": sweep.sweep_id,
            "grpoflow.trial": str(row.trial),
            "grpoflow.seed": str(seed),
            "grpoflow.trial_state": row.state,
            "grpoflow.pruned_at": str(row.step) if row.state == "paused" else "",
        }
        found += [member(ids[-1], tags)] if ids else []
    return found


def _runs(sweep: Sweep, row: Row) -> dict[int, Run]:
    """The runs of a trial that have begun, by seed."""
    seeds = sweep.spec.seeds if row.state not in ("refused", "same") else ()
    return {seed: run for seed in seeds if (run := sweep.run(row.trial, seed)) is not None}
