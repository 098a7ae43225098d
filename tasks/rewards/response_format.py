"""Reward for the form of a response, whatever it says: thoughts in `<think>…</think>` and an answer after them."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"


def compute_score(solution_str: str, pattern: str | None = None) -> float:
    r"""Check the form of a response.

    Parsing rule: the response begins with `<think>`, without a blank before it; `<think>` and `</think>` stand in it
    exactly once, in this order; something else than blanks follows. Thoughts may be empty. With `pattern` the whole
    response must match that regular expression instead, in which `.` is any character, a line break too. Where the
    chat template ends with `<think>`, so that the response begins within the thoughts, a pattern is
    `(?!.*<think>).*?</think>\s*\S.*`.

    Args:
        pattern: a regular expression in Python's syntax. One that backtracks without end is stopped by
            `reward.timeout_s`.

    Returns:
        1.0, else 0.0.
    """
    if pattern is None:
        return float(_thinks_then_answers(solution_str))
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"format: pattern={pattern!r} is no regular expression: {error}. "
            "Mend it in the kwargs of reward.functions[]."
        ) from error
    return float(compiled.fullmatch(solution_str) is not None)


def _thinks_then_answers(text: str) -> bool:
    if not text.startswith(OPEN) or text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return False
    return bool(text.partition(CLOSE)[2].strip())
