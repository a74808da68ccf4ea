"""``/status`` and ``/history`` over HTTP, and ``extproc top`` on a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import msgspec
import pytest
from aiohttp import web

from extproc.cli import main
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.live.live import Live
from extproc.live.recorder import Recorder
from extproc.live.serving import routes
from extproc.live.status import History, Status
from extproc.observe.exporter import Exporter
from extproc.observe.observer import Observer
from extproc.router import Router, Routing

PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "A question of prefixes. " * 300}]}).encode()


class Running:
    """A router with its second port, in this process."""

    def __init__(self, workers: int = 3, pools: tuple[str, ...] = ("a", "b")) -> None:
        endpoints = tuple(
            EndpointConfig(f"10.0.{i // 256}.{i % 256}", 8000, "c", 120) for i in range(workers)
        )
        settings = PoolSettings(scrape_interval_s=0.0)
        self.observer = Observer()
        self.router = Router(
            RouterConfig(
                {name: PoolConfig(name, endpoints, settings) for name in pools}, source="envoy.yaml"
            ),
            self.observer,
        )
        self.recorder = Recorder(time.monotonic())
        self.observer.add(self.recorder)
        self.live = Live(self.recorder, lambda: self.router.pools, source=lambda: self.router.config.source)
        self.exporter = Exporter(self.observer.registry, self.router, routes(self.live))
        self.url = ""

    def ask(self, pool: str = "a") -> Routing:
        now = time.monotonic()
        facts = RequestFacts("r-1", PATH, "application/json")
        done = self.router.route(facts, RouteOverrides(pool=pool), BODY, now)
        assert isinstance(done, Routing)
        self.router.responded(done, done.decision.worker.address, 1, 200, now)
        self.router.ended(done, now)
        return done


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    it = Running()
    it.url = f"http://{await it.exporter.start('127.0.0.1:0')}"
    yield it
    await it.exporter.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_status_over_http(running: Running, http: aiohttp.ClientSession) -> None:
    done = [running.ask() for _ in range(5)]
    async with http.get(running.url + "/status") as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        assert response.headers["cache-control"] == "no-store"
        told = msgspec.json.decode(await response.read(), type=Status)
    first, second = told.pools
    assert (first.name, second.name, told.config) == ("a", "b", "envoy.yaml")
    assert sum(first.reasons.values()) == pytest.approx(5 / told.window_s, abs=0.02)
    assert abs(told.now_s - time.time()) < 60
    assert {decision.worker for decision in told.decisions} == {each.decision.worker.address for each in done}
    assert sum(second.reasons.values()) == 0


async def test_history_over_http(running: Running, http: aiohttp.ClientSession) -> None:
    running.ask()
    for step in range(1, 4):
        running.live.tick(running.recorder.started_s + 10.0 * step)

    async def told(query: str = "") -> History:
        async with http.get(f"{running.url}/history{query}") as response:
            assert response.status == 200
            return msgspec.json.decode(await response.read(), type=History)

    whole = await told()
    assert (len(whole.ends_s), list(whole.pools)) == (3, ["a", "b"])
    assert whole == msgspec.json.decode(
        msgspec.json.encode(running.live.history(time.monotonic())), type=History
    )
    assert whole.pools["a"].pool.requests_per_s == [0.1, 0.0, 0.0]
    assert whole.pools["a"].pool.hit_ratio == [0.0, None, None]
    assert len(whole.pools["a"].workers) == 3
    newer = await told(f"?pool=a&since={whole.ends_s[1]}")
    assert (newer.ends_s, list(newer.pools)) == (whole.ends_s[2:], ["a"])
    assert (await told("?pool=unknown")).pools == {}
    for query in ("?since=yesterday", "?since=nan", "?since="):
        async with http.get(f"{running.url}/history{query}") as response:
            assert response.status == 400
            assert "Unix seconds" in await response.text()


async def test_a_step_that_ends_while_the_history_is_told(http: aiohttp.ClientSession) -> None:
    running = Running(workers=40)
    url = f"http://{await running.exporter.start('127.0.0.1:0')}"
    now = running.recorder.started_s

    async def go_on() -> None:
        nonlocal now
        for _ in range(5):
            now += 10.0
            running.live.tick(now)
            await asyncio.sleep(0)

    for _ in range(20):
        ticking = asyncio.create_task(go_on())
        async with http.get(url + "/history") as response:
            told = msgspec.json.decode(await response.read(), type=History)
        await ticking
        lengths = {len(series.in_flight) for series in told.pools["a"].workers.values()}
        assert lengths == {len(told.ends_s)}
    await running.exporter.stop()


async def test_only_this_machine_may_look(running: Running, http: aiohttp.ClientSession) -> None:
    for path in ("/status", "/history"):
        async with http.get(running.url + path, headers={"host": "evil.example"}) as response:
            assert response.status == 403
        async with http.post(running.url + path) as response:
            assert response.status == 405


# --- the command ---------------------------------------------------------------------------------


async def test_once(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    async def printed(*arguments: str) -> str:
        assert await asyncio.to_thread(main, ["top", "--once", *arguments]) == 0
        return capsys.readouterr().out

    done = running.ask()
    out = await printed("--server", running.url.removeprefix("http://"))  # as people have it at hand
    assert "pool a (1 of 2)" in out
    assert "pool b (2 of 2)" in out
    assert out.count(done.decision.worker.address) >= 3  # worker, prefix, decision
    assert "\x1b" not in out
    out = await printed("--server", running.url + "/metrics", "--pool", "b")
    assert "pool a" not in out
    assert "pool b" in out
    out = await printed("--server", running.url, "--pool", "b", "--json")
    told = msgspec.json.decode(out, type=Status)
    assert ([pool.name for pool in told.pools], told.decisions) == (["b"], [])


async def test_what_top_cannot_show_it_says(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    async def odd(request: web.Request) -> web.Response:
        return web.Response(text='{"pools": 1}')

    application = web.Application()
    application.add_routes([web.get("/odd/status", odd)])
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    other = f"http://127.0.0.1:{runner.addresses[0][1]}"
    for arguments, says in (
        (["--server", running.url, "--pool", "c"], "there are: a, b"),
        (["--server", "http://127.0.0.1:1"], "Connection refused; start the router with --metrics"),
        (["--server", "http://[::1"], "use http://host:port"),
        (["--server", "ftp://127.0.0.1"], "use http://host:port"),
        (["--server", other], "/status is unknown there"),
        (["--server", other + "/odd"], "something else"),
        (["--server", running.url.replace("127.0.0.1", "no-such-name.invalid")], "no-such-name"),
    ):
        for once in ([], ["--once"]):
            assert await asyncio.to_thread(main, ["top", *once, *arguments]) == 2
            said = capsys.readouterr().err
            assert says in said, said
            assert said.count("\n") == 1
    await runner.cleanup()
    for interval in ("0", "-1", "soon", "nan"):
        with pytest.raises(SystemExit) as ended:
            main(["top", "--interval", interval])
        assert ended.value.code == 2


ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
}


def plain(drawn: str) -> str:
    """Without styles and the like."""
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", drawn)


class Terminal:
    """A command on a terminal of 80 columns and 24 rows, and what it drew there."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=ENVIRONMENT | {"TERM": "xterm-256color"} | environment,
        )
        self._drawn: list[bytes] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                if select.select([self._master], [], [], 0.2)[0]:
                    self._drawn.append(os.read(self._master, 65536))

    @property
    def drawn(self) -> str:
        return b"".join(self._drawn).decode(errors="replace")

    def frames(self) -> list[list[str]]:
        """Whole screens, as their lines without styles."""
        text = re.sub(r"\x1b\[\d*(;\d+)*m", "", self.drawn)
        return [
            re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", frame).splitlines() for frame in text.split("\x1b[H")[1:-1]
        ]

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def shows(self, text: str, after: int = 0) -> list[str]:
        """The first screen with that text, of those from then on."""

        def found() -> list[list[str]]:
            return [frame for frame in self.frames()[after:] if any(text in line for line in frame)]

        self.until(lambda: bool(found()))
        return found()[0]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true."""
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, f"it never came true; last: {self.frames()[-1:]}"
            time.sleep(0.05)

    def ended(self) -> int:
        code = self.process.wait(30)
        assert termios.tcgetattr(self._slave) == self.before, "the terminal isn't as it was"
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(5)
        os.close(self._slave)
        os.close(self._master)


TOP = [sys.executable, "-m", "extproc.cli", "top", "--interval", "0.1"]


@contextlib.contextmanager
def terminal(url: str, **environment: str) -> Iterator[Terminal]:
    shown = Terminal([*TOP, "--server", url], **environment)
    try:
        yield shown
    finally:
        shown.close()


async def test_live_on_80_by_24_with_keys(running: Running) -> None:
    running.ask()

    def look() -> None:
        with terminal(running.url) as top:
            frame = top.shows("pool a (1 of 2)")
            assert len(frame) == 24
            assert max(map(len, frame)) <= 80
            top.press("p")
            top.shows("pool b (2 of 2)")
            top.press("s")
            top.shows("s sort: load")
            top.press("\x1b[A")  # an arrow is no key of ours
            top.press("h")
            top.shows("uncached prompt tokens that wait there")
            top.press("x")
            seen = len(top.frames())
            top.shows("pool b", after=seen)
            top.press(" ")
            top.shows("held still")
            assert top.process.poll() is None
            top.press("q")
            assert top.ended() == 0
            top.until(lambda: "\x1b[?1049l" in top.drawn)  # the other screen is left
            assert "\x1b[?25h" in top.drawn  # with a cursor

    await asyncio.to_thread(look)


async def test_sigterm_leaves_the_terminal_as_it_was(running: Running) -> None:
    def look() -> None:
        with terminal(running.url, NO_COLOR="1") as top:
            top.shows("pool a")
            top.process.send_signal(signal.SIGTERM)
            assert top.ended() == 0
            top.until(lambda: "\x1b[?1049l" in top.drawn)
            assert not re.search(r"\x1b\[(\d+;)*3\d(;\d+)*m", top.drawn)

    await asyncio.to_thread(look)


async def test_plain_terminals(running: Running) -> None:
    running.ask()

    def look() -> None:
        with terminal(running.url, TERM="dumb", PYTHONIOENCODING="ascii") as top:
            top.until(lambda: top.drawn.count("pool b") > 1)
            top.process.send_signal(signal.SIGINT)
            assert top.ended() == 0
            assert top.drawn.isascii()
            assert "\x1b" not in top.drawn
            assert max(map(len, top.drawn.splitlines())) <= 80
            assert re.search(r"^10.0.0.0:8000 ok    \.{6}  0/120 ", top.drawn, re.MULTILINE)

    await asyncio.to_thread(look)


async def test_it_lives_through_a_restart_of_the_router(running: Running) -> None:
    with terminal(running.url) as top:
        await asyncio.to_thread(top.shows, "pool a (1 of 2)")
        await running.exporter.stop()
        frame = await asyncio.to_thread(top.shows, "no answer for")
        assert "Connection refused" in frame[-1]
        assert "10.0.0.2:8000" in frame[6]  # the last that is known
        seen = len(top.frames())
        again = Running(workers=1, pools=("a",))
        await again.exporter.start(running.url.removeprefix("http://"))
        frame = await asyncio.to_thread(top.shows, "q quit", seen)
        assert frame[0].startswith("pool a  ")
        top.press("q")
        assert await asyncio.to_thread(top.ended) == 0
        await again.exporter.stop()


async def test_lines_of_json_until_interrupted(running: Running) -> None:
    def read() -> list[Status]:
        child = subprocess.Popen([*TOP, "--server", running.url, "--json"], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(4)]
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0
        child.stdout.close()
        return [msgspec.json.decode(line, type=Status) for line in lines]

    told = await asyncio.to_thread(read)
    assert told[0].now_s < told[3].now_s
    assert {status.config for status in told} == {"envoy.yaml"}
