"""Reading engines over real HTTP: emulated workers as processes, and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from counted import total
from prometheus_client import generate_latest

from extproc.demo.process import Process, answers, free_ports
from extproc.engine import scraper as scraping
from extproc.engine.scraper import Scraper
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.observe.engines import EngineObserver
from extproc.observe.observer import Observer
from extproc.prefix import PrefixChain
from extproc.router import Router
from extproc.routing.health import State
from extproc.routing.pace import LEAST_READINGS
from extproc.routing.pool import UNKNOWN_CACHE_TOKENS, Pool

HOST = "127.0.0.1"
GOOD = b'vllm:num_requests_running{engine="0"} 1\nvllm:prompt_tokens_total{engine="0"} 5\n'
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "START_SPREAD_S", 0.05)


def worker_process(port: int, folder: Path, *arguments: str) -> Process:
    command = [sys.executable, "-m", "extproc.cli", "worker", "--host", HOST, "--port", str(port), *arguments]
    return Process("worker", command, folder / f"{port}.log", lambda: answers(f"http://{HOST}:{port}/health"))


@contextmanager
def workers(folder: Path, *arguments: tuple[str, ...]) -> Iterator[dict[int, Process]]:
    """Emulated workers on free ports, one for each tuple of further options."""
    ports = free_ports(len(arguments))
    started = {port: worker_process(port, folder, *more) for port, more in zip(ports, arguments, strict=True)}
    try:
        for process in started.values():
            process.start()
        for process in started.values():
            process.wait_ready()
        yield started
    finally:
        for process in started.values():
            process.kill()


def config(ports: list[int], cache_tokens: dict[int, int] | None = None, **settings: object) -> RouterConfig:
    endpoints = tuple(
        EndpointConfig(HOST, port, "c", 100, cache_tokens=(cache_tokens or {}).get(port)) for port in ports
    )
    more = {"scrape_interval_s": 0.1, **settings}
    return RouterConfig({"pool": PoolConfig("pool", endpoints, PoolSettings(**more))})  # type: ignore[arg-type]


class Rig:
    """A router whose engines are being read."""

    def __init__(self, first: RouterConfig) -> None:
        self.observer = Observer()
        self.router = Router(first, self.observer)
        engines = EngineObserver(self.observer.registry)
        self.scraper = Scraper(self.router, engines)
        engines.watch(lambda: self.scraper.targets)

    def apply(self, new: RouterConfig) -> None:
        self.router.apply(new)
        self.scraper.reconcile()

    @property
    def pool(self) -> Pool:
        return self.router.pools["pool"]

    def capacity(self, port: int) -> int:
        slot = next(w.slot for w in self.pool.workers if w.address == address(port))
        return self.pool.picture.capacity_blocks(slot) * self.pool.picture.block_tokens

    def failures(self, reason: str) -> float:
        labels = {"pool": "pool", "reason": reason}
        return total(self.observer.registry, "extproc_engine_scrape_failures_total", **labels)

    def gauge(self, name: str, port: int) -> float | None:
        return self.observer.registry.get_sample_value(name, {"pool": "pool", "worker": address(port)})

    def known(self, port: int) -> bool:
        return self.scraper.state("pool", address(port)).report is not None


def address(port: int) -> str:
    return f"{HOST}:{port}"


@asynccontextmanager
async def reading(first: RouterConfig) -> AsyncIterator[Rig]:
    rig = Rig(first)
    task = asyncio.create_task(rig.scraper.run())
    await asyncio.sleep(0)
    try:
        yield rig
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not list(rig.scraper.targets)


@asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[int]:
    """A TCP server; its port. ``handle`` begins after the request's head was read."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await handle(reader, writer)
        writer.close()

    listening = await asyncio.start_server(accept, HOST, 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reply(page: bytes, status: str = "200 OK", headers: str = "") -> Handler:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(page)}\r\n{headers}connection: close\r\n\r\n"
        writer.write(head.encode() + page)
        await writer.drain()

    return handle


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; generous, for busy machines."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of things that know no events
            await asyncio.sleep(0.02)


async def test_each_engine_sizes_its_own_picture_unless_the_yaml_does(tmp_path: Path) -> None:
    sizes = ("--kv-cache-tokens", "64000"), ("--kv-cache-tokens", "128000"), ("--kv-cache-tokens", "32000")
    with workers(tmp_path, *sizes) as started:
        small, _, given = started
        first = config(list(started), {given: 256_000})
        async with reading(first) as rig:
            assert rig.capacity(small) == UNKNOWN_CACHE_TOKENS
            await until(lambda: all(rig.known(port) for port in started))
            assert [rig.capacity(port) for port in started] == [64_000, 128_000, 256_000]
            assert rig.gauge("extproc_engine_cache_tokens", given) == 32_000

            # A new configuration keeps what was learned, at once ...
            rig.apply(config(list(started), {given: 256_000}, alpha=2.0))
            assert [rig.capacity(port) for port in started] == [64_000, 128_000, 256_000]
            # ... with blocks of another size, too, and the YAML's word comes first, both ways.
            rig.apply(config(list(started), {small: 25_600}, block_tokens=128))
            assert [rig.capacity(port) for port in started] == [25_600, 128_000, 32_000]
            rig.apply(config(list(started), dict.fromkeys(started, 12800)))
            assert [rig.capacity(port) for port in started] == [12_800] * 3


async def test_a_restart_empties_the_picture_of_that_worker_alone(tmp_path: Path) -> None:
    with workers(tmp_path, (), ()) as started:
        again, other = started
        async with reading(config(list(started))) as rig:
            await until(lambda: all(rig.known(port) for port in started))
            picture = rig.pool.picture
            for worker in rig.pool.workers:
                picture.touch(worker.slot, [1, 2, 3], 0.0)
            # No request was served: nothing but the process's start can tell, and starts within a second of
            # each other count as one, since the system's own idea of when it booted shifts that much.
            await asyncio.sleep(1.5)
            started[again].kill()
            await until(lambda: rig.failures("connection") > 0)
            assert picture.lookup([1, 2, 3]) == {worker.slot: 3 for worker in rig.pool.workers}
            started[again].start()
            await until(lambda: len(picture.lookup([1, 2, 3])) == 1)
            slots = {worker.address: worker.slot for worker in rig.pool.workers}
            assert picture.lookup([1, 2, 3]) == {slots[address(other)]: 3}
            assert picture.used_blocks(slots[address(again)]) == 0
            labels = {"pool": "pool"}
            assert rig.observer.registry.get_sample_value("extproc_engine_restarts_total", labels) == 1
            assert rig.scraper.state("pool", address(again)).previous is None


async def test_load_shows_in_the_gauges(tmp_path: Path) -> None:
    with workers(tmp_path, ("--max-num-seqs", "1")) as started:
        (port,) = started
        body = json.dumps({"prompt": "a b c " * 200, "max_tokens": 10_000}).encode()
        fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
        async with reading(config([port])) as rig:
            writers = []
            for _ in range(3):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.write(head.encode() + body)
                writers.append(writer)
            names = ("extproc_engine_running_requests", "extproc_engine_waiting_requests")
            await until(lambda: [rig.gauge(name, port) for name in names] == [1, 2])
            usage = rig.gauge("extproc_engine_kv_usage_ratio", port)
            assert usage is not None
            assert 0 < usage < 1
            assert rig.gauge("extproc_engine_hit_ratio", port) in (None, 0)
            for writer in writers:
                writer.close()
            await until(lambda: rig.gauge("extproc_engine_running_requests", port) == 0)


async def test_a_silent_worker_becomes_unknown_not_idle(tmp_path: Path) -> None:
    with workers(tmp_path, ()) as started:
        (port,) = started
        async with reading(config([port], scrape_timeout_s=0.2)) as rig:
            await until(lambda: rig.gauge("extproc_engine_running_requests", port) == 0)
            child = started[port].pid
            assert child is not None
            os.kill(child, signal.SIGSTOP)
            try:
                await until(lambda: rig.failures("timeout") >= 2)
                await until(lambda: rig.gauge("extproc_engine_running_requests", port) is None)
                age_s = rig.gauge("extproc_engine_signal_age_seconds", port)
                assert age_s is not None
                assert age_s > 0.3
                assert rig.capacity(port) == 189_952  # what it has can't have changed: whole blocks of 256
            finally:
                os.kill(child, signal.SIGCONT)
            await until(lambda: rig.gauge("extproc_engine_running_requests", port) == 0)
            assert rig.scraper.state("pool", address(port)).failures == 0


async def test_a_dead_worker_is_asked_less_and_less_until_it_is_there(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with reading(config([port])) as rig:
        await until(lambda: rig.scraper.state("pool", address(port)).failures >= 3)
        assert rig.gauge("extproc_engine_signal_age_seconds", port) == float("inf")
        assert rig.gauge("extproc_engine_running_requests", port) is None
        assert rig.capacity(port) == UNKNOWN_CACHE_TOKENS
        process = worker_process(port, tmp_path)
        process.start()
        try:
            await until(lambda: rig.known(port))
        finally:
            process.kill()


async def _hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def _drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"vllm:num_requests_running 0\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(GOOD * 1000)
        await writer.drain()


async def _one_line(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 10_000)
        await writer.drain()


async def _cut_short(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + GOOD)
    await writer.drain()


async def _no_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff" * 1000 + b"\r\n\r\n")
    await writer.drain()


async def _slam(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    return


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (_hang, "timeout"),
        (_drip, "timeout"),
        (_endless, "too_large"),
        (_one_line, "garbage"),
        (_cut_short, "garbage"),
        (_no_http, "garbage"),
        (_slam, "connection"),
        (reply(b"<html>hello</html>"), "garbage"),
        (reply(b""), "garbage"),
        (reply(GOOD, "404 Not Found"), "status"),
        (reply(GOOD, "503 Service Unavailable"), "status"),
        (reply(GOOD, "302 Found", "location: http://127.0.0.1:1/metrics\r\n"), "status"),
        (reply(b"\x1f\x8b\x08" + b"\x00" * 100, headers="content-encoding: gzip\r\n"), "garbage"),
    ],
)
async def test_a_broken_page_is_a_failure_and_harms_no_other(handle: Handler, reason: str) -> None:
    timeout_s = 0.3 if reason == "timeout" else 20.0
    async with (
        server(handle) as bad,
        server(reply(GOOD)) as good,
        reading(config([bad, good], scrape_timeout_s=timeout_s)) as rig,
    ):
        await until(lambda: rig.failures(reason) >= 2)
        await until(lambda: rig.known(good))
        assert not rig.known(bad)
        assert rig.gauge("extproc_engine_running_requests", bad) is None
        text = generate_latest(rig.observer.registry).decode()
        counts = re.findall(r'scrape_failures_total\{pool="pool",reason="(\w+)"\} (\S+)', text)
        assert {name for name, count in counts if float(count)} == {reason}


async def test_a_long_page_is_read_in_pieces() -> None:
    filler = b'vllm:request_bucket{engine="0",le="1"} 1\n' * 40_000
    async with (
        server(reply(filler + GOOD + filler + b'vllm:num_requests_waiting{engine="0"} 3')) as port,
        reading(config([port], scrape_timeout_s=20.0)) as rig,
    ):
        await until(lambda: rig.known(port))
        assert rig.gauge("extproc_engine_running_requests", port) == 1
        assert rig.gauge("extproc_engine_waiting_requests", port) == 3


async def test_workers_come_and_go(tmp_path: Path) -> None:
    asked: list[str] = []

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append("")
        await reply(GOOD)(_, writer)

    def followed(rig: Rig) -> set[str]:
        return {target.worker.address for target in rig.scraper.targets}

    async with server(handle) as one, server(reply(GOOD)) as two, reading(config([one])) as rig:
        await until(lambda: len(asked) >= 2)
        rig.apply(config([two]))
        assert followed(rig) == {address(two)}
        await until(lambda: rig.known(two))
        before = len(asked)
        rig.apply(config([one, two]))
        assert not rig.known(one)  # it may be another engine
        await until(lambda: len(asked) > before)
        rig.apply(config([one, two], scrape_interval_s=0.0))
        assert followed(rig) == set()
        rig.apply(RouterConfig({}))
        rig.apply(config([two]))
        await until(lambda: rig.known(two))
        assert followed(rig) == {address(two)}


async def test_the_path_is_the_pools() -> None:
    paths: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        await reply(GOOD)(reader, writer)
        writer.close()

    async with await asyncio.start_server(accept, HOST, 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with reading(config([port], metrics_path="prometheus/metrics?a=b")) as rig:
            await until(lambda: rig.known(port))
    assert set(paths) == {b"/prometheus/metrics?a=b"}


def test_serve_reads_engines_and_ends_cleanly(tmp_path: Path) -> None:
    with workers(tmp_path, ("--kv-cache-tokens", "51200")) as started:
        (port,) = started
        listen, metrics = free_ports(2)
        yaml = tmp_path / "envoy.yaml"
        endpoint = {"address": {"socket_address": {"address": HOST, "port_value": port}}}
        cluster = {
            "name": "chat",
            "metadata": {"filter_metadata": {"extproc": {"scrape_interval_s": 0.2}}},
            "load_assignment": {
                "cluster_name": "chat",
                "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
            },
        }
        yaml.write_text(json.dumps({"static_resources": {"clusters": [cluster]}}))
        command = [sys.executable, "-m", "extproc.cli", "serve", "--envoy-config", str(yaml)]
        command += ["--listen", f"{HOST}:{listen}", "--metrics", f"{HOST}:{metrics}"]

        def page() -> str:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{metrics}", timeout=5) as answer:
                    return str(answer.read().decode())
            except OSError:
                return ""

        def told() -> bool:
            return f'extproc_engine_cache_tokens{{pool="chat",worker="{HOST}:{port}"}} 51200.0' in page()

        router = Process("router", command, tmp_path / "router.log", told)
        router.start()
        try:
            router.wait_ready()
        finally:
            assert router.stop() == 0
        log = router.log.read_text()
        assert all(json.loads(line)["level"] == "info" for line in log.splitlines()), log
        assert log.count("told the size") == 1


async def test_the_times_that_an_engine_tells_teach_its_speed() -> None:
    counts = {"requests": 0, "seconds": 0.0}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = b"".join(
            b'vllm:%s{engine="0"} %g\n' % (name, value)
            for name, value in (
                (b"num_requests_running", 0.0),
                (b"request_queue_time_seconds_sum", 0.5 * counts["seconds"]),
                (b"request_queue_time_seconds_count", counts["requests"]),
                (b"request_prefill_time_seconds_sum", 0.5 * counts["seconds"]),
                (b"request_prefill_time_seconds_count", counts["requests"]),
            )
        )
        await reply(page)(reader, writer)

    def speed(port: int) -> float:
        return rig.gauge("extproc_worker_prefill_tokens_per_second", port) or 0.0

    async with server(handle) as port, reading(config([port], learn_speed=True)) as rig:
        await until(lambda: rig.known(port))
        assert speed(port) == pytest.approx(10_000.0)
        for index in range(20):  # a second each, as foretold; two, as told
            hashes = tuple(range(index * 1000, index * 1000 + 39))
            prompt = PrefixChain(hashes, 256, 10_000, hashes[0])
            decision = rig.pool.decide(prompt, 10.0 * index)
            assert decision is not None
            rig.pool.end(rig.pool.begin(decision, prompt, 10.0 * index), 10.0 * index + 5.0)
        counts.update(requests=20, seconds=40.0)
        await until(lambda: speed(port) < 9_900.0)


async def test_the_tokens_that_an_engine_generates_show_that_it_has_become_slow() -> None:
    tokens = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal read
        page = (
            b'vllm:num_requests_running{engine="0"} 5\nvllm:generation_tokens_total{engine="0"} %d\n' % tokens
        )
        await reply(page)(reader, writer)
        read += 1

    read = 0
    async with server(handle) as port, reading(config([port])) as rig:
        await until(lambda: rig.known(port))
        (worker,) = rig.pool.workers
        worker.in_flight = 5
        now = 0.0
        for made in (*[500] * (LEAST_READINGS + 2), 20):
            assert worker.health.state is State.HEALTHY
            for _ in range(8):  # two seconds
                now += 0.25
                rig.pool.check(now)
            tokens += made
            seen = read
            await until(lambda seen=seen: read >= seen + 3)
        await until(lambda: worker.health.state is State.EJECTED)
