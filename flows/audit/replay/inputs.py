"""What stages are made again with: their configuration as it was, data, reward processes; and which are meant."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from flows.audit.replay.one_process import Policy
from flows.config import load_config
from flows.config_layers import Layers
from storage import StorageError
from storage.artifacts import Manifest
from storage.durable import sha256_json
from storage.ledger import StepView
from storage.schema import KIND, SCHEMAS, without_round
from tasks.config import RunConfig
from tasks.rewards.functions import configured_functions
from tasks.rewards.pool import RewardPool

if TYPE_CHECKING:
    from flows.step import Workers
    from tasks.data import PreparedPrompts

WORDS = {
    "generate": "rollouts",
    "gen": "rollouts",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_probs",
    "reward": "rewards",
    "advantage": "advantages",
    "update": "updates",
}
"""Names of stages, as the artifacts that they make."""

OF_FILES = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.model.lora_adapter_path",
    "custom_reward_function.path",
    "reward.functions",
)
"""Keys that say where something lies: as it is now, not as it was."""


def selected(view: StepView, stages: Sequence[str] | None) -> list[str]:
    """Artifacts of a step that are meant by their names, or by words for stages.

    In a step of several generate calls `reward` means `rewards-01`, `rewards-02` and so on too; `rewards` does not.

    Raises:
        StorageError: the step has none of them.
        ValueError: a word that means no stage.
    """
    there = view.stages()
    if not there:
        raise StorageError(f"{view.run.root} has no step {view.index}; it has steps {view.run.steps()}")
    if stages is None:
        return there
    chosen: list[str] = []
    for word in stages:
        name = WORDS.get(word, word)
        if without_round(name) not in {*SCHEMAS, *KIND}:
            raise ValueError(f"no stage is called {word!r}; there are {', '.join([*SCHEMAS, *KIND])}")
        exact = word == name and name in there
        found = [stage for stage in there if stage == name or (not exact and without_round(stage) == name)]
        if not found:
            raise StorageError(f"step {view.index} of {view.run.root} has no {name}; it has {', '.join(there)}")
        chosen += found
    return [stage for stage in there if stage in chosen]


def as_it_was(cfg: RunConfig, manifest: Manifest | None, overrides: Sequence[str]) -> RunConfig:
    """A configuration with the values that a stored artifact was made under, and then with those that are given.

    Values that this version does not know any more are left as the run's configuration has them.
    """
    then = (manifest.made_from or {}).get("config", {}) if manifest else {}
    if then:
        now, layers = cfg.model_dump(mode="json"), Layers(cfg.model_dump(mode="json"))
        for key, value in then.items():
            layers.put(key, value, "manifest.json")
        for key in OF_FILES:
            layers.put(key, _value(now, key), "config.yaml")
        with suppress(ValidationError):
            cfg = RunConfig.model_validate(layers.values)
    return load_config([], overrides, base=cfg) if overrides else cfg


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values[name]
    return values


class Inputs:
    """What stages work with besides artifacts, opened when one first needs it."""

    def __init__(self, policy: Policy, stack: ExitStack, unread: Path | None) -> None:
        """The inputs of one run's replays.

        Args:
            policy: the run's.
            stack: closes what was opened.
            unread: folder of a bundle whose code may not be run; None: all may.
        """
        self._policy, self._stack, self._unread = policy, stack, unread
        self._pools: dict[str, RewardPool] = {}
        self._data: dict[str, PreparedPrompts] = {}

    def real(self, arg: Any, stand_ins: Workers, cfg: RunConfig) -> Any:
        """What a stage works with, for what it was opened with; any other argument as it is.

        Raises:
            StorageError, OSError, ValueError: it cannot be had.
        """
        if arg is stand_ins.group:
            self._refuse_code_of_model(cfg)
            return self._policy
        if arg is stand_ins.rewards:
            return self._pool(cfg)
        if arg is stand_ins.train or (arg is stand_ins.val and arg is not None):
            return self._prompts(cfg, "train" if arg is stand_ins.train else "val")
        return arg

    def _pool(self, cfg: RunConfig) -> RewardPool:
        own = [function.target for function in configured_functions(cfg) if not function.is_builtin]
        if own and self._unread is not None:
            names = ", ".join(target.removeprefix(f"{self._unread}/") for target in own)
            raise StorageError(f"it runs code that came in the bundle: {names}. Read it there, then add --trust-code")
        key = sha256_json([cfg.reward.model_dump(mode="json"), cfg.custom_reward_function.model_dump(mode="json")])
        if key not in self._pools:
            self._pools[key] = self._stack.enter_context(RewardPool(cfg))
        return self._pools[key]

    def _prompts(self, cfg: RunConfig, which: Literal["train", "val"]) -> PreparedPrompts:
        from tasks.data import prepare_prompts
        from tasks.tokenizer import load_tokenizer

        self._refuse_code_of_model(cfg)
        if which not in self._data:
            self._data[which] = prepare_prompts(cfg, which, load_tokenizer(cfg.actor_rollout_ref.model))
        return self._data[which]

    def _refuse_code_of_model(self, cfg: RunConfig) -> None:
        if cfg.actor_rollout_ref.model.trust_remote_code and self._unread is not None:
            raise StorageError(
                "actor_rollout_ref.model.trust_remote_code: it runs code that came in the bundle, in model/. Read it "
                "there, then add --trust-code"
            )
