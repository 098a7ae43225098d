"""`make bench`: run every benchmark, each in a process of its own, and print what it prints."""

import subprocess
import sys

BENCHMARKS = (
    "step",
    "artifact_rates",
    "memory",
    "plan",
    "recovery",
    "ranks",
    "sweeps",
    "audit_queries",
    "verify",
    "report",
    "stack",
)

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"\n## {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
