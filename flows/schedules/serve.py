"""`grpoflow serve`: schedules on a Prefect server, and the process that starts their runs when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flows.prefect_server import PrefectAPI
from flows.schedules.places import Places
from flows.schedules.server import (
    Say,
    close_dead,
    deployment_of,
    deployments,
    given_url,
    is_active,
    remember_server,
    schedules_server,
    settings_of_flow_runs,
    skip_missed,
    times_of,
    when_in_words,
)
from flows.schedules.spec import Served, load_schedules, served
from flows.slots import acquire, holders

QUERY_S = 2
"""How often the server is asked for runs that are due."""

REVIVE_S = 5.0
"""How often it is looked whether a managed server's process is still there."""


def serve_command(path: Path, say: Say) -> int:
    """Serve a file's schedules until Ctrl-C or SIGTERM, and return the exit code.

    Raises:
        ValueError: the file, the server, or another process that serves one of its schedules.
    """
    file = load_schedules(path)
    with ExitStack() as stack:
        for schedule in file.schedules:
            stack.enter_context(_only_one_serves(Places(file.root, schedule.name), schedule.name))
        api = stack.enter_context(schedules_server(file.orchestration, file.root, say))
        what = served(file, given_url(api))
        for one in what.values():
            times_of(one.schedule)
        os.environ.update(settings_of_flow_runs(what))
        remember_server(file, api)
        stack.enter_context(_kept_alive(api))
        serve(what, api, say)
    return 0


@contextmanager
def _only_one_serves(places: Places, name: str) -> Iterator[None]:
    slot = acquire(places.served, 1, {"schedule": name}, wait_s=0)
    if slot is None:
        who = ", ".join(
            f"process {one.pid} since {one.since.astimezone():%H:%M:%S}" for one in holders(places.served, 1)
        )
        raise ValueError(f"schedule {name} is served already, by {who}: stop that one, or give this one another name")
    with slot:
        yield


@contextmanager
def _kept_alive(api: PrefectAPI) -> Iterator[None]:
    """Start a managed server again when its process is gone."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(REVIVE_S):
            if api.home is not None:
                with contextlib.suppress(OSError):
                    # A copy: a server may be revived any number of times over the months that schedules are served.
                    dataclasses.replace(api).revive()

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def serve(what: Mapping[str, Served], api: PrefectAPI, say: Say) -> None:
    """Deploy the schedules and start their runs, until a signal says that it is enough."""
    from prefect.client.orchestration import get_client

    runner = _runner(api, say)
    with get_client(sync_client=True) as client:
        before = deployments(client, list(what))
        for name, one in what.items():
            there = before.get(name)
            if there is not None:
                close_dead(client, one, there.id, say)
                skip_missed(client, one.schedule, there.id, say)
            deployment_id = runner.add_deployment(deployment_of(one, there))
            paused = there is not None and (there.paused or not is_active(there))
            say(
                f"{name}: {when_in_words(one.schedule)}{', paused' * paused}; "
                f"{api.ui_url}/deployments/deployment/{deployment_id}"
            )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, runner.handle_sigterm)
    say("Serving; Ctrl-C ends it, and tells what runs to end at its next stage")
    asyncio.run(runner.start())


def _runner(api: PrefectAPI, say: Say) -> Any:
    from prefect.runner import Runner

    class PatientRunner(Runner):
        """Prefect's runner, that waits for a server that is away instead of ending after its third vain question."""

        async def __aenter__(self) -> Any:
            await super().__aenter__()
            poller: Any = self._scheduled_run_poller
            poller._get_and_submit_flow_runs = _when_it_answers(poller._get_and_submit_flow_runs, api, say)
            return self

    # Not paused when it ends: whether a schedule is paused is for its users to say, and they would find it changed.
    return PatientRunner(name="grpoflow", query_seconds=QUERY_S, limit=None, pause_on_shutdown=False)


def _when_it_answers(ask: Callable[..., Any], api: PrefectAPI, say: Say) -> Callable[..., Any]:
    away_since: list[float] = []

    async def asked(*args: Any, **options: Any) -> None:
        if not await asyncio.to_thread(api.answers):
            if not away_since:
                away_since.append(time.monotonic())
                say(f"The Prefect API at {api.url} does not answer; what runs goes on, and nothing new begins")
            return
        if away_since:
            say(f"The Prefect API answers again after {time.monotonic() - away_since.pop():.0f} s")
        await ask(*args, **options)

    return asked
