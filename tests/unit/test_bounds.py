"""Whatever comes, and however long, the router's memory has a bound: nothing grows with the requests, nor
with the workers, pools and tenants that there once were.

Every object that can be reached from the router and the observer is counted, after rounds of the same
traffic; the least growth of a round is what each round adds for good.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

import pytest
import structlog

from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.live.recorder import Move, Recorder
from extproc.observe import events
from extproc.observe.logs import Seldom
from extproc.observe.observer import Observer
from extproc.router import Router, Routing
from extproc.routing import fairness, heat, retries

SETTINGS = PoolSettings(cache_tokens=20_000, tenant_header="x-tenant", retry_budget=0.2, shed_after_ms=5000)
ROUND = 400  # requests
ROUNDS = 3

#: Not looked into: code, and what is bounded by the number of its entries, whatever these say.
_CLOSED = (Seldom, Move, type, ModuleType, FunctionType, BuiltinFunctionType, FrameType, CodeType)


def reachable(*roots: object) -> list[object]:
    """Everything that these hold, themselves included; see `_CLOSED`."""
    found: dict[int, object] = {}
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) not in found and not isinstance(each, _CLOSED):
            found[id(each)] = each
            left += gc.get_referents(each)
            if isinstance(each, dict):
                left += each  # keys that are strings aren't told
    return list(found.values())


def size_bytes(objects: Iterable[object]) -> int:
    return sum(sys.getsizeof(each) for each in objects)


class Traffic:
    """A router under requests that end in all ways."""

    def __init__(self, workers: int = 4) -> None:
        self.random = random.Random(1)
        self.now = 1000.0
        self.ports = count(8000)
        self.observer = Observer()
        self.recorder = Recorder(self.now)
        self.observer.add(self.recorder)
        self.router = Router(self.config([next(self.ports) for _ in range(workers)]), self.observer)
        self.observer.watch(lambda: self.router.pools)
        self.running: deque[Routing] = deque()
        self.numbers = count()

    def config(self, ports: Iterable[int], pool: str = "pool") -> RouterConfig:
        endpoints = tuple(EndpointConfig("10.0.0.1", port, pool, 120) for port in ports)
        return RouterConfig(pools={pool: PoolConfig(pool, endpoints, SETTINGS)})

    def reload(self, config: RouterConfig) -> None:
        self.router.apply(config)
        self.observer.tell(events.Reloaded("envoy.yaml", ()))

    @property
    def addresses(self) -> list[str]:
        return [worker.address for pool in self.router.pools.values() for worker in pool.workers]

    def replace_a_worker(self) -> str:
        """A rolling update's step; returns the address that is gone."""
        (pool,) = self.router.config.pools.values()
        gone, *stay = pool.endpoints
        new = replace(gone, port=next(self.ports))
        self.reload(RouterConfig(pools={pool.name: replace(pool, endpoints=(*stay, new))}))
        return gone.address

    def ask(self, requests: int, tenants: int) -> None:
        for number in range(requests):
            self.now += 0.01
            self.ask_once(tenants)
            if not number % 10:
                self.pass_time()
            while len(self.running) > self.random.randrange(20, 60):
                self.end(self.running.popleft())

    def ask_once(self, tenants: int) -> None:
        draw = self.random.random
        shared = f"System prompt {self.random.randrange(20)}. " * 100
        texts = (shared, f"{shared} Question {next(self.numbers)}", f"Alone {next(self.numbers)}. " * 200)
        document = {
            "prompt": self.random.choice(texts),
            "max_tokens": self.random.choice((1, 100, 2000)),
            "stream": draw() < 0.5,
        }
        body = json.dumps(document).encode() if draw() < 0.95 else b"nonsense"
        headers = {"x-tenant": f"tenant-{self.random.randrange(tenants)}"}
        if draw() < 0.05:
            headers["x-extproc-ttft-slo-ms"] = "0.001"
        facts = RequestFacts("r", "/v1/completions", "application/json", headers=headers)
        for _ in range(1 + (draw() < 0.1)):
            routing = self.router.route(facts, RouteOverrides(), body, self.now)
            if isinstance(routing, Routing):
                self.running.append(routing)

    def end(self, routing: Routing) -> None:
        order = routing.decision.order
        upstream, attempts, status = self.random.choice(
            [
                (order[0].address, 1, 200),
                (order[0].address, 1, 500),
                (order[-1].address, len(order), 200),
                ("", 3, 503),
                ("10.9.9.9:1", 1, 200),
                None,  # given up before the headers
            ]
        ) or ("", 0, 0)
        if status:
            self.router.responded(routing, upstream, attempts, status, self.now)
        self.router.ended(routing, self.now + self.random.choice((0.0, 0.5, 30.0)))

    def pass_time(self) -> None:
        for pool in self.router.pools.values():
            pool.check(self.now)
        self.recorder.tick(self.router.pools, self.now)

    def rest(self) -> None:
        while self.running:
            self.end(self.running.popleft())
        self.now += 30.0
        assert all(not pool.tickets for pool in self.router.pools.values())

    def wait_an_hour(self) -> None:
        """As long as the live picture looks back, in which one tenant is never silent."""
        for _ in range(370):
            self.now += 10.0
            self.ask(1, tenants=1)

    def held(self) -> list[object]:
        self.rest()
        return reachable(self.router, self.observer, self.recorder)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Printing the debug log would take longer than everything else."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tables are full soon."""
    monkeypatch.setattr(heat, "MAX_KEYS", 100)
    monkeypatch.setattr(retries, "MAX_BODIES", 100)
    monkeypatch.setattr(retries, "MAX_TENANTS", 40)
    monkeypatch.setattr(fairness, "MAX_TENANTS", 40)


def grown_bytes(rounds: Iterator[int]) -> int:
    """What every round adds."""
    return min(after - before for before, after in pairwise(rounds))


def test_requests_leave_nothing_once_the_tables_are_full() -> None:
    traffic = Traffic()

    def rounds() -> Iterator[int]:
        for _ in range(ROUNDS + 2):
            traffic.ask(ROUND, tenants=200)
            yield size_bytes(traffic.held())

    _, *full = rounds()
    assert grown_bytes(iter(full)) < 4 * ROUND, full


def test_workers_that_are_gone_are_forgotten() -> None:
    traffic = Traffic()
    gone: set[str] = set()
    for _ in range(40):
        traffic.ask(15, tenants=3)
        gone.add(traffic.replace_a_worker())
    traffic.rest()
    traffic.replace_a_worker()
    traffic.wait_an_hour()
    traffic.replace_a_worker()
    traffic.ask(20, tenants=5)
    traffic.reload(traffic.router.config)
    held = {each for each in traffic.held() if isinstance(each, str)}
    assert set(traffic.addresses) <= held
    assert gone & held == set()


def test_pools_that_are_gone_are_forgotten() -> None:
    traffic = Traffic()
    names = [f"pool-of-release-{number}" for number in range(20)]
    for name in names:
        traffic.reload(traffic.config(range(8000, 8004), name))
        traffic.ask(15, tenants=5)
    traffic.rest()
    traffic.wait_an_hour()
    traffic.reload(traffic.router.config)
    text = {each for each in traffic.held() if isinstance(each, str)}
    assert names[-1] in text
    assert text.isdisjoint(names[:-1])
