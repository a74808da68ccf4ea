"""What is known of a pool, put as it is told: the structs of `extproc.live.status` from records.

``seconds``: how long the windows are; ``unix_s``: Unix time of the monotonic clock's zero.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.live.engines import EngineView
from extproc.live.hottest import short_hash
from extproc.live.recorder import DecisionRecord, PoolRecord
from extproc.live.status import (
    MAX_PREFIXES,
    MAX_TENANTS,
    MOVES_S,
    DecisionStatus,
    MoveStatus,
    PrefixStatus,
    TenantStatus,
    WorkerStatus,
)
from extproc.live.window import Counts, ttft
from extproc.observe import events
from extproc.routing.load import Worker
from extproc.routing.pool import UNKNOWN_CACHE_TOKENS, Pool

#: A request's id comes from outside, and may be of any length.
ID_CHARS = 64


def worker(
    pool: Pool,
    worker: Worker,
    counts: Counts,
    age_s: float | None,
    engine: EngineView,
    seconds: float,
    now: float,
) -> WorkerStatus:
    """One worker. ``age_s``: of its engine's last reading."""
    report = engine.report
    used_tokens = 0.0
    if worker.slot >= 0:
        used_tokens = pool.picture.used_blocks(worker.slot) * pool.picture.block_tokens * pool.token_scale
    known = worker.cache_tokens != UNKNOWN_CACHE_TOKENS
    return WorkerStatus(
        address=worker.address,
        state=worker.health.state.value,
        in_flight=worker.in_flight,
        max_inflight=worker.max_inflight,
        pending_prefill_tokens=round(worker.pending_prefill_tokens(now)),
        prefill_tokens_per_s=round(1.0 / worker.prefill_s_per_token, 1),
        requests_per_s=rate(counts.decisions, seconds),
        prompt_tokens_per_s=rate(counts.prompt_tokens, seconds),
        hit_ratio=ratio(counts.hit_ratio),
        engine_hit_ratio=ratio(engine.hit_ratio),
        ttft=ttft(counts.ttft),
        engine_ttft_ms=ms(engine.mean_ttft_s),
        engine_running=report.running if report else None,
        engine_waiting=report.waiting if report else None,
        kv_usage=ratio(report.kv_usage) if report else None,
        cache_used_tokens=round(min(used_tokens, worker.cache_tokens)),
        cache_tokens=worker.cache_tokens if known else 0,
        signal_age_s=None if age_s is None else round(age_s, 1),
        moved_per_s=rate(counts.moved, seconds),
    )


def prefixes(record: PoolRecord, now: float) -> list[PrefixStatus]:
    """The hottest, first first."""
    seconds, total_tokens = record.hottest.span(now, record.account.prompt_tokens)
    return [
        PrefixStatus(
            prefix=short_hash(key),
            tenant=entry.tenant,
            tokens=entry.latest_tokens,
            requests_per_s=rate(entry.requests, seconds),
            share=round(entry.prompt_tokens / max(1, total_tokens), 4),
            hit_ratio=ratio(entry.cached_tokens / entry.prompt_tokens if entry.prompt_tokens else None),
            spread=dict(sorted(entry.spread.items(), key=lambda item: -item[1])),
        )
        for key, entry in record.hottest.prefixes(MAX_PREFIXES)
    ]


def tenants(record: PoolRecord, now: float) -> list[TenantStatus]:
    """Those with the most uncached tokens, first first."""
    seconds, total_tokens = record.hottest.span(now, record.account.prompt_tokens)
    return [
        TenantStatus(
            tenant,
            rate(count.requests, seconds),
            round(count.prompt_tokens / max(1, total_tokens), 4),
            ratio(count.cached_tokens / count.prompt_tokens if count.prompt_tokens else None),
        )
        for tenant, count in record.hottest.tenants(MAX_TENANTS + 1)
        if tenant
    ]


def moves(record: PoolRecord, now: float, unix_s: float) -> list[MoveStatus]:
    """Picks that Envoy didn't use lately, most first."""
    found: dict[tuple[str, str], MoveStatus] = {}
    for move in record.moves:
        if now - move.at_s <= MOVES_S:
            before = found.get((move.picked, move.served))
            found[move.picked, move.served] = MoveStatus(
                move.picked,
                move.served,
                before.moves + 1 if before else 1,
                round(unix_s + move.at_s, 3),
                move.status,
            )
    return sorted(found.values(), key=lambda each: -each.moves)


def decision(record: DecisionRecord, unix_s: float) -> DecisionStatus:
    """One of late."""
    event = record.event
    made = event.decision
    refused = isinstance(event, events.Refused)
    return DecisionStatus(
        at_s=round(unix_s + event.now, 3),
        request_id=event.facts.request_id[:ID_CHARS],
        pool=event.pool if isinstance(event, events.Refused) else event.decision.pool,
        worker="" if refused or made is None else made.worker.address,
        served=record.served,
        reason=event.shed.reason if isinstance(event, events.Refused) else event.decision.reason,
        prefix="" if isinstance(event, events.Refused) else short_hash(event.prefix_key),
        tenant=event.demand.tenant if event.demand else "",
        prompt_tokens=made.prompt_tokens if made else 0,
        cached_tokens=made.cached_tokens if made else 0,
        predicted_ttft_ms=round(made.predicted_ttft_s * 1000, 1) if made else 0.0,
        status=record.status,
        duration_ms=None if record.duration_s is None else round(record.duration_s * 1000, 1),
    )


def rate(count: int, seconds: float) -> float:
    """A second."""
    return round(count / seconds, 2)


def rates(counts: Mapping[str, int], seconds: float) -> dict[str, float]:
    """A second, the most frequent first."""
    return {word: rate(count, seconds) for word, count in sorted(counts.items(), key=lambda item: -item[1])}


def ratio(value: float | None) -> float | None:
    """Rounded; None stays None."""
    return None if value is None else round(value, 4)


def ms(seconds: float | None) -> float | None:
    """Milliseconds; None stays None."""
    return None if seconds is None else round(seconds * 1000, 1)
