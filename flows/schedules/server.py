"""The Prefect server of schedules, as `serve`, `deploy` and `schedules` use it, and the deployments on it.

Nothing here imports Prefect before the environment says which server it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flows.prefect_server import PrefectAPI, prefect_api
from flows.schedules.places import Places
from flows.schedules.spec import Schedule, ScheduleFile, Served
from storage.durable import read_json, write_json
from tasks.config import OrchestrationConfig

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.deployments.runner import RunnerDeployment

Say = Callable[[str], None]

FLOW_RUN_LOGGING = """\
version: 1
disable_existing_loggers: false
formatters:
  plain: {format: "%(asctime)s %(message)s", datefmt: "%H:%M:%S"}
handlers:
  nothing: {class: logging.NullHandler}
  terminal: {class: logging.StreamHandler, formatter: plain, level: WARNING}
  api: {class: prefect.logging.handlers.APILogHandler}
loggers:
  prefect: {level: INFO, handlers: [terminal], propagate: false}
  prefect.flow_runs: {level: INFO, handlers: [api], propagate: false}
  EventsWorker: {level: ERROR}
"""
"""Logging of the processes that serve schedules: what a flow run says is shown in Prefect."""


@contextmanager
def schedules_server(orchestration: OrchestrationConfig, root: Path, say: Say) -> Iterator[PrefectAPI]:
    """The server, answering, within the block.

    Raises:
        ValueError: it does not answer.
    """
    with prefect_api(orchestration, root, say) as api:
        assert api is not None, "a file whose orchestration is off is refused"
        logging = root.absolute() / ".prefect" / "client" / "schedules-logging.yml"
        logging.write_text(FLOW_RUN_LOGGING)
        os.environ["PREFECT_LOGGING_CONFIG_PATH"] = str(logging)
        if problem := api.wait_ready(say):
            raise ValueError(problem)
        from prefect.settings import temporary_settings

        # Prefect reads the environment when it is imported, which may have been for another server.
        with temporary_settings({"api.url": api.url}):
            yield api


def given_url(api: PrefectAPI) -> str | None:
    """Address of a server that is given; None: the managed one, which each process finds by the folder of runs."""
    return None if api.home else api.url


def remember_server(file: ScheduleFile, api: PrefectAPI) -> None:
    """Keep which server the schedules of a folder of runs are on, for `grpoflow schedules`."""
    folder = file.root / ".schedules"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "server.json", {"api_url": given_url(api)})


def remembered_server(root: Path) -> OrchestrationConfig:
    """Which server that is.

    Raises:
        ValueError: no schedule was ever served or deployed there.
    """
    try:
        return OrchestrationConfig(**read_json(root / ".schedules" / "server.json"))
    except FileNotFoundError:
        raise ValueError(
            f"{root} has no schedules: serve a file of them with `grpoflow serve FILE`, or name their storage.root "
            "with --root"
        ) from None


# ------------------------------------------------------------------------------------------------------- deployments


def times_of(schedule: Schedule) -> Any:
    """Prefect's schedule object.

    Raises:
        ValueError: the cron expression cannot be read.
    """
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

    if schedule.interval_s is not None:
        # A fixed anchor: serving again does not move the times. UTC: elapsed time, also when clocks are changed.
        return IntervalSchedule(
            interval=timedelta(seconds=schedule.interval_s),
            anchor_date=datetime(1970, 1, 1, tzinfo=UTC),
            timezone="UTC",
        )
    try:
        return CronSchedule(cron=schedule.cron or "", timezone=schedule.timezone)
    except ValueError as error:
        raise ValueError(
            f"schedule {schedule.name}: cron {schedule.cron!r} cannot be read ({_first_message(error)}); it has five "
            "fields: minute hour day-of-month month day-of-week"
        ) from None


def _first_message(error: ValueError) -> str:
    return str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)


def deployment_of(one: Served, there: DeploymentResponse | None, **pool: Any) -> RunnerDeployment:
    """The deployment of a schedule.

    Args:
        one: the schedule.
        there: the deployment as it is on the server now, which stays paused if it is; None: there is none.
        pool: `work_pool_name` and `job_variables`, for a worker.
    """
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.deployments.runner import EntrypointType, RunnerDeployment

    from flows.schedules.flow import FLOWS

    schedule = one.schedule
    deployment = RunnerDeployment.from_flow(
        FLOWS[schedule.kind],
        name=schedule.name,
        schedules=[DeploymentScheduleCreate(schedule=times_of(schedule), active=is_active(there), slug="times")],
        paused=there is not None and there.paused,
        description=describe(one),
        tags=["grpoflow-schedule"],
        enforce_parameter_schema=True,
        entrypoint_type=EntrypointType.MODULE_PATH,
        **pool,
    )
    if not pool:
        # Said, so that one that was in a work pool before is taken out of it.
        deployment.work_pool_name = None
        deployment.work_queue_name = None
    return deployment


def describe(one: Served) -> str:
    """What a schedule does, for Prefect's page of it."""
    schedule = one.schedule
    what = " ".join(
        (schedule.kind, *([schedule.sweep] if schedule.sweep else schedule.train or schedule.preflight or ()))
    )
    lines = [
        f"`grpoflow {what}`, {when_in_words(schedule)}",
        f"- runs lie in {one.root}; relative paths count from {one.folder}",
        f"- when the last one still runs: {schedule.when_busy}",
        "- a missed time is made up for" if schedule.catch_up else f"- skipped when {schedule.stale_after_s:g} s late",
        *(f"- `{text}`" for text in schedule.overrides),
    ]
    return "\n".join(lines)


def when_in_words(schedule: Schedule) -> str:
    """Its times, in words."""
    if schedule.interval_s is not None:
        return f"every {schedule.interval_s:g} s"
    return f"cron {schedule.cron} ({schedule.timezone})"


def deployments(client: Any, names: Sequence[str] | None = None) -> dict[str, DeploymentResponse]:
    """The deployments of schedules on a server, by name."""
    from prefect.client.schemas.filters import DeploymentFilter

    tagged = DeploymentFilter.model_validate({"tags": {"all_": ["grpoflow-schedule"]}})
    found = {one.name: one for one in client.read_deployments(deployment_filter=tagged)}
    return found if names is None else {name: found[name] for name in names if name in found}


def deployment_named(client: Any, name: str) -> DeploymentResponse:
    """One of them.

    Raises:
        ValueError: there is none with this name.
    """
    found = deployments(client)
    if name not in found:
        raise ValueError(f"there is no schedule {name!r}; there are: {', '.join(sorted(found)) or 'none'}")
    return found[name]


def is_active(deployment: DeploymentResponse | None) -> bool:
    """Whether a deployment's times count, as somebody has set it in Prefect; a new one's do."""
    return deployment is None or all(one.active for one in deployment.schedules)


# ---------------------------------------------------------------------------------------------- what was left behind


def flow_runs_of(
    client: Any, deployment_id: Any, states: Sequence[str], before: datetime | None = None
) -> list[FlowRun]:
    """Up to 200 flow runs of a deployment in these states, due before a time, oldest first."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    wanted: dict[str, Any] = {"state": {"type": {"any_": list(states)}}}
    if before is not None:
        wanted["expected_start_time"] = {"before_": before}
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(wanted),
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment_id]}}),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=200,
    )


def skip_missed(client: Any, schedule: Schedule, deployment_id: Any, say: Say) -> int:
    """Skip the times that nothing served and that are too late by now; how many."""
    from prefect.client.schemas.objects import StateType
    from prefect.states import State

    from flows.schedules.flow import missed

    if schedule.catch_up:
        return 0
    now = datetime.now(UTC)
    before, count, first = now - timedelta(seconds=schedule.stale_after_s), 0, None
    while True:
        late = [one for one in flow_runs_of(client, deployment_id, ["SCHEDULED"], before) if one.auto_scheduled]
        for flow_run in late:
            due = flow_run.expected_start_time or now
            first = first or due
            why = missed((now - due).total_seconds(), schedule.stale_after_s)
            state: State[Any] = State(type=StateType.CANCELLED, name="Skipped", message=why)
            client.set_flow_run_state(flow_run.id, state, force=True)
        count += len(late)
        if len(late) < 200:
            break
    if count and first:
        when = f"{first.astimezone(schedule.zone):%Y-%m-%d %H:%M:%S %z}"
        say(f"{schedule.name}: {count} times since {when} were missed and are skipped")
    return count


def close_dead(client: Any, one: Served, deployment_id: Any, say: Say) -> int:
    """Mark flow runs Crashed that nobody serves any more: their process on this machine is gone; how many."""
    from prefect.states import Crashed

    places, count = Places(one.root, one.schedule.name), 0
    for flow_run in flow_runs_of(client, deployment_id, ["PENDING", "RUNNING", "CANCELLING"]):
        if places.is_alive(str(flow_run.id)):
            say(f"{one.schedule.name}: {flow_run.name} still runs")
            continue
        state: Any = Crashed(message="The process that served it ended without a word.")
        client.set_flow_run_state(flow_run.id, state, force=True)
        count += 1
    return count


def settings_of_flow_runs(schedules: Mapping[str, Served]) -> dict[str, str]:
    """Environment by which the flow runs of these schedules know what to do."""
    from flows.schedules.flow import SERVED, served_type

    return {SERVED: served_type.dump_json(dict(schedules)).decode()}
