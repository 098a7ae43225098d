"""The flow runs of schedules: each waits for its time and its turn, starts one process, and ends as that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
from prefect import Flow, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment
from prefect.settings import temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, State
from pydantic import Field, TypeAdapter

from flows.schedules import process
from flows.schedules.places import Begun, Places, local
from flows.schedules.spec import A_NAME, AN_OVERRIDE, Served, refuse_unrunnable
from flows.slots import FOREVER, SLOTS, Slot, acquire, holders

SERVED = "GRPOFLOW_SCHEDULES"
"""Environment variable with what is served, by name, as JSON."""

LOOK_S = 5.0
"""How often a flow run looks whether it was cancelled."""

API_WAIT_S = 3600.0
"""How long a flow run whose process has ended waits for a server that is away, to tell it."""

served_type = TypeAdapter(dict[str, Served])

Steps = Annotated[int | None, Field(ge=1)]
Seed = int | None
Name = Annotated[str | None, Field(pattern=A_NAME)]
Overrides = list[Annotated[str, Field(pattern=AN_OVERRIDE)]]
NO_OVERRIDES: list[str] = []


class Told(Exception):
    """The flow run was cancelled in Prefect."""


TOLD = (Told, TerminationSignal, KeyboardInterrupt)


def _name_of_flow_run() -> str:
    one, flow_run = _served(), _flow_run()
    return f"{one.schedule.name} {_due(flow_run).astimezone(one.schedule.zone):%Y-%m-%d %H:%M:%S %z}"


@flow(name="scheduled-train", flow_run_name=_name_of_flow_run, persist_result=False)
def scheduled_train(
    steps: Steps = None, seed: Seed = None, experiment_name: Name = None, overrides: Overrides = NO_OVERRIDES
) -> State[Any]:
    """One run of a schedule: `grpoflow train` in a process of its own.

    Args:
        steps: steps of the run (trainer.total_training_steps).
        seed: seed of the run (trainer.seed).
        experiment_name: name of the run instead of the one that the schedule gives.
        overrides: more overrides of the configuration, each key.path=value, after the schedule's own.
    """
    return _begin(_overrides(steps, seed, overrides), experiment_name)


@flow(name="scheduled-preflight", flow_run_name=_name_of_flow_run, persist_result=False)
def scheduled_preflight(
    seed: Seed = None, experiment_name: Name = None, overrides: Overrides = NO_OVERRIDES
) -> State[Any]:
    """One preflight of a schedule: `grpoflow preflight` in a process of its own.

    Args:
        seed: seed of the run (trainer.seed).
        experiment_name: name of the run instead of the one that the schedule gives.
        overrides: more overrides of the configuration, each key.path=value, after the schedule's own.
    """
    return _begin(_overrides(None, seed, overrides), experiment_name)


@flow(name="scheduled-sweep", flow_run_name=_name_of_flow_run, persist_result=False)
def scheduled_sweep(
    steps: Steps = None, experiment_name: Name = None, overrides: Overrides = NO_OVERRIDES
) -> State[Any]:
    """One sweep of a schedule: `grpoflow sweep` in a process of its own.

    Args:
        steps: steps of the run (trainer.total_training_steps).
        experiment_name: name of the run instead of the one that the schedule gives.
        overrides: more overrides of the configuration, each key.path=value, after the schedule's own.
    """
    return _begin(_overrides(steps, None, overrides), experiment_name)


FLOWS: dict[str, Flow[..., State[Any]]] = {
    "train": scheduled_train,
    "preflight": scheduled_preflight,
    "sweep": scheduled_sweep,
}


def _overrides(steps: int | None, seed: int | None, overrides: Sequence[str]) -> tuple[str, ...]:
    chosen = {"trainer.total_training_steps": steps, "trainer.seed": seed}
    return (*overrides, *(f"{key}={value}" for key, value in chosen.items() if value is not None))


def _served() -> Served:
    return served_type.validate_json(os.environ[SERVED])[str(deployment.name)]


def _flow_run() -> FlowRun:
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        return context.flow_run
    from prefect.runtime import flow_run

    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run.id)


def _due(flow_run: FlowRun) -> datetime:
    return flow_run.expected_start_time or flow_run.created or datetime.now(UTC)


def _begin(overrides: tuple[str, ...], experiment_name: str | None) -> State[Any]:
    """Wait for the time, then for the turn, run, and say what came of it."""
    one, flow_run = _served(), _flow_run()
    places, watch = Places(one.root, one.schedule.name), _Watch(flow_run)
    with places.alive(str(flow_run.id)), contextlib.ExitStack() as held:
        try:
            state = _wait_for_time(one, flow_run)
            slots = [] if state else _take_slots(one, places, watch, held)
            if state is None and not slots:
                state = _skipped(_who_is_busy(one, places))
            state = state or _run(one, flow_run, places, overrides, experiment_name, slots, watch)
        except TOLD:
            state = Cancelled(message="cancelled before it had begun")
        get_run_logger().info("%s: %s", state.name, state.message)
        _wait_for_api()
        return state


def _skipped(why: str) -> State[Any]:
    return Cancelled(name="Skipped", message=why)


def _wait_for_time(one: Served, flow_run: FlowRun) -> State[Any] | None:
    """Sleep until the run is due, since its process is started before; the state of a run that is too late."""
    due = _due(flow_run)
    late_s = (datetime.now(UTC) - due).total_seconds()
    time.sleep(max(0.0, -late_s))
    schedule = one.schedule
    too_late = late_s > schedule.stale_after_s and flow_run.auto_scheduled and not schedule.catch_up
    if too_late and not _was_retried(flow_run):
        return _skipped(missed(late_s, schedule.stale_after_s))
    return None


def _was_retried(flow_run: FlowRun) -> bool:
    """Whether the flow run had ended before, so that somebody wants it now."""
    with _quick_client() as client:
        return any(state.is_final() for state in client.read_flow_run_states(flow_run.id))


def missed(late_s: float, stale_after_s: float) -> str:
    """Why a run was skipped that nothing served in time."""
    return (
        f"missed: {late_s:.0f} s late, and without catch_up a run that is more than {stale_after_s:g} s late is skipped"
    )


def _take_slots(one: Served, places: Places, watch: _Watch, held: contextlib.ExitStack) -> list[Slot]:
    """The schedule's own slot, and where the file says so one of this machine's; [] when the schedule is busy."""
    schedule, about = one.schedule, {"schedule": one.schedule.name, "flow_run_id": str(watch.flow_run.id)}
    queues = schedule.when_busy == "queue"
    busy = acquire(places.busy(schedule.group), 1, about, wait_s=0)
    if busy is None and queues:
        watch.waits(_who_is_busy(one, places))
        busy = acquire(
            places.busy(schedule.group),
            1,
            about,
            wait_s=FOREVER,
            most_waiting=schedule.max_waiting,
            check=watch.check,
        )
    if busy is None:
        return []
    held.enter_context(busy)
    if one.slots is None or schedule.sweep is not None:
        return [busy]
    folder = places.all.parent / SLOTS
    device = acquire(folder, one.slots, about, wait_s=0)
    if device is None:
        watch.waits(f"all {one.slots} slots of {folder} are held")
        device = acquire(folder, one.slots, about, check=watch.check)
    assert device is not None, "it was waited for"
    return [busy, held.enter_context(device)]


def _who_is_busy(one: Served, places: Places) -> str:
    found = holders(places.busy(one.schedule.group), 1)
    if not found:
        return "the last one has just ended"
    [holder] = found
    of = holder.about.get("run", holder.about.get("schedule", "it"))
    return f"{of} still runs: process {holder.pid} since {holder.since.astimezone():%Y-%m-%d %H:%M:%S %z}"


def _run(
    one: Served,
    flow_run: FlowRun,
    places: Places,
    overrides: tuple[str, ...],
    experiment_name: str | None,
    slots: Sequence[Slot],
    watch: _Watch,
) -> State[Any]:
    """Start the process, wait for its end, and make a state of it."""
    name = experiment_name or one.schedule.run_name(_due(flow_run))
    before = places.begun(name)
    if before is not None and before.flow_run_id != str(flow_run.id) and not one.schedule.resume:
        return Failed(
            message=f"{name} was begun by another flow run, due at {local(before.due)}: give this one another "
            "experiment_name, or put more of the time into the schedule's"
        )
    try:
        refuse_unrunnable(one, overrides)
    except (ValueError, OSError) as error:
        return Failed(message=f"refused: {error}")
    words = process.command_words(one, name, overrides, places.folder / "sweeps")
    log = places.log(name)
    begun = places.write(
        Begun(
            name=name,
            flow_run_id=str(flow_run.id),
            due=_due(flow_run).isoformat(),
            command=("grpoflow", *words),
            log=str(log),
            began=datetime.now(UTC).isoformat(),
        )
    )
    get_run_logger().info("%s; it prints to %s", " ".join(begun.command), log)
    for slot in slots:
        slot.say(run=name)
    child = process.start(one, words, log, slots)
    watch.runs()
    told = process.wait(child, watch.check, TOLD)
    state = _end(one, begun, overrides, child.returncode, told)
    places.write(begun, ended=datetime.now(UTC).isoformat(), state=state.name, message=state.message)
    return state


def _end(one: Served, begun: Begun, overrides: Sequence[str], code: int, told: bool) -> State[Any]:
    """Prefect's state for a process that ended with this exit code."""
    if code == 0:
        return Completed(message=f"{begun.name} is done; log: {begun.log}")
    on = process.how_to_go_on(one, process.folder_of_run(one, begun.name, overrides))
    if told:
        return Cancelled(message=f"{begun.name} was told to end and has ended with exit code {code}; {on}")
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return Cancelled(message=f"{begun.name}: its process was told to end by a signal; {on}")
    if code in (1, 2):
        words = process.last_words(Path(begun.log))
        return Failed(message=f"{begun.name}: {words}\nlog: {begun.log}" + (f"; {on}" if code == 1 else ""))
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Crashed(message=f"{begun.name}: its process was {how}; {on}; log: {begun.log}")


def _wait_for_api() -> None:
    """Wait for a server that is away: what it is not told now it would never hear."""
    deadline = time.monotonic() + API_WAIT_S
    with contextlib.suppress(*TOLD):
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError), _quick_client() as client:
                if client.api_healthcheck() is None:
                    return
            time.sleep(1.0)


@contextlib.contextmanager
def _quick_client() -> Iterator[Any]:
    """A client that says at once that the server is away."""
    updates: dict[Any, Any] = {"client.max_retries": 0, "api.request_timeout": 10.0}
    with temporary_settings(updates), get_client(sync_client=True) as client:
        yield client


class _Watch:
    """Looks whether the flow run was cancelled, also when nobody else does, and shows whether it waits or runs."""

    def __init__(self, flow_run: FlowRun) -> None:
        self.flow_run = flow_run
        self._looked = time.monotonic()
        self._waited = self._begun = False

    def check(self) -> None:
        """Raises Told when the flow run was cancelled. A server that is away has no say."""
        if self._begun and self._waited:
            self._waited = False
            self._set(State(type=StateType.RUNNING, name="Running"))
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(httpx.HTTPError), _quick_client() as client:
            state = client.read_flow_run(self.flow_run.id).state
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                raise Told

    def waits(self, why: str) -> None:
        """Show that the flow run waits."""
        get_run_logger().info("waits: %s", why)
        self._waited = True
        self._set(State(type=StateType.RUNNING, name="Waiting", message=why))

    def runs(self) -> None:
        """It waits no longer, which is shown with the next look: nothing may come between a process and its waiter."""
        self._begun = True

    def _set(self, state: State[Any]) -> None:
        with contextlib.suppress(httpx.HTTPError), _quick_client() as client:
            # Not forced: it must not undo a cancellation that has just come.
            client.set_flow_run_state(self.flow_run.id, state)
