"""What another reward function would have said of kept responses: a table of flips. Nothing is written into the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.audit.sources import open_lineage
from flows.audit.steps import parse_steps
from flows.config import load_config
from flows.run_folder import config_of
from storage import Run, StorageError
from storage.ledger import StepView
from tasks.config import RunConfig
from tasks.reward import reward_rows
from tasks.rewards.calls import RewardError
from tasks.rewards.functions import BUILTIN
from tasks.rewards.pool import RewardPool, Verdict
from tasks.stage import aligned

Flip = Literal["up", "down", "same", "now missing", "now judged", "still missing"]
FLIPS: tuple[Flip, ...] = ("up", "down", "same", "now missing", "now judged", "still missing")
LARGEST = 10
"""Changes that are shown with their sample."""


@dataclass(frozen=True)
class Change:
    """One sample whose score is another one.

    Attributes:
        step: number of the step.
        sample_id: names it.
        flip: which way.
        old: stored score; None: no verdict.
        new: the other function's.
        message: why there is no new score, where there is none.
    """

    step: int
    sample_id: str
    flip: Flip
    old: float | None
    new: float | None
    message: str | None = None


@dataclass(frozen=True)
class Rescored:
    """What the other function says of one step.

    Attributes:
        step: number of the step.
        flips: samples by how their score changes.
        old_mean: mean of the stored scores; None: there is none.
        new_mean: mean of the other function's.
        statuses: samples by the other function's status.
        changes: all samples whose score is another one, the largest change first.
        why: why the step could not be scored; else empty.
    """

    step: int
    flips: dict[Flip, int] = field(default_factory=dict)
    old_mean: float | None = None
    new_mean: float | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    why: str = ""


def with_reward(cfg: RunConfig, reward: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration with another reward function.

    Args:
        cfg: the run's.
        reward: `FILE.py`, whose function is `compute_score`; `FILE.py:name`; a built-in function's name; or
            `module:function`.
        overrides: more, such as `reward.timeout_s=5` or `custom_reward_function.reward_kwargs.x=1`.
    """
    custom, rules = cfg.custom_reward_function, cfg.reward
    place, _, name = reward.rpartition(":")
    file = reward if reward.endswith(".py") else place if place.endswith(".py") else None
    if file is not None:
        path, function = str(Path(file).expanduser().absolute()), "compute_score" if file == reward else name
        custom = type(custom)(path=path, name=function)
        rules = rules.model_copy(update={"functions": ()})
    elif reward in BUILTIN or place:
        custom = type(custom)()
        rules = rules.model_validate({**rules.model_dump(), "functions": [{"name": reward}]})
    else:
        raise ValueError(
            f"--reward {reward}: no reward function. Give a file (rules.py or rules.py:name), module:function, or a "
            f"built-in one: {', '.join(BUILTIN)}"
        )
    cfg = cfg.model_copy(update={"custom_reward_function": custom, "reward": rules})
    return load_config([], overrides, base=cfg)


def rescore(run: Run, steps: Sequence[int], reward: str, overrides: Sequence[str] = ()) -> Iterator[Rescored]:
    """Score the kept responses of steps by another function, in processes with the run's time limits, step by step.

    Args:
        run: the run; it is only read.
        steps: numbers of the steps.
        reward: see `with_reward`.
        overrides: the same.

    Raises:
        ValueError: the function cannot be used.
    """
    cfg = with_reward(config_of(run, run.lineage), reward, overrides)
    try:
        with RewardPool(cfg) as pool:
            pool.check()
            for step in steps:
                yield _of_step(run.step(step), pool)
    except RewardError as error:
        raise ValueError(f"--reward {reward}: {error}") from error


def _of_step(view: StepView, pool: RewardPool) -> Rescored:
    prompts, rollouts, rewards = (view.artifact(stage) for stage in ("prompts", "rollouts", "rewards"))
    if prompts is None or rollouts is None or rewards is None:
        return Rescored(
            view.index, why="it has no rewards yet" if view.index else "step 0 has no responses of training"
        )
    try:
        rows = reward_rows(prompts, rollouts)
        ids = view.table("rollouts", ["sample_id"])["sample_id"]
        old: list[float | None] = aligned(rewards, ids, ["score"])["score"].to_pylist()
    except StorageError as error:
        return Rescored(view.index, why=str(error))
    verdicts = pool.score(rows)
    changes = [
        Change(view.index, row.sample_id, flip_of(before, verdict.score), before, verdict.score, _why(verdict))
        for row, before, verdict in zip(rows, old, verdicts, strict=True)
    ]
    counts = Counter(change.flip for change in changes)
    moved = [change for change in changes if change.flip not in ("same", "still missing")]
    return Rescored(
        view.index,
        {flip: counts[flip] for flip in FLIPS},
        _mean(old),
        _mean([verdict.score for verdict in verdicts]),
        dict(Counter(verdict.status for verdict in verdicts)),
        sorted(moved, key=_size, reverse=True),
    )


def flip_of(old: float | None, new: float | None) -> Flip:
    """How a score changes."""
    if old is None or new is None:
        return "still missing" if old is new else "now missing" if new is None else "now judged"
    return "same" if old == new else "up" if new > old else "down"


def _why(verdict: Verdict) -> str | None:
    return None if verdict.score is not None else verdict.message or verdict.status


def _size(change: Change) -> float:
    """A verdict that comes or goes is the largest change of all."""
    return math.inf if change.old is None or change.new is None else abs(change.new - change.old)


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None


# ---------------------------------------------------------------------------------------------------------- the command


def rescore_command(
    path: Path, steps: str | None, reward: str, overrides: Sequence[str], *, limit: int, as_json: bool, console: Console
) -> int:
    """Rescore steps of a run, print what flips, and return the exit code: 2 where no step could be scored.

    Args:
        path: the run's folder.
        steps: a range; None: all.
        reward: see `with_reward`.
        overrides: the same.
        limit: samples to show.
        as_json: print JSON.
        console: where to print.
    """
    run = open_lineage(path)
    chosen = [step for step in parse_steps(steps, run) if step or steps is not None]
    results = list(rescore(run, chosen, reward, overrides))
    if as_json:
        print(json.dumps([{**asdict(one), "changes": [asdict(it) for it in one.changes[:limit]]} for one in results]))
    else:
        _print(results, limit, console)
    return 0 if any(not one.why for one in results) else 2


def _print(results: Sequence[Rescored], limit: int, console: Console) -> None:
    table = Table("step", box=None)
    for name in (*FLIPS, "mean then", "mean now", "status now"):
        table.add_column(name, justify="right")
    for one in results:
        if not one.why:
            counts = [str(one.flips[flip]) for flip in FLIPS]
            statuses = ", ".join(f"{count} {name}" for name, count in sorted(one.statuses.items()))
            table.add_row(str(one.step), *counts, _shown(one.old_mean), _shown(one.new_mean), statuses)
    console.print(table)
    for one in results:
        if one.why:
            console.print(Text(f"step {one.step}: {one.why}"), soft_wrap=True)
    moved: list[Change] = sorted((it for one in results for it in one.changes), key=_size, reverse=True)
    if moved and limit:
        console.print(Text(f"the largest of {len(moved)} changes:"))
        _print_changes(moved[:limit], console)


def _print_changes(changes: Sequence[Change], console: Console) -> None:
    table: Any = Table("step", "sample", "", "then", "now", "why", box=None)
    for it in changes:
        words: tuple[str, ...] = (it.sample_id, it.flip, _shown(it.old), _shown(it.new), it.message or "")
        table.add_row(str(it.step), *(Text(word) for word in words))
    console.print(table)


def _shown(score: float | None) -> str:
    return "none" if score is None else f"{score:.4g}"
