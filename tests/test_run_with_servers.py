"""A whole run with its own Prefect server and its own MLflow store: what a user sees in both."""

import io
import json
import time
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from flows.prefect_server import prefect_api
from flows.train import run_training
from storage import open_run

pytestmark = pytest.mark.slow


def ask(url, path, body):
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_prefect_shows_run_steps_and_stages_and_mlflow_has_every_metric_once(tiny_run):
    cfg = tiny_run(
        "orchestration.enabled=true", "tracking.enabled=true", "trainer.val_before_train=true", "trainer.test_freq=2"
    )
    root = Path(cfg.storage.root)
    home_before = sorted(Path.home().glob(".prefect/*"))
    with prefect_api(cfg.orchestration, root, print) as api:
        outcome = run_training(cfg, Console(file=io.StringIO()), api)
        the_run = open_run(outcome.folder)
        tagged = {"flow_runs": {"tags": {"all_": [f"run:{the_run.run_id}"]}}}
        of_step_1 = {"flow_runs": {"name": {"any_": ["step-000001"]}}}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # the server writes task runs down a moment after they are told
            flow_runs = ask(api.url, "/flow_runs/filter", tagged)
            task_runs = ask(api.url, "/task_runs/filter", of_step_1)
            if len(task_runs) == 7 and all(run["state_type"] == "COMPLETED" for run in (*flow_runs, *task_runs)):
                break
            time.sleep(0.5)
        artifacts = ask(api.url, "/artifacts/filter", {})
    states = {run["name"]: run["state_type"] for run in flow_runs}
    names = [the_run.run_id, "validate-000000", "step-000001", "step-000002"]
    assert states == dict.fromkeys(names, "COMPLETED")
    stages = {run["name"].rsplit("-", 1)[0]: run["state_type"] for run in task_runs}
    done = ["choose_prompts", "generate", "old_log_prob", "ref_log_prob", "reward", "advantage", "update"]
    assert stages == dict.fromkeys(done, "COMPLETED")
    assert {artifact["key"] for artifact in artifacts} == {"shapes", "run"}
    assert sorted(Path.home().glob(".prefect/*")) == home_before

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root.absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(cfg.trainer.project_name)
    [tracked] = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert tracked.info.end_time is not None
    assert tracked.data.params["plan.sequences_per_step"] == "32"
    assert tracked.data.params["actor_rollout_ref.rollout.n"] == "4"
    for name in ("critic/score/mean", "actor/pg_loss", "shape/rollouts/rows", "timing_s/gen"):
        history = client.get_metric_history(tracked.info.run_id, name)
        assert [point.step for point in history] == [1, 2], name
        wanted = [the_run.step(step).record["metrics"][name] for step in (1, 2)]
        assert [point.value for point in history] == pytest.approx(wanted), name
    validated = client.get_metric_history(tracked.info.run_id, "val-core/toy/reward/mean_at_1")
    assert [point.step for point in validated] == [0, 2]
    kept = {item.path for item in client.list_artifacts(tracked.info.run_id)}
    assert {"config.yaml", "plan.json"} <= kept
    assert [item.dataset.name for item in tracked.inputs.dataset_inputs] == ["train.jsonl", "val.jsonl"]
