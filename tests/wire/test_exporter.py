"""The second port of a running router: metrics, explanations, and nothing of a prompt."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog.testing
from prometheus_client.parser import text_string_to_metric_families

from extproc.cli import main
from extproc.errors import ListenError
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe.exporter import Exporter
from extproc.observe.local import is_local, is_meant_for_here
from extproc.observe.observer import Observer
from extproc.router import Router, Routing

PATH = "/v1/chat/completions"
MAX_BODY_BYTES = 100_000


def body(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text * 300}]}).encode()


@pytest.fixture
def router() -> Router:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(3))
    pools = {name: PoolConfig(name, endpoints, PoolSettings(tenant_header="x-tenant")) for name in ("a", "b")}
    return Router(RouterConfig(pools=pools, max_body_bytes=MAX_BODY_BYTES), Observer())


@pytest.fixture
async def url(router: Router) -> AsyncIterator[str]:
    observer = router._observer
    observer.watch(lambda: router.pools)
    exporter = Exporter(observer.registry, router)
    yield f"http://{await exporter.start('127.0.0.1:0')}"
    await exporter.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


async def test_metrics(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(url + "/metrics", headers={"accept-encoding": "identity"}) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        plain = await response.text()
    names = {family.name for family in text_string_to_metric_families(plain)}
    assert {"extproc_decisions", "extproc_inflight_requests", "process_resident_memory_bytes"} <= names
    async with http.get(url + "/", headers={"accept-encoding": "gzip"}) as response:
        assert response.headers["content-encoding"] == "gzip"
        zipped = gzip.decompress(await response.read()).decode()
    assert {family.name for family in text_string_to_metric_families(zipped)} == names
    accept = {"accept": "application/openmetrics-text; version=1.0.0", "accept-encoding": "identity"}
    async with http.get(url + "/metrics?name[]=extproc_internal_errors_total", headers=accept) as response:
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        lines = (await response.text()).splitlines()
    assert lines[-1] == "# EOF"
    assert {line.split("{")[0] for line in lines if not line.startswith("#")} == {
        "extproc_internal_errors_total 0.0"
    }


async def test_explain(router: Router, url: str, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    given = body("A question of prefixes. ")
    done = router.route(RequestFacts(path=PATH), RouteOverrides(pool="a"), given, 10.0)
    assert isinstance(done, Routing)
    async with http.post(url + "/explain?x-extproc-pool=a", data=given) as response:
        assert response.status == 200
        said = json.loads(await response.read())
    assert (said["reason"], said["picks"][0]) == ("affinity", done.decision.worker.address)
    first = said["workers"][0]
    assert (first["in_flight"], first["worker"]) == (1, done.decision.worker.address)
    assert first["cached_tokens"] > first["uncached_tokens"] >= 0
    assert router.pools["a"].tickets == 1
    async with http.post(url + "/explain?x-extproc-pool=a&path=/v1/models", data=given) as response:
        assert json.loads(await response.read())["unreadable"] == "unknown_path"
    file = tmp_path / "body.json"
    file.write_bytes(given)
    command = ["explain", "--body", str(file), "--server", url, "--pool"]
    assert await asyncio.to_thread(main, [*command, "a"]) == 0
    assert await asyncio.to_thread(main, [*command, "c"]) == 2


@pytest.mark.parametrize(
    ("query", "data", "status", "says"),
    [
        ("", b"{}", 404, "a, b"),
        ("?x-extproc-pool=a&x-extproc-policy=best", b"{}", 400, "best"),
        ("?x-extproc-pool=a", b" " * (MAX_BODY_BYTES + 1), 413, ""),
    ],
)
async def test_explain_refuses(
    url: str, http: aiohttp.ClientSession, query: str, data: bytes, status: int, says: str
) -> None:
    async with http.post(url + "/explain" + query, data=data) as response:
        assert response.status == status
        assert says in await response.text()


def test_only_this_machine_may_ask_for_explanations() -> None:
    assert [is_local(a) for a in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")] == [True] * 4
    assert [is_local(a) for a in ("10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "", None)] == [False] * 5


async def test_a_name_pointed_at_this_machine_is_refused(url: str, http: aiohttp.ClientSession) -> None:
    """DNS rebinding: a page of another site reads what its own name, now 127.0.0.1, answers."""
    for host in ("evil.example:9090", "localhost.evil.example", ""):
        async with http.post(url + "/explain", data=b"{}", headers={"host": host}) as response:
            assert response.status == 403, host
    hosts = ("127.0.0.1", "127.0.0.1:9090", "localhost:1", "LocalHost", "[::1]:9090", "10.0.0.1")
    assert [is_meant_for_here(host) for host in hosts] == [True] * 6
    assert [is_meant_for_here(host) for host in ("a.b", "[::1", "::1:a", "1.2.3", "")] == [False] * 5


async def test_addresses_that_cannot_be_served(router: Router, url: str) -> None:
    taken = url.removeprefix("http://")
    for address in (taken, "9090", "127.0.0.1:", "127.0.0.1:99999", ":1"):
        with pytest.raises(ListenError, match=r"--metrics|can't serve metrics"):
            await Exporter(router._observer.registry, router).start(address)


MARKER = "zanzibar-4711"

Records = list[MutableMapping[str, Any]]


@pytest.fixture
def records() -> Iterator[Records]:
    """All that is logged, at any level."""
    before = structlog.get_config()
    structlog.reset_defaults()  # another test may have set a level, and cached its loggers
    with structlog.testing.capture_logs() as logged:
        yield logged
    structlog.configure(**before)


async def test_nothing_of_a_prompt_is_told(
    router: Router, url: str, http: aiohttp.ClientSession, records: Records
) -> None:
    """Planted all over bodies and in the tenant's name; then logs, metrics and explanations are searched."""
    bodies = [
        body(MARKER),
        json.dumps({"messages": [{"role": MARKER, "content": [{"type": MARKER, "text": 1}]}]}).encode(),
        f'{{"messages": "{MARKER}", "prompt": ["{MARKER}"'.encode(),
        json.dumps({"model": MARKER, "tools": [{"name": MARKER}], "user": MARKER, "messages": []}).encode(),
    ]
    told = ""
    for path in (PATH, "/v1/completions", "/v1/messages", "/v1/responses"):
        for given in bodies:
            asked = RequestFacts("r-1", path, "application/json", headers={"x-tenant": MARKER})
            done = router.route(asked, RouteOverrides(pool="a"), given, 10.0)
            assert isinstance(done, Routing)
            router.responded(done, "10.0.0.9:1", 3, 503, 10.5)
            router.ended(done, 11.0)
            query = {"x-extproc-pool": "a", "path": path}
            async with http.post(url + "/explain", params=query, data=given) as response:
                assert response.status == 200
                told += await response.text()
    slow = RequestFacts("r-2", PATH, headers={"x-tenant": MARKER, "x-extproc-ttft-slo-ms": "1"})
    assert not isinstance(router.route(slow, RouteOverrides(pool="a"), bodies[0], 10.0), Routing)
    async with http.get(url + "/metrics", headers={"accept-encoding": "identity"}) as response:
        told += await response.text()
    kinds = {record["event"] for record in records}
    assert {"decided", "ended", "refused", "a pick was not used"} <= kinds
    assert "zanzibar" not in told + json.dumps(records)
    assert told


async def test_decision_records(router: Router, records: Records) -> None:
    given = body("A question of prefixes. ")
    done = router.route(RequestFacts("r-7", PATH), RouteOverrides(pool="a"), given, 10.0)
    assert isinstance(done, Routing)
    other = done.decision.order[1].address
    router.responded(done, other, 2, 200, 10.25)
    router.ended(done, 11.5)
    decided, ended = (next(r for r in records if r["event"] == kind) for kind in ("decided", "ended"))
    expected = {
        "request_id": "r-7",
        "pool": "a",
        "worker": done.decision.worker.address,
        "fallbacks": [worker.address for worker in done.decision.order[1:]],
        "reason": "cold",
        "cached_tokens": 0,
        "prompt_tokens": done.decision.prompt_tokens,
        "predicted_ttft_ms": round(done.decision.predicted_ttft_s * 1000, 1),
        "log_level": "debug",
    }
    assert decided | expected == decided
    expected = {
        "request_id": "r-7",
        "pool": "a",
        "picked": done.decision.worker.address,
        "worker": other,
        "status": 200,
        "attempts": 2,
        "headers_ms": 250.0,
        "duration_ms": 1500.0,
        "predicted_ttft_ms": round(done.decision.predicted_ttft_s * 1000, 1),
        "log_level": "debug",
    }
    assert ended | expected == ended
    assert [r["log_level"] for r in records if r["event"] == "a pick was not used"] == ["info"]
