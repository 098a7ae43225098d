"""Pictures of a sweep as SVG text: the best value over cost, the space as parallel axes, and one picture per key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from flows.sweep.book import Sweep
from flows.sweep.spec import Parameter
from flows.sweep.table import Row, cell

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1180, 260, 56, 24, 30
Scale = Callable[[float], float]


def progress(sweep: Sweep, found: Sequence[Row]) -> str:
    """Value of each trial in the order of their numbers, and the best so far."""
    worth = {row.trial: row.value for row in found if row.value is not None}
    if not worth:
        return _empty("No trial has a value yet.")
    scale = _scale(list(worth.values()))
    x = _spread(max(row.trial for row in found) + 1)
    parts, line, best = [*_ticks(list(worth.values()), scale)], [], None
    for row in sorted(found, key=lambda one: one.trial):
        if row.value is None:
            continue
        if row.state == "done" and (best is None or sweep.board().is_better(row.value, best)):
            best = row.value
        if best is not None:
            line.append(f"{x(row.trial):.1f},{scale(best):.1f}")
        parts.append(_point(x(row.trial), scale(row.value), row))
    parts.insert(0, f'<polyline points="{" ".join(line)}" fill="none" stroke="var(--a)" stroke-width="1.5"/>')
    parts += [_text(x(number), HEIGHT - 8, str(number), "middle") for number in _some(max(worth) + 1)]
    return _svg(parts, "Value of each trial by its number; the line is the best of those at their end")


def paths(sweep: Sweep, found: Sequence[Row]) -> str:
    """Parallel coordinates: an axis per key, the value last; a line per trial, the stronger the better its value."""
    shown = [row for row in found if row.value is not None]
    keys = list(sweep.spec.space)
    if not shown:
        return _empty("No trial has a value yet.")
    x = _spread(len(keys) + 1, right=140)
    places = [_places(sweep.spec.space[key]) for key in keys]
    worth = _scale([row.value for row in shown if row.value is not None])
    values = [row.value for row in shown if row.value is not None]
    parts = []
    for row in reversed(shown):
        axes = enumerate(zip(keys, places, strict=True))
        points = [(x(i), place(row.values[key])) for i, (key, place) in axes if key in row.values]
        points.append((x(len(keys)), worth(row.value or 0.0)))
        dashes = "" if row.state == "done" else ' stroke-dasharray="4 3"'
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        strength = _strength(row.value or 0.0, values, sweep.spec.objective.mode)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="var(--a)" stroke-width="{1 + 2 * strength:.1f}" '
            f'stroke-opacity="{strength:.2f}"{dashes}>'
            f"<title>{escape(_told(row))}</title></polyline>"
        )
    for i, key in enumerate(keys):
        parts += _axis(x(i), key.rpartition(".")[2], _marks(sweep.spec.space[key], places[i]))
    ends = (min(values), max(values))
    parts += _axis(x(len(keys)), "value", [(worth(end), cell(end)) for end in dict.fromkeys(ends)])
    return _svg(parts, "Each line is a trial, from its values to its objective; dashed: paused before the end")


def slices(sweep: Sweep, found: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """For each key the values of the objective over its values."""
    shown = [row for row in found if row.value is not None]
    for key, parameter in sweep.spec.space.items():
        there = [row for row in shown if key in row.values]
        if not there:
            continue
        place = _places(parameter, along=(LEFT, 380.0))
        scale = _scale([row.value for row in there if row.value is not None], height=190)
        parts = [*_ticks([row.value for row in there if row.value is not None], scale, right=390)]
        parts += [_point(place(row.values[key]), scale(row.value or 0.0), row) for row in there]
        marks = _marks(parameter, place)
        parts += [_text(at, 182, label, "middle") for at, label in marks]
        yield key, _svg(parts, f"Objective by {key}", width=400, height=190)


def _places(parameter: Parameter, along: tuple[float, float] = (HEIGHT - BOTTOM, TOP)) -> Callable[[Any], float]:
    """Where a value lies between two ends: choices at equal distances, numbers on their scale."""
    first, last = along
    if parameter.choice is not None:
        order = [repr(value) for value in parameter.choice]
        step = (last - first) / max(1, len(order) - 1)
        return lambda value: first + step * order.index(repr(value)) if len(order) > 1 else (first + last) / 2
    low, high = parameter.range
    if parameter.is_log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0
    return lambda value: first + (last - first) * ((math.log(value) if parameter.is_log else value) - low) / span


def _marks(parameter: Parameter, place: Callable[[Any], float]) -> list[tuple[float, str]]:
    values = parameter.choice if parameter.choice is not None else parameter.range
    return [(place(value), cell(value)[:18]) for value in values]


def _axis(x: float, name: str, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--strong-line)"/>'
    yield _text(x, HEIGHT - 6, name, "middle", bold=True)
    for y, label in marks:
        # Beside the first axis there is room on its left alone: its lines begin on its right.
        yield _text(x - 6, y + 4, label, "end") if x == LEFT else _text(x + 6, y + 4, label, "start")


def _scale(values: Sequence[float], height: int = HEIGHT) -> Scale:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return lambda value: height - BOTTOM - (height - BOTTOM - TOP) * (value - low) / span


def _spread(count: int, right: int = 20) -> Scale:
    return lambda place: LEFT + (WIDTH - LEFT - right) * place / max(1, count - 1)


def _some(count: int) -> range:
    return range(0, count, max(1, count // 12))


def _ticks(values: Sequence[float], scale: Scale, right: int = WIDTH - 12) -> Iterator[str]:
    for value in dict.fromkeys((min(values), max(values))):
        y = scale(value)
        yield f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
        yield _text(LEFT - 6, y + 4, cell(value), "end")


def _point(x: float, y: float, row: Row) -> str:
    """A trial: filled at its end, a ring where it was paused."""
    fill = "var(--a)" if row.state == "done" else "none"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="var(--a)" stroke-width="1.5">'
        f"<title>{escape(_told(row))}</title></circle>"
    )


def _told(row: Row) -> str:
    values = ", ".join(f"{key.rpartition('.')[2]}={cell(value)}" for key, value in row.values.items())
    spread = f" ± {cell(row.spread)}" if row.spread is not None else ""
    return f"trial {row.trial}: {values}: {cell(row.value)}{spread}, {row.state} at step {row.step}"


def _strength(value: float, values: Sequence[float], mode: str) -> float:
    """How strong a trial's line is, from 0.2 for the worst to 1 for the best: told apart without colours."""
    low, high = min(values), max(values)
    share = (value - low) / ((high - low) or 1.0)
    return 0.2 + 0.8 * (share if mode == "max" else 1 - share)


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    body = "".join(parts)
    fits = 'style="max-width:100%;height:auto"'
    label = f'role="img" aria-label="{escape(title)}"'
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" {label} {fits}>{body}</svg>'


def _empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'
