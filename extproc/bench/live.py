"""What the live picture costs: beside each decision, each second, for an answer, in memory."""

from __future__ import annotations

import random
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

import msgspec

from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig
from extproc.live.live import Live
from extproc.live.recorder import Recorder
from extproc.live.status import HISTORY_POINTS, HISTORY_STEP_S
from extproc.observe import events
from extproc.prefix import PrefixChain
from extproc.routing.demand import Demand
from extproc.routing.pool import Pool

BLOCKS = 20
BLOCK_TOKENS = 256
TENANTS = 50

#: Prompts that no other request has.
NEW_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LiveCost:
    """Microseconds of CPU a decision and an end, milliseconds a tick and an answer (medians), megabytes."""

    workers: int
    decided_us: float
    ended_us: float
    tick_ms: float
    status_ms: float
    status_bytes: int
    history_ms: float
    history_bytes: int
    memory_mb: float


def bench_live(
    workers: int = 128,
    requests_per_s: int = 1000,
    seconds: int = 20,
    idle_s: int = round(HISTORY_POINTS * HISTORY_STEP_S),
) -> LiveCost:
    """So many seconds of traffic, some prefixes hot, many not; then an hour for the history to fill."""
    tracemalloc.start()
    try:
        memory_mb = _run(workers, requests_per_s, seconds, idle_s)[1]
    finally:
        tracemalloc.stop()
    live, _, decided_us, ended_us, tick_ms = _run(workers, requests_per_s, seconds, idle_s)
    now = float(seconds + idle_s)
    status_ms, status = _answer(lambda: msgspec.json.encode(live.status(now)))
    history_ms, history = _answer(lambda: msgspec.json.encode(live.history(now)))
    return LiveCost(
        workers, decided_us, ended_us, tick_ms, status_ms, len(status), history_ms, len(history), memory_mb
    )


def _run(
    workers: int, requests_per_s: int, seconds: int, idle_s: int
) -> tuple[Live, float, float, float, float]:
    """The picture, its memory (MB) if that is traced, and the costs."""
    endpoints = tuple(EndpointConfig(f"10.0.{i >> 8}.{i & 255}", 8000, "c", 1000) for i in range(workers))
    pool = Pool(PoolConfig("bench", endpoints))
    traffic = _traffic(pool, requests_per_s * seconds)
    before = tracemalloc.get_traced_memory()[0]
    recorder = Recorder(0.0)
    live = Live(recorder, lambda: {"bench": pool})
    live.tick(0.0)
    decide, end = recorder.handlers[events.Decided], recorder.handlers[events.Ended]
    costs: list[tuple[float, float, float]] = []
    for second in range(seconds):
        block = traffic[second * requests_per_s : (second + 1) * requests_per_s]
        start_s = thread_time()
        for decided, _ in block:
            decide(decided)
        decided_s = thread_time()
        for _, ended in block:
            end(ended)
        ended_s = thread_time()
        live.tick(second + 1.0)
        costs.append((decided_s - start_s, ended_s - decided_s, thread_time() - ended_s))
    for second in range(idle_s):
        live.tick(seconds + second + 1.0)
    for decided, _ in traffic[-5 * requests_per_s :]:
        decide(decided)
    memory_mb = (tracemalloc.get_traced_memory()[0] - before) / 1e6
    decided_s, ended_s, tick_s = (statistics.median(part) for part in zip(*costs, strict=True))
    return live, memory_mb, decided_s / requests_per_s * 1e6, ended_s / requests_per_s * 1e6, tick_s * 1e3


def _traffic(pool: Pool, requests: int) -> list[tuple[events.Decided, events.Ended]]:
    rng = random.Random(1)
    made = []
    for number in range(requests):
        new = rng.random() < NEW_SHARE
        prompt = random.Random(-number if new else int(rng.paretovariate(1.0)))
        hashes = tuple(prompt.getrandbits(64) for _ in range(BLOCKS))
        chain = PrefixChain(hashes, BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS + 100, hashes[-1])
        now = number / 1000
        decision = pool.decide(chain, now)
        assert decision is not None
        pool.end(pool.begin(decision, chain, now), now)
        decided = events.Decided(
            facts=RequestFacts(request_id=f"{number:036}"),
            asked=events.Asked(head_tokens=5000),
            decision=decision,
            prefix_key=chain.key,
            demand=Demand(tenant=f"{number % TENANTS:012x}"),
            body_bytes=20_000,
            work=events.Work(),
            now=now,
        )
        ended = events.Ended(
            facts=decided.facts,
            decided=decided,
            decision=decision,
            worker=decision.worker.address,
            status=200,
            attempts=1,
            headers_s=0.1,
            duration_s=1.0,
            streamed=True,
            now=now + 1.0,
        )
        made.append((decided, ended))
    return made


def _answer(make: Callable[[], bytes], times: int = 9) -> tuple[float, bytes]:
    costs_s = []
    for _ in range(times):
        start_s = thread_time()
        told = make()
        costs_s.append(thread_time() - start_s)
    return statistics.median(costs_s) * 1e3, told


def report(cost: LiveCost) -> str:
    """The figures, a line each."""
    return "\n".join(
        [
            f"{cost.workers} workers, 1,000 requests a second, CPU time",
            f"a decision  {cost.decided_us:8.1f} us",
            f"its end     {cost.ended_us:8.1f} us",
            f"a second    {cost.tick_ms:8.1f} ms",
            f"/status     {cost.status_ms:8.1f} ms  {cost.status_bytes / 1e3:,.0f} KB",
            f"/history    {cost.history_ms:8.1f} ms  {cost.history_bytes / 1e3:,.0f} KB, a full hour",
            f"memory      {cost.memory_mb:8.1f} MB",
        ]
    )
