"""`grpoflow sweep report`: one self-contained HTML file with the leaderboard, the space and what mattered in it."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from flows.audit.report.private import public_text
from flows.sweep.board import rungs
from flows.sweep.book import Sweep
from flows.sweep.importance import importances
from flows.sweep.rails import cautions
from flows.sweep.report.pictures import paths, progress, slices
from flows.sweep.table import Row, cell, rows

FILE_NAME = "report.html"


def write_report(sweep: Sweep, path: Path) -> None:
    """Write the file, replacing an older one."""
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(render(sweep), encoding="utf-8")
    aside.rename(path)


def render(sweep: Sweep) -> str:
    """The file's text: no script, nothing from a network."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    found, spec = rows(sweep), sweep.spec
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    mattered, why_not = importances(sweep)
    template = (files("flows.sweep.report") / "templates" / "sweep.html.j2").read_text(encoding="utf-8")
    style = (files("flows.audit.report") / "templates" / "report.css").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        style=Markup(style),
        name=spec.name,
        state=sweep.state,
        facts=_facts(sweep, found),
        objective=spec.objective,
        keys=list(spec.space),
        rows=[_shown(row) for row in found],
        seeds=len(spec.seeds),
        cautions=[public_text(sentence) for sentence in cautions(sweep)],
        progress=Markup(progress(sweep, found)),
        paths=Markup(paths(sweep, found)),
        slices=[(key, Markup(picture)) for key, picture in slices(sweep, found)],
        importances=mattered,
        why_not=why_not,
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _facts(sweep: Sweep, found: list[Row]) -> list[tuple[str, str]]:
    board, spec = sweep.board(), sweep.spec
    done, whole = sum(row.trained_steps for row in found), len(found) * sweep.total * len(spec.seeds)
    stops = ", ".join(map(str, rungs(spec, sweep.total)[:-1]))
    return [
        ("Trials", f"{len(found)}"),
        ("Runs of each", f"{len(spec.seeds)}: seed {', '.join(map(str, spec.seeds))}"),
        ("Training steps", f"{done:,} of {board.planned_steps():,} decided; {whole:,} without pruning"),
        ("Device time", f"{sum(row.seconds for row in found):,.0f} s"),
        ("Sampler", spec.sampler.kind),
        ("Pruning", f"{spec.pruning.kind} at steps {stops}" if stops else "none"),
        ("Begun", f"{sweep.created_at:%Y-%m-%d %H:%M} UTC"),
    ]


def _shown(row: Row) -> dict[str, Any]:
    return {
        "trial": row.trial,
        "state": row.state,
        "values": {key: cell(value) for key, value in row.values.items()},
        "value": cell(row.value),
        "spread": cell(row.spread),
        "runs": row.runs or "",
        "step": row.step or "",
        "steps": row.trained_steps or "",
        "seconds": f"{row.seconds:,.0f}" if row.seconds else "",
        "resumed": row.resumed or "",
        "reused": row.reused or "",
        "reason": public_text(row.reason or ""),
    }
