"""Reads the settings out of a verl launch script without running it, and makes a RunConfig of those that exist here.

What cannot be resolved or is not known is listed, never guessed. Megatron and other engines are out of scope:
their keys are listed, and the rest is explained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from flows.config import all_keys, holds_text, key_answer, refused_value, validated, value_types
from flows.config_layers import LayerError, Layers, parse_value, read_yaml
from flows.shell_values import Command, Word, read_commands
from flows.shell_words import LONGEST_SCRIPT, ScriptTooLarge
from flows.verl_keys import UNSUPPORTED_VALUES, renamed, unsupported_reason
from tasks.config import RunConfig

_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)
_KNOWN_BASES = {None, "ppo_trainer", "ppo_trainer.yaml", "dapo_trainer", "dapo_trainer.yaml"}
MOST_SETTINGS = 1000
"""Of a launch. verl's longest scripts have a tenth of it."""

_VERL_DEFAULTS = {"actor_rollout_ref.rollout.name": "vllm"}
"""Where verl has no default, or none that exists here."""


@dataclass(frozen=True)
class Listed:
    """A setting that is not applied as it is written, and why."""

    key: str
    text: str
    reason: str
    line: int = 0
    """Line of the script; 0: not from a script."""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.key}={self.text}: {self.reason}"


@dataclass(frozen=True)
class LaunchScript:
    """What a launch script sets."""

    overrides: Mapping[str, str]
    """Settings of keys that exist here, by their name here, the last one of each key."""
    unresolved: tuple[Listed, ...] = ()
    """Settings whose value only running the script would tell."""
    unknown: tuple[Listed, ...] = ()
    """Keys that neither this nor, as far as known, verl has."""
    unsupported: tuple[Listed, ...] = ()
    """Keys of verl's that have no counterpart here, and values of verl's."""
    renamed: tuple[Listed, ...] = ()
    """Keys that are called otherwise here; they are applied."""
    refused: tuple[Listed, ...] = ()
    """Values that no such key takes; filled in by `config_of`."""
    warnings: tuple[str, ...] = ()
    module: str | None = None
    """The Python module or file that is launched."""

    @property
    def problems(self) -> tuple[Listed, ...]:
        """What keeps the numbers from being the script's: unknown keys, refused values, unresolved numbers."""
        blocking = tuple(one for one in self.unresolved if not _is_text(one.key))
        return (*self.unknown, *self.refused, *blocking)


class LaunchScriptError(ValueError):
    """A script that launches nothing that can be read."""


def read_launch_script(path: Path, environment: Mapping[str, str] | None = None) -> LaunchScript:
    """The settings of a script's launch command.

    Args:
        path: a bash script that starts verl with `key.path=value` arguments.
        environment: variables known from outside, such as HOME.
    """
    try:
        with path.open("rb") as file:
            text = file.read(4 * LONGEST_SCRIPT + 1).decode("utf-8", errors="replace")
    except OSError as error:
        raise LaunchScriptError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_launch_script(text, environment, name=str(path))


def parse_launch_script(text: str, environment: Mapping[str, str] | None = None, name: str = "script") -> LaunchScript:
    """The same for a script's text."""
    try:
        commands = read_commands(text, environment)
    except ScriptTooLarge as error:
        raise LaunchScriptError(f"{name}: {error}") from None
    except RecursionError:
        raise LaunchScriptError(f"{name}: its quotes and brackets lie too deep in each other") from None
    launches = [command for command in commands if _override_words(command) and not _is_override(command.words[0])]
    if not launches:
        raise LaunchScriptError(
            f"{name}: no command with key.path=value arguments. Name the script that starts verl, with python -m "
            "verl.trainer.main_ppo."
        )
    launch = max(launches, key=lambda command: len(_override_words(command)))
    if len(_override_words(launch)) > MOST_SETTINGS:
        raise LaunchScriptError(f"{name}: line {launch.line} has more than {MOST_SETTINGS:,} settings")
    warnings = [*_about_other_launches(launch, launches), *_about_lost_settings(launch, commands), *_about_base(launch)]
    stray = [word for word in launch.words if word.unresolved and not _is_override(word)]
    warnings += [f"line {word.line}: argument {word.text} is not read: {'; '.join(word.unresolved)}" for word in stray]
    script = _classified(_last_of_each(_override_words(launch), warnings))
    return replace(script, warnings=tuple(warnings), module=_module(launch))


def launch_of_overrides(overrides: Mapping[str, str | None]) -> LaunchScript:
    """The same for settings that are resolved already."""
    words = [Word(key if value is None else f"{key}={value}", line=0) for key, value in overrides.items()]
    return _classified(words)


def config_of(
    script: LaunchScript, files: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> tuple[RunConfig, LaunchScript]:
    """The configuration that the script's settings make, and the script with all that was not applied.

    Args:
        script: what was read.
        files: YAML files that lie below the script's settings.
        overrides: `key.path=value` settings on top, as if given to the script; they also settle what is unresolved.
    """
    script = _with_overrides(script, overrides)
    layers = Layers()
    for key, text in _VERL_DEFAULTS.items():
        layers.put(key, text, "verl's default")
    for path in files:
        layers.merge(read_yaml(path), str(path))
    unsupported, refused = list(script.unsupported), list(script.refused)
    for key, text in script.overrides.items():
        try:
            layers.put(key, parse_value(text, as_text=holds_text(key)), f"{key}={text}")
        except LayerError as error:
            refused.append(Listed(key, text, str(error)))
    cfg, problems = validated(layers)
    while problems and cfg is None:
        for problem in problems:
            layers.delete(problem.key)
            if problem.key in _VERL_DEFAULTS:
                layers.put(problem.key, _VERL_DEFAULTS[problem.key], "verl's default")
            _list_value(problem.key, script.overrides.get(problem.key, ""), problem.message, unsupported, refused)
        cfg, problems = validated(layers)
    for problem in problems:
        _list_value(problem.key, script.overrides.get(problem.key, ""), problem.message, unsupported, refused)
    assert cfg is not None
    return cfg, replace(script, unsupported=tuple(unsupported), refused=tuple(refused))


def _list_value(key: str, text: str, message: str, unsupported: list[Listed], refused: list[Listed]) -> None:
    """A value verl takes is listed as unsupported, with the default standing in; any other is refused."""
    value = text.strip("'\"")
    known = UNSUPPORTED_VALUES.get((key, value)) or UNSUPPORTED_VALUES.get((key, value.lower()))
    if known is not None:
        unsupported.append(Listed(key, text, known))
    else:
        refused.append(Listed(key, text, refused_value(key, value) or message))


def _with_overrides(script: LaunchScript, overrides: Sequence[str]) -> LaunchScript:
    """Settings given on top of the script's."""
    if not overrides:
        return script
    more = launch_of_overrides(dict(_key_and_text(text) for text in overrides))
    dropped = {text[1:].partition("=")[0] for text in overrides if text.startswith("~")}
    return replace(
        script,
        overrides={key: text for key, text in {**script.overrides, **more.overrides}.items() if key not in dropped},
        unresolved=tuple(one for one in script.unresolved if one.key not in more.overrides),
        unknown=(*script.unknown, *more.unknown),
        unsupported=(*script.unsupported, *more.unsupported),
        renamed=(*script.renamed, *more.renamed),
    )


def _key_and_text(override: str) -> tuple[str, str | None]:
    key, equals, text = override.partition("=")
    return key, text if equals else None


# -------------------------------------------------------------------------------------------------------- the command


def _is_override(word: Word) -> bool:
    match = _OVERRIDE.fullmatch(word.text)
    return match is not None and (match["value"] is not None or match["mark"] == "~")


def _override_words(command: Command) -> list[Word]:
    return [word for word in command.words if _is_override(word)]


def _module(launch: Command) -> str | None:
    texts = [word.text for word in launch.words]
    if "-m" in texts[:-1]:
        return texts[texts.index("-m") + 1]
    return next((text for text in texts if text.endswith(".py")), None)


def _about_other_launches(launch: Command, launches: Sequence[Command]) -> list[str]:
    others = [str(command.line) for command in launches if command is not launch]
    return [f"line {launch.line} is read; the commands at line {', '.join(others)} have settings too"] if others else []


def _about_lost_settings(launch: Command, commands: Sequence[Command]) -> list[str]:
    """Settings that bash would run as commands of their own, because something ended the launch command before them."""
    after = commands[commands.index(launch) + 1 :]
    lost = list(takewhile(lambda command: _is_override(command.words[0]), after))
    if not lost:
        return []
    causes = {
        "comment": "a comment within the continued command ends it",
        "blank": "a blank after a backslash ends the command",
        "": "the command ends before them",
    }
    words = [word for command in lost for word in _override_words(command)]
    settings = ", ".join(f"{word.text} (line {word.line})" for word in words)
    settings_are = "1 setting is" if len(words) == 1 else f"{len(words)} settings are"
    return [f"{settings_are} lost: {causes[launch.ended_by]}, and bash runs them as commands: {settings}"]


def _about_base(launch: Command) -> list[str]:
    """The base configuration a script names is not read."""
    texts = [word.text for word in launch.words]
    base = None
    for at, text in enumerate(texts):
        if text.startswith(("--config-name=", "-cn=")):
            base = text.split("=", 1)[1]
        elif text in ("--config-name", "-cn") and at + 1 < len(texts):
            base = texts[at + 1]
    if base in _KNOWN_BASES:
        return []
    return [f"the values of --config-name {base} are not known; the defaults of verl's ppo_trainer stand in for them"]


def _last_of_each(words: Sequence[Word], warnings: list[str]) -> list[Word]:
    """The last setting of every key, with a warning for each that is given twice."""
    last: dict[str, Word] = {}
    for word in words:
        match = _OVERRIDE.fullmatch(word.text)
        assert match is not None
        key = match["key"]
        before = last.pop(key, None)
        if before is not None:
            warnings.append(
                f"{key} is given twice, the last wins: {_value(before)} (line {before.line}), {_value(word)} (line "
                f"{word.line})"
            )
        last[key] = word
    return list(last.values())


def _value(word: Word) -> str:
    return word.text.partition("=")[2] or "an empty value"


# ------------------------------------------------------------------------------------------------------------- the keys


def _classified(words: Sequence[Word]) -> LaunchScript:
    """Sort settings into those that exist here and the lists of those that do not."""
    applied: dict[str, str] = {}
    lists: dict[str, list[Listed]] = {"unresolved": [], "unknown": [], "unsupported": [], "renamed": []}
    for word in words:
        match = _OVERRIDE.fullmatch(word.text)
        if match is None:
            lists["unknown"].append(Listed(word.text, "", "is not a setting.", word.line))
            continue
        key, text = match["key"], match["value"] or ""
        new = renamed(key)
        name = new if new is not None and _exists(new) else key
        if match["mark"] == "~":
            applied.pop(name, None)
        elif not _exists(name):
            kind = "unsupported" if unsupported_reason(key) or new is not None else "unknown"
            lists[kind].append(Listed(key, text, unsupported_reason(key) or key_answer(key), word.line))
        elif word.unresolved:
            applied.pop(name, None)
            lists["unresolved"].append(Listed(name, text, "; ".join(word.unresolved), word.line))
        else:
            applied[name] = text
            if name != key:
                lists["renamed"].append(Listed(key, text, f"is called {name} here.", word.line))
    return LaunchScript(
        applied,
        unresolved=tuple(lists["unresolved"]),
        unknown=tuple(lists["unknown"]),
        unsupported=tuple(lists["unsupported"]),
        renamed=tuple(lists["renamed"]),
    )


def _exists(key: str) -> bool:
    """Whether the key is here, or lies within a free mapping such as `reward_kwargs`."""
    if key in all_keys():
        return True
    parts = key.split(".")
    return any(dict in value_types(".".join(parts[:length])) for length in range(1, len(parts)))


def _is_text(key: str) -> bool:
    return bool(value_types(key)) and value_types(key) <= {str, tuple, type(None)}
