"""The HTML file: template, style, script and data put into one text that asks nothing of a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from flows.audit.report.pack import pack_json

SCRIPTS = ("data", "dom", "charts", "table", "run", "step", "group", "tokens", "main")
"""Files of the script, in their order; they share one scope."""

LATEST_EVENTS = 200


@cache
def _source(name: str) -> str:
    return (files("flows.audit.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    joined = "\n".join(_source(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{joined}}})();\n'


def render(
    about: Mapping[str, Any],
    shown: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Mapping[str, Any]],
) -> str:
    """The file's text.

    Args:
        about: the run as `run_data.about_run` gives it.
        shown: the template's other values.
        steps: as `step_data.step_data` gives them, by step.
        curves: `curves` of the run, and `other_curves` of the run it is compared with.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    numbers = [step["index"] for step in steps]
    run = {
        "name": about["name"],
        "folder": shown["folder"],
        "steps": numbers,
        "compare": {"name": shown["compare"]} if shown["compare"] else None,
        **{name: {key: one[key] for key in ("steps", "names")} for name, one in curves.items()},
    }
    events = about["events"][::-1]
    return environment.from_string(_source("report.html.j2")).render(
        run=about,
        last=numbers[-1] if numbers else None,
        steps=numbers,
        events=events[:LATEST_EVENTS],
        earlier_events=max(0, len(events) - LATEST_EVENTS),
        blobs=list(_blobs(run, steps, curves)),
        script=Markup(script),
        script_hash=Markup(f"sha256-{digest}"),
        style=Markup(_source("report.css")),
        version=_version(),
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **shown,
    )


def _blobs(
    run: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], curves: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What the script unpacks: base64 texts with the ids under which it looks for them."""
    from markupsafe import Markup

    def blob(name: str, data: str, kind: str | None = None, factor: float = 1.0) -> dict[str, Any]:
        return {
            "name": name,
            "type": kind,
            "factor": factor,
            "data": Markup(data),
        }  # base64 has no letter that means something in HTML

    yield blob("run", pack_json(run))
    for name, one in curves.items():
        yield blob(name, one["values"], "float32")
    for step in steps:
        index = step["index"]
        plain = {key: value for key, value in step.items() if key not in ("samples", "tokens", "vocabulary")}
        yield blob(f"step-{index}", pack_json({**plain, "token_columns": list(step.get("tokens", ()))}))
        for key in ("samples", "vocabulary"):
            if key in step:
                yield blob(f"step-{index}-{key}", step[key])
        for name, array in step.get("tokens", {}).items():
            yield blob(f"step-{index}-token-{name}", array["data"], array["type"], array["factor"])


def _version() -> str:
    try:
        return version("grpoflow")
    except PackageNotFoundError:
        return "(not installed)"
