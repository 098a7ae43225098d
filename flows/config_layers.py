"""Configuration as users write it: YAML files in layers and `key.path=value` overrides, merged into one tree.

Scalars are read as Hydra and YAML 1.2 read them: `1e-6` is a number, `yes` and `012` are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)*)(?:=(?P<value>.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_PLACEHOLDER = re.compile(r"<[^<>]*>?")


class LayerError(ValueError):
    """Text that cannot be read as configuration."""


@dataclass(frozen=True)
class Override:
    """One `key.path=value` of a command line."""

    key: str
    text: str | None
    """Text after `=`; None: there is none."""
    deletes: bool = False
    """`~key`: back to the default."""


@dataclass
class Layers:
    """The merged values, and for every leaf where its last value came from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def merge(self, tree: Mapping[str, Any], source: str) -> None:
        """Put a tree on top: sections are merged, everything else is replaced."""
        self._merge(self.values, tree, "", source)

    def put(self, key: str, value: Any, source: str) -> None:
        """Put one value on top."""
        tree: Any = value
        for name in reversed(key.split(".")):
            tree = {name: tree}
        self.merge(tree, source)

    def delete(self, key: str) -> None:
        """Take a value or a section away, so that its default holds."""
        self._delete(self.values, key.split("."))

    def _delete(self, tree: dict[str, Any], names: list[str]) -> None:
        name, *rest = names
        below = tree.get(name)
        if rest and isinstance(below, dict):
            self._delete(below, rest)
        if not rest or below == {}:
            tree.pop(name, None)

    def _merge(self, into: dict[str, Any], tree: Mapping[str, Any], prefix: str, source: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping):
                below = into.get(name)
                into[name] = below if isinstance(below, dict) else {}
                self._merge(into[name], value, f"{key}.", source)
            else:
                into[name] = value
            self.sources[key] = source


def read_yaml(path: Path) -> dict[str, Any]:
    """One file's tree; LayerError where it is missing or no mapping of keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LayerError(f"{path}: cannot be read: {error}") from None
    try:
        tree = yaml.load(text, Loader=PlainLoader)
    except yaml.YAMLError as error:
        raise LayerError(f"{path}: {_one_line(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise LayerError(f"{path}: the file must be a mapping of sections, such as `data:`, to their keys")
    return tree


def parse_override(text: str) -> Override:
    """Read `key.path=value` with Hydra's marks: `+` and `++` put like none, `~key` goes back to the default."""
    match = _OVERRIDE.fullmatch(text.strip())
    if match is None:
        raise LayerError(f"{text!r} is not an override. Write key.path=value, as in trainer.total_epochs=2.")
    deletes = match["mark"] == "~"
    if match["value"] is None and not deletes:
        raise LayerError(f"{text!r} has no value. Write {match['key']}=VALUE.")
    return Override(match["key"], match["value"], deletes)


def parse_value(text: str, *, as_text: bool = False) -> Any:
    """The value of an override.

    Args:
        text: what follows `=`; quotes, lists, null and numbers as in YAML.
        as_text: the key holds text, so that `1e3` and `true` stay what they are.
    """
    stripped = text.strip()
    if not stripped:
        return ""
    quoted = stripped[0] in "'\""
    if not quoted:
        _refuse_leftovers(stripped)
    if as_text and not quoted and stripped[0] not in "[{":
        return None if stripped.lower() in ("null", "~") else text
    try:
        value = yaml.load(stripped, Loader=PlainLoader)
    except yaml.YAMLError as error:
        raise LayerError(_one_line(error)) from None
    if isinstance(value, dict | list) and stripped[0] not in "[{":
        return text
    return value


def _refuse_leftovers(text: str) -> None:
    """Brackets that do not pair and placeholders are what is left of an edit, not values."""
    for opening, closing in ("{}", "[]", "()"):
        if text.count(opening) != text.count(closing):
            stray = closing if text.count(closing) > text.count(opening) else opening
            raise LayerError(f"a `{stray}` has no partner; put the value in quotes if it is meant")
    if _PLACEHOLDER.match(text):
        raise LayerError("is a placeholder; replace it by a value")


def resolve_references(values: dict[str, Any], value_of: Callable[[str], Any]) -> dict[str, str]:
    """Replace `${key.path}` by that key's value, in place.

    Args:
        values: the merged tree.
        value_of: a key's value, after merging or by default; KeyError where there is no such key.

    Returns:
        Key -> reason, of references that lead nowhere.
    """
    failed: dict[str, str] = {}

    def visit(tree: dict[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                visit(value, f"{prefix}{name}.")
            elif isinstance(value, str) and "${" in value:
                try:
                    tree[name] = _resolved(value, value_of)
                except LayerError as error:
                    failed[f"{prefix}{name}"] = str(error)

    visit(values, "")
    return failed


def _resolved(text: str, value_of: Callable[[str], Any], depth: int = 0) -> Any:
    match = _REFERENCE.fullmatch(text.strip())
    if match is None or depth > 10:
        raise LayerError("only a whole value of the form ${key.path} is followed")
    try:
        value = value_of(match[1])
    except KeyError:
        raise LayerError(f"there is no key {match[1]}") from None
    return _resolved(value, value_of, depth + 1) if isinstance(value, str) and "${" in value else value


# ---------------------------------------------------------------------------------------------------------------- YAML

_SCALARS = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^[-+]?(?:(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.?(?:inf|nan))$",
        "-+.0123456789in",
    ),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
)


class PlainLoader(yaml.SafeLoader):
    """YAML 1.2's scalars, and no key twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """Quotes what PlainLoader would take for a number, a truth value or null."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _tag, _pattern, _first in _SCALARS:
    _letters = ["" if letter == "\0" else letter for letter in _first]
    PlainLoader.add_implicit_resolver(_tag, re.compile(_pattern), _letters)
    PlainDumper.add_implicit_resolver(_tag, re.compile(_pattern), _letters)
PlainLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
PlainLoader.add_constructor(
    "tag:yaml.org,2002:float", lambda _, node: float(node.value.replace(".inf", "inf").replace(".nan", "nan"))
)


def _one_line(error: yaml.YAMLError) -> str:
    return re.sub(r"\s+", " ", str(error).replace('in "<unicode string>", ', "at "))
