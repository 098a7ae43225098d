"""How long work takes on a device, within a time limit for all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.gpu_model import Sizes

LIMIT_S = 480.0

Work = Callable[[int], tuple[int, float]]
"""Does work of a size; returns its tokens, and its operations where they are counted."""


@dataclass(frozen=True)
class Options:
    """What is measured, and for how long.

    Attributes:
        sizes: model and batch.
        device: where.
        layouts: names in LAYOUTS.
        repeats: most runs of a stage.
        peak: the device's greatest rate, 10^12 operations a second; None: not known.
        recompute: gradient checkpointing.
        limit_s: time for everything, seconds.
    """

    sizes: Sizes
    device: torch.device
    layouts: Sequence[str] = ("shared", "packed")
    repeats: int = 5
    peak: float | None = None
    recompute: bool = False
    limit_s: float = LIMIT_S


class Clock:
    """Times work on a device: warm-up first, then as many runs as the time allows."""

    def __init__(self, options: Options, stages: int) -> None:
        self.options, self.stages_left, self.started = options, stages, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def measure(self, work: Work, most: int) -> tuple[float, int, int, float]:
        """Warm up on an eighth of the work, then time all of it.

        Where even one run would take longer than the stage's share of the time, the work is halved until it fits.

        Args:
            work: takes a size that its time is about proportional to.
            most: greatest size.

        Returns:
            (median seconds of a run, runs, tokens and operations of one)
        """
        small = max(most // 8, 1)
        work(small)
        expected = self.timed(work, small)[0] * most / small
        # A tenth is kept for what takes longer than expected.
        may_take = (0.9 * self.options.limit_s - self.elapsed_s) / max(self.stages_left, 1)
        size = most
        while size > small and 2 * expected > may_take:
            size, expected = size // 2, expected / 2
        runs = int(min(max(may_take / max(expected, 1e-9) - 1, 1), self.options.repeats))
        if runs > 1:
            work(size)
        if self.options.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.options.device)
        results = [self.timed(work, size) for _ in range(runs)]
        return median(seconds for seconds, _, _ in results), runs, *results[-1][1:]

    def timed(self, work: Work, size: int) -> tuple[float, int, float]:
        """Seconds until the device has done everything, and what the work returned."""
        self._wait()
        start = time.perf_counter()
        result = work(size)
        self._wait()
        return time.perf_counter() - start, *result

    def _wait(self) -> None:
        """Let the device finish: calls on CUDA return before their work is done."""
        if self.options.device.type == "cuda":
            torch.cuda.synchronize(self.options.device)
