"""Reward for questions with short answers: the answer is one of the references, letter by letter, after tidying."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0, within: bool = False
) -> dict[str, Any]:
    """Compare the answer of a response with the references.

    Parsing rule: the content of the last `<answer>…</answer>`. Both sides lose upper case, punctuation, the words
    a, an and the, and repeated blanks.

    Args:
        ground_truth: one reference, a list of them, or `{"target": one or a list}` (verl's search-R1 form).
        format_score: for a wrong answer.
        score: for a right one.
        within: a reference may also be a part of the answer.

    Returns:
        `score` and `pred`; no answer tag scores 0.
    """
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    if not found:
        return {"score": 0.0, "pred": None}
    answer = found[-1].strip()
    tidy_answer = _tidy(answer)
    references = [_tidy(reference) for reference in _references(ground_truth)]
    right = any(reference in tidy_answer if within else reference == tidy_answer for reference in references)
    return {"score": score if right else format_score, "pred": answer}


def _references(ground_truth: Any) -> list[str]:
    target = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    return [str(item) for item in target] if isinstance(target, list | tuple) else [str(target)]


def _tidy(text: str) -> str:
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
