"""A sweep as it stands, and what is to be done next. Pure: no files, no processes, no clock.

Decisions have an order, and each is made from the results of the decisions before it but the last few, which may still
run (`SweepSpec.width`). So what is decided does not depend on how long a run took or how often it was killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from flows.sweep.spec import SweepSpec


@dataclass(frozen=True)
class Trial:
    """One point of the space.

    Attributes:
        number: from 0.
        values: its configuration keys.
        refused: why it cannot be trained; None: it can.
        same_as: the earlier trial with the same values, whose runs are its own; None: there is none.
    """

    number: int
    values: Mapping[str, Any]
    refused: str | None = None
    same_as: int | None = None


@dataclass(frozen=True)
class Advance:
    """A decision: train all runs of a trial up to a step.

    Attributes:
        index: its place in the order of decisions.
        trial: number of the trial.
        until: the step.
    """

    index: int
    trial: int
    until: int


@dataclass(frozen=True)
class Result:
    """What one run came to at the step that it was to reach.

    Attributes:
        value: of the objective; None: there is none.
        failed: why there is none.
        best_step: step of the run's best value so far.
    """

    value: float | None
    failed: str | None = None
    best_step: int | None = None


@dataclass
class Board:
    """What has been decided, and what came of it.

    Attributes:
        spec: the sweep.
        total: steps of a whole run.
        trials: by number.
        advances: decisions in their order.
        results: of each run by (index of the decision, seed).
    """

    spec: SweepSpec
    total: int
    trials: list[Trial] = field(default_factory=list)
    advances: list[Advance] = field(default_factory=list)
    results: dict[tuple[int, int], Result] = field(default_factory=dict)

    def is_done(self, advance: Advance) -> bool:
        """Whether all runs have reached the step, or failed."""
        return all((advance.index, seed) in self.results for seed in self.spec.seeds)

    def values(self, advance: Advance) -> list[float]:
        """The objective of each run; empty: one has failed, or is under way."""
        found = [self.results.get((advance.index, seed), Result(None)).value for seed in self.spec.seeds]
        there = [value for value in found if value is not None]
        return there if len(there) == len(found) else []

    def value(self, advance: Advance) -> float | None:
        """Mean of the objective over the runs."""
        values = self.values(advance)
        return fmean(values) if values else None

    def spread(self, advance: Advance) -> float | None:
        """Standard deviation of the objective over the runs (ddof 1); None: one run."""
        values = self.values(advance)
        return stdev(values) if len(values) > 1 else None

    def of_trial(self, number: int) -> list[Advance]:
        """Decisions about a trial, in their order."""
        return [advance for advance in self.advances if advance.trial == number]

    def planned_steps(self) -> int:
        """Training steps of all runs that were decided on."""
        reached = {advance.trial: advance.until for advance in self.advances}
        return sum(reached.values()) * len(self.spec.seeds)

    def failure(self, number: int) -> str | None:
        """Why a trial has failed; None: it has not."""
        indices = {advance.index for advance in self.of_trial(number)}
        return next((r.failed for (index, _), r in self.results.items() if index in indices and r.failed), None)

    def is_better(self, one: float, other: float) -> bool:
        """Whether a value of the objective is better than another one."""
        return one > other if self.spec.objective.mode == "max" else one < other


@dataclass(frozen=True)
class NewTrial:
    """The next thing to do is a new trial, up to a step.

    Attributes:
        until: the step.
        seen: place of each trial that its choice may learn from, by number; the best one is highest.
    """

    until: int
    seen: Mapping[int, int]


@dataclass(frozen=True)
class Wait:
    """Nothing can be decided before runs that are under way have ended."""


def rungs(spec: SweepSpec, total: int) -> list[int]:
    """The steps at which trials are compared, the last one of a run included."""
    pruning = spec.pruning
    steps, step = [], pruning.min_steps
    while pruning.kind != "none" and step < total:
        steps.append(step)
        step = step * pruning.reduction if pruning.kind == "asha" else step + (pruning.every or pruning.min_steps)
    return [*steps, total]


def next_decision(board: Board, more_trials: bool) -> Advance | NewTrial | Wait | None:
    """What to do next; None: nothing, the sweep is finished.

    Args:
        board: the sweep as it stands.
        more_trials: whether the space and the budget have a further trial.
    """
    # The last `width - 1` decisions are still under way for this one; where that leaves nothing to do, it learns of one
    # more at a time.
    for known in range(max(0, len(board.advances) + 1 - board.spec.width), len(board.advances) + 1):
        seen = board.advances[:known]
        if not all(map(board.is_done, seen)):
            return Wait()
        decision = _decide(board, seen, more_trials)
        if decision is not None:
            return decision if _is_paid_for(board, decision) else None
    last = _best_to_the_end(board)
    return last if last is not None and _is_paid_for(board, last) else None


def _decide(board: Board, seen: Sequence[Advance], more_trials: bool) -> Advance | NewTrial | None:
    steps = rungs(board.spec, board.total)
    going_on = {"none": _nobody, "asha": _best_of_a_rung, "median": _above_the_median}[board.spec.pruning.kind]
    advance = going_on(board, seen, steps)
    if advance is not None:
        return advance
    return NewTrial(steps[0], _ranks(board, seen)) if more_trials else None


def _is_paid_for(board: Board, decision: Advance | NewTrial) -> bool:
    limit = board.spec.budget.steps
    if limit is None:
        return True
    before = 0
    if isinstance(decision, Advance):
        before = max((one.until for one in board.of_trial(decision.trial)), default=0)
    return board.planned_steps() + (decision.until - before) * len(board.spec.seeds) <= limit


def _nobody(board: Board, seen: Sequence[Advance], steps: Sequence[int]) -> None:
    """Without pruning every trial is trained to its end at once."""


def _best_of_a_rung(board: Board, seen: Sequence[Advance], steps: Sequence[int]) -> Advance | None:
    """The best trial that its rung lets go on, from the highest rung down (arXiv 1810.05934, algorithm 2)."""
    decided = {(advance.trial, advance.until) for advance in board.advances}
    for step, following in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
        there = [advance for advance in seen if advance.until == step]
        worth = {advance.trial: board.value(advance) for advance in there}
        # A trial that failed counts as the worst of those that reached the rung.
        good = {trial: value for trial, value in worth.items() if value is not None}
        sign = 1 if board.spec.objective.mode == "min" else -1
        best = sorted(good, key=lambda trial: (sign * good[trial], trial))[: len(there) // board.spec.pruning.reduction]
        for trial in best:
            if (trial, following) not in decided:
                return Advance(len(board.advances), trial, following)
    return None


def _best_to_the_end(board: Board) -> Advance | None:
    """The best trial when nothing else is left to do and none was trained to the end; of few none may go on."""
    steps = rungs(board.spec, board.total)
    places = {trial: place for trial, place in _ranks(board, board.advances).items() if board.failure(trial) is None}
    if not places or any(advance.until == board.total for advance in board.advances):
        return None
    best = max(places, key=lambda trial: places[trial])
    reached = max(advance.until for advance in board.of_trial(best))
    return Advance(len(board.advances), best, steps[steps.index(reached) + 1])


def _above_the_median(board: Board, seen: Sequence[Advance], steps: Sequence[int]) -> Advance | None:
    """The first trial that is not worse than the median of the others at its step (Google Vizier, KDD 2017, 3.3.2)."""
    newest = {advance.trial: advance for advance in board.advances}
    for advance in seen:
        value = board.value(advance)
        if newest[advance.trial] != advance or value is None or advance.until == steps[-1]:
            continue
        others = [board.value(one) for one in seen if one.until == advance.until and one.trial != advance.trial]
        known = [other for other in others if other is not None]
        middle = median(known) if len(known) >= board.spec.pruning.startup_trials else None
        if middle is None or not board.is_better(middle, value):
            return Advance(len(board.advances), advance.trial, steps[steps.index(advance.until) + 1])
    return None


def _ranks(board: Board, seen: Sequence[Advance]) -> dict[int, int]:
    """What a new trial learns from: the place of each trial that has a value, the best one highest.

    A trial that was trained further is better than one that was not, for that is why it was; at the same step the
    objective decides. So all trials count, and values are compared at equal steps alone.
    """
    newest = {advance.trial: advance for advance in seen if board.value(advance) is not None}
    sign = 1 if board.spec.objective.mode == "max" else -1
    worth = {trial: (advance.until, sign * (board.value(advance) or 0.0), -trial) for trial, advance in newest.items()}
    return {trial: place for place, trial in enumerate(sorted(worth, key=lambda trial: worth[trial]))}
