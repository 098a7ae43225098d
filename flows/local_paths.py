"""The files that a configuration names, as absolute paths: a run is then gone on with from any directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.object_store import is_url
from tasks.config import RunConfig


def with_absolute_paths(cfg: RunConfig) -> RunConfig:
    """The same configuration with every path on this disk in full.

    A model's path that is no folder here stays as it is: it is a hub's name. Once it was a folder it is absolute, and
    never taken for a hub's name when the folder is gone.
    """
    model, trainer = cfg.actor_rollout_ref.model, cfg.trainer
    rollout = cfg.actor_rollout_ref.rollout
    python = rollout.engine_python
    hub_or_folder = ("path", "tokenizer_path", "lora_adapter_path")
    functions = tuple(one.model_copy(update={"name": _reward_name(one.name)}) for one in cfg.reward.functions)
    sections = {
        "data": _updated(
            cfg.data,
            train_files=tuple(map(_absolute, cfg.data.train_files)),
            val_files=tuple(map(_absolute, cfg.data.val_files)),
        ),
        "actor_rollout_ref": _updated(
            cfg.actor_rollout_ref,
            model=_updated(model, **{name: _if_folder(getattr(model, name)) for name in hub_or_folder}),
            rollout=_updated(rollout, engine_python=_absolute(python) if python and "/" in python else python),
        ),
        "custom_reward_function": _updated(cfg.custom_reward_function, path=_absolute(cfg.custom_reward_function.path)),
        "reward": _updated(cfg.reward, functions=functions),
        "trainer": _updated(trainer, default_local_dir=_absolute(trainer.default_local_dir)),
        "storage": _updated(
            cfg.storage,
            root=_absolute(cfg.storage.root),
            reuse_from=tuple(map(_absolute, cfg.storage.reuse_from)),
        ),
    }
    return _updated(cfg, **sections)


def _updated(section: Any, **values: Any) -> Any:
    return section.model_copy(update=values)


def _absolute(path: Any) -> Any:
    """The path in full; nothing stays nothing, and a place in an object store is in full."""
    return str(Path(path).expanduser().absolute()) if path and not is_url(path) else path


def _if_folder(path: str | None) -> str | None:
    return str(_absolute(path)) if path and Path(path).expanduser().is_dir() else path


def _reward_name(name: str) -> str:
    """`file.py:function` with the file in full; other names as they are."""
    place, colon, function = name.rpartition(":")
    return f"{_absolute(place)}:{function}" if colon and place.endswith(".py") else name
