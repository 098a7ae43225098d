"""Why stored artifacts of a step are used again or made again, found by opening its stages without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from flows.step import Stages, Workers, train_step, validate_policy
from storage import Artifact, Run, RunWriter, StorageError
from storage.artifacts import check_parts, read_manifest, reference
from storage.durable import read_json
from storage.ledger import StepView
from storage.schema import without_round
from tasks.config import RunConfig
from tasks.data import PreparedPrompts
from tasks.rewards.calls import RewardError
from tasks.rewards.functions import configured_functions, functions_digest
from tasks.stage import Stage, StageError, Step


def stale_reasons(run: Run, cfg: RunConfig, step: int) -> dict[str, list[str]]:
    """For each committed artifact of a step: nothing when it would be used again, else why not, in words.

    The stages are opened in the order in which the step runs them, and none is run: no model is loaded. Data files are
    taken to be those the run was begun with, which is checked when it goes on.

    Args:
        run: the run.
        cfg: the configuration that it would go on with.
        step: the step; 0: the validation before training.
    """
    view = run.step(step)
    look = _Look(view)
    workers, problem = nobody(run, cfg, view)
    opened = Opening(step, cast(RunWriter, run), cfg)
    if step:
        look.walk(train_step, opened, workers)
    if any(stage.startswith("val_") for stage in view.stages()):
        look.walk(validate_policy, opened, workers)
    if problem is not None:
        for stage, reasons in look.reasons.items():
            if without_round(stage).endswith("rewards"):
                reasons.insert(0, problem)
    return {stage: look.reasons.get(stage, look.of_the_rest()) for stage in view.stages()}


def in_sentences(reasons: Mapping[str, list[str]]) -> list[str]:
    """What `stale_reasons` found, as sentences: first what is used again, then each artifact that is not, and why."""
    used = ", ".join(stage for stage, why in reasons.items() if not why) or "nothing"
    return [f"used again: {used}"] + [
        f"{stage} is made again: {'; '.join(why)}" for stage, why in reasons.items() if why
    ]


def differences(made_from: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """What differs between what a stored artifact was made from and what it would be made from now, in words.

    Args:
        made_from: `Manifest.made_from`; None: not written down.
        now: the same of the stage as it is opened now.
    """
    if made_from is None:
        return ["what it was made from was not written down"]
    return [
        *_of_values(made_from["config"], now["config"], ""),
        *_of_parents(made_from["parents"], now["parents"]),
        *_of_code(made_from, now),
        *_of_the_other(made_from, now),
    ]


def _of_values(before: Any, now: Any, key: str) -> Iterator[str]:
    """`actor_rollout_ref.rollout.temperature was 1.0, is 0.7` for each key that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            yield from _of_values(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} was {before!r}, is {now!r}"


def _of_parents(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in {**before, **now}:
        if name not in now:
            yield f"it was made from {name} too"
        elif name not in before:
            yield f"it was made without {name}"
        elif before[name] != now[name]:
            yield f"{name} was made again (digest {before[name][:12]} then, {now[name][:12]} now)"


def _of_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if before["code"] == now["code"]:
        return
    known = before.get("modules", {})
    changed = [name for name, digest in now.get("modules", {}).items() if known.get(name) != digest]
    yield f"the code of {', '.join(changed) or 'the stage'} is another one"


def _of_the_other(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if before["policy_version"] != now["policy_version"]:
        yield f"it is of policy {before['policy_version']}, not {now['policy_version']}"
    then, also = dict(before["also"]), dict(now["also"])
    digests = {"data": "the prompts are other ones", "policy": "the policy has other weights"}
    digests["functions"] = "the reward functions' source is another one"
    if _reward_keys(before) != _reward_keys(now):
        digests["functions"] = "the reward functions are other ones"
    for name, sentence in digests.items():
        if then.pop(name, None) != also.pop(name, None):
            yield sentence
    yield from _of_values(then, also, "")


def _reward_keys(made_from: Mapping[str, Any]) -> list[Any]:
    return [made_from["config"].get(key) for key in ("reward.functions", "custom_reward_function")]


# -------------------------------------------------------------------------------------- opening stages without running


class Opened(Exception):
    """A stage was opened; it goes no further."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage


class _Seen(Exception):
    """All that can be judged has been."""


@dataclass(frozen=True)
class Opening(Step):
    """A step whose stages are opened and left."""

    def open(self, stage: str, **about: Any) -> Stage:
        raise Opened(super().open(stage, **about))


class _Look:
    """Calls a flow's stages for what they open, and judges their stored artifacts. In the place of `Stages`."""

    def __init__(self, view: StepView) -> None:
        self.reasons: dict[str, list[str]] = {}
        self._view = view
        self._bad: dict[str, str] = {}

    def walk(self, flow: Callable[[Step, Workers, Stages], object], step: Step, workers: Workers) -> None:
        """Go through the stages of a flow as far as can be told."""
        try:
            flow(step, workers, self)
        except (_Seen, StageError, StorageError):
            return

    def run(self, stage: Callable[..., Artifact], *args: Any) -> Artifact:
        """Judge what a stage would use or make."""
        try:
            stage(*args)
        except Opened as opened:
            name, artifact = opened.stage.name, self._judge(opened.stage)
        # What comes after the last stage reads or writes results, and further generate calls follow from their content.
        if name in ("updates", "val_rewards") or (name in self._bad and name != without_round(name)):
            raise _Seen
        return artifact

    def start(self, stage: Callable[..., Artifact], *args: Any) -> Callable[[], Artifact]:
        """The same; nothing goes on beside anything here."""
        artifact = self.run(stage, *args)
        return lambda: artifact

    def of_the_rest(self) -> list[str]:
        """Why artifacts that no stage was asked for are not used."""
        return list(self._bad.values())[:1] or ["a step of this configuration has no such stage"]

    def _judge(self, stage: Stage) -> Artifact:
        because = [self._bad[parent.stage] for parent in stage.parents if parent.stage in self._bad]
        if stage.name == "val_rollouts" and "updates" in self._bad:
            because.append(self._bad["updates"])
        artifact, reasons = self._stored(stage)
        if artifact is None and not reasons:
            self._bad[stage.name] = f"because {stage.name} is not there"
        else:
            self.reasons[stage.name] = reasons = list(dict.fromkeys(reasons + because))
            if reasons:
                self._bad[stage.name] = f"because {stage.name} is"
        return artifact or Artifact(stage.name, self._view.folder, "", 0, 0)

    def _stored(self, stage: Stage) -> tuple[Artifact | None, list[str]]:
        """The attempt that would be used again, or the newest one and why it would not be; None: there is none."""
        newest: Artifact | None = None
        reasons: list[str] = []
        for folder in reversed(self._view.attempts(stage.name)):
            try:
                manifest = read_manifest(folder)
                newest = newest or reference(folder, manifest)
                if manifest.key == stage.key:
                    check_parts(folder, manifest)
                    return reference(folder, manifest), []
                if not reasons:
                    reasons += differences(manifest.made_from, self._past_the_bad(stage, manifest.parents))
            except StorageError as error:
                reasons.append(str(error))
        return newest, reasons

    def _past_the_bad(self, stage: Stage, recorded: Mapping[str, str]) -> dict[str, Any]:
        """What a stage is made from now, without the digests of inputs that are themselves to be made again."""
        now = stage.made_from["parents"]
        parents = {name: recorded.get(name, now[name]) if name in self._bad else now[name] for name in now}
        return {**stage.made_from, "parents": parents}


@dataclass(frozen=True)
class _Rewards:
    """What the reward stage is opened with: no processes."""

    code_digest: str

    def stop(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True)
class _Group:
    """What the ranks' stages are opened with: no model."""

    policy_digest: str | None

    def weights_digest(self) -> str | None:
        """Of the policy after the step."""
        return self.policy_digest


def nobody(run: Run, cfg: RunConfig, view: StepView) -> tuple[Workers, str | None]:
    """What stages are opened with, and what is wrong with the reward functions, if anything is."""
    problem = None
    try:
        code = functions_digest(configured_functions(cfg))
    except RewardError as error:
        code, problem = "", str(error)
    begun = run.document("inputs.json")
    try:
        inputs = read_json(begun if begun.exists() else run.root / "inputs.json")
        _ = inputs["digests"], inputs["counts"]
    except (OSError, ValueError, KeyError, TypeError):
        inputs = {"digests": {}, "counts": {}}
    train = _prompts(inputs["digests"].get("data.train_files", ""), inputs["counts"].get("kept", 0))
    known = view.manifest("val_prompts")
    val = _prompts((known.made_from or {}).get("also", {}).get("data", "") if known else "", 0)
    rewards = cast(Any, _Rewards(code))
    first_weights = inputs["digests"].get("actor_rollout_ref.model.path")
    group = cast(Any, _Group(_weights_digest(view) if view.index else first_weights))
    return Workers(group, rewards, train, val), problem


def _prompts(digest: str, rows: int) -> PreparedPrompts:
    return PreparedPrompts(pa.table({"row": pa.nulls(rows)}), {}, (), digest)


def _weights_digest(view: StepView) -> str | None:
    try:
        digests: list[str] = view.table("updates", ["weights_digest"])["weights_digest"].to_pylist()
    except (FileNotFoundError, StorageError):
        return None
    return digests[-1] if digests else None
