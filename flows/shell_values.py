"""Puts values into a script's words without running it: variables, arrays, `${X:-default}`, `$((arithmetic))`.

What only running would tell, such as `$(command)`, a variable nobody sets or one that is set under a condition, stays
as written and is named in `unresolved`. Nothing of verl is known here.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flows.shell_words import (
    ASSIGNMENT,
    LONGEST_SCRIPT,
    RawCommand,
    Scanner,
    ScriptTooLarge,
    closing_bracket,
    double_quoted_length,
)

MOST_CHARACTERS = 16 * LONGEST_SCRIPT
"""Of all values of a script together: `A=$A$A`, said forty times, is a terabyte."""

LONGEST_SUM = 1000
"""Characters of an arithmetic expression."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^\]]*\])?(:?[-=+?])?(.*)", re.DOTALL)
_OPENERS = {"if", "while", "until", "for", "case", "select", "{", "("}
_CLOSERS = {"fi", "done", "esac", "}", ")"}
_BEFORE_A_COMMAND = {"then", "else", "elif", "do", "!", "time", "if", "while", "until", "{", "("}
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}


@dataclass(frozen=True)
class Word:
    """One word of a command after expansion."""

    text: str
    line: int
    unresolved: tuple[str, ...] = ()
    """Why parts of the text are still as written."""


@dataclass(frozen=True)
class Command:
    """One command, its words expanded, in the order of the script."""

    words: tuple[Word, ...]
    line: int
    ended_by: str = ""
    """What cut the command off where its writer may have meant it to go on: `comment` or `blank`."""


@dataclass(frozen=True)
class _Value:
    """Text with what in it is not resolved; `splits`: spaces in it part words, as in an unquoted `$X`."""

    text: str
    unresolved: tuple[str, ...] = ()
    splits: bool = False


def read_commands(script: str, environment: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script with their variables expanded.

    Args:
        script: bash text.
        environment: variables known from outside, such as HOME.

    Raises:
        ScriptTooLarge: it is longer than any script, or its values are.
    """
    shell = _Shell({name: [_Value(value)] for name, value in (environment or {}).items()})
    commands = (shell.run(raw) for raw in Scanner(script).commands())
    return [command for command in commands if command is not None]


# -------------------------------------------------------------------------------------------------- words to commands


class _Shell:
    """Variables as assignments leave them, command after command."""

    def __init__(self, variables: dict[str, list[_Value]]):
        self.variables = variables
        self.depth = 0
        self.only_assigned = False
        self.characters = 0

    def run(self, raw: RawCommand) -> Command | None:
        """Take a command's assignments into account; its expanded words, or None where there is nothing else."""
        was_assignment, self.only_assigned = self.only_assigned, False
        conditional = raw.after in ("&&", "||") and not was_assignment
        words = self._without_keywords(raw.words)
        if not words:
            return None
        line = words[0][1]
        if words[0][0] in _DECLARATIONS:
            words = [word for word in words[1:] if not word[0].startswith("-")]
        assignments = []
        while words and ASSIGNMENT.match(words[0][0]):
            assignments.append(words.pop(0))
        if not words:
            self.only_assigned = True
            for text, at in assignments:
                self._assign(text, at, conditional or self.depth > 0)
            return None
        self._note_commands_that_assign(words)
        expanded = [one for text, at in words for one in self._expanded(text, at)]
        return Command(tuple(expanded), line, raw.ended_by)

    def _without_keywords(self, words: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Drop what only steers the shell, and keep count of how deep in conditions, loops and functions this is."""
        rest = list(words)
        while rest:
            first = rest[0][0]
            if len(rest) > 2 and rest[1][0] == "(" and rest[2][0] == ")":
                rest = rest[3:]
                continue
            if self.depth and len(rest) > 1 and rest[1][0] == ")":
                rest = rest[2:]
                continue
            self.depth = max(0, self.depth + (first in _OPENERS) - (first in _CLOSERS))
            if first in ("for", "select") and len(rest) > 1:
                self._forget(rest[1][0], f"runs through a loop, line {rest[1][1]}")
                return []
            if first in _CLOSERS or first in ("case", "[", "[[", "test"):
                return []
            if first == "function":
                rest = [word for word in rest[2:] if word[0] not in "()"]
            elif first in _BEFORE_A_COMMAND:
                rest = rest[1:]
            else:
                return rest
        return rest

    def _note_commands_that_assign(self, words: Sequence[tuple[str, int]]) -> None:
        """`read X`, `unset X` and `((X = …))` leave variables that reading cannot follow."""
        first, line = words[0]
        if first.startswith("(("):
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", first):
                self._forget(name, f"is calculated by a command, line {line}")
        elif first in ("read", "mapfile", "readarray", "let"):
            for name in re.findall(r"(?<![\w-])[A-Za-z_]\w*", " ".join(text for text, _ in words[1:])):
                self._forget(name, f"is set by `{first}`, line {line}")
        elif first == "unset":
            for name, _ in words[1:]:
                self.variables.pop(name, None)

    def _forget(self, name: str, why: str) -> None:
        self.variables[name] = [_Value(f"${name}", (f"${name} {why}",))]

    def _assign(self, text: str, line: int, conditional: bool) -> None:
        match = ASSIGNMENT.match(text)
        assert match is not None
        name, index, plus = match.groups()
        raw = text[match.end() :]
        if raw.startswith("("):
            inner = Scanner(_on_one_line(raw[1:-1]))
            values = [
                one for command in inner.commands() for word, _ in command.words for one in self._values(word, line)
            ]
        else:
            values = [_joined(self._pieces(raw, line))]
        self._count(values)
        if conditional:
            self._forget(name, f"is set under a condition, line {line}")
        elif index:
            self._forget(name, f"is an array filled by index, line {line}")
        elif plus:
            old = self.variables.get(name, [])
            self._count(old)
            self.variables[name] = [*old, *values] if raw.startswith("(") else [_joined([*old[:1], *values])]
        else:
            self.variables[name] = values

    def _expanded(self, raw: str, line: int) -> list[Word]:
        values = self._values(raw, line)
        self._count(values)
        return [Word(value.text, line, value.unresolved) for value in values]

    def _count(self, values: Sequence[_Value]) -> None:
        self.characters += _size(values)
        if self.characters > MOST_CHARACTERS:
            raise ScriptTooLarge(f"its values have more than {MOST_CHARACTERS:,} characters")

    def _values(self, raw: str, line: int) -> list[_Value]:
        """What a raw word becomes: several words for arrays and unquoted lists, none for an empty unquoted variable."""
        whole = re.fullmatch(r'"?\$\{?(?:([A-Za-z_]\w*)\[[@*]\]|[@*](?::\d+)?)\}?"?', raw)
        if whole is not None:
            return list(self.variables.get(whole[1], [_unset(raw, whole[1], line)])) if whole[1] else []
        return _split(self._pieces(raw, line), is_quoted='"' in raw or "'" in raw)

    # ------------------------------------------------------------------------------------------------ expansion

    def _pieces(self, raw: str, line: int) -> list[_Value]:
        """Quotes taken off, variables put in."""
        pieces, at = [], 0
        while at < len(raw):
            char = raw[at]
            if char == "\\":
                pieces.append(_Value(raw[at + 1 : at + 2].replace("\n", "")))
                at += 2
            elif char == "'":
                end = raw.find("'", at + 1)
                end = end if end >= 0 else len(raw)
                pieces.append(_Value(raw[at + 1 : end]))
                at = end + 1
            elif char == '"':
                length = double_quoted_length(raw, at)
                pieces.extend(self._inside_double_quotes(raw[at + 1 : at + length - 1], line))
                at += length
            else:
                value, end = self._dollar_or_plain(raw, at, line)
                pieces.append(replace(value, splits=char == "$"))
                at = end
        return pieces

    def _inside_double_quotes(self, text: str, line: int) -> list[_Value]:
        pieces, at = [], 0
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "$", "`", "\\", "\n"):
                pieces.append(_Value(text[at + 1].replace("\n", "")))
                at += 2
            else:
                value, at = self._dollar_or_plain(text, at, line)
                pieces.append(value)
        return pieces

    def _dollar_or_plain(self, text: str, at: int, line: int) -> tuple[_Value, int]:
        """The value of what starts here, and where it ends."""
        if text[at] == "`":
            end = text.find("`", at + 1)
            end = end if end >= 0 else len(text) - 1
            return _not_run(text[at : end + 1], line), end + 1
        if text[at] != "$" or at + 1 == len(text):
            return _Value(text[at]), at + 1
        if text.startswith("$((", at):
            end = closing_bracket(text, at + 1, "(", ")")
            return self._arithmetic(text[at + 3 : end - 1], text[at : end + 1], line), end + 1
        if text.startswith("$(", at):
            end = closing_bracket(text, at + 1, "(", ")")
            return _not_run(text[at : end + 1], line), end + 1
        if text.startswith("${", at):
            end = closing_bracket(text, at + 1, "{", "}")
            return self._parameter(text[at + 2 : end], text[at : end + 1], line), end + 1
        match = _NAME.match(text, at + 1)
        name = match[0] if match else text[at + 1]
        if match is None and not re.match(r"[0-9@*#?$!-]", name):
            return _Value("$"), at + 1
        return self._parameter(name, f"${name}", line), at + 1 + len(name)

    def _parameter(self, body: str, written: str, line: int) -> _Value:
        """`${…}`: a variable, or what to take instead where it is not set."""
        match = _PARAMETER.fullmatch(body)
        if match is None:
            return _Value(written, (f"{written} is not evaluated, line {line}",))
        name, index, action, otherwise = match.groups()
        values = self._variable(name, index)
        if action is None:
            if otherwise:
                return _Value(written, (f"{written} is not evaluated, line {line}",))
            return _unset(written, name, line) if values is None else _joined(values, " ")
        known = values is not None and (not action.startswith(":") or any(one.text for one in values))
        if action[-1] == "+":
            return _joined(self._pieces(otherwise, line)) if known else _Value("")
        if known:
            return _joined(values or [], " ")
        if action[-1] == "?":
            return _unset(written, name, line)
        value = _joined(self._pieces(otherwise, line))
        if action[-1] == "=":
            self.variables[name] = [value]
        return value

    def _variable(self, name: str, index: str | None) -> list[_Value] | None:
        values = self.variables.get(name)
        if values is None or index is None:
            return values[:1] if values else values
        if index in ("[@]", "[*]"):
            return values
        place = int(index[1:-1]) if index[1:-1].isdigit() else None
        return values[place : place + 1] if place is not None and place < len(values) else None

    def _arithmetic(self, body: str, written: str, line: int) -> _Value:
        """`$((…))` over whole numbers."""
        value = _joined(self._inside_double_quotes(body, line))
        if value.unresolved:
            return _Value(written, value.unresolved)
        try:
            return _Value(str(_calculated(value.text, self._number)))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return _Value(written, (f"{written} cannot be calculated, line {line}",))

    def _number(self, name: str) -> int:
        values = self.variables.get(name)
        if not values or values[0].unresolved:
            raise ValueError(name)
        return _calculated(values[0].text, self._number)


def _on_one_line(text: str) -> str:
    """An array's lines without their comments."""
    return " ".join(re.sub(r"(^|\s)#.*", "", line) for line in text.split("\n"))


def _size(values: Sequence[_Value]) -> int:
    """Characters of values, and one for each."""
    return sum(len(value.text) + 1 for value in values)


def _refuse_too_long(values: Sequence[_Value]) -> None:
    if _size(values) > 2 * LONGEST_SCRIPT:
        raise ScriptTooLarge(f"a value of it has more than {LONGEST_SCRIPT:,} characters")


def _joined(values: Sequence[_Value], between: str = "") -> _Value:
    _refuse_too_long(values)
    reasons = tuple(dict.fromkeys(reason for value in values for reason in value.unresolved))
    return _Value(between.join(value.text for value in values), reasons)


def _split(pieces: Sequence[_Value], is_quoted: bool) -> list[_Value]:
    """Join the pieces of a word, then part it at the spaces of unquoted variables."""
    _refuse_too_long(pieces)
    words: list[list[_Value]] = [[]]
    for piece in pieces:
        if not piece.splits or piece.unresolved:
            words[-1].append(piece)
            continue
        head, *rest = re.split(r"\s+", piece.text)
        words[-1].append(_Value(head))
        words.extend([_Value(part)] for part in rest)
    joined = [_joined(word) for word in words]
    return joined if is_quoted and len(joined) == 1 else [word for word in joined if word.text]


def _unset(written: str, name: str, line: int) -> _Value:
    what = f"argument {written} of the script is not known" if name.isdigit() else f"${name} is not set"
    return _Value(written, (f"{what}, line {line}",))


def _not_run(written: str, line: int) -> _Value:
    return _Value(written, (f"{written} would have to be run, line {line}",))


# --------------------------------------------------------------------------------------------------------- arithmetic


def _divide(left: int, right: int) -> int:
    """bash rounds towards zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _calculated(text: str, number_of: Callable[[str], int]) -> int:
    """A bash expression of + - * / % ** comparisons and `c ? a : b`; ValueError for anything else.

    Numbers are those of bash, which have 64 bits; what is larger is an error here.
    """
    if len(text) > LONGEST_SUM:
        raise ValueError(text)
    conditional = re.fullmatch(r"(.+?)\?(.+):(.+)", text, re.DOTALL)
    if conditional is not None:
        chosen = conditional[2] if _calculated(conditional[1], number_of) else conditional[3]
        return _calculated(chosen, number_of)

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return number_of(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _fitting(_BINARY[type(node.op)](value(node.left), _small(node.op, value(node.right))))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            return int(_COMPARE[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        raise ValueError(text)

    return value(ast.parse(text.strip(), mode="eval").body)


def _fitting(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ValueError(number)
    return number


def _small(kind: ast.operator, exponent: int) -> int:
    """A script's typo must not raise 9 to the 9,999,999th power."""
    if isinstance(kind, ast.Pow) and not 0 <= exponent <= 64:
        raise ValueError(exponent)
    return exponent
