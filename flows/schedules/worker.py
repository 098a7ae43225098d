"""`grpoflow worker POOL`: Prefect's process worker, which when it is told to end lets its runs end politely first.

Prefect's own ends its flow runs before they can say so. Here it is halted instead, its flow runs are told to end and
are waited for, and only then it is ended. One that is killed takes its runs with it: each is told by the kernel.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from flows.child import end_with_parent

LOOK_S = 0.2


def worker_command(pool: str, limit: int, say: Callable[[str], None]) -> int:
    """Start runs of a work pool until a signal says that it is enough; the exit code.

    Args:
        pool: its name; it is made where there is none.
        limit: runs at once.
        say: told how it ends.
    """
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    # Its health is asked for on this machine alone, unless somebody says otherwise.
    environment = {"PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1", **os.environ}
    words = ["worker", "start", "--pool", pool, "--type", "process", "--limit", str(limit), "--with-healthcheck"]
    command = [sys.executable, "-m", "flows.schedules.worker", str(os.getpid()), *words]
    worker = subprocess.Popen(command, env=environment, start_new_session=True)
    while worker.poll() is None and not asked:
        time.sleep(LOOK_S)
    if worker.poll() is None:
        # Halted, it begins no other run and ends none of these.
        worker.send_signal(signal.SIGSTOP)
        runs = _flow_runs(worker.pid)
        say(f"{len(runs)} runs are told to end at their next stage; a second signal does not wait for them")
        for run in runs:
            run.send_signal(signal.SIGTERM)
        while len(asked) < 2 and _flow_runs(worker.pid):
            time.sleep(LOOK_S)
        worker.kill()
        worker.wait()
        return 0
    return worker.returncode


def _flow_runs(pid: int) -> list[psutil.Process]:
    """Processes of flow runs that have not ended; the halted worker does not gather those that have."""
    found = []
    for process in psutil.Process(pid).children():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def main() -> None:
    """Be Prefect's worker, for as long as the process lives that started it."""
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    # What a shell starts in the background has it ignored, and the worker could not be ended by it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from prefect.cli import app

    sys.argv = ["prefect", *sys.argv[2:]]
    app()


if __name__ == "__main__":
    main()
