"""Real servers for tests: MLflow's, started and killed; what a Prefect server knows of a run; ports in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.prefect_server import PrefectAPI


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    """A real `mlflow server` on this port, killed at the end; its store stays in the folder."""
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder / 'server.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("a") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(port), 120)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def wait_until(true: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def slow_door(port: int, delay_s: float) -> Iterator[int]:
    """A port that passes every connection on to another one, after a delay."""
    door = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()

    def accept() -> None:
        while True:
            try:
                outside, _ = door.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(outside,), daemon=True).start()

    def serve(outside: socket.socket) -> None:
        time.sleep(delay_s)
        try:
            inside = socket.create_connection(("127.0.0.1", port))
        except OSError:
            outside.close()
            return
        threading.Thread(target=pump, args=(inside, outside), daemon=True).start()
        pump(outside, inside)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield door.getsockname()[1]
    finally:
        door.close()


@contextmanager
def client_of(api: PrefectAPI) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.settings import temporary_settings

    with temporary_settings({"api.url": api.url}), get_client(sync_client=True) as client:
        yield client


def flow_runs(api: PrefectAPI, run_id: str) -> dict[str, Any]:
    """The run's flow runs by name."""
    from prefect.client.schemas.filters import FlowRunFilter

    tag = FlowRunFilter.model_validate({"tags": {"all_": [f"run:{run_id}"]}})
    with client_of(api) as client:
        return {flow_run.name: flow_run for flow_run in client.read_flow_runs(flow_run_filter=tag)}


def states(api: PrefectAPI, run_id: str) -> dict[str, str]:
    return {name: flow_run.state.name for name, flow_run in flow_runs(api, run_id).items()}


def all_task_runs(api: PrefectAPI, flow_run: Any) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter

    only = FlowRunFilter.model_validate({"id": {"any_": [flow_run.id]}})
    with client_of(api) as client:
        return client.read_task_runs(flow_run_filter=only)


def task_runs(api: PrefectAPI, flow_run: Any) -> dict[str, Any]:
    """By the stage's name, without what Prefect adds to it."""
    return {run.name.rsplit("-", 1)[0]: run for run in all_task_runs(api, flow_run)}
