"""What schedules keep in a folder of runs: locks, logs, and which flow run began which run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from storage.durable import read_json, write_json


@dataclass(frozen=True)
class Begun:
    """One start of a schedule.

    Attributes:
        name: of the run.
        flow_run_id: Prefect's id of the flow run that began it.
        due: its time, ISO 8601.
        command: the process's command line.
        log: what the process printed.
        began: when the process was started, ISO 8601.
        ended: when it ended; None: it has not, or nobody saw it end.
        state: Prefect's state that came of it.
        message: what was said of its end.
    """

    name: str
    flow_run_id: str
    due: str
    command: tuple[str, ...]
    log: str
    began: str
    ended: str | None = None
    state: str | None = None
    message: str | None = None


class Places:
    """The folder of one schedule, `<storage.root>/.schedules/<name>`."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.all = Path(root) / ".schedules"
        self.folder = self.all / name

    def busy(self, group: str | None) -> Path:
        """Folder of the slot that the running process of this schedule, or of its group, holds."""
        return self.folder / "busy" if group is None else self.all / f"group-{group}"

    @property
    def served(self) -> Path:
        """Folder of the slot that the process holds which serves the schedule."""
        return self.folder / "served"

    def log(self, run_name: str) -> Path:
        """Where the process of a run prints to."""
        path = self.folder / "logs" / f"{run_name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def begun(self, run_name: str) -> Begun | None:
        """The last start of the run with this name."""
        path = self._record(run_name)
        try:
            return _read(path)
        except FileNotFoundError:
            return None

    def last(self) -> Begun | None:
        """The schedule's newest start."""
        found = [_read(path) for path in (self.folder / "runs").glob("*.json")]
        return max(found, key=lambda one: one.began, default=None)

    def write(self, begun: Begun, **changes: Any) -> Begun:
        """Keep what is known of a start."""
        begun = replace(begun, **changes)
        path = self._record(begun.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(begun))
        return begun

    @contextmanager
    def alive(self, flow_run_id: str) -> Iterator[None]:
        """Say, as long as the block lasts and this process lives, that the flow run has a process."""
        path = self._life(flow_run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def is_alive(self, flow_run_id: str) -> bool:
        """Whether a flow run has a process on this machine."""
        try:
            descriptor = os.open(self._life(flow_run_id), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _record(self, run_name: str) -> Path:
        return self.folder / "runs" / f"{run_name}.json"

    def _life(self, flow_run_id: str) -> Path:
        return self.folder / "alive" / flow_run_id


def local(text: str) -> str:
    """A time of a record, for people."""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _read(path: Path) -> Begun:
    values = read_json(path)
    return Begun(**{**values, "command": tuple(values["command"])})
