"""The user's own files of reward functions, as they go with a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tasks.config import RunConfig
from tasks.rewards.functions import BUILTIN, configured_functions
from tasks.rewards.sources import folders_of_the_user, imported_files, installed_folders, own_file


@dataclass
class UserCode:
    """What was found.

    Attributes:
        members: files by their name in the bundle.
        custom_path: `custom_reward_function.path` there.
        names: the name of each of `reward.functions` there.
        import_from: folders there from which functions that are named by module are imported.
        told: what is not in it.
    """

    members: dict[str, Path | bytes] = field(default_factory=dict)
    custom_path: str | None = None
    names: list[str] = field(default_factory=list)
    import_from: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def files_of_rewards(cfg: RunConfig) -> UserCode:
    """The source files of the functions that a configuration names, with those of the user's files that they import.

    Raises:
        RewardError: a file is not there.
    """
    code = UserCode()
    for number, function in enumerate(configured_functions(cfg)):
        place, _, name = function.target.rpartition(":")
        first = None if function.is_builtin else own_file(place)
        if function.is_builtin:
            code.names.append(next(short for short, target in BUILTIN.items() if target == function.target))
            continue
        if first is None or not _is_the_users(first):
            code.names.append(function.target)
            code.told.append(f"the source of reward function {function.target}, which is an installed package's")
            continue
        by_module = not place.endswith(".py")
        root = first.parents[place.count(".") + (first.name == "__init__.py")] if by_module else first.parent
        files = _with_imports(first, root)
        code.members.update({f"rewards/{number}/{path}": source for path, source in files.items()})
        if by_module:
            code.import_from.append(f"rewards/{number}")
        code.names.append(function.target if by_module else f"rewards/{number}/{first.name}:{name}")
    if cfg.custom_reward_function.path is not None:
        code.custom_path = code.names.pop().rpartition(":")[0]
    return code


def _is_the_users(file: Path) -> bool:
    return not any(file.is_relative_to(folder) for folder in installed_folders())


def _with_imports(first: Path, root: Path) -> dict[str, Path]:
    """A file and the user's files that it imports, by their path below the folder from which they are imported."""
    roots = list(dict.fromkeys([root, *folders_of_the_user()]))
    named, seen, waiting = {first.relative_to(root).as_posix(): first}, {first}, [first]
    while waiting:
        for label, path in imported_files(waiting.pop(), roots):
            if not _is_the_users(path):
                continue
            # What a relative import names counts from its package, not from a folder of the import path.
            if path.parents[label.count("/")] not in roots:
                below = next((folder for folder in roots if path.is_relative_to(folder)), path.parent)
                label = path.relative_to(below).as_posix()
            named.setdefault(label, path)
            if path not in seen:
                seen.add(path)
                waiting.append(path)
    return named
