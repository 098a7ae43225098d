"""Whole runs that are killed, told to stop, or lose a server: what the next command, Prefect and MLflow show.

The reward function of these runs waits while a file says so: a run can be held in the reward stage of any step.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from servers import flow_runs, free_port, mlflow_server, slow_door, states, wait_until
from tiny_runs import run

from flows import show
from flows.prefect_server import PrefectAPI, _launch, _stop, prefect_api
from flows.tracking import deliver_pending
from storage import Run, StorageError, open_run
from storage.durable import read_json_lines
from tasks.config import OrchestrationConfig, RunConfig
from tasks.stage import StageError

pytestmark = pytest.mark.slow

REWARD = """
import pathlib, time
here = pathlib.Path(__file__).parent
def held():
    step = max((int(path.name) for path in (here / "run" / "steps").iterdir()), default=0)
    try:
        return int((here / "hold").read_text()) == step
    except (OSError, ValueError):
        return False
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    while held():
        (here / "held").touch()
        time.sleep(0.02)
    return float(ord((solution_str or "a")[0]) % 2)
"""

MAIN = "import sys; from flows.cli import main; sys.argv[0] = 'grpoflow'; main()"


class HeldRun:
    """A run in a process of its own, made by the command line, that can be held in the reward stage of a step."""

    def __init__(self, folder: Path) -> None:
        self.here = folder
        self.root = folder / "run"
        self.process: subprocess.Popen[str] | None = None

    def start(self, cfg: RunConfig | None = None, *words: str, **environment: str) -> None:
        """Begin by `train`, or without a configuration go on by `resume`."""
        (self.here / "reward.py").write_text(REWARD)
        if cfg is not None:
            (self.here / "cfg.yaml").write_text(cfg.model_dump_json())
        command = ["resume", str(self.root)] if cfg is None else ["train", str(self.here / "cfg.yaml")]
        self.log = (self.here / "out.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *command, *words],
            env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "400", **environment},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=self.here,
        )

    @property
    def run(self) -> Run:
        return open_run(self.root)

    @property
    def output(self) -> str:
        return (self.here / "out.txt").read_text()

    def hold(self, step: int) -> None:
        (self.here / "held").unlink(missing_ok=True)
        (self.here / "hold").write_text(str(step))

    def let_go(self) -> None:
        (self.here / "hold").unlink()

    def await_held(self, committed: str = "ref_log_probs") -> None:
        """Wait until it is held, and until the stages beside the reward stage have committed."""
        self._await(lambda: (self.here / "held").exists() and self.run.steps() and self._has(committed))

    def await_output(self, words: str) -> None:
        self._await(lambda: words in self.output)

    def end(self, timeout_s: float = 120) -> int:
        """Wait for the end and return the exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> float:
        """Send a signal and return the time."""
        assert self.process is not None
        self.process.send_signal(number)
        return time.monotonic()

    def kill(self) -> float:
        """End it without a word and return the time."""
        at = time.time()
        self.signal(signal.SIGKILL)
        self.end()
        return at

    def _has(self, artifact: str) -> bool:
        return bool(self.run.step(self.run.steps()[-1]).attempts(artifact))

    def _await(self, true: Callable[[], Any]) -> None:
        def there() -> bool:
            assert self.process is not None and self.process.poll() is None, self.output
            return bool(true())

        wait_until(there, 180)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldRun]:
    made = HeldRun(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectAPI]:
    """One Prefect server for the whole module, given to the runs by its address."""
    with prefect_api(OrchestrationConfig(), tmp_path_factory.mktemp("prefect")) as api:
        assert api is not None and api.wait_ready() is None
        yield api


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def tracked_run(cfg: RunConfig) -> Any:
    """The one run that MLflow has of this configuration's project."""
    client = client_of(cfg.tracking.uri or f"sqlite:///{Path(cfg.storage.root).absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(cfg.trainer.project_name)
    [found] = client.search_runs([experiment.experiment_id])
    return found


def assert_every_step_is_there_once(cfg: RunConfig, steps: int, folder: Path) -> None:
    """MLflow has one value per metric and step: the recorded one, with the time at which the step finished."""
    the_run = open_run(folder)
    client = client_of(cfg.tracking.uri or f"sqlite:///{Path(cfg.storage.root).absolute() / 'mlflow.db'}")
    for name in ("critic/score/mean", "actor/pg_loss", "timing_s/step"):
        points = client.get_metric_history(tracked_run(cfg).info.run_id, name)
        records = {index: the_run.step(index).record for index in range(1, steps + 1)}
        assert sorted((point.step, point.value, point.timestamp) for point in points) == [
            (index, record["metrics"][name], round(1000 * datetime.fromisoformat(record["finished_at"]).timestamp()))
            for index, record in records.items()
        ]


def status_of(folder: Path) -> dict[str, Any]:
    output = io.StringIO()
    show.status(folder, True, Console(file=output))
    return json.loads(output.getvalue())


LONG = ("trainer.total_epochs=9", "trainer.total_training_steps=9", "reward.timeout_s=900")


# ---------------------------------------------------------------------------------------------------- ends without word


def test_b48_b66_b68_a_killed_run_is_found_closed_everywhere_and_goes_on_at_its_reward_stage(
    tiny_run, held: HeldRun, api: PrefectAPI, tmp_path: Path
) -> None:
    servers = ("tracking.enabled=true", "orchestration.enabled=true", f"orchestration.api_url={api.url}")
    cfg = tiny_run(*LONG, *servers, "trainer.save_freq=5")
    held.hold(2)
    held.start(cfg)
    held.await_held()
    wait_until(lambda: any(line.get("step") == 1 for line in read_json_lines(held.root / "tracking.jsonl")), 180)
    generated = {path: path.read_bytes() for path in held.root.glob("steps/000002/rollouts/*/*")}
    assert states(api, held.run.run_id)[held.run.run_id] == "Running"
    killed_at = held.kill()

    # The lock's owner is dead: the next command knows at once.
    found = status_of(held.root)
    assert time.time() - killed_at < 5.0
    assert (found["state"], found["last_step"], found["owner"]) == ("crashed", 1, None)
    assert found["open_step"]["step"] == 2
    assert found["open_step"]["committed"] == ["prompts", "rollouts", "old_log_probs", "ref_log_probs"]

    # `deliver` closes it in MLflow, as of its last sign of life.
    deliver_pending(held.run)
    info = tracked_run(cfg).info
    assert info.status == "KILLED"
    assert 1000 * (killed_at - 60) < info.end_time <= 1000 * killed_at

    # Another run of the same project is not held up by it, and closes its flow runs in Prefect.
    dead = held.run.run_id
    other = tiny_run(*servers[1:], "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'other'}")
    held.let_go()
    with prefect_api(other.orchestration, tmp_path) as given:
        run(other, api=given)
    assert states(api, dead) == {dead: "Crashed", "step-000001": "Completed", "step-000002": "Crashed"}

    # It goes on inside the step; the responses are not generated again.
    held.hold(8)
    held.start()
    held.await_held()
    assert "in step 2 after prompts, rollouts, old_log_probs, ref_log_probs: it counts as killed" in held.output
    assert {path: path.read_bytes() for path in held.root.glob("steps/000002/rollouts/*/*")} == generated
    wait_until(lambda: tracked_run(cfg).info.status == "RUNNING")

    # Killed again, after step 7 with a checkpoint at 5. Now `resume` itself closes the run in MLflow and goes on.
    killed_at = held.kill()
    held.let_go()
    held.start()
    assert held.end() == 0, held.output
    assert "updates 6 to 7 made again" in held.output or "replayed 6" in held.output
    [ended] = [line["ended_ms"] for line in read_json_lines(held.root / "tracking.jsonl") if "ended_ms" in line]
    assert 1000 * (killed_at - 60) < ended <= 1000 * killed_at
    assert tracked_run(cfg).info.status == "FINISHED"
    assert "grpoflow.last_killed_at" in tracked_run(cfg).data.tags
    assert_every_step_is_there_once(cfg, 9, held.root)
    assert [held.run.step(index).record is None for index in range(1, 10)] == [False] * 9
    assert {held.run.step(7).manifest(stage).attempt for stage in held.run.step(7).stages()} == {1}
    shown = states(api, dead)
    assert shown.pop("step-000008") in ("Completed", "Crashed")
    assert set(shown.values()) <= {"Completed", "Crashed"} and shown["step-000009"] == "Completed"
    assert not list(held.root.rglob("*.aside"))


def test_b68_an_exception_ends_as_failed_with_an_end_time(tiny_run, tmp_path: Path) -> None:
    cfg = tiny_run("tracking.enabled=true")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): pass\n"
    )
    with pytest.raises((StageError, StorageError, ValueError, RuntimeError)):
        run(cfg)
    info = tracked_run(cfg).info
    assert info.status == "FAILED" and info.end_time >= info.start_time


# ---------------------------------------------------------------------------------------------------------- polite ends


def test_b68_sigterm_lets_the_stage_finish_and_leaves_terminal_states(tiny_run, held: HeldRun, api: PrefectAPI) -> None:
    servers = ("tracking.enabled=true", "orchestration.enabled=true", f"orchestration.api_url={api.url}")
    cfg = tiny_run(*LONG, *servers, "trainer.stop_grace_s=60")
    held.hold(2)
    held.start(cfg)
    held.await_held()
    held.signal(signal.SIGTERM)
    held.await_output("SIGTERM: the stage in flight may finish within 60 s")
    held.let_go()
    assert held.end() == 143, held.output
    assert "killed; go on with: grpoflow resume run" in held.output
    assert "Traceback" not in held.output
    assert held.run.state == "killed"
    committed = ["prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards"]
    assert status_of(held.root)["open_step"]["committed"] == committed
    assert not list(held.root.rglob("*.aside"))
    info = tracked_run(cfg).info
    assert info.status == "KILLED" and info.end_time >= info.start_time
    assert set(states(api, held.run.run_id).values()) == {"Completed", "Crashed"}
    assert {run.state.type.value for run in flow_runs(api, held.run.run_id).values()} == {"COMPLETED", "CRASHED"}
    held.start()
    assert held.end() == 0, held.output
    assert {held.run.step(2).manifest(stage).attempt for stage in committed} == {1}
    assert tracked_run(cfg).info.status == "FINISHED"


def test_a_stage_that_outlasts_the_grace_time_is_abandoned(tiny_run, held: HeldRun) -> None:
    held.hold(1)
    held.start(tiny_run(*LONG, "trainer.stop_grace_s=1"))
    held.await_held()
    asked = held.signal(signal.SIGTERM)
    assert held.end() == 143, held.output
    assert 0.9 < time.monotonic() - asked < 15
    assert held.run.state == "killed" and not held.run.step(1).attempts("rewards")
    assert not list(held.root.rglob("*.aside"))


def test_a_second_ctrl_c_ends_the_run_at_once(tiny_run, held: HeldRun, api: PrefectAPI) -> None:
    held.hold(1)
    held.start(
        tiny_run(*LONG, "trainer.stop_grace_s=300", "orchestration.enabled=true", f"orchestration.api_url={api.url}")
    )
    held.await_held()
    held.signal(signal.SIGINT)
    held.await_output("Ctrl-C: the stage in flight may finish within 300 s")
    asked = held.signal(signal.SIGINT)
    assert held.end() == 130, held.output
    assert time.monotonic() - asked < 15
    assert "go on with: grpoflow resume run" in held.output
    assert held.run.state == "killed" and not held.run.step(1).attempts("rewards")
    assert set(states(api, held.run.run_id).values()) == {"Crashed"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_is_waited_for_ends_the_run_at_once(tiny_run, held: HeldRun, number: int) -> None:
    dead = f"http://127.0.0.1:{free_port()}/api"
    held.start(tiny_run(*LONG, "orchestration.enabled=true", f"orchestration.api_url={dead}"))
    held.await_output("Waiting for the Prefect server at")
    held.signal(number)
    assert held.end() == 128 + number, held.output
    assert "goes on without it" not in held.output and "step 1/" not in held.output
    assert held.run.state == "killed" and not list(held.root.rglob("*.aside"))


def test_a_signal_while_the_model_is_loaded_ends_the_run_and_leaves_no_folder(tiny_run, held: HeldRun) -> None:
    held.start(tiny_run(*LONG))
    held.await_output("8 prompts x 4 = 32 sequences")
    asked = held.signal(signal.SIGTERM)
    assert held.end() == 143, held.output
    assert time.monotonic() - asked < 15
    assert "run folder" in held.output or not held.root.exists()


# -------------------------------------------------------------------------------------------------------------- outages


@contextlib.contextmanager
def prefect_server(home: Path, port: int) -> Iterator[None]:
    """A real Prefect server on this port; its database stays in the folder."""
    home.mkdir(exist_ok=True)
    with (home / "users.lock").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        _launch(home, port)
        try:
            yield
        finally:
            _stop(home)


def test_b56_the_prefect_server_is_away_at_the_start_and_for_90_s_in_step_3(tiny_run, held: HeldRun) -> None:
    port = free_port()
    api = PrefectAPI(f"http://127.0.0.1:{port}/api", 180.0)
    home = held.here / "server"
    held.hold(2)
    held.start(tiny_run(*LONG, "orchestration.enabled=true", f"orchestration.api_url={api.url}"))
    held.await_held()
    assert "no Prefect server answered" in held.output and "within 15 s" in held.output
    with prefect_server(home, port):
        assert api.wait_ready() is None
        held.await_output("The Prefect API answers again after")
        held.hold(3)
        held.await_held()
    stopped = time.monotonic()
    held.hold(6)
    held.await_held()
    assert held.run.step(3).record is not None and time.monotonic() - stopped < 60
    time.sleep(max(0.0, 90 - (time.monotonic() - stopped)))
    with prefect_server(home, port):
        assert api.wait_ready() is None
        wait_until(lambda: held.output.count("The Prefect API answers again") == 2, 60)
        held.let_go()
        assert held.end() == 0, held.output
        names = [held.run.run_id, *(f"step-{step:06d}" for step in range(1, 10))]
        assert states(api, held.run.run_id) == dict.fromkeys(names, "Completed")
    assert held.output.count("does not answer") == 2


def test_b58_a_first_start_on_busy_cores_says_that_it_waits_and_leaves_the_users_prefect_alone(
    tiny_run, held: HeldRun
) -> None:
    home = held.here / "home"
    (home / "prefect").mkdir(parents=True)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    without = {name: "" for name in os.environ if name.startswith("PREFECT_")}
    try:
        held.start(
            tiny_run("trainer.total_training_steps=1", "orchestration.enabled=true"),
            **{**without, "HOME": str(home), "PREFECT_HOME": str(home / "prefect")},
        )
        assert held.end(400) == 0, held.output
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "Starting a Prefect server for these runs; the first start makes its database" in held.output
    assert "goes on without it" not in held.output and "does not answer" not in held.output
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_b62_mlflow_is_away_from_step_2_to_4(tiny_run, held: HeldRun) -> None:
    port = free_port()
    cfg = tiny_run(
        *LONG, "trainer.total_training_steps=5", "tracking.enabled=true", f"tracking.uri=http://127.0.0.1:{port}"
    )
    held.hold(2)
    with mlflow_server(held.here / "server", port):
        held.start(cfg)
        held.await_held()
        sent = held.root / "tracking.jsonl"
        wait_until(lambda: any(line.get("step") == 1 for line in read_json_lines(sent)))
    held.hold(4)
    held.await_held()
    held.await_output("does not answer")
    wait_until(lambda: [index for index in (1, 2, 3) if held.run.step(index).record] == [1, 2, 3])
    with mlflow_server(held.here / "server", port):
        held.let_go()
        assert held.end() == 0, held.output
        assert_every_step_is_there_once(cfg, 5, held.root)
        assert tracked_run(cfg).info.status == "FINISHED"
    assert held.output.count("does not answer") == 1
    assert "has not got" not in held.output


def test_b62_mlflow_is_not_there_at_all_or_slow(tiny_run, tmp_path: Path) -> None:
    port = free_port()
    with mlflow_server(tmp_path / "server", port), slow_door(port, 30.0) as slow:
        seconds = {}
        for name, uri in (("dead", f"http://127.0.0.1:{free_port()}"), ("slow", f"http://127.0.0.1:{slow}")):
            cfg = tiny_run(
                *("tracking.enabled=true", f"tracking.uri={uri}", "tracking.flush_timeout_s=1"),
                *(f"trainer.default_local_dir={tmp_path / name}", f"trainer.project_name={name}"),
            )
            started = time.monotonic()
            the_run, output = run(cfg)
            seconds[name] = time.monotonic() - started
            assert the_run.state == "finished"
            assert output.count("does not answer") == (name == "dead")
            assert "has not got 2 steps" in output and "Nothing is lost" in output
            delivered = deliver_pending(the_run, f"http://127.0.0.1:{port}")
            assert (delivered.sent, delivered.waiting, delivered.problem) == (2, (), None)
            there = cfg.model_copy(update={"tracking": cfg.tracking.model_copy(update={"uri": delivered.uri})})
            assert_every_step_is_there_once(there, 2, the_run.root)
    print(seconds)
    assert max(seconds.values()) < 60


def test_b64_long_and_many_parameters_all_arrive(tiny_run, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    many = {f"key_{number}": number for number in range(300)} | {"rubric": "r" * 7000}
    cfg = tiny_run("tracking.enabled=true", "trainer.total_training_steps=1")
    (tmp_path / "reward.py").write_text(REWARD)
    functions = cfg.custom_reward_function.model_copy(update={"reward_kwargs": many})
    cfg = cfg.model_copy(update={"custom_reward_function": functions})
    the_run, output = run(cfg)
    assert "refused" not in output
    tracked = tracked_run(cfg)
    params = tracked.data.params
    name = "custom_reward_function.reward_kwargs"
    assert [params[f"{name}.key_{number}"] for number in range(300)] == [str(number) for number in range(300)]
    assert len(params[f"{name}.rubric"]) == 500
    assert "7000 characters, SHA-256" in params[f"{name}.rubric"]
    client = client_of(f"sqlite:///{Path(cfg.storage.root).absolute() / 'mlflow.db'}")
    kept = Path(client.download_artifacts(tracked.info.run_id, "config.yaml", str(tmp_path)))
    assert "r" * 7000 in kept.read_text()
    assert the_run.state == "finished"
