"""The flow run of a run submitted to a work pool: `grpoflow train` in a process of its own, beside the worker."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Cancelled, Crashed, State

from flows.child import child_command, end_with_parent
from flows.config import to_yaml
from flows.prefect_runs import PARENT
from flows.run_folder import run_folder
from flows.schedules import process
from flows.schedules.watch import TOLD, Watch, state_of_end, this_flow_run, wait_for_api
from tasks.config import RunConfig

NO_RECIPES: list[str] = []


@flow(name="submitted-train", persist_result=False)
def submitted_train(
    configuration: dict[str, Any], recipes: list[str] = NO_RECIPES, until: int | None = None
) -> State[Any]:
    """One run: `grpoflow train` in a process of its own, which ends with this one, as this one ends with its worker.

    Args:
        configuration: the run's, resolved. Without `tracking.uri` it is tracked where this machine's
            MLFLOW_TRACKING_URI says.
        recipes: names of recipes, which make what the configuration leaves open.
        until: pause after this step.
    """
    watch, worker = Watch(this_flow_run()), os.getppid()
    try:
        # A worker that is killed does not tell its flow runs. Read here, where the flow's thread is the main one.
        end_with_parent(worker)
        cfg = as_on_this_machine(configuration)
        state = _run(cfg, recipes, until, watch)
    except TOLD:
        state = Cancelled(message="told to end before it had begun")
    if os.getppid() != worker:
        _print_to_nobody()
        if state.is_cancelled():
            state = Crashed(message=f"its worker is gone: {state.message}")
    get_run_logger().info("%s: %s", state.name, state.message)
    wait_for_api()
    return state


def _print_to_nobody() -> None:
    """Let go of the pipes to a worker that is gone: printing into them would end this process."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nobody, stream)


def as_on_this_machine(configuration: Mapping[str, Any]) -> RunConfig:
    """The configuration with what this machine's environment says where it says nothing itself.

    Raises:
        ValueError: it is none, or this machine's address of MLflow cannot be one of a configuration.
    """
    tracking = dict(configuration.get("tracking", {}))
    tracking["uri"] = tracking.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
    return RunConfig.model_validate({**configuration, "tracking": tracking})


def _run(cfg: RunConfig, recipes: list[str], until: int | None, watch: Watch) -> State[Any]:
    """Start the process, wait for its end, and make a state of it."""
    name = f"{cfg.trainer.project_name}/{cfg.trainer.experiment_name}"
    places = cfg.storage.folder / ".submitted"
    places.mkdir(parents=True, exist_ok=True)
    file, log = (places / f"{watch.flow_run.id}.{suffix}" for suffix in ("yaml", "log"))
    file.write_text(to_yaml(cfg))
    words = ["train", *recipes, str(file), *(["--until", str(until)] if until is not None else [])]
    get_run_logger().info("grpoflow %s; it prints to %s", " ".join(words), log)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT__")}
    with log.open("ab") as output:
        child = subprocess.Popen(
            child_command(*words),
            cwd=places,
            env={**environment, PARENT: str(watch.flow_run.id)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # What ends the worker's group ends it through this process alone, once and politely.
            start_new_session=True,
        )
    told = process.wait(child, watch.check, TOLD)
    folder = run_folder(cfg)
    on = process.left_by(folder) if (folder / "run.json").exists() else "it left no run; the same command begins it"
    return state_of_end(name, log, child.returncode, told, on)
