"""A sweep's folder: its file, its ledger of decisions and results, its runs' configurations, its one writer's lock.

    sweep.json  ledger.jsonl  lock  study.log  report.html
    configs/0003-s1.yaml                       the whole configuration of a run
    logs/0003-s1.log                           what the process of a run printed

The runs themselves lie beside other runs, as `<storage.root>/<project>/<sweep>-0003-s1`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from flows.sweep.board import Advance, Board, Result, Trial
from flows.sweep.spec import SweepSpec
from storage import Run, StorageError, open_run
from storage.copies import copy_of, local_folder, refresh
from storage.durable import append_json_line, full_disk_told, read_json, read_json_lines, write_json
from storage.mirror import mirror_of, mirrored
from storage.object_store import is_url
from tasks.config import RunConfig

ENDING = ".sweep"
"""Of a sweep's folder."""

HARMLESS = ("slots", "devices_per_slot", "threads_per_slot", "budget", "optuna_storage")
"""What of a sweep's file may change when the sweep goes on: nothing that a decision was made from."""


@dataclass(frozen=True)
class Attempt:
    """One process that trained a run for a decision.

    Attributes:
        advance: index of the decision.
        seed: of the run.
        started_at: when it was started.
        ended_at: when its end was noticed; None: it runs, or nobody was there to notice.
        end: `reached`, `died`, `stopped`, `failed`, or None.
        reason: in words; None: it reached its step.
        seconds: how long it ran.
        finished_steps: of the run, when the process had ended.
    """

    advance: int
    seed: int
    started_at: datetime
    ended_at: datetime | None = None
    end: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    finished_steps: int = 0


class Sweep:
    """A sweep's folder, for reading. `open_sweep` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        try:
            about = read_json(self.folder / "sweep.json")
            self.sweep_id: str = about["sweep_id"]
            self.total: int = about["total_steps"]
            self.project: str = about["project"]
            self.begun_spec = SweepSpec.model_validate(about["spec"])
            self.base = RunConfig.model_validate(about["base"])
            self.created_at = datetime.fromisoformat(about["created_at"])
        except FileNotFoundError:
            raise StorageError(f"{folder} is no sweep: it has no sweep.json") from None
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.folder / 'sweep.json'} is damaged: {error!r}") from error

    def events(self) -> list[dict[str, Any]]:
        """The ledger, oldest first."""
        return [line for line in read_json_lines(self.folder / "ledger.jsonl") if "event" in line and "at" in line]

    @property
    def spec(self) -> SweepSpec:
        """The sweep's file as it was last given."""
        changed = [event["spec"] for event in self.events() if event["event"] == "opened"]
        return SweepSpec.model_validate(changed[-1]) if changed else self.begun_spec

    def board(self) -> Board:
        """The decisions and results so far."""
        board = Board(self.spec, self.total)
        for event in self.events():
            if event["event"] == "trial":
                board.trials.append(Trial(event["number"], event["values"], event["refused"], event["same_as"]))
            elif event["event"] == "advance":
                board.advances.append(Advance(event["index"], event["trial"], event["until"]))
            elif event["event"] == "result":
                result = Result(event["value"], event["failed"], event["best_step"])
                board.results[event["advance"], event["seed"]] = result
        return board

    def attempts(self) -> list[Attempt]:
        """Every process that was started for a run, oldest first."""
        found: dict[tuple[int, int, int], Attempt] = {}
        for event in self.events():
            if event["event"] not in ("started", "ended"):
                continue
            key = (event["advance"], event["seed"], event["attempt"])
            if event["event"] == "started":
                found[key] = Attempt(event["advance"], event["seed"], datetime.fromisoformat(event["at"]))
            else:
                found[key] = Attempt(
                    event["advance"],
                    event["seed"],
                    found[key].started_at,
                    datetime.fromisoformat(event["at"]),
                    event["end"],
                    event["reason"],
                    event["seconds"],
                    event["finished_steps"],
                )
        return list(found.values())

    @property
    def told_state(self) -> str:
        """What the process that runs the sweep said last: `running`, `finished`, or `stopped`."""
        told = [event["state"] for event in self.events() if event["event"] in ("opened", "closed")]
        return told[-1] if told else "running"

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped` (told to end, or out of budget), or `crashed`."""
        if self.owner() is not None:
            return "running"
        return "crashed" if self.told_state == "running" else self.told_state

    def owner(self) -> dict[str, Any] | None:
        """The live process that runs this sweep; None: there is none."""
        try:
            with (self.folder / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            text = (self.folder / "lock").read_text()
            return json.loads(text) if text.startswith("{") else {}
        copy = copy_of(self.folder)
        return copy.owner() if copy else None

    def run_name(self, trial: int, seed: int) -> str:
        """Name of the run of a trial with a seed."""
        return f"{self.begun_spec.name}-{trial:04d}-s{seed}"

    def run_folder(self, trial: int, seed: int) -> Path:
        """Where that run lies."""
        return self.base.storage.folder / self.project / self.run_name(trial, seed)

    def run(self, trial: int, seed: int) -> Run | None:
        """That run; None: it has not begun."""
        folder = self.run_folder(trial, seed)
        refresh(folder)
        return open_run(folder) if (folder / "run.json").is_file() else None

    def finished_steps(self, trial: int, seed: int) -> int:
        """Steps that it has finished."""
        run = self.run(trial, seed)
        return max(run.finished_steps(), default=0) if run else 0


class SweepWriter(Sweep):
    """A sweep's folder in the hands of its one writer, within `writing`."""

    def append(self, event: str, **values: Any) -> None:
        """Add an event to the ledger."""
        with full_disk_told(self.folder, "the ledger of the sweep"):
            append_json_line(self.folder / "ledger.jsonl", {"event": event, "at": _now(), **values})
        mirror = mirror_of(self.folder)
        if mirror is not None:
            for pattern in ("configs/*", "logs/*", "*"):
                mirror.scan(pattern)


def sweep_folder(spec: SweepSpec, base: RunConfig) -> Path:
    """Where a sweep lies."""
    return base.storage.folder / base.trainer.project_name / f"{spec.name}{ENDING}"


def open_sweep(path: str | Path) -> Sweep:
    """Open a sweep's folder for reading.

    Raises:
        StorageError: there is none.
    """
    if is_url(path):
        path = local_folder(str(path))
    refresh(Path(path))
    return Sweep(Path(path))


@contextmanager
def writing(spec: SweepSpec, base: RunConfig, total: int) -> Iterator[SweepWriter]:
    """Make a sweep's folder, or take up the sweep that is in it, as its one writer.

    Args:
        spec: the sweep as its file says it now.
        base: the configuration that trials start from, with absolute paths and with model and data made.
        total: steps of a whole run.

    Raises:
        StorageError: another process runs it, or its file means something else than when it was begun.
    """
    folder = sweep_folder(spec, base)
    folder.mkdir(parents=True, exist_ok=True)
    with mirrored(folder), (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = Sweep(folder).owner() or {}
            raise StorageError(
                f"sweep {spec.name} is being run by process {owner.get('pid', '?')} on {owner.get('host', '?')}: "
                f"{folder}. Wait for it, stop it, or give this sweep another name. `grpoflow sweep status` shows it."
            ) from None
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}))
        file.flush()
        if not (folder / "sweep.json").exists():
            write_json(folder / "sweep.json", _about(spec, base, total))
        sweep = SweepWriter(folder)
        _refuse_other_meaning(sweep, spec, base, total)
        sweep.append("opened", state="running", spec=spec.model_dump(mode="json"))
        yield sweep


def _about(spec: SweepSpec, base: RunConfig, total: int) -> dict[str, Any]:
    return {
        "sweep_id": f"{spec.name}-{uuid4().hex[:8]}",
        "created_at": _now(),
        "project": base.trainer.project_name,
        "total_steps": total,
        "spec": spec.model_dump(mode="json"),
        "base": base.model_dump(mode="json"),
    }


def _refuse_other_meaning(sweep: Sweep, spec: SweepSpec, base: RunConfig, total: int) -> None:
    """A sweep goes on with the file it was begun with, but for what no decision was made from."""
    then, now = sweep.begun_spec.model_dump(mode="json"), spec.model_dump(mode="json")
    if then["parallel_trials"] is None and sweep.begun_spec.width != spec.width:
        now["slots"] = f"{spec.slots} (set parallel_trials={sweep.begun_spec.width} to go on with other slots)"
        differ = ["slots"]
    else:
        differ = []
    differ += [name for name in then if name not in HARMLESS and then[name] != now[name]]
    changes = [f"{name} was {then[name]!r}, is {now[name]!r}" for name in differ]
    old, new = _leaves(sweep.base.model_dump(mode="json")), _leaves(base.model_dump(mode="json"))
    changes += [f"{key} was {old.get(key)!r}, is {new[key]!r}" for key in new if new[key] != old.get(key)]
    changes += [f"a whole run had {sweep.total} steps, has {total}"] if sweep.total != total else []
    if changes:
        raise StorageError(
            f"sweep {spec.name} in {sweep.folder} was begun otherwise: {'; '.join(changes[:5])}. Give the changed "
            f"sweep another name, or restore its file; only {', '.join(HARMLESS)} may change when a sweep goes on."
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(_leaves(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
