"""Signs of life of ranks under Ray: that their processes answer, and that what they compute gets on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tasks.config import RayConfig


@dataclass(frozen=True)
class Silence:
    """Of a rank that is there and gives no sign of life.

    Attributes:
        seconds: for how long.
        answers: its process does; its computation does not get on.
    """

    seconds: float
    answers: bool


class Pulse:
    """Signs of life, asked for beside the ranks' work."""

    def __init__(self, actors: list[Any], limits: RayConfig) -> None:
        """Nothing is asked yet.

        Args:
            actors: the ranks' processes.
            limits: `rank_timeout_s` for answers. A rank that computes may wait for others: its computation has
                `collective_timeout_s` too, so that collectives fail first and tell by which rank they were let down.
        """
        self._actors, self._timeout_s = actors, limits.rank_timeout_s
        self._stuck_after_s = limits.collective_timeout_s + limits.rank_timeout_s
        self.every_s = min(2.0, self._timeout_s / 4)
        self._seen = [time.monotonic()] * len(actors)
        self._asked: dict[int, Any] = {}

    def lost(self) -> tuple[int, Exception | Silence] | None:
        """A rank that is gone, with what Ray says, or one that has been silent for too long."""
        import ray

        stuck: dict[int, float] = {}
        for rank, actor in enumerate(self._actors):
            asked = self._asked.get(rank)
            if asked is not None and ray.wait([asked], timeout=0)[0]:
                del self._asked[rank]
                try:
                    stuck[rank] = ray.get(asked) or 0.0
                except ray.exceptions.RayActorError as error:
                    return rank, error
                self._seen[rank] = time.monotonic()
            silent_s = time.monotonic() - self._seen[rank]
            if silent_s > self._timeout_s:
                return rank, Silence(silent_s, answers=False)
            if rank not in self._asked and silent_s > self.every_s:
                self._asked[rank] = actor.ping.remote()
        rank = max(stuck, key=lambda one: stuck[one], default=-1)
        return (rank, Silence(stuck[rank], answers=True)) if stuck.get(rank, 0.0) > self._stuck_after_s else None
