"""What a run says while it runs: one line per finished step, and on a terminal the stage it is in.

`GRPOFLOW_LOG=json` makes each line a JSON object, for what collects the logs of a machine. It is no key of the
configuration: it belongs to the place where a process writes, and holds for what is said before there is a
configuration and for the processes of sweeps and schedules; two runs do not differ by it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

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


LOG = "GRPOFLOW_LOG"
"""Environment variable: `text`, the default, or `json`."""


def logs_json() -> bool:
    """Whether lines are to be JSON objects.

    Raises:
        ValueError: the variable says something else.
    """
    wanted = os.environ.get(LOG) or "text"
    if wanted not in ("text", "json"):
        raise ValueError(f"{LOG}={wanted}: lines can be text or json")
    return wanted == "json"


class RunConsole(Console):
    """Goes on silently when the reader of its pipe is gone: that does not end a run.

    Attributes:
        run_id: of the run that speaks, once there is one.
    """

    def __init__(self) -> None:
        self.is_json = logs_json()
        super().__init__(force_terminal=False if self.is_json else None)
        self.run_id: str | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        """Print a line; as JSON without an empty one."""
        if not self.is_json:
            super().print(*objects, **options)
        elif message := " ".join(map(str, objects)).strip():
            self.tell(message)

    def tell(self, message: str, **more: Any) -> None:
        """Print a line as a JSON object: time, level, run, message, and more."""
        head = message.partition(":")[0]
        level = {"warning": "warning", "alarm": "warning", "error": "error"}.get(head, "info")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "level": level, "run": self.run_id, "message": message, **more}
        super().print(Text(json.dumps(line, allow_nan=False)), soft_wrap=True)

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
        self._finished(step, step_line(step, self.total_steps, metrics) + self._left(step), metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation is finished."""
        values = ", ".join(
            f"{name.removeprefix('val-core/')} {value:.3f}"
            for name, value in metrics.items()
            if "core" in name and not name.endswith("/std")
        )
        self._finished(step, f"validation after step {step}: {values}", metrics)

    def _finished(self, step: int, message: str, metrics: Mapping[str, float | None]) -> None:
        if isinstance(self.console, RunConsole) and self.console.is_json:
            self.console.tell(message, step=step, metrics=dict(metrics))
        else:
            self.console.print(Text(message), soft_wrap=True)

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
