"""What an MLflow store has of a run, read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flows.mlflow_store import first_line, say_little
from storage import Run
from storage.durable import read_json_lines

if TYPE_CHECKING:
    from mlflow import MlflowClient


class NoStore(RuntimeError):
    """MLflow's values of a run cannot be read, and why."""


class History:
    """What an MLflow store has of a run.

    Attributes:
        latest: by metric the value that MLflow shows for the run.
    """

    def __init__(self, client: MlflowClient, run_id: str, latest: dict[str, float]) -> None:
        self._client, self._run_id = client, run_id
        self.latest = latest

    def values(self, key: str) -> Iterator[tuple[int, float]]:
        """Step and value of every entry of a metric, by its name in MLflow; a step can have several."""
        for metric in self._client.get_metric_history(self._run_id, key):
            yield metric.step, metric.value


@contextmanager
def stored_history(run: Run, uri: str) -> Iterator[History]:
    """Read what a store has of the run's lineage; nothing is made or written.

    Raises:
        NoStore: the store is not there or does not answer, or has no such run.
    """
    path = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
    if path is not None and not path.is_file():
        raise NoStore(f"there is no {path}")
    known = [line for line in read_json_lines(run.document("tracking.jsonl")) if line.get("uri") == uri]
    if not known:
        raise NoStore(f"nothing has been sent to {uri} yet")
    say_little()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client, run_id = MlflowClient(tracking_uri=uri), known[-1]["mlflow_run"]
        latest = client.get_run(run_id).data.metrics
        yield History(client, run_id, latest)
    except (MlflowException, OSError) as error:
        raise NoStore(f"{uri}: {first_line(error)}") from error
