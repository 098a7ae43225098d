"""A sweep whose Optuna study, MLflow store and Prefect server are in one real PostgreSQL, which dies in the middle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from postgres import postgres
from servers import wait_until

from flows.sweep.book import open_sweep
from flows.sweep.mirror import study_of
from flows.sweep.table import rows
from storage import StorageError

ROOT = Path(__file__).parent.parent
LR = "actor_rollout_ref.actor.optim.lr"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def database(monkeypatch):
    with postgres() as server:
        monkeypatch.setenv("PGPASSWORD", server.password)
        yield server


def run_of(path: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = path.with_suffix(".log").open("a")
    command = [sys.executable, "-m", "flows.cli", "sweep", str(path)]
    return subprocess.Popen(command, cwd=path.parent, env=environment, stdout=log, stderr=log)


def results_of(path: Path) -> int:
    try:
        sweep = open_sweep(path.parent / "runs" / "grpoflow" / f"{path.stem}.sweep")
    except StorageError:
        return 0
    return sum(event["event"] == "result" for event in sweep.events())


def test_optuna_and_mlflow_in_postgresql_show_the_whole_sweep_though_it_was_away(database, tiny_run, tmp_path):
    tiny_run()
    path = tmp_path / "pg.yaml"
    spec = {
        "name": "pg",
        "base": [str(tmp_path / "base.yaml")],
        "overrides": [
            "trainer.total_training_steps=2",
            "tracking.enabled=true",
            f"tracking.uri={database.create('mlflow')}",
        ],
        "space": {LR: {"choice": [1e-3, 3e-3, 1e-2]}},
        "sampler": {"kind": "tpe", "startup_trials": 2},
        "budget": {"trials": 3},
        "objective": {"metric": "critic/score/mean"},
        "optuna_storage": database.create("optuna"),
    }
    path.write_text(yaml.safe_dump(spec))
    process = run_of(path)
    wait_until(lambda: results_of(path) >= 1, 300)
    database.kill()
    wait_until(lambda: results_of(path) >= 2 or process.poll() is not None, 300)
    database.start()
    assert process.wait(600) == 0, path.with_suffix(".log").read_text()
    said = path.with_suffix(".log").read_text()
    assert database.password not in said

    sweep = open_sweep(tmp_path / "runs" / "grpoflow" / "pg.sweep")
    found = {row.trial: row for row in rows(sweep)}
    assert {row.state for row in found.values()} == {"done"}
    told = {trial.user_attrs["trial"]: trial for trial in study_of(sweep).trials}
    assert {number: trial.value for number, trial in told.items()} == {
        number: pytest.approx(row.value) for number, row in found.items()
    }

    # MLflow's tables, asked directly: one parent, three children, every step's score once.
    parents = database.ask("mlflow", "select count(*) from tags where key='grpoflow.kind' and value='sweep'")
    children = database.ask("mlflow", "select count(*) from tags where key='mlflow.parentRunId'")
    scores = database.ask(
        "mlflow", "select run_uuid, step, count(*) from metrics where key='critic/score/mean' group by 1, 2"
    )
    assert (parents, children) == (["1"], ["3"])
    assert len(scores) == 6 and all(line.endswith("|1") for line in scores)
    kept = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert not [file for file in kept if database.password.encode() in file.read_bytes()]
