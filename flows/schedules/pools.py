"""`grpoflow deploy`: schedules for the workers of a Prefect work pool, at once or as files for `prefect deploy`.

A process pool is deployed to. For docker and kubernetes, files are written: the deployments (`prefect.yaml`) and the
pool's base job template, made from Prefect's own and checked against its schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows.prefect_server import prefect_api
from flows.schedules.server import (
    Say,
    deployment_of,
    deployments,
    given_url,
    remember_server,
    schedules_server,
    settings_of_flow_runs,
    times_of,
    when_in_words,
)
from flows.schedules.spec import ScheduleFile, Served, load_schedules, served
from tasks.config import OrchestrationConfig

COLLECTIONS = {"process": "prefect", "docker": "prefect-docker", "kubernetes": "prefect-kubernetes"}
"""Prefect's package that has the workers of each type of pool."""


@dataclass(frozen=True)
class Containers:
    """How a pool's containers are made.

    Attributes:
        kind: docker or kubernetes.
        image: with grpoflow and the files that the schedules name, at their paths.
        claim: kubernetes: volume claim mounted at `storage.root`.
        gpus: kubernetes: GPUs of each run.
    """

    kind: str
    image: str
    claim: str | None = None
    gpus: int = 0


def deploy_command(
    path: Path, pool: str, kind: str, image: str | None, claim: str | None, gpus: int, output: Path | None, say: Say
) -> int:
    """Deploy a file's schedules to a work pool, or write the files for it, and return the exit code.

    Raises:
        ValueError: the file, the server, the pool, or options that do not go together.
    """
    file = load_schedules(path)
    if kind not in COLLECTIONS:
        raise ValueError(f"--type {kind}: it is one of {', '.join(COLLECTIONS)}")
    if kind == "process":
        if image or claim or gpus or output:
            raise ValueError("--image, --claim, --gpus and --output are for --type docker and kubernetes")
        _deploy_to_processes(file, pool, say)
        return 0
    if not image or output is None:
        raise ValueError(f"--type {kind} needs --image IMAGE, with grpoflow in it, and -o FILE to write to")
    if kind == "docker" and (claim or gpus):
        raise ValueError("--claim and --gpus are for --type kubernetes")
    _write_files(file, pool, Containers(kind, image, claim, gpus), output, say)
    return 0


def _deploy_to_processes(file: ScheduleFile, pool: str, say: Say) -> None:
    with schedules_server(file.orchestration, file.root, say) as api:
        from prefect.client.orchestration import get_client

        what = served(file, given_url(api))
        for one in what.values():
            times_of(one.schedule)
        with get_client(sync_client=True) as client:
            _need_pool(client, pool, say)
            before = deployments(client, list(what))
        for name, one in what.items():
            variables = {"env": settings_of_flow_runs({name: one}), "working_dir": one.folder}
            deployed = deployment_of(one, before.get(name), work_pool_name=pool, job_variables=variables).apply()
            say(f"{name}: {when_in_words(one.schedule)}; {api.ui_url}/deployments/deployment/{deployed}")
        remember_server(file, api)
        say(f"start a worker: PREFECT_API_URL={api.url} prefect worker start --pool {pool}")
        if api.home is not None:
            say("the server is a managed one and stops with its last user; workers need one that stays")


def _need_pool(client: Any, name: str, say: Say) -> None:
    """Make a process pool, unless it is there.

    Raises:
        ValueError: a pool with this name is of another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))
        say(f"made the work pool {name}")
        return
    if pool.type != "process":
        raise ValueError(f"work pool {name} is of type {pool.type}: name another one with --pool, or give its --type")


# ------------------------------------------------------------------------------------------------ docker, kubernetes


def _write_files(file: ScheduleFile, pool: str, containers: Containers, output: Path, say: Say) -> None:
    url = file.orchestration.api_url or os.environ.get("PREFECT_API_URL")
    if url is None:
        raise ValueError("containers need a Prefect server that they can reach: set orchestration.api_url in the file")
    # Nothing is asked of the server: Prefect is imported, and must not read the user's own settings.
    with prefect_api(OrchestrationConfig(api_url=url), file.root):
        template = base_job_template(containers, file.root)
        entries = [deployment_entry(one, pool, containers, template) for one in served(file, url).values()]
    template_file = output.with_name(f"{output.stem}-pool.json")
    output.write_text(yaml.safe_dump({"prefect-version": None, "pull": [], "deployments": entries}, sort_keys=False))
    template_file.write_text(json.dumps(template, indent=1))
    say(f"wrote {output} and {template_file}; give these commands where PREFECT_API_URL is {url}:")
    say(f"  prefect work-pool create {pool} --type {containers.kind} --base-job-template {template_file}")
    say(f"  prefect --no-prompt deploy --all --prefect-file {output}")
    say(f"  prefect worker start --pool {pool}   # with {COLLECTIONS[containers.kind]} installed")


def base_job_template(containers: Containers, root: Path) -> dict[str, Any]:
    """Prefect's own template of a pool of this type, with `storage.root` mounted and the GPUs asked for."""
    from importlib.resources import files

    text = files("prefect.server.api").joinpath("collections_data/views/aggregate-worker-metadata.json").read_text()
    kind = containers.kind
    template = deepcopy(json.loads(text)[COLLECTIONS[kind]][kind]["default_base_job_configuration"])
    if kind == "kubernetes":
        pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
        container = pod["containers"][0]
        if containers.claim:
            pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": containers.claim}}]
            container["volumeMounts"] = [{"name": "runs", "mountPath": str(root)}]
        if containers.gpus:
            container.setdefault("resources", {}).setdefault("limits", {})["nvidia.com/gpu"] = containers.gpus
    return template


def deployment_entry(one: Served, pool: str, containers: Containers, template: Mapping[str, Any]) -> dict[str, Any]:
    """One deployment of `prefect.yaml`.

    Raises:
        ValueError: its job variables do not fit the pool's template.
    """
    from prefect.utilities.schema_tools import is_valid_schema, validate

    schedule, variables = one.schedule, _job_variables(one, containers)
    times_of(schedule)
    is_valid_schema(template["variables"])
    if errors := validate(variables, template["variables"], raise_on_error=False):
        raise ValueError(f"schedule {schedule.name}: job variables do not fit: {'; '.join(map(str, errors))}")
    when: dict[str, Any] = {"slug": "times", "active": True}
    if schedule.interval_s is not None:
        when |= {"interval": schedule.interval_s, "anchor_date": "1970-01-01T00:00:00+00:00", "timezone": "UTC"}
    else:
        when |= {"cron": schedule.cron, "timezone": schedule.timezone}
    collisions = {"skip": "CANCEL_NEW", "queue": "ENQUEUE"}
    return {
        "name": schedule.name,
        "entrypoint": f"flows.schedules.flow.scheduled_{schedule.kind}",
        "tags": ["grpoflow-schedule"],
        "schedules": [when],
        # The slots of `when_busy` are of one machine; runs on several need the server's limit.
        "concurrency_limit": {"limit": 1, "collision_strategy": collisions[schedule.when_busy]},
        "enforce_parameter_schema": True,
        "work_pool": {"name": pool, "job_variables": variables},
    }


def _job_variables(one: Served, containers: Containers) -> dict[str, Any]:
    variables: dict[str, Any] = {"image": containers.image, "env": settings_of_flow_runs({one.schedule.name: one})}
    if containers.kind == "docker":
        mounted = dict.fromkeys((one.root, one.folder))
        variables["volumes"] = [f"{folder}:{folder}" for folder in mounted]
    return variables
