"""Reward for the countdown game: make a target from given numbers by arithmetic."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

LONGEST = 300
"""Characters of an expression; longer ones are wrong without being read."""

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.0, score: float = 1.0
) -> dict[str, Any]:
    """Check an equation.

    Parsing rule: the content of the last `<answer>…</answer>`; of "(1 + 2) * 3 = 9" what stands before the `=`.
    It is right when it uses every number of `ground_truth["numbers"]` exactly once and no other number, only
    + - * / and brackets (also × · ÷ −), and its exact value is `ground_truth["target"]`. More than 300 characters are
    no arithmetic.

    Args:
        ground_truth: `target` and `numbers` (verl's and TinyZero's form).
        format_score: for an expression that can be evaluated but is wrong.
        score: for a right one.

    Returns:
        `score` and `pred`; no answer tag, or no arithmetic in it, scores 0.
    """
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    if not found:
        return {"score": 0.0, "pred": None}
    expression = found[-1].split("=")[0].strip()
    result = evaluate(expression)
    if result is None:
        return {"score": 0.0, "pred": expression}
    value, used = result
    wanted = Counter(Fraction(str(number)) for number in ground_truth["numbers"])
    right = Counter(used) == wanted and value == Fraction(str(ground_truth["target"]))
    return {"score": score if right else format_score, "pred": expression}


def evaluate(expression: str) -> tuple[Fraction, list[Fraction]] | None:
    """Exact value of an arithmetic expression and the numbers in it; None: it is none, or divides by zero."""
    if len(expression) > LONGEST:
        return None
    used: list[Fraction] = []
    try:
        tree = ast.parse(expression.translate(_SIGNS), mode="eval")
        return _value(tree.body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            used.append(Fraction(str(number)))
            return used[-1]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, used) + _value(right, used)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, used) - _value(right, used)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, used) * _value(right, used)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left, used) / _value(right, used)
    raise ValueError(f"{type(node).__name__} is no arithmetic")
