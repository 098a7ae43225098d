"""Which folder a run has, and whether a configuration may go on with the run that is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import to_yaml
from flows.config_layers import Layers, read_yaml
from flows.local_paths import with_absolute_paths
from storage import Run, RunWriter, StorageError, open_run
from storage.copies import copy_of
from storage.durable import read_json, sha256_file, sha256_json
from tasks.config import RunConfig
from tasks.stage import code_digest

if TYPE_CHECKING:
    from tasks.data import PreparedPrompts


def run_folder(cfg: RunConfig) -> Path:
    """Where the run of a configuration lies."""
    trainer = cfg.trainer
    if trainer.default_local_dir:
        return cfg.storage.place(trainer.default_local_dir)
    for key in ("project_name", "experiment_name"):
        name = getattr(trainer, key)
        if not name or name in (".", "..") or set(name) & set("/\\") or not name.isprintable():
            raise ValueError(f"trainer.{key}={name!r} cannot be the name of a folder under storage.root")
    return cfg.storage.folder / trainer.project_name / trainer.experiment_name


PREFLIGHT = "preflight.json"
"""What a preflight has found, in its folder: no run that trains has such a file."""


@dataclass(frozen=True)
class GoBack:
    """Where a run is to be taken up again.

    Attributes:
        step: first step that is made anew.
        stage: first stage of it; None: all of them.
    """

    step: int
    stage: str | None = None


def open_run_for_training(
    cfg: RunConfig,
    say: Callable[[str], None],
    back: GoBack | None = None,
    origin: Mapping[str, Any] | None = None,
) -> RunWriter:
    """Make the run's folder, or take up the run that is in it.

    Args:
        cfg: the configuration, with absolute paths.
        say: told which folder it is.
        back: the run will go back to this step; None: it goes on.
        origin: kept with a new run: which policy of which run it begins with.

    Raises:
        RunLocked: a live process writes to it.
        StorageError: the run in the folder was made with a configuration that means something else.
    """
    folder = run_folder(cfg)
    if cfg.trainer.resume_mode == "disable":
        folder = _beside(folder)
    if (folder / "run.json").exists():
        if origin is not None and open_run(folder).identity.get("origin") != origin:
            raise StorageError(f"{folder} holds another run already. Give the fork another name.")
        run = RunWriter(folder)
        changes = allowed_changes(folder, cfg, back)
        if changes and back is None:
            run.append("config_changed", lineage=run.lineage, changes=changes)
        say(f"going on with {short(folder)}")
    else:
        try:
            documents = {"config.yaml": to_yaml(cfg)}
            run = RunWriter.create(folder, cfg.trainer.experiment_name, documents, origin)
        except (FileExistsError, NotADirectoryError):
            if (folder / "run.json").exists():
                # Another process has begun it in the meantime.
                return open_run_for_training(cfg, say, back, origin)
            raise StorageError(
                f"{folder} holds something that is no run. Set trainer.default_local_dir to another folder."
            ) from None
        say(f"run folder {short(folder)}")
    run.code_digest = code_digest(("tasks", "storage"))
    opened = [event["code_digest"] for event in run.events() if event["event"] == "opened" and "code_digest" in event]
    if opened and opened[-1] != run.code_digest:
        say(
            "the code of grpoflow is another one than when this run was last open: stages whose code changed are run "
            "again, and a repeated update that gives other weights will stop the run"
        )
    run.config_digest = sha256_json(cfg.model_dump(mode="json"))
    run.compression = cfg.storage.compression
    if run.mirror is not None:
        run.mirror.say = say
    run.donors = cfg.storage.reuse_from
    return run


OF_ONE_COMMAND = ("trainer.val_only", "trainer.val_before_train", "trainer.resume_mode")
"""Keys that say what one command is to do; the next one does not inherit them."""


def config_of(run: Run, lineage: int) -> RunConfig:
    """The configuration of a lineage now: what it was begun with, and the changes written into the ledger since.

    Raises:
        StorageError: it cannot be read, or its file is not what the run was begun with.
    """
    begun = run.lineages[lineage].config
    path = run.root / ("config.yaml" if begun is None else f"lineages/{lineage:04d}.json")
    try:
        layers = Layers()
        layers.merge(_begun_config(run, path) if begun is None else begun, str(path))
        for event in run.events():
            # An event without a lineage is of a version that did not apply it.
            if event["event"] == "config_changed" and event.get("lineage") == lineage:
                for key, (_, new) in event["changes"].items():
                    if key not in OF_ONE_COMMAND:
                        layers.put(key, new, "ledger.jsonl")
        return RunConfig.model_validate(layers.values)
    except (OSError, TypeError, ValueError) as error:
        raise StorageError(f"{path} cannot be read, so the run cannot go on: {error}") from error


def _begun_config(run: Run, path: Path) -> dict[str, Any]:
    """The values of `config.yaml`; ValueError where it is not the file that the run was begun with."""
    digest = run.identity.get("documents", {}).get(path.name)
    if digest is not None and sha256_file(path) != digest:
        raise ValueError(
            "it is damaged or edited: it is not what the run was begun with. Restore it from a copy; a change belongs "
            f"on the command line: grpoflow resume {short(run.root)} [--from-step K] key=value"
        )
    return read_yaml(path)


def check_going_back(run: Run, back: GoBack, last: int, total: int) -> None:
    """Refuse to go back to where there is nothing, or where nothing would be made.

    Args:
        run: the run.
        back: where to.
        last: its last finished step.
        total: steps of the plan from now on.

    Raises:
        StorageError: with the steps and stages that there are.
    """
    if not 1 <= back.step <= last + 1:
        raise StorageError(f"--from-step {back.step}: {run.root} can be taken up at step 1 to {last + 1}")
    if total < back.step:
        raise StorageError(
            f"--from-step {back.step}: the plan has {total} steps, so that nothing would be made. Set "
            f"trainer.total_training_steps (and trainer.total_epochs) for at least {back.step}."
        )
    if back.stage is None:
        return
    there = [stage for stage in run.step(back.step).stages() if not stage.startswith("val_")]
    if back.stage not in there:
        raise StorageError(
            f"--from-stage {back.stage}: step {back.step} of {run.root} has {', '.join(there) or 'no stage yet'}"
        )


CONTENT = "data.train_files, content (SHA-256)"
"""Stands among a lineage's changes for other content of the training data."""


def open_lineage(
    run: RunWriter, cfg: RunConfig, back: GoBack, prompts: PreparedPrompts, say: Callable[[str], None]
) -> None:
    """Take the run up at an earlier point: what it made from there on stays, and is read no more.

    Args:
        run: the run.
        cfg: its configuration from now on, with absolute paths.
        back: where to.
        prompts: the training prompts from now on, which may be others.
        say: told what changed.
    """
    before = with_absolute_paths(config_of(run, run.lineage)).model_dump(mode="json")
    now = cfg.model_dump(mode="json")
    changes = {key: [old, new] for key, old, new in _differences(before, now)}
    inputs = _begun_with(run, run.lineage)
    if inputs is not None and inputs["data.train_files"] != prompts.digest:
        changes[CONTENT] = [inputs["data.train_files"], prompts.digest]
    parent = run.lineage
    lineage = run.open_lineage(back.step, back.stage, changes, now)
    run.write_document("config.yaml", to_yaml(cfg))
    where = f"step {back.step}" + (f", {back.stage}" if back.stage else "")
    changed = "; ".join(
        f"{key} {old[:12]} -> {new[:12]}" if key == CONTENT else f"{key} {old!r} -> {new!r}"
        for key, (old, new) in changes.items()
    )
    say(
        f"lineage {lineage.number} begins at {where}; what lineage {parent} made from there on is kept and not read"
        f"{f' ({changed})' if changed else ''}"
    )


def short(path: Path) -> str:
    """A path as it is shown: from the working directory where it lies below it; of a copy, its place in the store."""
    copy = copy_of(path)
    if copy is not None:
        return copy.url
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _beside(folder: Path) -> Path:
    """The first free name of `folder`, `folder-2`, `folder-3`, …"""
    number = 1
    candidate = folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


PLACES = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.balance_batch",
    "ray",
    *(
        f"actor_rollout_ref.{key}"
        for key in (
            "actor.fsdp_config.fsdp_size",
            "actor.fsdp_config.param_offload",
            "actor.fsdp_config.optimizer_offload",
            "actor.fsdp_config.offload_policy",
            "actor.fsdp_config.reshard_after_forward",
            "actor.fsdp_config.forward_prefetch",
            "actor.ulysses_sequence_parallel_size",
            "ref.fsdp_config",
            "ref.ulysses_sequence_parallel_size",
            "hybrid_engine",
            "rollout.nnodes",
            "rollout.n_gpus_per_node",
            "rollout.tensor_model_parallel_size",
            "rollout.data_parallel_size",
            "rollout.gpu_memory_utilization",
            "rollout.free_cache_engine",
        )
    ),
)
"""Where and in how many places the same is computed: it decides a result up to rounding alone."""


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
    "actor_rollout_ref.rollout.engine_python",
    "actor_rollout_ref.rollout.engine_startup_s",
    "actor_rollout_ref.rollout.engine_silence_s",
    "trainer.alarms",
    "trainer.stop_grace_s",
    *PLACES,
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


MAY_MOVE = (
    "data.train_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "custom_reward_function.path",
)
"""Files that a run was begun with. They may lie elsewhere once they are gone from where they lay, as after a restore on
another machine: `refuse_other_inputs` compares what is in them."""


def _has_moved(key: str, old: Any, new: Any) -> bool:
    """Whether a key names files that are gone from where they lay, and others that are there."""
    if key not in MAY_MOVE or not old or not new:
        return False
    before, now = ([Path(each) for each in ([places] if isinstance(places, str) else places)] for places in (old, new))
    return all(place.is_absolute() and not place.exists() for place in before) and all(
        place.is_absolute() and place.exists() for place in now
    )


MAY_CHANGE_GOING_BACK = tuple(
    f"actor_rollout_ref.model.{name}"
    for name in (
        "enable_gradient_checkpointing",
        "attn_implementation",
        "use_remove_padding",
        "trust_remote_code",
        "custom_chat_template",
    )
)
"""Keys of the model that may differ from a step on: they do not decide its weights."""


DECIDE_THE_SCHEDULE = ("trainer.total_epochs", "trainer.total_training_steps")
"""Keys that decide the learning rate of earlier steps, where the schedule has the length of the run."""


def _rate_depends_on_length(cfg: RunConfig) -> bool:
    optim = cfg.actor_rollout_ref.actor.optim
    by_ratio = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    return optim.total_training_steps < 0 and (optim.lr_scheduler_type != "constant" or by_ratio)


def allowed_changes(folder: Path, cfg: RunConfig, back: GoBack | None = None) -> dict[str, list[Any]]:
    """What differs between the configuration of the run in a folder and this one, where it may; {} for no run.

    Relative paths count from the working directory. A run that goes back may change all but the model it began with.

    Raises:
        StorageError: it differs in what decides a step, or the run's configuration cannot be read.
    """
    if cfg.trainer.resume_mode == "disable" or not (folder / "run.json").exists():
        return {}
    run = open_run(folder)
    before = with_absolute_paths(config_of(run, run.lineage)).model_dump(mode="json")
    changed = list(_differences(before, with_absolute_paths(cfg).model_dump(mode="json")))
    may_change = [key for key in MAY_CHANGE if key not in DECIDE_THE_SCHEDULE or not _rate_depends_on_length(cfg)]
    refused = [change for change in changed if not change[0].startswith(tuple(may_change))]
    refused = [(key, old, new) for key, old, new in refused if not _has_moved(key, old, new)]
    if back is not None:
        model = "actor_rollout_ref.model"
        refused = [one for one in refused if one[0].startswith(model) and one[0] not in MAY_CHANGE_GOING_BACK]
    if refused:
        lines = [
            f"- {key}: the run has {old!r}, asked for is {new!r}"
            + (" (learning rates of the steps that were made depend on it)" if key in DECIDE_THE_SCHEDULE else "")
            for key, old, new in refused
        ]
        raise StorageError(
            f"{folder} holds a run whose configuration means something else:\n"
            + "\n".join(lines)
            + "\nNothing was written. Use the run's own values, or start another run with another "
            "trainer.experiment_name or trainer.resume_mode=disable"
            + ("." if back else f"; `grpoflow resume {folder} --from-step K` changes them from step K on.")
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
    path = run.document("inputs.json")
    functions = [event["digest"] for event in run.events() if event["event"] == "reward_functions"]
    if functions and functions[-1] != reward_functions:
        last = max(run.finished_steps(), default=0)
        say(
            f"the source of the reward functions is another one since step {last}: later scores may mean something else"
        )
    if functions[-1:] != [reward_functions]:
        run.append("reward_functions", digest=reward_functions)
    refuse_other_inputs(run, prompts, first_weights)
    if path.exists():
        return
    now = _digests(prompts, first_weights)
    files = [{"path": file.path, "rows": file.rows, "sha256": file.sha256} for file in prompts.files]
    run.write_document("inputs.json", json.dumps({"digests": now, "files": files, "counts": prompts.counts}, indent=1))


def refuse_other_inputs(run: Run, prompts: PreparedPrompts, first_weights: str) -> None:
    """Refuse to go on with other training data, or from another model, than the run was begun with.

    Raises:
        StorageError: files or weights are other ones.
    """
    before, now = _begun_with(run, run.lineage), _digests(prompts, first_weights)
    if before is None:
        return
    changed = [f"- {key}: {before[key][:12]} then, {now[key][:12]} now" for key in now if before[key] != now[key]]
    if changed:
        raise StorageError(
            f"{run.root} was begun with other content (SHA-256) behind these paths:\n"
            + "\n".join(changed)
            + "\nGive it back what it was begun with, or start another run."
        )


def _digests(prompts: PreparedPrompts, first_weights: str) -> dict[str, str]:
    return {"data.train_files": prompts.digest, "actor_rollout_ref.model.path": first_weights}


def first_weights_digest(run: Run) -> str | None:
    """Digest of the weights that a run began with; None where its inputs are not written down."""
    inputs = _begun_with(run, 1)
    return None if inputs is None else inputs["actor_rollout_ref.model.path"]


def _begun_with(run: Run, lineage: int) -> dict[str, str] | None:
    """Digests of the inputs of a lineage, by configuration key; None where no lineage before it wrote any down.

    A lineage whose own file was not written before a kill has its parent's, but for the content that it was opened
    with.

    Raises:
        StorageError: a file is damaged.
    """
    this = run.lineages[lineage]
    path = run.root / this.file_name("inputs.json")
    if path.exists():
        try:
            digests = read_json(path)["digests"]
            return {key: str(digests[key]) for key in ("data.train_files", "actor_rollout_ref.model.path")}
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{path} is damaged ({error!r}). Restore it from a copy; or remove it, and the data and the model of "
                "today are taken for those that the run was begun with."
            ) from error
    inputs = None if this.parent is None else _begun_with(run, this.parent)
    if inputs is not None and CONTENT in this.changes:
        inputs["data.train_files"] = this.changes[CONTENT][1]
    return inputs


def _differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now
