"""What a run says while it runs: one line per finished step, and on a terminal the stage it is in."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

_STAGE_TIMERS = {
    "gen": "gen",
    "old": "old_log_prob",
    "ref": "ref",
    "reward": "reward",
    "adv": "adv",
    "update": "update_actor",
}
_ARTIFACTS = {
    "gen": "rollouts",
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "reward": "rewards",
    "adv": "advantages",
}
"""What each stage makes, which may be taken over from another run."""


class RunConsole(Console):
    """Goes on silently when the reader of its pipe is gone: that does not end a run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Lines of one run."""

    def __init__(self, console: Console, total_steps: int = 0) -> None:
        self.console = console
        self.total_steps = total_steps
        self._status: Status | None = None
        self._started: list[float] = []

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show a moving line on a terminal while the block runs; elsewhere only finished lines appear."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status("starting") as self._status:
            yield
        self._status = None

    def say(self, message: str) -> None:
        """Print a sentence."""
        self.console.print(Text(message), soft_wrap=True)

    def stage(self, step: int, name: str) -> None:
        """A stage has begun."""
        if self._status:
            self._status.update(f"step {step}/{self.total_steps}: {name}")

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """A step is finished."""
        self._started.append(time.monotonic())
        self.console.print(Text(step_line(step, self.total_steps, metrics) + self._left(step)), soft_wrap=True)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation is finished."""
        values = ", ".join(
            f"{name.removeprefix('val-core/')} {value:.3f}"
            for name, value in metrics.items()
            if "core" in name and not name.endswith("/std")
        )
        self.console.print(Text(f"validation after step {step}: {values}"), soft_wrap=True)

    def _left(self, step: int) -> str:
        recent = self._started[-11:]
        if len(recent) < 2 or step > self.total_steps:
            return ""
        left = (self.total_steps - step) * (recent[-1] - recent[0]) / (len(recent) - 1)
        return f" | {int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d} left"


def step_line(step: int, total: int, metrics: Mapping[str, float | None]) -> str:
    """One step as one line: score, length, KL, clipping, gradient norm, then seconds by stage."""

    def number(name: str, digits: str = ".3f") -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, digits)

    stages = [
        f"{short} {number(f'timing_s/{timer}', '.2f')}"
        for short, timer in _STAGE_TIMERS.items()
        if f"timing_s/{timer}" in metrics
    ]
    taken = [short for short, artifact in _ARTIFACTS.items() if f"reused/{artifact}" in metrics]
    stages = [f"{'+'.join(taken)} reused"] * bool(taken) + stages
    kl = "actor/kl_loss" if "actor/kl_loss" in metrics else "actor/ppo_kl"
    return (
        f"step {step:>{len(str(total))}}/{total} | score {number('critic/score/mean')} | "
        f"length {number('response_length/mean', '.1f')} | kl {number(kl, '.4f')} | "
        f"clip {number('actor/pg_clipfrac')} | grad {number('actor/grad_norm', '.2f')} | "
        f"{' '.join(stages)} = {number('timing_s/step', '.2f')} s"
    )
