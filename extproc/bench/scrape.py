"""What a scrape of the router's metrics takes, with a large fleet, while requests run.

A real ``extproc serve`` with 128 workers, each a page of metrics in vLLM's form; requests over real gRPC, as
Envoy sends them. Who scrapes is a process of its own, so that only the router's time is measured.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc.aio

from extproc.demo.process import Process, ProcessError, answers, free_ports
from extproc.emulator.driver import Driver
from extproc.emulator.engine import EngineConfig
from extproc.emulator.engine_metrics import EngineMetrics
from extproc.engine.exposition import decode
from extproc.engine.state import EngineState, Target
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe import events
from extproc.observe.engines import EngineObserver
from extproc.observe.logs import configure
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.observe.page import page
from extproc.router import Router, Routing
from extproc.wire import (
    PROCESS_PATH,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

HOST = "127.0.0.1"

#: What Prometheus 2.42 sends.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.75,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=0.0.4;q=0.25,*/*;q=0.1"
)

#: Requests at a time while they come and go.
CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class ScrapeCost:
    """Scrapes in one situation: wall milliseconds as the scraper sees them, bytes sent, rows of the page.

    ``requests_per_s``: that the router decided meanwhile.
    """

    situation: str
    p50_ms: float
    max_ms: float
    page_bytes: int
    sent_bytes: int
    rows: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class PageCost:
    """CPU of the least disturbed run: microseconds a request for its counters, milliseconds a page."""

    request_us: float
    page_ms: float
    zipped_ms: float


def bench_page(workers: int = 128, requests: int = 200, runs: int = 15) -> PageCost:
    """In this process: what metrics add to a request, and what writing the page takes."""
    configure("error")
    endpoints = tuple(EndpointConfig(f"10.0.0.{i}", 8000, "workers", 1000) for i in range(workers))
    told = _Told()
    observer = Observer()
    observer.add(told)
    router = Router(RouterConfig({"workers": PoolConfig("workers", endpoints)}), observer)
    for number in range(requests):
        now = float(number)
        body = json.dumps({"prompt": _prompt(number)}).encode()
        routed = router.route(RequestFacts(path="/v1/completions"), RouteOverrides(), body, now)
        assert isinstance(routed, Routing)
        router.responded(routed, routed.decision.worker.address, 1, 200, now + 0.1)
        router.ended(routed, now + 0.5)
    metrics = Metrics()
    metrics.watch(lambda: router.pools)
    engines = EngineObserver(metrics.registry)
    targets = [Target(router.pools["workers"], worker) for worker in router.pools["workers"].workers]
    for target in targets:
        target.state = EngineState(decode(_engine_page()), time.monotonic())
    engines.watch(lambda: targets)
    handlers = [
        (sink.handlers[type(event)], event)
        for sink in (metrics, engines)
        for event in told.events
        if type(event) in sink.handlers
    ]

    def count() -> None:
        for handler, event in handlers:
            handler(event)

    def write(encoding: str) -> Callable[[], object]:
        return lambda: page(metrics.registry, ACCEPT, encoding)

    return PageCost(
        _least_s(count, runs) / requests * 1e6,
        _least_s(write(""), runs) * 1e3,
        _least_s(write("gzip"), runs) * 1e3,
    )


def _least_s(what: Callable[[], object], runs: int) -> float:
    times_s = []
    for _ in range(runs):
        start_s = time.thread_time()
        what()
        times_s.append(time.thread_time() - start_s)
    return min(times_s)


class _Told:
    """A sink that keeps what requests tell."""

    def __init__(self) -> None:
        self.events: list[object] = []

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {events.Decided: self.events.append, events.Ended: self.events.append}


def report_page(cost: PageCost) -> str:
    """The cost in a line."""
    return (
        f"CPU: {cost.request_us:.1f} µs a request for its counters and histograms;"
        f" {cost.page_ms:.1f} ms a page, {cost.zipped_ms:.1f} ms gzipped"
    )


def bench_scrape(workers: int = 128, requests: int = 10_000, scrapes: int = 40) -> list[ScrapeCost]:
    """At rest; with ``requests`` in flight; while as many come and go as fast as they can."""
    context = multiprocessing.get_context("spawn")
    listen_port, metrics_port, *ports = free_ports(workers + 2)
    listen, metrics = f"{HOST}:{listen_port}", f"http://{HOST}:{metrics_port}/metrics"
    opened = context.Event()
    engines = context.Process(target=_serve_engines, args=(ports, opened), daemon=True)
    engines.start()
    opened.wait()
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        router = _router(Path(folder), listen, metrics_port, ports)
        router.start()
        try:
            router.wait_ready()
            _await_readings(metrics, workers)
            costs.append(_measure("at rest", metrics, scrapes))
            for situation, task in (("in flight", _hold), ("coming and going", _hurry)):
                opened, end = context.Event(), context.Event()
                load = context.Process(target=task, args=(listen, requests, opened, end), daemon=True)
                load.start()
                opened.wait()
                costs.append(_measure(f"{requests:,} requests {situation}", metrics, scrapes))
                end.set()
                load.join()
        finally:
            router.stop()
            engines.terminate()
            engines.join()
    return costs


def report_scrape(costs: list[ScrapeCost]) -> str:
    """The costs as a table."""
    lines = [
        f"{'situation':<36} {'p50 ms':>7} {'max ms':>7} {'rows':>6} {'page KB':>8} {'sent KB':>8}"
        f" {'req/s':>6}"
    ]
    lines += (
        f"{cost.situation:<36} {cost.p50_ms:>7.1f} {cost.max_ms:>7.1f} {cost.rows:>6,}"
        f" {cost.page_bytes / 1024:>8.0f} {cost.sent_bytes / 1024:>8.0f} {cost.requests_per_s:>6.0f}"
        for cost in costs
    )
    return "\n".join(lines)


def _measure(situation: str, url: str, scrapes: int) -> ScrapeCost:
    times_ms = []
    began_s, before = time.monotonic(), _decisions(url)
    sent = b""
    for _ in range(scrapes):
        request = urllib.request.Request(url, headers={"accept": ACCEPT, "accept-encoding": "gzip"})  # noqa: S310 - http
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=30.0) as response:  # noqa: S310 - http
            sent = response.read()
        times_ms.append((time.perf_counter() - start) * 1000)
        time.sleep(0.05)
    per_s = (_decisions(url) - before) / (time.monotonic() - began_s)
    plain = _plain(url)
    rows = sum(not line.startswith(b"#") for line in plain.splitlines())
    return ScrapeCost(
        situation, statistics.median(times_ms), max(times_ms), len(plain), len(sent), rows, per_s
    )


def _await_readings(url: str, workers: int) -> None:
    """Until each engine's page was read; ProcessError if that never comes."""
    deadline_s = time.monotonic() + 60.0
    while _plain(url + "?name[]=extproc_engine_running_requests").count(b"\n") < workers + 2:
        if time.monotonic() > deadline_s:
            raise ProcessError("the router didn't read all the engines' pages within a minute")
        time.sleep(0.2)


def _plain(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30.0) as response:  # noqa: S310 - http
        return bytes(response.read())


def _decisions(url: str) -> float:
    lines = _plain(url + "?name[]=extproc_picks_total").splitlines()
    return sum(float(line.split()[-1]) for line in lines if not line.startswith(b"#"))


# --- the router --------------------------------------------------------------------------------------


def _router(folder: Path, listen: str, metrics_port: int, ports: list[int]) -> Process:
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": HOST, "port_value": port}}}} for port in ports
    ]
    cluster = {
        "name": "workers",
        "metadata": {"filter_metadata": {"extproc": {"scrape_interval_s": 2.0}}},
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    yaml = folder / "envoy.json"
    yaml.write_text(json.dumps({"static_resources": {"clusters": [cluster]}}))
    command = [sys.executable, "-m", "extproc.cli", "serve", "--envoy-config", str(yaml), "--listen", listen]
    command += ["--metrics", f"{HOST}:{metrics_port}"]
    url = f"http://{HOST}:{metrics_port}/metrics"
    return Process("router", command, folder / "router.log", lambda: answers(url))


# --- engines -----------------------------------------------------------------------------------------


def _serve_engines(ports: list[int], opened: Event) -> None:
    asyncio.run(_engines(ports, opened))


async def _engines(ports: list[int], opened: Event) -> None:
    body = _engine_page()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with AsyncExitStack() as stack:
        for port in ports:
            await stack.enter_async_context(await asyncio.start_server(answer, HOST, port))
        opened.set()
        await asyncio.Event().wait()


def _engine_page() -> bytes:
    """An idle worker's."""
    return EngineMetrics(Driver(EngineConfig(), 1.0), "emulated").text()


# --- requests ----------------------------------------------------------------------------------------


def _hold(listen: str, requests: int, opened: Event, end: Event) -> None:
    """Open so many, then keep them open."""

    async def run() -> None:
        async with _channel(listen) as channel:
            calls = []
            for first in range(0, requests, CONCURRENCY):
                numbers = range(first, min(first + CONCURRENCY, requests))
                calls += await asyncio.gather(*(_begin(channel, number) for number in numbers))
            opened.set()
            await asyncio.to_thread(end.wait)
            for call in calls:
                call.cancel()

    asyncio.run(run())


def _hurry(listen: str, requests: int, opened: Event, end: Event) -> None:
    """So many, one after the other, at several places; again until it's the end."""

    async def run() -> None:
        async with _channel(listen) as channel:

            async def stream(first: int) -> None:
                number = first
                while not end.is_set():
                    call = await _begin(channel, number % requests)
                    await call.done_writing()
                    await call.read()
                    number += CONCURRENCY

            opened.set()
            await asyncio.gather(*(stream(first) for first in range(CONCURRENCY)))

    asyncio.run(run())


def _channel(listen: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(listen)


async def _begin(channel: grpc.aio.Channel, number: int) -> Any:
    """A request up to its pick."""
    call = channel.stream_stream(
        PROCESS_PATH,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )()
    for message in (_HEADERS, _body(json.dumps({"prompt": _prompt(number)}).encode())):
        await call.write(message)
        await call.read()
    return call


def _prompt(number: int) -> str:
    """One of 100 prompts of 4 KB, with an end of its own."""
    return f"Agent {number % 100}. " + f"Rule {number % 100}. " * 400 + str(number)


_FIELDS = ((":path", b"/v1/completions"), ("content-type", b"application/json"))
_HEADERS = ProcessingRequest(
    request_headers=HttpHeaders(
        headers=HeaderMap(headers=[HeaderValue(key=key, raw_value=value) for key, value in _FIELDS])
    ),
    protocol_config=ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED),
)


def _body(data: bytes) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=True))
