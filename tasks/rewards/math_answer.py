"""Reward for mathematics: the last boxed answer is equal to the reference as a text, or by math-verify."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from tasks.rewards.latex_text import last_boxed, normalised

# Its own time limits raise off the main thread and are off here: the process that runs this is killed at the limit.
# It warns about that in every process.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def compute_score(solution_str: str, ground_truth: Any, score: float = 1.0) -> dict[str, Any]:
    r"""Compare the content of the last `\boxed{…}` with the reference.

    Parsing rule: the last box of the whole response; `\boxed 6` counts as one, an empty box, one that is not closed
    and `\fbox` do not. Of a reference with a box the last box counts, else all of it. Answers are equal when their
    texts are (latex_text.normalised), or when math-verify finds their values equal.

    Returns:
        `score` (0 for a wrong answer and for none) and `pred`, the content of the box.
    """
    answer = last_boxed(solution_str)
    if not answer:
        return {"score": 0.0, "pred": None}
    reference = str(ground_truth)
    boxed_reference = last_boxed(reference)
    reference = reference if boxed_reference is None else boxed_reference
    right = normalised(answer) == normalised(reference) or _equal_values(answer, reference)
    return {"score": score if right else 0.0, "pred": answer}


def _equal_values(answer: str, reference: str) -> bool:
    wanted = parse(_boxed(reference), parsing_timeout=None, raise_on_error=True)
    found = parse(_boxed(answer), parsing_timeout=None, raise_on_error=True)
    return bool(verify(wanted, found, timeout_seconds=None, raise_on_error=True))


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"
