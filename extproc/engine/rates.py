"""How fast a worker prefills, as far as its counters tell.

vLLM counts the prompt tokens that it computed, P, and sums up each request's time from its admission to its
first token, S. It doesn't count the seconds in which it prefilled, B, which P would have to be divided by.
Requests that are prefilled at the same time each add to S, so with W the wall seconds between two readings:

    B <= S             equal if no two requests were ever in prefill together
    B <= W             equal if it never stopped prefilling

Both give speeds that are too low, never too high; the larger one is the better. The mean number of requests
in prefill, L = S / W, tells how good it is: at L = 0.1 hardly any two meet. If requests come independently of
each other (and nothing queues), some request is in prefill for B = W * (1 - exp(-L)), the busy time of
M/G/infinity, and that speed has hardly any bias; bursts break it, a queue makes it too high.

P and S are observed when a request *ends*, so they are of the same requests, but not of the time between
the readings: intervals should be long against a request. `docs/engine-signals.md` has the measured bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extproc.engine.report import EngineReport, restarted

#: Fewer ended requests than this between two readings say nothing.
MIN_PREFILLS = 8


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Uncached prompt tokens that one rank prefills in a second while it does.

    ``low``: at least. ``poisson``: if requests come independently. ``overlap``: mean number in prefill.
    """

    low: float
    poisson: float
    overlap: float


def prefill_rates(previous: EngineReport, current: EngineReport, interval_s: float) -> PrefillRate | None:
    """The speed between two readings ``interval_s`` apart; None when the counters don't tell.

    Engines without ``request_prefill_kv_computed_tokens`` (vLLM before 0.11, SGLang) don't.
    """
    tokens = _grown(previous.prefilled_tokens, current.prefilled_tokens)
    prefill_s = _grown(previous.prefill_s, current.prefill_s)
    count = _grown(previous.prefills, current.prefills)
    if tokens is None or prefill_s is None or count is None or restarted(previous, current):
        return None
    ranks = max(1, current.ranks)
    if tokens <= 0 or prefill_s <= 0 or count < MIN_PREFILLS * ranks or interval_s <= 0:
        return None
    wall_s = interval_s * ranks  # each rank prefills by itself
    overlap = prefill_s / wall_s
    low = max(tokens / prefill_s, _computed(previous, current) / wall_s)
    return PrefillRate(low, tokens / prefill_s * overlap / -math.expm1(-overlap), overlap)


def prefill_rate(previous: EngineReport, current: EngineReport, interval_s: float) -> float | None:
    """Uncached prompt tokens a second that one rank prefills while it does: a lower bound, see above."""
    rates = prefill_rates(previous, current, interval_s)
    return None if rates is None else rates.low


def _computed(previous: EngineReport, current: EngineReport) -> float:
    """Prompt tokens whose prefill ended between the readings, whether or not their requests did."""
    prompt = _grown(previous.prompt_tokens, current.prompt_tokens)
    hits = _grown(previous.prefix_hit_tokens, current.prefix_hit_tokens)
    return 0.0 if prompt is None or hits is None else max(0.0, prompt - hits)


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
