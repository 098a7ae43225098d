"""The planner: the shape of a step's work from the configuration and the sizes of the data. Pure: no tensors, no I/O.

Counts are in numbers.py, refusals in shape_rules.py, content_rules.py and algorithm_rules.py, warnings in warnings.py
and no_effect.py, the stage table in stages.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from tasks.config import RunConfig
from tasks.geometry.algorithm_rules import ALGORITHM_RULES
from tasks.geometry.content_rules import CONTENT_RULES
from tasks.geometry.numbers import Cut, Facts, Mesh, ModelLimits, Numbers, count
from tasks.geometry.problems import Nearest, PlanWarning, Problem, find_problems, with_value
from tasks.geometry.shape_rules import SHAPE_RULES
from tasks.geometry.stages import StageShape, stage_shapes
from tasks.geometry.warnings import find_warnings

__all__ = [
    "Cut",
    "Mesh",
    "ModelLimits",
    "Nearest",
    "Plan",
    "PlanError",
    "PlanWarning",
    "Problem",
    "StageShape",
    "checked_plan",
    "plan",
    "with_value",
]


@dataclass(frozen=True)
class Plan(Numbers):
    """The planner's answer. Its numbers hold as far as they are defined, even where there are problems."""

    stages: tuple[StageShape, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[PlanWarning, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        answer = asdict(self)
        answer["stages"] = [{**asdict(one), "padded_bytes": one.padded_bytes} for one in self.stages]
        return answer

    def counts(self) -> dict[str, int | float | bool]:
        """The single numbers by name, for a tracker's parameters."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}


class PlanError(ValueError):
    """A configuration that cannot be trained, with every problem it has."""

    def __init__(self, problems: tuple[Problem, ...]):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join((f"the plan has {count}:", *(f"- {problem}" for problem in problems))))


def plan(
    cfg: RunConfig,
    *,
    train_prompts: int | None = None,
    val_prompts: int | None = None,
    model: ModelLimits | None = None,
) -> Plan:
    """The shape of one step, with every problem and warning at once.

    Args:
        cfg: the configuration.
        train_prompts: prompts of the training set after filtering; None: unknown, and steps per epoch stay unknown.
        val_prompts: prompts of the validation set.
        model: the model's limits; None: not checked.
    """
    facts = Facts(train_prompts, val_prompts, model or ModelLimits())
    numbers = count(cfg, facts)
    return Plan(
        **{field.name: getattr(numbers, field.name) for field in fields(numbers)},
        stages=stage_shapes(cfg, numbers),
        problems=find_problems((*SHAPE_RULES, *CONTENT_RULES, *ALGORITHM_RULES), cfg, numbers, facts),
        warnings=find_warnings(cfg, numbers, facts),
    )


def checked_plan(
    cfg: RunConfig,
    *,
    train_prompts: int | None = None,
    val_prompts: int | None = None,
    model: ModelLimits | None = None,
) -> Plan:
    """The plan of a configuration that can be trained; PlanError with every problem otherwise."""
    answer = plan(cfg, train_prompts=train_prompts, val_prompts=val_prompts, model=model)
    if answer.problems:
        raise PlanError(answer.problems)
    return answer
