"""Cuts a bash script into commands of raw words, without running it: comments, continuations, quotes, here-documents.

Quotes and `$` stay in the words; flows/shell_values.py puts values in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
LONGEST_SCRIPT = 1 << 18
"""Characters of a script. The longest of verl's own has a tenth of it."""

_OPERATORS = ("&&", "||", ";;", "|&", ";", "&", "|", "\n")


class ScriptTooLarge(ValueError):
    """A script that is, or makes of its variables, more than anybody has written by hand."""


@dataclass
class RawCommand:
    """One command as written: its words and their lines."""

    words: list[tuple[str, int]] = field(default_factory=list)
    after: str = "\n"
    """Operator before it: after `&&` and `||` it may not run."""
    ended_by: Literal["", "comment", "blank"] = ""
    """What ended it where its writer may have meant it to go on."""


class Scanner:
    """Cuts a script into commands of raw words, quotes and `$` kept."""

    def __init__(self, script: str):
        if len(script) > LONGEST_SCRIPT:
            raise ScriptTooLarge(f"it has more than {LONGEST_SCRIPT:,} characters")
        self.text = script.replace("\r\n", "\n")
        self.at = 0
        self.line = 1
        self.here_documents: list[str] = []

    def commands(self) -> list[RawCommand]:
        """All of them, in the order of the script."""
        found, current = [], RawCommand()
        continued = False
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self._skip(2)
                continued = True
            elif char in " \t":
                self._skip(1)
            elif char == "#":
                self._skip(len(self._until("\n")))
                if continued and current.words:
                    current.ended_by = "comment"
            elif operator_text := next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None):
                if self._is_file_descriptor(operator_text):
                    self._skip(len(operator_text))
                    continue
                self._skip(len(operator_text))
                if operator_text == "\n":
                    self._skip_here_documents()
                if current.words:
                    found.append(current)
                current, continued = RawCommand(after=operator_text), False
            else:
                line, word = self.line, self._word()
                if word == "\\ " or re.fullmatch(r"(\\[ \t])+", word):
                    current.ended_by = "blank"
                else:
                    if current.words and current.words[-1][0] in ("<<", "<<-"):
                        self.here_documents.append(word.strip("'\""))
                    current.words.append((word, line))
                continued = False
        if current.words:
            found.append(current)
        return found

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _until(self, stop: str) -> str:
        end = self.text.find(stop, self.at)
        return self.text[self.at : end if end >= 0 else len(self.text)]

    def _is_file_descriptor(self, operator_text: str) -> bool:
        """`2>&1` and `&>file` hold an `&` that ends no command."""
        return operator_text == "&" and (
            self.text[self.at - 1 : self.at] == ">" or self.text[self.at + 1 : self.at + 2] == ">"
        )

    def _word(self) -> str:
        """The next word, quoted parts and `$(…)` whole; a parenthesis that starts a word is a word of its own."""
        start = self.at
        if self.text.startswith("((", self.at):
            self._skip(self._length_to_close(self.at, "(", ")"))
            return self.text[start : self.at]
        if self.text[self.at] in "()":
            self._skip(1)
            return self.text[start : self.at]
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;|)" or (char == "&" and not self._is_file_descriptor("&")):
                break
            if self.text.startswith("\\\n", self.at):
                self._skip(2)
                return self._joined(start)
            if char == "(" and not ASSIGNMENT.fullmatch(self.text[start : self.at]):
                break
            self._skip(self._piece_length())
        word = self.text[start : self.at]
        if match := re.match(r"<<-?\s*['\"]?(\w+)", word):
            self.here_documents.append(match[1])
        return word

    def _joined(self, start: int) -> str:
        """A word that goes on after a continuation in its middle."""
        head = self.text[start : self.at - 2]
        if self.at < len(self.text) and self.text[self.at] not in " \t\n;|&#()":
            return head + self._word()
        return head

    def _piece_length(self) -> int:
        """Characters of the next quoted or `$` piece, or one."""
        text, at = self.text, self.at
        if text[at] == "\\":
            return 2
        if text[at] in "'`":
            end = text.find(text[at], at + 1)
            return (end if end >= 0 else len(text) - 1) - at + 1
        if text[at] == '"':
            return double_quoted_length(text, at)
        if text.startswith("$(", at) or text[at] == "(":
            return self._length_to_close(at + (text[at] == "$"), "(", ")") + (text[at] == "$")
        if text.startswith("${", at):
            return self._length_to_close(at + 1, "{", "}") + 1
        return 1

    def _length_to_close(self, at: int, opening: str, closing: str) -> int:
        return closing_bracket(self.text, at, opening, closing) - at + 1

    def _skip_here_documents(self) -> None:
        for mark in self.here_documents:
            while self.at < len(self.text):
                line = self._until("\n")
                self._skip(len(line) + 1)
                if line.strip() == mark:
                    break
        self.here_documents.clear()


def closing_bracket(text: str, at: int, opening: str, closing: str) -> int:
    """Index of the bracket that closes the one at `at`, past quotes and comments; the end where there is none."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'":
            end = text.find("'", at + 1)
            at = end if end >= 0 else len(text)
        elif char == '"':
            at += double_quoted_length(text, at) - 1
        elif char == "#" and text[at - 1] in " \t\n":
            end = text.find("\n", at)
            at = end if end >= 0 else len(text)
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return len(text) - 1


def double_quoted_length(text: str, at: int) -> int:
    """Characters of the double-quoted piece at `at`, both quotes included."""
    end = at + 1
    while end < len(text) and text[end] != '"':
        if text[end] == "\\":
            end += 1
        elif text.startswith("$(", end):
            end = closing_bracket(text, end + 1, "(", ")")
        elif text.startswith("${", end):
            end = closing_bracket(text, end + 1, "{", "}")
        end += 1
    return end - at + 1
