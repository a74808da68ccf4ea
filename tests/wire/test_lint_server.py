"""`extproc lint --server`: a real router's second port tells its forks to this machine, and to no other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from extproc.cli import main
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe.exporter import FORKS_PATH, Exporter
from extproc.observe.observer import Observer
from extproc.router import Router, Routing

SECRET = "marzipan"


@pytest.fixture
def router() -> Router:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(3))
    return Router(RouterConfig(pools={"a": PoolConfig("a", endpoints)}), Observer())


@pytest.fixture
async def url(router: Router) -> AsyncIterator[str]:
    exporter = Exporter(router._observer.registry, router)
    yield f"http://{await exporter.start('127.0.0.1:0')}"
    await exporter.stop()


def send(router: Router, system: str, user: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    facts = RequestFacts("r", "/v1/chat/completions")
    body = json.dumps({"messages": messages}).encode()
    routing = router.route(facts, RouteOverrides(), body, time.monotonic())
    assert isinstance(routing, Routing)
    router.ended(routing, time.monotonic())


async def lint(url: str, *options: str) -> int:
    return await asyncio.to_thread(main, ["lint", "--server", url, *options])


async def test_a_time_early_in_the_prompt(
    url: str, router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = f"Be kind to {SECRET}. " * 1000
    for n in range(30):
        send(router, rules, f"What about {n}? " * 100)
    capsys.readouterr()
    assert await lint(url) == 0
    assert "no fork" in capsys.readouterr().out
    for n in range(30):
        send(router, f"It is 12:{n}. {rules}", "What now?")
    capsys.readouterr()
    assert await lint(url.removeprefix("http://")) == 1
    told = capsys.readouterr().out
    assert "the first 256 tokens" in told
    assert "extproc lint FILE" in told
    assert SECRET not in told
    assert max(map(len, told.splitlines())) <= 100
    assert await lint(url, "--json") == 1
    (fork,) = json.loads(capsys.readouterr().out)["a"]["forks"]
    assert fork["alike"] == 30
    assert fork["depth_tokens"] == 0
    assert fork["lost_tokens"] > 29 * 4000


async def test_for_this_machine_only(url: str) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.get(url + FORKS_PATH, headers={"host": "evil.example"}) as response,
    ):
        assert response.status == 403


async def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert await lint("http://127.0.0.1:1") == 2
    assert "--metrics" in capsys.readouterr().err
