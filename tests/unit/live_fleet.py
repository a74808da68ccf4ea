"""A router in simulated time, watched by `extproc.live`, for its tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import structlog

from extproc.engine.state import Target
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.live.live import Live
from extproc.live.recorder import Recorder
from extproc.live.status import PoolStatus, Status
from extproc.observe.observer import Observer
from extproc.router import Router, Routing
from extproc.routing.admission import Shed


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of decisions needn't be logged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(**before)


PATH = "/v1/chat/completions"
UNIX_S = 1_700_000_000.0


def address(index: int) -> str:
    return f"10.0.0.{index}:8000"


def config(workers: Iterable[int], pools: Iterable[str] = ("p",), **settings: Any) -> RouterConfig:
    endpoints = tuple(EndpointConfig(f"10.0.0.{index}", 8000, "c", 120) for index in workers)
    chosen = PoolSettings(**{"scrape_interval_s": 0.0, **settings})
    return RouterConfig(pools={name: PoolConfig(name, endpoints, chosen) for name in pools}, source="e.yaml")


def body(system: str, user: str = "and?", chars: int = 8000) -> bytes:
    """Its system prompt is its prefix."""
    messages = [("system", (f"{system} " * chars)[:chars]), ("user", user)]
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}).encode()


class Fleet:
    """Requests to a router, in a time that only `at` moves."""

    def __init__(self, workers: Iterable[int] = range(4), pools: Iterable[str] = ("p",), **settings: Any):
        self.now = 100.0
        self.unix_s = UNIX_S - self.now  # of the clock's zero
        self.observer = Observer()
        self.router = Router(config(workers, pools, **settings), self.observer)
        self.targets: list[Target] = []
        self.recorder = Recorder(self.now)
        self.observer.add(self.recorder)
        self.live = Live(
            self.recorder,
            lambda: self.router.pools,
            lambda: self.targets,
            lambda: self.router.config.source,
            unix_s=lambda: self.unix_s + self.now,
        )

    def pass_s(self, seconds: float) -> None:
        """Let so much time pass, tick by tick."""
        end_s = self.now + seconds
        while self.now + 1.0 <= end_s:
            self.now += 1.0
            self.live.tick(self.now)
        self.now = end_s

    def route(self, given: bytes, pool: str = "p", **headers: str) -> Routing | Shed | None:
        facts = RequestFacts("r-1", PATH, "application/json", headers=headers)
        return self.router.route(facts, RouteOverrides(pool=pool), given, self.now)

    def ask(
        self, given: bytes, served: str = "", status: int = 200, pool: str = "p", **headers: str
    ) -> Routing:
        """A request and its end, all at once. ``served``: by another than the one picked."""
        routing = self.route(given, pool, **headers)
        assert isinstance(routing, Routing)
        self.end(routing, served, status)
        return routing

    def end(self, routing: Routing, served: str = "", status: int = 200) -> None:
        self.router.responded(routing, served or routing.decision.worker.address, 1, status, self.now)
        self.router.ended(routing, self.now)

    @property
    def status(self) -> Status:
        return self.live.status(self.now)

    def pool(self, name: str = "p") -> PoolStatus:
        return next(pool for pool in self.status.pools if pool.name == name)

    @property
    def alarms(self) -> list[str]:
        return [alarm.name for alarm in self.status.alarms]
