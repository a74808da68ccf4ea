"""One reading of an engine's ``/metrics``, and what two readings tell together.

Everything is None where the page had no such series or an unusable value: unknown is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Counters that only grow while the engine lives.
_COUNTERS = (
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "queue_s",
    "prefill_s",
    "prefills",
    "ttft_s",
    "first_tokens",
    "ended_requests",
    "ended_prompt_tokens",
)

#: A process's start is told in seconds since 1970, in floating point.
SAME_START_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine told at one moment; several ranks (data parallel) are summed, ``kv_usage`` is averaged.

    ``engine``: whose names the page had; None: it is no engine's page. ``ranks``: schedulers behind it.
    ``cache_tokens``: all ranks together; a prefix is in the cache of one of them.
    ``kv_usage``: share of the KV cache that running requests use, 0 to 1.
    ``hit_ratio``: SGLang's own gauge; see `hit_ratio` for one made of counters.

    Counters since the engine's start: ``prefix_query_tokens`` and ``prefix_hit_tokens`` (looked up, found);
    ``prompt_tokens`` (prefilled, hits included); ``prefills`` (requests that ended), which waited
    ``queue_s`` in sum, then took ``prefill_s`` to the first token, for which ``prefilled_tokens`` were
    computed; ``first_tokens`` came after ``ttft_s`` in sum, reading the request included; ``ttft_buckets``
    are pairs of a bound (s, rising, the last infinite) and how many came within it.
    ``ended_requests`` had ``ended_prompt_tokens`` in sum, hits included.
    ``started_s``: start of the process, seconds since 1970.
    """

    engine: Literal["vllm", "sglang"] | None = None
    ranks: int = 0
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    hit_ratio: float | None = None
    cache_tokens: int | None = None
    block_tokens: int | None = None
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    prefills: float | None = None
    prefilled_tokens: float | None = None
    ttft_s: float | None = None
    first_tokens: float | None = None
    ttft_buckets: tuple[tuple[float, float], ...] | None = None
    ended_requests: float | None = None
    ended_prompt_tokens: float | None = None
    started_s: float | None = None


def restarted(previous: EngineReport, current: EngineReport) -> bool:
    """Whether the engine started anew between two readings.

    Its process has another start, its cache another size, or a counter went back. The last serves engines
    whose metrics come from several processes: they don't tell a start.
    """
    if differ(previous.started_s, current.started_s, SAME_START_S):
        return True
    if differ(previous.cache_tokens, current.cache_tokens, 0.0):
        return True
    return any(_went_back(getattr(previous, name), getattr(current, name)) for name in _COUNTERS)


def hit_ratio(previous: EngineReport | None, current: EngineReport) -> float | None:
    """Share of looked-up prompt tokens that were cached, between two readings; None when nothing was.

    Without an earlier reading, or after a restart: since the engine's start. SGLang's own gauge serves where
    the counters are missing.
    """
    queries, hits = current.prefix_query_tokens, current.prefix_hit_tokens
    if queries is None or hits is None:
        return current.hit_ratio
    if previous is not None and not restarted(previous, current):
        queries -= previous.prefix_query_tokens or 0.0
        hits -= previous.prefix_hit_tokens or 0.0
    return min(1.0, hits / queries) if queries > 0 else None


def grown(previous: EngineReport, current: EngineReport, counter: str) -> float | None:
    """How much a counter grew between two readings of one life; None if that can't be told."""
    before, after = getattr(previous, counter), getattr(current, counter)
    return None if before is None or after is None or after < before else after - before


def first_tokens_by_bound(previous: EngineReport, current: EngineReport) -> dict[float, float] | None:
    """First tokens between two readings, in each bucket alone, by its bound (s); None if it can't be told."""
    before, after = previous.ttft_buckets, current.ttft_buckets
    if before is None or after is None or [bound for bound, _ in before] != [bound for bound, _ in after]:
        return None
    counts, below = {}, 0.0
    for (bound, earlier), (_, later) in zip(before, after, strict=True):
        counts[bound] = later - earlier - below
        below = later - earlier
    return counts if min(counts.values()) >= 0.0 else None


def differ(before: float | None, after: float | None, tolerance: float) -> bool:
    """Whether both are known and further apart than ``tolerance``."""
    return before is not None and after is not None and abs(after - before) > tolerance


def _went_back(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
