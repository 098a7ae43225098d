"""The objective of one run: a number from the metrics of its finished steps."""

from __future__ import annotations

import difflib
import math
from statistics import fmean

from flows.sweep.board import Result
from flows.sweep.spec import Objective
from storage import Run


def result_of(run: Run, objective: Objective, until: int) -> Result:
    """What a run came to by a step.

    Args:
        run: the run; it has finished the step.
        objective: which metric, and which of its values.
        until: the step.
    """
    values, names = {}, set[str]()
    for step in [0, *run.finished_steps()]:
        record = run.step(step).record if step <= until else None
        if record is None:
            continue
        names |= set(record["metrics"])
        value = record["metrics"].get(objective.metric)
        # Of step 0, before training, there is nothing to choose between trials.
        if value is not None and math.isfinite(value) and step:
            values[step] = float(value)
    if not values:
        near = difflib.get_close_matches(objective.metric, names, n=1, cutoff=0.3)
        hint = f" Nearest: {near[0]}." if near else ""
        return Result(None, f"no step up to {until} has a finite {objective.metric} (objective.metric).{hint}")
    best = (max if objective.mode == "max" else min)(values, key=lambda step: values[step])
    steps = sorted(values)
    value = {
        "last": values[steps[-1]],
        "best": values[best],
        "mean": fmean(values[step] for step in steps[-objective.last_k :]),
    }[objective.of]
    return Result(value, best_step=best)
