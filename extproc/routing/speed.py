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

`extproc.routing.tally` compares the counts. Engines that don't tell teach nothing.
"""

from __future__ import annotations

from math import exp, inf, log

from extproc.routing.tally import Interval, Tally

#: The speed stays within this factor of the prior.
MAX_FACTOR = 8.0

#: Share of the error that one interval of many requests corrects, and the requests that make it half.
GAIN = 0.2
HALF_REQUESTS = 8.0

#: Most that one interval changes the logarithm of the speed.
MAX_STEP = 0.1

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

    __slots__ = ("_times_s", "log_factor", "overhead_s", "prior_s_per_token")

    def __init__(self, prior_s_per_token: float) -> None:
        self.prior_s_per_token = prior_s_per_token
        self.log_factor = 0.0
        self.overhead_s = 0.0
        self._times_s = Tally()  # to the first token, as foretold and as told

    @property
    def s_per_token(self) -> float:
        """Seconds that an uncached prompt token takes."""
        return self.prior_s_per_token * exp(-self.log_factor)

    def ended(self, foretold_s: float) -> None:
        """A request ended that should have had its first token ``foretold_s`` after its decision."""
        self._times_s.ended(foretold_s)

    def told(self, requests: float | None, waited_s: float | None) -> bool:
        """What the engine counts since its start: ended requests, their times to the first token in sum.

        None: it doesn't say. Returns whether something was learned.
        """
        times_s = self._times_s.told(requests, waited_s)
        if times_s is None:
            return False
        self._step(times_s)
        return True

    def _step(self, times_s: Interval) -> None:
        foretold_s, count = times_s.own_mean, times_s.requests
        error_s = times_s.told_mean - self.overhead_s - foretold_s
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
