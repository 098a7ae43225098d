"""`grpoflow preflight`: rollouts and rewards of the policy that a run would begin with, and what they say of the run.

Prompts are taken in the order of the run's first epoch, `data.train_batch_size` at a time, through the stages of
training. Each such batch is a step of a run folder of its own; the first one is what the run itself would sample in its
step 1. A preflight that was killed goes on where it stopped.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from flows.config import load_config
from flows.interrupts import polite_end
from flows.local_paths import with_absolute_paths
from flows.plan_view import plan_of
from flows.prefect_server import PrefectAPI, prefect_api
from flows.preflight_report import Found, Keep, check_output, found_in, print_found, write_kept
from flows.progress import Progress, RunConsole
from flows.ranks import Replacement
from flows.recipes import prepare
from flows.run_folder import PREFLIGHT, allowed_changes, keep_inputs, open_run_for_training, run_folder
from flows.stages import StageRunner, Stages, stage_runner
from flows.step import Workers
from flows.support import refuse_unbuilt
from flows.tracking import Tracker
from flows.train import Data, checked, open_workers, state_is_kept
from storage import Artifact, RunWriter, StorageError, read_table
from storage.artifacts import read_manifest
from tasks.advantage import group_health
from tasks.conditions import conditions_of
from tasks.config import RunConfig
from tasks.data import PreparedPrompts, prepare_prompts
from tasks.generate import generate
from tasks.prompts import choose_prompts, choose_rest
from tasks.reward import reward
from tasks.stage import Stage, Step
from tasks.tokenizer import load_tokenizer
from tasks.workers.rank import Rank

PROMPTS = 256
"""How many prompts are looked at where nobody says."""


def preflight_command(
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    prompts: int | None,
    pass_score: float,
    output: Path | None,
    keep: str,
    as_json: bool,
) -> int:
    """Sample and score prompts with the first policy, say what was found, and return the exit code.

    Args:
        files: configuration files and recipes of the run.
        overrides: `key=value` over them.
        prompts: how many; None: `PROMPTS`, or all where there are fewer.
        pass_score: a response passes from this score on.
        output: parquet file for the rows of the data whose pass rate is kept; None: none is written.
        keep: `low..high`, the pass rates that are kept.
        as_json: print what was found as JSON, and the rest on stderr.
    """
    bounds = Keep.parse(keep)
    if output is not None:
        check_output(output)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    cfg = load_config(files, overrides)
    refuse_unbuilt(cfg, checked(plan_of(cfg)))
    console = Console(stderr=True) if as_json else RunConsole()
    with ExitStack() as stack:
        say = Progress(console).say
        check = stack.enter_context(polite_end(cfg.trainer.stop_grace_s, say))
        api = stack.enter_context(prefect_api(cfg.orchestration, cfg.storage.folder, say))
        cfg = prepare(files, cfg, say, api)
        found, data = run_preflight(cfg, prompts, console, api, pass_score=pass_score, before_stage=check)
    kept = None if output is None else write_kept(output, found, data, bounds)
    if as_json:
        Console().out(json.dumps({**found.as_dict(), "kept": kept}))
    else:
        print_found(found, kept, bounds, Console())
    return 0


def run_preflight(
    cfg: RunConfig,
    prompts: int | None,
    console: Console,
    api: PrefectAPI | None = None,
    *,
    pass_score: float = 1.0,
    before_stage: Callable[[], None] = lambda: None,
) -> tuple[Found, PreparedPrompts]:
    """Make the rollouts and rewards, or find them as made before, and measure them.

    Args:
        cfg: the run's configuration.
        prompts: how many; None: `PROMPTS`, or all where there are fewer.
        console: where progress goes.
        api: Prefect server to report to; None: none.
        pass_score: a response passes from this score on.
        before_stage: called before each stage; what it raises ends the preflight.

    Returns:
        What was found, and the prepared prompts.

    Raises:
        ValueError, StorageError: the configuration, its data or the folder does not allow it.
    """
    progress = Progress(console)
    cfg = preflight_config(with_absolute_paths(cfg))
    tokenizer = load_tokenizer(cfg.actor_rollout_ref.model)
    data = Data(tokenizer, prepare_prompts(cfg, "train", tokenizer), None)
    rows = data.train.table.num_rows
    plan = checked(plan_of(cfg, train_prompts=rows))
    batches = cut(min(prompts or PROMPTS, rows), cfg.data.train_batch_size)
    with ExitStack() as stack:
        workers = stack.enter_context(open_workers(cfg, plan, data))
        first_weights = workers.group.weights_digest()
        run = stack.enter_context(open_run_for_training(cfg, progress.say))
        run.conditions = conditions_of(cfg, workers.group, first_weights, run.code_digest)
        workers.group.log_to(run.root / "logs")
        keep_inputs(run, data.train, first_weights, workers.rewards.code_digest, progress.say)
        run.write_document("plan.json", json.dumps(plan.as_dict(), indent=1))
        path = run.root / PREFLIGHT
        if not path.exists():
            path.write_text("{}", encoding="utf-8")
        # It has no tracker that sends: what it finds is in its folder.
        tracker = Tracker(run, cfg, progress.say)
        stack.enter_context(state_is_kept(run, tracker, progress.say, go_on="the same grpoflow preflight"))
        runner = stack.enter_context(stage_runner(api, run.run_id, say=progress.say))
        if api is not None and (problem := api.wait_ready(progress.say)):
            progress.say(f"{problem}; the preflight goes on without it")
        job = Job(run, cfg, workers, runner, batches, progress, before_stage)
        runner.call(preflight, job, name=run.run_id, shown={"folder": str(run.root)})
        found = found_in(run, cfg, plan, [batch.step for batch in batches], pass_score)
        run.write_document(PREFLIGHT, json.dumps(found.as_dict(), indent=1))
    return found, data.train


def preflight_config(cfg: RunConfig) -> RunConfig:
    """The configuration of a run's preflight: its own folder, every error of a reward counted, MLflow left alone.

    What earlier preflights of the run have sampled is taken over where it is the same. A folder whose preflight was
    made with a configuration that means something else is left as it is: the next free one is taken.
    """
    own = cfg.trainer.default_local_dir
    base = str(run_folder(cfg)) if own else cfg.trainer.experiment_name
    earlier = f"{glob.escape(str(run_folder(cfg)))}.preflight*"
    sections: dict[str, Any] = {
        "reward": cfg.reward.model_copy(update={"max_error_share": 1.0}),
        "tracking": cfg.tracking.model_copy(update={"enabled": False}),
        "storage": cfg.storage.model_copy(update={"reuse_from": (*cfg.storage.reuse_from, earlier)}),
    }
    number = 1
    while True:
        name = f"{base}.preflight" + (f"-{number}" if number > 1 else "")
        where = {"default_local_dir": name} if own else {"experiment_name": name}
        trainer = cfg.trainer.model_copy(update={**where, "resume_mode": "auto"})
        candidate = cfg.model_copy(update={**sections, "trainer": trainer})
        folder = run_folder(candidate)
        try:
            allowed_changes(folder, candidate)
        except StorageError:
            number += 1
            continue
        return candidate


# ---------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True)
class Batch:
    """Prompts that are sampled together.

    Attributes:
        step: number of the step that holds them.
        start: place of the first one in the order of the first epoch.
        count: how many.
        whole: they are the prompts that the run itself takes in this step.
    """

    step: int
    start: int
    count: int
    whole: bool


def cut(prompts: int, batch: int) -> list[Batch]:
    """The batches of a number of prompts: whole ones as the run takes them, and what is left over."""
    whole, rest = divmod(prompts, batch)
    batches = [Batch(place + 1, place * batch, batch, True) for place in range(whole)]
    return [*batches, *([Batch(whole + 1, whole * batch, rest, False)] if rest else [])]


@dataclass(frozen=True)
class FirstPolicyStep(Step):
    """A step whose stages all use the policy before training."""

    def open(self, stage: str, *, policy_version: int | None = None, **about: Any) -> Stage:
        return super().open(stage, policy_version=policy_version or 0, **about)


@dataclass
class Job:
    """A preflight: what is to be done, and what with."""

    run: RunWriter
    cfg: RunConfig
    workers: Workers
    runner: StageRunner
    batches: Sequence[Batch]
    progress: Progress
    before_stage: Callable[[], None] = lambda: None


def preflight(job: Job, _: Stages) -> None:
    """Sample and score the batches, as a flow: every one is a flow run of its own, under the same tag."""
    ranks = Replacement(job.run, job.workers.group, lambda: None, job.progress.say, job.before_stage)
    total = sum(batch.count for batch in job.batches)
    if any(job.run.step(batch.step).record is None for batch in job.batches):
        # An engine that is a process of its own starts here, not within the first batch's time.
        ranks.within(lambda: job.workers.group.sample(wake))
    for batch in job.batches:
        step = FirstPolicyStep(batch.step, job.run, job.cfg, before_stage=job.before_stage)

        def work(step: Step = step, batch: Batch = batch) -> dict[str, float | None]:
            return job.runner.call(preflight_step, step, batch, job.workers, name=f"preflight-{batch.step:06d}")

        metrics = ranks.within(work)
        job.progress.say(
            f"prompts {batch.start + 1} to {batch.start + batch.count} of {total} | "
            f"score {_shown(metrics['critic/score/mean'])} | "
            f"length {_shown(metrics.get('response_length/mean'), '.1f')}"
        )


def wake(rank: Rank) -> None:
    """Rank task: have the engine hold the policy."""
    rank.ready_to_sample()


def _shown(value: float | None, digits: str = ".3f") -> str:
    return "-" if value is None else format(value, digits)


def preflight_step(step: Step, batch: Batch, workers: Workers, stages: Stages) -> dict[str, float | None]:
    """Sample and score one batch, and return its metrics."""
    if batch.whole:
        prompts = stages.run(choose_prompts, step, workers.train)
    else:
        prompts = stages.run(choose_rest, step, workers.train, batch.start, batch.count)
    rollouts = stages.run(generate, step, prompts, workers.group)
    rewards = stages.run(reward, step, prompts, rollouts, workers.rewards)
    artifacts = {artifact.stage: artifact for artifact in (prompts, rollouts, rewards)}
    digests = {stage: artifact.digest for stage, artifact in artifacts.items()}
    before = step.run.step(step.index).record
    metrics = before["metrics"] if before and before["artifacts"] == digests else _metrics(artifacts)
    if before is None or before["artifacts"] != digests:
        step.run.finish_step(step.index, {"metrics": metrics, "artifacts": digests})
    return metrics


def _metrics(artifacts: dict[str, Artifact]) -> dict[str, float | None]:
    """The numbers of a batch under the names that they have in a training step."""
    manifests = {stage: read_manifest(artifact.folder) for stage, artifact in artifacts.items()}
    table = read_table(artifacts["rewards"], ["group_id", "score"])
    score = table["score"].to_numpy().astype(np.float64)
    group = np.unique(np.asarray(table["group_id"].to_pylist()), return_inverse=True)[1]
    known = score[~np.isnan(score)]
    metrics: dict[str, float | None] = {name: v for one in manifests.values() for name, v in one.metrics.items()}
    metrics["critic/score/mean"] = float(known.mean()) if len(known) else None
    return {**metrics, **group_health(score, group)}
