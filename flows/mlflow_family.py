"""Runs below a parent run in MLflow, as a sweep has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flows.mlflow_store import experiment_id, legal_name, open_store, short_value


@dataclass(frozen=True)
class FamilyMember:
    """A run below a parent run in MLflow.

    Attributes:
        mlflow_run_id: its id there.
        tags: what the parent's owner says of it.
    """

    mlflow_run_id: str
    tags: dict[str, str]


def tell_family(
    uri: str,
    *,
    experiment: str,
    artifacts: str | None,
    name: str,
    own_tag: tuple[str, str],
    tags: dict[str, str],
    params: dict[str, str],
    metrics: dict[str, float],
    state: str,
    members: Sequence[FamilyMember],
) -> str:
    """Make a parent run, or find it by its tag, bring it up to date, and hang runs below it; return its id.

    Telling it again changes nothing but what has changed.

    Args:
        uri: of the store.
        experiment: name of the experiment of all of them.
        artifacts: where artifacts of a new experiment go; None: where the store wants them.
        name: of the parent.
        own_tag: the tag by which it is found.
        tags: its other tags.
        params: its parameters; one that is there stays.
        metrics: its metrics; a value is sent where it differs from the last one.
        state: MLflow's word for its state.
        members: the runs below it.
    """
    client = open_store(uri)
    place = experiment_id(client, experiment, artifacts)
    found = client.search_runs([place], f"tags.`{own_tag[0]}` = '{own_tag[1]}' AND tags.`grpoflow.kind` = 'sweep'")
    made = (
        found[0] if found else client.create_run(place, None, {own_tag[0]: own_tag[1], "grpoflow.kind": "sweep"}, name)
    )
    run_id: str = made.info.run_id
    for key, value in tags.items():
        if made.data.tags.get(key) != value:
            client.set_tag(run_id, key, value)
    for key, value in params.items():
        if legal_name(key) not in made.data.params:
            client.log_param(run_id, legal_name(key), short_value(value))
    for key, number in metrics.items():
        if made.data.metrics.get(key) != number:
            client.log_metric(run_id, key, number)
    for member in members:
        known = client.get_run(member.mlflow_run_id).data.tags
        for key, value in {**member.tags, "mlflow.parentRunId": run_id}.items():
            if known.get(key) != value:
                client.set_tag(member.mlflow_run_id, key, value)
    if made.info.status != state:
        client.update_run(run_id, status="RUNNING") if state == "RUNNING" else client.set_terminated(run_id, state)
    return run_id
