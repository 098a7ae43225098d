"""Which folder a run has, and whether a configuration may go on with the run that is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flows.config import to_yaml
from storage import RunWriter, StorageError
from storage.durable import sha256_json
from tasks.config import RunConfig
from tasks.stage import code_digest

if TYPE_CHECKING:
    from tasks.data import PreparedPrompts


def run_folder(cfg: RunConfig) -> Path:
    """Where the run of a configuration lies."""
    trainer = cfg.trainer
    if trainer.default_local_dir:
        return Path(trainer.default_local_dir)
    for key in ("project_name", "experiment_name"):
        name = getattr(trainer, key)
        if not name or name in (".", "..") or set(name) & set("/\\\0"):
            raise ValueError(f"trainer.{key}={name!r} cannot be the name of a folder under storage.root")
    return Path(cfg.storage.root) / trainer.project_name / trainer.experiment_name


def open_run_for_training(cfg: RunConfig, say: Callable[[str], None]) -> RunWriter:
    """Make the run's folder, or take up the run that is in it.

    Raises:
        RunLocked: a live process writes to it.
        StorageError: the run in the folder was made with a configuration that means something else.
    """
    folder = run_folder(cfg)
    if cfg.trainer.resume_mode == "disable":
        folder = _beside(folder)
    if (folder / "run.json").exists():
        run = RunWriter(folder)
        changes = allowed_changes(folder, cfg)
        if changes:
            run.append("config_changed", changes=changes)
        say(f"going on with {folder}")
    else:
        try:
            run = RunWriter.create(folder, cfg.trainer.experiment_name, {"config.yaml": to_yaml(cfg)})
        except (FileExistsError, NotADirectoryError):
            raise StorageError(
                f"{folder} holds something that is no run. Set trainer.default_local_dir to another folder."
            ) from None
        say(f"run folder {folder}")
    run.code_digest = code_digest(("tasks", "storage"))
    run.config_digest = sha256_json(cfg.model_dump(mode="json"))
    run.compression = cfg.storage.compression
    return run


def _beside(folder: Path) -> Path:
    """The first free name of `folder`, `folder-2`, `folder-3`, …"""
    number = 1
    candidate = folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


MAY_CHANGE = (
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "data.val_files",
    "data.val_batch_size",
    "data.val_max_samples",
    "actor_rollout_ref.rollout.val_kwargs",
    "trainer.alarms",
    "algorithm.filter_groups.max_num_gen_batches",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.retries",
    "reward.max_error_share",
    "storage",
    "tracking",
    "orchestration",
)
"""Keys that may differ when a run goes on: they do not decide what a step computes."""


DECIDE_THE_SCHEDULE = ("trainer.total_epochs", "trainer.total_training_steps")
"""Keys that decide the learning rate of earlier steps, where the schedule has the length of the run."""


def _rate_depends_on_length(cfg: RunConfig) -> bool:
    optim = cfg.actor_rollout_ref.actor.optim
    by_ratio = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    return optim.total_training_steps < 0 and (optim.lr_scheduler_type != "constant" or by_ratio)


def allowed_changes(folder: Path, cfg: RunConfig) -> dict[str, list[Any]]:
    """What differs between the configuration of the run in a folder and this one, where it may; {} for no run.

    Raises:
        StorageError: it differs in what decides a step, or the run's configuration cannot be read.
    """
    if cfg.trainer.resume_mode == "disable" or not (folder / "run.json").exists():
        return {}
    try:
        before = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StorageError(f"{folder / 'config.yaml'} cannot be read, so the run cannot go on: {error}") from error
    changed = list(_differences(before, cfg.model_dump(mode="json")))
    may_change = [key for key in MAY_CHANGE if key not in DECIDE_THE_SCHEDULE or not _rate_depends_on_length(cfg)]
    refused = [change for change in changed if not change[0].startswith(tuple(may_change))]
    if refused:
        lines = [f"- {key}: the run has {old!r}, asked for is {new!r}" for key, old, new in refused]
        raise StorageError(
            f"{folder} holds a run whose configuration means something else:\n"
            + "\n".join(lines)
            + "\nNothing was written. Use the run's own values, or start another run with another "
            "trainer.experiment_name or trainer.resume_mode=disable."
        )
    return {key: [old, new] for key, old, new in changed}


def keep_inputs(
    run: RunWriter, prompts: PreparedPrompts, first_weights: str, reward_functions: str, say: Callable[[str], None]
) -> None:
    """Write down what the run was begun with, or compare it with what the run is gone on with.

    Args:
        run: the run.
        prompts: the training prompts.
        first_weights: digest of the weights at `actor_rollout_ref.model.path`.
        reward_functions: digest of their source, which may change; it is said and written down.
        say: told what changed.

    Raises:
        StorageError: files or weights behind the same paths are other ones.
    """
    now = {"data.train_files": prompts.digest, "actor_rollout_ref.model.path": first_weights}
    path = run.root / "inputs.json"
    functions = [event["digest"] for event in run.events() if event["event"] == "reward_functions"]
    if functions and functions[-1] != reward_functions:
        last = max(run.finished_steps(), default=0)
        say(
            f"the source of the reward functions is another one since step {last}: later scores may mean something else"
        )
    if functions[-1:] != [reward_functions]:
        run.append("reward_functions", digest=reward_functions)
    if path.exists():
        before = json.loads(path.read_text())["digests"]
        changed = [f"- {key}: {before[key][:12]} then, {now[key][:12]} now" for key in now if before[key] != now[key]]
        if changed:
            raise StorageError(
                f"{run.root} was begun with other content (SHA-256) behind the same paths:\n"
                + "\n".join(changed)
                + "\nGive it back what it was begun with, or start another run."
            )
        return
    files = [{"path": file.path, "rows": file.rows, "sha256": file.sha256} for file in prompts.files]
    run.write_document("inputs.json", json.dumps({"digests": now, "files": files, "counts": prompts.counts}, indent=1))


def _differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now
