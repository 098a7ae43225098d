"""Whether the thread that computes in this process gets on: it notes it, and another thread of the process asks.

A process whose computation is stuck in a driver or a file system still answers whoever asks it for a sign of life.
"""

from __future__ import annotations

import time

_noted: float | None = None


def note() -> None:
    """Something was done: a pass through the model, a tensor gathered, a look at an engine that is at work."""
    global _noted
    _noted = time.monotonic()


def rest() -> None:
    """Nothing is to be done now."""
    global _noted
    _noted = None


def silent_s() -> float | None:
    """How long nothing was noted, in s; None: nothing is to be done."""
    noted = _noted
    return None if noted is None else time.monotonic() - noted
