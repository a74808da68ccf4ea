"""What a decision costs in time, and the picture of the caches in memory."""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.cache import CachePicture
from extproc.routing.pool import Pool

BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class DecideCost:
    """Microseconds of wall time for one request, median and 99th percentile of each part.

    ``decide``: rank the workers. ``begin``, ``end``: what a request does to the accounts and the picture.
    """

    policy: str
    workers: int
    blocks: int
    decide_us: tuple[float, float]
    begin_us: tuple[float, float]
    end_us: tuple[float, float]


def bench_decide(
    policies: Sequence[str] = ("predicted", "prefix-hash", "lmetric"),
    fleets: Sequence[int] = (8, 128),
    blocks: int = 1000,
    requests: int = 2000,
) -> list[DecideCost]:
    """Requests over 200 prompts of ``blocks`` blocks, with caches that hold about eight of them."""
    return [_measure(policy, workers, blocks, requests) for policy in policies for workers in fleets]


def _measure(policy: str, workers: int, blocks: int, requests: int) -> DecideCost:
    rng = random.Random(1)
    settings = PoolSettings(policy=policy, cache_tokens=8 * blocks * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    endpoints = tuple(EndpointConfig(f"10.0.{i >> 8}.{i & 255}", 8000, "c", 1000) for i in range(workers))
    pool = Pool(PoolConfig("bench", endpoints, settings))
    prompts = [
        PrefixChain(
            tuple(rng.getrandbits(64) for _ in range(blocks)),
            BLOCK_TOKENS,
            blocks * BLOCK_TOKENS + 100,
            rng.getrandbits(64),
        )
        for _ in range(200)
    ]
    now = 0.0
    parts: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(len(prompts) + requests):
        now += 1.0
        prompt = prompts[number] if number < len(prompts) else rng.choice(prompts)
        start = time.perf_counter()
        decision = pool.decide(prompt, now)
        decided = time.perf_counter()
        assert decision is not None
        ticket = pool.begin(decision, prompt, now)
        begun = time.perf_counter()
        pool.end(ticket, now + 0.5)
        ended = time.perf_counter()
        if number >= len(prompts):
            for part, seconds in zip(parts, (decided - start, begun - decided, ended - begun), strict=True):
                part.append(seconds * 1e6)
    decide, begin, end = ((statistics.median(p), statistics.quantiles(p, n=100)[98]) for p in parts)
    return DecideCost(policy, workers, blocks, decide, begin, end)


def report_decide(costs: Sequence[DecideCost]) -> str:
    """The costs as a table."""
    lines = [
        f"{'policy':<12} {'workers':>7} {'blocks':>6}  {'decide µs':>17} {'begin µs':>17} {'end µs':>17}"
    ]
    for cost in costs:
        parts = "".join(
            f" {m:>6.0f} (p99 {q:>4.0f})" for m, q in (cost.decide_us, cost.begin_us, cost.end_us)
        )
        lines.append(f"{cost.policy:<12} {cost.workers:>7} {cost.blocks:>6}  {parts}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Memory of a picture after some traffic: ``tracked`` counts (block, worker) pairs."""

    traffic: str
    tracked: int
    nodes: int
    bytes_held: int

    @property
    def bytes_per_block(self) -> float:
        """Bytes a tracked block."""
        return self.bytes_held / self.tracked


def bench_cache(requests: int = 20_000, workers: int = 8) -> list[CacheCost]:
    """Fill pictures of eight caches of 2 million tokens with traffic of different shapes."""
    shapes: dict[str, Callable[[random.Random], Iterator[tuple[int, ...]]]] = {
        "agents: 100-block prompts, 2 blocks of their own": _agents,
        "conversations: 2 more blocks a turn": _conversations,
        "unique prompts of 30 blocks": _unique,
        "worst case: a shared head, then 1 block each": _worst,
    }
    return [_fill(name, shape, requests, workers) for name, shape in shapes.items()]


def _fill(
    name: str, shape: Callable[[random.Random], Iterator[tuple[int, ...]]], requests: int, workers: int
) -> CacheCost:
    rng = random.Random(1)
    gc.collect()
    tracemalloc.start()
    picture = CachePicture(BLOCK_TOKENS)
    slots = [picture.add_worker(2_000_000) for _ in range(workers)]
    chains = shape(rng)
    for number in range(requests):
        # The chain dies after the touch: what stays is the picture's own.
        picture.touch(rng.choice(slots), next(chains), float(number))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tracked = sum(picture.used_blocks(slot) for slot in slots)
    return CacheCost(name, tracked, picture.nodes(), held)


def _hashes(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) for _ in range(count))


def _agents(rng: random.Random) -> Iterator[tuple[int, ...]]:
    seeds = [rng.getrandbits(32) for _ in range(200)]
    while True:
        yield _hashes(random.Random(rng.choice(seeds)), 100) + _hashes(rng, 2)


def _conversations(rng: random.Random) -> Iterator[tuple[int, ...]]:
    while True:
        seed, turns = rng.getrandbits(32), rng.randint(2, 16)
        for turn in range(1, turns):
            yield _hashes(random.Random(seed), 4 + 2 * turn)


def _unique(rng: random.Random) -> Iterator[tuple[int, ...]]:
    while True:
        yield _hashes(rng, 30)


def _worst(rng: random.Random) -> Iterator[tuple[int, ...]]:
    head = _hashes(rng, 8)
    while True:
        yield head + _hashes(rng, 1)


def report_cache(costs: Sequence[CacheCost]) -> str:
    """The costs as a table."""
    lines = [f"{'traffic':<50} {'tracked blocks':>14} {'nodes':>8} {'MiB':>6} {'bytes a block':>14}"]
    lines += (
        f"{cost.traffic:<50} {cost.tracked:>14,} {cost.nodes:>8,} {cost.bytes_held / 2**20:>6.1f}"
        f" {cost.bytes_per_block:>14.0f}"
        for cost in costs
    )
    return "\n".join(lines)
