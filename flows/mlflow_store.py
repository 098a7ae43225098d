"""MLflow's stores and their rules: opened by one process at a time, names and values that they take, refusals.

Of the modules `mlflow_*.py`, which alone import mlflow, all do so late: it takes seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARAM_CHARACTERS = 500
NAME_CHARACTERS = 250

_FINAL_CODES = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
"""Error codes with which MLflow refuses a value; any other error may pass."""


def open_store(uri: str) -> MlflowClient:
    """A client that reports nothing home and leaves waiting to its caller."""
    say_little()
    from mlflow import MlflowClient

    with _sole_opener(uri) as store:
        if store is not None and not store.exists():
            _make_store(store)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def say_little() -> None:
    """Keep MLflow from reporting home, from retrying by itself and from talking; call before it is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for chatty in ("mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.ERROR)


_OPENERS_LOCK = 0x6772706F
"""Key of the advisory lock in PostgreSQL under which one process at a time opens a store."""


@contextmanager
def _sole_opener(uri: str) -> Iterator[Path | None]:
    """Let one process at a time open a store in a database, where the first makes the tables; yield SQLite's file.

    MLflow makes and changes its tables without regard for others that do so.
    """
    if uri.startswith("postgresql"):
        from sqlalchemy import create_engine, text
        from sqlalchemy.pool import NullPool

        # The lock ends with the connection, however this process does.
        with create_engine(uri, poolclass=NullPool).connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _OPENERS_LOCK})
            yield None
        return
    if not uri.startswith("sqlite:///") or "?" in uri:
        yield None
        return
    path = Path(uri.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def _make_store(path: Path) -> None:
    """Make the tables aside: MLflow takes seconds for them, and cannot open what a kill in the middle has left."""
    from mlflow import MlflowClient

    aside = path.with_name(f".{path.name}.aside")
    for left in path.parent.glob(f"{aside.name}*"):
        left.unlink()
    MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
    aside.rename(path)


def experiment_id(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Id of an experiment; of several processes that make it at once, one does and the others use it."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=artifacts)
        except Exception as error:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise error
    if found.lifecycle_stage != "active":
        raise RuntimeError(f"experiment {name!r} is deleted; restore it or set another trainer.project_name")
    return found.experiment_id


# ------------------------------------------------------------------------------------------------- names, values, times


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


def is_refusal(error: Exception) -> bool:
    return getattr(error, "error_code", None) in _FINAL_CODES


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)


def now_ms() -> int:
    return int(time.time() * 1000)


def iso(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).isoformat(timespec="milliseconds")
