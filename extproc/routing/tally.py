"""What we and an engine each count of the requests that ended at a worker, compared interval by interval.

An engine tells, since its start, how many requests ended and how much of something they had in sum. We keep
the same of our own. Between two readings the means can be compared, if both speak of the same requests: where
the counts differ, the engine has other clients, or a router that we don't hear of, and nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

#: The engine's and our count of requests may differ by this share, or by this many.
FOREIGN_SHARE = 0.1
FOREIGN_REQUESTS = 2.0

#: An interval with fewer requests is joined with the next one.
MIN_REQUESTS = 4.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Requests that ended between two readings: how many the engine counts, and the two means of each."""

    requests: float
    told_mean: float
    own_mean: float


class Tally:
    """One worker's counts of one quantity."""

    __slots__ = ("_engine", "_own", "_own_before")

    def __init__(self) -> None:
        self._own = (0, 0.0)  # requests that ended, their amounts in sum
        self._own_before = (0, 0.0)
        self._engine: tuple[float, float] | None = None  # the same as told, at the last reading that was used

    def ended(self, amount: float) -> None:
        """A request ended there; it had so much, as we think."""
        self._own = (self._own[0] + 1, self._own[1] + amount)

    def told(self, requests: float | None, amount: float | None) -> Interval | None:
        """What the engine counts since its start; None: it doesn't say.

        Returns the interval that this closes, or None when there is nothing to learn.
        """
        before, own_before = self._engine, self._own_before
        if requests is None or amount is None or not (isfinite(requests) and isfinite(amount)):
            self._engine = None
            return None
        if before is not None and 0.0 <= requests - before[0] < MIN_REQUESTS and amount >= before[1]:
            return None
        self._engine, self._own_before = (requests, amount), self._own
        if before is None or requests < before[0] or amount < before[1]:
            return None  # the first reading of this engine's life
        count, own = requests - before[0], self._own[0] - own_before[0]
        if not own or abs(count - own) > max(FOREIGN_REQUESTS, FOREIGN_SHARE * count):
            return None
        return Interval(count, (amount - before[1]) / count, (self._own[1] - own_before[1]) / own)
