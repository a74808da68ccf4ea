"""The last hour, in steps of `HISTORY_STEP_S`: arrays that are written around in a circle.

All series of a router share one circle, so that a point's place says its time. A worker's series take
20 KiB (7 x 360 x 8 bytes), 128 workers 2.6 MB, and no more as time goes by. Not a number is unknown; JSON has
null for it.
"""

from __future__ import annotations

from array import array
from math import nan

from extproc.live.status import HISTORY_POINTS, Series
from extproc.live.window import Counts, ttft

_UNKNOWN = array("d", [nan]) * HISTORY_POINTS

#: The names of `Series`, in its order.
FIELDS = Series.__struct_fields__


class Circle:
    """Which place is whose time."""

    def __init__(self) -> None:
        self.ends_s = array("d", _UNKNOWN)  # by the monotonic clock
        self.steps = 0

    @property
    def place(self) -> int:
        """Where the current step will be written."""
        return self.steps % HISTORY_POINTS

    def advance(self, now: float) -> None:
        """The step is written."""
        self.ends_s[self.place] = now
        self.steps += 1

    def points(self, since_s: float | None = None) -> int:
        """How many there are, or those of them that ended after ``since_s``."""
        points = min(self.steps, HISTORY_POINTS)
        if since_s is None:
            return points
        return sum(1 for end_s in self.ends_s[:points] if end_s > since_s)

    def ends(self, points: int) -> list[float]:
        """When the latest of them ended, oldest first."""
        return [end_s for end_s in self.in_order(self.ends_s, points) if end_s is not None]

    def in_order(self, series: array[float], points: int) -> list[float | None]:
        """The latest of them, oldest first."""
        ordered = series[self.place :] + series[: self.place]
        return list(ordered[HISTORY_POINTS - points :])


class Track:
    """The series of one pool or worker. ``last_step``: the last one that it was there."""

    __slots__ = ("in_flight", "last_step", "pending_prefill_tokens", "series", "ticks")

    def __init__(self) -> None:
        self.series = tuple(array("d", _UNKNOWN) for _ in FIELDS)
        self.last_step = 0
        self.in_flight = 0.0  # summed up over the ticks of the running step
        self.pending_prefill_tokens = 0.0
        self.ticks = 0

    def sample(self, in_flight: float, pending_prefill_tokens: float) -> None:
        """The gauges at a tick; a point is their mean."""
        self.in_flight += in_flight
        self.pending_prefill_tokens += pending_prefill_tokens
        self.ticks += 1

    def write(self, place: int, counts: Counts, seconds: float) -> None:
        """What happened in the step that ends now."""
        times = ttft(counts.ttft)
        ticks = self.ticks or nan
        point = (
            round(counts.decisions / seconds, 2),
            nan if counts.hit_ratio is None else round(counts.hit_ratio, 4),
            times.p50_ms if times else nan,
            times.p99_ms if times else nan,
            round(self.in_flight / ticks, 2),
            round(self.pending_prefill_tokens / ticks, 0),
            round(counts.refused / seconds, 2),
        )
        for series, value in zip(self.series, point, strict=True):
            series[place] = value
        self.in_flight = self.pending_prefill_tokens = 0.0
        self.ticks = 0

    def skip(self, place: int) -> None:
        """It wasn't there."""
        for series in self.series:
            series[place] = nan

    def told(self, circle: Circle, points: int) -> Series:
        """As it is told."""
        return Series(*[circle.in_order(series, points) for series in self.series])


def expired(last_step: int, circle: Circle) -> bool:
    """Whether what was last there in this step has left the hour."""
    return circle.steps - last_step >= HISTORY_POINTS
