"""A backup, as docs/operations.md has it: restored on another place and database, a run is whole and goes on."""

import json
import shutil
import subprocess

import pytest
from postgres import postgres
from tiny_runs import digest, run
from typer.testing import CliRunner

from flows.cli import app
from storage import open_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EACH_METRIC = "select key, step, count(*) from metrics group by key, step"
TWICE = f"{EACH_METRIC} having count(*) > 1"


def grpoflow(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.fixture
def database(monkeypatch):
    with postgres() as server:
        monkeypatch.setenv("PGPASSWORD", server.password)
        yield server


def test_a_run_and_mlflow_s_database_come_back_from_a_backup_and_go_on(database, tiny_run, tmp_path):
    lab = tmp_path / "lab"
    tracked = ("tracking.enabled=true", "tracking.report=false", f"tracking.uri={database.create('mlflow')}")
    before, _ = run(tiny_run(*tracked, "trainer.save_freq=1"))
    known = [digest(before, step) for step in (1, 2)]
    told = database.ask("mlflow", EACH_METRIC)

    dump = database.dump("mlflow")
    files = ("run", "model", "train.jsonl", "val.jsonl", "reward.py")
    subprocess.run(["tar", "-C", tmp_path, "-czf", tmp_path / "backup.tgz", *files], check=True)
    database.drop("mlflow")
    for name in files:
        shutil.rmtree(tmp_path / name) if (tmp_path / name).is_dir() else (tmp_path / name).unlink()

    lab.mkdir()
    subprocess.run(["tar", "-C", lab, "-xzf", tmp_path / "backup.tgz"], check=True)
    restored = database.restore(dump, "restored")
    assert database.ask("restored", EACH_METRIC) == told
    report = json.loads(grpoflow("verify", lab / "run", "--json"))
    assert report["failed"] == []
    moved = (
        f"data.train_files=[{lab / 'train.jsonl'}]",
        f"data.val_files=[{lab / 'val.jsonl'}]",
        f"actor_rollout_ref.model.path={lab / 'model'}",
        f"custom_reward_function.path={lab / 'reward.py'}",
    )
    grpoflow("resume", lab / "run", *moved, f"tracking.uri={restored}", "trainer.total_training_steps=3")
    after = open_run(lab / "run")
    assert after.finished_steps() == [1, 2, 3] and [digest(after, step) for step in (1, 2)] == known
    assert database.ask("restored", TWICE) == []
    assert database.ask("restored", "select count(*), max(status) from runs") == ["1|FINISHED"]
    steps = database.ask("restored", "select distinct step from metrics where key = 'critic/score/mean' order by step")
    assert steps == ["1", "2", "3"]
    assert set(told) <= set(database.ask("restored", EACH_METRIC))

    # Without the database's backup: the run's folder has all that MLflow was told, and tells it again.
    anew = database.create("anew")
    grpoflow("deliver", lab / "run", "--uri", anew)
    assert database.ask("anew", TWICE) == []
    assert sorted(database.ask("anew", EACH_METRIC)) == sorted(database.ask("restored", EACH_METRIC))
