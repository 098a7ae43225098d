"""Which source files a reward function is made of: its own and the user's files that it imports, found by reading.

What installed packages hold is not looked at, nor what no `import` statement names: data files, modules imported by a
computed name, values taken from the environment or caught in a closure. Arguments in the configuration are.
"""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from storage.durable import sha256_file, sha256_json

_PROJECT = Path(__file__).parents[2]
_OURS = tuple(_PROJECT / name for name in ("flows", "tasks", "storage"))


def source_digest(target: str) -> str | None:
    """SHA-256 over the source files of a reward function; None: it has none that can be found.

    Args:
        target: `module:function` or `/absolute/file.py:function`.
    """
    files = source_files(target)
    return sha256_json(sorted(files.items())) if files else None


def source_files(target: str) -> dict[str, str]:
    """SHA-256 of each source file of a reward function, by its path below the folder that it is imported from.

    Imports are followed through files beside the function's own and in those folders of the import path that hold no
    installed packages.
    """
    first = own_file(target.rpartition(":")[0])
    if first is None:
        return {}
    beside = [] if first.parent in installed_folders() else [first.parent]
    roots = list(dict.fromkeys([*beside, *folders_of_the_user()]))
    names = {first: first.name}
    waiting = [first]
    while waiting:
        for label, path in imported_files(waiting.pop(), roots):
            if path not in names and not any(path.is_relative_to(package) for package in _OURS):
                names[path] = label
                waiting.append(path)
    found: dict[str, list[str]] = {}
    for path, label in names.items():
        found.setdefault(label, []).append(sha256_file(path))
    # Of two files with the same name below two folders, which one is imported is not decided here: both count.
    return {label: digests[0] if len(digests) == 1 else sha256_json(digests) for label, digests in found.items()}


def own_file(place: str) -> Path | None:
    """The source file of a path or of a module's name; None: there is none."""
    if place.endswith(".py"):
        return Path(place)
    try:
        spec = importlib.util.find_spec(place)
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def folders_of_the_user() -> list[Path]:
    """Folders from which reward processes import, without those of the interpreter and of installed packages."""
    here, installed = Path.cwd(), {*installed_folders(), Path(sys.prefix), Path(sys.base_prefix)}
    folders = [here / entry if entry else here for entry in sys.path] + [here]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and not any(folder.is_relative_to(place) for place in installed)
    ]


def installed_folders() -> set[Path]:
    """Folders of the standard library and of installed packages."""
    return {Path(path) for path in (*sysconfig.get_paths().values(), site.getusersitepackages())}


def imported_files(path: Path, roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """Files that a source file imports, each with its path below the folder that it was found in."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."), roots)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            where = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else roots
            for alias in node.names:
                yield from _files_of([*base, alias.name], where)


def _files_of(parts: list[str], roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """The module `a.b.c`, its packages' own files, and `a.b` where `c` is no module but a name in it."""
    for root in roots:
        for count in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:count])
            for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
                if file.is_file():
                    yield file.relative_to(root).as_posix(), file
