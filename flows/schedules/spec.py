"""A schedule file: what runs, when, and what happens when the last one still runs or the time was missed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, ValidationError, field_validator, model_validator

from flows.config import ConfigError, ConfigProblem, load_config
from flows.config_layers import LayerError, parse_override, read_yaml
from flows.plan_view import plan_of
from flows.recipes import recipe_file
from flows.run_folder import run_folder
from flows.support import refuse_unbuilt
from flows.sweep.spec import load_sweep
from tasks.config import OrchestrationConfig, RunConfig, Section, StorageConfig
from tasks.geometry import PlanError

KINDS = ("train", "preflight", "sweep")
PLACE = ("root", "endpoint", "region")
"""Keys of `storage` that a schedule file has for all its runs."""

OWN_KEYS = (*(f"storage.{name}" for name in PLACE), "orchestration.api_url")
"""Keys that the file says once, for all its schedules."""
A_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=@-]*$"
AN_OVERRIDE = r"^(\+\+|\+|~)?[A-Za-z_]\w*(\.[\w-]+)*(=.*)?$"


class Schedule(Section):
    """One schedule: one of `train`, `preflight` and `sweep`, and one of `cron` and `interval_s`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Its name, in Prefect and on the command line."""
    train: tuple[str, ...] | None = None
    """Recipe names and YAML files of a run's configuration, in layers."""
    preflight: tuple[str, ...] | None = None
    """The same, for `grpoflow preflight`."""
    sweep: str | None = None
    """A sweep's file."""
    overrides: tuple[str, ...] = ()
    """`key.path=value` on top of the configuration."""
    cron: str | None = None
    """Five fields: minute, hour, day of month, month, day of week. It needs a `timezone`."""
    timezone: str | None = None
    """IANA name, such as Europe/Berlin: of `cron`, and of times in names and lists. null, with `interval_s`: UTC."""
    interval_s: float | None = Field(None, ge=1)
    """Time from one start to the next, s; times are counted from 1970-01-01 00:00 UTC."""
    when_busy: Literal["skip", "queue"] = "skip"
    """What a run does at its time when the last one still runs: it is skipped, or it waits in line."""
    max_waiting: int = Field(8, ge=1)
    """queue: so many wait at most; the next one is skipped."""
    group: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Schedules with the same group never run at once, as if they were one; null: a group of its own."""
    catch_up: bool = False
    """Whether times that were missed, because nothing served them, are made up for, all of them, in order."""
    stale_after_s: float = Field(300.0, gt=0)
    """Without `catch_up`, a run that would begin later than this after its time is skipped as missed."""
    experiment_name: str | None = None
    """Name of each run, in which `{name}` is the schedule's, `{scheduled:%Y%m%d-%H%M}` its time in `timezone` and
    `{utc:…}` its time in UTC. null: `{name}-{utc:%Y%m%dT%H%M%SZ}`, or with `resume` the schedule's name."""
    resume: bool = False
    """false: every time begins a run of its own, under a name of its own. true: every time goes on with the same run,
    and does nothing when that is finished."""

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str | None) -> str | None:
        if value is not None and value not in available_timezones():
            near = difflib.get_close_matches(value, available_timezones(), n=1)
            raise ValueError(f"{value!r} is no time zone of the IANA list{f'; do you mean {near[0]}?' if near else ''}")
        return value

    @field_validator("overrides")
    @classmethod
    def _are_overrides(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                key = parse_override(text).key
            except LayerError as error:
                raise ValueError(str(error)) from None
            if key in OWN_KEYS:
                raise ValueError(f"{key} is said at the top of the file, for all its schedules")
        return value

    @model_validator(mode="after")
    def _one_of_each(self) -> Schedule:
        for names in (KINDS, ("cron", "interval_s")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise ValueError(f"give exactly one of {', '.join(names)}; it has {' and '.join(given) or 'none'}")
        if self.cron is not None and self.timezone is None:
            raise ValueError("cron needs a timezone, such as Europe/Berlin or UTC: whose clock?")
        if self.train == () or self.preflight == ():
            raise ValueError(f"{self.kind}: name a recipe or a YAML file at least")
        self._check_names()
        return self

    def _check_names(self) -> None:
        """Names must be different for different times, or with `resume` always the same."""
        first, second = (self.run_name(datetime(2030, month, 1, tzinfo=UTC)) for month in (1, 6))
        if not re.match(A_NAME, first):
            raise ValueError(f"experiment_name: {first!r} cannot be the name of a run")
        if self.resume and first != second:
            raise ValueError("experiment_name has a time in it, but with resume every time goes on with the same run")
        if not self.resume and first == second:
            raise ValueError("experiment_name must have the time in it, such as {scheduled:%Y%m%d-%H%M}, or set resume")

    @property
    def kind(self) -> str:
        """What is run: `train`, `preflight` or `sweep`."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def zone(self) -> ZoneInfo:
        """Whose clock it goes by."""
        return ZoneInfo(self.timezone or "UTC")

    def run_name(self, due: datetime) -> str:
        """The name of the run that is due at a time.

        Raises:
            ValueError: `experiment_name` cannot be filled in.
        """
        template = self.experiment_name or ("{name}" if self.resume else "{name}-{utc:%Y%m%dT%H%M%SZ}")
        try:
            if set("{}") & set(_FIELD.sub("", template)):
                raise ValueError("a brace is left over")
            return template.format(name=self.name, scheduled=due.astimezone(self.zone), utc=due.astimezone(UTC))
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(
                f"experiment_name: {template!r} cannot be filled in ({error!r}); it can have {{name}}, "
                "{scheduled:%Y%m%d-%H%M} and {utc:%Y%m%d-%H%M}"
            ) from None


_FIELD = re.compile(r"\{(?:name|(?:scheduled|utc)(?::[^{}]*)?)\}")
"""What a template can have. Python's own fields could reach into objects, or be a billion characters wide."""


class ScheduleFile(Section):
    """Schedules, with what they share."""

    storage: StorageConfig = StorageConfig()
    """`root` is where all their runs lie; other keys of storage belong to the runs."""
    orchestration: OrchestrationConfig = OrchestrationConfig()
    """The Prefect server on which they are deployed, and to which their runs report."""
    slots: int | None = Field(None, ge=1)
    """Slots of this machine, which runs of schedules share with the sweeps in the same `storage.root`: a run of `train`
    or `preflight` holds one, and waits for it. null: they need none. The runs of a sweep hold theirs anyway."""
    devices_per_slot: int = Field(0, ge=0)
    """CUDA devices of each slot, as in a sweep's file. 0: runs see what this process sees."""
    schedules: tuple[Schedule, ...] = Field(min_length=1)

    @cached_property
    def root(self) -> Path:
        """Where the runs lie, in full."""
        return self.storage.folder.absolute()


class Served(Section):
    """A schedule as it travels with its deployment: all that a run at its time needs.

    Attributes:
        schedule: as in the file, with full paths.
        root: where runs lie on this machine, and what schedules keep.
        store: keys of `storage` for runs in an object store, as overrides; of others none.
        folder: working directory of the runs, from which relative paths in their configuration count.
        api_url: the given Prefect server; None: one that is managed in `root`.
        slots: of this machine, as in the file.
        devices_per_slot: as in the file.
    """

    schedule: Schedule
    root: str
    folder: str
    store: tuple[str, ...] = ()
    api_url: str | None = None
    slots: int | None = None
    devices_per_slot: int = 0


def load_schedules(path: Path) -> ScheduleFile:
    """Read a schedule file and check all that can be checked now: also the configuration and plan of what it runs.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    try:
        file = ScheduleFile.model_validate(read_yaml(path))
    except LayerError as error:
        raise ConfigError([ConfigProblem(str(path), str(error).removeprefix(f"{path}: "))]) from None
    except ValidationError as error:
        raise ConfigError([_problem(one, path) for one in error.errors()]) from None
    problems = [ConfigProblem(key, message, str(path)) for key, message in _wrong(file, path)]
    if problems:
        raise ConfigError(problems)
    near = tuple(_with_full_paths(schedule, path.absolute().parent) for schedule in file.schedules)
    return file.model_copy(update={"schedules": near})


def served(file: ScheduleFile, api_url: str | None) -> dict[str, Served]:
    """The file's schedules by name, each with what it needs."""
    here = str(Path.cwd())
    shared = {"slots": file.slots, "devices_per_slot": file.devices_per_slot, "store": _store(file)}
    return {
        schedule.name: Served(schedule=schedule, root=str(file.root), folder=here, api_url=api_url, **shared)
        for schedule in file.schedules
    }


def configuration(one: Served, name: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """The configuration of a `train` or `preflight` run with this name.

    Raises:
        ConfigError, ValueError: it cannot be loaded.
    """
    words = one.schedule.train or one.schedule.preflight or ()
    return load_config([recipe_file(word) for word in words], run_overrides(one, name, overrides))


def run_overrides(one: Served, name: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    """All overrides of a run of a schedule: the schedule's, those of this time alone, and its place."""
    place = [f"trainer.experiment_name={name}", *(one.store or [f"storage.root={one.root}"])]
    place += [f"orchestration.api_url={one.api_url}"] * (one.api_url is not None)
    return (*one.schedule.overrides, *overrides, *place)


def refuse_unrunnable(one: Served, overrides: tuple[str, ...] = ()) -> None:
    """Refuse now what a run at its time would refuse: a configuration, a plan, a place that all runs would share.

    Raises:
        ValueError: with the reason.
    """
    schedule = one.schedule
    if schedule.sweep is not None:
        load_sweep(Path(schedule.sweep))
        return
    cfg = configuration(one, "a-run", overrides)
    plan = plan_of(cfg)
    if plan.problems:
        raise PlanError(plan.problems)
    refuse_unbuilt(cfg, plan)
    if cfg.trainer.default_local_dir and not schedule.resume:
        raise ValueError("trainer.default_local_dir puts every run into the same folder; leave it out, or set resume")
    run_folder(cfg)


def _wrong(file: ScheduleFile, path: Path) -> Iterator[tuple[str, str]]:
    """What pydantic cannot see."""
    names = [schedule.name for schedule in file.schedules]
    if not file.orchestration.enabled:
        yield "orchestration.enabled", "schedules need Prefect"
    for key in sorted(file.storage.model_fields_set - {*PLACE}):
        counts = ", ".join(f"storage.{name}" for name in PLACE)
        yield f"storage.{key}", f"belongs to the configuration of the runs; here only {counts} count"
    for place, schedule in enumerate(file.schedules):
        where = f"schedules.{place}"
        if names.index(schedule.name) != place:
            yield f"{where}.name", f"{schedule.name} is there twice"
        try:
            near = _with_full_paths(schedule, path.absolute().parent)
            one = Served(schedule=near, root=str(file.root), folder=str(Path.cwd()), store=_store(file))
            refuse_unrunnable(one)
        except (ValueError, OSError) as error:
            yield f"{where}.{schedule.kind}", str(error)


def _store(file: ScheduleFile) -> tuple[str, ...]:
    """Where runs lie, as overrides, when it is an object store."""
    told = {name: getattr(file.storage, name) for name in PLACE} if file.storage.in_object_store else {}
    return tuple(f"storage.{name}={value}" for name, value in told.items() if value is not None)


def _with_full_paths(schedule: Schedule, folder: Path) -> Schedule:
    """Files are named from where the schedule file is, or from where the command is given."""

    def full(word: str) -> str:
        near = folder / word
        return str(near) if near.is_file() else str(Path(word).absolute()) if Path(word).is_file() else word

    kind, value = schedule.kind, getattr(schedule, schedule.kind)
    return schedule.model_copy(update={kind: full(value) if kind == "sweep" else tuple(map(full, value))})


def _problem(one: Any, path: Path) -> ConfigProblem:
    key = ".".join(str(part) for part in one["loc"]) or "the file"
    message = one["msg"].removeprefix("Value error, ")
    if one["type"] == "extra_forbidden":
        model = Schedule if one["loc"][0] == "schedules" else ScheduleFile
        near = difflib.get_close_matches(str(one["loc"][-1]), list(model.model_fields), n=1)
        message = f"there is no such key{f'; do you mean {near[0]}?' if near else ''}"
    return ConfigProblem(key, message, str(path))
