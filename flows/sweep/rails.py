"""What makes the numbers of a sweep hard to compare, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flows.config import ConfigError, ConfigProblem
from flows.sweep.board import rungs
from flows.sweep.book import Sweep
from flows.sweep.spec import SweepSpec
from tasks.config import RunConfig

LR = "actor_rollout_ref.actor.optim.lr"
BATCH = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n")
"""Keys that change how many sequences are behind one optimizer step."""
ROLLOUTS = ("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.response_length")
"""Keys that change how much a step samples."""
FEW_SIGNALS = 0.25
"""A smaller share of groups with a signal leaves an update that is mostly noise: most samples are paid for in vain."""


def refuse_unmeasured(spec: SweepSpec, base: RunConfig, total: int) -> None:
    """Refuse an objective that the runs would not measure where trials are compared.

    Raises:
        ConfigError: validation metrics without validation.
    """
    if not spec.objective.metric.startswith("val-"):
        return
    freq = base.trainer.test_freq
    if freq < 1 or (not base.data.val_files and not spec.base):
        why = f"{spec.objective.metric} comes from validation, and trainer.test_freq={freq} never validates"
        raise ConfigError([ConfigProblem("objective.metric", why)])
    between = [step for step in rungs(spec, total)[:-1] if step % freq]
    if between and between[0] < freq:
        why = f"trials are compared at step {between[0]}, before the first validation at step {freq}"
        raise ConfigError([ConfigProblem("pruning.min_steps", f"{why} (trainer.test_freq)")])


def cautions(sweep: Sweep) -> list[str]:
    """What a reader of the table should know, from the sweep's file and from what its runs measured."""
    return [*cautions_of(sweep.spec, sweep.base, sweep.total), *_of_signals(sweep)]


def cautions_of(spec: SweepSpec, base: RunConfig, total: int) -> list[str]:
    """The same, from the sweep's file alone."""
    return [*_of_batches(spec), *_of_budgets(spec, base), *_of_validation(spec, base, total)]


def _of_batches(spec: SweepSpec) -> Iterator[str]:
    batch = [key for key in BATCH if key in spec.space]
    if LR in spec.space and batch:
        yield (
            f"{LR} is searched together with {', '.join(batch)}: the best learning rate changes with the number of "
            "sequences behind an optimizer step, so read them as pairs"
        )
    elif batch:
        yield f"{', '.join(batch)} changes what an optimizer step averages over; the learning rate stays as it is"


def _of_budgets(spec: SweepSpec, base: RunConfig) -> Iterator[str]:
    keys = [key for key in ROLLOUTS if key in spec.space]
    if keys:
        sizes = [_extent(spec, base, key) for key in keys]
        low = high = 1.0
        for small, large in sizes:
            low, high = low * small, high * large
        yield f"with {', '.join(keys)} searched, a trial's step can sample {high / low:.3g} times as much as another's"


def _extent(spec: SweepSpec, base: RunConfig, key: str) -> tuple[float, float]:
    parameter = spec.space[key]
    if parameter.choice is None:
        return parameter.range
    numbers = [float(value) for value in parameter.choice if isinstance(value, int | float)]
    return (min(numbers), max(numbers)) if numbers else (1.0, 1.0)


def _of_validation(spec: SweepSpec, base: RunConfig, total: int) -> Iterator[str]:
    freq = base.trainer.test_freq
    between = [step for step in rungs(spec, total)[:-1] if freq > 0 and step % freq]
    if spec.objective.metric.startswith("val-") and between and spec.objective.of == "last":
        yield f"at step {between[0]} trials are compared by the validation before it (trainer.test_freq={freq})"
    if not spec.objective.metric.startswith("val-") and rungs(spec, total)[0] == 1 < total:
        yield (
            "at step 1 (pruning.min_steps) trials are compared by what the first policy sampled, before its first "
            "update, and that is the same policy for all of them"
        )


def _of_signals(sweep: Sweep) -> Iterator[str]:
    """Trials whose first step left most groups without a signal."""
    poor: Mapping[int, Any] = {}
    for trial in sweep.board().trials:
        shares = [share for seed in sweep.spec.seeds if (share := _mixed(sweep, trial.number, seed)) is not None]
        if shares and max(shares) < FEW_SIGNALS:
            poor = {**poor, trial.number: max(shares)}
    if poor:
        named = ", ".join(f"{number} ({share:.0%})" for number, share in poor.items())
        yield (
            f"few groups carried a signal in step 1 of trial {named}: rollout.n is small for this pass rate, or the "
            "prompts are too easy or too hard; `grpoflow preflight` says which"
        )


def _mixed(sweep: Sweep, trial: int, seed: int) -> float | None:
    run = sweep.run(trial, seed)
    record = run.step(1).record if run is not None else None
    share = record["metrics"].get("group/mixed") if record else None
    return None if share is None else float(share)
