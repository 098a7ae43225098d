"""What a preflight says: pass rates, groups with a signal, lengths, errors, costs; and the rows worth keeping."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.run_folder import short
from storage import Ragged, Run, StorageError
from storage.durable import sync_file, sync_folder
from storage.reuse import REUSED
from tasks.algorithms.shaping import groups_with_signal
from tasks.config import RunConfig
from tasks.data import PreparedPrompts, source_table
from tasks.pass_rates import Share, distribution, signal_share

if TYPE_CHECKING:
    from tasks.geometry import Plan

SIZES = (2, 4, 8, 16, 32)
"""Group sizes beside the run's own for which the share of groups with a signal is told."""
MESSAGES = 5
"""Different messages of failed reward calls that are shown."""
LEFT_OUT = (
    "log-probs, reference and update, which are not run here",
    "the start of an engine, and handing it the weights of every step",
    "validation, checkpoints and what servers cost",
    "responses that grow longer or shorter while the policy learns",
    "that scoring goes on beside the log-prob pass",
)
"""What the estimate of a run's costs does not count."""


@dataclass(frozen=True)
class Keep:
    """The pass rates that are kept, bounds included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Read `low..high`.

        Raises:
            ValueError: it is not that, or not between 0 and 1.
        """
        low, dots, high = text.partition("..")
        try:
            keep = cls(float(low), float(high))
        except ValueError:
            keep = cls(1.0, 0.0)
        if not dots or not 0 <= keep.low <= keep.high <= 1:
            raise ValueError(f"--keep {text}: give two pass rates between 0 and 1, the lower one first, as 0.05..0.95")
        return keep


@dataclass(frozen=True)
class Found:
    """What was measured.

    Attributes:
        run: folder of the preflight.
        n: responses to each prompt.
        pass_score: a response passes from this score on.
        prompt_index: [P] row of the prepared prompts.
        verdicts: [P] responses that have a score.
        passed: [P] those that pass.
        numbers: all the rest, by name; plain JSON.
    """

    run: Path
    n: int
    pass_score: float
    prompt_index: np.ndarray
    verdicts: np.ndarray
    passed: np.ndarray
    numbers: dict[str, Any]

    @property
    def rate(self) -> np.ndarray:
        """[P] pass rate; NaN: no response has a verdict."""
        return np.where(self.verdicts > 0, self.passed / np.maximum(self.verdicts, 1), np.nan)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain JSON, without the prompts one by one."""
        return {
            "folder": str(self.run),
            "prompts": len(self.prompt_index),
            "n": self.n,
            "pass_score": self.pass_score,
            **self.numbers,
        }


def found_in(run: Run, cfg: RunConfig, plan: Plan, steps: Sequence[int], pass_score: float) -> Found:
    """Measure the rollouts and rewards of a preflight.

    Args:
        run: the preflight's folder.
        cfg: its configuration.
        plan: of the run that is to be trained.
        steps: whose artifacts are looked at.
        pass_score: a response passes from this score on.
    """
    prompts = _columns(run, steps, "prompts", "group_id", "prompt_index")
    rewards = _columns(run, steps, "rewards", "group_id", "score", "status", "message")
    rollouts = _columns(run, steps, "rollouts", "response_ids", "finish_reason")
    places = {name: place for place, name in enumerate(prompts["group_id"].to_pylist())}
    group = np.asarray([places[name] for name in rewards["group_id"].to_pylist()], dtype=np.int64)
    score = rewards["score"].to_numpy().astype(np.float64)
    known = ~np.isnan(score)
    verdicts = np.bincount(group[known], minlength=len(places))
    passed = np.bincount(group[known], weights=score[known] >= pass_score, minlength=len(places)).astype(np.int64)
    lengths = Ragged.from_arrow(rollouts["response_ids"]).lengths
    signal = groups_with_signal(score, np.asarray(rewards["group_id"].to_pylist()))
    n = cfg.actor_rollout_ref.rollout.n
    rate = np.where(verdicts > 0, passed / np.maximum(verdicts, 1), np.nan)
    numbers: dict[str, Any] = {
        "responses": len(score),
        "pass_rate": {
            "mean": _mean(rate[verdicts > 0]),
            "prompts": distribution(rate),
            "without_verdict": int((verdicts == 0).sum()),
        },
        "dead": int(((verdicts > 0) & (passed == 0)).sum()),
        "solved": int(((verdicts > 0) & (passed == verdicts)).sum()),
        "scores_differ": float(np.mean(signal)),
        "signal": [asdict(share) for share in _shares(verdicts, passed, n)],
        "score": {"mean": _mean(score[known]), "max": float(score[known].max()) if known.any() else None},
        "length": {
            "mean": float(lengths.mean()),
            **{f"p{p}": float(np.percentile(lengths, p)) for p in (50, 90, 99)},
            "max": int(lengths.max()),
            "limit": cfg.response_length,
            "truncated": _share_of(rollouts["finish_reason"], "length"),
            "empty": float((lengths == 0).mean()),
        },
        "reward": _reward(rewards),
    }
    numbers["cost"] = _cost(run, cfg, plan, steps, int(lengths.sum()), float(np.mean(signal)))
    index = prompts["prompt_index"].to_numpy()
    return Found(run.root, n, pass_score, index, verdicts, passed, numbers)


def _columns(run: Run, steps: Sequence[int], stage: str, *names: str) -> pa.Table:
    return pa.concat_tables([run.step(step).table(stage, list(names)) for step in steps])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _share_of(column: pa.ChunkedArray, value: str) -> float:
    return float(pc.mean(pc.cast(pc.equal(column, pa.scalar(value, column.type)), pa.float64())).as_py())


def _shares(verdicts: np.ndarray, passed: np.ndarray, n: int) -> list[Share]:
    sizes = sorted({*SIZES, *([n] if n > 1 else [])})
    return [share for k in sizes if (share := signal_share(verdicts, passed, k)) is not None]


def _reward(rewards: pa.Table) -> dict[str, Any]:
    """Responses by what became of their score, and the messages of failed calls, the most frequent first."""
    statuses = Counter(rewards["status"].to_pylist())
    failed = rewards.filter(pc.is_in(rewards["status"], pa.array(["error", "timeout"], rewards["status"].type)))
    messages = Counter(
        (message or "").splitlines()[-1:][0] if message else "" for message in failed["message"].to_pylist()
    )
    return {
        **{status: statuses[status] for status in ("ok", "unparsed", "error", "timeout")},
        "messages": [{"message": text, "responses": count} for text, count in messages.most_common(MESSAGES) if text],
    }


def _cost(run: Run, cfg: RunConfig, plan: Plan, steps: Sequence[int], tokens: int, signal: float) -> dict[str, Any]:
    """About what generation and scoring of a training step take, from what they took here.

    An engine is slow at first: where there are further whole batches, the first one and the rest are left out.
    """
    rows, generation_s, reward_s = (np.asarray(column) for column in zip(*_times(run, steps), strict=True))
    sequences = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    steady = (rows == sequences) & (np.arange(len(rows)) > 0)
    steady = steady if steady.any() else np.ones(len(rows), dtype=bool)
    calls = _generate_calls(cfg, signal)
    if calls is not None:
        sequences = (
            round(calls * (cfg.data.gen_batch_size or cfg.data.train_batch_size)) * cfg.actor_rollout_ref.rollout.n
        )
    per_step = {
        "responses": sequences,
        "response_tokens": tokens * sequences / float(rows.sum()),
        "generation_s": float(generation_s[steady].sum() * sequences / rows[steady].sum()),
        "reward_s": float(reward_s[steady].sum() * sequences / rows[steady].sum()),
    }
    total = plan.total_steps
    return {
        "measured": {
            "generation_s": float(generation_s.sum()),
            "reward_s": float(reward_s.sum()),
            "response_tokens": tokens,
            "batches": len(rows),
            "batches_scaled_up": int(steady.sum()),
        },
        "generate_calls_per_step": calls,
        "per_step": per_step,
        "steps": total,
        "whole_run": None if total is None else {name: value * total for name, value in per_step.items()},
        "leaves_out": list(LEFT_OUT),
    }


def _times(run: Run, steps: Sequence[int]) -> list[tuple[int, float, float]]:
    """Responses of each step, and seconds of generation and scoring, where they were computed."""
    found = []
    for step in steps:
        made = [run.step(step).manifest(stage) for stage in ("rollouts", "rewards")]
        seconds = [one.notes[REUSED]["seconds"] if REUSED in one.notes else one.seconds for one in made if one]
        rows = made[0].rows if made[0] else 0
        found.append((rows, seconds[0], seconds[1]))
    return found


def _generate_calls(cfg: RunConfig, signal: float) -> float | None:
    """Expected generate calls of a step that filters groups; None: it does not, or no group would be kept."""
    if not cfg.algorithm.filter_groups.enable or signal == 0:
        return None
    size = cfg.data.gen_batch_size or cfg.data.train_batch_size
    return max(1.0, cfg.data.train_batch_size / (size * signal))


# ------------------------------------------------------------------------------------------------------ kept prompts


def check_output(path: Path) -> None:
    """Refuse a file that is there, or that has no folder, before anything is sampled.

    Raises:
        StorageError: with the way out.
    """
    if path.exists():
        raise StorageError(f"{path} exists. Name another file, or remove it: nothing is overwritten.")
    if not path.absolute().parent.is_dir():
        raise StorageError(f"{path}: there is no folder {path.absolute().parent}")


def write_kept(path: Path, found: Found, data: PreparedPrompts, keep: Keep) -> dict[str, Any]:
    """Write the rows of the data files whose prompts' pass rates are within bounds, with a column `pass_rate`.

    Returns:
        How many were kept, of how many that were measured, and where.

    Raises:
        StorageError: the file is there by now.
        DataError: the files' rows do not fit into one table.
    """
    assert data.rows is not None, "prepare_prompts notes the rows"
    rate = found.rate
    chosen = np.flatnonzero((rate >= keep.low) & (rate <= keep.high))
    rows = data.rows[found.prompt_index[chosen]]
    order = np.argsort(rows, kind="stable")
    table = source_table([file.path for file in data.files], rows[order])
    if "pass_rate" in table.column_names:
        table = table.drop_columns(["pass_rate"])
    table = table.append_column("pass_rate", pa.array(rate[chosen][order], pa.float64()))
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}.aside")
    try:
        pq.write_table(table, aside)
        sync_file(aside)
        check_output(path)
        os.rename(aside, path)  # noqa: PTH104
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.absolute().parent)
    return {"file": str(path), "rows": table.num_rows, "of": len(rate), "low": keep.low, "high": keep.high}


# ------------------------------------------------------------------------------------------------------------- printed


def print_found(found: Found, kept: Mapping[str, Any] | None, keep: Keep, console: Console) -> None:
    """Say what was found, for people."""
    numbers = found.numbers
    count, rates = len(found.prompt_index), numbers["pass_rate"]["prompts"]

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    say("")
    say(f"{count} prompts x {found.n} responses by the first policy, in {short(found.run)}", "bold")
    table = Table("pass rate", "prompts", "", box=None)
    for name, prompts in rates.items():
        label = {"0": "0, dead", "1": "1, solved"}.get(name, name)
        table.add_row(label, str(prompts), "#" * round(40 * prompts / max(count, 1)))
    console.print(table)
    if without := numbers["pass_rate"]["without_verdict"]:
        say(f"{without} prompts have no response with a verdict")
    mean = numbers["pass_rate"]["mean"]
    say(
        f"mean pass rate {_number(mean)} (a response passes from score {found.pass_score:g} on), mean score "
        f"{_number(numbers['score']['mean'])}; scores differ in {numbers['scores_differ']:.1%} of the groups"
    )
    if mean == 0 and numbers["score"]["max"] is not None:
        say(f"no response passes: the highest score is {numbers['score']['max']:g}; --pass-score sets another bound")
    table = Table("group of", "expected with signal", "", box=None)
    for share in numbers["signal"]:
        error = "" if share["error"] is None else f" ± {share['error']:.1%}"
        how = {"measured": "as sampled"}.get(share["how"], share["how"])
        table.add_row(f"{share['k']}", f"{share['share']:.1%}{error}", how + (" (rollout.n)" * (share["k"] == found.n)))
    console.print(table)
    length, reward = numbers["length"], numbers["reward"]
    say(
        f"response tokens: mean {length['mean']:.1f}, 90 % up to {length['p90']:.0f}, longest {length['max']} of "
        f"{length['limit']}; {length['truncated']:.1%} cut by the limit, {length['empty']:.1%} empty"
    )
    say(f"rewards: {', '.join(f'{reward[name]} {name}' for name in ('ok', 'unparsed', 'error', 'timeout'))}")
    for line in reward["messages"]:
        say(f"  {line['responses']} x {line['message']}")
    _say_cost(numbers["cost"], say)
    if kept is None:
        inside = int(((found.rate >= keep.low) & (found.rate <= keep.high)).sum())
        say(
            f"{inside} of {count} prompts have a pass rate of {keep.low:g} to {keep.high:g}; "
            "-o FILE.parquet writes their rows"
        )
    else:
        say(f"{kept['rows']} of {kept['of']} rows are in {kept['file']}: pass rate {keep.low:g} to {keep.high:g}")
    say(f"look at it: grpoflow show {short(found.run)} --step 1 --stage rewards")


def _say_cost(cost: Mapping[str, Any], say: Any) -> None:
    step, whole = cost["per_step"], cost["whole_run"]
    say(
        f"estimate for one training step: {step['responses']} responses, {step['response_tokens']:,.0f} tokens, "
        f"{step['generation_s']:.1f} s of generation, {step['reward_s']:.1f} s of scoring"
    )
    if cost["generate_calls_per_step"] is not None:
        say(f"  with {cost['generate_calls_per_step']:.1f} generate calls to fill a batch (algorithm.filter_groups)")
    if whole is not None:
        hours = (whole["generation_s"] + whole["reward_s"]) / 3600
        say(f"for all {cost['steps']} steps: {whole['response_tokens']:,.0f} tokens, {hours:.2f} h of both")
    say(f"  it leaves out: {'; '.join(cost['leaves_out'])}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
