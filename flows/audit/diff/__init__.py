"""`grpoflow diff`: where two runs, two lineages of a run, or two steps part, and what came of it.

One step is held at a time. Up to the first step that differs every output is compared; behind it only samples, rewards
and metrics are, because all that follows from a difference differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.audit.diff.samples import Parting, PromptFlip, SampleDiff, compare_samples
from flows.audit.diff.stages import StageDiff, compare_stages, differences, module_differences
from flows.audit.rows_out import json_line
from flows.audit.sources import Source, open_source
from flows.audit.steps import parse_steps
from flows.run_folder import config_of
from storage import StorageError
from storage.durable import read_json
from storage.ledger import StepView

NAMES = (
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "storage.root",
    "tracking",
    "orchestration",
)
"""Configuration keys that say where a run is kept and shown: listed, but no difference of what was computed."""

MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")
"""Beginnings of metrics that no two runs have in common; they are not compared."""

CHANGED = 6
"""Exit code of `--exit-code` when something differs."""


@dataclass
class MetricDiff:
    """One metric of both.

    Attributes:
        a: value at the last step that both have.
        b: the same of B.
        steps: how many steps differ.
        first: the first of them.
    """

    a: float | None = None
    b: float | None = None
    steps: int = 0
    first: int | None = None


@dataclass
class Diff:
    """What differs between A and B.

    Attributes:
        a: what A is.
        b: what B is.
        config: keys of the configuration with both values.
        code: modules whose source differs, with the first step at which an artifact says so.
        inputs: digests and counts of data and model with both values.
        steps: which steps are compared, and which only one of them has: `both`, `only in A`, `only in B`.
        first_step: number (in A) of the first step with an output that differs; None: there is none.
        first: stages of that step that differ from equal inputs; the first of them is where A and B part.
        made_otherwise: stages that were made from something else and still are equal: stage, step, what.
        unknown: outputs that cannot be compared because rows were dropped.
        by_step: samples and rewards of each step that differs.
        flips: prompts whose score went up or down.
        partings: responses that part.
        metrics: metrics that differ.
    """

    a: str
    b: str
    config: dict[str, list[Any]] = field(default_factory=dict)
    code: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    first_step: int | None = None
    first: list[StageDiff] = field(default_factory=list)
    made_otherwise: list[dict[str, Any]] = field(default_factory=list)
    unknown: list[dict[str, Any]] = field(default_factory=list)
    by_step: list[dict[str, Any]] = field(default_factory=list)
    flips: list[PromptFlip] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)
    metrics: dict[str, MetricDiff] = field(default_factory=dict)

    @property
    def differ(self) -> bool:
        """Whether anything differs but names, places and measured times."""
        config = any(not _is_name(key) for key in self.config)
        apart = self.steps.get("only in A") or self.steps.get("only in B")
        found = (
            self.code,
            self.inputs,
            apart,
            self.first,
            self.made_otherwise,
            self.unknown,
            self.by_step,
            self.metrics,
        )
        return config or any(found)


def diff_command(words: tuple[str, str], steps: str | None, as_json: bool, exit_code: bool, limit: int) -> int:
    """Compare, print, and return the exit code.

    Args:
        words: A and B, each `RUN`, `RUN@STEP`, `RUN#LINEAGE` or `RUN#LINEAGE@STEP`.
        steps: only these, as `A..B`; None: all.
        as_json: print JSON.
        exit_code: return 6 when something differs.
        limit: flips, responses and metrics that are listed at most.
    """
    from flows.audit.diff.text import in_words

    sources = open_source(words[0]), open_source(words[1])
    found = compare(*sources, steps=steps, limit=limit)
    if as_json:
        print(json_line({**asdict(found), "differ": found.differ}))
    else:
        print(in_words(found, sources, limit))
    return CHANGED if exit_code and found.differ else 0


def compare(a: Source, b: Source, steps: str | None = None, limit: int = 10) -> Diff:
    """Find what differs between two runs, lineages or steps.

    Args:
        a: the one.
        b: the other.
        steps: only these, as `A..B`; None: all.
        limit: flips and responses that are kept at most.

    Raises:
        StorageError: an artifact is damaged, or they have no step in common.
        ValueError: `steps` is no range.
    """
    found = Diff(a.name, b.name)
    pairs = _pairs(a, b, steps, found)
    _compare_what_they_began_with(a, b, found)
    for one, other in pairs:
        _compare_step(a.run.step(one), b.run.step(other), found, limit)
    return found


def _pairs(a: Source, b: Source, steps: str | None, found: Diff) -> list[tuple[int, int]]:
    """The steps to compare: those of one number; of two steps that are named, these."""
    if a.step is not None or b.step is not None:
        pair = [step for step in (a.step, b.step) if step is not None]
        for source, step in ((a, pair[0]), (b, pair[-1])):
            if step not in source.run.steps():
                raise StorageError(f"{source.name} has no step {step}")
        found.steps = {"both": pair, "only in A": [], "only in B": []}
        return [(pair[0], pair[-1])]
    have = [set(source.run.steps() if steps is None else parse_steps(steps, source.run)) for source in (a, b)]
    both = sorted(have[0] & have[1])
    found.steps = {"both": both, "only in A": sorted(have[0] - have[1]), "only in B": sorted(have[1] - have[0])}
    if not both:
        raise StorageError(f"{a.name} and {b.name} have no step in common{f' in --steps {steps}' if steps else ''}")
    return [(step, step) for step in both]


def _compare_what_they_began_with(a: Source, b: Source, found: Diff) -> None:
    lineages = [source.run.lineage if source.step is None else source.run.lineage_of(source.step) for source in (a, b)]
    mine, yours = (config_of(s.run, n).model_dump(mode="json") for s, n in zip((a, b), lineages, strict=True))
    found.config = {key: [one, other] for key, one, other in differences(mine, yours)}
    found.inputs = {key: [one, other] for key, one, other in differences(_inputs(a), _inputs(b))}


def _inputs(source: Source) -> dict[str, Any]:
    """Digests and counts of what a lineage was begun with; {} where it was not written down."""
    run = source.run
    begun = run.document("inputs.json")
    path: Path = begun if begun.exists() else run.root / "inputs.json"
    try:
        values = read_json(path)
        return {**values["digests"], **{f"prompts {name}": count for name, count in values["counts"].items()}}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged: {error!r}") from error


def _compare_step(a: StepView, b: StepView, found: Diff, limit: int) -> None:
    _compare_code(a, b, found)
    _compare_metrics(a, b, found)
    if found.first_step is None:
        _compare_outputs(a, b, found)
    if found.first_step is not None:
        _compare_rows(a, b, found, limit)


def _compare_code(a: StepView, b: StepView, found: Diff) -> None:
    for stage in set(a.stages()) & set(b.stages()):
        one, other = a.manifest(stage), b.manifest(stage)
        if one is not None and other is not None:
            for module in module_differences(one, other):
                found.code.setdefault(module, a.index)


def _compare_outputs(a: StepView, b: StepView, found: Diff) -> None:
    stages = compare_stages(a, b)
    known = {(each["stage"], tuple(each["because"])) for each in found.made_otherwise}
    for stage in stages:
        if stage.output == "unknown":
            found.unknown.append({"step": a.index, "stage": stage.stage})
        if stage.output == "equal" and stage.because and (stage.stage, stage.because) not in known:
            found.made_otherwise.append({"step": a.index, "stage": stage.stage, "because": list(stage.because)})
    apart = [stage for stage in stages if stage.output not in ("equal", "unknown")]
    if apart:
        found.first_step = a.index
        found.first = [stage for stage in apart if stage.inputs_equal] or apart[:1]


def _compare_rows(a: StepView, b: StepView, found: Diff, limit: int) -> None:
    for prefix in ("", "val_"):
        rows = compare_samples(a, b, prefix)
        if rows is None or not _counts(rows):
            continue
        names = ("prompts", "samples", "responses")
        counts = {name: dict(getattr(rows, name)) for name in names}
        found.by_step.append({"step": a.index, "of": "validation" if prefix else "training", **counts})
        found.flips += rows.flips[: max(limit - len(found.flips), 0)]
        found.partings += rows.partings[: max(limit - len(found.partings), 0)]


def _counts(rows: SampleDiff) -> bool:
    """Whether anything is other than the same."""
    alike = {"same", "equal"}
    both: Counter[str] = rows.prompts + rows.samples + rows.responses
    return any(name not in alike for name in both)


def _compare_metrics(a: StepView, b: StepView, found: Diff) -> None:
    for name, mine, yours in _metrics(a, b):
        metric = found.metrics.get(name)
        if metric is None and mine == yours:
            continue
        metric = found.metrics.setdefault(name, MetricDiff(first=a.index))
        metric.a, metric.b = mine, yours
        metric.steps += mine != yours


def _metrics(a: StepView, b: StepView) -> Iterator[tuple[str, float | None, float | None]]:
    """Metrics that are no measured times, with both values; None: not finite, or only the other has it."""
    mine, yours = ((view.record or {}).get("metrics", {}) for view in (a, b))
    same_step = a.index == b.index
    for name in sorted({*mine, *yours}):
        if not name.startswith(MEASURED) and (same_step or name != "training/global_step"):
            yield name, mine.get(name), yours.get(name)


def _is_name(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NAMES)
