"""Runs taken up again: `resume`, from an earlier step too; `fork`, another run's policy as a start; `export`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.config import load_config
from flows.local_paths import with_absolute_paths
from flows.plan_view import plan_of
from flows.recover import last_finished_step, newest_checkpoint, planned_steps, rebuild
from flows.run_folder import PREFLIGHT, GoBack, config_of, first_weights_digest, run_folder
from flows.support import refuse_unbuilt
from flows.train import checked, train_and_tell
from storage import Run, RunWriter, StorageError, open_run
from storage.copies import copy_of
from storage.prepared import commit_prepared, find_prepared, new_folder, sole_maker
from tasks.config import RunConfig
from tasks.tokenizer import load_tokenizer
from tasks.workers.group import LocalGroup
from tasks.workers.rank import Role, open_rank

if TYPE_CHECKING:
    from tasks.workers.policy import PolicyWorker
    from tasks.workers.rank import Rank

_STEP = re.compile(r"(?P<path>.+)@(?P<step>[0-9]+)")


def resume_command(
    path: Path, overrides: Sequence[str], from_step: int | None, from_stage: str | None, until: int | None = None
) -> int:
    """Go on with a run under its own configuration, or from an earlier step in a new lineage; return the exit code.

    Args:
        path: the run's folder.
        overrides: of its configuration, as `key=value`.
        from_step: first step that is made anew; None: go on where it stopped.
        from_stage: first stage of that step that is made anew; None: all.
        until: pause after this step; None: train to the end of the plan.
    """
    if from_stage is not None and from_step is None:
        raise ValueError("--from-stage needs --from-step: which step's stage?")
    run = open_run(path)
    refuse_preflight(run)
    # The folder is put in last, as a value: in an override its name would be read as YAML.
    base = _with_trainer(config_of(run, run.lineage), default_local_dir=None, resume_mode="auto")
    cfg = load_config([], overrides, base=base)
    if cfg.trainer.resume_mode != "auto" or cfg.trainer.default_local_dir is not None:
        raise ValueError(
            f"resume goes on with the run in {path}: it takes neither trainer.resume_mode nor "
            "trainer.default_local_dir. `grpoflow fork` begins another run with this one's policy."
        )
    if run_folder(with_absolute_paths(cfg)) != run.root:
        copy = copy_of(run.root)
        cfg = _with_trainer(cfg, default_local_dir=copy.url if copy else str(run.root))
    return train_and_tell(cfg, back=None if from_step is None else GoBack(from_step, from_stage), until=until)


def refuse_preflight(run: Run) -> None:
    """Refuse to take a preflight for a run with policies of its own.

    Raises:
        StorageError: it is one.
    """
    if (run.root / PREFLIGHT).exists():
        raise StorageError(
            f"{run.root} is a preflight: rollouts and rewards of the first policy, and no other. Train with `grpoflow "
            "train`; `grpoflow preflight` with the same words goes on with a preflight."
        )


def _with_trainer(cfg: RunConfig, **values: object) -> RunConfig:
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update=values)})


def fork_command(source: str, name: str, overrides: Sequence[str]) -> int:
    """Train a new run that begins with another run's policy; return the exit code.

    Args:
        source: `RUN` or `RUN@STEP`.
        name: `trainer.experiment_name` of the new run.
        overrides: what else differs from the other run's configuration.

    Raises:
        StorageError: there is no such policy, or the new run's folder is taken.
        ValueError: the new run's configuration or plan is refused; nothing is written.
    """
    run, step = parse_source(source)
    cfg, begins_with = _forked(run, step, name, overrides)
    if (run_folder(cfg) / "run.json").exists():
        raise StorageError(
            f"{run_folder(cfg)} is a run already. Go on with it by `grpoflow resume`, or give another name."
        )
    refuse_unbuilt(cfg, checked(plan_of(cfg)))
    say = _teller(Console())
    origin = {"run_id": run.run_id, "step": step, "lineage": run.lineage_of(step)}
    with sole_maker(begins_with):
        key = f"{run.run_id}@{step}"
        made = find_prepared(begins_with, key, say)
        if made is None:
            with new_folder(begins_with, f"policy {step} of {run.run_id}") as aside:
                digest = export_policy_of(run, step, aside, say)
                made = commit_prepared(aside, begins_with, key, {**origin, "weights_digest": digest})
    return train_and_tell(cfg, origin={**origin, "weights_digest": made["weights_digest"]})


def _forked(run: Run, step: int, name: str, overrides: Sequence[str]) -> tuple[RunConfig, Path]:
    """The configuration of a run that begins with a policy of another, and the folder where that policy is put."""
    base = config_of(run, run.lineage_of(step))
    begins_with = base.storage.folder.absolute() / "origins" / f"{run.run_id}-{run.lineage_of(step)}-{step:06d}"
    policy = base.actor_rollout_ref
    model = policy.model.model_copy(update={"path": "", "lora_adapter_path": None})
    base = base.model_copy(update={"actor_rollout_ref": policy.model_copy(update={"model": model})})
    cfg = load_config([], overrides, base=_with_trainer(base, experiment_name=name, default_local_dir=None))
    policy = cfg.actor_rollout_ref
    if policy.model.path:
        raise ValueError(
            f"actor_rollout_ref.model.path={policy.model.path}: a fork begins with the other run's policy. For another "
            "model use `grpoflow train`."
        )
    model = policy.model.model_copy(update={"path": str(begins_with)})
    cfg = cfg.model_copy(update={"actor_rollout_ref": policy.model_copy(update={"model": model})})
    return with_absolute_paths(cfg), begins_with


def export_command(source: str, folder: Path, adapter: bool) -> int:
    """Write a run's policy as a Hugging Face folder and return the exit code.

    Args:
        source: `RUN` or `RUN@STEP`.
        folder: a folder that is not there yet.
        adapter: of a LoRA run, the adapter alone.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file. Name a folder that is not there yet.")
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} is not empty. Name another folder.")
    run, step = parse_source(source)
    console = Console()
    digest = export_policy_of(run, step, folder, _teller(console), adapter=adapter)
    console.print(Text(f"policy {step} of {run.run_id} (weights {digest[:12]}) is in {folder}"), soft_wrap=True)
    return 0


def parse_source(source: str) -> tuple[Run, int]:
    """The run and the step of `RUN@STEP`; without a step its last finished one.

    A run whose folder's name itself ends in `@` and a number is meant where there is one.

    Raises:
        StorageError: there is no such run, or it has no such step.
    """
    match = _STEP.fullmatch(source)
    if match is None or (Path(source) / "run.json").exists():
        run, wanted = open_run(source), None
    else:
        run, wanted = open_run(match["path"]), int(match["step"])
    refuse_preflight(run)
    last = last_finished_step(run)
    step = last if wanted is None else wanted
    if not 0 <= step <= last:
        raise StorageError(f"{run.root} has no policy {step}; its policies are 0 to {last}")
    return run, step


def export_policy_of(run: Run, step: int, folder: Path, say: Callable[[str], None], *, adapter: bool = False) -> str:
    """Rebuild a run's policy and write it as a Hugging Face folder; return the digest of its weights."""
    from tasks.workers.export import export_policy

    with policy_at(run, step, say) as rank:
        export_policy(rank.policy, rank.tokenizer, folder, adapter=adapter)
        return rank.policy.weights_digest()


@contextmanager
def policy_at(run: Run, step: int, say: Callable[[str], None]) -> Iterator[Rank]:
    """The policy of a run after a step, in this process; a live run may be read where a checkpoint of it is there.

    Raises:
        StorageError: it cannot be rebuilt, or the model that the run began with is not there any more.
    """
    lineage = run.lineage_of(step)
    cfg = config_of(run, lineage)
    tokenizer = load_tokenizer(cfg.actor_rollout_ref.model)
    rank = open_rank(cfg, None, tokenizer, role=Role.ACTOR, total_steps=planned_steps(run, lineage) or 1)
    checkpoint = newest_checkpoint(run, step, say)
    if checkpoint is None:
        _check_first_weights(run, rank.policy)
    if step and (checkpoint is None or checkpoint.step < step):
        with RunWriter(run.root) as writer:
            say(rebuild(writer, LocalGroup(rank), step, say))
    elif checkpoint is not None:
        rank.policy.load(checkpoint.folder)
    yield rank


def _check_first_weights(run: Run, policy: PolicyWorker) -> None:
    """Refuse to take another model for the one that the run began with."""
    begun, now = first_weights_digest(run), policy.weights_digest()
    if begun not in (None, now):
        raise StorageError(
            f"actor_rollout_ref.model.path={policy.cfg.actor_rollout_ref.model.path} holds other weights (SHA-256 "
            f"{now[:12]}) than those that {run.root} began with ({begun[:12] if begun else ''}). Put them back."
        )


def _teller(console: Console) -> Callable[[str], None]:
    return lambda message: console.print(Text(message), soft_wrap=True)
