"""What is known of each engine, and how old that is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from extproc.engine.report import EngineReport
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

#: A reading older than so many intervals says nothing of the present.
STALE_INTERVALS = 3.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known of one engine. Times are the event loop's clock, `time.monotonic`.

    ``report``: the last reading, taken at ``at_s``; ``previous`` and ``previous_s`` the one before, from the
    same life of the engine. ``failures``: attempts in a row that brought nothing since then.
    """

    report: EngineReport | None = None
    at_s: float = 0.0
    previous: EngineReport | None = None
    previous_s: float = 0.0
    failures: int = 0

    def age_s(self, now: float) -> float | None:
        """Age of the last reading; None if there never was one."""
        return None if self.report is None else max(0.0, now - self.at_s)

    def current(self, now: float, interval_s: float) -> EngineReport | None:
        """The last reading if it is recent enough to speak of the present."""
        return self.report if now - self.at_s <= STALE_INTERVALS * interval_s else None


@dataclass(slots=True, eq=False)
class Target:
    """A worker that is followed. ``learns_size``: the YAML leaves the cache's size to the engine."""

    pool: Pool
    worker: Worker
    learns_size: bool = True
    state: EngineState = field(default_factory=EngineState)
    task: asyncio.Task[None] | None = None
