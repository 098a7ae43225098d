"""From YAML files and overrides to a RunConfig, or to every error at once.

A key that is not accepted gets the best answer there is: its name here, why verl's is not offered, or the nearest one.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

import tasks.config
from flows.config_layers import (
    LayerError,
    Layers,
    Override,
    PlainDumper,
    parse_override,
    parse_value,
    read_yaml,
    resolve_references,
)
from flows.verl_keys import REMOVED_VALUES, TRL_KEYS, UNSUPPORTED_VALUES, renamed, unsupported_reason
from tasks.algorithms.variants import ESTIMATORS, LOSSES
from tasks.config import RunConfig


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong with a configuration."""

    key: str
    """The dotted key, or the file or override where there is none."""
    message: str
    source: str = ""
    """The file or the override that says so."""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.key}{where}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be loaded, with everything that is wrong with it."""

    def __init__(self, problems: Sequence[ConfigProblem]):
        self.problems = tuple(problems)
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        super().__init__("\n".join((f"the configuration has {count}:", *(f"- {problem}" for problem in problems))))


LONGEST_KEY = 200
"""For a longer text no key is looked for that is like it."""


def load_config(files: Sequence[Path] = (), overrides: Sequence[str] = (), base: RunConfig | None = None) -> RunConfig:
    """Merge files in order, then overrides in order, the later one winning; ConfigError with every error at once.

    Args:
        files: YAML files.
        overrides: `key.path=value` texts.
        base: what the first of them goes on top of; None: the defaults.
    """
    layers, problems = Layers({} if base is None else base.model_dump(mode="json")), []
    for path in files:
        try:
            layers.merge(read_yaml(path), str(path))
        except LayerError as error:
            problems.append(ConfigProblem(str(path), str(error).removeprefix(f"{path}: ")))
    for text in overrides:
        try:
            _apply(parse_override(text), text, layers)
        except LayerError as error:
            problems.append(ConfigProblem(text.split("=", 1)[0].lstrip("+~"), str(error), f"override {text}"))
    cfg, invalid = validated(layers)
    problems.extend(invalid)
    if problems or cfg is None:
        raise ConfigError(problems)
    return cfg


def _apply(override: Override, text: str, layers: Layers) -> None:
    if override.deletes:
        if override.key not in all_keys():
            raise LayerError(key_answer(override.key))
        layers.delete(override.key)
    else:
        value = parse_value(override.text or "", as_text=holds_text(override.key))
        layers.put(override.key, value, f"override {text}")


def validated(layers: Layers) -> tuple[RunConfig | None, list[ConfigProblem]]:
    """The configuration that a merged tree makes, or None, and everything that is wrong with it."""
    defaults = RunConfig()
    failed = resolve_references(layers.values, lambda key: _value_of(key, layers.values, defaults))
    problems = [_problem(layers, key, reason) for key, reason in failed.items()]
    for key in list(_empty_sections(layers.values, RunConfig, "")):
        layers.delete(key)
    for key in list(_unknown_keys(layers.values, RunConfig, "")):
        problems.append(_problem(layers, key, key_answer(key)))
        layers.delete(key)
    for key in failed:
        layers.delete(key)
    for key, value, info in list(_truth_values_for_others(layers.values, RunConfig, "")):
        problems.append(_problem(layers, key, _expected(key, value, info)))
        layers.delete(key)
    try:
        return RunConfig.model_validate(layers.values), problems
    except ValidationError as error:
        problems.extend(_of_validation(error, layers))
        return None, problems


def _problem(layers: Layers, key: str, message: str) -> ConfigProblem:
    parts = key.split(".")
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    source = next((layers.sources[one] for one in candidates if one in layers.sources), "")
    # Without the user information of an address, which may be a secret.
    return ConfigProblem(key, message, re.sub(r"(?<=//)[^/?#\s]*@", "***@", source))


def _value_of(key: str, values: Mapping[str, Any], defaults: RunConfig) -> Any:
    """A key's value in the merged tree, else its default; KeyError where there is no such key."""
    given: Any = values
    default: Any = defaults
    for name in key.split("."):
        given = given.get(name) if isinstance(given, Mapping) else None
        if isinstance(default, BaseModel) and name in type(default).model_fields:
            default = getattr(default, name)
        else:
            raise KeyError(key)
    return default if given is None else given


# ---------------------------------------------------------------------------------------------------------------- keys


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Every key and section by dotted name, with its definition."""

    def visit(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, info in model.model_fields.items():
            yield f"{prefix}{name}", info
            section = _section(info)
            if section is not None:
                yield from visit(section, f"{prefix}{name}.")

    return dict(visit(RunConfig, ""))


def key_answer(key: str) -> str:
    """What to say of a key that is not accepted."""
    new = renamed(key)
    if new is not None:
        return f"is called {new} here."
    reason = unsupported_reason(key)
    if reason is not None:
        return f"verl's key, not supported: {reason}"
    if len(key) > LONGEST_KEY:
        return "unknown key."
    if key in TRL_KEYS:
        return f"TRL's key. In verl's words: {TRL_KEYS[key]}."
    near = nearest_key(key)
    return f"unknown key. Nearest: {near}." if near else "unknown key."


def nearest_key(key: str) -> str | None:
    """The known key that is most like this one: a misspelt last word, or the right word in the wrong section."""
    parent, _, name = key.rpartition(".")
    leaves = [one for one, info in all_keys().items() if _section(info) is None]
    siblings = [one for one in leaves if one.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near and difflib.SequenceMatcher(None, name, near[0].rpartition(".")[2]).ratio() > 0.6:
        return near[0]
    same_name = [one for one in leaves if one.rpartition(".")[2] == name]
    others = difflib.get_close_matches(key, same_name or leaves, n=1, cutoff=0.0 if same_name else 0.7)
    return others[0] if others else None


def holds_text(key: str) -> bool:
    """Whether the key's value is text, so that a number typed for it stays as typed."""
    return bool(value_types(key)) and value_types(key) <= {str, type(None)}


def value_types(key: str) -> set[Any]:
    """The plain types a key takes; empty: no such key, or only fixed choices."""
    info = all_keys().get(key)
    return set(_types(info.annotation)) if info is not None else set()


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unknown_keys(tree: Mapping[str, Any], model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        info = model.model_fields.get(name)
        section = _section(info) if info else None
        if info is None:
            yield from _leaves(value, f"{prefix}{name}")
        elif section is not None and isinstance(value, Mapping):
            yield from _unknown_keys(value, section, f"{prefix}{name}.")


def _empty_sections(tree: Mapping[str, Any], model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Sections of a file whose every key is commented out, which YAML reads as null."""
    for name, value in tree.items():
        info = model.model_fields.get(name)
        section = _section(info) if info else None
        if section is not None and value is None:
            yield f"{prefix}{name}"
        elif section is not None and isinstance(value, Mapping):
            yield from _empty_sections(value, section, f"{prefix}{name}.")


def _leaves(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}")
    else:
        yield key


# -------------------------------------------------------------------------------------------------------------- values


def _truth_values_for_others(
    tree: Mapping[str, Any], model: type[BaseModel], prefix: str
) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Keys that hold true or false where a number or a text is due: pydantic would take true for 1."""
    for name, value in tree.items():
        info = model.model_fields.get(name)
        section = _section(info) if info else None
        if info is None:
            continue
        if section is not None and isinstance(value, Mapping):
            yield from _truth_values_for_others(value, section, f"{prefix}{name}.")
        elif isinstance(value, bool) and not _takes_truth_values(info):
            yield f"{prefix}{name}", value, info


def _takes_truth_values(info: FieldInfo) -> bool:
    return bool({bool, Any} & set(_types(info.annotation))) or False in _choices(info.annotation)


def _of_validation(error: ValidationError, layers: Layers) -> Iterator[ConfigProblem]:
    seen: set[str] = set()
    for one in error.errors(include_url=False):
        key = _key_of(one["loc"])
        info = all_keys().get(key)
        if key in seen:
            continue
        seen.add(key)
        inside = ".".join(str(part) for part in one["loc"][len(key.split(".")) :])
        if info is None or (inside and not _is_scalar(one["input"])):
            yield _problem(layers, key, f"{inside}: {one['msg']}, got {one['input']!r}".removeprefix(": "))
        elif one["type"] == "extra_forbidden":
            yield _problem(layers, key, f"unknown key {inside}.")
        elif one["type"] == "value_error":
            # Our own reason, which is said without the value: it may be a secret.
            yield _problem(layers, key, str(one["ctx"]["error"]))
        else:
            yield _problem(layers, key, _expected(key, one["input"], info))


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _key_of(loc: tuple[int | str, ...]) -> str:
    """The longest known key at the head of pydantic's location, whose tail may name members of a union."""
    parts = [str(part) for part in loc]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in all_keys():
            return ".".join(parts[:length])
    return ".".join(parts)


def _expected(key: str, value: Any, info: FieldInfo) -> str:
    """What a key takes, and what it got."""
    reason = refused_value(key, value)
    if reason is not None:
        return f"{value}: {reason}"
    plain = {True: "true", False: "false", None: "null", "": "an empty value"}
    got = plain[value] if isinstance(value, bool) or value is None or value == "" else repr(value)
    expected = f"expected {_in_words(info)}, got {got}."
    if other := other_kind(key, value):
        return f"{expected} {other}"
    near = nearest_value(value, info)
    return f"{expected} Nearest: {near}." if near else expected


_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"
_DR_GRPO = (
    "grpo with algorithm.norm_adv_by_std_in_grpo=false",
    f"vanilla with {_AGGREGATION}=seq-mean-token-sum-norm",
    "seq-mean-token-sum-norm",
)
OTHER_NAMES = {
    "dr_grpo": _DR_GRPO,
    "drgrpo": _DR_GRPO,
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "ppo": ("vanilla",),
    "clip": ("vanilla",),
    "dapo": (
        "grpo with algorithm.filter_groups.enable, actor_rollout_ref.actor.clip_ratio_high and "
        "reward_model.overlong_buffer",
        "vanilla with actor_rollout_ref.actor.clip_ratio_high",
        "token-mean",
    ),
    "bnpo": ("vanilla", "token-mean"),
    "gmpo": ("geo_mean",),
    "reinforce++": ("reinforce_plus_plus",),
    "reinforce++_baseline": ("reinforce_plus_plus_baseline",),
    "dppo": ("dppo_tv or dppo_kl",),
    "otb": ("optimal_token_baseline",),
    "true": ("token",),
}
"""Names that papers and other libraries use for a choice here; one counts where the key takes its first word."""


def nearest_value(value: Any, info: FieldInfo) -> str | None:
    """The choice that is most like a value that is none; None: the key has no choices, or none is like it."""
    choices = [choice for choice in _choices(info.annotation) if isinstance(choice, str)]
    if not isinstance(value, str | bool) or not choices:
        return None
    name = _plain_name(value)
    for other in OTHER_NAMES.get(name, ()):
        if other.partition(" ")[0] in choices:
            return other
    by_name = {_plain_name(choice): choice for choice in choices}
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
    return by_name[near[0]] if near else None


def _plain_name(value: Any) -> str:
    return str(value).strip().lower().replace("-", "_")


def other_kind(key: str, value: Any) -> str | None:
    """What a policy loss named as an estimator is, or the other way round; None: it is neither."""
    name = _plain_name(value)
    if key == "algorithm.adv_estimator" and name in LOSSES:
        return f"{name} is a policy loss: {_LOSS_MODE}={name}."
    if key == _LOSS_MODE and name in ESTIMATORS and name not in OTHER_NAMES:
        return f"{name} is an advantage estimator: algorithm.adv_estimator={name}."
    return None


def refused_value(key: str, value: Any) -> str | None:
    """Why verl's value of this key is not offered here, or any more."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return UNSUPPORTED_VALUES.get((key, text)) or REMOVED_VALUES.get((key, text))


def _in_words(info: FieldInfo) -> str:
    words = ["a section with keys of its own"] if _section(info) else []
    types, choices = list(dict.fromkeys(_types(info.annotation))), _choices(info.annotation)
    if choices:
        words.append("one of " + ", ".join("false" if one is False else str(one) for one in choices))
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        tuple: "a list",
        dict: "a mapping",
    }
    words += [names[kind] for kind in types if kind in names and not (kind is str and choices)]
    bounds = [word for bound in _metadata(info) for word in _bound(bound)]
    limits = f" {' and '.join(bounds)}" if bounds else ""
    empty = " or null" if type(None) in types else ""
    return " or ".join(words) + limits + empty


def _bound(bound: Any) -> list[str]:
    words = {Ge: ("of at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}
    limits = [(text, getattr(bound, name)) for kind, (text, name) in words.items() if isinstance(bound, kind)]
    return [f"{text} {limit:,}" if isinstance(limit, int) else f"{text} {limit:g}" for text, limit in limits]


def _metadata(info: FieldInfo) -> list[Any]:
    """Bounds of the field, and of the members of a union."""
    inner = [one for member in get_args(info.annotation) for one in getattr(member, "__metadata__", ())]
    flat = [one for entry in inner for one in getattr(entry, "metadata", [entry])]
    return [*info.metadata, *flat]


def _types(annotation: Any) -> Iterator[Any]:
    """The plain types an annotation is made of; a list counts as tuple, choices are left out."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _types(member)
    elif origin is Annotated:
        yield from _types(get_args(annotation)[0])
    elif origin is not Literal:
        yield origin or annotation


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) else ()
    return tuple(choice for member in members for choice in _choices(member))


# -------------------------------------------------------------------------------------------------------------- output


def to_yaml(cfg: RunConfig) -> str:
    """The whole configuration with its defaults; load_config reads back an equal one."""
    values = cfg.model_dump(mode="json")
    return yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=120)


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, with every key's description and default."""
    schema = RunConfig.model_json_schema()
    sections = {"RunConfig": schema, **schema["$defs"]}
    for (section, key), text in _field_docstrings().items():
        if section in sections:
            sections[section]["properties"].get(key, {})["description"] = text
    return schema


def _field_docstrings() -> dict[tuple[str, str], str]:
    """(section, key) -> the docstring under it. Pydantic would read them all at every start, whoever asks."""
    found = {}
    module = ast.parse(inspect.getsource(tasks.config))
    for section in (node for node in module.body if isinstance(node, ast.ClassDef)):
        for field, text in itertools.pairwise(section.body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[section.name, field.target.id] = inspect.cleandoc(ast.literal_eval(ast.unparse(text)))
    return found
