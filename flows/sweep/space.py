"""The values of a trial: from a grid, at random, or by Optuna's tree-structured Parzen estimator.

A suggestion is a function of the sweep's file, the trial's number and the results it may see: nothing is remembered
between two calls, so that a sweep taken up again suggests what it would have suggested.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from flows.sweep.spec import Parameter, SweepSpec

if TYPE_CHECKING:
    import optuna

Values = dict[str, Any]
"""Configuration keys of one trial with their values, in the order of the space; inactive ones are left out."""


def grid(spec: SweepSpec) -> list[Values]:
    """Every combination of a grid, the last key changing fastest; combinations that differ in inactive keys are one."""
    combinations = itertools.product(*(list(_points(parameter)) for parameter in spec.space.values()))
    found: dict[str, Values] = {}
    for combination in combinations:
        values: Values = {}
        for (key, parameter), value in zip(spec.space.items(), combination, strict=True):
            if is_active(parameter, values):
                values[key] = value
        found.setdefault(repr(values), values)
    return list(found.values())


def _points(parameter: Parameter) -> Iterator[Any]:
    if parameter.choice is not None:
        yield from parameter.choice
        return
    low, high = parameter.range
    step = parameter.step or 1
    # Multiples of the step, not sums, which drift; with room for the rounding of a float.
    for number in range(int((high - low) / step + 1e-9) + 1):
        yield int(low + number * step) if parameter.is_whole else low + number * step


def is_active(parameter: Parameter, values: Mapping[str, Any]) -> bool:
    """Whether a parameter is searched, given the values of those above it."""
    return all(
        key in values and values[key] in (wanted if isinstance(wanted, list | tuple) else [wanted])
        for key, wanted in parameter.when.items()
    )


def suggest(
    spec: SweepSpec, number: int, seen: Sequence[tuple[Values, int]], tried: Sequence[Mapping[str, Any]] = ()
) -> Values | None:
    """Values of a trial; None: a grid has no further ones.

    Args:
        spec: the sweep.
        number: of the trial, from 0.
        seen: values and place of the trials that it may learn from; the best one has the highest place.
        tried: values of all earlier trials, which are not suggested again while there are others to be found.
    """
    if spec.sampler.kind == "grid":
        points = grid(spec)
        return points[number] if number < len(points) else None
    return _asked(spec, number, seen, {repr(dict(values)) for values in tried})


ASKS = 16
"""How often a sampler is asked for values that were not tried before: where it is sure of the best, tpe repeats it."""


def _asked(spec: SweepSpec, number: int, seen: Sequence[tuple[Values, int]], tried: set[str]) -> Values:
    import optuna
    from numpy.random import SeedSequence

    seed = int(SeedSequence([spec.sampler.seed & 0xFFFFFFFF, number]).generate_state(1)[0])
    at_random = optuna.samplers.RandomSampler(seed=seed)
    tpe = optuna.samplers.TPESampler(n_startup_trials=spec.sampler.startup_trials, seed=seed)
    with silent():
        study = optuna.create_study(direction="maximize")
        for values, place in seen:
            study.add_trial(as_optuna(spec, values, place))
        first: Values | None = None
        for sampler in (*([tpe] * ASKS if spec.sampler.kind == "tpe" else []), *[at_random] * ASKS):
            study.sampler = sampler
            found = _from(study, spec)
            first = found if first is None else first
            if repr(found) not in tried:
                return found
    assert first is not None
    return first


def _from(study: optuna.Study, spec: SweepSpec) -> Values:
    trial = study.ask()
    found: Values = {}
    for key, parameter in spec.space.items():
        if is_active(parameter, found):
            found[key] = _one(trial, key, parameter)
    return found


def _one(trial: optuna.Trial, key: str, parameter: Parameter) -> Any:
    if parameter.choice is not None:
        # Optuna takes plain scalars alone; a place in the list stands for any value.
        last = len(parameter.choice) - 1
        place = trial.suggest_int(key, 0, last) if parameter.is_ordered else None
        return parameter.choice[trial.suggest_categorical(key, list(range(last + 1))) if place is None else place]
    low, high = parameter.range
    if parameter.is_whole:
        return trial.suggest_int(key, int(low), int(high), step=int(parameter.step or 1), log=parameter.is_log)
    return trial.suggest_float(key, low, high, step=parameter.step, log=parameter.is_log)


def as_optuna(spec: SweepSpec, values: Values, objective: float | None, **about: Any) -> optuna.trial.FrozenTrial:
    """A trial as Optuna knows it: choices by their place in the list."""
    import optuna

    return optuna.trial.create_trial(
        params={key: optuna_value(spec.space[key], value) for key, value in values.items()},
        distributions={key: distribution(spec.space[key]) for key in values},
        value=objective,
        **about,
    )


def direction(spec: SweepSpec) -> Literal["minimize", "maximize"]:
    """Optuna's word for the objective's mode."""
    return "maximize" if spec.objective.mode == "max" else "minimize"


def optuna_value(parameter: Parameter, value: Any) -> Any:
    """A value as Optuna keeps it."""
    return value if parameter.choice is None else list(map(repr, parameter.choice)).index(repr(value))


def distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    """A parameter as Optuna's distribution."""
    import optuna

    if parameter.choice is not None:
        last = len(parameter.choice) - 1
        if parameter.is_ordered:
            return optuna.distributions.IntDistribution(0, last)
        return optuna.distributions.CategoricalDistribution(list(range(last + 1)))
    low, high = parameter.range
    if parameter.is_whole:
        step = int(parameter.step or 1)
        return optuna.distributions.IntDistribution(int(low), int(high), log=parameter.is_log, step=step)
    return optuna.distributions.FloatDistribution(low, high, log=parameter.is_log, step=parameter.step)


@contextmanager
def silent() -> Iterator[None]:
    """Within the block Optuna says nothing but errors."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
