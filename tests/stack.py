"""docker-compose.yml on this machine without containers: each service's very command, on loopback ports of its own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from postgres import HOMES, Postgres
from servers import free_port, wait_until

TOP = Path(__file__).parent.parent
PORTS = (4200, 5000, 5432, 6379, 8079, 8080, 8333, 8888, 9333)
"""Ports of the file, each in one place of it alone, for which there are others here."""
HOSTS = ("postgres", "prefect", "mlflow", "object-store", "ray-head")
PATIENCE_S = 300

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<how>:[-?])(?P<more>[^{}]*))?\})")


def variables(text: str) -> dict[str, str]:
    """What a `.env` file sets."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def interpolated(tree: Any, values: Mapping[str, str]) -> Any:
    """The tree with its variables filled in as docker compose does; ValueError where one is needed and not there."""
    if isinstance(tree, dict):
        return {key: interpolated(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [interpolated(value, values) for value in tree]
    return _VARIABLE.sub(lambda match: _value(match, values), tree) if isinstance(tree, str) else tree


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    value = values.get(match["name"], "")
    if not value and match["how"] == ":?":
        raise ValueError(f"{match['name']} is needed: {match['more']}")
    return value or (match["more"] or "" if match["how"] == ":-" else "")


class Stack:
    """The services that have no profile, as processes below a folder.

    Attributes:
        folder: what they write; ports: of the file -> here; values: what `.env` says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: _free_port_with_another() for port in PORTS}
        self.values = variables((TOP / ".env.example").read_text()) | {"MLFLOW_WORKERS": "1"}
        self.values |= {name: secrets.token_hex(16) for name, value in self.values.items() if not value}
        self.services = self._here(interpolated(yaml.safe_load((TOP / "docker-compose.yml").read_text()), self.values))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Not in pytest's folder, which is closed to the user that PostgreSQL runs as.
        self.postgres = Postgres(
            Path(tempfile.mkdtemp(prefix="grpoflow-pg-")),
            self.ports[5432],
            self.values["POSTGRES_PASSWORD"],
            tuple(self.services["postgres"]["command"][1:]),
        )

    def _here(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The services with the hosts, ports and folders of this machine."""
        found = {}
        for name, service in tree["services"].items():
            folders = {line.split(":")[1]: self.folder / name for line in service.get("volumes", ()) if "." not in line}
            parts = {key: service.get(key, []) for key in ("entrypoint", "command", "environment", "healthcheck")}
            found[name] = self._native(parts, folders) | {
                "depends_on": service.get("depends_on", {}),
                "profiles": service.get("profiles"),
            }
        return found

    def _native(self, tree: Any, folders: Mapping[str, Path]) -> Any:
        if isinstance(tree, dict):
            return {key: self._native(value, folders) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self._native(value, folders) for value in tree]
        if not isinstance(tree, str) or tree.startswith("--allowed-hosts="):
            return tree
        hosts = "|".join(HOSTS)
        text = re.sub(rf"(?<=[/@=])({hosts})(?=:\d)|(?<=-ip=)({hosts})|0\.0\.0\.0", "127.0.0.1", tree)
        text = re.sub(r"\b(\d{4})\b", lambda match: str(self.ports.get(int(match[1]), match[1])), text)
        for there, here in folders.items():
            text = text.replace(there, str(here))
        return text

    # -------------------------------------------------------------------------------------------------- their life

    def start_all(self) -> None:
        """Start every service when those are ready that it depends on."""
        waiting = [name for name, service in self.services.items() if not service["profiles"]]
        ready: set[str] = set()
        deadline = time.monotonic() + PATIENCE_S
        while waiting:
            for name in list(waiting):
                if self._processes.get(name) is None and set(self.services[name]["depends_on"]) <= ready:
                    self.start(name)
                if name in self._processes and self.is_ready(name):
                    ready.add(name)
                    waiting.remove(name)
            assert time.monotonic() < deadline, f"{waiting} are not ready: {self.said(waiting[0])}"
            time.sleep(0.5)

    def start(self, name: str) -> None:
        """Start a service as the file says, with what it has on disk from before."""
        if name == "postgres":
            self._start_postgres()
            return
        service = self.services[name]
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        with (folder / "said.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*service["entrypoint"], *service["command"]],
                cwd=folder,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_mind_interrupts,
            )

    def _start_postgres(self) -> None:
        first = not any(self.postgres.folder.iterdir())
        if first:
            self.postgres.make()
        self.postgres.start()
        for statement in (TOP / "deploy" / "databases.sql").read_text().splitlines() if first else ():
            if not statement.startswith("--"):
                self.postgres.ask("postgres", statement)
        self._processes["postgres"] = self.postgres._server

    def environment(self, name: str) -> dict[str, str]:
        """What a service's process has in its environment: the file's, and where programs are."""
        programs = [str(Path(sys.executable).parent), str(HOMES[-1]), "/usr/local/bin", "/usr/bin", "/bin"]
        own = {"PATH": ":".join(programs), "HOME": str(self.folder / name), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        return {**own, "PYTHONPATH": os.environ.get("PYTHONPATH", str(TOP)), **self.services[name]["environment"]}

    def is_ready(self, name: str) -> bool:
        """Whether a service's own health check passes; of one that only makes something, whether it has ended well."""
        check = self.services[name]["healthcheck"]
        if not check:
            assert self._processes[name].poll() in (None, 0), self.said(name)
            return self._processes[name].poll() == 0
        assert self._processes[name].poll() is None, self.said(name)
        done = subprocess.run(check["test"][1:], env=self.environment(name), capture_output=True, check=False)
        return done.returncode == 0

    def kill(self, name: str) -> None:
        """Kill all of a service's processes with -9, as its container's end does."""
        if name == "postgres":
            self.postgres.kill()
            return
        for one in self.tree(name):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self._processes[name].wait(30)

    def tree(self, name: str) -> list[psutil.Process]:
        """A service's processes that are there."""
        if name not in self._processes or self._processes[name].poll() is not None:
            return []
        first = psutil.Process(self._processes[name].pid)
        return [first, *first.children(recursive=True)]

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """A service's first process."""
        return self._processes[name]

    def bring_back(self, name: str) -> None:
        """Start a service again and wait until it is ready."""
        self.start(name)
        wait_until(lambda: self.is_ready(name), PATIENCE_S)

    def said(self, name: str) -> str:
        """What a service printed."""
        log = self.postgres.folder / "log" if name == "postgres" else self.folder / name / "said.log"
        return f"{name} said: {log.read_text(errors='replace')[-3000:]}"

    def end(self) -> None:
        """End what is left."""
        for name, process in self._processes.items():
            if name != "postgres" and process.poll() is None:
                self.kill(name)
        self.postgres.stop()
        shutil.rmtree(self.postgres.folder, ignore_errors=True)


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    """The stack, all of it ready, within the block."""
    stack = Stack(folder)
    try:
        stack.start_all()
        yield stack
    finally:
        stack.end()


def _free_port_with_another() -> int:
    """A free port of which the one 10,000 above is free too: SeaweedFS takes both."""
    while True:
        port = free_port()
        with suppress(OSError, OverflowError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + 10_000))
            return port


def _mind_interrupts() -> None:
    """As in a container: a shell's background has SIGINT ignored, which Prefect's worker minds."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
