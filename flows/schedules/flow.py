"""The flow runs of schedules: each waits for its time and its turn, starts one process, and ends as that ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, flow, get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import deployment
from prefect.states import Cancelled, Failed, State
from pydantic import Field, TypeAdapter

from flows.schedules import process
from flows.schedules.places import Begun, Places, local
from flows.schedules.spec import A_NAME, AN_OVERRIDE, Served, refuse_unrunnable
from flows.schedules.watch import TOLD, Watch, quick_client, state_of_end, this_flow_run, wait_for_api
from flows.slots import FOREVER, SLOTS, Slot, acquire, holders

SERVED = "GRPOFLOW_SCHEDULES"
"""Environment variable with what is served, by name, as JSON."""

served_type = TypeAdapter(dict[str, Served])

Steps = Annotated[int | None, Field(ge=1)]
Seed = int | None
Name = Annotated[str | None, Field(pattern=A_NAME)]
Overrides = list[Annotated[str, Field(pattern=AN_OVERRIDE)]]
NO_OVERRIDES: list[str] = []


def _name_of_flow_run() -> str:
    one, flow_run = _served(), this_flow_run()
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


def _due(flow_run: FlowRun) -> datetime:
    return flow_run.expected_start_time or flow_run.created or datetime.now(UTC)


def _begin(overrides: tuple[str, ...], experiment_name: str | None) -> State[Any]:
    """Wait for the time, then for the turn, run, and say what came of it."""
    one, flow_run = _served(), this_flow_run()
    places, watch = Places(one.root, one.schedule.name), Watch(flow_run)
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
        wait_for_api()
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
    with quick_client() as client:
        return any(state.is_final() for state in client.read_flow_run_states(flow_run.id))


def missed(late_s: float, stale_after_s: float) -> str:
    """Why a run was skipped that nothing served in time."""
    return (
        f"missed: {late_s:.0f} s late, and without catch_up a run that is more than {stale_after_s:g} s late is skipped"
    )


def _take_slots(one: Served, places: Places, watch: Watch, held: contextlib.ExitStack) -> list[Slot]:
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
    watch: Watch,
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
    on = process.how_to_go_on(one, process.folder_of_run(one, begun.name, overrides))
    return state_of_end(begun.name, Path(begun.log), code, told, on)
