"""How one reward function is loaded and called, and what it may return. Runs in worker processes: imports little."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.json_values import jsonable

Form = Literal["sample", "batch"]

LONGEST_MESSAGE = 1_000
"""Characters that are kept of an error's text."""
LARGEST_EXTRA = 1_048_576
"""Characters of JSON that one extra value may have; a larger one is replaced by its note."""
ANSWER_KEYS = ("pred", "extracted")
"""Extras that say which answer was found in the response; their value is the verdict's `extracted`."""
GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a function of verl's form is given, by keyword."""


class RewardError(ValueError):
    """A reward function cannot be used, or too many samples have no verdict: the step stops, the rollouts stay."""


class Refused(Exception):
    """What a function returned is no score: a mistake in the function, not a bad sample."""


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function and how it wants to be called.

    Attributes:
        form: `sample`: verl's `(data_source, solution_str, ground_truth, extra_info, **kwargs)`, one sample a call.
            `batch`: TRL's `(prompts, completions, **columns)`, the samples of a group a call.
        accepts: names of its parameters; None: any (`**kwargs`).
    """

    name: str
    function: Callable[..., Any]
    form: Form
    accepts: frozenset[str] | None
    kwargs: dict[str, Any]


def load_function(name: str, target: str, kwargs: dict[str, Any]) -> LoadedFunction:
    """Import a function and tell its form by its parameters' names.

    Args:
        target: `module:function` or `/absolute/file.py:function`.

    Raises:
        RewardError: it cannot be imported or has neither form.
    """
    function = _import(target)
    parameters = inspect.signature(function).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "completions" in names:
        form: Form = "batch"
    elif "solution_str" in names:
        form = "sample"
    else:
        raise RewardError(
            f"reward function {target} takes ({', '.join(parameters)}). It must take verl's (data_source, "
            "solution_str, ground_truth, extra_info), called per sample, or TRL's (prompts, completions, **columns), "
            "called per group."
        )
    needed = {n for n, p in parameters.items() if n in names and p.default is p.empty}
    if form == "sample" and (missing := needed - set(GIVEN) - set(kwargs)):
        raise RewardError(
            f"reward function {target} needs {', '.join(sorted(missing))}, which nobody gives. Set them in its kwargs "
            "(reward.functions[].kwargs or custom_reward_function.reward_kwargs), or give them defaults."
        )
    return LoadedFunction(name, function, form, None if any_name else frozenset(names), kwargs)


def score_sample(loaded: LoadedFunction, row: Mapping[str, Any]) -> dict[str, Any]:
    """Score one row with a function of verl's form.

    Returns:
        See `_outcome`; with `raised` in it when the function raised.

    Raises:
        Refused: it returned neither a number nor None nor a dict with a `score`.
    """
    given = {key: row[key] for key in GIVEN if loaded.accepts is None or key in loaded.accepts}
    value, raised, seconds = _call(loaded, {**given, **loaded.kwargs})
    if raised is not None:
        return {"raised": raised, "seconds": seconds}
    return _outcome(loaded, value, seconds)


def score_batch(loaded: LoadedFunction, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Score rows with one call of a function of TRL's form.

    It is given `prompts`, `completions` (messages where the prompt is a list of messages, else texts) and, as lists
    with an entry per completion, `ground_truth`, `data_source` and every key of the rows' `extra_info`.

    Raises:
        Refused: it did not return a list with one number or None per completion, or needs a column that is not there.
    """
    value, raised, seconds = _call(loaded, {**_batch_arguments(loaded, rows), **loaded.kwargs})
    if raised is not None:
        return [{"raised": raised, "seconds": seconds / len(rows)} for _ in rows]
    if not isinstance(value, str | bytes | Mapping) and callable(getattr(value, "tolist", None)):
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != len(rows):
        raise Refused(
            f"reward function {loaded.name!r} returned {_described(value)} for {len(rows)} completions. It must return "
            f"a list of {len(rows)}: one number or None per completion."
        )
    for place, item in enumerate(value):
        if item is not None and _number(item) is None:
            raise Refused(
                f"reward function {loaded.name!r} returned {_described(item)} as item {place} of {len(rows)}. "
                "It must return one number or None per completion."
            )
    return [_outcome(loaded, item, seconds / len(rows)) for item in value]


def _outcome(loaded: LoadedFunction, value: Any, seconds: float) -> dict[str, Any]:
    """One sample's part of a verdict: score or null, status, extracted answer, extras, message, seconds."""
    extras = dict(value) if isinstance(value, Mapping) else {}
    if isinstance(value, Mapping) and "score" not in value:
        raise Refused(
            f"reward function {loaded.name!r} returned a dict without `score`; it has {sorted(map(str, value))}"
        )
    score = extras.pop("score") if isinstance(value, Mapping) else value
    number = None if score is None else _number(score)
    if score is not None and number is None:
        raise Refused(
            f"reward function {loaded.name!r} returned {_described(score)} for one response. It must return a number, "
            "None, or a dict with a number or None as `score`."
        )
    looked = [key for key in ANSWER_KEYS if key in extras]
    answers = [extras.pop(key) for key in looked]
    extracted = next((_text(answer) for answer in answers if answer is not None), None)
    outcome = {"score": number, "status": "ok", "extracted": extracted, "message": None, "seconds": seconds}
    if number is None:
        outcome["status"] = "not_applicable"
    elif not math.isfinite(number):
        outcome |= {"score": None, "status": "error", "message": f"{loaded.name} returned {number} as score"}
    elif looked and extracted is None:
        outcome["status"] = "unparsed"
    return outcome | {"extra": convert_extras(extras) if extras else {}}


def convert_extras(extras: Mapping[Any, Any]) -> dict[str, Any]:
    """Extras as a JSON object, by the rule of json_values.jsonable; what was done stands under `_notes`, by key.

    A value of more than 1,048,576 characters of JSON is replaced by null and a note.
    """
    converted, notes = jsonable(extras)
    for key, value in converted.items():
        size = len(json.dumps(value))
        if size > LARGEST_EXTRA:
            converted[key] = None
            notes[key] = f"left out: {size} characters of JSON, of {LARGEST_EXTRA} allowed"
    return {**converted, "_notes": notes} if notes else converted


def _import(target: str) -> Callable[..., Any]:
    place, _, name = target.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        raise RewardError(f"reward function {target} cannot be imported: {_error_text(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"reward function {target}: {place} has no function {name}")
    return function


def _import_file(path: Path) -> Any:
    name = f"grpoflow_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and type hints in the file look their module up; its neighbours may be imported from it.
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _call(loaded: LoadedFunction, arguments: dict[str, Any]) -> tuple[Any, str | None, float]:
    """Value or error text, and seconds. Whatever the function raises is caught: SystemExit too ends only the call."""
    begun = time.perf_counter()
    try:
        value = loaded.function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        return value, None, time.perf_counter() - begun
    except BaseException as error:
        return None, _error_text(error), time.perf_counter() - begun


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _batch_arguments(loaded: LoadedFunction, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": [_completion(row) for row in rows],
        "ground_truth": [row["ground_truth"] for row in rows],
        "data_source": [row["data_source"] for row in rows],
    }
    for key in {key for row in rows for key in row["extra_info"]} - set(columns):
        columns[key] = [row["extra_info"].get(key) for row in rows]
    if loaded.accepts is None:
        return columns
    parameters = inspect.signature(loaded.function).parameters
    needed = {n for n in loaded.accepts if parameters[n].default is inspect.Parameter.empty}
    if missing := needed - set(columns) - set(loaded.kwargs):
        raise Refused(
            f"reward function {loaded.name!r} needs the columns {sorted(missing)}; the data has {sorted(columns)}"
        )
    return {key: values for key, values in columns.items() if key in loaded.accepts}


def _completion(row: Mapping[str, Any]) -> Any:
    text = row["solution_str"]
    return [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text


def _number(value: Any) -> float | None:
    """A number of any library as a float; None: it is none. One-element lists and arrays are none."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{repr(value)[:80]} ({type(value).__name__})"


def _text(value: Any) -> str:
    converted, _ = jsonable(value)
    return converted if isinstance(converted, str) else json.dumps(converted)


def _error_text(error: BaseException) -> str:
    """Kind, text and place of an error, on one line and of bounded length."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""  # noqa: PTH119
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its text cannot be made"
    return f"{type(error).__name__}: {text[:LONGEST_MESSAGE]}{place}"
