"""A run in MLflow: the only module that imports mlflow, and that on a thread of its own.

The run's folder is the spool. `tracking.json` holds what is told once, the steps' records hold the metrics, and
`tracking.jsonl` notes what has arrived: what MLflow misses is not lost, and `deliver_pending` brings it later. A step's
metrics always carry the time at which the step finished, so that sent twice they are one row. Nothing here fails a run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import posixpath
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from storage import Run, StorageError
from storage.durable import append_json_line, read_json_lines, sha256_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa
    from mlflow import MlflowClient

    from tasks.config import RunConfig
    from tasks.data import PreparedPrompts

T = TypeVar("T")
logger = logging.getLogger(__name__)

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
PARAM_CHARACTERS = 500
NAME_CHARACTERS = 250
LONGEST_PAUSE_S = 30.0

STATES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED", "crashed": "KILLED"}
"""MLflow's word for each state in which a run can be left."""

_FINAL_CODES = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
"""Error codes with which MLflow refuses a value; any other error may pass."""


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


class Tracker:
    """Sends a run to MLflow while it trains, without making it wait. Use it as a context manager."""

    def __init__(self, run: Run, cfg: RunConfig, say: Callable[[str], None] = logger.warning) -> None:
        self._run = run
        self._cfg = cfg
        self._say = say
        self._sender: _Sender | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._wake, self._closing = threading.Event(), threading.Event()
        self._final: tuple[str, int] | None = None
        self._problem: str | None = None
        self._away_since = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._wake.set()

    def start(
        self, params: Mapping[str, Any], documents: Sequence[str], datasets: Mapping[str, PreparedPrompts]
    ) -> None:
        """Say what the run is, and begin to send.

        Args:
            params: values to compare runs by, by dotted name.
            documents: names of texts in the run's folder that are kept with the run in MLflow.
            datasets: the prompts by their use, `train` or `val`.
        """
        if not self._cfg.tracking.enabled or self._sender is not None:
            return
        root = Path(self._cfg.storage.root).absolute()
        story = {
            "uri": self._cfg.tracking.uri or f"sqlite:///{root / 'mlflow.db'}",
            "artifacts": None if self._cfg.tracking.uri else (root / "mlflow-artifacts").as_uri(),
            "experiment": self._cfg.trainer.project_name,
            "run_name": self._run.identity["name"],
            "params": {legal_name(name): short_value(value) for name, value in params.items()},
            "documents": list(documents),
            "datasets": [_about_dataset(use, prompts) for use, prompts in datasets.items()],
        }
        write_json(self._run.root / "tracking.json", story)
        self._sender = _Sender(self._run, story)
        self._wake.set()
        self._thread.start()

    def step_finished(self, index: int) -> None:
        """Have a finished step's metrics sent; step 0 holds what came before training."""
        if self._sender is not None:
            self._sender.steps.append(index)
            self._wake.set()

    def finish(self, state: str) -> Delivery:
        """Send what is left within `tracking.flush_timeout_s`, close the run in MLflow, and say what is missing there.

        Args:
            state: `finished`, `failed` or `killed`.
        """
        if self._sender is None:
            return Delivery()
        self._final = (STATES[state], _now_ms())
        self._closing.set()
        self._wake.set()
        self._thread.join(self._cfg.tracking.flush_timeout_s)
        slow = f"it did not take everything within {self._cfg.tracking.flush_timeout_s:g} s (tracking.flush_timeout_s)"
        delivery = self._sender.delivery(self._problem or (slow if self._thread.is_alive() else None))
        for line in _missing(delivery, self._run.root):
            self._say(line)
        return delivery

    def _work(self) -> None:
        assert self._sender is not None
        pause_s = 1.0
        while True:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._sender.send()
                if self._final is not None:
                    self._sender.close(*self._final)
            except Exception as error:
                self._went_away(error)
                if closing:
                    return
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._wake.set()
            else:
                self._came_back()
                pause_s = 1.0
                if closing:
                    return

    def _went_away(self, error: Exception) -> None:
        assert self._sender is not None
        logger.debug("MLflow", exc_info=error)
        if self._problem is None:
            self._away_since = time.monotonic()
            self._say(
                f"MLflow at {self._sender.uri} does not answer ({_first_line(error)}). Training goes on without it"
            )
        self._problem = _first_line(error)

    def _came_back(self) -> None:
        if self._problem is not None:
            self._problem = None
            self._say(
                f"MLflow answers again after {time.monotonic() - self._away_since:.0f} s and has got what it missed"
            )


def deliver_pending(run: Run, uri: str | None = None) -> Delivery:
    """Send what MLflow has missed of a run that no process writes to, and close the run there.

    Args:
        run: the run.
        uri: another store than the run's own.

    Raises:
        StorageError: a live process writes to the run; it sends for itself.
    """
    if (owner := run.owner()) is not None:
        raise StorageError(f"{run.root} is being written by process {owner.get('pid')}, which sends to MLflow itself")
    path = run.root / "tracking.json"
    if not path.exists():
        return Delivery()
    sender = _Sender(run, json.loads(path.read_text()) | ({"uri": uri, "artifacts": None} if uri else {}))
    problem = None
    try:
        sender.send_rest(STATES.get(run.state, "KILLED"), _ended_ms(run))
    except Exception as error:
        logger.debug("MLflow", exc_info=error)
        problem = _first_line(error)
    return sender.delivery(problem)


class _Sender:
    """Brings a run's folder to an MLflow store. Every call goes on where the last one, or another process, stopped."""

    def __init__(self, run: Run, story: dict[str, Any]) -> None:
        self.uri: str = story["uri"]
        self.steps: deque[int] = deque()
        self._run = run
        self._story = story
        self._log = run.root / "tracking.jsonl"
        self._client: MlflowClient | None = None
        self._mlflow_run: str | None = None
        self._told = False
        self._closed: str | None = None
        self._sent: dict[int, dict[str, Any]] = {}
        self._refused: list[str] = []
        self._no_value: dict[str, int] = {}
        self._no_value_told = 0
        self._read_log()

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

    def close(self, state: str, ended_ms: int) -> None:
        """Give the run its last state and end time."""
        client, run_id = self._connected()
        client.set_terminated(run_id, state, ended_ms)
        self._note(closed=state)

    def send_rest(self, state: str, ended_ms: int) -> None:
        """Send and close, unless everything is there."""
        self._find_unsent()
        if self.steps or not self._told or self._closed != state:
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

    def _read_log(self) -> None:
        for line in read_json_lines(self._log):
            if "mlflow_run" in line:
                same = line["uri"] == self.uri
                self._mlflow_run = line["mlflow_run"] if same else None
                self._sent, self._told, self._closed = {}, False, None
            elif "step" in line and self._mlflow_run:
                self._sent[line["step"]] = line
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
            client = _client(self.uri)
            run_id = self._known_run(client) or self._new_run(client)
            if self._closed or client.get_run(run_id).info.status != "RUNNING":
                client.update_run(run_id, status="RUNNING")
            self._find_unsent()
            self._client, self._mlflow_run = client, run_id
        return self._client, self._mlflow_run

    def _known_run(self, client: MlflowClient) -> str | None:
        """The run of the log, if the store still has it."""
        if self._mlflow_run is None:
            return None
        try:
            client.get_run(self._mlflow_run)
        except Exception as error:
            if not _is_refusal(error):
                raise
            self._sent, self._told, self._mlflow_run = {}, False, None
        return self._mlflow_run

    def _new_run(self, client: MlflowClient) -> str:
        """The run in the store, made if it is not there: a process that died before it noted it may have made it."""
        experiment = self._experiment(client)
        ours = f"tags.`grpoflow.run_id` = '{self._run.run_id}'"
        found = client.search_runs([experiment], ours, max_results=1)
        if found:
            run_id: str = found[0].info.run_id
        else:
            tags = {"grpoflow.run_id": self._run.run_id, "grpoflow.folder": str(self._run.root)}
            started_ms = _milliseconds(self._run.identity["created_at"])
            made = client.create_run(experiment, started_ms, tags, self._story["run_name"])
            run_id = made.info.run_id
        self._note(mlflow_run=run_id, experiment_id=experiment, uri=self.uri)
        return run_id

    def _experiment(self, client: MlflowClient) -> str:
        """Id of the experiment; of several processes that make it at once, one does and the others use it."""
        name = self._story["experiment"]
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return client.create_experiment(name, artifact_location=self._story["artifacts"])
            except Exception as error:
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise error
        if found.lifecycle_stage != "active":
            raise RuntimeError(f"experiment {name!r} is deleted; restore it or set another trainer.project_name")
        return found.experiment_id

    def _tell(self, client: MlflowClient, run_id: str) -> None:
        """Send parameters, documents and data sets, once."""
        if self._told:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        params = [Param(name, value) for name, value in self._story["params"].items()]
        for part in _cut(params, PARAMS_PER_CALL):
            self._halving(part, lambda part: client.log_batch(run_id, params=part))
        for name in self._story["documents"]:
            path = self._run.root / name
            if path.exists():
                self._halving([name], lambda _: client.log_artifact(run_id, str(path)))  # noqa: B023
        inputs = [
            DatasetInput(Dataset(**entry["dataset"]), [InputTag("mlflow.data.context", entry["context"])])
            for entry in self._story["datasets"]
        ]
        self._halving(inputs, lambda part: client.log_inputs(run_id, datasets=part))
        self._note(told=True)
        self._told = True

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
        return known["timestamp"] if known else _milliseconds(record["finished_at"])

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
            if not _is_refusal(error):
                raise
            if len(items) == 1:
                self._refused.append(f"{getattr(items[0], 'key', items[0])}: {_first_line(error)}")
                return
            middle = len(items) // 2
            self._halving(items[:middle], send)
            self._halving(items[middle:], send)


# --------------------------------------------------------------------------------------------------- MLflow's rules


def legal_name(name: str) -> str:
    """A name as MLflow takes it: letters, digits and `_ - . space : /`.

    `@` is written `_at_`, as verl does (`val-core/gsm8k/acc/mean@4` becomes `…/mean_at_4`); anything else becomes `_`.
    """
    legal = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name.replace("@", "_at_"))
    legal = posixpath.normpath(legal.strip("/")).removeprefix("../") or "_"
    if len(legal) > NAME_CHARACTERS:
        legal = f"{legal[: NAME_CHARACTERS - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return legal if legal not in (".", "..") else "_"


def short_value(value: Any) -> str:
    """A parameter's value as text; a long one is cut and carries its length and digest."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= PARAM_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
    ending = f" … ({len(text)} characters, SHA-256 {digest}; all of it is in config.yaml)"
    return text[: PARAM_CHARACTERS - len(ending)] + ending


def _about_dataset(use: str, prompts: PreparedPrompts) -> dict[str, Any]:
    """MLflow's description of a data set: name, digest, source, schema, profile."""
    files = [asdict(file) for file in prompts.files]
    source = {"uri": files[0]["path"] if files else "", "files": files[:100], "file_count": len(files)}
    return {
        "context": {"train": "training", "val": "validation"}.get(use, use),
        "dataset": {
            "name": Path(files[0]["path"]).name if files else use,
            "digest": prompts.digest[:36],
            "source_type": "local",
            "source": json.dumps(source),
            "schema": json.dumps({"mlflow_colspec": [_column(field) for field in prompts.table.schema]}),
            "profile": json.dumps({"num_rows": prompts.table.num_rows, **prompts.counts}),
        },
    }


def _column(field: pa.Field) -> dict[str, Any]:
    words = {"int32": "integer", "int64": "long", "float": "float", "double": "double", "bool": "boolean"}
    kind = str(field.type)
    if "list" in kind:
        return {
            "name": field.name,
            "type": "array",
            "items": {"type": words.get(str(field.type.value_type), "string")},
            "required": not field.nullable,
        }
    return {"name": field.name, "type": words.get(kind, "string"), "required": not field.nullable}


def _client(uri: str) -> MlflowClient:
    """A client that reports nothing home and leaves waiting to its caller."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    for chatty in ("mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    with _sole_opener(uri):
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


@contextmanager
def _sole_opener(uri: str) -> Iterator[None]:
    """Let one process at a time open a SQLite store: the first makes its tables, which the others would disturb."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = Path(uri.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_refusal(error: Exception) -> bool:
    return getattr(error, "error_code", None) in _FINAL_CODES


def _missing(delivery: Delivery, folder: Path) -> Iterator[str]:
    """Sentences about what has not arrived."""
    if delivery.problem is not None:
        steps = f"{len(delivery.waiting)} steps" if delivery.waiting else "the run's last state"
        yield (
            f"MLflow at {delivery.uri} has not got {steps} ({delivery.problem}). "
            f"Nothing is lost: they are kept in {folder} and can be sent later"
        )
    if delivery.refused:
        yield f"MLflow refused {len(delivery.refused)} values, the first: {delivery.refused[0]}"


def _cut(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)


def _now_ms() -> int:
    return int(time.time() * 1000)


def _ended_ms(run: Run) -> int:
    """When a run that nobody writes to was left: the last moment its ledger or a step's record tells of."""
    moments = [event["at"] for event in run.events()[-1:]]
    moments += [record["finished_at"] for index in run.steps()[-1:] if (record := run.step(index).record)]
    return max(map(_milliseconds, moments), default=_now_ms())
