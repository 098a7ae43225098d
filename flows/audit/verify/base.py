"""What every check of `verify` works with: an account of what it found, and what a run has once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flows.run_folder import config_of
from storage import Run, RunWriter, StorageError
from storage.durable import sha256_json
from tasks.config import RunConfig
from tasks.stage import config_value

if TYPE_CHECKING:
    from tasks.data import PreparedPrompts
    from tasks.rewards.pool import RewardPool

T = TypeVar("T", bound=AbstractContextManager[Any])

ROWS_KEPT = 100
"""Offending rows of one check that are named; all are counted."""


class Cannot(Exception):
    """A check has nothing to look at here, and why: no failure."""


@dataclass(frozen=True)
class Row:
    """Where something is wrong, and what.

    Attributes:
        what: in words, with both values.
        step: number of the step; None: it is about the run.
        stage: name of the artifact.
        sample_id: the sample, or the group of a prompt.
        token: place in the response, from 0.
    """

    what: str
    step: int | None = None
    stage: str | None = None
    sample_id: str | None = None
    token: int | None = None


@dataclass
class Account:
    """What one check has found so far, over all steps.

    Attributes:
        compared: how many things were looked at.
        measured: the largest deviation among them, in the unit of the check's tolerance; None: it measures nothing.
        failures: how many are wrong.
        rows: the first of them.
        cannot: why something could not be looked at, with the steps in which.
    """

    compared: int = 0
    measured: float | None = None
    failures: int = 0
    rows: list[Row] = field(default_factory=list)
    cannot: dict[str, list[int]] = field(default_factory=dict)

    def look(self, number: int = 1, deviation: float | None = None) -> None:
        """Count things that were compared, and how far the worst of them is off."""
        self.compared += number
        if deviation is not None:
            self.measured = deviation if self.measured is None else max(self.measured, deviation)

    def fail(
        self,
        what: str,
        step: int | None = None,
        stage: str | None = None,
        sample_id: str | None = None,
        token: int | None = None,
    ) -> None:
        """Name something that is wrong."""
        self.failures += 1
        if len(self.rows) < ROWS_KEPT:
            self.rows.append(Row(what, step, stage, sample_id, token))

    def skip(self, why: str, step: int | None) -> None:
        """Note that something could not be looked at."""
        steps = self.cannot.setdefault(why, [])
        if step is not None and step not in steps[-1:]:
            steps.append(step)

    @contextmanager
    def attempt(self, step: int | None) -> Iterator[None]:
        """Within the block, what cannot be read is noted and ends the block alone."""
        try:
            yield
        except Cannot as reason:
            self.skip(str(reason), step)


class Bench:
    """What a whole run's checks share; each thing is made when the first check asks for it. Use it as a context."""

    def __init__(self, run: Run, *, rescore: int | None, deep: bool) -> None:
        """Nothing is loaded yet.

        Args:
            run: the run; it is only read.
            rescore: samples of each reward artifact that are scored again; None: all.
            deep: stages that need the policy are made again too.
        """
        self.run, self.rescore, self.deep = run, rescore, deep
        self.notes: list[str] = []
        self._stack = ExitStack()
        self._configs: dict[int, tuple[RunConfig, dict[str, Any]]] = {}
        self._overlaid: dict[str, RunConfig] = {}
        self._prompts: dict[str, tuple[str, PreparedPrompts | Cannot]] = {}
        self._pools: dict[str, RewardPool | Cannot] = {}
        self._shared: dict[str, Any] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cfg(self, lineage: int, made_from: Mapping[str, Any] | None = None) -> RunConfig:
        """The configuration of a lineage; with the values an artifact was made under, where keys have changed since.

        Raises:
            Cannot: the run's configuration cannot be read.
        """
        if lineage not in self.run.lineages:
            raise Cannot(f"the run has no lineage {lineage}, see `documents`")
        if lineage not in self._configs:
            try:
                cfg = config_of(self.run, lineage)
            except StorageError as error:
                raise Cannot(f"the configuration cannot be read: {error}") from error
            self._configs[lineage] = cfg, cfg.model_dump(mode="json")
        cfg, values = self._configs[lineage]
        then = dict((made_from or {}).get("config", {}))
        with suppress(KeyError, TypeError):
            if all(config_value(values, key) == value for key, value in then.items()):
                return cfg
        key = sha256_json([lineage, then])
        if key not in self._overlaid:
            self._overlaid[key] = _overlaid(values, then)
        return self._overlaid[key]

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """A context that is entered once, when it is first asked for, and left with the bench."""
        if name not in self._shared:
            self._shared[name] = self._stack.enter_context(make())
        found: T = self._shared[name]
        return found

    @cached_property
    def scratch(self) -> RunWriter:
        """A run in a temporary folder, into which stages are made again."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="grpoflow-verify-")))
        return self._stack.enter_context(RunWriter.create(folder / "scratch", "scratch"))

    @cached_property
    def _tokenizer(self) -> Any:
        from tasks.tokenizer import TokenizerError, load_tokenizer

        try:
            return load_tokenizer(self.cfg(1).actor_rollout_ref.model)
        except (TokenizerError, OSError, ValueError) as error:
            return Cannot(f"the tokenizer is not at hand: {error}")

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer.

        Raises:
            Cannot: it is not at hand.
        """
        return or_raise(self._tokenizer)

    @cached_property
    def end_tokens(self) -> set[int]:
        """Ids that end a response.

        Raises:
            Cannot: the model's folder is not at hand.
        """
        from tasks.engines.policy_folder import end_tokens

        folder = Path(self.cfg(1).actor_rollout_ref.model.path or "").expanduser()
        try:
            return set(end_tokens(folder, self.tokenizer.eos_token_id))
        except (OSError, ValueError) as error:
            raise Cannot(f"the model's folder is not at hand: {error}") from error

    def prompts(self, cfg: RunConfig, which: str, digest: str) -> PreparedPrompts:
        """The data set that prompts were taken from.

        Raises:
            Cannot: its files are not at hand, or hold other prompts than those of this digest.
        """
        if self._prompts.get(which, ("", None))[0] != digest:
            # One for each use at a time: a run that has changed its data does so from some step on.
            self._prompts[which] = digest, _prepare(cfg, which, self.tokenizer, digest)
        found: PreparedPrompts = or_raise(self._prompts[which][1])
        return found

    def pool(self, cfg: RunConfig) -> RewardPool:
        """Processes with the reward functions of a configuration.

        Raises:
            Cannot: they cannot be loaded here.
        """
        key = sha256_json([cfg.reward.model_dump(mode="json"), cfg.custom_reward_function.model_dump(mode="json")])
        if key not in self._pools:
            from tasks.rewards.pool import RewardError, RewardPool

            try:
                self._pools[key] = self._stack.enter_context(RewardPool(cfg))
            except (RewardError, OSError, ValueError) as error:
                self._pools[key] = Cannot(f"the reward functions cannot be loaded: {error}")
        pool: RewardPool = or_raise(self._pools[key])
        return pool


def or_raise(found: Any) -> Any:
    if isinstance(found, Cannot):
        raise found
    return found


def _prepare(cfg: RunConfig, which: str, tokenizer: Any, digest: str) -> PreparedPrompts | Cannot:
    from tasks.data import DataError, prepare_prompts

    try:
        found = prepare_prompts(cfg, "val" if which == "val" else "train", tokenizer)
    except (DataError, OSError, ValueError) as error:
        return Cannot(f"the data files are not at hand: {error}")
    if found.digest != digest:
        return Cannot(
            f"the files of data.{which}_files, or how they are read, have changed: digest {digest[:12]} then, "
            f"{found.digest[:12]} now"
        )
    return found


def _overlaid(values: Mapping[str, Any], then: Mapping[str, Any]) -> RunConfig:
    """A configuration with some dotted keys set; keys that this version does not know are left out."""
    own: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in then.items():
        section: Any = own
        *path, last = key.split(".")
        with suppress(KeyError, TypeError):
            for name in path:
                section = section[name]
            section[last] = value
    try:
        return RunConfig.model_validate(own)
    except ValueError as error:
        raise Cannot(f"the configuration of then cannot be read: {str(error).splitlines()[0]}") from error
