"""Asking health pages over real HTTP, and what the pools make of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from counted import total

from extproc.demo.process import free_ports
from extproc.engine import prober as probing
from extproc.engine.prober import Prober
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.observe.engines import EngineObserver
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.routing.health import State
from extproc.routing.load import Worker

HOST = "127.0.0.1"


class Page:
    """A health page that can be told what to say. ``asked``: how often it was."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self.answer: bytes | None = b"200 OK"  # None: none, ever
        self.asked = 0
        self.paths: set[bytes] = set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._connections:
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            self.paths.add(request.split()[1])
            if self.answer is None:
                await asyncio.Event().wait()
            assert self.answer is not None
            writer.write(b"HTTP/1.1 " + self.answer + b"\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()


class Rig:
    """Two workers, one of them ours to break, and the router that watches them."""

    def __init__(self, **settings: object) -> None:
        self.page, self.other = Page(), Page()
        self.observer = Observer()
        self.config = self.configuration(**settings)
        self.router = Router(self.config, self.observer)
        self.prober = Prober(self.router, EngineObserver(self.observer.registry))

    def configuration(self, **settings: object) -> RouterConfig:
        endpoints = tuple(EndpointConfig(HOST, page.port, "c", 9) for page in (self.page, self.other))
        values = {"health_interval_s": 0.05, "health_timeout_s": 0.3, "return_s": 0.2, "eject_s": 30.0}
        pool = PoolConfig("pool", endpoints, PoolSettings(**{**values, **settings}))  # type: ignore[arg-type]
        return RouterConfig({"pool": pool})

    @property
    def worker(self) -> Worker:
        return self.router.pools["pool"].workers[0]

    @property
    def state(self) -> State:
        return self.worker.health.state

    def ejections(self, cause: str) -> float:
        labels = {"pool": "pool", "cause": cause}
        return total(self.observer.registry, "extproc_ejections_total", **labels)


@asynccontextmanager
async def rig(**settings: object) -> AsyncIterator[Rig]:
    it = Rig(**settings)
    await it.page.open()
    await it.other.open()
    running = asyncio.create_task(it.prober.run())
    await asyncio.sleep(0)  # it is watching now
    try:
        yield it
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await it.page.close()
        await it.other.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


async def test_a_closed_port_ejects_at_once_and_an_open_one_brings_back() -> None:
    async with rig() as it:
        await until(lambda: it.page.asked > 1)
        assert it.state is State.HEALTHY
        await it.page.close()
        await until(lambda: it.state is State.EJECTED)
        assert it.ejections("refused") == 1
        await it.page.open()
        await until(lambda: it.state is State.HEALTHY)
        assert it.page.paths == {b"/health"}


async def test_503_is_not_ready_and_404_says_nothing() -> None:
    async with rig(health_path="ready") as it:
        it.page.answer = b"503 Service Unavailable"
        await until(lambda: it.state is State.NOT_READY)
        it.page.answer = b"404 Not Found"
        asked = it.page.asked
        await until(lambda: it.page.asked > asked + 2)
        assert it.state is State.NOT_READY
        it.page.answer = b"204 No Content"
        await until(lambda: it.state is State.HEALTHY)
        assert it.page.paths == {b"/ready"}
        assert it.ejections("not_ready") == 1


async def test_no_answer_in_time_ejects_after_two() -> None:
    async with rig(health_timeout_s=0.05) as it:
        it.page.answer = None
        await until(lambda: it.state is State.EJECTED)
        assert it.ejections("unresponsive") == 1
        assert it.page.asked >= 2
        it.page.answer = b"200 OK"
        await until(lambda: it.state is State.HEALTHY)


async def test_a_suspect_is_asked_at_once() -> None:
    async with rig(health_interval_s=3000.0) as it:
        pool = it.router.pools["pool"]
        await it.page.close()
        it.router.on_suspect(pool, it.worker)
        await until(lambda: it.state is State.EJECTED)
        assert it.page.asked == 0


async def test_off_and_on_again() -> None:
    async with rig(health_interval_s=0) as it:
        await asyncio.sleep(0.1)
        assert it.page.asked == 0
        it.router.on_suspect(it.router.pools["pool"], it.worker)
        it.router.apply(it.configuration(health_interval_s=0.05))
        it.prober.reconcile()
        await until(lambda: it.page.asked > 1)
        it.router.apply(RouterConfig({"pool": PoolConfig("pool", it.config.pools["pool"].endpoints[1:])}))
        it.prober.reconcile()
        await asyncio.sleep(0.1)
        asked = it.page.asked
        await asyncio.sleep(0.2)
        assert it.page.asked == asked


async def test_silence_is_seen_without_further_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "CHECK_INTERVAL_S", 0.02)
    async with rig(silence_s=0.2) as it:
        pool = it.router.pools["pool"]
        decision = pool.decide(None, time.monotonic())
        assert decision is not None
        pool.begin(decision, None, time.monotonic(), stream=True)
        await until(lambda: decision.worker.health.state is State.EJECTED)
        assert it.ejections("silent") == 1
