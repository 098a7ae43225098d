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

LARGEST_FILE_BYTES = 1 << 20
"""Of a YAML file. The longest configuration there is has a hundredth of it."""

MOST_NODES = 100_000
"""Keys and values of a YAML text, each counted as often as an alias repeats it."""

DEEPEST = 32
"""Sections within sections."""


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
        """Put one value on top; LayerError where no key has so many sections."""
        if key.count(".") > DEEPEST:
            raise LayerError(f"a key has at most {DEEPEST} sections")
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
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise LayerError(f"{path}: it is longer than {LARGEST_FILE_BYTES:,} bytes, so it is no configuration")
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LayerError(f"{path}: cannot be read: {error}") from None
    try:
        tree = parse_yaml(text)
    except LayerError as error:
        raise LayerError(f"{path}: {error}") from None
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
    value = parse_yaml(stripped)
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
    if isinstance(value, Mapping) or hasattr(value, "model_dump"):
        raise LayerError(f"{match[1]} is a section; only a key's value is followed")
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


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, which may come from anybody.

    Raises:
        LayerError: it is no YAML, or what no configuration holds: types other than JSON's, a value that repeats itself
            by aliases into more than can be meant, or one that is nested too deeply.
    """
    try:
        loader = PlainLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_what_is_not_meant(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise LayerError(_one_line(error)) from None
    except RecursionError:
        raise LayerError(f"it is nested more than {DEEPEST} deep") from None
    except (OverflowError, ValueError) as error:
        raise LayerError(str(error)) from None


def _refuse_what_is_not_meant(node: yaml.Node, depth: int = 0, nodes: int = 0) -> int:
    """Look at each node as often as it counts; return how many that makes with those before."""
    nodes += 1
    if depth > DEEPEST:
        raise LayerError(f"it is nested more than {DEEPEST} deep")
    if nodes > MOST_NODES:
        raise LayerError(f"it has more than {MOST_NODES:,} keys and values, aliases followed")
    if node.tag not in _TAGS or not isinstance(node, _TAGS[node.tag]):
        raise LayerError(f"line {node.start_mark.line + 1}: {node.tag} is no type of a configuration's value")
    if isinstance(node, yaml.ScalarNode):
        pattern = _PATTERNS.get(node.tag)
        if pattern is not None and not pattern.match(node.value):
            raise LayerError(f"line {node.start_mark.line + 1}: {node.value!r} is no {node.tag.rpartition(':')[2]}")
        return nodes
    for below in node.value:
        for one in below if isinstance(node, yaml.MappingNode) else (below,):
            nodes = _refuse_what_is_not_meant(one, depth + 1, nodes)
        if isinstance(node, yaml.MappingNode) and not isinstance(below[0], yaml.ScalarNode):
            raise LayerError(f"line {node.start_mark.line + 1}: a key must be a name")
    return nodes


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


_PATTERNS = {tag: re.compile(pattern) for tag, pattern, _ in _SCALARS}
_TAGS: dict[str, type[yaml.Node]] = {
    **dict.fromkeys(("tag:yaml.org,2002:str", *_PATTERNS), yaml.ScalarNode),
    "tag:yaml.org,2002:map": yaml.MappingNode,
    "tag:yaml.org,2002:seq": yaml.SequenceNode,
}

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
