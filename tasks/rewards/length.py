"""Penalty for responses that are shorter or longer than wanted, in words."""

from __future__ import annotations


def compute_score(
    solution_str: str,
    min_words: int = 0,
    max_words: int | None = None,
    falloff_words: int = 100,
    max_penalty: float = -1.0,
) -> float:
    """Penalise the distance from a window of lengths.

    Parsing rule: words are what blanks and line breaks separate. A length in tokens is the business of
    `reward_model.overlong_buffer`.

    Args:
        min_words: shortest length without a penalty.
        max_words: longest length without a penalty; None: no bound.
        falloff_words: distance from the window at which the penalty is full.
        max_penalty: the full penalty; 0 or below.

    Returns:
        0.0 from `min_words` to `max_words`, both included; outside `max_penalty` times distance / `falloff_words`,
        and never more than the full penalty.
    """
    if min_words < 0 or (max_words is not None and max_words < min_words) or falloff_words < 1 or max_penalty > 0:
        raise ValueError(
            f"length: min_words={min_words}, max_words={max_words}, falloff_words={falloff_words}, "
            f"max_penalty={max_penalty:g} give no window. 0 <= min_words <= max_words, falloff_words >= 1 and "
            "max_penalty <= 0. Set them in the kwargs of reward.functions[]."
        )
    if min_words == 0 and max_words is None:
        raise ValueError("length: every length is wanted. Set min_words or max_words in its kwargs.")
    words = len(solution_str.split())
    above = 0 if max_words is None else words - max_words
    distance = max(min_words - words, above, 0)
    return max_penalty * min(distance / falloff_words, 1.0) + 0.0
