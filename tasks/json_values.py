"""Python values as JSON: one written rule for what has no JSON form, and text that Arrow can hold."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST_TEXT = 65_536
"""Characters that are kept of one text of a reward function's extras."""
LONGEST_REPR = 200
"""Characters that are kept of the repr of an object that has no JSON form."""
DEEPEST = 32
"""Levels of nesting; below them a value is replaced by its repr, which also ends cycles."""


def jsonable(value: Any, longest_text: int | None = LONGEST_TEXT) -> tuple[Any, dict[str, str]]:
    """Convert any value to one that JSON holds.

    The rule, by type:
        None, bool, int, str, finite float: kept. A lone surrogate in a text is kept; json_text escapes it.
        list, tuple: list. Mapping: object with text keys.
        set, frozenset: sorted list. bytes: `{"base64": text}`. Decimal, Fraction: text. date, time: ISO text.
        NumPy and torch scalars and arrays, and whatever else has `tolist()`: number or nested lists.
        NaN and infinities: null.
        text longer than `longest_text`: its start and a mark with the number of characters.
        anything else, and what lies more than 32 levels deep: the first 200 characters of its repr.

    Returns:
        The converted value, and for every place where something else than lists, numbers and texts stood, what was
        done, by path: `{"rows[2].limit": "nan became null"}`.
    """
    notes: dict[str, str] = {}
    return _convert(value, "", notes, longest_text, 0), notes


def json_text(value: Any) -> str:
    """Compact JSON of a JSON value; lone surrogates are escaped, so that the text has a UTF-8 form.

    Raises:
        ValueError: a NaN or an infinity. TypeError: no JSON value; see jsonable.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _convert(value: Any, path: str, notes: dict[str, str], longest: int | None, depth: int) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return _finite(value, path, notes)
    if isinstance(value, str):
        return _cut(str(value), path, notes, longest)
    if depth >= DEEPEST:
        return _repr(value, path, notes)
    if isinstance(value, Mapping):
        return {
            _key(key, path, notes): _convert(item, f"{path}.{key}" if path else str(key), notes, longest, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_convert(item, f"{path}[{i}]", notes, longest, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        notes[path] = "a set became a sorted list"
        return _convert(_sorted(value), path, notes, longest, depth + 1)
    for kind, convert, note in _TEXT_FORMS:
        if isinstance(value, kind):
            notes[path] = note
            return convert(value)
    if callable(getattr(value, "tolist", None)):
        return _convert(value.tolist(), path, notes, longest, depth + 1)
    return _repr(value, path, notes)


_TEXT_FORMS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any], str], ...] = (
    ((bytes, bytearray), lambda value: {"base64": base64.b64encode(value).decode()}, "bytes became base64"),
    (Decimal, str, "a Decimal became text"),
    (Fraction, str, "a Fraction became text"),
    ((datetime, date, time), lambda value: value.isoformat(), "a date became text"),
)


def _finite(value: float, path: str, notes: dict[str, str]) -> float | None:
    if math.isfinite(value):
        return value
    notes[path] = f"{value} became null"
    return None


def _cut(text: str, path: str, notes: dict[str, str], longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    notes[path] = f"cut to {longest} of {len(text)} characters"
    return f"{text[:longest]}… [cut: {len(text)} characters in all]"


def _key(key: Any, path: str, notes: dict[str, str]) -> str:
    if not isinstance(key, str):
        notes[f"{path}.{key}" if path else str(key)] = f"a key of type {type(key).__name__} became text"
    return str(key)


def _sorted(values: set | frozenset) -> list:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def _repr(value: Any, path: str, notes: dict[str, str]) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    notes[path] = f"an object of type {type(value).__name__} became the start of its repr"
    return text[:LONGEST_REPR]
