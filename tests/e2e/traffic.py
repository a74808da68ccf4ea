"""What the end-to-end tests send to a running set-up, and what they read from it."""

from __future__ import annotations

import asyncio
import copy
import json
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack
from extproc.emulator.worker_http import WORKER_HEADER

COMPLETIONS = "/v1/completions"
_PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"


def prompt(index: int, chars: int = 4000) -> str:
    """A prompt like no other; about a thousand tokens."""
    return (f"Document {index}: " + f"in section {index} it says, " * chars)[:chars]


@dataclass(frozen=True, slots=True)
class Answer:
    """``worker``: the address of the one that answered, "" if Envoy did."""

    status: int
    worker: str
    headers: dict[str, str]
    text: str


class Client:
    """Requests to one set-up."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.session = session

    def open(
        self,
        text: str,
        *,
        path: str = COMPLETIONS,
        max_tokens: int = 2,
        stream: bool = False,
        headers: dict[str, str] | None = None,
        emulate: dict[str, Any] | None = None,
    ) -> Any:
        """A request under way, to be entered. ``emulate``: how the worker shall fail it."""
        return self.session.post(
            self.stack.url + path,
            json={"prompt": text, "max_tokens": max_tokens, "stream": stream},
            headers=(headers or {}) | ({"x-emulate": json.dumps(emulate)} if emulate else {}),
        )

    async def ask(self, text: str, **options: Any) -> Answer:
        """A request and its whole answer."""
        async with self.open(text, **options) as response:
            return await whole(response)

    async def worker_of(self, text: str, **options: Any) -> str:
        """Who answers; it must be a success."""
        answer = await self.ask(text, **options)
        assert answer.status == 200, answer
        assert answer.worker
        return answer.worker


async def whole(response: aiohttp.ClientResponse) -> Answer:
    return Answer(
        response.status,
        response.headers.get(WORKER_HEADER, ""),
        {key.lower(): value for key, value in response.headers.items()},
        await response.text(),
    )


@asynccontextmanager
async def client(stack: Stack) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(stack, session)


async def ask_with_trailers(stack: Stack, body: bytes) -> None:
    """A request over HTTP/2 with trailers behind its body (at most 16 KiB); waits for the answer's end."""
    reader, writer = await _begin_over_http2(stack, body)
    writer.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, _fields({"x-checksum": "1"})))
    kind = flags = stream = 0
    async with asyncio.timeout(60):
        while not (stream == 1 and flags & _END_STREAM and kind in (_HEADERS, _DATA)):
            length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + await reader.readexactly(9))
            await reader.readexactly(length)
            assert kind not in (_RST_STREAM, _GOAWAY)
    writer.close()
    await writer.wait_closed()


async def reset_over_http2(stack: Stack, body: bytes, after_s: float) -> None:
    """A request over HTTP/2 (body at most 16 KiB) that the client resets after a while."""
    _, writer = await _begin_over_http2(stack, body)
    writer.write(_frame(_DATA, _END_STREAM, 1, b""))
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.write(_frame(_RST_STREAM, 0, 1, struct.pack(">I", _CANCEL)))
    await writer.drain()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _begin_over_http2(stack: Stack, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a request whose stream (number 1) is still open."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": COMPLETIONS,
        ":authority": "inference",
        "content-type": "application/json",
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.listener_port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
    writer.write(_frame(_HEADERS, _END_HEADERS, 1, _fields(fields)) + _frame(_DATA, 0, 1, body))
    return reader, writer


_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_CANCEL = 8


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113, section 4.1."""
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def _fields(fields: dict[str, str]) -> bytes:
    """RFC 7541, section 6.2.2: literals without indexing; names and values under 127 bytes."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


# --- the router's own account ------------------------------------------------------------------------


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def in_flight(self, pool: str = "workers") -> dict[str, int]:
        """Worker to requests in flight, for those that have any."""
        return {
            s.labels["worker"]: int(s.value)
            for s in self.samples
            if s.name == "extproc_inflight_requests" and s.labels["pool"] == pool and s.value
        }

    def workers(self, pool: str = "workers") -> set[str]:
        """The pool's workers."""
        samples = [s for s in self.samples if s.name == "extproc_inflight_requests"]
        return {s.labels["worker"] for s in samples if s.labels["pool"] == pool}


async def scrape(stack: Stack) -> Metrics:
    async with aiohttp.ClientSession() as session, session.get(stack.metrics_url) as response:
        assert response.status == 200
        return Metrics(await response.text())


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


async def metrics_when(
    stack: Stack, condition: Callable[[Metrics], bool], timeout_s: float = 30.0
) -> Metrics:
    """The first scrape that fulfils the condition."""
    deadline = time.monotonic() + timeout_s
    while not condition(metrics := await scrape(stack)):
        assert time.monotonic() < deadline, [s for s in metrics.samples if "extproc_" in s.name]
        await asyncio.sleep(0.05)
    return metrics


async def at_rest(stack: Stack) -> Metrics:
    """The scrape that shows nothing in flight, in any pool."""
    return await metrics_when(stack, lambda m: m.total("extproc_inflight_requests") == 0)


async def envoy_counter(stack: Stack, suffix: str) -> int:
    """Sum of Envoy's own counters whose name ends so."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(stack.admin_url + "/stats?type=Counters") as response,
    ):
        lines = [line.rpartition(": ") for line in (await response.text()).splitlines()]
    return sum(int(value) for name, _, value in lines if name.endswith(suffix))


# --- changes to the shipped YAML ---------------------------------------------------------------------


def add_route(
    bootstrap: envoy_setup.Json,
    name: str,
    *,
    cluster: str = "workers",
    timeout: str | None = None,
    processing_mode: dict[str, str] | None = None,
    **metadata: str,
) -> None:
    """``/NAME/v1/…`` does as ``/v1/…`` with these overrides; ``metadata`` is what the router is told."""
    config = next(iter(_route_configs(bootstrap)))
    routes = config["virtual_hosts"][0]["routes"]
    route = copy.deepcopy(next(r for r in routes if r["name"] == "generate"))
    route["name"] = name
    route["match"] = {"prefix": f"/{name}/v1/"}
    route["route"] |= {"prefix_rewrite": "/v1/", "cluster": cluster}
    if timeout:
        route["route"]["timeout"] = timeout
    overrides: dict[str, Any] = {}
    if metadata:
        pairs = [{"key": key.replace("_", "-"), "value": value} for key, value in metadata.items()]
        overrides["grpc_initial_metadata"] = pairs
    if processing_mode:
        overrides["processing_mode"] = processing_mode
    route["typed_per_filter_config"] = {
        envoy_setup.EXT_PROC_FILTER: {"@type": _PER_ROUTE, "overrides": overrides}
    }
    routes.insert(0, route)


def add_pool(bootstrap: envoy_setup.Json, name: str, workers: int, **settings: Any) -> None:
    """Another pool, of the first workers of the first."""
    pool = copy.deepcopy(envoy_setup.pool_clusters(bootstrap)[0])
    pool |= {"name": name, "metadata": {"filter_metadata": {envoy_setup.POOL_METADATA: settings}}}
    pool["load_assignment"]["cluster_name"] = name
    del endpoints(pool)[workers:]
    bootstrap["static_resources"]["clusters"].append(pool)


def endpoints(cluster: envoy_setup.Json) -> list[Any]:
    """The cluster's endpoints, to change."""
    found: list[Any] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    return found


def port_of(endpoint: envoy_setup.Json) -> int:
    return int(endpoint["endpoint"]["address"]["socket_address"]["port_value"])


def addresses(stack: Stack) -> list[str]:
    """The workers' addresses, as the router and the workers themselves know them."""
    return [url.removeprefix("http://") for url in stack.worker_urls]


def _route_configs(bootstrap: envoy_setup.Json) -> Any:
    for chain in bootstrap["static_resources"]["listeners"][0]["filter_chains"]:
        for network_filter in chain["filters"]:
            yield network_filter["typed_config"]["route_config"]
