"""Brings a run's folder to an MLflow store."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from flows.mlflow_store import (
    experiment_id,
    first_line,
    is_refusal,
    iso,
    legal_name,
    milliseconds,
    open_store,
)
from storage import Run
from storage.durable import append_json_line, read_json_lines, sha256_file, sha256_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100

STATE_TAG = "grpoflow.state"
"""Tag with the run's state in our own words: MLflow has none for a paused run."""
_STATE_OF = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed", "SCHEDULED": "paused"}
LATE_DOCUMENTS = ("report.html",)
"""Texts in a run's folder that are made when it ends."""


@dataclass(frozen=True)
class Delivery:
    """What of a run has reached MLflow.

    Attributes:
        uri: of the MLflow store; empty: the run is not tracked.
        mlflow_run_id: id of the run there; None: the store was never reached.
        sent: steps whose metrics have arrived.
        waiting: numbers of the steps whose metrics have not.
        refused: values that MLflow does not take, and why.
        problem: why something is waiting; None: nothing is.
    """

    uri: str = ""
    mlflow_run_id: str | None = None
    sent: int = 0
    waiting: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()
    problem: str | None = None


class Sender:
    """Brings a run's folder to an MLflow store. Every call goes on where the last one, or another process, stopped."""

    def __init__(self, run: Run, story: dict[str, Any], died_ms: int | None = None) -> None:
        """Read what has arrived; nothing is sent yet.

        Args:
            run: the run.
            story: what is told once, see `tracking.json`.
            died_ms: when the process died, in ms since 1970, that sent before this one; None: it did not.
        """
        self.uri: str = story["uri"]
        self.steps: deque[int] = deque()
        self.late: deque[str] = deque(LATE_DOCUMENTS)
        self._run = run
        self._story = story
        self._died_ms = died_ms
        self._log = run.document("tracking.jsonl")
        self._client: MlflowClient | None = None
        self._mlflow_run: str | None = None
        self._told = False
        self._closed: str | None = None
        self._sent: dict[int, dict[str, Any]] = {}
        self._documents: dict[str, str] = {}
        self._refused: list[str] = []
        self._no_value: dict[str, int] = {}
        self._no_value_told = 0
        self._read_log()
        self._begun = self._mlflow_run is not None

    def send(self) -> None:
        """Send what is not there yet; any error but a refusal of values is raised, and nothing of it is lost."""
        client, run_id = self._connected()
        self._tell(client, run_id)
        while chunk := self._next_chunk():
            metrics = [metric for index, record in chunk for metric in self._metrics(index, record)]
            for part in _cut(metrics, METRICS_PER_CALL):
                self._halving(part, lambda part: client.log_batch(run_id, metrics=part))
            self._report_no_value(client, run_id)
            for index, record in chunk:
                self._note(step=index, digest=sha256_json(record["metrics"]), timestamp=self._timestamp(index, record))
                self.steps.popleft()
        self._send_late(client, run_id)

    def close(self, state: str, ended_ms: int) -> None:
        """Give the run its last state and end time."""
        client, run_id = self._connected()
        client.set_terminated(run_id, state, ended_ms)
        client.set_tag(run_id, STATE_TAG, _STATE_OF[state])
        self._note(closed=state)

    def send_rest(self, state: str, ended_ms: int) -> None:
        """Send and close, unless everything is there."""
        self._find_unsent()
        if self.steps or not self._told or self._closed != state or any(map(self._is_unsent, self.late)):
            self.send()
            self.close(state, ended_ms)

    def delivery(self, problem: str | None) -> Delivery:
        """What has arrived so far."""
        waiting = {index for index in list(self.steps) if index not in self._sent}
        if self._client is None:
            waiting.update(index for index in self._with_record() if index not in self._sent)
        return Delivery(
            self.uri, self._mlflow_run, len(self._sent), tuple(sorted(waiting)), tuple(self._refused), problem
        )

    @property
    def closed(self) -> str | None:
        """MLflow's word for the state with which the run was closed last; None: it was not."""
        return self._closed

    def _read_log(self) -> None:
        for line in read_json_lines(self._log):
            if "mlflow_run" in line:
                same = line["uri"] == self.uri
                self._mlflow_run = line["mlflow_run"] if same else None
                self._sent, self._told, self._closed, self._documents = {}, False, None, {}
            elif "step" in line and self._mlflow_run:
                self._sent[line["step"]] = line
            elif "document" in line and self._mlflow_run:
                self._documents[line["document"]] = line["digest"]
            elif self._mlflow_run:
                self._told = self._told or "told" in line
                self._closed = line.get("closed", self._closed)

    def _note(self, **line: Any) -> None:
        append_json_line(self._log, line)
        if "step" in line:
            self._sent[line["step"]] = line

    # ------------------------------------------------------------------------------------------------ the run itself

    def _connected(self) -> tuple[MlflowClient, str]:
        if self._client is None or self._mlflow_run is None:
            client = open_store(self.uri)
            run_id = self._known_run(client) or self._new_run(client)
            self._reopen(client, run_id)
            self._find_unsent()
            self._client, self._mlflow_run = client, run_id
        return self._client, self._mlflow_run

    def _reopen(self, client: MlflowClient, run_id: str) -> None:
        """Have the store show the run as running; if its process died, first close it as of the last sign of life."""
        running = client.get_run(run_id).info.status == "RUNNING"
        if self._died_ms is not None and self._begun and running:
            client.set_terminated(run_id, "KILLED", self._died_ms)
            client.set_tag(run_id, "grpoflow.last_killed_at", iso(self._died_ms))
            self._note(closed="KILLED", ended_ms=self._died_ms)
            running = False
        if self._closed or not running:
            client.update_run(run_id, status="RUNNING")
        client.set_tag(run_id, STATE_TAG, "running")
        self._died_ms = None

    def _known_run(self, client: MlflowClient) -> str | None:
        """The run of the log, if the store still has it."""
        if self._mlflow_run is None:
            return None
        try:
            client.get_run(self._mlflow_run)
        except Exception as error:
            if not is_refusal(error):
                raise
            self._sent, self._told, self._mlflow_run, self._documents = {}, False, None, {}
        return self._mlflow_run

    def _new_run(self, client: MlflowClient) -> str:
        """The run in the store, made if it is not there: a process that died before it noted it may have made it."""
        experiment = experiment_id(client, self._story["experiment"], self._story["artifacts"])
        ours = f"tags.`grpoflow.run_id` = '{_id_of_history(self._run)}'"
        found = client.search_runs([experiment], ours, max_results=1)
        if found:
            run_id: str = found[0].info.run_id
            self._begun = True
        else:
            tags = {
                "grpoflow.run_id": _id_of_history(self._run),
                "grpoflow.lineage": str(self._run.lineage),
                "grpoflow.folder": str(self._run.root),
            }
            started_ms = milliseconds(self._run.identity["created_at"])
            made = client.create_run(experiment, started_ms, tags, self._story["run_name"])
            run_id = made.info.run_id
        self._note(mlflow_run=run_id, experiment_id=experiment, uri=self.uri)
        return run_id

    def _tell(self, client: MlflowClient, run_id: str) -> None:
        """Send parameters, documents and data sets, once."""
        if self._told:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        params = [Param(name, value) for name, value in self._story["params"].items()]
        for part in _cut(params, PARAMS_PER_CALL):
            self._halving(part, lambda part: client.log_batch(run_id, params=part))
        for name in self._story["documents"]:
            path = self._run.document(name)
            if path.exists():
                self._halving([name], lambda _: client.log_artifact(run_id, str(path)))  # noqa: B023
        inputs = [
            DatasetInput(Dataset(**entry["dataset"]), [InputTag("mlflow.data.context", entry["context"])])
            for entry in self._story["datasets"]
        ]
        self._halving(inputs, lambda part: client.log_inputs(run_id, datasets=part))
        self._note(told=True)
        self._told = True

    def _send_late(self, client: MlflowClient, run_id: str) -> None:
        """Send documents that are made when a run ends, each time they are new."""
        while self.late:
            name = self.late[0]
            if self._is_unsent(name):
                path = self._run.document(name)
                digest = sha256_file(path)
                self._halving([name], lambda _: client.log_artifact(run_id, str(path)))  # noqa: B023
                self._note(document=name, digest=digest)
                self._documents[name] = digest
            self.late.popleft()

    def _is_unsent(self, name: str) -> bool:
        path = self._run.document(name)
        return path.is_file() and self._documents.get(name) != sha256_file(path)

    # ---------------------------------------------------------------------------------------------------- the metrics

    def _with_record(self) -> list[int]:
        first = [0] if self._run.step(0).record else []
        return first + self._run.finished_steps()

    def _find_unsent(self) -> None:
        """Put what earlier processes left before what this one has finished."""
        known = {*self.steps, *self._sent}
        self.steps.extendleft(index for index in reversed(self._with_record()) if index not in known)

    def _next_chunk(self) -> list[tuple[int, dict[str, Any]]]:
        """The next steps whose metrics fit into one call; at least one, if any is left to send."""
        chunk: list[tuple[int, dict[str, Any]]] = []
        count = 0
        while len(self.steps) > len(chunk):
            index = self.steps[len(chunk)]
            record = self._run.step(index).record
            as_sent = record and self._sent.get(index, {}).get("digest") == sha256_json(record["metrics"])
            if record is None or as_sent or index in (earlier for earlier, _ in chunk):
                del self.steps[len(chunk)]
                continue
            count += len(record["metrics"])
            if chunk and count > METRICS_PER_CALL:
                break
            chunk.append((index, record))
        return chunk

    def _metrics(self, index: int, record: dict[str, Any]) -> Iterator[Any]:
        """The step's values as MLflow takes them. A value that is no finite number is left out and noted by name."""
        from mlflow.entities import Metric

        timestamp = self._timestamp(index, record)
        used: set[str] = set()
        for name, value in record["metrics"].items():
            key = legal_name(name)
            if key in used:
                key = f"{key}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
            used.add(key)
            if value is None or not math.isfinite(value):
                self._no_value.setdefault(name, index)
            else:
                yield Metric(key, float(value), timestamp, index)

    def _timestamp(self, index: int, record: dict[str, Any]) -> int:
        """When the step finished; a step that is reported again keeps the time under which it is known."""
        known = self._sent.get(index)
        return known["timestamp"] if known else milliseconds(record["finished_at"])

    def _report_no_value(self, client: MlflowClient, run_id: str) -> None:
        """Keep the names of metrics that had no number, each with the first step at which it had none, as a tag."""
        if len(self._no_value) > self._no_value_told:
            text = json.dumps(self._no_value)[:5000]
            self._halving(["tag"], lambda _: client.set_tag(run_id, "grpoflow.no_value_since_step", text))
            self._no_value_told = len(self._no_value)

    def _halving(self, items: Sequence[T], send: Callable[[Sequence[T]], Any]) -> None:
        """Send items in one call; if the store refuses them, find the one it refuses and send the others."""
        if not items:
            return
        try:
            send(items)
        except Exception as error:
            if not is_refusal(error):
                raise
            if len(items) == 1:
                self._refused.append(f"{getattr(items[0], 'key', items[0])}: {first_line(error)}")
                return
            middle = len(items) // 2
            self._halving(items[:middle], send)
            self._halving(items[middle:], send)


def _id_of_history(run: Run) -> str:
    """The run's id; a lineage that went back is a run of its own in MLflow, so that a step has one value there."""
    return run.run_id if run.lineage == 1 else f"{run.run_id}~{run.lineage}"


def name_of_history(run: Run) -> str:
    name: str = run.identity["name"]
    return name if run.lineage == 1 else f"{name} (lineage {run.lineage})"


def _cut(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
