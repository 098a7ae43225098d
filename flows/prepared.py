"""What a recipe makes before its first run: once per key, as a flow of stages, and used again by every later run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.stages import stage_runner
from storage.durable import sha256_json
from storage.prepared import find_prepared, sole_maker
from tasks.stage import code_digest

if TYPE_CHECKING:
    from flows.prefect_server import PrefectAPI

Say = Callable[[str], None]


def made_from(what: Mapping[str, Any], code: tuple[str, ...], libraries: tuple[str, ...]) -> str:
    """The key of a result: sixteen hex digits over its parameters, its code and the versions of its libraries."""
    versions = {name: version(name) for name in libraries}
    return sha256_json({"what": what, "code": code_digest(code), "libraries": versions})[:16]


def make_once(
    folder: Path,
    key: str,
    flow: Callable[..., dict[str, Any]],
    *args: Any,
    about: str,
    api: PrefectAPI | None,
    say: Say,
) -> dict[str, Any]:
    """Find what is committed in a folder under a key, or run `flow(folder, key, *args, stages)` to make it.

    Another process that wants the same waits and then finds it.

    Args:
        folder: where it lies.
        key: what it is made from.
        flow: commits the folder and returns its manifest.
        args: more arguments of the flow.
        about: a sentence said before it is made.
        api: Prefect server the flow run is reported to; None, or no answer: the stages are called plainly.
        say: told what is done, in sentences.

    Returns:
        The manifest.
    """
    with sole_maker(folder):
        manifest = find_prepared(folder, key, lambda reason: say(f"{reason}. It is made again."))
        if manifest is not None:
            return manifest
        say(about)
        ready = api if api is not None and api.wait_ready(say) is None else None
        name = f"{flow.__name__}-{key}".replace("_", "-")
        with stage_runner(ready, name, say=say) as runner:
            return runner.call(flow, folder, key, *args, name=name, shown={"folder": str(folder), "key": key})
