"""What a sweep costs with tpe and asha, as a share of the grid's training steps, and whether it finds the grid's best.

    python -m benchmarks.sweeps            learning curves by a formula, whose best point is known
    grpoflow sweep benchmarks/sweeps.yaml  train a grid of the quickstart, about half an hour, and then
    python -m benchmarks.sweeps FOLDER     with its real curves, by the sweep's folder

Decisions are those of `grpoflow sweep`, made by the same functions; in the place of a run its curve is looked up. Steps
are counted, not timed, so that nothing depends on the machine.
"""

import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from flows.sweep.board import Advance, Board, NewTrial, Result, Trial, next_decision
from flows.sweep.book import open_sweep
from flows.sweep.objective import result_of
from flows.sweep.space import Values, grid, suggest
from flows.sweep.spec import SweepSpec

SAMPLER_SEEDS = 20
SHARE_OF_POINTS = {"none": 0.6, "asha": 0.75}
"""Trials of a sweep by pruning, as a share of the grid's points."""

LR, MINI, CLIP = (
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.clip_ratio",
)
FORMULA = {
    "name": "formula",
    "space": {
        LR: {"choice": [10 ** (-5 + k / 2) for k in range(8)]},
        MINI: {"choice": [8, 16, 32]},
        CLIP: {"choice": [0.1, 0.2, 0.3]},
    },
    "objective": {"metric": "score"},
}
TOTAL, NOISE = 27, 0.01

Curve = Callable[[Values, int], float | None]
"""Objective of a point at a step; None: its run has failed."""


@dataclass(frozen=True)
class Outcome:
    """What one sweep came to: training steps, and its best point's objective at the last step."""

    steps: int
    best: Values
    value: float


def formula(values: Mapping[str, Any], step: int) -> float:
    """A score that rises to a height, both best at lr 1e-3, 16 prompts and 0.2; below it flat, far above it broken.

    The noise is that of a held-out set of a few thousand prompts, and always the same for a point and a step.
    """
    off = math.log10(values[LR]) + 3
    height = 0.9 * math.exp(-((off / 1.2) ** 2)) - 0.05 * (values[MINI] != 16) - 0.03 * (values[CLIP] != 0.2)
    rate = 0.25 * 10 ** (0.4 * min(off, 0.0))
    noise = random.Random(repr((sorted(values.items()), step))).gauss(0.0, NOISE)
    return height * (1 - math.exp(-rate * step)) + noise


def recorded(folder: str) -> tuple[SweepSpec, int, Curve]:
    """A finished grid sweep's file, steps of a run, and the mean over its seeds that each point came to by a step."""
    sweep = open_sweep(folder)
    numbers = {repr(dict(trial.values)): trial.number for trial in sweep.board().trials if trial.refused is None}

    @cache
    def value(number: int, step: int) -> float | None:
        runs = [sweep.run(number, seed) for seed in sweep.spec.seeds]
        found = [None if run is None else result_of(run, sweep.spec.objective, step).value for run in runs]
        there = [one for one in found if one is not None]
        return sum(there) / len(there) if len(there) == len(found) else None

    return sweep.spec, sweep.total, lambda values, step: value(numbers[repr(values)], step)


def simulate(spec: SweepSpec, total: int, curve: Curve) -> Outcome:
    """Run a sweep whose runs end at once."""
    board = Board(spec, total)
    limit = len(grid(spec)) if spec.sampler.kind == "grid" else spec.budget.trials or 0
    while decision := next_decision(board, len(board.trials) < limit):
        if isinstance(decision, NewTrial):
            seen = [(dict(board.trials[trial].values), place) for trial, place in decision.seen.items()]
            values = suggest(spec, len(board.trials), seen, [trial.values for trial in board.trials])
            assert values is not None
            same_as = next((one.number for one in board.trials if dict(one.values) == values), None)
            board.trials.append(Trial(len(board.trials), values, None, same_as))
            if same_as is not None:
                continue
            decision = Advance(len(board.advances), len(board.trials) - 1, decision.until)
        assert isinstance(decision, Advance), "every run has ended"
        board.advances.append(decision)
        board.results[decision.index, spec.seeds[0]] = Result(
            curve(dict(board.trials[decision.trial].values), decision.until)
        )
    ended = [
        (value, one.trial) for one in board.advances if one.until == total and (value := board.value(one)) is not None
    ]
    value, trial = (max if spec.objective.mode == "max" else min)(ended)
    return Outcome(board.planned_steps(), dict(board.trials[trial].values), value)


def variant(spec: SweepSpec, **changes: Any) -> SweepSpec:
    """The sweep with another sampler, pruning or budget, one seed standing for the mean of all."""
    return SweepSpec.model_validate({**spec.model_dump(exclude_none=True), "seeds": (0,), **changes})


def main() -> None:
    """Print a table."""
    spec, total, curve = (
        recorded(sys.argv[1])
        if sys.argv[1:]
        else (SweepSpec.model_validate({**FORMULA, "budget": {"trials": 1}}), TOTAL, formula)
    )
    whole = simulate(variant(spec, sampler={"kind": "grid"}, pruning={"kind": "none"}, budget={}), total, curve)
    print(
        f"grid: {len(grid(spec))} points x {total} steps = {whole.steps:,} steps; "
        f"best {whole.value:.3f} at {', '.join(map(str, whole.best.values()))}\n"
    )
    print(
        "| sampler | pruning | share of the grid's steps, median | at most | finds the best point | worst gap to it |"
    )
    print("|---|---|---|---|---|---|")
    asha = {"kind": "asha", "min_steps": total // 3, "reduction": 3}
    for kind, pruning in (("random", {"kind": "none"}), ("tpe", {"kind": "none"}), ("random", asha), ("tpe", asha)):
        budget = {"trials": round(SHARE_OF_POINTS[str(pruning["kind"])] * len(grid(spec)))}
        found = [
            simulate(variant(spec, sampler={"kind": kind, "seed": seed}, pruning=pruning, budget=budget), total, curve)
            for seed in range(SAMPLER_SEEDS)
        ]
        shares = [one.steps / whole.steps for one in found]
        hits = sum(one.best == whole.best for one in found)
        gap = max(abs(one.value - whole.value) for one in found)
        print(
            f"| {kind} | {pruning['kind']} | {median(shares):.0%} | {max(shares):.0%} "
            f"| {hits} of {SAMPLER_SEEDS} | {gap:.3f} |"
        )


if __name__ == "__main__":
    main()
