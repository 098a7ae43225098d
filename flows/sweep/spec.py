"""A sweep's file: what is searched, how, for what, and how much it may cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from flows.config import ConfigError, ConfigProblem, all_keys, key_answer, load_config
from flows.config_layers import LayerError, read_yaml
from flows.recipes import recipe_file
from tasks.config import Address, RunConfig, Section

Number = Annotated[float, Field(allow_inf_nan=False)]
Bounds = tuple[Number, Number]
WholeBounds = tuple[int, int]
Integer = int
"""Where `int` names a field."""
OWN_KEYS = (
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.total_training_steps",
    "storage.root",
    "storage.reuse_from",
)
"""Keys that say where a run lies and how long it is: they are the same for all trials, or the sweep's to decide."""


class Parameter(Section):
    """One searched key: exactly one of `choice`, `uniform`, `log_uniform`, `int` and `log_int`."""

    choice: tuple[Any, ...] | None = None
    """The values it can take."""
    uniform: Bounds | None = None
    """Lowest and highest value."""
    log_uniform: Bounds | None = None
    """Lowest and highest value, both above 0; equal ratios are equally likely."""
    int: WholeBounds | None = None
    """Lowest and highest whole number."""
    log_int: WholeBounds | None = None
    """The same; equal ratios are equally likely."""
    step: Number | None = Field(None, gt=0)
    """Distance between values of `uniform` or `int`; a grid needs it."""
    when: dict[str, Any] = Field(default_factory=dict)
    """Searched only where other searched keys, above it, have this value, or one of these."""

    @model_validator(mode="after")
    def _one_kind(self) -> Parameter:
        kinds = [kind for kind in RANGES if getattr(self, kind) is not None] + ["choice"] * (self.choice is not None)
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of choice, {', '.join(RANGES)}; it has {' and '.join(kinds) or 'none'}")
        if self.choice is not None:
            if not self.choice:
                raise ValueError("choice: there is nothing to choose from")
            if len({repr(value) for value in self.choice}) < len(self.choice):
                raise ValueError("choice: a value is there twice")
        else:
            low, high = self.range
            if low > high or (self.is_log and low <= 0):
                raise ValueError(f"{kinds[0]}: [{low:g}, {high:g}] must go up{' and begin above 0' * self.is_log}")
        if self.step is not None and kinds[0] not in ("uniform", "int"):
            raise ValueError(f"step: {kinds[0]} takes none")
        if self.is_whole and self.step is not None and self.step != round(self.step):
            raise ValueError(f"step: {self.step:g} is no whole number")
        return self

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest value of what is no choice."""
        return next(value for kind in RANGES if (value := getattr(self, kind)) is not None)

    @property
    def is_ordered(self) -> bool:
        """Whether it is a choice of numbers that go up or down, so that neighbours in the list are alike."""
        values = list(self.choice or ())
        if not all(type(value) in (Integer, float) for value in values):
            return False
        return sorted(values) in (values, values[::-1])

    @property
    def is_log(self) -> bool:
        """Whether equal ratios are equally likely."""
        return self.log_uniform is not None or self.log_int is not None

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.int is not None or self.log_int is not None


RANGES = ("uniform", "log_uniform", "int", "log_int")


class Sampler(Section):
    """How the next trial is chosen."""

    kind: Literal["grid", "random", "tpe"] = "tpe"
    """grid: every combination, in order; random; tpe: tree-structured Parzen estimator (NeurIPS 2011), by Optuna."""
    seed: int = 0
    """Of random and tpe."""
    startup_trials: int = Field(8, ge=1)
    """Random trials before tpe begins."""


class Objective(Section):
    """What is to be best."""

    metric: str
    """Name of a metric of the steps, such as `val-core/…/mean@1`."""
    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""
    of: Literal["last", "best", "mean"] = "last"
    """Of a run's values: the last one, the best one, or the mean of the last `last_k`."""
    last_k: int = Field(3, ge=1)
    """See `of`."""


class Budget(Section):
    """When no further job begins; null: no such limit. A limit reached in the middle of a job lets it finish."""

    trials: int | None = Field(None, ge=1)
    """Trials in all, invalid ones included."""
    steps: int | None = Field(None, ge=1)
    """Training steps of all runs together."""
    wall_s: float | None = Field(None, gt=0)
    """Time while the sweep command runs, s, over all its starts."""
    device_hours: float | None = Field(None, gt=0)
    """Device hours of all jobs together."""
    deadline: datetime | None = None
    """Time of day and date with a time zone; what runs then is stopped at its step and can go on."""

    @field_validator("deadline")
    @classmethod
    def _with_a_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError("the deadline has no time zone; write it as 2030-01-31T08:00:00+01:00")
        return value


class Pruning(Section):
    """Which trials are stopped before their last step. They are paused at a committed step, and can be promoted."""

    kind: Literal["none", "median", "asha"] = "none"
    """median: a trial below the median of the others at the same step stops; asha: only the best 1/`reduction` of those
    that have reached a rung go on to the next (successive halving, arXiv 1810.05934)."""
    min_steps: int = Field(1, ge=1)
    """First step at which a trial can be stopped."""
    reduction: int = Field(3, ge=2)
    """asha: the share that goes on, and the factor between the steps of two rungs."""
    every: int | None = Field(None, ge=1)
    """median: steps between decisions; null: `min_steps`."""
    startup_trials: int = Field(4, ge=1)
    """median: this many other trials must have reached the step."""


class SweepSpec(Section):
    """A sweep, as its file says it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=@-]*$")
    """Name of the sweep, and what its runs' names begin with."""
    base: tuple[str, ...] = ()
    """Recipe names and YAML files of the configuration, in layers."""
    overrides: tuple[str, ...] = ()
    """`key.path=value` on top."""
    space: dict[str, Parameter]
    """What is searched, by configuration key."""
    sampler: Sampler = Sampler()
    objective: Objective
    seeds: tuple[int, ...] = (0,)
    """Values of `seed_key`: a trial is one run with each, and its value their mean."""
    seed_key: str = "trainer.seed"
    """The key that `seeds` are values of."""
    budget: Budget = Budget()
    pruning: Pruning = Pruning()
    slots: int = Field(1, ge=1)
    """Runs at once; each holds one slot of this machine."""
    devices_per_slot: int = Field(0, ge=0)
    """CUDA devices of each slot: slot k has devices k·d … k·d + d - 1. 0: runs see what this process sees."""
    threads_per_slot: int | None = Field(None, ge=1)
    """Processor threads of each run; null: the machine's cores shared out."""
    parallel_trials: int | None = Field(None, ge=1)
    """Trials under way at once: the next one is chosen without their results. null: as many as fill the slots."""
    optuna_storage: Address | None = None
    """Database URL of the Optuna study, such as `postgresql+psycopg2://…`; null: a journal in the sweep's folder."""

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError("seeds must be different whole numbers, one at least")
        return value

    @property
    def width(self) -> int:
        """Trials under way at once."""
        if self.parallel_trials is not None:
            return self.parallel_trials
        # With several runs per trial one more trial fills the slots while the slowest run of another one ends.
        filled = -(-self.slots // len(self.seeds))
        return filled + (1 if self.slots > 1 and len(self.seeds) > 1 else 0)


def load_sweep(path: Path) -> SweepSpec:
    """Read a sweep's file: its content, or the section `sweep` of it.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    try:
        tree = read_yaml(path)
    except LayerError as error:
        raise ConfigError([ConfigProblem(str(path), str(error).removeprefix(f"{path}: "))]) from None
    if "sweep" in tree:
        config = {name: value for name, value in tree.items() if name != "sweep"}
        tree = {**tree["sweep"]} if isinstance(tree["sweep"], Mapping) else {}
        if config:
            raise ConfigError([_problem(next(iter(config)), "a configuration belongs in a file named in base", path)])
    try:
        spec = SweepSpec.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([_problem(_where(one["loc"]), one["msg"], path) for one in error.errors()]) from None
    # Files are named from where the sweep's file is, or from where the command is given.
    beside = [_beside(path, word) for word in spec.base]
    spec = spec.model_copy(update={"base": tuple(beside)})
    if problems := [_problem(key, message, path) for key, message in _wrong_keys(spec)]:
        raise ConfigError(problems)
    return spec


def base_config(spec: SweepSpec) -> RunConfig:
    """The configuration that all trials start from.

    Raises:
        ConfigError, ValueError: it cannot be loaded.
    """
    return load_config([recipe_file(word) for word in spec.base], spec.overrides)


def _beside(path: Path, word: str) -> str:
    near = path.parent / word
    return str(near.absolute()) if near.is_file() else word


def _problem(key: str, message: str, path: Path) -> ConfigProblem:
    return ConfigProblem(key, message.removeprefix("Value error, "), str(path))


def _where(loc: Sequence[Any]) -> str:
    return ".".join(str(part) for part in loc) or "the file"


def _wrong_keys(spec: SweepSpec) -> Iterator[tuple[str, str]]:
    """Keys of the space that cannot be searched, with the reason."""
    if not spec.space:
        yield "space", "there is nothing to search"
    known, above = all_keys(), set[str]()
    for key, parameter in spec.space.items():
        where = f"space.{key}"
        if key not in known:
            yield where, key_answer(key)
        elif key in OWN_KEYS or key == spec.seed_key:
            yield where, "the sweep itself sets this key" + (": see seeds" if key == spec.seed_key else "")
        elif spec.sampler.kind == "grid" and not parameter.choice and (parameter.step is None and not parameter.int):
            yield where, "a grid needs values: give a choice, or a step"
        for other in parameter.when:
            if other not in above:
                yield f"{where}.when", f"{other} is not searched above it"
        above.add(key)
    if spec.seed_key not in known:
        yield "seed_key", key_answer(spec.seed_key)
    if spec.sampler.kind != "grid" and spec.budget.trials is None:
        yield "budget.trials", f"{spec.sampler.kind} never ends by itself: say how many trials"
