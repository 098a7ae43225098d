"""How long `grpoflow plan` takes, from the shell and back, against an empty Python process."""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROUNDS = 7


def seconds(command: list[str]) -> float:
    """Duration of one process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Run both in turn and print medians and their ratio."""
    grpoflow = str(Path(sys.executable).with_name("grpoflow"))
    commands = {
        "grpoflow plan quickstart": [grpoflow, "plan", "quickstart"],
        "python -c pass": [sys.executable, "-c", ""],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    for name, values in times.items():
        print(f"{name:<26} {median(values):6.3f} s, median of {ROUNDS}")


if __name__ == "__main__":
    main()
