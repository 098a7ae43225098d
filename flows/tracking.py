"""A run's numbers on their way to MLflow, sent by a thread of their own while it trains.

The run's folder is the spool. `tracking.json` holds what is told once, the steps' records hold the metrics, and
`tracking.jsonl` notes what has arrived: what MLflow misses is not lost, and `deliver_pending` brings it later. A step's
metrics always carry the time at which the step finished, so that sent twice they are one row. Nothing here fails a run.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flows.last_process import death_of_last_process, events_of_history
from flows.mlflow_sender import LATE_DOCUMENTS, Delivery, Sender, name_of_history
from flows.mlflow_store import first_line, legal_name, milliseconds, now_ms, short_value
from storage import Run, StorageError, open_run
from storage.durable import read_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.config import RunConfig
    from tasks.data import PreparedPrompts

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0

CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Environment variables that MLflow's client sends to whatever server it talks to."""

STATES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED", "paused": "SCHEDULED"}
"""MLflow's word for each state in which a process leaves a run; one that dies without a word leaves it KILLED.

A paused run is to go on: of MLflow's words only SCHEDULED says so. The run's tag `grpoflow.state` has our own word.
"""


class Tracker:
    """Sends a run to MLflow while it trains, without making it wait. Use it as a context manager."""

    def __init__(self, run: Run, cfg: RunConfig, say: Callable[[str], None] = logger.warning) -> None:
        self._run = run
        self._cfg = cfg
        self._say = say
        self._sender: Sender | None = None
        self._death = death_of_last_process(run)
        if self._death is not None:
            say(self._death.words)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._wake, self._closing = threading.Event(), threading.Event()
        self._final: tuple[str, int] | None = None
        self._unsettled = [open_run(run.root, lineage=number) for number in range(1, run.lineage)]
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
        root = self._cfg.storage.folder.absolute()
        story = {
            "uri": self._cfg.tracking.uri or f"sqlite:///{root / 'mlflow.db'}",
            "artifacts": None if self._cfg.tracking.uri else (root / "mlflow-artifacts").as_uri(),
            "experiment": self._cfg.trainer.project_name,
            "run_name": name_of_history(self._run),
            "params": {legal_name(name): short_value(value) for name, value in params.items()},
            "documents": list(documents),
            "datasets": [_about_dataset(use, prompts) for use, prompts in datasets.items()],
        }
        write_json(self._run.document("tracking.json"), story)
        died_ms = None if self._death is None else _ms(self._death.at)
        self._sender = Sender(self._run, story, died_ms)
        self._wake.set()
        self._thread.start()

    def step_finished(self, index: int) -> None:
        """Have a finished step's metrics sent; step 0 holds what came before training."""
        if self._sender is not None:
            self._sender.steps.append(index)
            self._wake.set()

    @property
    def keeps_report(self) -> bool:
        """Whether MLflow is to have a report of the run."""
        return self._sender is not None and self._cfg.tracking.report

    def finish(self, state: str) -> Delivery:
        """Send what is left within `tracking.flush_timeout_s`, close the run in MLflow, and say what is missing there.

        Args:
            state: `finished`, `failed`, `killed` or `paused`.
        """
        if self._sender is None:
            return Delivery()
        self._sender.late.extend(LATE_DOCUMENTS)
        self._final = (STATES[state], now_ms())
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
                self._settle_earlier_lineages()
                self._sender.send()
                if closing and self._final is not None:
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

    def _settle_earlier_lineages(self) -> None:
        """Bring what lineages that were left for this one still owe, and close their runs."""
        while self._unsettled:
            if (sender := _sender_of(self._unsettled[0])) is not None:
                sender.send_rest(*_end_of(self._unsettled[0]))
            del self._unsettled[0]

    def _went_away(self, error: Exception) -> None:
        assert self._sender is not None
        logger.debug("MLflow", exc_info=error)
        if self._problem is None:
            self._away_since = time.monotonic()
            self._say(
                f"MLflow at {self._sender.uri} does not answer ({first_line(error)}). Training goes on without it"
            )
        self._problem = first_line(error)

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
    sender, problem = None, None
    for history in (open_run(run.root, lineage=number) for number in range(1, run.lineage + 1)):
        if (sender := _sender_of(history, uri) or sender) is None:
            continue
        try:
            sender.send_rest(*_end_of(history))
        except Exception as error:
            logger.debug("MLflow", exc_info=error)
            problem = first_line(error)
            break
    return sender.delivery(problem) if sender else Delivery()


def _sender_of(run: Run, uri: str | None = None) -> Sender | None:
    """For what a history still owes; None: it is not tracked."""
    path = run.document("tracking.json")
    if not path.exists():
        return None
    story = read_json(path)
    outside = [name for name in story.get("documents", ()) if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise StorageError(f"{path} names files that are not the run's: {outside[0]!r}. Restore it from a copy.")
    return Sender(run, story | ({"uri": uri, "artifacts": None} if uri else {}))


def refuse_other_server(run: Run) -> None:
    """Refuse to take the credentials in this environment to a server that only the run's own files name.

    A run may come from somebody else, and its `tracking.json` with it.

    Raises:
        ValueError: it names another server than MLFLOW_TRACKING_URI.
    """
    secrets = [name for name in CREDENTIALS if os.environ.get(name)]
    path = run.document("tracking.json")
    uri = str(read_json(path).get("uri", "")) if path.exists() else ""
    known = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if secrets and uri.startswith(("http://", "https://")) and uri.rstrip("/") != known:
        raise ValueError(
            f"{path} names {uri}, and {', '.join(secrets)} of this environment would be sent there. Say that it is "
            f"yours: --uri {uri}, or set MLFLOW_TRACKING_URI to it."
        )


def _end_of(run: Run) -> tuple[str, int]:
    """How a history ended that nobody writes to: MLflow's word for its state, and when, in ms since 1970."""
    if (death := death_of_last_process(run)) is not None:
        return "KILLED", _ms(death.at)
    closed = [event for event in events_of_history(run) if event["event"] == "closed"]
    return (STATES[closed[-1]["state"]], milliseconds(closed[-1]["at"])) if closed else ("KILLED", now_ms())


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


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
