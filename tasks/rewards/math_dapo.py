"""Reward of the DAPO and AIME data: +1 or -1 for the answer after the last `Answer:`, or in the last box."""

from __future__ import annotations

import re
from typing import Any

from tasks.rewards.latex_text import last_boxed, normalised

SEARCHED = 300
"""Only this many characters at the end of a response are searched."""
SEARCHED_FOR_BOX = 100
"""strict_box_verify searches only this many."""


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    r"""Compare the last answer of a response with the reference.

    Parsing rule: in the last 300 characters, the rest of the line after the last `Answer:` (upper or lower case), else
    the last `\boxed{…}`; both sides are brought to one spelling (latex_text.normalised) and compared as texts. With
    `strict_box_verify` only a box in the last 100 characters counts, letter by letter.

    Returns:
        `score` (1, else -1, also where there is no answer), `acc` and `pred`.
    """
    tail = solution_str[-SEARCHED:]
    reference = str(ground_truth)
    if strict_box_verify:
        answer = last_boxed(tail[-SEARCHED_FOR_BOX:])
        right = answer == reference
    else:
        lines = re.findall(r"answer\s*:\s*([^\n]+)", tail, flags=re.IGNORECASE)
        written = lines[-1] if lines else last_boxed(tail)
        answer = None if written is None else normalised(written)
        right = answer is not None and answer == normalised(reference)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}
