"""AdamW, its learning rate as a pure function of the step, and the way back from a step that went wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from tasks.config import OptimConfig
from tasks.workers.sharding import local, sharded_alike


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of every optimizer step of training step `step`, counted from 1.

    As in verl, a warm-up starts at rate 0: step 1 of a run with warm-up moves nothing and step `warmup + 1` has the
    full rate. Cosine: (1 + cos(2 pi num_cycles x)) / 2, x the share of the steps after warm-up.

    Args:
        optim: `actor_rollout_ref.actor.optim`.
        step: from 1.
        total_steps: the plan's steps, where `total_training_steps` is not set.
    """
    total = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total)
    done = step - 1
    if done < warmup:
        return optim.lr * done / warmup
    share = (done - warmup) / max(total - warmup, 1)
    if optim.lr_scheduler_type == "cosine":
        height = (1 + math.cos(math.pi * optim.num_cycles * 2 * share)) / 2
    elif optim.lr_scheduler_type == "linear":
        height = max(1 - share, 0.0)
    else:
        return optim.lr
    return optim.lr * max(optim.min_lr_ratio + (1 - optim.min_lr_ratio) * height, 0.0)


def make_optimizer(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all trainable weights. Its learning rate is set anew at every training step."""
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_tensors(
    optimizer: torch.optim.AdamW, weights: Mapping[str, torch.nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of the two moments and the step count of every weight that has been moved."""
    for name, weight in weights.items():
        for part, value in sorted(optimizer.state.get(weight, {}).items()):
            yield f"{name}:{part}", value


def restore_optimizer(
    optimizer: torch.optim.AdamW, weights: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Set the optimizer's state to what `optimizer_tensors` gave; weights it does not name have none.

    Args:
        optimizer: whose state.
        weights: trained weights by name.
        tensors: moments, sharded as their weights are, and step counts, on any device; copied to the weights'.

    Raises:
        ValueError: a moment is missing, belongs to no weight, or does not fit its weight. Nothing is changed then.
    """
    named = {name.rpartition(":")[0] for name in tensors}
    if unknown := sorted(named - set(weights)):
        raise ValueError(f"the optimizer state holds moments of {unknown[0]}, which this model does not train")
    set_state(
        optimizer, {weight: _state_of(name, weight, tensors) for name, weight in weights.items() if name in named}
    )


def _state_of(name: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {}
    for part in (*MOMENTS, "step"):
        value = tensors.get(f"{name}:{part}")
        if value is None or value.shape != (weight.shape if part in MOMENTS else ()):
            raise ValueError(f"the optimizer state's {part} of {name} is missing or of another shape")
        state[part] = local(value)
    return state


@contextlib.contextmanager
def moments_at_hand(optimizer: torch.optim.AdamW, device: torch.device, *, away: bool) -> Iterator[None]:
    """The optimizer's state is on the device within, and in host memory outside.

    Args:
        optimizer: whose state.
        device: of the weights within.
        away: `optimizer_offload`; false: it stays where it is.
    """
    if away:
        _move_state(optimizer, device)
    try:
        yield
    finally:
        if away:
            _move_state(optimizer, torch.device("cpu"))


def _move_state(optimizer: torch.optim.AdamW, device: torch.device) -> None:
    for state in optimizer.state.values():
        for part, value in state.items():
            state[part] = value.to(device)


class Snapshot:
    """This rank's part of weights and optimizer state in host memory, as they are now."""

    def __init__(self, optimizer: torch.optim.AdamW, weights: Mapping[str, torch.nn.Parameter]) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._values = {name: _copied(weight) for name, weight in weights.items()}
        self._state = {
            weight: {part: _copied(value) for part, value in optimizer.state[weight].items()}
            for weight in weights.values()
            if weight in optimizer.state
        }

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                local(weight).copy_(self._values[name])
        set_state(self._optimizer, self._state)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).to("cpu", copy=True)


State = Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]]


def set_state(optimizer: torch.optim.AdamW, state: State) -> None:
    """Replace the optimizer's state.

    Args:
        optimizer: whose.
        state: of each weight that has one, this rank's part of each moment and the step count, on any device; copied
            to the weight's, where the old state is freed first.
    """
    optimizer.state.clear()
    for weight, parts in state.items():
        optimizer.state[weight] = {
            part: sharded_alike(value, weight) if part in MOMENTS else value.to(weight.device, copy=True)
            for part, value in parts.items()
        }
