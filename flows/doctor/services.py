"""Servers and helpers a run talks to: MLflow's store, Prefect's API, Ray. Nothing is started unless it is asked for."""

from __future__ import annotations

import base64
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import psutil

from flows.doctor.finding import Finding, address_and_login, masked
from flows.doctor.subject import Subject
from storage.copies import copy_of
from storage.durable import read_json
from storage.object_store import Bucket, ConditionFailed
from tasks.config import OrchestrationConfig

ANSWER_TIMEOUT_S = 2.0
RAY_IMPORT_TIMEOUT_S = 45.0
RAY_START_TIMEOUT_S = 180.0
LONGEST_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket, `man 7 unix`; Ray's are below RAY_TMPDIR, with some 62 more."""


def tracking_uri(subject: Subject) -> str | None:
    """Where metrics go: as the run was begun with, as configured, or to the store in the folder of runs."""
    if subject.run is not None and (told := subject.run.document("tracking.json")).is_file():
        return str(read_json(told)["uri"])
    if subject.cfg is None:
        return None
    return subject.cfg.tracking.uri or f"sqlite:///{subject.cfg.storage.folder.absolute() / 'mlflow.db'}"


def prefect_url(subject: Subject) -> str | None:
    """The Prefect server that is given; None: one is started for the folder of runs."""
    return (subject.cfg and subject.cfg.orchestration.api_url) or os.environ.get("PREFECT_API_URL")


def check_tracking(subject: Subject) -> Iterator[Finding]:
    """Whether MLflow's store answers. Training goes on without it, so that this is no error."""
    if subject.cfg is not None and not subject.cfg.tracking.enabled:
        yield Finding("tracking", "skipped", "tracking.enabled=false")
        return
    try:
        uri = tracking_uri(subject)
    except (ValueError, LookupError, TypeError) as error:
        advice = "Nothing of this run reaches MLflow without it: restore it from a copy, or resume the run."
        yield Finding("tracking", "warn", f"tracking.json of the run is damaged: {error!r}", advice)
        return
    if uri is None:
        yield Finding("tracking", "skipped", "no configuration was given; a SQLite store is made in storage.root")
    elif uri.startswith("sqlite:///"):
        yield _sqlite(Path(uri.removeprefix("sqlite:///")))
    elif uri.startswith(("http://", "https://")):
        yield _server("tracking", uri, "/health", "tracking.uri", "Metrics wait in the run's folder until it is back.")
    else:
        yield Finding("tracking", "skipped", f"{masked(uri)}: only SQLite stores and HTTP servers are tried")


def _sqlite(file: Path) -> Finding:
    if not file.exists():
        return Finding("tracking", "ok", f"{file} is made by the first run")
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=ANSWER_TIMEOUT_S)) as store:
            versions = store.execute("select version_num from alembic_version").fetchall()
    except (sqlite3.Error, ValueError) as error:
        advice = "Set tracking.uri to another store, or move the file away: a new one gets what the runs' folders hold."
        return Finding("tracking", "warn", f"{file} is no MLflow store: {error}", advice)
    if not os.access(file, os.W_OK):
        return Finding("tracking", "warn", f"{file} cannot be written", "Mend its rights, or set tracking.uri.")
    return Finding("tracking", "ok", f"{file}, schema {', '.join(version for (version,) in versions)}")


def _server(name: str, uri: str, path: str, key: str, without: str) -> Finding:
    """Whether a server answers at a path that costs it nothing."""
    shown = masked(uri)
    try:
        address, login = address_and_login(uri)
        request = urllib.request.Request(f"{address}{path}")
        if login := login or _login_of_environment(name):
            request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S):
            return Finding(name, "ok", f"{shown} answers")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return Finding(name, "warn", f"{shown} answers {error.code}: it wants other credentials", f"See {key}.")
        if error.code < 500:
            return Finding(name, "ok", f"{shown} answers ({error.code} at {path})")
        return Finding(name, "warn", f"{shown} answers {error.code}", f"{without} Look into its log.")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        return Finding(name, "warn", f"{shown} does not answer: {why}", f"{without} Start it, or mend {key}.")


def _login_of_environment(name: str) -> str | None:
    """`user:password` for a server, from the variables that MLflow's and Prefect's own clients read."""
    if name == "prefect":
        return os.environ.get("PREFECT_API_AUTH_STRING")
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{what}") for what in ("USERNAME", "PASSWORD"))
    return f"{user}:{password}" if user and password else None


# -------------------------------------------------------------------------------------------------------------- Prefect


def check_prefect(subject: Subject) -> Iterator[Finding]:
    """Whether the given Prefect server answers, or what is known of the one that is started for runs."""
    if subject.cfg is not None and not subject.cfg.orchestration.enabled:
        yield Finding("prefect", "skipped", "orchestration.enabled=false")
    elif url := prefect_url(subject):
        key = "orchestration.api_url or PREFECT_API_URL"
        yield _server("prefect", url.rstrip("/"), "/health", key, "Training goes on without it.")
    elif subject.deep:
        yield _start_prefect()
    else:
        yield _managed_prefect(subject)


def _managed_prefect(subject: Subject) -> Finding:
    from flows.prefect_server import PrefectAPI

    root = subject.cfg.storage.folder if subject.cfg else subject.folder
    home = root.expanduser().absolute() / ".prefect"
    try:
        url = str(read_json(home / "server.json")["url"])
    except (OSError, ValueError, KeyError):
        url = None
    if url and PrefectAPI(url, 0.0, home).answers(ANSWER_TIMEOUT_S):
        return Finding("prefect", "ok", f"the server for these runs answers at {url}")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        advice = "Runs start a server on loopback; set orchestration.enabled=false where that cannot be."
        return Finding("prefect", "error", f"no port can be opened on 127.0.0.1: {error}", advice)
    return Finding("prefect", "ok", "no server is given; a run starts one (not tried; --deep starts one)")


def _start_prefect() -> Finding:
    """Start a server in a temporary folder as a run does, and stop it again."""
    from flows.prefect_server import prefect_api

    cfg = OrchestrationConfig()
    with tempfile.TemporaryDirectory() as root, prefect_api(cfg, Path(root)) as api:
        assert api is not None
        problem = api.wait_ready()
    if problem:
        return Finding("prefect", "warn", problem, "Training goes on without it.")
    return Finding("prefect", "ok", "a server was started and answered; it is stopped again")


# --------------------------------------------------------------------------------------------------------- object store


def check_store(subject: Subject) -> Iterator[Finding]:
    """Whether the object store of the runs takes objects, and refuses those whose condition does not hold."""
    from storage import StorageError

    if subject.cfg is None or not subject.cfg.storage.in_object_store:
        return
    root = subject.cfg.storage.root
    try:
        copy = copy_of(subject.cfg.storage.folder / "doctor")
        assert copy is not None, "an s3:// root has its folder in the cache"
        refused = list(_conditions_kept(copy.bucket, f"{copy.key}-{uuid4().hex}.json"))
    except (StorageError, ValueError) as error:
        advice = "Look at storage.root, storage.endpoint, storage.region and the credentials in the environment."
        yield Finding("store", "error", str(error), advice)
        return
    if all(refused):
        yield Finding("store", "ok", f"{root} takes objects, and refuses what a lease has it refuse")
    else:
        advice = "Two machines could write one run. Choose a store with conditional PUT (If-Match, If-None-Match)."
        yield Finding("store", "error", f"{root} overwrites objects though the condition of the put fails", advice)


def _conditions_kept(bucket: Bucket, key: str) -> Iterator[bool]:
    """Whether a second first put is refused, and a put on what is not there any more."""
    first = bucket.put_if(key, b"1", None)
    try:
        bucket.put_if(key, b"2", first)
        for stale in (None, first):
            try:
                bucket.put_if(key, b"3", stale)
                yield False
            except ConditionFailed:
                yield True
    finally:
        bucket.delete([key])


# ------------------------------------------------------------------------------------------------------------------ Ray

_START_RAY = """
import os
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
import ray
ray.init(
    address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,
    object_store_memory=80 * 2**20,
)
assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()
ray.shutdown()
"""


def check_ray(subject: Subject) -> Iterator[Finding]:
    """Whether Ray can be imported, and with `deep` whether a local one starts and runs a task."""
    needed = subject.devices > 1
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        if needed:
            found = f"not installed, but {subject.devices} devices are asked for"
            yield Finding("ray", "error", found, "Install Ray, or set trainer.nnodes and trainer.n_gpus_per_node to 1.")
        else:
            yield Finding("ray", "skipped", "not installed; one device does not need it")
        return
    if subject.cfg is not None and needed and (address := subject.cfg.ray.address):
        yield from _ray_cluster(address)
    script = _START_RAY if subject.deep else "import ray"
    problem = _run(script, RAY_START_TIMEOUT_S if subject.deep else RAY_IMPORT_TIMEOUT_S)
    if problem:
        did = "start" if subject.deep else "be imported"
        advice = "Look into /tmp/ray/session_latest/logs." if subject.deep else f"pip install --force ray=={version}"
        yield Finding("ray", "error" if needed else "warn", f"ray {version} cannot {did}: {problem}", advice)
    elif len(temporary := os.environ.get("RAY_TMPDIR", "")) > LONGEST_SOCKET_PATH - 62:
        found = f"ray {version}; RAY_TMPDIR={temporary} makes its sockets' paths too long"
        yield Finding("ray", "error" if needed else "warn", found, "Set RAY_TMPDIR to a shorter path.")
    else:
        did = "starts and runs a task" if subject.deep else "can be imported (--deep starts one)"
        yield Finding("ray", "ok", f"ray {version} {did}")


def _ray_cluster(address: str) -> Iterator[Finding]:
    """Whether the head of the configured cluster can be reached; `auto` is Ray's own business."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        yield Finding("ray/cluster", "skipped", f"ray.address={masked(address)} is no host:port that can be tried")
        return
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_TIMEOUT_S):
            yield Finding("ray/cluster", "ok", f"{address} takes connections")
    except OSError as error:
        advice = "Start the head node (ray start --head), mend ray.address, or leave it out for a local Ray."
        yield Finding("ray/cluster", "error", f"ray.address={address} cannot be reached: {error}", advice)


def _run(script: str, timeout_s: float) -> str | None:
    """Run a script in a Python of its own, and end all that it started; None, or the last line of what went wrong."""
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, text=True, env=environment) as process:
        try:
            _, words = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end_with_children(process.pid)
            return f"no end within {timeout_s:g} s"
    lines = words.strip().splitlines()
    return None if process.returncode == 0 else (lines[-1] if lines else f"exit code {process.returncode}")


def _end_with_children(pid: int) -> None:
    """Ray's servers are in sessions of their own, and outlive a child that is killed alone."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (*process.children(recursive=True), process):
            with suppress(psutil.Error):
                one.kill()
