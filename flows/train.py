"""A run: plan, open the folder, recover, then step after step until the plan's last; validate and save on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flows.alarms import alarms
from flows.config import load_config
from flows.gc import Retainer
from flows.interrupts import polite_end
from flows.local_paths import with_absolute_paths
from flows.plan_view import plan_of
from flows.plan_words import plan_in_brief
from flows.prefect_server import PrefectAPI, prefect_api
from flows.progress import Progress, RunConsole
from flows.ranks import Replacement, worker_group
from flows.recipes import prepare
from flows.recover import last_finished_step, newest_checkpoint, rebuild, recover, seen_checkpoints
from flows.run_folder import (
    GoBack,
    allowed_changes,
    check_going_back,
    keep_inputs,
    open_lineage,
    open_run_for_training,
    refuse_other_inputs,
    run_folder,
    short,
)
from flows.stages import StageRunner, stage_runner
from flows.stale import in_sentences, stale_reasons
from flows.step import Stages, Workers, train_step, validate_policy
from flows.support import refuse_unbuilt
from flows.tracking import Tracker
from storage import RunWriter, StorageError, open_run
from storage.checkpoints import prune_checkpoints, save_checkpoint
from storage.copies import refresh
from storage.reuse import donors
from tasks.advantage import kl_coef
from tasks.conditions import conditions_of
from tasks.config import RunConfig
from tasks.data import PreparedPrompts, prepare_prompts
from tasks.engines.vllm_settings import without_effect_here
from tasks.filter_groups import calls_before
from tasks.geometry import Plan, PlanError
from tasks.rewards.functions import configured_functions
from tasks.rewards.pool import RewardPool
from tasks.stage import Step
from tasks.tokenizer import load_tokenizer


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        folder: where it lies.
        last_step: the policy version at its end.
        validations: metrics of each validation by step.
        paused: where it was paused, in words; None: it is at the end of its plan.
    """

    folder: Path
    last_step: int = 0
    validations: dict[int, dict[str, float]] = field(default_factory=dict)
    paused: str | None = None


def train_command(files: Sequence[Path], overrides: Sequence[str], until: int | None = None) -> int:
    """Train from configuration files and overrides, say what happens, and return the exit code."""
    return train_and_tell(load_config(files, overrides), recipes=files, until=until)


def train_and_tell(
    cfg: RunConfig,
    *,
    recipes: Sequence[Path] = (),
    back: GoBack | None = None,
    origin: Mapping[str, Any] | None = None,
    until: int | None = None,
) -> int:
    """Train with the servers that the configuration asks for, say what came of it, and return the exit code.

    Args:
        cfg: the configuration.
        recipes: its files; a recipe among them makes what the configuration leaves open.
        back: see run_training.
        origin: see run_training.
        until: see run_training.
    """
    # Read when torch is imported: threads that wait for work leave the processor to others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = RunConsole()
    refuse_unbuilt(cfg, checked(plan_of(cfg)))
    configured_functions(cfg)
    with ExitStack() as stack:
        say = Progress(console).say
        check = stack.enter_context(polite_end(cfg.trainer.stop_grace_s, say))
        api = stack.enter_context(prefect_api(cfg.orchestration, cfg.storage.folder, say))
        cfg = prepare(recipes, cfg, say, api)
        outcome = run_training(cfg, console, api, back=back, origin=origin, until=until, before_stage=check)
    print_outcome(outcome, console)
    return 0


def run_training(
    cfg: RunConfig,
    console: Console,
    api: PrefectAPI | None = None,
    *,
    back: GoBack | None = None,
    origin: Mapping[str, Any] | None = None,
    until: int | None = None,
    before_stage: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train one run to the end of its plan, or to a step at which it is paused.

    Args:
        cfg: the configuration.
        console: where progress goes.
        api: Prefect server to report to; None: none.
        back: go back to a step of the run in the folder, in a new lineage; None: go on where it stopped.
        origin: which policy of which other run a new run begins with, to be kept in its `run.json`.
        until: pause after this step, which then has a checkpoint; the plan and with it the learning rates stay those of
            the whole run. None, or beyond the plan: train to the plan's end.
        before_stage: called before each stage; what it raises ends the run.

    Raises:
        ValueError, StorageError: the configuration, its data or the folder does not allow it.
    """
    cfg = with_absolute_paths(cfg)
    refuse_unbuilt(cfg, checked(plan_of(cfg)))
    refuse_empty_pause(cfg, until, back)
    refresh(run_folder(cfg))
    allowed_changes(run_folder(cfg), cfg, back)
    data = load_data(cfg)
    plan = checked(plan_of(cfg, train_prompts=data.train.table.num_rows, val_prompts=data.val_prompts))
    progress = Progress(console, plan.total_steps or 0)
    progress.say(plan_in_brief(plan))
    for warning in plan.warnings:
        progress.say(f"{warning.level}: {warning.message}")
    if back is not None:
        here = open_run(run_folder(cfg))
        check_going_back(here, back, last_finished_step(here), plan.total_steps or 0)
    with ExitStack() as stack:
        # What can be refused is refused here, before there is a run.
        workers = stack.enter_context(open_workers(cfg, plan, data))
        for sentence in workers.group.run(without_effect_here, cfg)[0]:
            progress.say(f"warning: {sentence}")
        first_weights = workers.group.weights_digest()
        if back is None and cfg.trainer.resume_mode == "auto" and (run_folder(cfg) / "run.json").exists():
            refuse_other_inputs(open_run(run_folder(cfg)), data.train, first_weights)
        run = stack.enter_context(open_run_for_training(cfg, progress.say, back, origin))
        if isinstance(console, RunConsole):
            console.run_id = run.run_id
        if back is not None:
            check_going_back(run, back, last_finished_step(run), plan.total_steps or 0)
            rebuild(run, workers.group, back.step - 1, progress.say)
            open_lineage(run, cfg, back, data.train, progress.say)
        run.conditions = conditions_of(cfg, workers.group, first_weights, run.code_digest)
        if run.donors and not any(donors(run.donors, run.root)):
            progress.say(f"no run is there yet to take anything over from: storage.reuse_from={', '.join(run.donors)}")
        tracker = stack.enter_context(Tracker(run, cfg, progress.say))
        workers.group.log_to(run.root / "logs")
        keep_inputs(run, data.train, first_weights, workers.rewards.code_digest, progress.say)
        ending = stack.enter_context(state_is_kept(run, tracker, progress.say))
        runner = stack.enter_context(stage_runner(api, run.run_id, cfg.orchestration.tags, progress.say))
        describe(run, cfg, plan, data, tracker)
        # The server has been starting since this process began; only now is it needed.
        if api is not None and (problem := api.wait_ready(progress.say)):
            progress.say(f"{problem}; training goes on without it")
        loop = Loop(run, cfg, plan, workers, runner, tracker, progress, before_stage, until)
        outcome = runner.call(train, loop, name=run.run_id, shown={"folder": str(run.root)})
        if outcome.paused is not None:
            ending.state, ending.reason = "paused", outcome.paused
        return outcome


def train(loop: Loop, _: Stages) -> Outcome:
    """A run, as a flow: every step in it is a flow run of its own, under the same tag."""
    loop.publish()
    return loop.to_the_end()


def checked(plan: Plan) -> Plan:
    """The plan, when it has no problems; PlanError with all of them otherwise."""
    if plan.problems:
        raise PlanError(plan.problems)
    return plan


def refuse_empty_pause(cfg: RunConfig, until: int | None, back: GoBack | None) -> None:
    """Refuse to pause where nothing would be trained.

    Raises:
        ValueError: `until` lies before the step that is gone back to, or nothing is trained at all.
    """
    if until is None:
        return
    if cfg.trainer.val_only:
        raise ValueError(f"--until {until}: trainer.val_only=true validates and ends. Leave out one of the two.")
    if back is not None and until < back.step:
        raise ValueError(
            f"--until {until} lies before --from-step {back.step}: nothing would be made. Give at least {back.step}."
        )


# ------------------------------------------------------------------------------------------------- opening and closing


@dataclass
class Ending:
    """How a run ends if nothing stops it: what the ledger's last line will say.

    Attributes:
        state: `finished`, or `paused`.
        reason: why, in words.
    """

    state: str = "finished"
    reason: str | None = None


@contextmanager
def state_is_kept(
    run: RunWriter, tracker: Tracker, say: Callable[[str], None], go_on: str | None = None
) -> Iterator[Ending]:
    """Write the run's state into its ledger and its tracking run, however the block ends, and say how to go on.

    Args:
        run: the run.
        tracker: of the run.
        say: told how to go on with a run that is not finished.
        go_on: by which command; None: by `grpoflow resume`.

    Yields:
        What is written when the block ends by itself.
    """
    run.append("opened", state="running", code_digest=run.code_digest, config_digest=run.config_digest)
    ending = Ending()
    try:
        yield ending
    except (KeyboardInterrupt, SystemExit) as error:
        ending.state, ending.reason = "killed", type(error).__name__
        raise
    except BaseException as error:
        ending.state, ending.reason = "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        try:
            run.append("closed", state=ending.state, reason=ending.reason)
        except (OSError, StorageError) as error:
            # What ended the run is what has to be told; without this line it counts as crashed.
            say(f"the end of the run could not be written down: {error}")
        if tracker.keeps_report and ending.state not in ("killed", "paused"):
            keep_report(run, ending.state, say)
        tracker.finish(ending.state)
        if ending.state != "finished":
            mended = "when the cause that is told below is mended, " if ending.state == "failed" else ""
            told = ending.reason if ending.state == "paused" else ending.state
            say(f"{told}; {mended}go on with: {go_on or f'grpoflow resume {short(run.root)}'}")


def keep_report(run: RunWriter, state: str, say: Callable[[str], None]) -> None:
    """Write the run's report into its folder, for MLflow. That it cannot be written is a warning and no more."""
    try:
        from flows.audit.report import FILE_NAME, write_report

        write_report(run, run.document(FILE_NAME), state=state)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        say(f"warning: no report was written for MLflow ({why}); grpoflow report {short(run.root)} makes it")


@dataclass(frozen=True)
class Data:
    """Tokenizer and prompts, which can be refused before anything is written."""

    tokenizer: Any
    train: PreparedPrompts
    val: PreparedPrompts | None

    @property
    def val_prompts(self) -> int | None:
        """Number of validation prompts."""
        return self.val.table.num_rows if self.val else None


def load_data(cfg: RunConfig) -> Data:
    """Load the tokenizer and prepare the prompts."""
    tokenizer = load_tokenizer(cfg.actor_rollout_ref.model)
    val = prepare_prompts(cfg, "val", tokenizer) if cfg.data.val_files else None
    return Data(tokenizer, prepare_prompts(cfg, "train", tokenizer), val)


@contextmanager
def open_workers(cfg: RunConfig, plan: Plan, data: Data) -> Iterator[Workers]:
    """Start the reward processes and the ranks, which load the policy."""
    with RewardPool(cfg) as pool, worker_group(cfg, plan, data.tokenizer) as group:
        pool.check(set(data.train.table["data_source"].unique().to_pylist()))
        yield Workers(group, pool, data.train, data.val)


def describe(run: RunWriter, cfg: RunConfig, plan: Plan, data: Data, tracker: Tracker) -> None:
    """Keep plan and data with the run, and tell the tracker what is trained on what."""
    run.write_document("plan.json", json.dumps(plan.as_dict(), indent=1))
    tracker.start(
        params={**flat(cfg), **{f"plan.{name}": value for name, value in plan.counts().items()}},
        documents=("config.yaml", "plan.json", "inputs.json"),
        datasets={"train": data.train, **({"val": data.val} if data.val else {})},
    )


def flat(cfg: RunConfig) -> dict[str, Any]:
    """Every configuration key with its value."""

    def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from leaves(inner, f"{key}.{name}" if key else name)
        else:
            yield key, value

    return dict(leaves(cfg.model_dump(mode="json"), ""))


# ------------------------------------------------------------------------------------------------------------ the loop


@dataclass
class Loop:
    """The steps of one run, in order."""

    run: RunWriter
    cfg: RunConfig
    plan: Plan
    workers: Workers
    runner: StageRunner
    tracker: Tracker
    progress: Progress
    before_stage: Callable[[], None] = lambda: None
    until: int | None = None

    def __post_init__(self) -> None:
        self.retainer = Retainer(self.run, self.cfg, self.progress.say)
        group, say = self.workers.group, self.progress.say
        self.ranks = Replacement(self.run, group, self._recover, say, self.before_stage)

    def to_the_end(self) -> Outcome:
        """Recover, then train until the plan's last step or `until`, validating and saving as `trainer` says."""
        outcome = Outcome(self.run.root)
        with self.progress.live():
            done = self.ranks.within(self._recover)
            self._tell_open_step(done + 1)
            if done and not self.cfg.trainer.val_only and self._is_due(done, self.cfg.trainer.save_freq):
                # A kill can come between the step and its checkpoint.
                self._save(done)
            if self.workers.val and (self.cfg.trainer.val_only or (self.cfg.trainer.val_before_train and not done)):
                self._run(validate_policy, self._step(done), f"validate-{done:06d}")
                self._report(done, outcome)
            if self.last <= done < self.total:
                self.progress.say(f"step {done} is finished: nothing is left to do until step {self.last}")
            if done >= self.total:
                self.progress.say(f"all {self.total} steps are finished; trainer.total_training_steps can ask for more")
            if not self.cfg.trainer.val_only:
                for index in range(done + 1, self.last + 1):
                    self.step(index, outcome, validates=self._is_due(index, self.cfg.trainer.test_freq))
                    if self._is_due(index, self.cfg.trainer.save_freq):
                        self._save(index)
        outcome.last_step = self.ranks.within(lambda: self.workers.group.policy_version)
        if outcome.last_step and not self.cfg.trainer.val_only:
            self._save(outcome.last_step)
        if self.until is not None and outcome.last_step < self.total:
            outcome.paused = f"paused after step {outcome.last_step} of {self.total}"
        return outcome

    def _tell_open_step(self, index: int) -> None:
        """Say what of a half-done step is used again, and why the rest is not."""
        if self.run.step(index).stages():
            for sentence in in_sentences(stale_reasons(self.run, self.cfg, index)):
                self.progress.say(f"step {index} goes on: {sentence}")

    def publish(self) -> None:
        """Show the plan's shapes and where things lie in Prefect, once per run."""
        rows = [
            {"stage": shape.stage, "column": shape.column, "global": str(shape.global_shape)}
            for shape in self.plan.stages
        ]
        self.runner.publish_table("shapes", rows, "Shapes of one step, as planned")
        places = {"run folder": self.run.root, "steps": self.run.root / "steps", "plan": self.run.root / "plan.json"}
        links = "\n".join(f"- {name}: [{path}](file://{path})" for name, path in places.items())
        self.runner.publish_markdown("run", f"{plan_in_brief(self.plan)}\n\n{links}", "Where this run lies")

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.plan.total_steps or 0

    @property
    def last(self) -> int:
        """Last step that is trained now."""
        return self.total if self.until is None else min(self.until, self.total)

    def _is_due(self, index: int, every: int) -> bool:
        """Whether something done every so many steps, and after the last one, is done after this step."""
        return every > 0 and (index % every == 0 or index == self.total)

    def step(self, index: int, outcome: Outcome, *, validates: bool) -> None:
        """Run one step as a flow, send its metrics, print its line."""
        step = self._step(index, validates=validates and self.workers.val is not None)
        self._run(train_step, step, f"step-{index:06d}", f"step-{index + 1:06d}" if index < self.last else None)
        self._report(index, outcome)

    def _step(self, index: int, *, validates: bool = False) -> Step:
        return Step(index, self.run, self.cfg, validates=validates, before_stage=self.before_stage)

    def _run(self, flow: Callable[..., Any], step: Step, name: str, next_name: str | None = None) -> None:
        self.ranks.within(lambda: self.runner.call(flow, step, self.workers, name=name, next_name=next_name))

    def _recover(self) -> int:
        return recover(self.run, self.cfg, self.workers.group, self.progress.say, total_steps=self.total)

    def _report(self, index: int, outcome: Outcome) -> None:
        record = self.run.step(index).record
        assert record is not None, "a flow that returned has finished its step"
        self.tracker.step_finished(index)
        validation = {name: value for name, value in record["metrics"].items() if name.startswith("val-")}
        if "timing_s/step" in record["metrics"]:
            self.progress.step(index, record["metrics"])
            for alarm in alarms(record["metrics"], self.cfg):
                self.progress.say(f"alarm: {alarm}")
                self.run.append("alarm", step=index, message=alarm)
        if validation:
            outcome.validations[index] = validation
            self.progress.validation(index, validation)

    def _save(self, index: int) -> None:
        """Save a checkpoint, unless it is there and intact, and only then let go of the oldest."""
        newest = newest_checkpoint(self.run, index, self.progress.say)
        saved = newest is None or newest.step != index
        if saved:
            self.ranks.within(lambda: self._write_checkpoint(index))
        keep, seen = self.cfg.trainer.max_actor_ckpt_to_keep, seen_checkpoints(self.run)
        removed = prune_checkpoints(self.run.root, keep, seen=seen)
        if saved or removed:
            self.run.append("checkpoint", step=index, removed=removed)
            self.retainer.after_checkpoint(index)

    def _write_checkpoint(self, index: int) -> None:
        group = self.workers.group
        about = {
            "run_id": self.run.run_id,
            "policy_version": index,
            "weights_digest": group.weights_digest(),
            "kl_coef": kl_coef(self.cfg, self.run.step(index).artifact("advantages")),
            "generate_calls": calls_before(self.run.step(index).artifact("prompts")),
        }
        save_checkpoint(
            self.run.root,
            index,
            group.save,
            expected_bytes=group.checkpoint_bytes(),
            about=about,
            lineage=self.run.lineage,
        )


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Say what came of a run and how to look at it."""
    folder = short(outcome.folder)
    console.print()
    if len(outcome.validations) > 1:
        first, last = min(outcome.validations), max(outcome.validations)
        for name, after in outcome.validations[last].items():
            before = outcome.validations[first].get(name)
            if before is not None and "core" in name and not name.endswith("/std"):
                label = name.removeprefix("val-core/")
                console.print(Text(f"{label}: {before:.3f} before, {after:.3f} after step {last}", style="bold"))
    lines = [f"policy version {outcome.last_step} in {folder}", "look at it:"]
    lines += [f"  grpoflow {words}" for words in (f"status {folder}", f"show {folder} --step {outcome.last_step}")]
    lines.append(f"  grpoflow show {folder} --step {outcome.last_step} --stage rewards")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
