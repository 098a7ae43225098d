"""Flow runs in Prefect at the least cost: the training thread never waits for the server, but for a flow run's id.

Prefect's own engine runs the flows and tasks. It gets a client that answers from memory, and what it would tell the
server goes there in order, on one other thread, which holds it while the server is away. A step of seven stages then
costs about a third of what Prefect's own client makes it cost. What is given up is the server's veto: a flow run that
is cancelled in the UI goes on. Task runs reach the server as Prefect's events and need none of this.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from uuid import UUID, uuid4

from httpx import HTTPStatusError
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, FlowRunCreate, TaskRunCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus, StateAcceptDetails
from prefect.context import FlowRunContext, SettingsContext, SyncClientContext, get_settings_context
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.states import Completed, Crashed, Failed, Pending, Running, State, to_state_create
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from flows.prefect_courier import Courier, LogHandler
from flows.stages import RETRY_PAUSES_S, may_pass, plain_stages
from storage import Artifact, StorageError, open_run
from storage.durable import read_json

if TYPE_CHECKING:
    from flows.prefect_server import PrefectAPI

R = TypeVar("R")
logger = logging.getLogger(__name__)

PARENT = "GRPOFLOW_PARENT_FLOW_RUN"
"""Environment variable with the flow run that started this process, such as that of a sweep."""

ID_WAIT_S = 5.0
"""How long a flow waits for the id of its run; then it runs plainly, and so do the next, until the server answers."""

CLOSE_WAIT_S = 10.0
"""How long the end waits for a server that takes what is left."""


class PrefectRuns:
    """Calls flow functions as Prefect flow runs. Use it as a context manager."""

    def __init__(self, api: PrefectAPI, tags: Sequence[str], say: Callable[[str], None]) -> None:
        self._tags = list(tags)
        self._courier = Courier(api, say)
        self._client = _LocalClient(api.url, self._courier)
        self._context = contextvars.Context()
        self._flows: dict[str, Flow[[], Any]] = {}
        self._spare: tuple[str, Future[FlowRun]] | None = None
        self._logs = LogHandler(self._courier)
        self._api_url = api.url
        parent = os.environ.get(PARENT)
        self._parent = UUID(parent) if parent else None

    def __enter__(self) -> Self:
        self._context.run(self._enter_prefect)
        if hasattr(EventsWorker, "set_client_override") and "prefect.cloud" not in self._api_url:
            # An event that meets an outage is kept and sent on the next connection. The first two attempts to connect
            # follow at once; with Prefect's ten, each event first waits for seconds, and the process's end for all.
            EventsWorker.set_client_override(PrefectEventsClient, api_url=self._api_url, reconnection_attempts=2)
        self._courier.start()
        self._courier.send(self._close_dead_runs)
        self._logs.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._logs.detach()
        self._drop_spare()
        self._courier.finish(CLOSE_WAIT_S)
        if not self._courier.away:
            self._context.run(EventsWorker.drain_all, timeout=CLOSE_WAIT_S)
        if hasattr(EventsWorker, "set_client_override"):
            EventsWorker.set_client_override(None)

    def call(
        self,
        flow: Callable[..., R],
        args: Sequence[Any],
        name: str,
        shown: Mapping[str, Any],
        following: tuple[str, Mapping[str, Any]] | None,
    ) -> R:
        """Call `flow(*args, stages)`, as a flow run if its id comes in time and plainly if not."""
        prefect_flow, parent = self._flow_of(flow), current_flow_run() or self._parent
        created = self._take_spare(flow, name) or self._create(prefect_flow, name, shown, parent)
        flow_run = self._arrived(created)
        call = _Call(flow, args, lambda: self._prepare(flow, following, parent))
        if flow_run is not None:
            self._run_engine(prefect_flow, flow_run, call)
        if not call.started:
            self._run_plainly(created, call)
        return call.result()

    def environment(self) -> dict[str, str]:
        """What a process is given that is to show its flow runs below the current one."""
        return {} if (here := current_flow_run()) is None else {PARENT: str(here)}

    def publish(self, key: str, kind: str, data: Any, description: str) -> None:
        """Attach an artifact to the current flow run."""
        flow_run_id = current_flow_run()
        text = data if isinstance(data, str) else json.dumps(data)
        artifact = ArtifactCreate(key=key, type=kind, data=text, description=description, flow_run_id=flow_run_id)
        self._courier.send(lambda client: client.create_artifact(artifact))

    def _enter_prefect(self) -> None:
        """Make the context in which engines run: our client, no heartbeat thread, which costs a second at its end."""
        base = get_settings_context()
        updates: dict[Any, Any] = {
            "flows.heartbeat_frequency": None,
            "logging.to_api.enabled": False,
            "client.server_version_check_enabled": False,
            "api.url": self._api_url,
        }
        settings = base.settings.copy_with_update(updates=updates)
        SettingsContext(profile=base.profile, settings=settings).__enter__()
        clients = SyncClientContext()
        clients.client = self._client
        clients.__enter__()

    def _flow_of(self, function: Callable[..., Any]) -> Flow[[], Any]:
        name = function.__name__
        if name not in self._flows:
            self._flows[name] = Flow(
                _run_current_call,
                name=name,
                description=function.__doc__,
                validate_parameters=False,
                persist_result=False,
                task_runner=ThreadPoolTaskRunner(max_workers=4),  # type: ignore[arg-type]
            )
        return self._flows[name]

    def _create(self, flow: Flow[[], Any], name: str, shown: Mapping[str, Any], parent: UUID | None) -> Future[FlowRun]:
        # Sent again because an answer was lost, it is the same flow run.
        key = uuid4().hex

        def create(client: SyncPrefectClient) -> FlowRun:
            about = FlowRunCreate(
                parent_task_run_id=None if parent is None else _place_in(client, parent, flow.name, name, key),
                flow_id=client.create_flow_from_name(flow.name),
                name=name,
                parameters=dict(shown),
                tags=self._tags,
                state=to_state_create(Pending()),
                idempotency_key=key,
            )
            answer = client.request("POST", "/flow_runs/", json=about.model_dump(mode="json", exclude_unset=True))
            return FlowRun.model_validate(answer.json())

        return self._courier.send(create)

    def _arrived(self, created: Future[FlowRun]) -> FlowRun | None:
        try:
            return created.result(0.0 if self._courier.away else ID_WAIT_S)
        except FutureTimeout:
            self._courier.went_away(f"no answer within {ID_WAIT_S:g} s")
        except Exception:
            logger.debug("Prefect refused a flow run", exc_info=True)
        return None

    def _prepare(
        self, function: Callable[..., Any], following: tuple[str, Mapping[str, Any]] | None, parent: UUID | None
    ) -> None:
        """Have the next run of this flow made while this one runs."""
        if following is not None and self._spare is None:
            name, shown = following
            self._spare = (f"{function.__name__} {name}", self._create(self._flow_of(function), name, shown, parent))

    def _take_spare(self, function: Callable[..., Any], name: str) -> Future[FlowRun] | None:
        if self._spare is None or not self._spare[0].startswith(f"{function.__name__} "):
            return None
        if self._spare[0] != f"{function.__name__} {name}":
            self._drop_spare()
            return None
        created, self._spare = self._spare[1], None
        return created

    def _drop_spare(self) -> None:
        if self._spare is not None:
            created, self._spare = self._spare[1], None
            self._courier.send(lambda client: _delete(client, created.result(0)))

    def _run_engine(self, flow: Flow[[], Any], flow_run: FlowRun, call: _Call[Any]) -> None:
        def run() -> None:
            _current_call.set(call)
            with self._client.holding(flow_run):
                flow()

        try:
            self._context.copy().run(run)
        except BaseException as error:
            # What the function raised is kept by the call. An error of Prefect's own costs a record; a signal passes.
            if error is not call.error and not isinstance(error, Exception):
                raise
            logger.debug("Prefect around %s: %r", flow_run.name, error)

    def _run_plainly(self, created: Future[FlowRun], call: _Call[Any]) -> None:
        def tell(state: State[Any]) -> None:
            self._courier.send(lambda client: client.set_flow_run_state(created.result(0).id, state, force=True))

        tell(Running(message="Run without task runs, while the Prefect API did not answer."))
        call.run_plainly()
        if call.error is not None:
            tell(Failed(message=f"{type(call.error).__name__}: {call.error}"))
        else:
            tell(call.end or Completed())

    def _close_dead_runs(self, client: SyncPrefectClient) -> None:
        """Close what processes left open that died: of this run, whose lock we hold, and of runs whose lock is free."""
        open_states = {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
        left = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(open_states), limit=200)
        dead = {self._tags[0], *(tag for flow_run in left for tag in flow_run.tags if _is_dead(flow_run, tag))}
        for flow_run in left:
            if not dead & set(flow_run.tags):
                continue
            if flow_run.state and flow_run.state.is_pending():
                _delete(client, flow_run)
            else:
                client.set_flow_run_state(flow_run.id, Crashed(message="The process ended without a word."), force=True)


def current_flow_run() -> UUID | None:
    """Id of the flow run that the caller is in; None: in none, or in one that the server did not get."""
    current = FlowRunContext.get()
    return current.flow_run.id if current and current.flow_run else None


def _place_in(client: SyncPrefectClient, parent: UUID, flow: str, name: str, key: str) -> UUID | None:
    """The task run that stands for a flow run in its parent, as Prefect makes one itself; it follows its state.

    None: the server does not take it, since it does not know the parent.
    """
    about = TaskRunCreate(
        name=name, flow_run_id=parent, task_key=flow, dynamic_key=key, state=to_state_create(Pending()), task_inputs={}
    )
    try:
        answer = client.request("POST", "/task_runs/", json=about.model_dump(mode="json", exclude_unset=True))
    except HTTPStatusError:
        logger.debug("Prefect refused a place for %s in %s", name, parent, exc_info=True)
        return None
    return UUID(answer.json()["id"])


def _delete(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Delete a flow run, and what stands for it in its parent."""
    client.delete_flow_run(flow_run.id)
    if flow_run.parent_task_run_id is not None:
        client.delete_task_run(flow_run.parent_task_run_id)


def _is_dead(flow_run: FlowRun, tag: str) -> bool:
    """Whether this is the flow run of a whole run with this tag, of this machine, to which no process writes."""
    folder = flow_run.parameters.get("folder")
    if not isinstance(folder, str):
        return False
    try:
        run = open_run(folder)
        host = read_json(run.root / "lock")["host"]
    except (StorageError, OSError, ValueError, KeyError):
        return False
    return tag == f"run:{run.run_id}" and host == socket.gethostname() and run.owner() is None


# ------------------------------------------------------------------------------------------------- inside a flow run


class _Call(Generic[R]):
    """One call of a flow function, and what came of it whatever happens around it."""

    def __init__(self, flow: Callable[..., R], args: Sequence[Any], begin: Callable[[], None]) -> None:
        self._flow = flow
        self._args = args
        self._begin = begin
        self._sigterm = signal.getsignal(signal.SIGTERM)
        self._value: R | None = None
        self.started = False
        self.error: BaseException | None = None

    def run(self) -> State[Any] | None:
        """Run as the body of a flow run, and return its last state; None: as usual."""
        with self._callers_sigterm():
            self._run(_PrefectStages())
        return self.end

    @property
    def end(self) -> State[Any] | None:
        """The state of a flow that says in its result's `paused` that it is to go on; None: of every other one."""
        paused = getattr(self._value, "paused", None)
        return Completed(name="Paused", message=f"{paused}; to go on, run it again") if paused else None

    def run_plainly(self) -> None:
        """Run without Prefect; an error is kept, not raised."""
        try:
            with plain_stages() as stages:
                self._run(stages)
        except BaseException as error:
            self.error = error

    def result(self) -> R:
        """What the function returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def _run(self, stages: Any) -> None:
        self.started = True
        self._begin()
        try:
            self._value = self._flow(*self._args, stages)
        except BaseException as error:
            self.error = error
            raise

    @contextmanager
    def _callers_sigterm(self) -> Iterator[None]:
        """Undo Prefect's SIGTERM handler, which would end the run without the caller's polite way."""
        if threading.current_thread() is not threading.main_thread() or self._sigterm is None:
            yield
            return
        prefects = signal.signal(signal.SIGTERM, self._sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, prefects)


_current_call: contextvars.ContextVar[_Call[Any]] = contextvars.ContextVar("grpoflow_call")


def _run_current_call() -> State[Any] | None:
    return _current_call.get().run()


class _PrefectStages:
    """Stages as tasks of the current flow run."""

    def run(self, stage: Callable[..., R], *args: Any) -> R:
        return _task_of(stage)(*map(_unseen, args))

    def start(self, stage: Callable[..., R], *args: Any) -> Callable[[], R]:
        return _task_of(stage).submit(*map(_unseen, args)).result


@cache
def _task_of(stage: Callable[..., Any]) -> Any:
    return Task(
        stage,
        name=stage.__name__,
        description=stage.__doc__,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(RETRY_PAUSES_S),
        retry_delay_seconds=list(RETRY_PAUSES_S),
        retry_condition_fn=_may_pass,
    )


def _may_pass(_task: Any, _task_run: Any, state: State[Any]) -> bool:
    return isinstance(state.data, BaseException) and may_pass(state.data)


def _unseen(argument: Any) -> Any:
    """Keep Prefect from looking into an argument, unless it is an artifact, by which it draws its graph."""
    return argument if isinstance(argument, Artifact) else quote(argument)


class _LocalClient(SyncPrefectClient):
    """Prefect's client as its engine sees it: answers from memory, and hands states to the courier."""

    def __init__(self, url: str, courier: Courier) -> None:
        super().__init__(url)
        self._courier = courier
        self._held: dict[UUID, FlowRun] = {}
        self._next: FlowRun | None = None

    @contextmanager
    def holding(self, flow_run: FlowRun) -> Iterator[None]:
        """Answer with this flow run when the engine creates or reads one."""
        self._held[flow_run.id] = self._next = flow_run
        try:
            yield
        finally:
            del self._held[flow_run.id]

    def create_flow_run(self, flow: Any, *args: Any, **values: Any) -> FlowRun:
        if self._next is None:
            return super().create_flow_run(flow, *args, **values)
        flow_run, self._next = self._next, None
        return flow_run

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return self._held.get(flow_run_id) or super().read_flow_run(flow_run_id)

    def set_flow_run_state(
        self, flow_run_id: UUID | str, state: State[Any], force: bool = False
    ) -> OrchestrationResult[Any]:
        to_send = state.model_copy(update={"data": None})
        self._courier.send(lambda client: client.set_flow_run_state(flow_run_id, to_send, force))
        return OrchestrationResult(state=state, status=SetStateStatus.ACCEPT, details=StateAcceptDetails())

    def read_server_default_result_storage(self) -> Any:
        """No result is stored, so it does not matter where."""
        return SimpleNamespace(default_result_storage_block_id=None)
