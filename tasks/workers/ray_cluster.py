"""Ray as a run uses it: one of its own on this machine, or a cluster. It carries names and small values, no batches."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tasks.environment import environment

# Read when Ray is imported: its servers then listen on loopback where they serve this machine alone.
_LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_CONNECT_TRIES = "RAY_NUM_REDIS_GET_RETRIES"
"""Read then, too: seconds for which Ray tries to reach what it has started, 20 otherwise."""

_TOKEN = secrets.token_hex(32)
"""Of this process: Ray keeps the first one it sees."""

LONGEST_FOLDER = 40
"""Longest folder for Ray's sockets: with what Ray puts behind it, a socket's path holds 107 characters."""

OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: nothing large goes through it."""


@contextmanager
def ray_of(address: str | None, ranks: int, *, gpus: bool | None, startup_s: float = 300.0) -> Iterator[bool]:
    """Connect to a cluster, or start a Ray that ends with this block, and with this process however that ends.

    A Ray that this process is connected to already is used as it is.

    Args:
        address: see `ray.address`.
        ranks: devices that are asked for.
        gpus: ranks compute on CUDA; None: where there is enough of it.
        startup_s: how long a Ray of its own may take to start.

    Yields:
        Whether ranks compute on CUDA.

    Raises:
        ValueError: there are too few devices, or no cluster at this address.
    """
    if address is None:
        before_import(startup_s)
    import ray

    if ray.is_initialized():
        yield _on_cuda(ranks, gpus)
        return
    with ExitStack() as stack:
        folder = stack.enter_context(_short_folder()) if address is None else None
        stack.callback(_shut_down)
        with _signals_kept():
            _connect(address) if address is not None else _start(ranks, gpus, str(folder), startup_s)
            _hush()
        yield _on_cuda(ranks, gpus)


def before_import(startup_s: float) -> None:
    """Set what Ray reads when it is imported, for a Ray of this process's own.

    Args:
        startup_s: how long it may take to start.
    """
    os.environ.setdefault(_LOOPBACK_ALONE, "0")
    os.environ.setdefault(_CONNECT_TRIES, str(int(startup_s)))


def _connect(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(
            f"no Ray cluster answers at ray.address={address}: {error}. Start one (`ray start --head`), or set "
            "ray.address=null for a Ray of the run's own on this machine."
        ) from error


def _start(ranks: int, gpus: bool | None, folder: str, startup_s: float) -> None:
    """Start a Ray on this machine: ports of its own, no dashboard, and no file outside its folder.

    Raises:
        ValueError: it is not up within `startup_s`.
    """
    end = time.monotonic() + startup_s
    while True:
        try:
            _try_to_start(ranks, gpus, folder, startup_s)
            return
        except Exception as error:
            _kill_processes_of(folder)
            # Ray gives itself half a minute, which a busy machine exceeds.
            if "timed out during startup" not in str(error) or time.monotonic() > end:
                raise ValueError(
                    f"Ray did not start on this machine within ray.startup_timeout_s={startup_s:g}: {error}. Its logs "
                    "went with it; look for a full disk or memory, or a machine that is busy with other things."
                ) from error


def _kill_processes_of(folder: str) -> None:
    """End what a start that failed has left running."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(folder in word for word in process.cmdline()):
                process.kill()


def _try_to_start(ranks: int, gpus: bool | None, folder: str, startup_s: float) -> None:
    import ray

    settings = {
        "RAY_AUTH_TOKEN": _TOKEN,
        # By itself Ray lets its processes give way to all others.
        "RAY_worker_niceness": "0",
        "RAY_gcs_server_port_wait_time_s": str(int(startup_s)),
        "RAY_worker_register_timeout_seconds": str(int(startup_s)),
    }
    with environment(settings), _out_of_reach_of_sigterm():
        ray.init(
            address="local",
            num_cpus=ranks,
            num_gpus=0 if gpus is False else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
        )


def _hush() -> None:
    """Keep Ray from printing to stdout that a process has died: whoever watches the ranks says it, and what follows.

    Ray has no switch for it: `log_to_driver` is about what the processes print themselves.
    """
    with suppress(ImportError):
        import ray._private.worker as worker

        if hasattr(worker, "print_to_stdstream"):
            worker.print_to_stdstream = lambda *_, **__: None


def _shut_down() -> None:
    import ray

    with _signals_kept():
        ray.shutdown()


@contextmanager
def _short_folder() -> Iterator[str]:
    """A folder for Ray's files; those of processes that were killed are removed on the way."""
    base = Path(tempfile.gettempdir())
    base = base if len(str(base)) <= LONGEST_FOLDER else Path("/tmp")
    for left in base.glob("gf-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"gf-{os.getpid()}-", dir=base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _on_cuda(ranks: int, gpus: bool | None) -> bool:
    import ray

    there = int(ray.cluster_resources().get("GPU", 0))
    if gpus is False or (gpus is None and there == 0):
        return False
    if there < ranks:
        raise ValueError(
            f"{ranks} devices are asked for (trainer.nnodes x trainer.n_gpus_per_node), but Ray sees {there} GPUs. Ask "
            "for fewer, show more of them in CUDA_VISIBLE_DEVICES, or set trainer.device=cpu."
        )
    return True


@contextmanager
def _out_of_reach_of_sigterm() -> Iterator[None]:
    """Processes started in the block do not take SIGTERM, nor do theirs; Ray has it so for Ctrl-C.

    Batch systems send it to all processes of a job. It is for this one alone: without Ray it could not end politely.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray puts a handler of its own in the place of the one for SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
