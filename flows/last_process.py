"""What became of the process that wrote a run before: it closed the run, or it died without a word."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from storage import Run, StorageError

_WRITTEN_WHILE_TRAINING = {"opened", "alarm", "checkpoint", "damaged"}


@dataclass(frozen=True)
class Death:
    """The end of a process that closed nothing.

    Attributes:
        at: its last sign of life: an event, a finished step or a committed artifact, whichever is newest.
        step: the step that it was in or had just finished; 0: none.
        committed: names of that step's artifacts.
        finished: whether that step was finished.
    """

    at: datetime
    step: int
    committed: tuple[str, ...]
    finished: bool

    @property
    def words(self) -> str:
        """One sentence for people."""
        when = self.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        if self.step == 0:
            where = "before its first step"
        elif self.finished:
            where = f"after step {self.step}"
        else:
            where = f"in step {self.step} after {', '.join(self.committed) or 'nothing'}"
        return f"the process that wrote this run died without a word, last seen at {when} {where}: it counts as killed"


def events_of_history(run: Run) -> list[dict[str, Any]]:
    """The run's events, oldest first, up to where a later lineage took it up."""
    events = run.events()
    left = (
        place for place, event in enumerate(events) if event["event"] == "lineage" and event["lineage"] > run.lineage
    )
    return events[: next(left, None)]


def death_of_last_process(run: Run) -> Death | None:
    """How the last process died that opened the run for training; None: it closed the run, or there was none.

    Ask before the present process writes `opened`: else the answer is about the present one.
    """
    events = events_of_history(run)
    told = [event for event in events if event["event"] in ("opened", "closed")]
    if not told or told[-1]["event"] == "closed":
        return None
    moments = [datetime.fromisoformat(event["at"]) for event in events if event["event"] in _WRITTEN_WHILE_TRAINING]
    steps = (run.step(index) for index in reversed(run.steps()) if index)
    try:
        step = next((step for step in steps if step.record or step.stages()), None)
        if step is None:
            return Death(max(moments), 0, (), False)
        committed = {stage: manifest for stage in step.stages() if (manifest := step.manifest(stage))}
        record = step.record
    except StorageError:  # what is damaged is found, and said, by whoever needs it
        return Death(max(moments), 0, (), False)
    moments += [manifest.committed_at for manifest in committed.values()]
    moments += [datetime.fromisoformat(record["finished_at"])] if record else []
    return Death(max(moments), step.index, tuple(committed), record is not None)
