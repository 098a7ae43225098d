"""Which advantage estimators and policy losses there are, read from their declarations without importing them.

A variant is a function of any module in this folder with `@estimator(…)` or `@loss(…)` above it. The planner and
the configuration must know its name, what it reads and what it needs, but must not load NumPy or torch for it: so the
decorator's arguments, which are literals, are taken from the source text. A new variant is therefore one function in
one file.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def estimator(
    *names: str, relative: bool = True, needs: tuple[str, ...] = (), reads: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Declare an advantage estimator: `(AdvantageInput, AlgorithmConfig) -> Advantages`.

    Args:
        names: its names in `algorithm.adv_estimator`.
        relative: it compares a sample with its siblings, so that `rollout.n` must be 2 or more.
        needs: fields of AdvantageInput, beyond those that every step has, that it reads.
        reads: keys below `algorithm` that change its result.
    """
    return lambda function: function


def loss(
    *names: str,
    reads: tuple[str, ...] = (),
    aggregation: str | None = None,
    selects: str | None = None,
    multiplies_weights: bool = False,
) -> Callable[[F], F]:
    """Declare a policy loss: `(LossBatch, ActorConfig) -> (loss of each token, metrics of each token)`.

    Args:
        names: its names in `actor_rollout_ref.actor.policy_loss.loss_mode`.
        reads: keys below `actor_rollout_ref.actor` that change its result.
        aggregation: how it is always aggregated, whatever `actor.loss_agg_mode` says; None: as that says.
        selects: function of the same module that chooses tokens out of the whole mini-batch; None: it chooses none.
        multiplies_weights: it takes the product of the rollout-correction weights of a sequence's tokens.
    """
    return lambda function: function


@dataclass(frozen=True)
class Variant:
    """One declared function. Attributes beside its place are the declaration's arguments."""

    name: str
    module: str
    function: str
    relative: bool = True
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    aggregation: str | None = None
    selects: str | None = None
    multiplies_weights: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        return self._named(self.function)

    def load_selection(self) -> Callable[..., Any] | None:
        """Import the function that chooses its tokens; None: there is none."""
        return self._named(self.selects) if self.selects else None

    def _named(self, function: str) -> Callable[..., Any]:
        loaded: Callable[..., Any] = getattr(importlib.import_module(self.module), function)
        return loaded


def _declared(decorator: str) -> dict[str, Variant]:
    """All variants under a decorator, by name.

    Raises:
        ValueError: two of them have the same name.
    """
    found: dict[str, Variant] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if f"\n@{decorator}(" not in source:
            continue
        for variant in _in_module(ast.parse(source), decorator, f"{__package__}.{path.stem}"):
            if other := found.get(variant.name):
                raise ValueError(
                    f"{decorator} {variant.name!r} is declared by {other.module}.{other.function} and by "
                    f"{variant.module}.{variant.function}; give one of them another name"
                )
            found[variant.name] = variant
    return found


def _in_module(tree: ast.Module, decorator: str, module: str) -> Iterator[Variant]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == decorator:
                options = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                for name in call.args:
                    yield Variant(ast.literal_eval(name), module, node.name, **options)


ESTIMATORS = _declared("estimator")
"""By `algorithm.adv_estimator`."""

LOSSES = _declared("loss")
"""By `actor_rollout_ref.actor.policy_loss.loss_mode`."""
