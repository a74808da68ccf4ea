"""Spans over real gRPC: whose children they are, what they say, and that nobody waits for the collector."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml
from collector import Collector

from extproc.errors import TracingError
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.observe import tracing
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.routing.demand import digest
from extproc.server import Server
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

SECRET_PROMPT = "the prompt that nobody may see"
SECRET_TENANT = "Bearer sk-nobody-may-see-this"
BODY = {"model": "llama", "max_tokens": 7, "stream": True, "prompt": SECRET_PROMPT * 50}

TRACE = "ab" * 16
ENVOY = "cd" * 8
CLIENT = "ef" * 8
ERROR, SERVER_KIND = 2, 2


def headers(path: str = "/v1/completions", **others: str) -> ProcessingRequest:
    fields = {":path": path, "content-type": "application/json", "x-request-id": "r-1"}
    fields |= {name.replace("_", "-"): value for name, value in others.items()}
    return ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in fields.items()])
        ),
        protocol_config=ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED),
    )


def body(data: Any = BODY) -> ProcessingRequest:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return ProcessingRequest(request_body=HttpBody(body=text, end_of_stream=True))


def response(status: int, upstream: str, attempts: int) -> ProcessingRequest:
    message = ProcessingRequest(
        response_headers=HttpHeaders(
            headers=HeaderMap(headers=[HeaderValue(key=":status", value=str(status))])
        )
    )
    seen = message.attributes["envoy.filters.http.ext_proc"].fields
    seen["upstream.address"].string_value = upstream
    seen["upstream.request_attempt_count"].number_value = attempts
    return message


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.grpc_port}")


@asynccontextmanager
async def tracing_server() -> AsyncIterator[grpc.aio.Channel]:
    observer = Observer()
    traced = tracing.start(flag=True)
    assert traced is not None
    observer.add(traced.spans, traced.spans.wanted_headers)
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "pool", 120) for i in range(4))
    pools = {
        "pool": PoolConfig("pool", endpoints, PoolSettings(tenant_header="authorization")),
        "empty": PoolConfig("empty", (), PoolSettings(reject_if_empty=True)),
    }
    router = Router(RouterConfig(pools=pools, clusters={"workers": "pool"}), observer)
    server = Server(router, observer)
    channel = grpc.aio.insecure_channel(await server.start("127.0.0.1:0"))
    try:
        yield channel
    finally:
        await channel.close()
        await server.drain(0.0)
        await traced.stop()


async def ask(channel: grpc.aio.Channel, *messages: ProcessingRequest, **metadata: str) -> Any:
    """One stream from its beginning to its end; the last reply. Names: ``_`` for ``-``."""
    names = [
        (name.replace("_", "-"), value) for name, value in {"x_extproc_pool": "pool", **metadata}.items()
    ]
    call = channel.stream_stream(
        PROCESS_PATH,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )(metadata=names)
    reply = None
    for message in messages:
        await call.write(message)
        reply = await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return reply


# --- whose child -------------------------------------------------------------------------------------

PARENTS = {
    "Envoy's, though the client has one, too": (
        {"traceparent": f"00-{TRACE}-{ENVOY}-01", "tracestate": ""},
        {"traceparent": f"00-{'12' * 16}-{CLIENT}-01"},
        (TRACE, ENVOY),
    ),
    "the client's, where Envoy doesn't trace": (
        {},
        {"traceparent": f"00-{TRACE}-{CLIENT}-01"},
        (TRACE, CLIENT),
    ),
    "Envoy's in B3, in many headers": (
        {"x-b3-traceid": TRACE[:16], "x-b3-spanid": ENVOY, "x-b3-parentspanid": CLIENT, "x-b3-sampled": "1"},
        {"traceparent": f"00-{'12' * 16}-{CLIENT}-01"},
        ("0" * 16 + TRACE[:16], ENVOY),
    ),
    "Envoy's in B3, in one header": (
        {"b3": f"{TRACE}-{ENVOY}-1-{CLIENT}"},
        {"b3": f"{TRACE}-{CLIENT}-1"},
        (TRACE, ENVOY),
    ),
    "nobody's": ({}, {}, None),
    "nobody's, for these are none": (
        {"traceparent": "00-zz-01", "b3": "-----"},
        {"traceparent": f"00-{'0' * 32}-{CLIENT}-01"},
        None,
    ),
}


@pytest.mark.parametrize("name", PARENTS)
async def test_a_span_is_the_child_of(name: str, collector: Collector) -> None:
    metadata, request, parent = PARENTS[name]
    async with tracing_server() as channel:
        await ask(channel, headers(**request, x_request_id=name), body(), **metadata)
    (span,) = collector.wait_for(extproc__request_id=name)
    if parent is None:
        assert span.parent == ""
    else:
        assert (span.trace, span.parent) == parent


@pytest.mark.parametrize(
    ("metadata", "request_headers"),
    [
        ({"traceparent": f"00-{TRACE}-{ENVOY}-00"}, {}),
        ({"traceparent": f"00-{TRACE}-{ENVOY}-00"}, {"traceparent": f"00-{TRACE}-{CLIENT}-01"}),
        ({"b3": f"{TRACE}-{ENVOY}-0"}, {}),
        ({}, {"traceparent": f"00-{TRACE}-{CLIENT}-00"}),
    ],
)
async def test_what_is_not_sampled_has_no_span(
    metadata: dict[str, str], request_headers: dict[str, str], collector: Collector
) -> None:
    before = len(collector.wait_for(0))
    async with tracing_server() as channel:
        await ask(channel, headers(**request_headers), body(), **metadata)
        await ask(channel, headers(**request_headers), body(), **metadata, x_extproc_pool="nowhere")
        await ask(channel, headers(**request_headers), body(), **metadata, x_extproc_pool="empty")
    assert len(collector.spans) == before  # all were flushed


async def test_a_sampler_that_takes_all_takes_all(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    before = len(collector.spans)
    async with tracing_server() as channel:
        await ask(channel, headers(), body(), traceparent=f"00-{TRACE}-{ENVOY}-00")
    (span,) = collector.spans[before:]
    assert (span.trace, span.parent) == (TRACE, ENVOY)


async def test_the_sampler_is_the_environments(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    before = len(collector.spans)
    async with tracing_server() as channel:
        await ask(channel, headers(), body())
        await ask(channel, headers(x_request_id="sampled"), body(), traceparent=f"00-{TRACE}-{ENVOY}-01")
    assert [span.attributes["extproc.request_id"] for span in collector.spans[before:]] == ["sampled"]


# --- what it says ------------------------------------------------------------------------------------


async def test_a_span_tells_the_decision_and_what_became_of_it(collector: Collector) -> None:
    async with tracing_server() as channel:
        begun_s = time.time()
        call = ask(
            channel,
            headers("/v1/completions?x=1", authorization=SECRET_TENANT, x_request_id="whole"),
            body(),
            response(200, "10.0.0.9:8000", 2),
        )
        reply = await call
        ended_s = time.time()
    assert reply.HasField("response_headers")
    (span,) = collector.wait_for(extproc__request_id="whole")
    assert (span.service, span.name, span.kind, span.status) == (
        "extproc",
        "route text_completion",
        SERVER_KIND,
        0,
    )
    assert begun_s - 0.1 <= span.start_s <= span.end_s <= ended_s + 0.1
    told = span.attributes
    pick = f"{told['server.address']}:{told['server.port']}"
    assert sorted([pick, *told["extproc.fallbacks"]]) == [f"10.0.0.1:{8000 + i}" for i in range(4)]
    assert told["extproc.prompt_tokens"] > 100
    assert len(told["extproc.prefix"]) == 8
    times = {"read_ms", "hash_ms", "decide_ms", "headers_ms", "duration_ms", "predicted_ttft_ms"}
    assert all(told[f"extproc.{name}"] > 0 for name in times)
    steady = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "llama",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.stream": True,
        "http.response.status_code": 200,
        "extproc.pool": "pool",
        "extproc.policy": "predicted",
        "extproc.reason": "cold",
        "extproc.cached_tokens": 0,
        "extproc.body_bytes": len(json.dumps(BODY)),
        "extproc.tenant": digest(SECRET_TENANT),
        "extproc.served_by": "10.0.0.9:8000",
        "extproc.displaced": True,
        "extproc.attempts": 2,
    }
    assert {key: told.get(key) for key in steady} == steady


async def test_a_span_ends_at_the_decision(collector: Collector) -> None:
    async with tracing_server() as channel:
        call = channel.stream_stream(
            PROCESS_PATH,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )(metadata=[("x-extproc-pool", "pool")])
        times = []
        for message in (headers(x_request_id="slow"), body()):
            times.append(time.time())
            await call.write(message)
            await call.read()
            times.append(time.time())
            await asyncio.sleep(0.3)
        await call.done_writing()
        await call.read()
    (span,) = collector.wait_for(extproc__request_id="slow")
    headers_sent_s, headers_answered_s, body_sent_s, body_answered_s = times
    slack_s = 0.002  # two clocks
    assert headers_sent_s - slack_s <= span.start_s <= headers_answered_s + slack_s
    assert body_sent_s - slack_s <= span.end_s <= body_answered_s + slack_s
    assert span.attributes["extproc.duration_ms"] >= 250


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "chat"),
        ("/openai/v1/responses", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/embeddings", "embeddings"),
        ("/something", ""),
    ],
)
async def test_names_are_operations(path: str, name: str, collector: Collector) -> None:
    async with tracing_server() as channel:
        await ask(channel, headers(path, x_request_id=path), body({"messages": []}))
    (span,) = collector.wait_for(extproc__request_id=path)
    assert span.name == f"route {name}".strip()
    assert span.attributes.get("gen_ai.operation.name", "") == name


async def test_an_unreadable_prompt_is_named_as_such(collector: Collector) -> None:
    async with tracing_server() as channel:
        await ask(channel, headers(x_request_id="bad"), body(b"{"), response(400, "10.0.0.1:8000", 1))
    (span,) = collector.wait_for(extproc__request_id="bad")
    assert span.attributes["extproc.unreadable"] == "bad_json"
    assert span.attributes["extproc.reason"]
    assert "extproc.prefix" not in span.attributes
    assert span.status != ERROR  # the client's


async def test_a_worker_that_fails_makes_an_error(collector: Collector) -> None:
    async with tracing_server() as channel:
        await ask(channel, headers(x_request_id="502"), body(), response(502, "10.0.0.1:8000", 1))
    (span,) = collector.wait_for(extproc__request_id="502")
    assert (span.status, span.attributes["error.type"]) == (ERROR, "502")


async def test_refusals_have_spans(collector: Collector) -> None:
    async with tracing_server() as channel:
        slo = headers(x_request_id="shed", x_extproc_ttft_slo_ms="0.001", authorization=SECRET_TENANT)
        reply = await ask(channel, slo, body())
        assert reply.immediate_response.status.code == 429
        reply = await ask(channel, headers(x_request_id="empty"), body(), x_extproc_pool="empty")
        assert reply.immediate_response.status.code == 503
    (shed,) = collector.wait_for(extproc__request_id="shed")
    assert shed.attributes["extproc.refused"] == "slo"
    assert shed.attributes["http.response.status_code"] == 429
    assert shed.attributes["extproc.retry_after_s"] >= 0
    assert shed.attributes["gen_ai.request.model"] == "llama"
    assert shed.attributes["extproc.tenant"] == digest(SECRET_TENANT)
    assert shed.status != ERROR  # as it should be
    (empty,) = collector.wait_for(extproc__request_id="empty")
    assert (empty.status, empty.attributes["error.type"]) == (ERROR, "no_worker")
    assert empty.attributes["extproc.pool"] == "empty"


async def test_requests_left_to_envoy_have_spans(collector: Collector) -> None:
    async with tracing_server() as channel:
        await ask(channel, headers(x_request_id="lost"), body(), x_extproc_pool="nowhere")
    (span,) = collector.wait_for(extproc__request_id="lost")
    assert (span.status, span.attributes["extproc.unrouted"]) == (ERROR, "no_pool")


async def test_no_prompt_and_no_tenant_is_sent(collector: Collector) -> None:
    async with tracing_server() as channel:
        for data in (body(), body(json.dumps(BODY).encode()[:-1])):
            request = headers(
                authorization=SECRET_TENANT,
                x_request_id="discreet",
                traceparent=f"00-{TRACE}-{CLIENT}-01",
                baggage="user=nobody-may-see-this",
            )
            await ask(channel, request, data, response(200, "10.0.0.1:8000", 1))
    collector.wait_for(2, extproc__request_id="discreet")
    for secret in (SECRET_PROMPT, "nobody may see", "nobody-may-see"):
        assert secret.encode() not in collector.raw


async def test_a_long_name_is_cut(collector: Collector) -> None:
    async with tracing_server() as channel:
        await ask(channel, headers(x_request_id="long"), body(BODY | {"model": "m" * 100_000}))
    (span,) = collector.wait_for(extproc__request_id="long")
    assert len(span.attributes["gen_ai.request.model"]) == 256


# --- what is asked for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "environ", "asked"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        (False, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        (False, {"OTEL_TRACES_EXPORTER": "console"}, True),
        (True, {"OTEL_TRACES_EXPORTER": "none"}, False),
        (True, {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_it_is_off_unless_asked_for(flag: bool, environ: dict[str, str], asked: bool) -> None:
    assert tracing.asked_for(flag, environ) is asked


def test_a_name_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def service() -> object:
        started = tracing.start(flag=True)
        assert started is not None
        started.provider.shutdown()
        return started.provider.resource.attributes["service.name"]

    assert service() == "extproc"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=from-attributes,team=x")
    assert service() == "from-attributes"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-a")
    assert service() == "router-a"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf, grpc"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "pip install"),
        ("OTEL_PROPAGATORS", "b4", "tracecontext"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "soon"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0", "batch"),
    ],
)
def test_a_value_that_can_not_be_used_is_named(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(TracingError, match="OTEL_") as raised:
        tracing.start(flag=True)
    assert words in str(raised.value)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_an_address_with_a_password_is_not_logged(
    protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "http://me:SECRET@127.0.0.1:9/v1/traces?key=SECRET"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
    async with tracing_server() as channel:
        await ask(channel, headers(), body())
    shown = capsys.readouterr().out
    assert "traces are lost or late" in shown
    assert "SECRET" not in shown


# --- the process -------------------------------------------------------------------------------------

WITHOUT_PACKAGE = "import sys; sys.modules['opentelemetry'] = None; "


class ServeProcess:
    """``extproc serve`` with these variables."""

    def __init__(self, folder: Path, *options: str, before: str = "", **environ: str) -> None:
        address = {"address": "127.0.0.1", "port_value": 9}
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": address}}}]}]
        cluster = {
            "name": "pool",
            "metadata": {"filter_metadata": {"extproc": {}}},
            "load_assignment": {"cluster_name": "pool", "endpoints": endpoints},
        }
        config = folder / "envoy.yaml"
        config.write_text(yaml.safe_dump({"static_resources": {"clusters": [cluster]}}))
        arguments = ["serve", "--envoy-config", str(config), "--listen", "127.0.0.1:0", *options]
        code = f"{before}import sys; from extproc.cli import main; sys.exit(main({arguments!r}))"
        self._log = folder / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with self._log.open("w") as log:
            self.child = subprocess.Popen([sys.executable, "-c", code], stderr=log, env=clean | environ)

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def address(self) -> str:
        while True:
            for line in self.log.splitlines():
                if line.startswith("{") and (entry := json.loads(line))["event"] == "serving":
                    return str(entry["listen"])
            assert self.child.poll() is None, self.log
            await asyncio.sleep(0.05)

    async def ask(self, times: int) -> None:
        async with grpc.aio.insecure_channel(await self.address()) as channel:
            for number in range(times):
                reply = await ask(channel, headers(x_request_id=f"process-{number}"), body())
                assert reply.HasField("request_body")

    def stop(self) -> tuple[int, float]:
        """Exit code, and how long it took."""
        begun_s = time.monotonic()
        self.child.terminate()
        return self.child.wait(60), time.monotonic() - begun_s


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    router = ServeProcess(tmp_path, "--tracing", before=WITHOUT_PACKAGE)
    assert router.child.wait(60) == 2
    assert "--tracing" in router.log
    assert "pip install 'envoy-prefix-router[tracing]'" in router.log


async def test_variables_meant_for_others_do_not_keep_it_from_serving(tmp_path: Path) -> None:
    router = ServeProcess(tmp_path, before=WITHOUT_PACKAGE, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    try:
        await router.ask(1)
        assert "envoy-prefix-router[tracing]" in router.log
    finally:
        assert router.stop()[0] == 0


async def test_the_end_of_the_process_sends_what_waits(tmp_path: Path, collector: Collector) -> None:
    router = ServeProcess(
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.http_port}",
        OTEL_BSP_SCHEDULE_DELAY="600000",
        OTEL_SERVICE_NAME="ending",
    )
    await router.ask(3)
    assert not [span for span in collector.spans if span.service == "ending"]
    assert router.stop()[0] == 0
    assert len(collector.wait_for(service="ending")) == 3


async def test_a_collector_that_is_silent_holds_nothing_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:  # takes connections, never answers
        routers = []
        for protocol in ("grpc", "http/protobuf"):
            folder = tmp_path / protocol.replace("/", "-")
            folder.mkdir()
            routers.append(
                ServeProcess(
                    folder,
                    OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}",
                    OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                    OTEL_BSP_SCHEDULE_DELAY="10",
                    OTEL_BSP_MAX_QUEUE_SIZE="4",
                    OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2",
                )
            )
        await asyncio.gather(*(router.ask(40) for router in routers))
        ends = await asyncio.gather(*(asyncio.to_thread(router.stop) for router in routers))
    for router, (code, took_s) in zip(routers, ends, strict=True):
        assert code == 0
        assert took_s < tracing.FLUSH_S + 15  # the SDK alone would wait 30 s, and then for its exporter
        complaints = [line for line in router.log.splitlines() if "traces are lost or late" in line]
        assert len(complaints) == 1, router.log
        assert all(line.startswith("{") for line in router.log.splitlines()), router.log
