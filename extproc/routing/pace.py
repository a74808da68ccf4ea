"""Whether a worker has become slow: how fast it decodes, against what is usual there and what others do.

Overheated, throttled or squeezed by a neighbour, a GPU answers as politely as ever and takes ten times as
long. Nothing that the router sees of a request tells: headers come at once, and ends are late by as much as
the outputs are long. But engines count the tokens that they generate. Between two readings of that counter,

- each request in flight gets so many tokens a second (its *rate*), and
- the worker makes so many in all (its *throughput*),

both counted only while no prefill is due by the router's account, since prefilling stops decoding. A slow
worker falls behind in both. Larger batches lower the rate and raise the throughput, an idle worker has little
throughput at a high rate, and a fleet whose load changes does so everywhere; so what counts is that both are
low at once, and more so than elsewhere in the pool (`extproc.routing.pool.Pool.decoded`).

What is usual is learned, slowly, also from what is slow: what lasts becomes usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, isfinite, log
from statistics import median

#: A worker is slow when its requests get so many times fewer tokens than usual, compared with the others ...
SLOW_FACTOR = 4.0

#: ... and it makes so many times fewer in all.
LOW_FACTOR = 2.0

#: It is well again below this.
WELL_FACTOR = 2.0

#: Readings to learn from before anything is judged, and the share of the distance that later ones go.
LEAST_READINGS = 5
GAIN = 0.1

#: The same, of a reading that is far from what is usual: that takes ten minutes or so to become it.
SLOW_GAIN = 0.02

#: What a reading must stand on: seconds of decoding, and tokens that would be usual in that time.
LEAST_S = 1.5
LEAST_TOKENS = 100.0

#: With so much of its KV cache in use an engine lets requests wait, or computes them twice, and isn't slow.
FULL_KV = 0.85

#: A judgement says nothing of others any more after this long.
FRESH_S = 60.0


class Pace:
    """One worker's decoding. Times are monotonic seconds."""

    __slots__ = (
        "_decoding_s",
        "_flight_s",
        "_rate",
        "_readings",
        "_throughput",
        "_tokens",
        "at_s",
        "slowness",
    )

    def __init__(self) -> None:
        self.slowness = 1.0  # by the last reading that could be judged
        self.at_s = float("-inf")  # when that was
        self._tokens: float | None = None  # the engine's count at the last reading
        self._decoding_s = 0.0  # since then, with requests in flight and no prefill due
        self._flight_s = 0.0  # the same, times the requests
        self._readings = 0
        self._rate = 0.0  # usual, logarithms of tokens a second
        self._throughput = 0.0

    def observe(self, in_flight: int, seconds: float) -> None:
        """So many requests were in flight for so long, with no prefill due."""
        if in_flight:
            self._decoding_s += seconds
            self._flight_s += in_flight * seconds

    def told(self, tokens: float | None, others: float, now: float) -> tuple[float, float] | None:
        """The engine's count of generated tokens; None: it doesn't say.

        ``others``: how many times slower than usual the rest of the pool is. Returns by how many times fewer
        tokens than usual were generated, for each request and in all, or None: there is nothing to judge.
        """
        before, decoding_s, flight_s = self._tokens, self._decoding_s, self._flight_s
        if tokens is None or not isfinite(tokens):
            self._begin(None)
            return None
        if before is None or tokens < before:
            self._begin(tokens)
            return None
        if decoding_s < LEAST_S:
            return None  # this interval goes on
        self._begin(tokens)
        made = tokens - before + 1.0
        rate, throughput = log(made / flight_s), log(made / decoding_s)
        slower, less = _times(self._rate - rate), _times(self._throughput - throughput)
        known = self._readings >= LEAST_READINGS
        if max(made, exp(self._rate) * flight_s) < LEAST_TOKENS:
            return None
        self._readings += 1
        gain = max(1.0 / self._readings, GAIN)
        if known and not slower < WELL_FACTOR * others:
            gain = SLOW_GAIN
        self._rate += gain * (rate - self._rate)
        self._throughput += gain * (throughput - self._throughput)
        if not known:
            return None
        self.slowness, self.at_s = slower, now
        return slower, less

    def _begin(self, tokens: float | None) -> None:
        self._tokens = tokens
        self._decoding_s = self._flight_s = 0.0


def _times(log_factor: float) -> float:
    return exp(min(log_factor, 50.0))


def common_slowness(paces: Iterable[Pace], now: float) -> float:
    """How many times slower than usual they are, by the middle one; 1 without fresh readings of two."""
    fresh = [pace.slowness for pace in paces if now - pace.at_s <= FRESH_S]
    return max(1.0, median(fresh)) if len(fresh) >= 2 else 1.0
