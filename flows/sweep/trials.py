"""From the values of a trial to the configurations of its runs, or to why it cannot be trained."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.config import ConfigError, ConfigProblem, to_yaml, validated
from flows.config_layers import Layers
from flows.plan_view import plan_of
from flows.recipes import RECIPES
from flows.support import refuse_unbuilt
from flows.sweep.spec import SweepSpec
from tasks.config import RunConfig


def trial_config(
    spec: SweepSpec, base: RunConfig, values: Mapping[str, Any], name: str, seed: int, trial: int | None = None
) -> RunConfig:
    """The configuration of one run of a trial.

    Args:
        spec: the sweep.
        base: what all trials start from.
        values: of the trial, by configuration key.
        name: of the run.
        seed: of the run.
        trial: its number, for a run of the sweep; None: for one of its own.

    Raises:
        ConfigError: a value is none that its key takes.
    """
    layers = Layers(base.model_dump(mode="json"))
    for key, value in values.items():
        layers.put(key, value, "the space of the sweep")
    layers.put(spec.seed_key, seed, "the seeds of the sweep")
    layers.put("trainer.experiment_name", name, "the sweep")
    layers.put("trainer.default_local_dir", None, "the sweep")
    if trial is not None:
        tags = [*base.orchestration.tags, f"sweep:{spec.name}", f"trial:{trial}", f"seed:{seed}"]
        layers.put("orchestration.tags", tags, "the sweep")
        layers.put("storage.reuse_from", [f"{siblings(spec, base)}"], "the sweep")
    cfg, problems = validated(layers)
    if cfg is None or problems:
        raise ConfigError(problems)
    return cfg


def siblings(spec: SweepSpec, base: RunConfig) -> str:
    """Glob of the folders of a sweep's runs, which share what is equal in their first step."""
    return str(base.storage.folder / base.trainer.project_name / f"{glob.escape(spec.name)}-[0-9]*-s*")


def refusal(cfg: RunConfig, total: int) -> str | None:
    """Why a configuration cannot be trained as a trial: what the plan refuses; None: it can.

    Args:
        cfg: of one of its runs.
        total: steps of a whole run of the sweep.
    """
    plan = plan_of(cfg)
    if plan.problems:
        return "; ".join(str(problem) for problem in plan.problems)
    try:
        refuse_unbuilt(cfg, plan)
    except ValueError as error:
        return str(error)
    if plan.total_steps not in (None, total):
        return f"its plan has {plan.total_steps} steps, the sweep's runs have {total}"
    return None


def total_steps(spec: SweepSpec, base: RunConfig) -> int:
    """Steps of a whole run.

    Raises:
        ConfigError: they are not the same for all trials, or a pruning step lies behind them.
    """
    total = base.trainer.total_training_steps
    if total is None:
        why = "the steps of a run must be known, and the same for all trials: set it in overrides"
        raise ConfigError([ConfigProblem("trainer.total_training_steps", why)])
    if spec.pruning.kind != "none" and spec.pruning.min_steps >= total:
        why = f"no trial can be stopped at step {spec.pruning.min_steps}: a run has {total} (pruning.min_steps)"
        raise ConfigError([ConfigProblem("pruning.min_steps", why)])
    return total


def recipe_words(spec: SweepSpec) -> list[str]:
    """Recipes among the base, which make what a run's configuration leaves open."""
    return [word for word in spec.base if word in RECIPES]


def write_config(cfg: RunConfig, path: Path) -> None:
    """Keep a run's whole configuration beside the sweep."""
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(".aside")
    aside.write_text(to_yaml(cfg), encoding="utf-8")
    aside.rename(path)
