"""Which Prefect server a run reports to: a given one, or one that is started for a folder of runs and shared by them.

A managed server lives in `<storage.root>/.prefect`: database, log, address. Whoever uses it holds a shared lock there;
the last to leave stops it, and it stops by itself when its users are gone without a word. The user's own Prefect home,
profile and database are neither read nor written. Run as a script, this file is that server.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from tasks.environment import environment

if TYPE_CHECKING:
    from tasks.config import OrchestrationConfig

logger = logging.getLogger(__name__)

GIVEN_SERVER_WAIT_S = 15.0
"""How long a start waits for a server that is given by its address; training then begins without it."""

ABANDONED_AFTER_S = 10.0
"""A managed server whose last user died stops after this time."""

STOP_TIMEOUT_S = 10.0

SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # Events other than task runs' states are 85 % of the database, and nothing here reads them.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false",
    # Longer than a client keeps a connection: else a request can meet one that is just being closed.
    "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "75",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "DO_NOT_TRACK": "1",
}
"""Few, large transactions: with Prefect's defaults SQLite writers collide and requests wait for seconds."""

CLIENT_LOGGING = """\
version: 1
disable_existing_loggers: false
handlers:
  nothing: {class: logging.NullHandler}
loggers:
  prefect: {level: INFO, handlers: [nothing], propagate: false}
  EventsWorker: {level: ERROR}
"""
"""Prefect's own configuration takes over the root logger; this one leaves every logger but Prefect's alone."""


@dataclass
class PrefectAPI:
    """A Prefect server's address.

    Attributes:
        url: of its API, ending in `/api`.
        wait_s: how long `wait_ready` waits.
        home: folder of the managed server; None: the server is given.
    """

    url: str
    wait_s: float
    home: Path | None = None
    _revivals: int = field(default=0, init=False)

    @property
    def ui_url(self) -> str:
        """Where a browser finds it."""
        return self.url.removesuffix("/api")

    def answers(self, timeout_s: float = 2.0) -> bool:
        """Whether the API answers now."""
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if self.home else []))
        try:
            with opener.open(f"{self.url}/health", timeout=timeout_s):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500
        except (OSError, ValueError):
            return False

    def wait_ready(
        self, say: Callable[[str], None] = logger.info, given_up: threading.Event | None = None
    ) -> str | None:
        """Wait until the API answers; return None, or a sentence that says why it does not."""
        given_up = given_up or threading.Event()
        started = time.monotonic()
        next_word_s = 3.0
        while not self.answers():
            waited_s = time.monotonic() - started
            if self.home and not _is_alive(_read_address(self.home)):
                return f"the Prefect server in {self.home} ended while starting: {_last_words(self.home)}"
            if waited_s > self.wait_s:
                key = "orchestration.startup_timeout_s" if self.home else "orchestration.api_url or PREFECT_API_URL"
                return f"no Prefect server answered at {self.url} within {self.wait_s:g} s (see {key})"
            if waited_s > next_word_s:
                say(f"Waiting for the Prefect server at {self.url}: {waited_s:.0f} s of at most {self.wait_s:g} s")
                next_word_s += 10.0
            if given_up.wait(0.1):
                return "nobody waited for it any longer"
        return None

    def revive(self) -> None:
        """Start a managed server again, at the same address, when its process is gone."""
        if self.home is None or self._revivals >= 3:
            return
        with _locked(self.home / "start.lock"):
            address = _read_address(self.home)
            if not _is_alive(address):
                self._revivals += 1
                _launch(self.home, int(self.url.split(":")[-1].removesuffix("/api")))


def show_server(runs_root: Path, say: Callable[[str], None]) -> None:
    """Keep the managed server of a folder of runs up until Ctrl-C, for looking at what is over.

    Raises:
        ValueError: no run in this folder has had a managed server.
        RuntimeError: it does not start.
    """
    from tasks.config import OrchestrationConfig

    home = runs_root.absolute() / ".prefect"
    if not (home / "server.log").is_file():
        raise ValueError(f"{runs_root} has no Prefect server of its own: no run in it was recorded by one")
    with _shared_server(home, say) as url:
        api = PrefectAPI(url, OrchestrationConfig().startup_timeout_s, home)
        if problem := api.wait_ready(say):
            raise RuntimeError(problem)
        end = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            # Its own handler: a process that a script starts in the background is given none for Ctrl-C.
            signal.signal(number, lambda *_: end.set())
        say(f"{api.ui_url}/runs shows the runs of {runs_root}; Ctrl-C ends it")
        end.wait()


@contextmanager
def prefect_api(
    cfg: OrchestrationConfig, runs_root: Path, say: Callable[[str], None] = logger.info
) -> Iterator[PrefectAPI | None]:
    """The server to report to, within the block; None when orchestration is off.

    A managed server is only started here: other work can be done before `wait_ready` waits for it. Enter this before
    Prefect is imported, because its import reads the environment that is set here.

    Args:
        cfg: `orchestration`.
        runs_root: `storage.root`.
        say: told what is done, in sentences.
    """
    if not cfg.enabled:
        yield None
        return
    home = runs_root.absolute() / ".prefect"
    (home / "client").mkdir(parents=True, exist_ok=True)
    (home / "client" / "logging.yml").write_text(CLIENT_LOGGING)
    given = cfg.api_url or os.environ.get("PREFECT_API_URL")
    if given:
        with environment(_client_settings(home, given)):
            yield PrefectAPI(given.rstrip("/"), min(cfg.startup_timeout_s, GIVEN_SERVER_WAIT_S))
        return
    with _shared_server(home, say) as url, environment(_client_settings(home, url) | _loopback_settings()):
        yield PrefectAPI(url, cfg.startup_timeout_s, home)


def _client_settings(home: Path, url: str) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home / "client"),
        "PREFECT_PROFILES_PATH": str(home / "client" / "profiles.toml"),
        "PREFECT_LOGGING_CONFIG_PATH": str(home / "client" / "logging.yml"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def _loopback_settings() -> dict[str, str]:
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
    return {"PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false", "NO_PROXY": no_proxy, "no_proxy": no_proxy}


# ----------------------------------------------------------------------------------------- the managed server's life


@contextmanager
def _shared_server(home: Path, say: Callable[[str], None]) -> Iterator[str]:
    """Use the home's server, started if there is none, and stop it afterwards if nobody else uses it."""
    with (home / "users.lock").open("a") as users:
        with _locked(home / "start.lock"):
            fcntl.flock(users, fcntl.LOCK_SH)
            address = _read_address(home)
            if not _is_alive(address):
                say("Starting a Prefect server for these runs; the first start makes its database")
                address = _launch(home, _free_port())
        try:
            yield str(address["url"])
        finally:
            with _locked(home / "start.lock"):
                fcntl.flock(users, fcntl.LOCK_UN)
                if _take(users):
                    _stop(home)


def _launch(home: Path, port: int) -> dict[str, Any]:
    """Start the server's process and write down its address; it answers some seconds later."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= SERVER_SETTINGS
    environment |= {"PREFECT_HOME": str(home), "PREFECT_PROFILES_PATH": str(home / "profiles.toml")}
    # Its pages ask port 4200 otherwise.
    environment["PREFECT_SERVER_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    # Prefect reads settings from files in the current folder; this one holds none.
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(port), str(home / "users.lock")],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = {
        "url": f"http://127.0.0.1:{port}/api",
        "pid": process.pid,
        "process_started": psutil.Process(process.pid).create_time(),
    }
    aside = home / f".server.json.{os.getpid()}.aside"
    aside.write_text(json.dumps(address, indent=1))
    aside.rename(home / "server.json")
    return address


def _stop(home: Path) -> None:
    address = _read_address(home)
    if _is_alive(address):
        process = psutil.Process(address["pid"])
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            process.kill()
    (home / "server.json").unlink(missing_ok=True)


def _read_address(home: Path) -> dict[str, Any]:
    try:
        return json.loads((home / "server.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _is_alive(address: Mapping[str, Any]) -> bool:
    """Whether the process that has this address still runs; a later process with the same number is another one."""
    try:
        process = psutil.Process(address["pid"])
        same = abs(process.create_time() - address["process_started"]) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, psutil.NoSuchProcess):
        return False


def _last_words(home: Path) -> str:
    lines = [line.strip() for line in (home / "server.log").read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'it said nothing'} (all of it: {home / 'server.log'})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _take(file: IO[str]) -> bool:
    """Whether nobody holds the file's lock; taken for a moment only."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _end_when_abandoned(users: Path) -> None:
    abandoned_since = None
    with users.open("a") as file:
        while abandoned_since is None or time.monotonic() - abandoned_since < ABANDONED_AFTER_S:
            time.sleep(1.0)
            abandoned_since = (abandoned_since or time.monotonic()) if _take(file) else None
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_S)
    os._exit(0)


def _serve(port: str, users: str) -> None:
    threading.Thread(target=_end_when_abandoned, args=(Path(users),), daemon=True).start()
    sys.argv = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
