"""Penalty for responses that say the same again: the share of their n-grams that stood before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def compute_score(solution_str: str, ngram_size: int = 3, max_penalty: float = -1.0) -> float:
    """Penalise repeated runs of words.

    Parsing rule: words are what blanks and line breaks separate, without upper case; punctuation belongs to its word.
    A text without blanks is one word and never penalised.

    Args:
        ngram_size: words of a run.
        max_penalty: what a text would get that is nothing but repetition; 0 or below.

    Returns:
        `max_penalty` times repeated_share; 0.0 for an empty text.
    """
    if ngram_size < 1 or max_penalty > 0:
        raise ValueError(
            f"repetition: ngram_size={ngram_size} must be 1 or above and max_penalty={max_penalty:g} 0 or below. "
            "Set them in the kwargs of reward.functions[]."
        )
    return max_penalty * repeated_share(solution_str.lower().split(), ngram_size) + 0.0


def repeated_share(items: Sequence[Hashable], ngram_size: int) -> float:
    """Share of n-grams that stood before: 1 - different n-grams / n-grams (arXiv 2502.03373, appendix; TRL and
    open-r1, `get_repetition_penalty_reward`).

    Args:
        items: words, or token ids.
        ngram_size: items of an n-gram.

    Returns:
        0.0 where there are fewer items than that.
    """
    count = len(items) - ngram_size + 1
    if count < 1:
        return 0.0
    return 1.0 - len(set(zip(*(items[start:] for start in range(ngram_size)), strict=False))) / count
