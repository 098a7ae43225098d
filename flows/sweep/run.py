"""Runs a sweep: decides, starts a process per run in a free slot, and writes down what comes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psutil

from flows.child import child_command
from flows.slots import SLOTS, Slot, acquire, visible_devices
from flows.sweep.board import Advance, NewTrial, Result, Wait, next_decision
from flows.sweep.book import SweepWriter
from flows.sweep.objective import result_of
from flows.sweep.space import grid, suggest
from flows.sweep.spec import SweepSpec
from flows.sweep.table import cell
from flows.sweep.trials import recipe_words, refusal, trial_config, write_config
from tasks.config import RunConfig

POLL_S = 0.2
"""How often the processes of runs are looked at."""

KILLED = {128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP}
"""Exit codes of a process that was told to end, or made to."""


@dataclass
class Running:
    """A process that trains one run for one decision."""

    advance: Advance
    seed: int
    attempt: int
    process: subprocess.Popen[Any]
    started: float = field(default_factory=time.monotonic)


class Loop:
    """One start of the sweep command."""

    def __init__(
        self,
        sweep: SweepWriter,
        say: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Take up a sweep.

        Args:
            sweep: its folder.
            say: told what happens, in sentences.
            check: called often; what it raises ends the sweep, politely.
            changed: called when a decision or a result was written down.
        """
        self.sweep, self.say, self.check, self.changed = sweep, say, check, changed
        self.board = sweep.board()
        self.environment: dict[str, str] = {}
        """What the runs' processes are given besides."""
        self.running: dict[tuple[int, int], Running] = {}
        self._attempts: dict[tuple[int, int], int] = {}
        self._deaths: dict[tuple[int, int], tuple[int, int]] = {}
        self._wall_before_s = wall_seconds(sweep)
        self._begun = time.monotonic()
        self._waits: set[str] = set()

    def to_the_end(self) -> str:
        """Go on until nothing is left to decide or the budget is spent; `finished` or `stopped`."""
        self._close_open_attempts()
        try:
            while True:
                self.check()
                spent = self._spent()
                more = spent is None and self._decide()
                if spent is None:
                    self._start_what_can()
                elif self.sweep.spec.budget.deadline is not None and "deadline" in spent:
                    self._stop_all()
                self._look()
                if not self.running and (spent or not more):
                    state = "stopped" if spent or self._undone() else "finished"
                    self.sweep.append("closed", state=state, reason=spent)
                    if spent:
                        self.say(f"no further run begins: {spent}")
                    return state
                time.sleep(POLL_S)
        except BaseException as error:
            self._stop_all()
            self.sweep.append("closed", state="stopped", reason=type(error).__name__)
            raise

    # ------------------------------------------------------------------------------------------------------- deciding

    def _decide(self) -> bool:
        """Write down all that can be decided now; whether something is under way or still to come."""
        while True:
            number = len(self.board.trials)
            decision = next_decision(self.board, self._has_more(number))
            if decision is None:
                return self._undone()
            if isinstance(decision, Wait):
                return True
            if isinstance(decision, NewTrial):
                if not self._new_trial(number, decision):
                    continue
                decision = Advance(len(self.board.advances), number, decision.until)
            self.board.advances.append(decision)
            self.sweep.append("advance", index=decision.index, trial=decision.trial, until=decision.until)
            self.changed()

    def _has_more(self, number: int) -> bool:
        limit = self.sweep.spec.budget.trials
        if self.sweep.spec.sampler.kind == "grid":
            limit = min(len(grid(self.sweep.spec)), limit or sys.maxsize)
        return limit is None or number < limit

    def _new_trial(self, number: int, decision: NewTrial) -> bool:
        """Choose the values of a trial and write them down; whether it is to be trained."""
        seen = [(dict(self.board.trials[trial].values), place) for trial, place in decision.seen.items()]
        values = suggest(self.sweep.spec, number, seen, [trial.values for trial in self.board.trials])
        assert values is not None, "a grid was asked for no more than it has"
        same_as = next((trial.number for trial in self.board.trials if dict(trial.values) == values), None)
        refused = self._refused(number, values) if same_as is None else None
        self.sweep.append("trial", number=number, values=values, refused=refused, same_as=same_as)
        self.board = self.sweep.board()
        shown = ", ".join(f"{key.rpartition('.')[2]}={cell(value)}" for key, value in values.items())
        fate = "" if same_as is None else f": the same as trial {same_as}"
        self.say(f"trial {number}: {shown}{f': the plan refuses it: {refused}' if refused else fate}")
        return refused is None and same_as is None

    def _refused(self, number: int, values: dict[str, Any]) -> str | None:
        try:
            return refusal(self._config(number, values, self.sweep.spec.seeds[0]), self.sweep.total)
        except ValueError as error:
            return str(error)

    def _config(self, number: int, values: dict[str, Any], seed: int) -> RunConfig:
        return trial_config(self.sweep.spec, self.sweep.base, values, self.sweep.run_name(number, seed), seed, number)

    def _undone(self) -> bool:
        return not all(map(self.board.is_done, self.board.advances))

    # ------------------------------------------------------------------------------------------------------- the runs

    def _start_what_can(self) -> None:
        spec = self.sweep.spec
        for advance in self.board.advances:
            for seed in spec.seeds:
                key = (advance.index, seed)
                if key in self.running or key in self.board.results:
                    continue
                if len(self.running) >= spec.slots or not self._start(advance, seed):
                    return

    def _start(self, advance: Advance, seed: int) -> bool:
        """Start a run's process; False: there is no slot now."""
        name = self.sweep.run_name(advance.trial, seed)
        run = self.sweep.run(advance.trial, seed)
        if run is not None and run.owner() is not None:
            # The process of an earlier start of this command, which was killed, is still finishing its stage.
            if name not in self._waits:
                self.say(f"{name} is still being written by process {run.owner()}; waiting for it")
                self._waits.add(name)
            return True
        slot = acquire(self.sweep.base.storage.folder / SLOTS, self.sweep.spec.slots, {"run": name}, wait_s=0)
        if slot is None:
            return False
        self._run(advance, seed, slot)
        return True

    def _run(self, advance: Advance, seed: int, slot: Slot) -> None:
        key = (advance.index, seed)
        label = f"{advance.trial:04d}-s{seed}"
        config = self.sweep.folder / "configs" / f"{label}.yaml"
        trial = self.board.trials[advance.trial]
        write_config(self._config(advance.trial, dict(trial.values), seed), config)
        log = self.sweep.folder / "logs" / f"{label}.log"
        log.parent.mkdir(exist_ok=True)
        attempt = self._attempts[key] = self._attempts.get(key, 0) + 1
        words = ["train", *recipe_words(self.sweep.spec), str(config), "--until", str(advance.until)]
        self.sweep.append("started", advance=advance.index, seed=seed, attempt=attempt, slot=slot.number)
        with log.open("ab") as out:
            process = slot.start(
                child_command(*words),
                env=environment_of(self.sweep.spec, slot.number) | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[key] = Running(advance, seed, attempt, process)
        again = f", attempt {attempt}" if attempt > 1 else ""
        self.say(f"trial {advance.trial}, seed {seed}: to step {advance.until} in slot {slot.number}{again}")

    def _look(self) -> None:
        """Write down what became of processes that have ended."""
        for key, one in list(self.running.items()):
            code = one.process.poll()
            if code is not None:
                del self.running[key]
                self._ended(one, code)

    def _ended(self, one: Running, code: int) -> None:
        trial, seed = one.advance.trial, one.seed
        steps = self.sweep.finished_steps(trial, seed)
        killed = code < 0 or code in KILLED
        end: str = "died" if killed else "failed"
        reason: str | None = f"exit code {code}" if killed else self._last_words(trial, seed, code)
        run = self.sweep.run(trial, seed)
        if code == 0 and run is not None and steps >= one.advance.until:
            end, reason = "reached", None
        self._write_end(one, end, reason, steps)
        if end == "reached" and run is not None:
            self._result(one, result_of(run, self.sweep.spec.objective, one.advance.until))
        elif end == "failed":
            self._result(one, Result(None, reason))
        else:
            self._died(one, steps)

    def _write_end(self, one: Running, end: str, reason: str | None, steps: int) -> None:
        self.sweep.append(
            "ended",
            advance=one.advance.index,
            seed=one.seed,
            attempt=one.attempt,
            end=end,
            reason=reason,
            seconds=round(time.monotonic() - one.started, 3),
            finished_steps=steps,
        )

    def _died(self, one: Running, steps: int) -> None:
        """A run that was killed goes on, unless it was killed twice without having finished a step in between."""
        key = (one.advance.trial, one.seed)
        times, at = self._deaths.get(key, (0, -1))
        times = times + 1 if at == steps else 1
        self._deaths[key] = (times, steps)
        where = f"trial {one.advance.trial}, seed {one.seed} was killed after step {steps}"
        if times > 1:
            self._result(one, Result(None, f"killed twice in step {steps + 1}"))
        else:
            self.say(f"{where}; it goes on when a slot is free")

    def _result(self, one: Running, result: Result) -> None:
        self.sweep.append(
            "result",
            advance=one.advance.index,
            seed=one.seed,
            value=result.value,
            failed=result.failed,
            best_step=result.best_step,
        )
        self.board.results[one.advance.index, one.seed] = result
        metric = self.sweep.spec.objective.metric.rpartition("/")[2]
        reached = f"step {one.advance.until} reached, {metric} {result.value}"
        told = f"failed: {result.failed}" if result.failed else reached
        self.say(f"trial {one.advance.trial}, seed {one.seed}: {told}")
        self.changed()

    def _last_words(self, trial: int, seed: int, code: int) -> str:
        log = self.sweep.folder / "logs" / f"{trial:04d}-s{seed}.log"
        with suppress(OSError):
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return f"{lines[-1].removeprefix('error: ')} (exit code {code}; {log})"
        return f"exit code {code}"

    def _stop_all(self) -> None:
        """Have all runs end politely, and write down that they can go on."""
        for one in self.running.values():
            with suppress(ProcessLookupError):
                one.process.terminate()
        grace_s = self.sweep.base.trainer.stop_grace_s + 20.0
        for one in self.running.values():
            try:
                one.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            self._write_end(one, "stopped", "told to end", self.sweep.finished_steps(one.advance.trial, one.seed))
        self.running.clear()

    def _close_open_attempts(self) -> None:
        """Count attempts so far, and write down the end of those that an earlier start left without one."""
        left = {}
        for event in self.sweep.events():
            if event["event"] not in ("started", "ended"):
                continue
            key = (event["advance"], event["seed"])
            if event["event"] == "started":
                self._attempts[key] = event["attempt"]
                left[key] = event
            else:
                left.pop(key, None)
        for event in left.values():
            trial = self.board.advances[event["advance"]].trial
            steps = self.sweep.finished_steps(trial, event["seed"])
            about = {name: event[name] for name in ("advance", "seed", "attempt")}
            seconds = self._seconds_of(event)
            end = {"end": "stopped", "reason": "the sweep's process died", "seconds": seconds, "finished_steps": steps}
            self.sweep.append("ended", **about, **end)

    def _seconds_of(self, event: dict[str, Any]) -> float:
        """How long a process ran whose end nobody saw: until the sweep's ledger ends."""
        last = datetime.fromisoformat(self.sweep.events()[-2]["at"])
        return max(0.0, (last - datetime.fromisoformat(event["at"])).total_seconds())

    # ------------------------------------------------------------------------------------------------------ the budget

    def _spent(self) -> str | None:
        """Which limit is reached; None: none."""
        budget = self.sweep.spec.budget
        if budget.deadline is not None and datetime.now(UTC) >= budget.deadline:
            return f"the deadline {budget.deadline.isoformat()} is there (budget.deadline)"
        if budget.wall_s is not None and self._wall_before_s + time.monotonic() - self._begun >= budget.wall_s:
            return f"{budget.wall_s:g} s are over (budget.wall_s)"
        if budget.device_hours is not None and device_hours(self.sweep) >= budget.device_hours:
            return f"{budget.device_hours:g} device hours are spent (budget.device_hours)"
        return None


def wall_seconds(sweep: SweepWriter) -> float:
    """How long earlier starts of the command ran, s; of one that was killed, until its last word."""
    total, begun, last = 0.0, None, None
    for event in sweep.events()[:-1]:
        at = datetime.fromisoformat(event["at"])
        if event["event"] == "opened":
            total += (last - begun).total_seconds() if begun and last else 0.0
            begun = at
        last = at
    return total + ((last - begun).total_seconds() if begun and last else 0.0)


def device_hours(sweep: SweepWriter) -> float:
    """Device hours of all processes that have ended."""
    seconds = sum(attempt.seconds for attempt in sweep.attempts())
    return seconds * max(1, sweep.spec.devices_per_slot) / 3600


def environment_of(spec: SweepSpec, slot: int) -> dict[str, str]:
    """What the process of a run gets: the devices of its slot, and its share of the cores."""
    threads = spec.threads_per_slot or max(1, (psutil.cpu_count() or 1) // spec.slots)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if spec.devices_per_slot:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(os.environ, slot, spec.devices_per_slot)
    return environment
