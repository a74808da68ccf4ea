"""Whether a worker gets new prompts: a state machine for each, fed by what is seen and by probes.

::

    healthy ──failure──▶ ejected ──back-off over, or proof of life──▶ returning ──in time──▶ healthy
                            ▲                                            │
                            └───────────── any failure ──────────────────┘
    any state ──"not ready" (503) from its health page──▶ not ready ──ready again──▶ returning

Evidence and what it is worth:

- **Refused** by its port: nobody is there. Ejected at once; its cache is gone, too. A probe that gets
  through ends it.
- **Silent**: requests that want a stream wait for response headers, which vLLM sends at once, and nothing
  at all was heard from the worker for ``silence_s``. Ejected at once; headers end it. Its health page may
  well say 200, so that ends nothing.
- **Unresponsive**: the health page doesn't answer in time, twice, and no request was answered meanwhile.
- **Unreached**: Envoy's retry was served by another worker, or the worker said 503 (its queue is full).
  Which of them can't be seen, so this is a sign of overload, not of death: after three in a row the worker
  is avoided for a short time that never grows long. A probe is asked for at the first one.
- **Error**: five other 5xx in a row.
- **Slow**: its engine makes far fewer tokens than usual, and the others' don't (`extproc.routing.pace`).
  Out for at least three readings of its metrics; one that says that it is well again ends it.

A request that fails everywhere is blamed on the request, and a client that goes away on nobody; both are
the caller's part (`extproc.routing.pool`).

Each ejection lasts twice as long as the one before, from ``eject_s`` to ``eject_max_s``; each
``eject_max_s`` of health takes one doubling back. A worker that returns gets one request; when that was
answered, a share of the pool's mean in flight that grows from nothing to all of it within ``return_s``.

Pure: no clock, no I/O. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from extproc.fleet.config import PoolSettings
from extproc.routing.patience import Patience

#: Unreached in a row until a worker is avoided.
UNREACHED_LIMIT = 3

#: Errors in a row until a worker is ejected; one request's fault is not the worker's.
ERROR_LIMIT = 5

#: Probes without an answer in a row until a worker is ejected.
UNRESPONSIVE_LIMIT = 2

#: A slow worker is out for at least so many readings of its metrics: one for luck, and two to be well.
SLOW_READINGS = 3.0

#: An overloaded worker is avoided for at most so many times ``eject_s``.
AVOIDANCE_GROWTH = 4.0


class State(StrEnum):
    """Where a worker stands; the value is the label in metrics and logs."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    NOT_READY = "not_ready"
    RETURNING = "returning"


class Cause(StrEnum):
    """Why a worker was ejected; the value is the label in metrics and logs."""

    REFUSED = "refused"
    SILENT = "silent"
    UNRESPONSIVE = "unresponsive"
    UNREACHED = "unreached"
    ERROR = "error"
    SLOW = "slow"
    NOT_READY = "not_ready"


class Probe(StrEnum):
    """What a worker's health page said."""

    READY = "ready"
    NOT_READY = "not_ready"  #: 503
    REFUSED = "refused"  #: nobody listens
    NO_ANSWER = "no_answer"  #: not in time, or the connection broke
    UNKNOWN = "unknown"  #: an answer that says nothing of health, 404 for one


_LIMITS = {
    Cause.REFUSED: 1,
    Cause.SILENT: 1,
    Cause.UNRESPONSIVE: UNRESPONSIVE_LIMIT,
    Cause.UNREACHED: UNREACHED_LIMIT,
    Cause.ERROR: ERROR_LIMIT,
    Cause.SLOW: 1,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of state. ``cause``: of what begins or ends; ``for_s``: how long an ejection lasts at most."""

    before: State
    after: State
    cause: Cause | None = None
    for_s: float = 0.0


class Health:
    """One worker's health. Methods that may change its state return the change, or None."""

    __slots__ = (
        "_asked_s",
        "_cause",
        "_changed_s",
        "_failures",
        "_heard_s",
        "_level",
        "_proven",
        "_settings",
        "_unanswered",
        "_until_s",
        "patience",
        "state",
        "trials",
    )

    def __init__(self, settings: PoolSettings) -> None:
        self.state = State.HEALTHY
        self.trials = 0  # requests sent since it returned, not answered yet
        self.patience = Patience()  # the pool's, which replaces this one
        self._settings = settings
        self._failures: dict[Cause, int] = {}  # in a row
        self._unanswered = 0  # requests for a stream that wait for headers
        self._asked_s = 0.0  # since when some do
        self._heard_s = float("-inf")  # last response headers
        self._cause: Cause | None = None
        self._changed_s = 0.0  # last change of state
        self._until_s = 0.0  # end of the ejection
        self._level = 0.0  # doublings of the back-off
        self._proven = True  # it has answered since it returned

    def configure(self, settings: PoolSettings) -> None:
        """Follow the pool's settings."""
        self._settings = settings

    @property
    def heard_s(self) -> float:
        """When it last sent response headers."""
        return self._heard_s

    @property
    def waiting(self) -> int:
        """Requests for a stream that wait for headers."""
        return self._unanswered

    # --- what the pool asks ----------------------------------------------------------------------

    @property
    def out(self) -> bool:
        """Whether it gets no new prompts at all. Call `advance` first."""
        return self.state is State.EJECTED or self.state is State.NOT_READY

    def has_room(self, in_flight: int, mean_in_flight: float, now: float) -> bool:
        """Whether a worker that returns may have one more. ``mean_in_flight``: over the whole pool."""
        if self.state is not State.RETURNING:
            return True
        if not self._proven:
            return self.trials == 0
        share = (now - self._changed_s) / max(self._settings.return_s, 1e-9)
        return in_flight < max(1.0, share * mean_in_flight)

    @property
    def header_timeout_s(self) -> float:
        """Bound on a stream's wait for headers; a trial is not worth as much waiting. 0: none."""
        bound_s = self.patience.header_timeout_s(self._settings.header_timeout_s)
        if self.state is State.RETURNING and not self._proven and self._settings.silence_s:
            return min(bound_s, self._settings.silence_s)
        return bound_s

    # --- requests --------------------------------------------------------------------------------

    def sent(self, now: float, *, stream: bool) -> None:
        """A request goes there; with ``stream`` its headers are due at once."""
        self.trials += 1
        if stream:
            if not self._unanswered:
                self._asked_s = now
            self._unanswered += 1

    def settled(self, *, stream: bool) -> None:
        """That request waits no longer: answered, moved or given up."""
        self.trials = max(0, self.trials - 1)
        if stream:
            self._unanswered = max(0, self._unanswered - 1)

    def answered(self, status: int, now: float) -> Change | None:
        """Response headers came from it."""
        self._heard_s = now
        self._failures.pop(Cause.UNRESPONSIVE, None)
        if status >= 500:
            # 504 is Envoy's, for a route's timeout; an engine has no such answer.
            cause = {503: Cause.UNREACHED, 504: None}.get(status, Cause.ERROR)
            return self.failed(cause, now) if cause else None
        self._failures.clear()
        self._proven = True
        if self.state is State.EJECTED and self._cause is Cause.SILENT:
            return self._return(now)
        return None

    def failed(self, cause: Cause, now: float) -> Change | None:
        """One piece of evidence against it."""
        count = self._failures[cause] = self._failures.get(cause, 0) + 1
        if self.state is State.RETURNING or count >= _LIMITS[cause]:
            return self._eject(cause, now)
        return None

    def paced(self, *, slow: bool, now: float) -> Change | None:
        """Its engine's counters say how fast it is: slow, or well."""
        if slow:
            return self.failed(Cause.SLOW, now)
        if self.state is State.EJECTED and self._cause is Cause.SLOW:
            return self._return(now)
        return None

    # --- probes ----------------------------------------------------------------------------------

    def probed(self, probe: Probe, asked_s: float, now: float) -> Change | None:
        """What came of a probe that began at ``asked_s``."""
        match probe:
            case Probe.READY:
                return self._ready(now)
            case Probe.NOT_READY:
                if self.state is State.NOT_READY:
                    return None
                return self._become(State.NOT_READY, now, Cause.NOT_READY)
            case Probe.REFUSED:
                return self.failed(Cause.REFUSED, now)
            case Probe.NO_ANSWER if self._heard_s < asked_s:
                return self.failed(Cause.UNRESPONSIVE, now)
        return None

    def _ready(self, now: float) -> Change | None:
        self._failures.pop(Cause.UNRESPONSIVE, None)
        self._failures.pop(Cause.REFUSED, None)
        if self.state is State.NOT_READY:
            return self._return(now)
        if self.state is State.EJECTED and self._cause in (Cause.REFUSED, Cause.UNRESPONSIVE):
            return self._return(now)
        return None

    def restarted(self, now: float) -> Change | None:
        """A new engine owes nothing for the old one's failures."""
        self._level = 0.0
        self._failures.clear()
        return self._return(now) if self.state is State.EJECTED else None

    # --- time ------------------------------------------------------------------------------------

    def advance(self, now: float) -> Change | None:
        """What time alone changes: the end of an ejection, the end of a slow return."""
        if self.state is State.EJECTED and now >= self._until_s:
            return self._return(now)
        if self.state is State.RETURNING and now - self._changed_s >= self._settings.return_s:
            return self._become(State.HEALTHY, now)
        return None

    def listen(self, now: float) -> Change | None:
        """Eject it if it is silent though asked."""
        bound_s = self._settings.silence_s
        if self._proven:  # a new engine's first headers may take longer
            bound_s = self.patience.silence_s(bound_s)
        if not bound_s or not self._unanswered or self.out:
            return None
        if now - max(self._asked_s, self._heard_s, self._changed_s) > bound_s:
            return self.failed(Cause.SILENT, now)
        return None

    # --- changes ---------------------------------------------------------------------------------

    def _eject(self, cause: Cause, now: float) -> Change | None:
        settings = self._settings
        if self.state is State.EJECTED:
            if cause is Cause.REFUSED:  # stronger than what it was ejected for; a probe will end it
                self._cause = cause
                self._until_s = max(self._until_s, now + settings.eject_s)
            return None
        if self.state is State.NOT_READY and cause is not Cause.REFUSED:
            return None
        if self.state is State.HEALTHY:
            self._level = max(0.0, self._level - (now - self._changed_s) / settings.eject_max_s)
        longest_s = settings.eject_max_s
        if cause is Cause.UNREACHED:
            longest_s = min(longest_s, AVOIDANCE_GROWTH * settings.eject_s)
        for_s = settings.eject_s * 2.0 ** min(self._level, 30.0)
        if cause is Cause.SLOW:
            for_s = max(for_s, SLOW_READINGS * settings.scrape_interval_s)
        for_s = min(longest_s, for_s)
        self._level = min(self._level + 1.0, 30.0)
        self._until_s = now + for_s
        return self._become(State.EJECTED, now, cause, for_s)

    def _return(self, now: float) -> Change:
        self._failures.clear()
        self._proven = False
        self.trials = 0
        return self._become(State.RETURNING, now, self._cause)

    def _become(self, state: State, now: float, cause: Cause | None = None, for_s: float = 0.0) -> Change:
        change = Change(self.state, state, cause, for_s)
        self.state, self._cause, self._changed_s = state, cause, now
        return change


class HasHealth(Protocol):
    """Whatever has a health."""

    health: Health


W = TypeVar("W", bound=HasHealth)


def usable(workers: Sequence[W], max_ejected_share: float) -> tuple[Sequence[W], bool]:
    """Those that may get new prompts, and whether that is all of them for want of better (panic).

    When more than ``max_ejected_share`` of a pool is out, the evidence is doubtful or the rest would drown:
    everyone counts as healthy then. Call `Health.advance` first.
    """
    well = [worker for worker in workers if not worker.health.out]
    out = len(workers) - len(well)
    if out and (not well or out > max_ejected_share * len(workers)):
        return workers, True
    return well, False
