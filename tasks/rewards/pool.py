"""The reward pool: any reward function, run in killable processes, with a status beside every score.

Every call has a time limit that the parent enforces by killing the process, a call that raised is tried again with a
growing pause, and a sample that still has no verdict has a null score: an exception is never a number.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Self

from tasks.config import RunConfig
from tasks.rewards.calls import RewardError
from tasks.rewards.functions import (
    RewardFunction,
    check_reward_keys,
    check_sources,
    configured_functions,
    function_of_source,
    functions_digest,
)
from tasks.rewards.process import Call, WorkerProcess
from tasks.rewards.verdicts import RewardRow, Status, Verdict, check_error_share, verdict_of

__all__ = ["RewardError", "RewardPool", "RewardRow", "Verdict", "check_error_share", "check_sources", "score"]

LOAD_LIMIT_S = 300.0
"""Time in which a worker must have imported a reward function."""
LARGEST_CALL = 64
"""Rows of one message to a worker."""
STOP_CHECK_S = 0.25
"""How soon a call that waits notices that it is to stop."""
FIRST_PAUSE_S, PAUSE_GROWTH, LONGEST_PAUSE_S = 0.25, 4.0, 30.0
"""Pause before a call that raised is tried again: 0.25, 1, 4, 16, 30, 30, … s."""


class RewardPool:
    """Worker processes that stay alive from step to step. Use it as a context, or call `close`."""

    def __init__(self, cfg: RunConfig) -> None:
        """Start the workers without waiting for them.

        Raises:
            RewardError: the configuration names functions that are none.
        """
        self._cfg, self._limits = cfg, cfg.reward
        self._configured = configured_functions(cfg)
        self.code_digest = functions_digest(self._configured)
        self._functions = {function.name: function for function in self._configured}
        self._forms: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            for worker in self._workers:
                self._selector.unregister(worker)
                worker.close()
            self._workers.clear()

    def check(self, data_sources: Iterable[str] = ()) -> None:
        """Load every function that the configuration or these data sources need.

        Raises:
            RewardError: one cannot be imported, has neither verl's nor TRL's parameters, or is missing; or
                `algorithm.gdpo_reward_keys` names another.
        """
        check_reward_keys(self._cfg, data_sources)
        with self._in_use():
            for source in [] if self._configured else sorted(set(data_sources)):
                self._require(function_of_source(source))
            self._await_loaded()

    def stop(self) -> None:
        """End the call of `score` that is running in another thread, if there is one: it raises RewardError."""
        self._stopped.set()

    def score(self, rows: Sequence[RewardRow]) -> list[Verdict]:
        """Score rows; the verdicts are in their order.

        Raises:
            RewardError: a function returned something that is no score, or cannot be loaded; nothing is scored then,
                and the pool can be used again.
        """
        if not rows:
            return []
        with self._in_use():
            self._stopped.clear()
            sources = {row.data_source for row in rows}
            of_source = {source: self._configured or (function_of_source(source),) for source in sources}
            functions_of_row = [of_source[row.data_source] for row in rows]
            _check_references(rows, of_source)
            for functions in of_source.values():
                for function in functions:
                    self._require(function)
            self._await_loaded()
            outcomes = _Scoring(self, rows, functions_of_row).run()
        return [verdict_of(functions, outcomes[i]) for i, functions in enumerate(functions_of_row)]

    def _fill(self) -> None:
        while len(self._workers) < self._limits.num_workers:
            worker = WorkerProcess(self._functions.values())
            worker.deadline = time.monotonic() + LOAD_LIMIT_S
            self._workers.append(worker)
            self._selector.register(worker, selectors.EVENT_READ, worker)

    def _drop(self, worker: WorkerProcess) -> str:
        self._selector.unregister(worker)
        self._workers.remove(worker)
        return worker.kill()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """One caller at a time; on an error, workers that are in the middle of something are dropped."""
        with self._lock:
            try:
                yield
            except BaseException:
                for worker in [worker for worker in self._workers if worker.call is not None or worker.loading]:
                    self._drop(worker)
                raise

    def _require(self, function: RewardFunction) -> None:
        if function.name in self._functions:
            return
        self._functions[function.name] = function
        for worker in self._workers:
            worker.load(function)
            worker.deadline = time.monotonic() + LOAD_LIMIT_S

    def _await_loaded(self) -> None:
        self._fill()
        while any(worker.loading for worker in self._workers):
            self._attend(None)

    def _attend(self, scoring: _Scoring | None, until: float = float("inf")) -> None:
        """Wait for replies, deadlines or the clock time `until`, and deal with all that is due."""
        wait = min([until, *(worker.deadline for worker in self._workers)]) - time.monotonic()
        self._selector.select(min(max(wait, 0.0), STOP_CHECK_S))
        if self._stopped.is_set():
            raise RewardError("scoring was stopped")
        # All are read before any deadline is judged: a late parent must not take an answered call for a slow one.
        for worker in list(self._workers):
            replies, ended = worker.receive()
            for reply in replies:
                self._take(worker, reply, scoring)
            if ended:
                self._ended(worker, scoring)
            elif worker.deadline <= time.monotonic():
                if worker.call is not None and scoring is not None:
                    self._judge(worker, scoring)
                else:
                    self._drop(worker)
                    names = ", ".join(sorted(worker.loading))
                    raise RewardError(f"reward function {names} was not imported within {LOAD_LIMIT_S:g} s")

    def _take(self, worker: WorkerProcess, reply: dict[str, Any], scoring: _Scoring | None) -> None:
        if "refused" in reply:
            raise RewardError(reply["refused"])
        if "loaded" in reply:
            self._forms[reply["loaded"]] = reply["form"]
            worker.loading.discard(reply["loaded"])
            if not worker.loading:
                worker.deadline = float("inf")
        elif scoring is not None:
            scoring.take(worker, reply["outcomes"])

    def _ended(self, worker: WorkerProcess, scoring: _Scoring | None) -> None:
        how = self._drop(worker)
        if worker.loading:
            raise RewardError(f"a reward process ended ({how}) while it loaded {', '.join(sorted(worker.loading))}")
        self._fill()
        if worker.call is not None and scoring is not None:
            scoring.died(worker, f"the reward process ended: {how}")

    def _judge(self, worker: WorkerProcess, scoring: _Scoring) -> None:
        """Kill a worker whose row is overdue; one that went on to another row meanwhile gets that row's deadline."""
        call = worker.call
        assert call is not None
        limit_s = self._limits.timeout_s * (len(call.rows) if call.batch else 1)
        worker.deadline = worker.row_begun_at() + limit_s
        if worker.deadline <= time.monotonic():
            self._drop(worker)
            self._fill()
            scoring.overdue(worker)


class _Scoring:
    """The calls of one batch: which wait, which are with a worker, and what came back."""

    def __init__(
        self, pool: RewardPool, rows: Sequence[RewardRow], functions_of_row: Sequence[tuple[RewardFunction, ...]]
    ) -> None:
        self._pool = pool
        self._limits = pool._limits
        self._rows = rows
        self._queue: deque[Call] = deque()
        self._outcomes: list[dict[str, dict[str, Any]]] = [{} for _ in rows]
        self._missing = sum(len(functions) for functions in functions_of_row)
        rows_of_function: dict[str, list[int]] = {}
        for i, functions in enumerate(functions_of_row):
            for function in functions:
                rows_of_function.setdefault(function.name, []).append(i)
        for name, mine in rows_of_function.items():
            self._queue.extend(self._calls(name, mine))

    def run(self) -> list[dict[str, dict[str, Any]]]:
        """Every row's outcome by function."""
        while self._missing:
            self._assign()
            waiting = min((call.not_before for call in self._queue), default=float("inf"))
            idle = any(worker.call is None and not worker.loading for worker in self._pool._workers)
            self._pool._attend(self, until=waiting if idle else float("inf"))
        return self._outcomes

    def take(self, worker: WorkerProcess, outcomes: Sequence[dict[str, Any]]) -> None:
        """Note what came back for the next rows of a worker's call; rows that raised are tried again."""
        call = worker.call
        assert call is not None
        rows = call.rows[worker.delivered : worker.delivered + len(outcomes)]
        worker.delivered += len(outcomes)
        again = []
        for row, outcome in zip(rows, outcomes, strict=True):
            if "raised" in outcome and call.attempt < self._limits.retries:
                again.append(row)
            else:
                self._finish(row, call.function, outcome)
        if again:
            self._again(call, again)
        if worker.delivered == len(call.rows):
            worker.call, worker.deadline = None, float("inf")

    def died(self, worker: WorkerProcess, message: str) -> None:
        """A worker ended by itself: the row it was at (all rows of a batch call) counts as raised, the others go on."""
        call = worker.call
        assert call is not None
        hit = call.rows if call.batch else [worker.row_in_work()]
        if call.attempt < self._limits.retries:
            self._again(call, hit)
        else:
            for row in hit:
                self._finish(row, call.function, {"raised": message, "seconds": 0.0})
        self._go_on(worker, hit)

    def overdue(self, worker: WorkerProcess) -> None:
        """A worker was killed at the time limit: the row it was at has timed out, the others go on.

        The rows of a batch call are tried one by one: which of them was slow is not known.
        """
        call = worker.call
        assert call is not None
        if call.batch and len(call.rows) > 1:
            self._queue.extend(Call(call.function, [row], True, call.attempt) for row in call.rows)
            return
        limit_s = self._limits.timeout_s
        message = f"no verdict from {call.function} within {limit_s:g} s (reward.timeout_s); its process was killed"
        row = worker.row_in_work()
        self._finish(row, call.function, _no_verdict("timeout", message, limit_s))
        self._go_on(worker, [row])

    def _calls(self, name: str, rows: list[int]) -> list[Call]:
        if self._pool._forms[name] == "batch":
            groups = groupby(rows, key=lambda i: self._rows[i].group_id)
            return [Call(name, list(group), batch=True) for _, group in groups]
        # A few calls per worker even out slow rows; a call of many rows costs one message.
        size = min(max(len(rows) // (4 * self._limits.num_workers), 1), LARGEST_CALL)
        return [Call(name, rows[start : start + size]) for start in range(0, len(rows), size)]

    def _assign(self) -> None:
        for worker in self._pool._workers:
            if worker.call is not None or worker.loading:
                continue
            call = self._next_call()
            if call is None:
                return
            rows = [_message(self._rows[i]) for i in call.rows]
            worker.begin(call, rows, self._limits.timeout_s * (len(rows) if call.batch else 1))

    def _next_call(self) -> Call | None:
        now = time.monotonic()
        for _ in range(len(self._queue)):
            call = self._queue.popleft()
            if call.not_before <= now:
                return call
            self._queue.append(call)
        return None

    def _again(self, call: Call, rows: list[int]) -> None:
        pause = min(FIRST_PAUSE_S * PAUSE_GROWTH**call.attempt, LONGEST_PAUSE_S)
        self._queue.append(Call(call.function, rows, call.batch, call.attempt + 1, time.monotonic() + pause))

    def _go_on(self, worker: WorkerProcess, hit: list[int]) -> None:
        """Queue the rows of a lost call that have no outcome, but for those that were hit."""
        call = worker.call
        assert call is not None
        if rest := [row for row in call.rows[worker.delivered :] if row not in hit]:
            self._queue.appendleft(Call(call.function, rest, call.batch, call.attempt))

    def _finish(self, row: int, function: str, outcome: dict[str, Any]) -> None:
        if "raised" in outcome:
            outcome = _no_verdict("error", f"{function}: {outcome['raised']}", outcome["seconds"])
        self._outcomes[row][function] = outcome
        self._missing -= 1


def _no_verdict(status: Status, message: str, seconds: float) -> dict[str, Any]:
    return {
        "score": None,
        "status": status,
        "extracted": None,
        "extra": {},
        "message": message,
        "seconds": seconds,
    }


def score(rows: Sequence[RewardRow], cfg: RunConfig) -> list[Verdict]:
    """Score rows with processes of their own; a run keeps a RewardPool instead."""
    with RewardPool(cfg) as pool:
        return pool.score(rows)


def _check_references(rows: Sequence[RewardRow], of_source: Mapping[str, tuple[RewardFunction, ...]]) -> None:
    needing = {source for source, functions in of_source.items() if any(f.needs_reference for f in functions)}
    for row in rows:
        if row.ground_truth is None and row.data_source in needing:
            raise RewardError(
                f"sample {row.sample_id} of data source {row.data_source!r} has no reference answer, which the "
                "built-in reward function needs. Set data.ground_truth_key to the column that holds it."
            )


def _message(row: RewardRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": row.prompt,
        "solution_str": row.solution_str,
        "ground_truth": row.ground_truth,
        "extra_info": dict(row.extra_info),
    }
