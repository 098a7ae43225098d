"""Whole runs in tests: train in this process, and read what was left."""

import io

from rich.console import Console

from flows.train import run_training
from storage import Ragged, open_run


def run(cfg, **options):
    """Train and return (the run, what was printed)."""
    output = io.StringIO()
    outcome = run_training(cfg, Console(file=output, width=200), **options)
    return open_run(outcome.folder), output.getvalue()


def tokens(the_run, step):
    return [row.tolist() for row in Ragged.from_arrow(the_run.step(step).table("rollouts")["response_ids"])]


def digest(the_run, step):
    return the_run.step(step).table("updates")["weights_digest"].to_pylist()[-1]
