"""Reward for questions with options: the last option that a response states is the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.rewards.latex_text import last_boxed

MOST_OPTIONS = 10
"""Letters that can be an answer where the options are not known: A to J."""
STATEMENT_LENGTH = 300
"""Characters of a statement that are read."""
OPTION_KEYS = ("options", "choices")
"""Where `extra_info` has the options."""

_MARKS = string.whitespace + "*_$\"'`“”‘’"
_STATED = re.compile(
    r"\b(?:answer|option|choice)[*_]{0,3}\s{0,3}(?:(?:is|was|(?:would|must|should|will) be)\b|[=:：])", re.IGNORECASE
)
_TEXT_COMMAND = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|mbox)\s{0,3}\{([^{}]*)\}")
_BEFORE = r"(?:[\s*_$:：\"'“‘`({\[]|\\[(\[]|(?i:the|option|choice|letter)\s){0,12}"
_ALONE = re.compile(_BEFORE + r"([A-Za-z])[\s*_$\"'”’`)}\].:\\]{0,9}")
_FIRST = re.compile(_BEFORE + r"(?:(?<=[(\[])([a-z])\s?[)\]]|((?!I\s+[a-z])[A-Z])(?![\w'’+#]|-\w))")
_LISTED = re.compile(_BEFORE + r"([A-Z])[*_$]{0,3}[)\].:](?!\w)")


@dataclass(frozen=True)
class Options:
    """The options of a question.

    Attributes:
        letters: the letter of each; where the options are not known, all that can be an answer.
        labels: what the data calls each; empty: not known.
        texts: text of each; empty: not known.
    """

    letters: str
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def letter_of(self, text: str, among: Sequence[str]) -> str | None:
        """Letter of the first label or text in `among` that is this text but for case and what stands at its ends."""
        wanted, tidied = _tidy(text), [_tidy(name) for name in among]
        return self.letters[tidied.index(wanted)] if wanted and wanted in tidied else None

    def letter(self, found: re.Match[str] | None) -> str | None:
        """The letter that a pattern found, in upper case; None: none, or not that of an option."""
        letter = next((group.upper() for group in found.groups() if group), "") if found else ""
        return letter if letter and letter in self.letters else None


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    r"""Compare the option that a response states with the right one.

    Parsing rule: statements are the content of the last `\boxed{…}` and of the last `<answer>…</answer>`, and the rest
    of the line after "answer", "option" or "choice" and "is", "was", "would be", "=" or a colon. A statement names an
    option by a letter alone; else by the option's text, where the options are known; else by the letter it begins with,
    a capital one or a small one in brackets. Letters are A to J, or as many as there are options. Brackets, stars,
    dollars, quotes, `\text{…}` and the word "option" around a letter are passed over, and so is the word "I". The last
    statement that names an option counts: "Answer: B. No, the answer is (C)." is C, "the answer is a mystery" names
    none. Where no statement names one, the last line of the response may: by a letter alone, by a text, or by a capital
    with a bracket, a point or a colon after it ("C) Rome").

    Args:
        ground_truth: the letter, also "(C)" or "c."; or the label or text of an option; or its index from 0, as a
            number or, if it is no label or text, as digits. They are tried in this order.
        extra_info: the options are its `options` or `choices`: a list of texts, an object from letter to text, or
            `{"label": […], "text": […]}` (ARC).
        format_score: for a wrong option.
        score: for the right one.

    Returns:
        `score` and `pred`, the letter; a response that states none scores 0.
    """
    options = _options(extra_info or {})
    right = _right_letter(ground_truth, options)
    letter = _stated_letter(solution_str, options)
    if letter is None:
        return {"score": 0.0, "pred": None}
    return {"score": score if letter == right else format_score, "pred": letter}


def _stated_letter(text: str, options: Options) -> str | None:
    for statement in reversed(_statements(text)):
        if letter := _named(statement, _FIRST, options):
            return letter
    return _named(text.rstrip().rpartition("\n")[2], _LISTED, options)


def _statements(text: str) -> list[str]:
    """What a response states, in order."""
    found = {match.start(): text[match.end() : match.end() + STATEMENT_LENGTH] for match in _STATED.finditer(text)}
    statements = {place: rest.lstrip(_MARKS + ":").partition("\n")[0] for place, rest in found.items()}
    boxed = last_boxed(text)
    if boxed is not None:
        statements[text.rfind(r"\boxed")] = boxed
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        statements[start] = text[start + len("<answer>") : end]
    return [statements[place] for place in sorted(statements)]


def _named(statement: str, pattern: re.Pattern[str], options: Options) -> str | None:
    """The letter of the option that a statement names; None: it names none."""
    plain = _TEXT_COMMAND.sub(r"\1", statement[:STATEMENT_LENGTH]).strip()
    return (
        options.letter(_ALONE.fullmatch(plain))
        or options.letter_of(plain, options.texts)
        or options.letter(pattern.match(plain))
    )


def _options(extra_info: Mapping[str, Any]) -> Options:
    given = next((extra_info[key] for key in OPTION_KEYS if extra_info.get(key)), None)
    if given is None:
        return Options(string.ascii_uppercase[:MOST_OPTIONS])
    if not isinstance(given, Mapping):
        labels, texts = list(string.ascii_uppercase), list(given)
    elif {"label", "text"} <= set(given):
        labels, texts = list(given["label"]), list(given["text"])
    else:
        labels, texts = list(given), list(given.values())
    if len(texts) > len(string.ascii_uppercase):
        raise ValueError(f"multiple_choice: {len(texts)} options are more than there are letters")
    labels = [str(label) for label in labels[: len(texts)]]
    lettered = all(len(label) == 1 and label.upper() in string.ascii_uppercase for label in labels)
    letters = "".join(labels).upper() if lettered else string.ascii_uppercase[: len(texts)]
    return Options(letters, tuple(labels), tuple(str(text) for text in texts))


def _right_letter(ground_truth: Any, options: Options) -> str:
    """The letter of the reference; the order in which its forms are tried stands at compute_score."""
    written = f"{ground_truth:g}" if isinstance(ground_truth, float) else str(ground_truth).strip()
    if isinstance(ground_truth, str) and (
        letter := options.letter(_ALONE.fullmatch(written))
        or options.letter_of(written, options.labels)
        or options.letter_of(written, options.texts)
    ):
        return letter
    if written.isdecimal() and int(written) < len(options.letters):
        return options.letters[int(written)]
    texts = ", ".join(options.texts)[:200] or "none are known"
    raise ValueError(
        f"multiple_choice: the reference answer {written[:80]!r} is no letter of {options.letters}, no text of an "
        f"option ({texts}) and no index from 0 to {len(options.letters) - 1}. Give the options as `options` or "
        "`choices` in extra_info, or set data.ground_truth_key to the column that holds the right one."
    )


def _tidy(text: str) -> str:
    """A text without upper case, repeated blanks, marks at its ends and a point, comma or colon at its end."""
    return " ".join(text.lower().lstrip(_MARKS).rstrip(_MARKS + ".,;:").split()) or text.strip()
