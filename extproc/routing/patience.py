"""How long to wait for a stream's headers: no longer than headers ever took of late, many times over.

Engines send the headers of a stream before its work, within milliseconds on most machines. A bound of
seconds, which no healthy but busy server exceeds, makes every request that meets a hanging worker wait those
seconds, and lets others follow meanwhile. So the configured bounds are for the beginning and for slow
machines, and shrink to multiples of the slowest headers of the last minutes, less a few: a worker that hangs
and recovers, or is stopped for a moment, sends some that say nothing of the others.

If two workers in a row exceed the bound, it is wrong, not they: it goes back to what is configured.
"""

from __future__ import annotations

from heapq import heappushpop

#: The bounds, in multiples of the slowest headers, and the least that they shrink to.
HEADER_FACTOR, LEAST_HEADER_S = 8.0, 1.0
SILENCE_FACTOR, LEAST_SILENCE_S = 4.0, 0.5

#: So many headers may be slower.
SPARED = 4

#: Headers are remembered for one to two such periods.
PERIOD_S = 120.0

#: Without so many of them the bounds are as configured.
LEAST_COUNT = 50


class _Period:
    """How many headers came, and the slowest of them: a heap, the least slow first."""

    __slots__ = ("count", "slowest_s")

    def __init__(self) -> None:
        self.count = 0
        self.slowest_s = [0.0] * (SPARED + 1)


class Patience:
    """Of one pool. Times are monotonic seconds."""

    __slots__ = ("_before", "_began_s", "_now")

    def __init__(self) -> None:
        self._now = _Period()
        self._before = _Period()
        self._began_s = 0.0

    def came(self, after_s: float, now: float) -> None:
        """Headers came so long after the request's decision."""
        if now - self._began_s > PERIOD_S:
            self._before = self._now if now - self._began_s <= 2 * PERIOD_S else _Period()
            self._now, self._began_s = _Period(), now
        self._now.count += 1
        heappushpop(self._now.slowest_s, after_s)

    def too_short(self) -> None:
        """The bounds were: start from the beginning."""
        self._now, self._before = _Period(), _Period()

    def header_timeout_s(self, configured_s: float) -> float:
        """Bound on one stream's wait for headers; 0: none."""
        return self._shrunk(configured_s, HEADER_FACTOR, LEAST_HEADER_S)

    def silence_s(self, configured_s: float) -> float:
        """Bound on a worker's silence while streams wait for headers; 0: not watched."""
        return self._shrunk(configured_s, SILENCE_FACTOR, LEAST_SILENCE_S)

    def _shrunk(self, configured_s: float, factor: float, least_s: float) -> float:
        if self._now.count + self._before.count < LEAST_COUNT:
            return configured_s
        slow_s = max(self._now.slowest_s[0], self._before.slowest_s[0])
        return min(configured_s, max(least_s, factor * slow_s))
