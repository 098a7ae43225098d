"""A rollout engine's process as its owner sees it: started, called, watched, and never outliving its owner.

Calls are JSON lines over pipes. While one is out, the process, its worker processes and the time since its last sign of
life are looked at several times a second: vLLM itself can wait for ever for a worker that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tasks.engines.vllm_process import end_group
from tasks.workers import progress

LOOK_EVERY_S = 0.2
"""How often a running call is looked at."""
CLOSE_S = 5.0
"""How long processes have to end after they were told to."""
LOG_LINES = 15
"""Last lines of the log in a message about an engine that died."""


class EngineDied(ConnectionError):
    """The engine's process or one of its workers died or hangs. The next call starts another one."""


class EngineFailed(RuntimeError):
    """The engine refused a call. Its process is ended, since vLLM does not recover from an exception."""


class WeightsNotTaken(RuntimeError):
    """The engine does not compute what the policy computes."""


class EngineProcess:
    """A process that answers calls one at a time; see vllm_process.py for the other side.

    Attributes:
        about: what it said when it was ready.
        workers: process ids of its worker processes.
        pid: its own, which is also that of its process group.
    """

    def __init__(
        self,
        python: str,
        script: Path,
        spec: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        scratch: Path,
        startup_s: float,
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            python: interpreter.
            script: vllm_process.py in a folder of its own.
            spec: what the script reads, less the pipes.
            environment: its whole environment.
            log: where its output goes.
            scratch: removed when this process dies.
            startup_s: how long it may take.

        Raises:
            EngineDied: it died or took too long.
            EngineFailed: it says why it cannot start.
        """
        self.log, self._buffer = log, b""
        self.workers: tuple[int, ...] = ()
        self.about: dict[str, Any] = {}
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        path = script.parent / "spec.json"
        path.write_text(json.dumps({**spec, "requests": theirs_in, "replies": theirs_out}), encoding="utf-8")
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [python, str(script), str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    cwd=script.parent,
                    pass_fds=(theirs_in, theirs_out),
                    start_new_session=True,
                )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.pid = self._process.pid
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), "--watch", str(self.pid), str(scratch)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.about = self._answer("start", startup_s, "actor_rollout_ref.rollout.engine_startup_s")
            self.workers = _workers_of(self.pid)
        except BaseException:
            self.kill()
            raise

    def call(self, name: str, silence_s: float, key: str, **arguments: Any) -> dict[str, Any]:
        """Make one call and wait for its answer; whatever else happens, the process is ended.

        Args:
            name: of the call.
            silence_s: longest time without a sign of life.
            key: configuration key of that time, for the message.
            arguments: of the call; they must be JSON.

        Raises:
            EngineDied: the process or a worker died, or nothing was heard of it in time.
            EngineFailed: the call failed.
        """
        try:
            self._send({"call": name, **arguments}, name)
            return self._answer(name, silence_s, key)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._process.poll() is None and self._dead_worker() is None

    def close(self) -> None:
        """End it; the quiet way first where workers share memory that they must give back."""
        self._close_pipes()
        if self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End it, all it has started and its watcher, and wait until they are gone."""
        if self._watcher.returncode is not None:
            return
        group = _group(self.pid)
        end_group(self.pid)
        self._process.wait()
        psutil.wait_procs(group, timeout=CLOSE_S)
        self._watcher.communicate(b".")
        self._close_pipes()

    # -------------------------------------------------------------------------------------------------------- the pipes

    def _send(self, message: Mapping[str, Any], name: str) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except OSError as error:
            raise EngineDied(self._obituary(name)) from error

    def _answer(self, name: str, silence_s: float, key: str) -> dict[str, Any]:
        heard = time.monotonic()
        while True:
            # Whoever watches this process need not: the engine has limits of its own.
            progress.note()
            for message in self._messages():
                heard = time.monotonic()
                if "done" in message:
                    return message["done"]
                # What vLLM says when it has lost a worker is one of many errors: the worker's death is the reason.
                if "failed" in message and (worker := self._dead_worker()) is not None:
                    raise EngineDied(self._obituary(name, worker))
                if "failed" in message:
                    raise EngineFailed(f"vLLM, in {name}: {message['failed']}{_hint(message['failed'])}{self._last()}")
            if self._process.poll() is not None:
                raise EngineDied(self._obituary(name))
            if (worker := self._dead_worker()) is not None:
                raise EngineDied(self._obituary(name, worker))
            if time.monotonic() - heard > silence_s:
                raise EngineDied(
                    f"vLLM (process {self.pid}), in {name}: no sign of life for {silence_s:g} s, {key}. It was ended; "
                    f"raise that key if the machine is only slow.{self._last()}"
                )

    def _messages(self) -> Sequence[dict[str, Any]]:
        """What has arrived, after a short wait."""
        arrived = select.poll()
        arrived.register(self._replies, select.POLLIN)
        if not arrived.poll(1000 * LOOK_EVERY_S):
            return ()
        data = os.read(self._replies, 1 << 16)
        if not data:
            time.sleep(LOOK_EVERY_S)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _close_pipes(self) -> None:
        for end in (self._requests, self._replies):
            if end >= 0:
                os.close(end)
        self._requests = self._replies = -1

    # -------------------------------------------------------------------------------------------------------- its death

    def _dead_worker(self) -> int | None:
        return next((pid for pid in self.workers if not _lives(pid)), None)

    def _obituary(self, name: str, worker: int | None = None) -> str:
        if worker is not None:
            return f"vLLM (process {self.pid}), in {name}: its worker process {worker} died.{self._last()}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        return f"vLLM (process {self.pid}), in {name}: {_how_ended(self._process.returncode)}.{self._last()}"

    def _last(self) -> str:
        """The log's last lines and where the rest is."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            return f" The end of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)
        return ""


def _how_ended(code: int | None) -> str:
    if code is None:
        return "it closed its pipes and does not end"
    if code >= 0:
        return f"it ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"it was killed by {name}" + (", perhaps for want of memory" if -code == signal.SIGKILL else "")


def _hint(text: str) -> str:
    """What to do about failures of an installation that are known."""
    return next((f" {way}" for part, way in HINTS.items() if part in text), "")


HINTS = {
    "torchvision::nms": "This torchvision does not fit this torch: pip uninstall torchvision torchaudio torchcodec.",
    "No module named 'vllm'": "Install it as docs/engines.md says, or set actor_rollout_ref.rollout.engine_python.",
}
"""Words of an error, and the way out."""


def _workers_of(pid: int) -> tuple[int, ...]:
    """vLLM's own processes below one; multiprocessing's helpers, which come and go, are not among them."""
    found = []
    for process in _children(pid):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "VLLM" in words or ("multiprocessing" in words and "tracker" not in words):
                found.append(process.pid)
    return tuple(found)


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _group(pid: int) -> list[psutil.Process]:
    """All processes of a process group, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.pid != pid and os.getpgid(process.pid) == pid:
                found.append(process)
    return found


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
