"""Reward for grade-school problems whose answer is a number after `####`."""

from __future__ import annotations

import re
from typing import Any, Literal

SEARCHED = 300
"""Only this many characters at the end of a response are searched: an answer stands last."""


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Compare the last answer of a response with the reference as texts of digits.

    Parsing rule: only the last 300 characters are searched. `strict` takes what follows the last `#### ` (hash signs
    and one blank), `flexible` the last number anywhere in them. From either, commas and points at the end are taken
    away: "#### 1,234" is 1234, "#### 42." is 42. "#### 3.50" is not 3.5, as in verl. A reference that is a whole worked
    solution counts from its own `####`.

    Args:
        method: how the answer is found.
        format_score: for a wrong answer in the right form.
        score: for the right answer.

    Returns:
        `score` and `pred`; no answer at all scores 0.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method is 'strict' or 'flexible', not {method!r}")
    answer = _strict(solution_str[-SEARCHED:]) if method == "strict" else _flexible(solution_str[-SEARCHED:])
    if answer is None:
        return {"score": 0.0, "pred": None}
    reference = _clean(str(ground_truth).rsplit("####", 1)[-1])
    return {"score": score if answer == reference else format_score, "pred": answer}


def _strict(text: str) -> str | None:
    found = re.findall(r"#### (-?[0-9.,]+)", text)
    return _clean(found[-1]) or None if found else None


def _flexible(text: str) -> str | None:
    numbers = [_clean(number) for number in re.findall(r"-?[0-9.,]+", text)]
    return next((number for number in reversed(numbers) if number), None)


def _clean(number: str) -> str:
    return number.strip().replace(",", "").rstrip(".")
