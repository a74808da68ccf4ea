"""How fast a worker prefills, learned from how long its engine took.

No counter of an engine says it: requests that share a step each count all of its time. But engines tell, of
the requests that ended, how many they were and how long they waited and prefilled in sum (vLLM's
``request_queue_time_seconds`` and ``request_prefill_time_seconds``), and the router's fluid queue
(`extproc.routing.load`) foretold the same for each of them. Between two readings

    mean time told = overhead + mean time foretold * (speed believed / speed)

Both unknowns follow by least squares, a small step at a time (a Kalman filter of constant gain): the error
is laid on each in proportion to what it may contribute. Requests whose prompts were cached, for which next
to nothing was foretold, so tell the overhead of a step and nothing of the speed; long queues tell the speed.
A queue that is foretold with a speed too low grows beyond the true one, so the step is right in its
direction and its size is bounded, as is the whole.

An engine whose count differs from ours has other clients, or a router that we don't hear of: that interval
teaches nothing. Neither do engines that don't tell.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log

#: The speed stays within this factor of the prior.
MAX_FACTOR = 8.0

#: Share of the error that one interval of many requests corrects, and the requests that make it half.
GAIN = 0.2
HALF_REQUESTS = 8.0

#: Most that one interval changes the logarithm of the speed.
MAX_STEP = 0.1

#: An interval with fewer requests is joined with the next one.
MIN_REQUESTS = 4.0

#: Ours and the engine's count may differ by this share, or by this many.
FOREIGN_SHARE = 0.1
FOREIGN_REQUESTS = 2.0

#: How far off, about, the overhead and the logarithm of the speed may be.
OVERHEAD_SD_S = 0.05
SPEED_SD = 0.3

#: Bound on the overhead.
MAX_OVERHEAD_S = 0.3

#: Share of a worker's distance to the pool's mean that it gives up at each step.
SHRINK = 0.1


class Speed:
    """One worker's speed.

    ``log_factor``: logarithm of the speed over the prior. ``overhead_s``: what each request takes besides.
    """

    __slots__ = (
        "_engine",
        "_foretold_s",
        "_own",
        "_own_before",
        "log_factor",
        "overhead_s",
        "prior_s_per_token",
    )

    def __init__(self, prior_s_per_token: float) -> None:
        self.prior_s_per_token = prior_s_per_token
        self.log_factor = 0.0
        self.overhead_s = 0.0
        self._own = 0  # requests that ended
        self._foretold_s = 0.0  # their times, as foretold, in sum
        self._engine: tuple[float, float] | None = None  # count and sum at the last reading that was used
        self._own_before = (0, 0.0)  # ours, then

    @property
    def s_per_token(self) -> float:
        """Seconds that an uncached prompt token takes."""
        return self.prior_s_per_token * exp(-self.log_factor)

    def ended(self, foretold_s: float) -> None:
        """A request ended that should have had its first token ``foretold_s`` after its decision."""
        self._own += 1
        self._foretold_s += foretold_s

    def told(self, requests: float | None, waited_s: float | None) -> bool:
        """What the engine counts since its start: ended requests, their times to the first token in sum.

        None: it doesn't say. Returns whether something was learned.
        """
        before, own_before = self._engine, self._own_before
        if requests is None or waited_s is None or not (isfinite(requests) and isfinite(waited_s)):
            self._engine = None
            return False
        if before is not None and 0.0 <= requests - before[0] < MIN_REQUESTS and waited_s >= before[1]:
            return False
        self._engine = (requests, waited_s)
        self._own_before = (self._own, self._foretold_s)
        if before is None or requests < before[0] or waited_s < before[1]:
            return False  # the first reading of this engine's life
        count, own = requests - before[0], self._own - own_before[0]
        if abs(count - own) > max(FOREIGN_REQUESTS, FOREIGN_SHARE * count) or not own:
            return False
        self._step((waited_s - before[1]) / count, (self._foretold_s - own_before[1]) / own, count)
        return True

    def _step(self, told_s: float, foretold_s: float, count: float) -> None:
        error_s = told_s - self.overhead_s - foretold_s
        share_s = SPEED_SD * foretold_s
        gain = GAIN * count / (count + HALF_REQUESTS) / (OVERHEAD_SD_S**2 + share_s**2)
        slower = gain * error_s * share_s * SPEED_SD
        self.log_factor = _bounded(self.log_factor - _bounded(slower, MAX_STEP), log(MAX_FACTOR))
        overhead_s = self.overhead_s + gain * error_s * OVERHEAD_SD_S**2
        self.overhead_s = min(max(0.0, overhead_s), MAX_OVERHEAD_S)

    def log_factor_at(self, s_per_token: float) -> float:
        """What `log_factor` is at this speed, within its bounds; as it is now if that is no speed."""
        if not 0.0 < s_per_token < inf:
            return self.log_factor
        return _bounded(log(self.prior_s_per_token / s_per_token), log(MAX_FACTOR))


def _bounded(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))
