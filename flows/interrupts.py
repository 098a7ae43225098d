"""How a run is told to end: once, and the stage in flight may finish; twice, and it ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(SystemExit):
    """The run was told to end by SIGTERM."""


@contextmanager
def polite_end(grace_s: float, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C and SIGTERM are requests: what is yielded raises them when it is called, between stages.

    A stage that takes longer than `grace_s` is abandoned, and so is one that is running when a second signal comes.
    Before the first stage there is nothing to finish, and a signal ends the block at once. Nothing half done is
    committed either way.

    Args:
        grace_s: how long the stage in flight may take to finish, in s.
        say: told what was asked for.

    Yields:
        To be called before each stage, from any thread. In the main thread it raises KeyboardInterrupt or Terminated
        when the end was asked for.
    """
    asked: list[int] = []
    begun = threading.Event()

    def ending() -> BaseException:
        return KeyboardInterrupt() if asked[0] == signal.SIGINT else Terminated(128 + signal.SIGTERM)

    def end() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise ending()

    def request(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1 or grace_s <= 0 or not begun.is_set():
            end()
        signal.setitimer(signal.ITIMER_REAL, grace_s)
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        # A handler runs in the middle of anything, such as a write to the same stream, which refuses a second one.
        with contextlib.suppress(RuntimeError, OSError):
            say(f"{name}: the stage in flight may finish within {grace_s:g} s; a second signal ends it at once")

    def check() -> None:
        begun.set()
        if asked and threading.current_thread() is threading.main_thread():
            end()

    handlers = {signal.SIGINT: request, signal.SIGTERM: request, signal.SIGALRM: lambda *_: end()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield check
    except SystemExit as error:
        # Ray turns what a handler raises within its calls into a SystemExit of its own.
        if asked and not isinstance(error, Terminated):
            raise ending() from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
