"""What the router remembers besides the caches: each table, filled to its bound."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.live import hottest
from extproc.live.recorder import MAX_WORKERS, PoolRecord, WorkerRecord
from extproc.observe.logs import Seldom
from extproc.routing import fairness, heat, retries
from extproc.routing.cache import CachePicture
from extproc.routing.demand import DIGEST_DIGITS
from extproc.routing.pool import UNKNOWN_CACHE_TOKENS

BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TableCost:
    """``entries``: as many as fit. ``bytes_held``: by all of them."""

    table: str
    entries: int
    bytes_held: int


def bench_tables() -> list[TableCost]:
    """Fill each with as many different entries as it takes."""
    return [
        _fill(f"{table}, for each {whose}", entries, fill)
        for table, whose, entries, fill in (
            ("hot prefixes", "pool", heat.MAX_KEYS, _heat),
            ("failed requests, with retry_budget", "pool", retries.MAX_BODIES, _bodies),
            ("tenants' retries, with retry_budget", "pool", retries.MAX_TENANTS, _budgets),
            ("tenants' shares, with tenant_header", "pool", fairness.MAX_TENANTS, _shares),
            ("their accounts at a further worker", "worker", fairness.MAX_TENANTS, _accounts),
            (
                "a cache of unknown size, full of answers",
                "worker",
                UNKNOWN_CACHE_TOKENS // BLOCK_TOKENS,
                _answers,
            ),
            ("live picture: workers of the last hour", "pool", MAX_WORKERS, _workers),
            ("live picture: prefixes and tenants", "pool", hottest.MAX_KEYS * hottest.GENERATIONS, _hottest),
            ("log records held back", "process", 1000, _seldom),
        )
    ]


def _fill(table: str, entries: int, fill: Callable[[int], object]) -> TableCost:
    gc.collect()
    tracemalloc.start()
    held = fill(entries)
    gc.collect()
    bytes_held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    return TableCost(table, entries, bytes_held)


def _key(number: int) -> int:
    """As large as a hash."""
    return (1 << 63) + number


def _tenant(number: int) -> str:
    return f"{number:0{DIGEST_DIGITS}x}"


def _address(number: int) -> str:
    return f"10.0.{number >> 8}.{number & 255}:8000"


def _heat(entries: int) -> object:
    table = heat.Heat()
    for number in range(entries):
        table.began(_key(number), "10.0.0.1:8000")
        table.set_rent(_key(number), number / 7, number / 3)
    return table


def _bodies(entries: int) -> object:
    table = retries.RetryGuard()
    for number in range(entries):
        table.ended(_key(number), age_s=number / 7, status=0, streamed=True, now=number / 3)
    return table


def _budgets(entries: int) -> object:
    table = retries.RetryGuard()
    for number in range(entries):
        table.within_budget(_tenant(number), 0.2, False, number / 3)
        table.within_budget(_tenant(number), 0.2, True, number / 3)
    return table


def _shares(entries: int) -> object:
    table = fairness.FairShares()
    _ask(table, entries, "10.0.0.1:8000")
    return table


def _ask(table: fairness.FairShares, tenants: int, worker: str) -> None:
    for number in range(tenants):
        table.overdrawn_s(_tenant(number), 1.0, number / 7, worker, 8000.0, 64000.0, number / 1e6)


def _accounts(entries: int) -> object:
    tracemalloc.stop()
    table = fairness.FairShares()
    _ask(table, entries, "10.0.0.1:8000")
    tracemalloc.start()
    _ask(table, entries, "10.0.0.2:8000")
    return table


def _answers(entries: int) -> object:
    table = CachePicture(BLOCK_TOKENS)
    slot = table.add_worker(UNKNOWN_CACHE_TOKENS)
    for number in range(entries):
        table.add_output(slot, BLOCK_TOKENS, number / 3)
    return table


def _workers(entries: int) -> object:
    table = PoolRecord(0.0)
    for number in range(entries):
        table.workers[_address(number)] = WorkerRecord()
    return table


def _hottest(entries: int) -> object:
    table, now = hottest.Hottest(0.0), 0.0
    for number in range(2 * hottest.MAX_SEEN):
        if not number % hottest.MAX_SEEN:
            now += hottest.SEEN_S
            table.tick(now, 0)
        table.count(_key(number), 1000, 500, _address(0), "")
    for number in range(entries):
        if not number % hottest.MAX_KEYS:
            now += hottest.GENERATION_S
            table.tick(now, 0)
        for worker in range(4):
            table.count(_key(-number), 1000 + number, 500 + number, _address(worker), _tenant(number))
    return table


def _seldom(entries: int) -> object:
    table = Seldom(kinds=entries)
    for number in range(entries):
        table(("refused", "pool", "tenant", _tenant(number)))
    return table


def report(costs: Sequence[TableCost]) -> str:
    """The costs as a table."""
    lines = [f"{'table':<56} {'entries':>8} {'bytes each':>11} {'MiB':>6}"]
    lines += (
        f"{cost.table:<56} {cost.entries:>8,} {cost.bytes_held / cost.entries:>11,.0f}"
        f" {cost.bytes_held / 2**20:>6.1f}"
        for cost in costs
    )
    return "\n".join(lines)
