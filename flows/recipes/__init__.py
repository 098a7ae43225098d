"""Runnable configurations by name, smallest first, and what those that need it make before their first run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config_layers import Layers
from tasks.config import RunConfig

if TYPE_CHECKING:
    from flows.prefect_server import PrefectAPI

FOLDER = Path(__file__).parent
RECIPES = ("quickstart", "smollm2", "qwen2.5_0.5b_gsm8k")


def recipe_file(word: str) -> Path:
    """The file of a recipe's name, or the word itself as a path.

    Raises:
        ValueError: it is neither.
    """
    if word in RECIPES:
        return FOLDER / f"{word}.yaml"
    if Path(word).is_file():
        return Path(word)
    near = difflib.get_close_matches(word, RECIPES, n=1)
    hint = f" Do you mean {near[0]}?" if near else ""
    raise ValueError(f"{word!r} is no file and no recipe.{hint} Recipes: {', '.join(RECIPES)}.")


def list_recipes() -> list[tuple[str, str]]:
    """Name of each recipe and what it is: the first line of its file."""
    names = [(name, FOLDER / f"{name}.yaml") for name in RECIPES]
    return [(name, path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")) for name, path in names]


def prepare(
    files: Sequence[Path], cfg: RunConfig, say: Callable[[str], None], api: PrefectAPI | None = None
) -> RunConfig:
    """Make the model and the data of a recipe where the configuration leaves them open, or find them as made before.

    Args:
        files: the configuration's files; a recipe among them names what is made.
        cfg: the configuration.
        say: told what is done, in sentences.
        api: Prefect server to report to; None: call the stages plainly.

    Returns:
        The configuration with `actor_rollout_ref.model.path`, `data.train_files` and `data.val_files` filled in.
    """
    names = [path.stem for path in files if path.parent.resolve() == FOLDER and path.stem in PREPARE]
    is_open = {
        "actor_rollout_ref.model.path": not cfg.actor_rollout_ref.model.path,
        "data.train_files": not cfg.data.train_files,
        "data.val_files": not cfg.data.val_files,
    }
    if not names or not any(is_open.values()):
        return cfg
    made = PREPARE[names[-1]](cfg, say, api)
    layers = Layers(cfg.model_dump(mode="json"))
    for key, value in made.items():
        if is_open[key]:
            layers.put(key, value, f"recipe {names[-1]}")
    return RunConfig.model_validate(layers.values)


def _quickstart(cfg: RunConfig, say: Callable[[str], None], api: PrefectAPI | None) -> dict[str, Any]:
    from flows.warm_start import ensure_warm_start
    from tasks.warm_start.parameters import WarmStartParameters

    root, seed = cfg.storage.folder, cfg.trainer.seed
    made = ensure_warm_start(root, WarmStartParameters(), seed, api=api, say=say)
    return _filled(made.model_path, made.train_file, made.val_file)


def _smollm2(cfg: RunConfig, say: Callable[[str], None], api: PrefectAPI | None) -> dict[str, Any]:
    from flows.smollm2 import ensure_small_additions, ensure_smollm2

    root = cfg.storage.folder
    train, val = ensure_small_additions(root, cfg.trainer.seed, 64, api=api, say=say)
    return _filled(ensure_smollm2(root, api=api, say=say), train, val)


def _filled(model: Path, train: Path, val: Path) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": [str(train)],
        "data.val_files": [str(val)],
    }


PREPARE: dict[str, Callable[[RunConfig, Callable[[str], None], PrefectAPI | None], dict[str, Any]]] = {
    "quickstart": _quickstart,
    "smollm2": _smollm2,
}
"""What makes the model and the data of a recipe: configuration key -> value."""
