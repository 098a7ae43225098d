"""One reward worker as its parent sees it: an interpreter of its own, spoken to in JSON lines, killed at will."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.rewards.functions import RewardFunction
from tasks.rewards.worker import PROGRESS

_SCRIPT = Path(__file__).with_name("worker.py")
_PROJECT = Path(__file__).parents[2]
_CLOSE_S = 1.0


@dataclass
class Call:
    """Rows for one function in one message.

    Attributes:
        function: its name.
        rows: numbers of the rows that have no outcome yet, in the order in which they are scored.
        batch: all rows in one call of the function.
        attempt: how often these rows were tried before.
        not_before: clock time, s, before which it is not sent.
    """

    function: str
    rows: list[int]
    batch: bool = False
    attempt: int = 0
    not_before: float = 0.0


class WorkerProcess:
    """A running worker.

    Attributes:
        call: what it works on; None: nothing.
        delivered: rows of the call whose outcomes have arrived.
        loading: functions it was told to load and has not answered for.
        deadline: clock time, s, at which it is killed.
    """

    def __init__(self, functions: Iterable[RewardFunction]) -> None:
        """Start the process and tell it what to load, without waiting for it."""
        self.call: Call | None = None
        self.delivered = 0
        self.loading: set[str] = set()
        self.deadline = math.inf
        self._buffer = b""
        lifeline, self._lifeline = os.pipe()
        with tempfile.TemporaryFile() as shared:
            shared.truncate(PROGRESS.size)
            self._progress = mmap.mmap(shared.fileno(), PROGRESS.size)
            try:
                self._process = self._start(lifeline, shared.fileno())
            finally:
                os.close(lifeline)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self.send({"path": _import_path()})
        for function in functions:
            self.load(function)

    @staticmethod
    def _start(lifeline: int, progress: int) -> subprocess.Popen[bytes]:
        # Equal hash seeds: a function that goes through a set gives the same result in every worker.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        return subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(lifeline), str(progress)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1 << 20,
            pass_fds=(lifeline, progress),
            start_new_session=True,
            env=environment,
        )

    def load(self, function: RewardFunction) -> None:
        """Tell it to load a function."""
        self.loading.add(function.name)
        self.send({"function": function.name, "target": function.target, "kwargs": function.kwargs})

    def begin(self, call: Call, rows: list[dict[str, Any]], limit_s: float) -> None:
        """Give it a call; it is killed when a row (or the whole of a batch call) takes longer than `limit_s`."""
        now = time.monotonic()
        PROGRESS.pack_into(self._progress, 0, 0, now)
        self.call, self.delivered, self.deadline = call, 0, now + limit_s
        self.send({"function": call.function, "batch": call.batch, "rows": rows})

    def row_in_work(self) -> int:
        """Number of the row it is at, also after its end."""
        assert self.call is not None
        return self.call.rows[max(PROGRESS.unpack_from(self._progress)[0], self.delivered)]

    def row_begun_at(self) -> float:
        """Clock time, s, at which it began that row."""
        return PROGRESS.unpack_from(self._progress)[1]

    def send(self, message: dict[str, Any]) -> None:
        """Write one message. A worker that has ended shows when it is read."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def fileno(self) -> int:
        """Descriptor that becomes readable with a reply or with the worker's end."""
        return self._stdout.fileno()

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Whole replies that have arrived, without waiting; and whether the worker has ended."""
        ended = False
        while True:
            try:
                data = os.read(self.fileno(), 1 << 20)
            except BlockingIOError:
                break
            if not data:
                ended = True
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines], ended

    def kill(self) -> str:
        """End it and what it started, and say how it had ended if it had."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._release()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Let an idle worker end by itself; kill it if it does not."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self.kill()

    def _release(self) -> None:
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def _import_path() -> list[str]:
    """The parent's import path, and behind it this project and the working folder."""
    here = str(Path.cwd())
    return [entry or here for entry in sys.path] + [str(_PROJECT), here]
