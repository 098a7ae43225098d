"""The process of one run of a sweep, which ends with its parent.

python -m flows.sweep.trial_process CONFIG UNTIL PARENT_PID [RECIPE ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM, the polite end, when the parent process dies, however it dies. Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Train as the command line would."""
    config, until, parent, *recipes = sys.argv[1:]
    end_with_parent(int(parent))
    from flows.cli import main as command_line

    sys.argv = ["grpoflow", "train", *recipes, config, "--until", until]
    command_line()


if __name__ == "__main__":
    main()
