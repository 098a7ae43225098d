"""What the small files of a run must say before anything is done with them: lineages, identity, records, events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from storage.schema import KIND, SCHEMAS, schema_of, without_round

STAGES = (*SCHEMAS, *KIND)
"""Names of all artifacts a step can have; those of several generate calls carry a number behind the name."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")


@dataclass(frozen=True)
class Lineage:
    """One history of a run. The first begins with the run; each other one where an earlier one was gone back to.

    Attributes:
        number: from 1.
        parent: the lineage that it branches off; None: the first.
        step: first step that it makes itself.
        stage: first stage of that step that it makes itself; None: all of them.
        changes: configuration keys that differ from the parent's, with both values.
        config: its resolved configuration as JSON values; None: that of `config.yaml`.
    """

    number: int
    parent: int | None = None
    step: int = 0
    stage: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None

    def file_name(self, name: str) -> str:
        """Name of this lineage's file beside those of the others: `step.json`, `step-0002.json`."""
        stem, dot, ending = name.partition(".")
        return name if self.number == 1 else f"{stem}-{self.number:04d}{dot}{ending}"


AFTER = {
    "prompts": ("rollouts", "greedy_rollouts"),
    "rollouts": ("old_log_probs", "ref_log_probs", "rewards"),
    "greedy_rollouts": ("greedy_rewards",),
    "greedy_rewards": ("advantages",),
    "old_log_probs": ("advantages", "updates"),
    "ref_log_probs": ("advantages", "updates"),
    "rewards": ("advantages",),
    "advantages": ("updates",),
    "updates": ("val_prompts", "val_rollouts", "val_rewards"),
}
"""Artifacts that are made from an artifact of the same step."""


def depends_on(stage: str, first: str) -> bool:
    """Whether an artifact is made from another one of its step, or is that one."""
    stage, first = without_round(stage), without_round(first)
    return stage == first or any(depends_on(stage, after) for after in AFTER.get(first, ()))


LINEAGE: TypeAdapter[Lineage] = TypeAdapter(Lineage)


class _Identity(TypedDict):
    """What a `run.json` must say; both names become parts of paths."""

    run_id: Annotated[str, Field(pattern=rf"^{RUN_NAME.pattern}$")]
    name: Annotated[str, Field(pattern=rf"^{RUN_NAME.pattern}$")]
    created_at: str
    documents: NotRequired[dict[str, str]]
    origin: NotRequired[dict[str, Any]]


class _Record(TypedDict):
    """What a finished step's record must say."""

    metrics: dict[str, float | None]
    artifacts: NotRequired[dict[str, str]]
    finished_at: NotRequired[datetime]


IDENTITY, RECORD = TypeAdapter(_Identity), TypeAdapter(_Record)

_MUST_SAY: dict[str, dict[str, type]] = {
    "opened": {"state": str},
    "closed": {"state": str},
    "config_changed": {"changes": dict},
    "reward_functions": {"digest": str},
    "lineage": {"lineage": int},
    "damaged": {"stage": str, "reason": str},
}
"""Members of events that are read; a line without them is no event."""


def is_event(line: Mapping[str, Any]) -> bool:
    event = line.get("event")
    try:
        if not isinstance(event, str) or datetime.fromisoformat(line["at"]).tzinfo is None:
            return False
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(line.get(name), kind) for name, kind in _MUST_SAY.get(event, {}).items())


def artifact_name(stage: str) -> str:
    """The name, which becomes a folder's; ValueError where no artifact has it."""
    schema_of(stage)
    return stage
