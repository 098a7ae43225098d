"""Flow runs in Prefect, with a real server that the product itself starts."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pytest
from servers import all_task_runs, client_of, flow_runs, states, task_runs, wait_until

from flows.prefect_server import PrefectAPI, prefect_api
from flows.stages import RETRY_PAUSES_S, StageRunner, Stages, may_pass, stage_runner
from storage import Artifact, Ragged, RunWriter, StorageError, build_table, read_table
from tasks.config import OrchestrationConfig


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def api(root: Path) -> Iterator[PrefectAPI]:
    """One managed server for the whole module."""
    with prefect_api(OrchestrationConfig(), root) as api:
        assert api is not None
        assert api.wait_ready() is None
        yield api


class Door:
    """A port that passes connections on to the server, and can be shut, opened again and made slow."""

    def __init__(self, api: PrefectAPI) -> None:
        self._target = int(api.url.split(":")[2].split("/")[0])
        self._pairs: list[socket.socket] = []
        self.delay_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.api = PrefectAPI(f"http://127.0.0.1:{self._port}/api", wait_s=1.0)
        self._serve()

    def shut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._pairs:
            end.close()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._serve()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                outside, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(outside,), daemon=True).start()

    def _join(self, outside: socket.socket) -> None:
        inside = socket.create_connection(("127.0.0.1", self._target))
        self._pairs += [outside, inside]
        threading.Thread(target=self._pump, args=(inside, outside), daemon=True).start()
        self._pump(outside, inside)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()


def double(number: int, workers: object) -> int:
    return 2 * number


def train_step(number: int, workers: object, stages: Stages) -> int:
    """One step of two stages beside each other and one after them."""
    beside = stages.start(double, number, workers)
    doubled = stages.run(double, number, workers)
    return stages.run(double, doubled + beside(), workers)


class Heavy:
    """Stands for a model: whoever looks into it or copies it fails."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "__getstate__", "__reduce_ex__", "__iter__"):
            raise AssertionError("Prefect looked into an argument")
        return object.__getattribute__(self, name)


# ------------------------------------------------------------------------------------------------------ without Prefect


def test_without_a_server_stages_are_plain_calls(tmp_path: Path) -> None:
    with (
        prefect_api(OrchestrationConfig(enabled=False), tmp_path) as api,
        stage_runner(api, "plain") as runner,
    ):
        assert runner.call(train_step, 3, None, name="step-000003") == 24
    assert list(tmp_path.iterdir()) == []


def test_only_errors_that_may_pass_are_worth_another_try() -> None:
    assert may_pass(ConnectionResetError("the engine died"))
    assert may_pass(TimeoutError())
    assert may_pass(OSError(errno.EIO, "i/o"))
    assert not may_pass(OSError(errno.ENOSPC, "full"))
    assert not may_pass(PermissionError(errno.EACCES, "no"))
    assert not may_pass(StorageError("damaged"))
    assert not may_pass(ValueError("bad"))


def test_a_plain_stage_is_tried_again_where_that_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.stages.RETRY_PAUSES_S", (0.0, 0.0))
    tries: list[int] = []

    def flaky(limit: int) -> int:
        tries.append(1)
        if len(tries) < limit:
            raise OSError(errno.EIO, "not yet")
        return len(tries)

    assert StageRunner().call(lambda stages: stages.run(flaky, 3), name="x") == 3
    tries.clear()
    with pytest.raises(OSError, match="not yet"):
        StageRunner().call(lambda stages: stages.run(flaky, 9), name="x")
    assert len(tries) == 1 + len(RETRY_PAUSES_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_b26_a_full_disk_is_final_and_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.stages.RETRY_PAUSES_S", (0.0,) * 5)
    tries: list[int] = []

    def score(run: RunWriter, step: int) -> Artifact:
        tries.append(step)
        tokens = Ragged.from_rows([np.zeros(10_000_000)], np.float32)  # 40 MB
        columns = {"sample_id": ["a"], "group_id": ["a"], "ref_log_probs": tokens}
        table = build_table("ref_log_probs", columns)
        started = datetime.now(UTC)
        return run.commit(step, "ref_log_probs", table, key="k", policy_version=0, started_at=started)

    with small_disk(tmp_path / "disk", 50), RunWriter.create(tmp_path / "disk" / "run", "run") as run:
        StageRunner().call(lambda stages: stages.run(score, run, 1), name="step-1")
        before = sorted((run.root / "steps").rglob("*"))
        with pytest.raises(StorageError, match=r"no space left in .* Nothing half-written was kept"):
            StageRunner().call(lambda stages: stages.run(score, run, 2), name="step-2")
        assert tries == [1, 2]
        assert [path for path in sorted((run.root / "steps").rglob("*")) if path.is_file()] == [
            path for path in before if path.is_file()
        ]
        assert read_table(run.step(1).artifact("ref_log_probs")).num_rows == 1


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of this size in memory."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# ----------------------------------------------------------------------------------------------------------- flow runs


@pytest.mark.slow
def test_a_run_is_a_flow_run_of_step_flow_runs_whose_stages_are_tasks(api: PrefectAPI) -> None:
    def train(stages: Stages) -> list[int]:
        runner.publish_table("shape-table", [{"stage": "rollouts", "rows": 4}], "shapes of one step")
        return [
            runner.call(train_step, k, Heavy(), name=f"step-{k}", shown={"step": k}, next_name=f"step-{k + 1}")
            for k in (1, 2, 3)
        ]

    with stage_runner(api, "shape", tags=["arithmetic"]) as runner:
        assert runner.call(train, name="run-shape") == [8, 16, 24]

    completed = {"run-shape": "Completed", "step-1": "Completed", "step-2": "Completed", "step-3": "Completed"}
    assert states(api, "shape") == completed
    runs = flow_runs(api, "shape")
    assert runs["step-1"].parameters == {"step": 1}
    assert set(runs["step-2"].tags) == {"run:shape", "arithmetic"}
    # The run's page shows its steps: a task run stands for each, and ends as it does; of a step that never was, none.
    wait_until(lambda: len(all_task_runs(api, runs["run-shape"])) == 3)
    standing = {run.name: run for run in all_task_runs(api, runs["run-shape"])}
    assert {name: run.state.name for name, run in standing.items()} == {f"step-{k}": "Completed" for k in (1, 2, 3)}
    assert runs["step-2"].parent_task_run_id == standing["step-2"].id
    assert runs["step-1"].start_time <= runs["step-1"].end_time
    wait_until(lambda: len(task_runs(api, runs["step-3"])) == 1)
    with client_of(api) as client:
        table = next(artifact for artifact in client.read_artifacts() if artifact.key == "shape-table")
        assert json.loads(table.data) == [{"stage": "rollouts", "rows": 4}]
        assert table.flow_run_id == runs["run-shape"].id
        assert any("Finished in state" in log.message for log in client.read_logs())


def test_a_process_shows_its_run_below_the_flow_run_that_started_it_if_the_server_knows_it(
    api: PrefectAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(_: Stages) -> dict[str, str]:
        return outer.environment()

    def train(_: Stages) -> None:
        return None

    with stage_runner(api, "outer") as outer:
        here = outer.call(sweep, name="a-sweep")
    for variable, value in here.items():
        monkeypatch.setenv(variable, value)
    with stage_runner(api, "inner") as inner:
        inner.call(train, name="a-trial")
    (standing,) = all_task_runs(api, flow_runs(api, "outer")["a-sweep"])
    assert standing.name == "a-trial" and standing.state.is_completed()
    assert flow_runs(api, "inner")["a-trial"].parent_task_run_id == standing.id
    for variable in here:
        monkeypatch.setenv(variable, str(uuid4()))
    with stage_runner(api, "lost") as lost:
        lost.call(train, name="no-ones-trial")
    assert states(api, "lost") == {"no-ones-trial": "Completed"}
    assert flow_runs(api, "lost")["no-ones-trial"].parent_task_run_id is None


@pytest.mark.slow
def test_the_error_of_a_stage_comes_out_as_it_was_raised(api: PrefectAPI) -> None:
    error, calls = ValueError("a NaN in the loss"), []

    def fail() -> None:
        calls.append(1)
        raise error

    def broken_step(stages: Stages) -> None:
        stages.run(fail)

    with stage_runner(api, "error") as runner, pytest.raises(ValueError, match="a NaN in the loss") as raised:
        runner.call(broken_step, name="step-1")
    assert raised.value is error
    assert calls == [1]
    assert states(api, "error") == {"step-1": "Failed"}


@pytest.mark.slow
def test_a_stage_that_may_pass_is_tried_again_as_a_task(api: PrefectAPI) -> None:
    calls: list[int] = []

    def flaky() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionResetError("the engine died")
        return len(calls)

    def flaky_step(stages: Stages) -> int:
        return stages.run(flaky)

    with stage_runner(api, "retry") as runner:
        assert runner.call(flaky_step, name="step-1") == 2
    run = flow_runs(api, "retry")["step-1"]
    wait_until(lambda: task_runs(api, run)["flaky"].state.is_completed())
    assert task_runs(api, run)["flaky"].run_count == 2


@pytest.mark.slow
def test_sigterm_in_a_step_meets_the_callers_handler(api: PrefectAPI) -> None:
    class Stopped(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    def long_step(stages: Stages) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with stage_runner(api, "sigterm") as runner, pytest.raises(Stopped):
            runner.call(long_step, name="step-1")
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert states(api, "sigterm") == {"step-1": "Crashed"}


# ------------------------------------------------------------------------------------------------------------- outages


@pytest.mark.slow
def test_steps_go_on_through_an_outage_and_their_states_follow(api: PrefectAPI) -> None:
    door, said, bodies = Door(api), [], []

    def step(number: int, stages: Stages) -> int:
        bodies.append(number)
        if number == 2:
            door.shut()
        if number == 5:
            door.open()
        return stages.run(double, number, None)

    with stage_runner(door.api, "outage", say=said.append) as runner:
        for number in range(1, 8):
            started = time.monotonic()
            assert runner.call(step, number, name=f"step-{number}", next_name=f"step-{number + 1}") == 2 * number
            assert time.monotonic() - started < 4.0
            if number == 1:
                # Prefect sends tasks as events: what it has not sent when the server goes away, it may lose.
                wait_until(lambda: task_runs(api, flow_runs(api, "outage")["step-1"]))
            if number == 2:
                wait_until(lambda: len(said) == 1)
            if number == 5:
                wait_until(lambda: len(said) == 2)
    assert bodies == [1, 2, 3, 4, 5, 6, 7]
    assert "does not answer" in said[0] and "answers again" in said[1] and len(said) == 2
    assert states(api, "outage") == {f"step-{number}": "Completed" for number in range(1, 8)}
    runs = flow_runs(api, "outage")
    wait_until(lambda: all(task_runs(api, runs[f"step-{number}"]) for number in (1, 6, 7)))


@pytest.mark.slow
def test_a_server_that_is_away_for_good_costs_records_only(api: PrefectAPI) -> None:
    door, said = Door(api), []
    with stage_runner(door.api, "for-good", say=said.append) as runner:
        assert runner.call(train_step, 1, None, name="step-1") == 8
        door.shut()
        started = time.monotonic()
        assert [runner.call(train_step, k, None, name=f"step-{k}") for k in (2, 3, 4)] == [16, 24, 32]
        assert time.monotonic() - started < 10.0
        left = time.monotonic()
    assert time.monotonic() - left < 15.0
    assert len([line for line in said if "does not answer" in line]) == 1
    assert "were not delivered" in said[-1]


@pytest.mark.slow
def test_a_server_that_is_not_there_at_the_start_is_waited_for_a_set_time_only(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/api"
        said: list[str] = []
        cfg = OrchestrationConfig(api_url=url, startup_timeout_s=1.0)
        with prefect_api(cfg, tmp_path) as api:
            assert api is not None
            problem = api.wait_ready()
            assert problem is not None and "within 1 s (see orchestration.api_url" in problem
            with stage_runner(api, "nowhere", say=said.append) as runner:
                assert runner.call(train_step, 2, None, name="step-2") == 16
    assert len([line for line in said if "does not answer" in line]) == 1


@pytest.mark.slow
def test_a_slow_server_does_not_slow_the_steps(api: PrefectAPI) -> None:
    door = Door(api)
    with stage_runner(door.api, "slow", say=lambda _: None) as runner:
        assert runner.call(train_step, 1, None, name="step-1") == 8
        door.delay_s = 8.0
        started = time.monotonic()
        for number in range(2, 8):
            runner.call(train_step, number, None, name=f"step-{number}")
        assert time.monotonic() - started < 9.0
        door.delay_s = 0.0
        wait_until(lambda: states(api, "slow") == {f"step-{number}": "Completed" for number in range(1, 8)}, 120)


@pytest.mark.slow
def test_flow_runs_that_a_dead_process_left_open_are_closed_by_the_next(api: PrefectAPI, root: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from flows.prefect_server import prefect_api
from flows.stages import stage_runner
from tasks.config import OrchestrationConfig
def step(stages):
    print("in the step", flush=True)
    sys.stdin.read()
with prefect_api(OrchestrationConfig(), Path(sys.argv[1])) as api:
    api.wait_ready()
    with stage_runner(api, "dead") as runner:
        runner.call(step, name="step-1", next_name="step-2")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "in the step\n"
    wait_until(lambda: states(api, "dead") == {"step-1": "Running", "step-2": "Pending"})
    process.kill()
    process.wait()
    with stage_runner(api, "dead") as runner:
        runner.call(train_step, 2, None, name="step-2")
    assert states(api, "dead") == {"step-1": "Crashed", "step-2": "Completed"}


# ------------------------------------------------------------------------------------------------ the server's own life


RUN_ONE_STEP = """
import sys
from pathlib import Path
from flows.prefect_server import prefect_api
from flows.stages import stage_runner
from tasks.config import OrchestrationConfig
def double(number): return 2 * number
def step(number, stages): return stages.run(double, number)
with prefect_api(OrchestrationConfig(), Path(sys.argv[1])) as api:
    assert api.wait_ready() is None
    with stage_runner(api, sys.argv[2]) as runner:
        assert runner.call(step, 4, name="step-1") == 8
    print(api.url)
"""


@pytest.mark.slow
def test_a_second_process_uses_the_same_server_and_leaves_the_users_prefect_alone(
    api: PrefectAPI, root: Path, tmp_path: Path
) -> None:
    own = tmp_path / ".prefect"
    own.mkdir()
    (own / "profiles.toml").write_text('active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:1/api"\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"HOME": str(tmp_path)}
    second = subprocess.run(
        [sys.executable, "-c", RUN_ONE_STEP, str(root), "second"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (second.stdout.strip(), second.stderr) == (api.url, "")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["profiles.toml"]
    assert states(api, "second") == {"step-1": "Completed"}
    assert api.answers()


@pytest.mark.slow
def test_a_given_server_is_used_and_not_stopped(
    api: PrefectAPI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", api.url)
    with prefect_api(OrchestrationConfig(), tmp_path) as given:
        assert given is not None and given.home is None and given.url == api.url
        with stage_runner(given, "given") as runner:
            runner.call(train_step, 1, None, name="step-1")
    assert states(api, "given") == {"step-1": "Completed"}
    assert not (tmp_path / ".prefect" / "server.json").exists()


@pytest.mark.slow
def test_the_ui_is_served_at_the_address_that_is_shown(api: PrefectAPI) -> None:
    import urllib.request

    with urllib.request.urlopen(api.ui_url) as page:
        assert b"<html" in page.read().lower()
    with urllib.request.urlopen(f"{api.ui_url}/ui-settings") as settings:
        assert json.loads(settings.read())["api_url"] == api.url, "the pages would ask another server"


def test_the_ui_command_shows_what_is_over_until_ctrl_c(api: PrefectAPI, root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "ui"]
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and "no Prefect server of its own" in refused.stderr
    shown = subprocess.Popen([*command, str(root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert shown.stdout is not None
    assert f"{api.ui_url}/runs shows the runs of" in shown.stdout.readline()
    shown.send_signal(signal.SIGINT)
    assert shown.wait(30) == 0
    assert api.answers(), "others use the server"


@pytest.mark.slow
def test_a_killed_server_is_started_again_and_gets_what_it_missed_then_ends_with_its_last_user(tmp_path: Path) -> None:
    said: list[str] = []
    without = pytest.MonkeyPatch()
    without.delenv("PREFECT_API_URL", raising=False)
    with prefect_api(OrchestrationConfig(), tmp_path) as api:
        assert api is not None and api.wait_ready() is None
        address = json.loads((tmp_path / ".prefect" / "server.json").read_text())
        with stage_runner(api, "killed", say=said.append) as runner:
            assert runner.call(train_step, 1, None, name="step-1") == 8
            os.kill(address["pid"], signal.SIGKILL)
            assert runner.call(train_step, 2, None, name="step-2") == 16
            wait_until(lambda: len(said) == 2, 180)
            assert runner.call(train_step, 3, None, name="step-3") == 24
        assert states(api, "killed") == {f"step-{k}": "Completed" for k in (1, 2, 3)}
        revived = json.loads((tmp_path / ".prefect" / "server.json").read_text())
        assert revived["pid"] != address["pid"] and revived["url"] == address["url"]
    without.undo()
    assert not psutil.pid_exists(revived["pid"])
    assert not (tmp_path / ".prefect" / "server.json").exists()


@pytest.mark.slow
def test_a_server_whose_user_was_killed_ends_by_itself(tmp_path: Path) -> None:
    program = RUN_ONE_STEP.replace("    print(api.url)", "    print(api.url, flush=True); sys.stdin.read()")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "user"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline().startswith("http://")
    pid = json.loads((tmp_path / ".prefect" / "server.json").read_text())["pid"]
    process.kill()
    process.wait()
    assert psutil.pid_exists(pid)
    wait_until(lambda: not psutil.pid_exists(pid), 60)
