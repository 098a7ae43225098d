"""How stages are called: plainly, or as Prefect tasks of a flow run while a server answers. Imports Prefect late."""

from __future__ import annotations

import contextvars
import errno
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from flows.prefect_runs import PrefectRuns
    from flows.prefect_server import PrefectAPI

R = TypeVar("R")
logger = logging.getLogger(__name__)

RETRY_PAUSES_S = (1.0, 5.0)
"""A stage that failed in a way that may pass is tried again after these pauses."""

_FINAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG}


def may_pass(error: BaseException) -> bool:
    """Whether trying again can help: an I/O error that is no fault of the configuration or of a full disk.

    Bad input, a damaged artifact or a NaN give the same answer the second time. An engine whose process died raises
    an OSError (a broken pipe, a connection that was reset, an end of file).
    """
    return isinstance(error, EOFError) or (isinstance(error, OSError) and error.errno not in _FINAL_ERRNOS)


class Stages(Protocol):
    """How a flow function calls its stages."""

    def run(self, stage: Callable[..., R], *args: Any) -> R:
        """Call a stage and wait for what it returns."""

    def start(self, stage: Callable[..., R], *args: Any) -> Callable[[], R]:
        """Begin a stage beside the ones that follow; calling the result waits for what it returns."""


class PlainStages:
    """Stages as function calls, tried again where that can help. `plain_stages` makes them."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    def run(self, stage: Callable[..., R], *args: Any) -> R:
        for pause_s in RETRY_PAUSES_S:
            try:
                return stage(*args)
            except Exception as error:
                if not may_pass(error):
                    raise
                time.sleep(pause_s)
        return stage(*args)

    def start(self, stage: Callable[..., R], *args: Any) -> Callable[[], R]:
        return self._threads.submit(contextvars.copy_context().run, self.run, stage, *args).result


@contextmanager
def plain_stages() -> Iterator[PlainStages]:
    """Plain calls of stages; those that were started have ended when the block is left."""
    with ThreadPoolExecutor(4, thread_name_prefix="stage") as threads:
        yield PlainStages(threads)


class StageRunner:
    """Runs flow functions: as Prefect flow runs of tasks, or plainly where there is no server.

    A flow function takes the way to call stages as its last argument: `train_step(step, workers, stages)`. An outage of
    the server costs records, not training: a flow that it meets runs plainly, its states are sent when the server is
    back, and its body never runs twice.
    """

    def __init__(self, runs: PrefectRuns | None = None) -> None:
        self._runs = runs

    def call(
        self,
        flow: Callable[..., R],
        *args: Any,
        name: str,
        shown: Mapping[str, Any] | None = None,
        next_name: str | None = None,
        next_shown: Mapping[str, Any] | None = None,
    ) -> R:
        """Call `flow(*args, stages)` and return what it returns, or raise what it raises.

        Args:
            flow: the flow function; its name is the flow's name in Prefect.
            args: its arguments, which Prefect neither sees nor stores.
            name: name of the flow run.
            shown: small JSON values shown as the flow run's parameters.
            next_name: name of the same flow's next run, which is made ready meanwhile; None: none follows.
            next_shown: its parameters.
        """
        if self._runs is None:
            with plain_stages() as stages:
                return flow(*args, stages)
        return self._runs.call(flow, args, name, shown or {}, (next_name, next_shown or {}) if next_name else None)

    def environment(self) -> dict[str, str]:
        """What a process is given that is to show its flow runs below the current one."""
        return {} if self._runs is None else self._runs.environment()

    def publish_table(self, key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
        """Show a table in Prefect, with the current flow run; keys are lower-case letters, digits and dashes."""
        if self._runs is not None:
            self._runs.publish(key, "table", [dict(row) for row in rows], description)

    def publish_markdown(self, key: str, text: str, description: str) -> None:
        """Show a text in Prefect, with the current flow run."""
        if self._runs is not None:
            self._runs.publish(key, "markdown", text, description)


@contextmanager
def stage_runner(
    api: PrefectAPI | None, run_id: str, tags: Sequence[str] = (), say: Callable[[str], None] = logger.warning
) -> Iterator[StageRunner]:
    """Runs flows within the block; leaving it sends what is still to be sent.

    Flow runs that a dead process of this run left behind are closed first. `api` must have been entered before.

    Args:
        api: the server to report to; None: call plainly.
        run_id: the run; all its flow runs carry the tag `run:<run_id>`.
        tags: more tags.
        say: told of outages, in sentences: one when the server goes away, one when it is back.
    """
    if api is None:
        yield StageRunner()
        return
    from flows.prefect_runs import PrefectRuns

    with PrefectRuns(api, (f"run:{run_id}", *tags), say) as runs:
        yield StageRunner(runs)
