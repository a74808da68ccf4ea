"""A router with many workers and some minutes behind it, and its page: no engines, no Envoy.

The past is lived through before the page opens; then requests go on coming in real time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from random import Random

import structlog

from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.live.live import Live
from extproc.live.page import Page
from extproc.live.recorder import Recorder
from extproc.live.serving import routes
from extproc.observe.observer import Observer
from extproc.router import Router, Routing
from extproc.routing.health import Cause

PAST_S = 320
LARGE, SMALL = 128, 3
PREFIXES = 200


class LargeFleet:
    """Two pools, ``large`` and ``small``; one worker of the large one is dead. A context manager."""

    def __init__(self, past_s: int = PAST_S, requests_per_s: float = 5.0) -> None:
        self._random = Random(1)
        self._rate = requests_per_s
        observer = Observer()
        self.router = Router(
            RouterConfig(pools=dict([_pool("large", LARGE), _pool("small", SMALL)])), observer
        )
        self._now = time.monotonic() - past_s
        recorder = Recorder(self._now)
        observer.add(recorder)
        self.live = Live(recorder, lambda: self.router.pools, source=lambda: "envoy.yaml")
        self._bodies = [_body(index) for index in range(PREFIXES)]
        self._running: deque[tuple[float, Routing]] = deque()
        self.dead = self.router.pools["large"].workers[41]
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.url = ""

    def __enter__(self) -> LargeFleet:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        while self._now + 1.0 < time.monotonic():
            self._live_through(self._now + 1.0)
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        structlog.reset_defaults()

    async def _serve(self) -> None:
        page = Page(routes(self.live, guard=lambda handler: handler))
        self.url = f"http://{await page.start('127.0.0.1:0')}/"
        self._ready.set()
        while not self._stop.is_set():
            await asyncio.sleep(1.0)
            self._live_through(time.monotonic())
        await page.stop()

    def _live_through(self, until: float) -> None:
        """A second of traffic, or less; the large pool's share grows and shrinks."""
        passed, self._now = until - self._now, until
        self.dead.health.failed(Cause.REFUSED, self._now)
        for _ in range(round(self._rate * passed * self._random.uniform(0.5, 1.5))):
            self._ask()
        while self._running and self._running[0][0] <= self._now:
            _, routing = self._running.popleft()
            self.router.responded(routing, routing.decision.worker.address, 1, 200, self._now)
            self.router.ended(routing, self._now)
        self.live.tick(self._now)

    def _ask(self) -> None:
        prefix = min(int(self._random.paretovariate(0.7)) - 1, PREFIXES - 1)
        pool = "small" if self._random.random() < 0.1 else "large"
        facts = RequestFacts(
            f"{self._random.getrandbits(64):016x}", "/v1/chat/completions", "application/json"
        )
        routing = self.router.route(facts, RouteOverrides(pool=pool), self._bodies[prefix], self._now)
        if isinstance(routing, Routing):
            self._running.append((self._now + 6.0, routing))


def _pool(name: str, workers: int) -> tuple[str, PoolConfig]:
    endpoints = tuple(
        EndpointConfig(f"10.1.{index // 100}.{index % 100 + 1}", 8000, "c", 120) for index in range(workers)
    )
    return name, PoolConfig(name, endpoints, PoolSettings(scrape_interval_s=0.0))


def _body(index: int) -> bytes:
    text = f"You are agent {index}. " * 1500
    return json.dumps({"messages": [{"role": "system", "content": text}]}).encode()
