"""`grpoflow schedules`: what is served or deployed, when it runs next, paused, resumed, run now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.schedules.places import Begun, Places, local
from flows.schedules.server import (
    Say,
    deployment_named,
    deployments,
    flow_runs_of,
    is_active,
    remembered_server,
    schedules_server,
)
from flows.slots import holders

NEXT_TIMES = 3
FORM = ("steps", "seed", "experiment_name")
"""Parameters of a flow run beside its overrides."""


def list_command(root: Path, as_json: bool, say: Say) -> int:
    """List the schedules on the server of a folder of runs."""
    with schedules_server(remembered_server(root), root, _not_at_all if as_json else say):
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            found = [_about(client, root, one) for _, one in sorted(deployments(client).items())]
    if as_json:
        say(json.dumps(found, indent=1))
        return 0
    for about in found:
        for line in _lines(about):
            say(line)
    return 0


def _not_at_all(_: str) -> None:
    pass


def _about(client: Any, root: Path, deployment: Any) -> dict[str, Any]:
    """A schedule as it stands, for JSON."""
    places = Places(root, deployment.name)
    upcoming = flow_runs_of(client, deployment.id, ["SCHEDULED"])
    times = [one.expected_start_time for one in upcoming if one.auto_scheduled and one.expected_start_time]
    last = places.last()
    pool = deployment.work_pool_name
    return {
        "name": deployment.name,
        "paused": bool(deployment.paused or not is_active(deployment)),
        "zone": next((one.schedule.timezone for one in deployment.schedules), None) or "UTC",
        "served_by": [f"work pool {pool}"] if pool else [f"process {one.pid}" for one in holders(places.served, 1)],
        "next": [time.isoformat() for time in times[:NEXT_TIMES]],
        "last": None if last is None else {"name": last.name, "due": last.due, "state": _state(places, last)},
        "description": deployment.description,
    }


def _state(places: Places, last: Begun) -> str:
    """What became of a start: as it was written down, or else whether it still lives."""
    return last.state or ("Running" if places.is_alive(last.flow_run_id) else "Crashed")


def _lines(about: dict[str, Any]) -> list[str]:
    from zoneinfo import ZoneInfo

    who = "served by " + ", ".join(about["served_by"]) if about["served_by"] else "served by nobody"
    lines = [f"{about['name']}: {'paused, ' * about['paused']}{who}"]
    zone = ZoneInfo(about["zone"])
    for text in about["next"]:
        due = datetime.fromisoformat(text)
        lines.append(f"  next {local(text)} here, {due.astimezone(zone):%Y-%m-%d %H:%M:%S %z} {about['zone']}")
    if about["last"]:
        lines.append(f"  last {about['last']['name']}, due {local(about['last']['due'])}: {about['last']['state']}")
    return lines


def pause_command(root: Path, name: str, paused: bool, say: Say) -> int:
    """Pause a schedule, or let its times count again."""
    with schedules_server(remembered_server(root), root, say):
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            deployment = deployment_named(client, name)
            if paused:
                client.pause_deployment(deployment.id)
            else:
                client.resume_deployment(deployment.id)
                for one in deployment.schedules:
                    if not one.active:
                        client.update_deployment_schedule(deployment.id, one.id, active=True)
    say(f"{name} is {'paused; what runs goes on' if paused else 'no longer paused'}")
    return 0


def run_command(root: Path, name: str, words: Sequence[str], say: Say) -> int:
    """Have a run of a schedule begin now.

    Raises:
        ValueError: there is no such schedule, or its server refuses the words.
    """
    parameters: dict[str, Any] = {"overrides": []}
    for word in words:
        key, equals, value = word.partition("=")
        if key in FORM and equals:
            parameters[key] = int(value) if key != "experiment_name" and value.lstrip("-").isdigit() else value
        else:
            parameters["overrides"].append(word)
    with schedules_server(remembered_server(root), root, say) as api:
        from prefect.client.orchestration import get_client
        from prefect.exceptions import PrefectHTTPStatusError

        with get_client(sync_client=True) as client:
            deployment = deployment_named(client, name)
            try:
                flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
            except PrefectHTTPStatusError as error:
                raise ValueError(f"{name} cannot be run with {' '.join(words)}: {_detail(error)}") from None
        say(f"{name}: {api.ui_url}/runs/flow-run/{flow_run.id}")
        if not deployment.work_pool_name and not holders(Places(root, name).served, 1):
            say("nothing serves it: it begins when `grpoflow serve` does")
    return 0


def _detail(error: Any) -> str:
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError):
        return str(error)
