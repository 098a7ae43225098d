"""`grpoflow train --on POOL`: a run for the workers of a Prefect work pool, checked here before it is sent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import load_config
from flows.local_paths import with_absolute_paths
from flows.plan_view import plan_of
from flows.prefect_server import prefect_api
from flows.recipes import FOLDER
from flows.schedules.server import Say
from flows.support import refuse_unbuilt
from storage.durable import sha256_json
from storage.object_store import is_url
from tasks.config import OrchestrationConfig, RunConfig
from tasks.geometry import PlanError
from tasks.rewards.functions import configured_functions

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

OPEN = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")

HEARTBEATS_LOST_S = 95.0
"""A flow run is taken for dead after this time without a sign of life; workers give one every 30 s, Prefect's least."""


def submit_command(files: Sequence[Path], overrides: Sequence[str], pool: str, until: int | None, say: Say) -> int:
    """Submit a run, unless it is there already, and return the exit code.

    Raises:
        ValueError: the configuration, the plan, the server, the pool, or another run of this name that is not over.
    """
    cfg = with_absolute_paths(_to_be_sent(load_config(files, overrides)))
    plan = plan_of(cfg)
    if plan.problems:
        raise PlanError(plan.problems)
    refuse_unbuilt(cfg, plan)
    configured_functions(cfg)
    url = cfg.orchestration.api_url or os.environ.get("PREFECT_API_URL")
    if not url:
        raise ValueError("--on needs the address of the workers' Prefect server: set PREFECT_API_URL")
    parameters = {
        # The worker knows the server by an address of its own.
        "configuration": _without_server(cfg).model_dump(mode="json"),
        "recipes": [path.stem for path in files if path.parent.resolve() == FOLDER],
        "until": until,
    }
    with tempfile.TemporaryDirectory() as home, prefect_api(OrchestrationConfig(api_url=url), Path(home), say) as api:
        assert api is not None, "it is enabled"
        if problem := api.wait_ready(say):
            raise ValueError(problem)
        from prefect.settings import temporary_settings

        # Prefect reads the environment when it is imported, which may have been for another server.
        with temporary_settings({"api.url": api.url}):
            flow_run, is_new = _submit(pool, cfg, parameters)
        state = "submitted" if is_new else f"already there: {flow_run.state_name}"
        say(f"{flow_run.name}: {state}; {api.ui_url}/runs/flow-run/{flow_run.id}")
    return 0


def _to_be_sent(cfg: RunConfig) -> RunConfig:
    """Refuse what would mean something else on another machine."""
    for key, path in (("storage.root", cfg.storage.root), ("trainer.default_local_dir", cfg.trainer.default_local_dir)):
        if path and not is_url(path) and not Path(path).is_absolute():
            raise ValueError(
                f"{key}={path} is a folder below this one, and --on runs on another machine: name an object store, "
                "s3://bucket/prefix, or a folder of the worker in full, as in storage.root=/var/lib/grpoflow/runs"
            )
    if not cfg.orchestration.enabled:
        raise ValueError("orchestration.enabled=false: --on submits to Prefect, and the run reports there")
    return cfg


def _without_server(cfg: RunConfig) -> RunConfig:
    return cfg.model_copy(update={"orchestration": cfg.orchestration.model_copy(update={"api_url": None})})


def _submit(pool: str, cfg: RunConfig, parameters: dict[str, Any]) -> tuple[FlowRun, bool]:
    """The run's flow run, and whether it was made now."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    trainer = cfg.trainer
    place = trainer.default_local_dir or f"{cfg.storage.root}/{trainer.project_name}/{trainer.experiment_name}"
    tags, digest = ["grpoflow-submitted", f"grpoflow:{place}"], sha256_json(parameters)
    with get_client(sync_client=True) as client:
        _need_pool(client, pool)
        of_this_run = FlowRunFilter.model_validate({"tags": {"all_": tags}})
        before = client.read_flow_runs(flow_run_filter=of_this_run, limit=200)
        for flow_run in before:
            if flow_run.state is None or flow_run.state.type.value not in OPEN:
                continue
            if (flow_run.idempotency_key or "").startswith(digest):
                return flow_run, False
            raise ValueError(
                f"{place} is {flow_run.state_name} as flow run {flow_run.id} with another configuration: wait for its "
                "end, cancel it in Prefect, or give this run another trainer.experiment_name"
            )
        deployment_id = _deployment(client, pool)
        made = client.create_flow_run_from_deployment(
            deployment_id,
            parameters=parameters,
            name=f"{trainer.project_name}/{trainer.experiment_name}",
            tags=tags,
            # Sent twice at once, it is the same flow run; sent again after an end, another one.
            idempotency_key=f"{digest}-{len(before)}",
        )
        return made, True


def _need_pool(client: Any, name: str) -> None:
    from prefect.exceptions import ObjectNotFound

    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        there = ", ".join(sorted(one.name for one in client.read_work_pools())) or "none"
        raise ValueError(
            f"--on {name}: there is no such work pool; there are: {there}. A worker makes it: grpoflow worker {name}"
        ) from None
    if pool.type != "process":
        raise ValueError(f"--on {name}: the work pool is of type {pool.type}; runs are submitted to process pools")


def _deployment(client: Any, pool: str) -> Any:
    """The pool's deployment of submitted runs, made or brought up to date; its id."""
    from prefect.deployments.runner import EntrypointType, RunnerDeployment

    from flows.schedules.submitted import submitted_train

    deployment_id = RunnerDeployment.from_flow(
        submitted_train,
        name=pool,
        work_pool_name=pool,
        tags=["grpoflow-submitted"],
        enforce_parameter_schema=True,
        entrypoint_type=EntrypointType.MODULE_PATH,
    ).apply()
    _watch_heartbeats(client, pool, deployment_id)
    return deployment_id


def _watch_heartbeats(client: Any, pool: str, deployment_id: Any) -> None:
    """Have the server mark flow runs Crashed whose machine is gone without a word."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    name = f"grpoflow: submitted runs of {pool} that give no sign of life"
    if client.read_automations_by_name(name):
        return
    signs = {f"prefect.flow-run.{what}" for what in ("heartbeat", "Completed", "Failed", "Cancelled", "Crashed")}
    trigger = EventTrigger.model_validate(
        {
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {
                "prefect.resource.id": f"prefect.deployment.{deployment_id}",
                "prefect.resource.role": "deployment",
            },
            "after": {"prefect.flow-run.heartbeat"},
            "expect": signs,
            "for_each": {"prefect.resource.id"},
            "posture": Posture.Proactive,
            "threshold": 1,
            "within": timedelta(seconds=HEARTBEATS_LOST_S),
        }
    )
    crashed = ChangeFlowRunState(
        state=StateType.CRASHED,
        name="Crashed",
        message="No sign of life: its worker or its machine is gone. The same command goes on with the run.",
    )
    client.create_automation(AutomationCore(name=name, trigger=trigger, actions=[crashed]))
