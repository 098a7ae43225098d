"""A reward worker: a process that loads reward functions and calls them on its main thread, one JSON line at a time.

Started by process.WorkerProcess as a script. What functions print goes to standard error; the pipes to the parent are
out of their reach. It ends with its parent, even inside a call that never returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from typing import IO, Any

FLUSH_S = 0.002
"""Outcomes are sent together for this long: a message for every row would cost more than most rules."""
PRINTED_BYTES = 16_384
"""What the reward functions of one process may print; the rest is dropped."""
PROGRESS = struct.Struct("qd")
"""Shared with the parent: which row of the call is being scored, and the clock time at which it was begun."""


class _Shown(io.RawIOBase):
    """Standard error up to a size; no error when nobody reads it."""

    def __init__(self) -> None:
        self._left = PRINTED_BYTES

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, data: Any) -> int:
        shown = bytes(data)[: self._left]
        if self._left and len(data) > len(shown):
            shown += b"\n(this reward process has printed enough; the rest is not shown)\n"
        self._left -= min(self._left, len(data))
        with contextlib.suppress(OSError):
            os.write(2, shown)
        return len(data)


def main() -> None:
    """Serve until the parent closes the pipe."""
    requests, replies = _take_over_pipes()
    _end_with_parent(int(sys.argv[1]))
    progress = mmap.mmap(int(sys.argv[2]), PROGRESS.size)
    sys.path[:] = json.loads(requests.readline())["path"]
    functions: dict[str, Any] = {}
    for line in requests:
        _serve(json.loads(line), functions, replies, progress)


def _serve(message: dict[str, Any], functions: dict[str, Any], replies: int, progress: mmap.mmap) -> None:
    from tasks.rewards.calls import Refused, RewardError, load_function, score_batch

    name = message["function"]
    try:
        if "target" in message:
            functions[name] = load_function(name, message["target"], message["kwargs"])
            _send(replies, {"loaded": name, "form": functions[name].form})
        elif message["batch"]:
            outcomes = score_batch(functions[name], message["rows"])
            _quiet_alarms()
            _send(replies, {"outcomes": outcomes})
        else:
            _score_one_by_one(functions[name], message["rows"], replies, progress)
    except (Refused, RewardError) as error:
        _send(replies, {"refused": str(error)})


def _score_one_by_one(function: Any, rows: list[dict[str, Any]], replies: int, progress: mmap.mmap) -> None:
    from tasks.rewards.calls import score_sample

    outcomes: list[dict[str, Any]] = []
    sent_at = time.monotonic()
    for place, row in enumerate(rows):
        now = time.monotonic()
        if outcomes and now - sent_at > FLUSH_S:
            _send(replies, {"outcomes": outcomes})
            outcomes, sent_at = [], now
        PROGRESS.pack_into(progress, 0, place, now)
        outcomes.append(score_sample(function, row))
        _quiet_alarms()
    _send(replies, {"outcomes": outcomes})


def _take_over_pipes() -> tuple[IO[bytes], int]:
    """Move the pipes away from descriptors 0 and 1, which reward functions and what they start may use."""
    requests = os.fdopen(os.dup(0), "rb", buffering=1 << 20)
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    shown = io.BufferedWriter(_Shown())
    sys.stdout = sys.stderr = io.TextIOWrapper(shown, errors="replace", line_buffering=True)
    return requests, replies


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process when the parent's end of a pipe closes.

    A signal's default action works inside a C call that never gives the interpreter back, where a thread that watches
    the pipe would wait for ever.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("the parent has ended")


def _quiet_alarms() -> None:
    """Cancel an alarm that a function left behind; it would ring in the next one."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _send(replies: int, message: dict[str, Any]) -> None:
    data = json.dumps(message, allow_nan=False).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main()
