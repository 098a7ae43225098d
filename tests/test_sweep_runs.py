"""Sweeps of real runs: their table, kills, refusals, slots, what MLflow and Optuna show."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from servers import wait_until

from flows.slots import SLOTS, acquire
from flows.sweep.book import open_sweep
from flows.sweep.mirror import study_of, to_mlflow, to_optuna
from flows.sweep.run import environment_of
from flows.sweep.spec import SweepSpec
from flows.sweep.table import as_json, rows
from storage import StorageError, open_run
from storage.reuse import REUSED

ROOT = Path(__file__).parent.parent
LR = "actor_rollout_ref.actor.optim.lr"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


@pytest.fixture
def sweep_file(tmp_path, tiny_run):
    """Write a sweep's file over the small run: `sweep_file(space={...}, overrides=[...])`."""
    tiny_run()

    def write(name="s", overrides=(), **more) -> Path:
        spec = {
            "name": name,
            "base": [str(tmp_path / "base.yaml")],
            "overrides": ["trainer.total_training_steps=3", "trainer.save_freq=1", *overrides],
            "space": {LR: {"choice": [1e-3, 1e-2]}},
            "sampler": {"kind": "grid"},
            "objective": {"metric": "critic/score/mean"},
            **more,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    return write


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli", "sweep", *words]


def start(path: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = path.with_suffix(".log").open("a")
    return subprocess.Popen(command(str(path)), cwd=path.parent, env=environment, stdout=log, stderr=log)


def finish(path: Path) -> None:
    assert start(path).wait(900) == 0, path.with_suffix(".log").read_text()


def sweep_of(path: Path):
    return open_sweep(path.parent / "runs" / "grpoflow" / f"{path.stem}.sweep")


def results(path: Path) -> list:
    """What a table says that does not depend on time or kills."""
    names = ("trial", "values", "state", "value", "spread", "runs", "step", "trained_steps", "reason")
    return [{name: row[name] for name in names} for row in as_json(sweep_of(path))["trials"]]


@pytest.mark.slow
def test_a_sweep_trains_prunes_refuses_and_tells(sweep_file, tmp_path):
    """Three learning rates, one mini-batch that the plan refuses, two seeds; the worst are paused at step 1."""
    path = sweep_file(
        overrides=["tracking.enabled=true"],
        space={LR: {"choice": [1e-4, 1e-3, 1e-2]}, MINI: {"choice": [4, 3]}},
        seeds=[0, 1],
        pruning={"kind": "asha", "min_steps": 1, "reduction": 3},
        slots=2,
    )
    finish(path)
    sweep, found = sweep_of(path), rows(sweep_of(path))
    assert sweep.state == "finished"
    states = {row.trial: row.state for row in found}
    assert sorted(states.values()) == ["done", "paused", "paused", "refused", "refused", "refused"]
    refused = next(row for row in found if row.state == "refused")
    assert refused.values[MINI] == 3 and "ppo_mini_batch_size" in refused.reason
    best = found[0]
    assert best.state == "done" and best.step == 3 and best.runs == 2 and best.spread is not None
    by_seed = [open_run(sweep.run_folder(best.trial, seed)).step(3).record["metrics"] for seed in (0, 1)]
    assert best.value == pytest.approx(sum(metrics["critic/score/mean"] for metrics in by_seed) / 2)
    paused = next(row for row in found if row.state == "paused")
    assert sweep.run(paused.trial, 0).state == "paused" and sweep.finished_steps(paused.trial, 0) == 1
    # Same seed, policy and prompts: step 1's rollouts were sampled once for each seed.
    trained = [trial for trial in states if states[trial] != "refused"]
    shared = [sweep.run(trial, 0).step(1).manifest("rollouts") for trial in trained]
    assert sum(REUSED in manifest.notes for manifest in shared) == 2
    assert len({manifest.digest for manifest in shared}) == 1

    study = study_of(sweep)
    told = {trial.user_attrs["trial"]: trial for trial in study.trials}
    assert len(told) == 6 and told[best.trial].value == pytest.approx(best.value)
    assert {told[trial].state.name for trial in states if states[trial] == "paused"} == {"PRUNED"}
    to_optuna(sweep)
    assert len(study_of(sweep).trials) == 6

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    to_mlflow(sweep)
    experiment = client.get_experiment_by_name("grpoflow").experiment_id
    runs = client.search_runs([experiment], max_results=100)
    (parent,) = [run for run in runs if run.data.tags.get("grpoflow.kind") == "sweep"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert parent.info.status == "FINISHED" and len(children) == 6
    assert {run.data.tags["grpoflow.trial_state"] for run in children} == {"done", "paused"}
    pruned = [
        run.data.tags["grpoflow.pruned_at"] for run in children if run.data.tags["grpoflow.trial_state"] == "paused"
    ]
    assert pruned == ["1"] * 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sweep_that_is_killed_again_and_again_ends_with_the_same_table(sweep_file, tmp_path):
    """Four trials, two seeds, two slots. Killed with the command: a trial, the Prefect server, nothing else."""
    space = {LR: {"choice": [1e-3, 1e-2]}, "actor_rollout_ref.rollout.temperature": {"choice": [1.0, 0.7]}}
    about = {"space": space, "seeds": [0, 1], "slots": 2, "parallel_trials": 2}
    left_alone = sweep_file("alone", **about)
    killed = sweep_file("killed", overrides=["orchestration.enabled=true"], **about)
    finish(left_alone)
    chance = random.Random(0)
    for who in ("trial", "server", "command"):
        process = start(killed)
        before = len(started(killed))
        wait_until(lambda before=before: len(started(killed)) > before, 240)
        time.sleep(chance.uniform(2.0, 6.0))
        if who == "trial":
            os.kill(trials_of(process)[0].pid, signal.SIGKILL)
            wait_until(lambda: any(attempt.end == "died" for attempt in sweep_of(killed).attempts()), 60)
        if who == "server":
            home = tmp_path / "runs" / ".prefect"
            os.kill(json.loads((home / "server.json").read_text())["pid"], signal.SIGKILL)
            time.sleep(chance.uniform(2.0, 6.0))
            assert process.poll() is None, "a sweep goes on without its Prefect server"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        wait_until(lambda: not [one for one in psutil.process_iter(["cmdline"]) if is_trial_of(one, killed)], 60)
    finish(killed)
    assert results(killed) == results(left_alone)
    # The runs themselves, too: the same weights after the last step.
    for trial in range(4):
        for seed in (0, 1):
            pair = [sweep_of(path).run(trial, seed).step(3).table("updates") for path in (left_alone, killed)]
            assert pair[0]["weights_digest"].to_pylist() == pair[1]["weights_digest"].to_pylist()
    assert sum(row.resumed for row in rows(sweep_of(killed))) >= 2
    assert not list((tmp_path / "runs").rglob("*.aside"))


@pytest.mark.slow
def test_b43_a_trial_that_dies_with_its_sweep_is_resumed_once_and_no_trial_runs_for_ever(sweep_file, tmp_path):
    path = sweep_file(
        overrides=["tracking.enabled=true", "trainer.total_training_steps=2"],
        space={LR: {"choice": [1e-4, 1e-3, 3e-3, 1e-2]}},
    )
    process = start(path)
    wait_until(lambda: len(started(path)) == 2, 240)
    wait_until(lambda: (run := sweep_of(path).run(1, 0)) is not None and run.owner() is not None, 60)
    for victim in (process.pid, trials_of(process)[0].pid):
        os.kill(victim, signal.SIGKILL)
    process.wait(60)
    assert {row.trial: row.state for row in rows(sweep_of(path))} == {0: "done", 1: "waiting"}
    assert sweep_of(path).state == "crashed"
    finish(path)
    found = {row.trial: row for row in rows(sweep_of(path))}
    assert [found[trial].state for trial in range(4)] == ["done"] * 4
    assert [found[trial].resumed for trial in range(4)] == [0, 1, 0, 0]
    assert [attempt.end for attempt in sweep_of(path).attempts()].count("reached") == 4
    assert {trial.state.name for trial in study_of(sweep_of(path)).trials} == {"COMPLETE"}

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("grpoflow").experiment_id])
    assert len(runs) == 5 and {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.slow
def test_b45_a_configuration_started_twice_at_once_and_three_trials_beside_it_share_no_file(sweep_file, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "flows.cli", "train", str(tmp_path / "base.yaml"), "trainer.total_training_steps=1"]
    path = sweep_file(overrides=["trainer.total_training_steps=1"], space={LR: {"choice": [1e-4, 1e-3, 1e-2]}}, slots=3)
    pair = [subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    finish(path)
    told = [process.communicate(timeout=300)[1] for process in pair]
    codes = [process.returncode for process in pair]
    # One name is one run: the second of the pair is refused and says by whom, or found it finished.
    assert sorted(codes) in ([0, 0], [0, 2])
    for code, words_of in zip(codes, told, strict=True):
        assert code == 0 or f"is being written by process {pair[codes.index(0)].pid}" in words_of
    runs = [path.parent for path in tmp_path.rglob("run.json")]
    assert len(runs) == 4 and len({open_run(run).run_id for run in runs}) == 4
    for run in runs:
        manifests = [json.loads(file.read_text()) for file in run.rglob("steps/*/*/*/manifest.json")]
        own = {open_run(run).run_id}
        assert manifests and {manifest["run_id"] for manifest in manifests} == own


def started(path: Path) -> list:
    try:
        return [event for event in sweep_of(path).events() if event["event"] == "started"]
    except StorageError:
        return []


def trials_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "flows.child" in child.cmdline()]


def is_trial_of(process: psutil.Process, path: Path) -> bool:
    words = process.info["cmdline"] or []
    return "flows.child" in words and any(f"/{path.stem}.sweep/" in word for word in words)


@pytest.mark.slow
def test_a_second_command_on_one_sweep_is_refused_and_a_changed_file_too(sweep_file):
    path = sweep_file(space={LR: {"choice": [1e-3]}})
    process = start(path)
    wait_until(lambda: started(path), 120)
    second = subprocess.run(command(str(path)), cwd=path.parent, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2 and f"process {process.pid}" in second.stderr
    assert process.wait(300) == 0
    changed = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**changed, "objective": {"metric": "response_length/mean"}}))
    third = subprocess.run(command(str(path)), cwd=path.parent, capture_output=True, text=True, timeout=120)
    assert third.returncode == 2 and "objective was" in third.stderr
    path.write_text(yaml.safe_dump({**changed, "budget": {"steps": 100}}))
    finish(path)
    assert [event["event"] for event in sweep_of(path).events()].count("opened") == 2


@pytest.mark.slow
def test_sigterm_stops_a_sweep_politely_and_a_missing_metric_is_told_with_the_nearest(sweep_file):
    path = sweep_file(space={LR: {"choice": [1e-3]}}, objective={"metric": "critic/score/meen"})
    process = start(path)
    wait_until(lambda: started(path), 120)
    process.terminate()
    assert process.wait(120) == 143
    assert sweep_of(path).state == "stopped"
    finish(path)
    (row,) = rows(sweep_of(path))
    assert row.state == "failed" and "Nearest: critic/score/mean" in row.reason


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_slots_and_no_file(sweep_file, tmp_path):
    paths = [sweep_file(name, space={LR: {"choice": [1e-3, 1e-2]}}) for name in ("one", "two")]
    with acquire(tmp_path / "runs" / SLOTS, 1, wait_s=0) as slot:
        processes = [start(path) for path in paths]
        wait_until(lambda: all((sweep_of_or_none(path) is not None) for path in paths), 120)
        time.sleep(3)
        assert slot is not None and not started(paths[0]) and not started(paths[1])
    assert [process.wait(600) for process in processes] == [0, 0]
    times = sorted((one.started_at, one.ended_at) for path in paths for one in sweep_of(path).attempts())
    assert len(times) == 4
    # An end is written down up to a second after the process has gone and its slot is taken.
    assert all((before[1] - after[0]).total_seconds() < 1 for before, after in itertools.pairwise(times))
    for path in paths:
        assert {row.state for row in rows(sweep_of(path))} == {"done"}
    names = [{run.name for run in (tmp_path / "runs" / "grpoflow").glob(f"{name}-*")} for name in ("one", "two")]
    assert not names[0] & names[1]


def sweep_of_or_none(path: Path):
    try:
        return sweep_of(path)
    except StorageError:
        return None


def test_a_slot_has_its_own_devices_and_its_share_of_the_cores(monkeypatch):
    spec = SweepSpec.model_validate(
        {"name": "s", "space": {}, "objective": {"metric": "m"}, "slots": 2, "devices_per_slot": 2}
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [environment_of(spec, slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment_of(spec, 1)["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="lower"):
        environment_of(spec, 1)
    assert int(environment_of(spec, 0)["OMP_NUM_THREADS"]) == max(1, psutil.cpu_count() // 2)


@pytest.mark.slow
def test_clone_writes_a_configuration_that_trains_and_the_best_policy_is_exported(sweep_file, tmp_path):
    path = sweep_file(space={LR: {"choice": [1e-3]}})
    finish(path)
    folder = str(sweep_of(path).folder)
    out = tmp_path / "again.yaml"
    words = ["clone", folder, "0", "again", "--set", "trainer.total_training_steps=1", "-o", str(out)]
    made = subprocess.run(command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert made.stdout.strip() == f"grpoflow train {out}"
    assert yaml.safe_load(out.read_text())["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-3
    words = ["export-best", folder, str(tmp_path / "best")]
    subprocess.run(command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert (tmp_path / "best" / "config.json").is_file() and (tmp_path / "best" / "grpoflow.yaml").is_file()
    shown = subprocess.run(command("table", folder), capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"{rows(sweep_of(path))[0].value:.4g}" in shown and "…" not in shown
    told = subprocess.run(command("table", folder, "--json"), capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(told.stdout)["trials"][0]["state"] == "done"
