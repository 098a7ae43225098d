"""What `grpoflow diff` found, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flows.audit.compare import Where
from flows.audit.diff import Diff
from flows.audit.diff.samples import Parting
from flows.audit.diff.stages import StageDiff
from flows.audit.pieces import pieces_of
from flows.audit.sources import Source, steps_named
from storage import Run

_WIDTH = 60
"""Characters of a value or text that is shown."""
_FIRST = ("val-core/", "critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss", "actor/grad_norm")
"""Metrics that are listed before the others."""
_CHANGES = ("up", "down", "same", "missing", "only in A", "only in B")


def in_words(found: Diff, sources: tuple[Source, Source], limit: int) -> str:
    """All that differs, one matter after the other; a single line where nothing does."""
    steps = found.steps["both"]
    what = f"{steps_named(steps)} compared"
    head = f"A {found.a}, B {found.b}: {what if _same_steps(sources) else f'step {steps[0]} with step {steps[-1]}'}"
    if not found.differ and not found.config:
        return f"{head}; no difference"
    lines = [head]
    lines += [f"  {name[0].upper()}{name[1:]}: {steps_named(there)}" for name, there in _apart(found)]
    lines += _section("configuration", [f"{key}: A {_value(a)}, B {_value(b)}" for key, (a, b) in found.config.items()])
    lines += _section("code", [f"{module}, first at step {step}" for module, step in found.code.items()])
    lines += _section(
        "data and model", [f"{key}: A {_value(a)}, B {_value(b)}" for key, (a, b) in found.inputs.items()]
    )
    lines += _first(found)
    lines += _section("made from something else, equal all the same", _otherwise(found))
    lines += _section(
        "not to be compared, rows were dropped", [f"{e['stage']} of step {e['step']}" for e in found.unknown]
    )
    lines += _rows(found, limit)
    lines += _partings(found.partings, sources[0].run)
    lines += _metrics(found, limit)
    return "\n".join(lines)


def _same_steps(sources: tuple[Source, Source]) -> bool:
    a, b = (source.step for source in sources)
    return a is None or b is None or a == b


def _apart(found: Diff) -> Iterator[tuple[str, list[int]]]:
    for name in ("only in A", "only in B"):
        if found.steps[name]:
            yield name, found.steps[name]


def _section(title: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _first(found: Diff) -> list[str]:
    if found.first_step is None:
        return ["", "every output that was compared is equal"]
    lines = []
    for number, stage in enumerate(found.first):
        which = "first difference" if number == 0 else "beside it"
        lines.append(f"{which}: step {found.first_step}, {stage.stage}: {_verdict(stage)}")
        lines += [f"  {sentence}" for sentence in stage.because]
        if not stage.because and stage.output == "differs" and stage.inputs_equal:
            lines.append(
                "  nothing that it was made from differs: it was made on another machine, or is not repeatable"
            )
        if stage.first is not None:
            lines.append(f"  first at {_where(stage.first)}")
    return ["", *lines]


def _verdict(stage: StageDiff) -> str:
    if stage.output != "differs":
        return f"{stage.output} has it"
    inputs = "its inputs are equal" if stage.inputs_equal else "its inputs differ too: the policy, or what came before"
    return f"the output differs, {inputs}"


def _where(where: Where) -> str:
    token = "" if where.token is None else f", token {where.token}"
    return f"{where.row}, {where.column}{token}: A {_value(where.stored)}, B {_value(where.made)}"


def _otherwise(found: Diff) -> Iterator[str]:
    for each in found.made_otherwise:
        yield f"{each['stage']} of step {each['step']}: {'; '.join(each['because'])}"


def _rows(found: Diff, limit: int) -> list[str]:
    lines = []
    for each in found.by_step[:limit]:
        prompts = ", ".join(f"{each['prompts'][name]} {name}" for name in _CHANGES if each["prompts"].get(name))
        samples = ", ".join(f"{each['samples'][name]} {name}" for name in _CHANGES if each["samples"].get(name))
        part = each["responses"].get("part", 0)
        both = part + each["responses"].get("equal", 0)
        responses = f"; {part} of {both} responses part" if both else ""
        of = " (validation)" if each["of"] == "validation" else ""
        lines.append(f"step {each['step']}{of}: prompts {prompts}; samples {samples}{responses}")
    if len(found.by_step) > limit:
        lines.append(f"… and {len(found.by_step) - limit} more; --json has all")
    flips = [
        f"step {flip.step}, {flip.group_a}: {flip.a:.4g} -> {flip.b:.4g}  {_value(flip.prompt)}" for flip in found.flips
    ]
    return [*_section("rewards from A to B", lines), *_section("prompts that flipped", flips)]


def _partings(partings: list[Parting], run: Run) -> list[str]:
    ids = sorted({number for parting in partings for number in (parting.a, parting.b) if number is not None})
    texts = pieces_of(run, ids).texts if ids else {}

    def token(number: int | None) -> str:
        if number is None:
            return "nothing"
        return f"{number} {texts[number]!r}" if number in texts else str(number)

    lines = [
        f"step {each.step}, {each.group_a}, sample {each.sample_index}, token {each.token}: "
        f"A {token(each.a)}, B {token(each.b)}"
        for each in partings
    ]
    return _section("responses part at", lines)


def _metrics(found: Diff, limit: int) -> list[str]:
    named = [(name, metric) for name, metric in found.metrics.items() if not name.startswith("shape/")]
    named.sort(key=lambda pair: not pair[0].startswith(_FIRST))
    lines = []
    for name, metric in named[:limit]:
        change = "" if metric.a is None or metric.b is None else f" ({metric.b - metric.a:+.4g})"
        many = f"{metric.steps} step{'s' if metric.steps > 1 else ''} differ{'' if metric.steps > 1 else 's'}"
        lines.append(f"{name}: A {_value(metric.a)}, B {_value(metric.b)}{change}; {many}, first {metric.first}")
    left = len(found.metrics) - len(lines)
    if left > 0:
        lines.append(f"… and {left} more; --json or --limit shows all")
    return _section("metrics at the last step that both have", lines)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = "nothing" if value is None else str(value).replace("\n", "\\n")
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
