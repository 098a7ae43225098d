"""What flow runs that start one process share: being told to end, a server that is away, what an end means."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.settings import temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.schedules import process

LOOK_S = 5.0
"""How often a flow run looks whether it was cancelled."""

API_WAIT_S = 3600.0
"""How long a flow run whose process has ended waits for a server that is away, to tell it."""


class Told(Exception):
    """The flow run was cancelled in Prefect."""


TOLD = (Told, TerminationSignal, KeyboardInterrupt)


def state_of_end(name: str, log: Path, code: int, told: bool, on: str) -> State[Any]:
    """Prefect's state for a process that has ended.

    Args:
        name: of the run.
        log: what the process printed.
        code: its exit code.
        told: it was told to end.
        on: what it left, and how to go on with it.
    """
    if code == 0:
        return Completed(message=f"{name} is done; log: {log}")
    if told:
        return Cancelled(message=f"{name} was told to end and has ended with exit code {code}; {on}")
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return Cancelled(message=f"{name}: its process was told to end by a signal; {on}")
    if code in (1, 2):
        words = process.last_words(log)
        return Failed(message=f"{name}: {words}\nlog: {log}" + (f"; {on}" if code == 1 else ""))
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Crashed(message=f"{name}: its process was {how}; {on}; log: {log}")


def this_flow_run() -> FlowRun:
    """The flow run that the caller is in, or whose name is being made."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        return context.flow_run
    from prefect.runtime import flow_run

    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run.id)


def wait_for_api() -> None:
    """Wait for a server that is away: what it is not told now it would never hear."""
    deadline = time.monotonic() + API_WAIT_S
    with contextlib.suppress(*TOLD):
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError), quick_client() as client:
                if client.api_healthcheck() is None:
                    return
            time.sleep(1.0)


@contextlib.contextmanager
def quick_client() -> Iterator[Any]:
    """A client that says at once that the server is away."""
    updates: dict[Any, Any] = {"client.max_retries": 0, "api.request_timeout": 10.0}
    with temporary_settings(updates), get_client(sync_client=True) as client:
        yield client


class Watch:
    """Looks whether the flow run was cancelled, also when nobody else does, and shows whether it waits or runs."""

    def __init__(self, flow_run: FlowRun) -> None:
        self.flow_run = flow_run
        self._looked = time.monotonic()
        self._waited = self._begun = False

    def check(self) -> None:
        """Raises Told when the flow run was cancelled. A server that is away has no say."""
        if self._begun and self._waited:
            self._waited = False
            self._set(_running())
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(httpx.HTTPError), quick_client() as client:
            state = client.read_flow_run(self.flow_run.id).state
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                raise Told
            if state is not None and state.type == StateType.CRASHED:
                # Said by somebody who had not heard of it for a while.
                client.set_flow_run_state(self.flow_run.id, _running(), force=True)

    def waits(self, why: str) -> None:
        """Show that the flow run waits."""
        get_run_logger().info("waits: %s", why)
        self._waited = True
        self._set(State(type=StateType.RUNNING, name="Waiting", message=why))

    def runs(self) -> None:
        """It waits no longer, which is shown with the next look: nothing may come between a process and its waiter."""
        self._begun = True

    def _set(self, state: State[Any]) -> None:
        with contextlib.suppress(httpx.HTTPError), quick_client() as client:
            # Not forced: it must not undo a cancellation that has just come.
            client.set_flow_run_state(self.flow_run.id, state)


def _running() -> State[Any]:
    return State(type=StateType.RUNNING, name="Running")
