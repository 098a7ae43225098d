"""What a refusal says: code, keys, rule with arithmetic, and the nearest values that the planner accepts; and what a
warning says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from pydantic import BaseModel

from tasks.config import RunConfig
from tasks.geometry.numbers import Facts, Numbers, count

MOST_TRIES = 256
"""How many candidates for a nearest value are tried on each side."""


@dataclass(frozen=True)
class Nearest:
    """The closest legal values of one key around the refused one; None: none on that side, or none found."""

    key: str
    value: int | None
    lower: int | None
    upper: int | None

    def __str__(self) -> str:
        legal = " or ".join(str(value) for value in (self.lower, self.upper) if value is not None)
        return f"{self.key}={legal}"


@dataclass(frozen=True)
class Problem:
    """Why a configuration is refused."""

    code: str
    keys: tuple[str, ...]
    message: str
    """What is wrong, where, and ways out that are not a number."""
    rule: str
    """The rule with its arithmetic."""
    nearest: tuple[Nearest, ...] = ()

    @property
    def lower(self) -> int | None:
        """Nearest legal value below, of the first key that has a legal value."""
        return self.nearest[0].lower if self.nearest else None

    @property
    def upper(self) -> int | None:
        """Nearest legal value above, of the same key."""
        return self.nearest[0].upper if self.nearest else None

    def __str__(self) -> str:
        nearest = f" Nearest legal: {'; or '.join(str(one) for one in self.nearest)}." if self.nearest else ""
        return f"{self.code}: {self.message} Rule: {self.rule}.{nearest}"


@dataclass(frozen=True)
class Try:
    """Values of a key that may be legal, closest first."""

    key: str
    value: int | None
    lower: Iterable[int] = ()
    upper: Iterable[int] = ()


@dataclass(frozen=True)
class Draft:
    """A problem whose nearest values are not looked up yet."""

    code: str
    keys: tuple[str, ...]
    message: str
    rule: str
    tries: tuple[Try, ...] = ()

    @property
    def identity(self) -> tuple[str, str]:
        return self.code, self.keys[0]


Rule = Callable[[RunConfig, Numbers, Facts], Iterator[Draft]]


@dataclass(frozen=True)
class PlanWarning:
    """Something to know; `info` where it is often intended."""

    code: str
    keys: tuple[str, ...]
    message: str
    level: Literal["warning", "info"] = "warning"

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


Look = Callable[[RunConfig, Numbers, Facts], Iterator[PlanWarning]]


def find_problems(rules: Sequence[Rule], cfg: RunConfig, numbers: Numbers, facts: Facts) -> tuple[Problem, ...]:
    """All refusals of a configuration at once, each with nearest legal values.

    A value counts as legal when the configuration that has it instead no longer shows the problem and shows no new one.
    """
    drafts = [draft for rule in rules for draft in rule(cfg, numbers, facts)]
    present = {draft.identity for draft in drafts}

    def settled(draft: Draft) -> Problem:
        allowed = present - {draft.identity}

        def is_legal(key: str, value: int) -> bool:
            other = with_value(cfg, key, value)
            found = (one.identity for rule in rules for one in rule(other, count(other, facts), facts))
            return all(identity in allowed for identity in found)

        return _with_nearest(draft, is_legal)

    return tuple(settled(draft) for draft in drafts)


def _with_nearest(draft: Draft, is_legal: Callable[[str, int], bool]) -> Problem:
    def first_legal(key: str, values: Iterable[int]) -> int | None:
        return next((value for value in islice(values, MOST_TRIES) if is_legal(key, value)), None)

    nearest = tuple(
        Nearest(one.key, one.value, first_legal(one.key, one.lower), first_legal(one.key, one.upper))
        for one in draft.tries
    )
    found = tuple(one for one in nearest if one.lower is not None or one.upper is not None)
    return Problem(draft.code, draft.keys, draft.message, draft.rule, found)


def with_value(cfg: RunConfig, key: str, value: object) -> RunConfig:
    """A copy of the configuration with one value, named by its dotted key, replaced. The value is not validated."""

    def replaced(section: BaseModel, names: list[str]) -> BaseModel:
        name, *rest = names
        return section.model_copy(update={name: replaced(getattr(section, name), rest) if rest else value})

    changed = replaced(cfg, key.split("."))
    assert isinstance(changed, RunConfig)
    return changed


# -------------------------------------------------------------------------------------------------- candidate values


def multiples(period: int, value: int, most: int | None = None) -> tuple[Iterable[int], Iterable[int]]:
    """Multiples of `period` below `value` and above it, closest first."""
    below = range((value - 1) // period * period, 0, -period)
    start = (value // period + 1) * period
    above = range(start, (start + MOST_TRIES * period) if most is None else most + 1, period)
    return below, above


def divisors(whole: int, value: int) -> tuple[list[int], list[int]]:
    """Divisors of `whole` below `value` and above it, closest first."""
    small = [part for part in range(1, int(whole**0.5) + 1) if whole % part == 0]
    every = sorted({*small, *(whole // part for part in small)})
    return [part for part in reversed(every) if part < value], [part for part in every if part > value]
