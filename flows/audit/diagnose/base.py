"""What the failure signs are read from: a few numbers of every step, gathered one step at a time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from storage import Ragged, StorageError
from storage.ledger import StepView
from tasks.advantage import PASS_SCORE
from tasks.config import RunConfig

COLUMNS = (
    "group_id",
    "prompt_index",
    "response_ids",
    "finish_reason",
    "score",
    "status",
    "parts",
    "message",
    "old_log_probs",
    "ref_log_probs",
    "entropy",
    "no_signal",
)

WINDOW = 5
"""Steps at each end of a run that are compared with each other: one step of a few groups is mostly chance."""

FEWEST_STEPS = 4
"""Steps that a trend needs: below it, either end of the run is a step or two."""


@dataclass(frozen=True)
class PromptSeen:
    """One visit to a prompt: whether its group carried a signal, and whether all passed."""

    signal: bool
    passed: bool


@dataclass
class Vitals:
    """A step's numbers; None: they cannot be read, or the step has none.

    Attributes:
        step: its number.
        groups: prompts of the step.
        no_signal: share of its groups that carry no signal, and
        all_fail, all_pass: of those in which nobody, or everybody, scores like a right answer (of all groups).
        same: share of its groups whose responses are all the same tokens, though they did not all pass.
        score: mean score of its verdicts.
        parts: mean of each reward function.
        length: mean response length, tokens, and
        truncated: share of responses cut by their limit.
        length_and_score: correlation of length and score within groups.
        entropy: mean over response tokens, nats.
        kl: mean estimate (k3) of the KL to the reference, nats a token.
        sampler_gap: mean difference of the engine's and the policy's probability of a sampled token.
        statuses: samples by status, and
        errors: those without a verdict by kind of error.
        updates: rows of `updates`.
        metrics: of `step.json`.
    """

    step: int
    groups: int = 0
    no_signal: float | None = None
    all_fail: float | None = None
    all_pass: float | None = None
    same: float | None = None
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    length: float | None = None
    truncated: float | None = None
    length_and_score: float | None = None
    entropy: float | None = None
    kl: float | None = None
    sampler_gap: float | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    updates: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass
class History:
    """What signs look at.

    Attributes:
        cfg: the run's configuration.
        steps: numbers of each training step, in order.
        prompts: visits to each prompt, by its row of the data set.
        unread: why rows of a step could not be read, by step.
    """

    cfg: RunConfig
    steps: list[Vitals] = field(default_factory=list)
    prompts: dict[int, list[PromptSeen]] = field(default_factory=dict)
    unread: dict[int, str] = field(default_factory=dict)

    def series(self, value: Callable[[Vitals], float | None]) -> tuple[list[int], list[float]]:
        """Steps that have a number, and the numbers."""
        pairs = [(one.step, found) for one in self.steps if (found := value(one)) is not None]
        return [step for step, _ in pairs], [found for _, found in pairs]


@dataclass(frozen=True)
class Found:
    """A failure sign that is there.

    Attributes:
        says: a sentence: what is wrong, since when, with numbers.
        steps: the steps that show it.
        numbers: the evidence, by name.
        query: SQL for `grpoflow sql` that shows more.
    """

    says: str
    steps: list[int]
    numbers: dict[str, float]
    query: str


class TooLittle(Exception):
    """A sign cannot be looked for here, and why."""


def ends(numbers: Sequence[float], what: str) -> tuple[float, float]:
    """Median of the first and of the last steps.

    Raises:
        TooLittle: there are too few to compare.
    """
    if len(numbers) < FEWEST_STEPS:
        raise TooLittle(f"{what}: {len(numbers)} steps have it, a trend needs {FEWEST_STEPS}")
    width = min(WINDOW, len(numbers) // 2)
    return median(numbers[:width]), median(numbers[-width:])


def since(steps: Sequence[int], flags: Sequence[bool]) -> list[int]:
    """The steps at the end of a run in which something holds without a break."""
    found: list[int] = []
    for step, flag in zip(steps[::-1], flags[::-1], strict=True):
        if not flag:
            break
        found.append(step)
    return found[::-1]


def metric_query(*names: str) -> str:
    """SQL for the curves of some metrics."""
    listed = ", ".join(f"'{name}'" for name in names)
    return f"select step, name, value from metrics where name in ({listed}) order by name, step"


# ------------------------------------------------------------------------------------------------------------ gathering


def gather(history: History, view: StepView) -> None:
    """Add one training step to a history; what of it cannot be read is noted."""
    one = Vitals(view.index)
    record = None
    try:
        record = view.record
    except StorageError as error:
        history.unread[view.index] = str(error)
    if record is not None:
        one.metrics = dict(record["metrics"])
        _of_metrics(one)
    try:
        _of_samples(one, history, view.samples(COLUMNS))
    except (StorageError, FileNotFoundError) as error:
        history.unread[view.index] = str(error)
    try:
        one.updates = view.table("updates").to_pylist()
    except (StorageError, FileNotFoundError) as error:
        history.unread.setdefault(view.index, str(error))
    history.steps.append(one)


def _of_metrics(one: Vitals) -> None:
    """What a step's record knows, where its rows are not kept."""
    get = one.metrics.get
    one.score, one.length = get("critic/score/mean"), get("response_length/mean")
    one.truncated, one.entropy = get("response_length/clip_ratio"), get("actor/entropy")
    one.all_fail, one.all_pass = get("group/all_fail"), get("group/all_pass")
    one.sampler_gap = get("training/rollout_probs_diff_mean")
    one.kl = get("actor/kl_loss")


def _of_samples(one: Vitals, history: History, table: pa.Table) -> None:
    if not table.num_rows:
        return
    names = table["group_id"].to_pylist()
    group = np.unique(np.asarray(names), return_inverse=True)[1]
    ids = Ragged.from_arrow(table["response_ids"])
    one.groups = int(group.max()) + 1
    one.length = float(ids.lengths.mean())
    one.truncated = float(np.mean([reason == "length" for reason in table["finish_reason"].to_pylist()]))
    one.entropy = _mean(table["entropy"], one.entropy)
    one.kl = _kl(table, one.kl)
    if table["status"].null_count:
        return
    score = table["score"].to_numpy(zero_copy_only=False).astype(np.float64)
    _of_scores(one, score, group, ids)
    one.statuses = Counter(table["status"].to_pylist())
    one.errors = Counter(kind_of_error(text) for text in table["message"].to_pylist() if text)
    one.parts = _parts(table["parts"].to_pylist())
    _visits(history, table, score, group, one.groups)
    if "advantages" not in json.loads(table.schema.metadata[b"missing"]):
        silent = np.asarray([reason is not None for reason in table["no_signal"].to_pylist()])
        one.no_signal = float((np.bincount(group, weights=~silent) == 0).mean())


def _of_scores(one: Vitals, score: np.ndarray, group: np.ndarray, ids: Ragged) -> None:
    known = ~np.isnan(score)
    if not known.any():
        return
    one.score = float(score[known].mean())
    members = np.bincount(group[known], minlength=one.groups)
    passed = np.bincount(group[known], weights=score[known] >= PASS_SCORE, minlength=one.groups)
    lowest, highest = np.full(one.groups, np.inf), np.full(one.groups, -np.inf)
    np.minimum.at(lowest, group[known], score[known])
    np.maximum.at(highest, group[known], score[known])
    flat = ~(highest > lowest)
    one.all_pass = float(((passed == members) & (members > 0)).mean())
    one.all_fail = float(((passed == 0) & (members > 0)).mean())
    one.no_signal = float(flat.mean())
    one.length_and_score = _within_groups(ids.lengths.astype(np.float64), score, group, known)
    rows: dict[int, set[bytes]] = {}
    for place, number in enumerate(group.tolist()):
        rows.setdefault(number, set()).add(ids[place].tobytes())
    sizes = np.bincount(group, minlength=one.groups)
    same = [len(rows[number]) == 1 and sizes[number] > 1 and passed[number] < members[number] for number in rows]
    one.same = float(np.mean(same))


def _within_groups(length: np.ndarray, score: np.ndarray, group: np.ndarray, known: np.ndarray) -> float | None:
    """Correlation of what is left of length and score when each group's mean is taken off; None: one does not vary."""
    left = []
    for values in (length, score):
        means = np.bincount(group[known], weights=values[known]) / np.maximum(np.bincount(group[known]), 1)
        left.append(values[known] - means[group[known]])
    spread = float(np.sqrt((left[0] ** 2).sum() * (left[1] ** 2).sum()))
    return float((left[0] * left[1]).sum()) / spread if spread > 1e-12 else None


def _mean(column: pa.ChunkedArray, otherwise: float | None) -> float | None:
    if column.null_count:
        return otherwise
    values = Ragged.from_arrow(column).values
    return float(values.mean(dtype=np.float64)) if len(values) else otherwise


def _kl(table: pa.Table, otherwise: float | None) -> float | None:
    if table["ref_log_probs"].null_count or table["old_log_probs"].null_count:
        return otherwise
    old, ref = (Ragged.from_arrow(table[name]).values for name in ("old_log_probs", "ref_log_probs"))
    if len(old) != len(ref) or not len(old):
        return otherwise
    gap = np.clip(ref.astype(np.float64) - old, -20.0, 20.0)
    return float((np.expm1(gap) - gap).mean())


def _parts(rows: list[Any]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in dict(row).items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def kind_of_error(message: str) -> str:
    """A message less what differs from sample to sample: `score: ValueError`, `no verdict from score within … s`."""
    kind = re.match(r"^([^:]+: )?(\w*(?:Error|Exception|Exit|Interrupt))\b", message)
    return kind.group(0) if kind else re.sub(r"\d+(\.\d+)?", "…", message)[:80]


def _visits(history: History, table: pa.Table, score: np.ndarray, group: np.ndarray, groups: int) -> None:
    """Note for each prompt whether its group carried a signal."""
    if table["prompt_index"].null_count:
        return
    index = table["prompt_index"].to_numpy()
    for number in range(groups):
        own = score[group == number]
        own = own[~np.isnan(own)]
        if len(own):
            prompt = int(index[np.flatnonzero(group == number)[0]])
            seen = PromptSeen(bool(own.max() > own.min()), bool(own.min() >= PASS_SCORE))
            history.prompts.setdefault(prompt, []).append(seen)
