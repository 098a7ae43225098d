"""What carries calls and log lines to the Prefect API, on a thread of its own, and holds them while the API is away."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext, TaskRunContext
from prefect.settings import temporary_settings

if TYPE_CHECKING:
    from flows.prefect_server import PrefectAPI

R = TypeVar("R")
logger = logging.getLogger(__name__)

SLOW_AFTER_S = 5.0
"""A server that fails a call for so long counts as away."""

REQUEST_TIMEOUT_S = 20.0
HELD_CALLS = 20_000
"""Calls held for a server that is away; later ones are dropped."""

AWAY_WAIT_S = 1.0
"""How long the end waits for a server that does not answer."""


class _Busy(httpx.TransportError):
    """The server refuses for now."""


def _refuse_to_wait(response: httpx.Response) -> None:
    """Raise for an answer that Prefect's client would meet with a sleep of two seconds, such as SQLite's collisions."""
    if response.status_code in (408, 429, 502, 503, 504):
        raise _Busy(f"HTTP {response.status_code}")


class Courier:
    """Carries calls to the API in order, from a thread of its own, and holds them while the server is away."""

    def __init__(self, api: PrefectAPI, say: Callable[[str], None]) -> None:
        self.away = False
        self._api = api
        self._say = say
        self._calls: queue.Queue[tuple[Callable[[SyncPrefectClient], Any], Future[Any]] | None] = queue.Queue()
        self._logs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._away_since = 0.0
        self._lost = 0
        self._thread = threading.Thread(target=contextvars.Context().run, args=(self._carry,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, call: Callable[[SyncPrefectClient], R]) -> Future[R]:
        """Have a call made; the future has its answer."""
        answer: Future[R] = Future()
        if self._calls.qsize() >= HELD_CALLS:
            self._lose(answer, RuntimeError("too many calls wait for the server"))
        else:
            self._calls.put((call, answer))
        return answer

    def log(self, line: dict[str, Any]) -> None:
        """Have a log line sent with the next ones."""
        if not self.away and self._logs.qsize() < HELD_CALLS:
            self._logs.put(line)

    def finish(self, timeout_s: float) -> None:
        """Send what is left, within a time, and stop."""
        self._calls.put(None)
        started = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - started < (AWAY_WAIT_S if self.away else timeout_s):
            self._thread.join(0.05)
        self._given_up.set()
        self._thread.join(AWAY_WAIT_S)
        lost = self._lost + sum(1 for _ in self._left())
        if lost:
            self._say(f"{lost} records for Prefect at {self._api.url} were not delivered; the run itself is complete")

    def went_away(self, why: str) -> None:
        """Note, and say once, that the server does not answer."""
        if not self.away:
            self.away, self._away_since = True, time.monotonic()
            self._say(f"The Prefect API at {self._api.url} does not answer ({why}). Training goes on without it")

    def _came_back(self) -> None:
        if self.away:
            self.away = False
            self._say(f"The Prefect API answers again after {time.monotonic() - self._away_since:.0f} s")

    def _await_start(self) -> None:
        """Wait here for a server that is still starting; flows run plainly meanwhile, and their states are kept."""
        if not self._api.answers():
            self.away = True
            problem = self._api.wait_ready(lambda _: None, self._given_up)
            if self._given_up.is_set():
                return
            self.away = False
            if problem is not None:
                self.went_away(problem)

    def _carry(self) -> None:
        updates: dict[Any, Any] = {
            "api.url": self._api.url,
            "api.request_timeout": REQUEST_TIMEOUT_S,
            "client.max_retries": 0,
        }
        hooks = {"response": [_refuse_to_wait]}
        with temporary_settings(updates), get_client({"event_hooks": hooks}, sync_client=True) as client:
            self._await_start()
            while not self._given_up.is_set():
                try:
                    item = self._calls.get(timeout=1.0)
                except queue.Empty:
                    self._send_logs(client)
                    continue
                if item is None:
                    self._send_logs(client)
                    return
                self._make(client, *item)

    def _make(self, client: SyncPrefectClient, call: Callable[[SyncPrefectClient], Any], answer: Future[Any]) -> None:
        started, pause_s = time.monotonic(), 0.05
        while True:
            try:
                value = call(client)
            except httpx.TransportError as error:
                if isinstance(error, httpx.ConnectError) or time.monotonic() - started > SLOW_AFTER_S:
                    self.went_away(str(error) or type(error).__name__)
                    self._api.revive()
                if self._given_up.wait(pause_s):
                    return self._lose(answer, error)
                pause_s = min(2 * pause_s, 5.0)
            except Exception as error:
                logger.debug("Prefect refused a call", exc_info=True)
                answer.set_exception(error)
                return None
            else:
                self._came_back()
                answer.set_result(value)
                return None

    def _send_logs(self, client: SyncPrefectClient) -> None:
        lines: list[dict[str, Any]] = []
        while not self._logs.empty() and len(lines) < 500:
            lines.append(self._logs.get())
        if lines:
            self._make(client, lambda client: client.create_logs(lines), Future())

    def _lose(self, answer: Future[Any], error: Exception) -> None:
        self._lost += 1
        answer.set_exception(error)

    def _left(self) -> Iterator[object]:
        while not self._calls.empty():
            if item := self._calls.get():
                yield item


class LogHandler(logging.Handler):
    """Shows log lines of our packages and of Prefect's engine with the flow or task run in which they were written."""

    _SOURCES = ("flows", "tasks", "storage", "prefect.flow_runs", "prefect.task_runs")

    def __init__(self, courier: Courier) -> None:
        super().__init__(logging.INFO)
        self._courier = courier

    def attach(self) -> None:
        for name in self._SOURCES:
            logging.getLogger(name).addHandler(self)

    def detach(self) -> None:
        for name in self._SOURCES:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        flow_context, task_context = FlowRunContext.get(), TaskRunContext.get()
        if flow_context is None or flow_context.flow_run is None:
            return
        self._courier.log(
            {
                "name": record.name,
                "level": record.levelno,
                "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
                "message": self.format(record),
                "flow_run_id": str(flow_context.flow_run.id),
                "task_run_id": str(task_context.task_run.id) if task_context else None,
            }
        )
