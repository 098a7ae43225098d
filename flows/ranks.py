"""The ranks of a run: how they are opened, and what is done when they are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from storage import RunWriter
from storage.retention import last_finished_step
from tasks.config import RunConfig
from tasks.geometry import Plan
from tasks.workers.group import LocalGroup, RanksLost, WorkerGroup
from tasks.workers.rank import open_rank, training_role

R = TypeVar("R")


@contextmanager
def worker_group(cfg: RunConfig, plan: Plan, tokenizer: Any) -> Iterator[WorkerGroup]:
    """The ranks of a run: one in this process, or as many as there are devices, each in its own."""
    total_steps = plan.total_steps or 1
    if plan.world_size == 1 and cfg.actor_rollout_ref.hybrid_engine:
        rank = open_rank(cfg, None, tokenizer, role=training_role(cfg), total_steps=total_steps)
        with closing(rank):
            yield LocalGroup(rank)
        return
    from tasks.workers.pools import ray_ranks

    with ray_ranks(cfg, total_steps=total_steps) as group:
        yield group


class Replacement:
    """Starts ranks that were lost again: once, until a further step is finished."""

    def __init__(
        self,
        run: RunWriter,
        group: WorkerGroup,
        recover: Callable[[], object],
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        """The ranks of a run.

        Args:
            run: the run.
            group: its ranks.
            recover: brings new ranks to the policy after the last finished step.
            say: told of losses.
            check: called before ranks are started again; raises where the run is to end.
        """
        self._run, self._group, self._recover, self._say, self._check = run, group, recover, say, check
        self._lost_after: int | None = None

    def within(self, work: Callable[[], R]) -> R:
        """Do something that needs the ranks; when they are lost in it, start them again and do it again.

        What was committed until then is used again, as by a run that goes on.

        Raises:
            RanksLost: they are lost again before a further step is finished.
        """
        while True:
            try:
                return work()
            except RanksLost as lost:
                self._start_again(lost)

    def _start_again(self, lost: RanksLost) -> None:
        finished = last_finished_step(self._run)
        self._write_down(lost, finished)
        # A batch system tells the ranks too that they are to end: that is no loss.
        self._check()
        if self._lost_after == finished:
            raise _second(lost, finished) from lost
        self._lost_after = finished
        self._say(str(lost))
        self._say(f"all ranks are started again, and step {finished + 1} goes on with what it has committed")
        try:
            self._group.rebuild()
            self._recover()
        except RanksLost as again:
            self._write_down(again, finished)
            raise _second(again, finished) from again

    def _write_down(self, lost: RanksLost, finished: int) -> None:
        about = {"rank": lost.rank, "host": lost.host, "pid": lost.pid, "reason": lost.reason}
        self._run.append("ranks_lost", step=finished + 1, **about)


def _second(lost: RanksLost, finished: int) -> RanksLost:
    """A loss that ends the run."""
    return RanksLost(
        f"{lost.reason}. The ranks were started again once since step {finished}; a second loss ends the run",
        lost.rank,
        lost.host,
        lost.pid,
        lost.last_lines,
        lost.log,
    )
