"""The present state of pools and workers as gauges, read from the accounts at each scrape."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from extproc import __version__
from extproc.observe.families import Family, Gauge, Labels, Merge
from extproc.routing.health import State
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

#: The pools of a running router, by name.
Pools = Callable[[], Mapping[str, Pool]]

_POOL = ("pool",)
_WORKER = ("pool", "worker")


def each_pool(pools: Pools) -> Iterator[Labels]:
    """Label sets of families by pool. Safe in another thread."""
    for name in list(pools()):
        yield (name,)


def each_worker(pools: Pools) -> Iterator[Labels]:
    """Label sets of families by worker. Safe in another thread."""
    for pool in list(pools().values()):
        for worker in list(pool.workers):
            yield (pool.name, worker.address)


def gauges(pools: Pools) -> list[Family]:
    """All of them."""

    def by_pool(name: str, text: str, value: Callable[[Pool, float], float], merge: Merge = "max") -> Family:
        def read() -> Iterable[tuple[Labels, float]]:
            now = time.monotonic()
            return [((pool.name,), value(pool, now)) for pool in list(pools().values())]

        return Gauge(name, text, _POOL, merge, read)

    def by_worker(
        name: str, text: str, value: Callable[[Pool, Worker, float], float], merge: Merge
    ) -> Family:
        def read() -> Iterable[tuple[Labels, float]]:
            now = time.monotonic()
            return [
                ((pool.name, worker.address), value(pool, worker, now))
                for pool in list(pools().values())
                for worker in list(pool.workers)
            ]

        return Gauge(name, text, _WORKER, merge, read)

    def states() -> Iterable[tuple[Labels, float]]:
        for pool in list(pools().values()):
            for worker in list(pool.workers):
                present = worker.health.state
                for state in State:
                    yield (pool.name, worker.address, state), state is present

    return [
        Gauge(
            "extproc_build_info",
            "Always 1; its labels are versions.",
            ("version", "python"),
            "any",
            lambda: [((__version__, platform.python_version()), 1.0)],
        ),
        by_pool("extproc_pool_workers", "Workers of the pool.", lambda pool, now: len(pool.workers)),
        by_pool(
            "extproc_panic",
            "1 while so many workers are out that all count as healthy.",
            lambda pool, now: pool.panic,
        ),
        by_pool(
            "extproc_prefill_utilisation_ratio",
            "Share of the workers' time that the prefills of the last half minute take, as predicted;"
            " above 1 queues grow.",
            lambda pool, now: pool.utilisation(now),
            "sum",
        ),
        by_worker(
            "extproc_inflight_requests",
            "Requests in flight, from the decision to the end of the answer.",
            lambda pool, worker, now: worker.in_flight,
            "sum",
        ),
        by_worker(
            "extproc_max_inflight_requests",
            "Limit of requests in flight.",
            lambda pool, worker, now: worker.max_inflight,
            "max",
        ),
        by_worker(
            "extproc_pending_prefill_tokens",
            "Uncached prompt tokens that wait at the worker, by the router's account.",
            lambda pool, worker, now: worker.pending_prefill_tokens(now),
            "sum",
        ),
        by_worker(
            "extproc_cache_picture_tokens",
            "Prompt tokens that the worker is thought to hold in its KV cache.",
            lambda pool, worker, now: _pictured_tokens(pool, worker),
            "max",
        ),
        Gauge(
            "extproc_worker_state",
            "1 for the state of health that the worker is in, 0 for the others.",
            (*_WORKER, "state"),
            "max",
            states,
        ),
    ]


def _pictured_tokens(pool: Pool, worker: Worker) -> float:
    slot = worker.slot
    return pool.picture.used_blocks(slot) * pool.picture.block_tokens if slot >= 0 else 0.0
