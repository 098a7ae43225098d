"""The samples of one step of two runs: rewards that flipped, prompt by prompt, and where responses part.

Prompts are the same where their text is; of equal prompts in one step the first goes with the first. Samples of a
prompt go together by `sample_index`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage import Ragged, StorageError
from storage.ledger import StepView

PromptKey = tuple[str, int]
"""A prompt's text, and its number among equal ones of the step."""


@dataclass
class Group:
    """A prompt of a step and its responses.

    Attributes:
        group_id: names it in its step.
        text: what the policy was given.
        ids: response token ids by `sample_index`.
        scores: by `sample_index`; None: no verdict.
    """

    group_id: str
    text: str
    ids: dict[int, np.ndarray] = field(default_factory=dict)
    scores: dict[int, float | None] = field(default_factory=dict)

    def mean(self) -> float | None:
        """Mean score of its verdicts; None: there are none."""
        verdicts = [score for score in self.scores.values() if score is not None]
        return sum(verdicts) / len(verdicts) if verdicts else None


@dataclass(frozen=True)
class PromptFlip:
    """A prompt whose mean score is another one in B."""

    step: int
    prompt: str
    group_a: str
    group_b: str
    a: float
    b: float


@dataclass(frozen=True)
class Parting:
    """A response whose tokens are other ones in B from a place on; None: there the response has ended."""

    step: int
    group_a: str
    sample_index: int
    token: int
    a: int | None
    b: int | None


@dataclass
class SampleDiff:
    """What came of one step.

    Attributes:
        prompts: how many `up`, `down`, `same`, `only in A`, `only in B`, and without a verdict in either (`missing`).
        samples: the same of single samples.
        responses: how many of the samples that both have are `equal`, and how many `part`.
        flips: prompts that went up or down, the widest first.
        partings: responses that part, in order.
    """

    prompts: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    responses: Counter[str] = field(default_factory=Counter)
    flips: list[PromptFlip] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)


def compare_samples(a: StepView, b: StepView, prefix: str = "") -> SampleDiff | None:
    """Compare the samples of a step; None where either has no rollouts with rows.

    Args:
        a: the step in A.
        b: the step in B.
        prefix: `val_` for the samples of a validation.

    Raises:
        StorageError: an artifact is damaged.
    """
    stages = (f"{prefix}prompts", f"{prefix}rollouts")
    if any(view.used(stage) is None or view.is_dropped(stage) for view in (a, b) for stage in stages):
        return None
    mine, yours = groups_of(a, prefix), groups_of(b, prefix)
    found = SampleDiff()
    for key in [*mine, *(key for key in yours if key not in mine)]:
        if key not in mine or key not in yours:
            where = "only in A" if key in mine else "only in B"
            found.prompts[where] += 1
            found.samples[where] += len((mine if key in mine else yours)[key].ids)
            continue
        one, other = mine[key], yours[key]
        change = _change(one.mean(), other.mean())
        found.prompts[change] += 1
        if change in ("up", "down"):
            means = float(one.mean() or 0.0), float(other.mean() or 0.0)
            found.flips.append(PromptFlip(a.index, one.text, one.group_id, other.group_id, *means))
        for index in sorted({*one.ids, *other.ids}):
            _compare_sample(found, a.index, one, other, index)
    found.flips.sort(key=lambda flip: -abs(flip.b - flip.a))
    return found


def _compare_sample(found: SampleDiff, step: int, one: Group, other: Group, index: int) -> None:
    if index not in one.ids or index not in other.ids:
        found.samples["only in A" if index in one.ids else "only in B"] += 1
        return
    found.samples[_change(one.scores.get(index), other.scores.get(index))] += 1
    token = first_difference(one.ids[index], other.ids[index])
    found.responses["equal" if token is None else "part"] += 1
    if token is not None:
        ids = [int(ids[token]) if token < len(ids) else None for ids in (one.ids[index], other.ids[index])]
        found.partings.append(Parting(step, one.group_id, index, token, *ids))


def first_difference(mine: np.ndarray, yours: np.ndarray) -> int | None:
    """First place where two lists of token ids differ; the end of the shorter where it is the start of the longer."""
    length = min(len(mine), len(yours))
    unequal = mine[:length] != yours[:length]
    if unequal.any():
        return int(np.argmax(unequal))
    return None if len(mine) == len(yours) else length


def _change(mine: float | None, yours: float | None) -> str:
    if mine is None or yours is None:
        return "missing"
    return "same" if mine == yours else ("up" if yours > mine else "down")


def groups_of(view: StepView, prefix: str = "") -> dict[PromptKey, Group]:
    """A step's prompts with their responses and scores; without rewards there are no scores."""
    prompts = view.table(f"{prefix}prompts", ["group_id", "prompt", "prompt_text"])
    seen: Counter[str] = Counter()
    groups: dict[PromptKey, Group] = {}
    by_id: dict[str, Group] = {}
    for row in prompts.to_pylist():
        group = Group(row["group_id"], row["prompt_text"])
        groups[row["prompt"], seen[row["prompt"]]] = by_id[group.group_id] = group
        seen[row["prompt"]] += 1
    scores = dict(_scores(view, f"{prefix}rewards"))
    rollouts = view.table(f"{prefix}rollouts", ["sample_id", "group_id", "sample_index", "response_ids"])
    ids = Ragged.from_arrow(rollouts["response_ids"])
    names = (rollouts[name].to_pylist() for name in ("sample_id", "group_id", "sample_index"))
    for row, (sample, group_id, index) in enumerate(zip(*names, strict=True)):
        if group_id not in by_id:
            raise StorageError(
                f"{prefix}rollouts of step {view.index} of {view.run.root} has a sample of no prompt: {sample}"
            )
        by_id[group_id].ids[index] = ids.values[ids.offsets[row] : ids.offsets[row + 1]]
        by_id[group_id].scores[index] = scores.get(sample)
    return groups


def _scores(view: StepView, stage: str) -> Iterator[tuple[Any, Any]]:
    if view.used(stage) is not None and not view.is_dropped(stage):
        table = view.table(stage, ["sample_id", "score"])
        yield from zip(table["sample_id"].to_pylist(), table["score"].to_pylist(), strict=True)
