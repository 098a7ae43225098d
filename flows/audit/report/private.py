"""What a report does not pass on: folders, hosts' credentials and values of keys that are secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"(^|[_.-])(secret|password|passwd|api_?key|access_?key|token|credentials?)$", re.IGNORECASE)
_FOLDERS = re.compile(r"(?<![\w.:/~-])(?:file://)?~?(?:/[^/\s'\"`:;,)]+)+/([^/\s'\"`:;,)]*)")
_USER = re.compile(r"://[^/\s@]+@")


def public(value: Any, key: str = "") -> Any:
    """A JSON value without what concerns only the machine it comes from.

    Args:
        value: text, number, list or mapping.
        key: its configuration key; one that names a secret hides the value.
    """
    if isinstance(value, Mapping):
        return {name: public(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [public(inner, key) for inner in value]
    if isinstance(value, str):
        return "(hidden)" if value and _SECRET.search(key) else public_text(value)
    return value


def public_text(text: str) -> str:
    """A text whose absolute paths are cut down to their last name, and whose URLs name no user."""
    return _FOLDERS.sub(lambda match: f"…/{match.group(1)}", _USER.sub("://", text))
