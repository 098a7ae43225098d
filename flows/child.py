"""A grpoflow command in a process of its own that ends with its parent: `python -m flows.child PARENT_PID WORD ...`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def child_command(*words: str) -> Sequence[str]:
    """The command line of such a process; this process is its parent."""
    return [sys.executable, "-m", "flows.child", str(os.getpid()), *words]


def end_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send a signal when the parent process dies, however it dies. Linux alone.

    Args:
        parent: its process id.
        number: the signal; SIGTERM is the polite end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(128 + number)


def main() -> None:
    """Be the command line."""
    end_with_parent(int(sys.argv[1]))
    from flows.cli import main as command_line

    sys.argv = ["grpoflow", *sys.argv[2:]]
    command_line()


if __name__ == "__main__":
    main()
