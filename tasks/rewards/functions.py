"""Which reward functions a configuration names, and which built-in one a data source has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.durable import sha256_json
from tasks.config import RewardFunctionConfig, RunConfig
from tasks.geometry.algorithm_rules import normalised_one_by_one
from tasks.rewards.calls import RewardError
from tasks.rewards.sources import source_digest

BUILTIN = {
    "gsm8k": "tasks.rewards.gsm8k:compute_score",
    "math": "tasks.rewards.math_answer:compute_score",
    "math_dapo": "tasks.rewards.math_dapo:compute_score",
    "countdown": "tasks.rewards.countdown:compute_score",
    "exact_match": "tasks.rewards.exact_match:compute_score",
    "multiple_choice": "tasks.rewards.multiple_choice:compute_score",
    "format": "tasks.rewards.response_format:compute_score",
    "repetition": "tasks.rewards.repetition:compute_score",
    "length": "tasks.rewards.length:compute_score",
}
"""Built-in reward functions by name."""

WITHOUT_REFERENCE = ("format", "repetition", "length")
"""Built-in functions that read the response alone: a row without a reference answer can be scored."""

SOURCES = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "countdown": "countdown",
}
"""Built-in function of a data source, as verl chooses it."""

SOURCE_PREFIXES = {"aime": "math_dapo", "searchR1_": "exact_match", "countdown": "countdown"}
"""The same for data sources that start so."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function by name.

    Attributes:
        name: its name in `parts`.
        target: `module:function` or `/absolute/file.py:function`.
        weight: its weight in the score.
        kwargs: extra keyword arguments of every call.
    """

    name: str
    target: str
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_builtin(self) -> bool:
        """Whether it ships with this project."""
        return self.target in BUILTIN.values()

    @property
    def needs_reference(self) -> bool:
        """Whether it ships with this project and compares a response with a reference answer."""
        return self.is_builtin and self.target not in [BUILTIN[name] for name in WITHOUT_REFERENCE]


def configured_functions(cfg: RunConfig) -> tuple[RewardFunction, ...]:
    """The functions that score every row; none: each row has the built-in function of its data source.

    Raises:
        RewardError: a name that is none, a file that is not there, or both ways of naming functions at once.
    """
    custom = cfg.custom_reward_function
    if custom.path is not None and cfg.reward.functions:
        raise RewardError(
            "custom_reward_function.path and reward.functions both name reward functions. Use reward.functions for all."
        )
    if custom.path is not None:
        target = _file_target(custom.path, custom.name, "custom_reward_function.path")
        return (RewardFunction(custom.name, target, 1.0, dict(custom.reward_kwargs)),)
    return _with_own_names([_function(i, entry) for i, entry in enumerate(cfg.reward.functions)])


def function_of_source(data_source: str) -> RewardFunction:
    """The built-in function of a data source.

    Raises:
        RewardError: it has none.
    """
    name = SOURCES.get(data_source)
    if name is None:
        name = next((found for start, found in SOURCE_PREFIXES.items() if data_source.startswith(start)), None)
    if name is None:
        raise RewardError(
            f"no built-in reward function for data source {data_source!r}; there is one for {', '.join(SOURCES)}, "
            f"{', '.join(f'{start}*' for start in SOURCE_PREFIXES)}. Name a function in reward.functions (built-in: "
            f"{', '.join(BUILTIN)}) or custom_reward_function.path, or set data.data_source."
        )
    return RewardFunction(name, BUILTIN[name])


def check_sources(cfg: RunConfig, data_sources: Iterable[str]) -> None:
    """Refuse, before anything is loaded, data whose rows no configured or built-in function scores.

    Raises:
        RewardError: as configured_functions and function_of_source.
    """
    if not configured_functions(cfg):
        for source in sorted(set(data_sources)):
            function_of_source(source)


def check_reward_keys(cfg: RunConfig, data_sources: Iterable[str]) -> None:
    """Refuse `algorithm.gdpo_reward_keys` that name no function of these data sources.

    Raises:
        RewardError: one names none.
    """
    keys, sources = cfg.algorithm.gdpo_reward_keys, set(data_sources)
    if not keys or not sources or normalised_one_by_one(cfg) is None:
        return
    functions = configured_functions(cfg) or [function_of_source(source) for source in sorted(sources)]
    names = list(dict.fromkeys(function.name for function in functions))
    if missing := [key for key in keys if key not in names]:
        raise RewardError(
            f"algorithm.gdpo_reward_keys names {', '.join(missing)}, but the reward functions of the training data are "
            f"{', '.join(names)}. Name some of them, or leave the key out for all of them."
        )


def functions_digest(functions: Iterable[RewardFunction]) -> str:
    """SHA-256 over the functions' names, weights, arguments and source files, with the user's files they import."""
    entries = [[f.name, f.target, f.weight, f.kwargs, source_digest(f.target)] for f in functions]
    return sha256_json(entries)


def _function(index: int, entry: RewardFunctionConfig) -> RewardFunction:
    key = f"reward.functions[{index}].name"
    if entry.name in BUILTIN:
        return RewardFunction(entry.name, BUILTIN[entry.name], entry.weight, dict(entry.kwargs))
    place, colon, name = entry.name.rpartition(":")
    if not colon or not place or not name:
        raise RewardError(
            f"{key}={entry.name!r} names no reward function. Use a built-in one ({', '.join(BUILTIN)}), "
            "`module:function` or `path/to/file.py:function`."
        )
    target = _file_target(place, name, key) if place.endswith(".py") else entry.name
    return RewardFunction(name, target, entry.weight, dict(entry.kwargs))


def _file_target(path: str, name: str, key: str) -> str:
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise RewardError(f"{key}: there is no file {file}")
    return f"{file}:{name}"


def _with_own_names(functions: list[RewardFunction]) -> tuple[RewardFunction, ...]:
    """Number functions of the same name, so that each has its own place in `parts`."""
    seen: dict[str, int] = {}
    named = []
    for function in functions:
        seen[function.name] = seen.get(function.name, 0) + 1
        name = function.name if seen[function.name] == 1 else f"{function.name}_{seen[function.name]}"
        named.append(RewardFunction(name, function.target, function.weight, function.kwargs))
    return tuple(named)
