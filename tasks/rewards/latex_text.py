"""Answers written in LaTeX, as text: where the last box is, and one spelling for equal answers."""

from __future__ import annotations

import re

_UNITS = (
    "dollars?|cents?|units?|square|degrees?|points?|ways|integers?|digits?|students?|edges|meals|tickets|"
    "hours?|minutes?|seconds?|mph|km|cm|mm|gm|kg|ft|feet|inches|inch|miles?|meters?|metres?|pounds?|percent"
)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` or after the last `\boxed `; None: there is no closed box."""
    start = text.rfind(r"\boxed")
    if start < 0:
        return None
    rest = text[start + len(r"\boxed") :]
    if rest.startswith(" ") and not rest.lstrip().startswith("{"):
        return re.split(r"[\s$]", rest.strip(), maxsplit=1)[0] or None
    rest = rest.lstrip()
    if not rest.startswith("{"):
        return None
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place].strip()
    return None


def normalised(answer: str) -> str:
    r"""One spelling for an answer.

    The part after the last `=`; no `$`, `\text{…}`, `\boxed{…}`, `\left`, `\right` or thin spaces around what they
    hold; `\dfrac` is `\frac`, `\frac12` is `\frac{1}{2}`, `\sqrt2` is `\sqrt{2}`; no unit word, degree or percent sign
    at the end; no blanks; no commas within a whole number; no point at the end.
    """
    text = answer.split("=")[-1].replace(r"\$", "").replace("$", "")
    text = re.sub(r"\\(text|textbf|mathrm|mbox|boxed)\s*\{([^{}]*)\}", r"\2", text)
    text = re.sub(r"\\(left|right|!|,|;)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(rf"(?<=[\d}}\s])\s*({_UNITS})\.?\s*$", "", text, flags=re.IGNORECASE)
    text = re.sub(r"(\^\s*\{?\s*\\circ\s*\}?|\\?%)\s*\.?\s*$", "", text)
    text = re.sub(r"\\frac\s*([^{\s\\])\s*([^{\s\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([^{\s\\\[])", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    whole = text.replace(",", "")
    return whole if whole.lstrip("-").isdigit() else text
