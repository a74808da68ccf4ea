"""One trace through client, real Envoy and router, with Envoy's side as docs/tracing.md has it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from collector import Collector, Received

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs" / "tracing.md"
TRACE, CLIENT = "ab" * 16, "ef" * 8

#: The other tracer of the table in the docs. Its spans go nowhere.
ZIPKIN = {
    "name": "envoy.tracers.zipkin",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.config.trace.v3.ZipkinConfig",
        "collector_cluster": "otel_collector",
        "collector_endpoint": "/api/v2/spans",
        "collector_endpoint_version": "HTTP_JSON",
    },
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(collector: Collector, request: pytest.FixtureRequest) -> Iterator[Stack]:
    tracer = request.param

    def edit(bootstrap: envoy_setup.Json) -> None:
        resources = bootstrap["static_resources"]
        snippets = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
        tracing, clusters = map(yaml.safe_load, snippets)
        address = clusters[0]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        address["socket_address"]["port_value"] = collector.grpc_port
        tracing["tracing"]["random_sampling"] = {"value": 100}
        if tracer == "zipkin":
            tracing["tracing"]["provider"] = ZIPKIN
        resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"].update(tracing)
        resources["clusters"] += clusters
        # Envoy keeps spans for 5 s otherwise.
        soon = {"tracing.opentelemetry.flush_interval_ms": 100, "tracing.opentelemetry.min_flush_spans": 1}
        bootstrap["layered_runtime"] = {"layers": [{"name": "soon", "static_layer": soon}]}

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.http_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_SERVICE_NAME": f"router-{tracer}",
        }.items():
            patch.setenv(name, value)
        arguments = ("--speedup", "50")
        config = StackConfig(
            workers=2, worker_arguments=arguments, router_arguments=("--tracing",), edit=edit
        )
        with Stack(config) as started:
            yield started


def ask(stack: Stack, **headers: str) -> str:
    """The request's id, by which its spans are found."""
    body = {"model": "emulated", "messages": [{"role": "user", "content": "Hello " * 200}], "max_tokens": 1}
    request = urllib.request.Request(
        stack.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.headers["x-request-id"] or "")


def envoys(collector: Collector, count: int, **wanted: Any) -> list[Received]:
    return collector.wait_for(count, service="envoy", **wanted)


@pytest.mark.parametrize("stack", ["opentelemetry"], indirect=True)
def test_client_envoy_and_router_are_one_trace(stack: Stack, collector: Collector) -> None:
    ask(stack, traceparent=f"00-{TRACE}-{CLIENT}-01")
    (ours,) = collector.wait_for(service="router-opentelemetry", trace=TRACE)
    (stream,) = envoys(collector, 1, id=ours.parent)
    assert "ext_proc" in stream.name
    (ingress,) = envoys(collector, 1, id=stream.parent)
    assert (ingress.name, ingress.parent, ingress.trace) == ("ingress", CLIENT, TRACE)
    (upstream,) = envoys(collector, 1, name="router workers egress", trace=TRACE)
    assert upstream.parent == ingress.id
    told = ours.attributes
    assert ours.name == "route chat"
    assert told["extproc.request_id"] == ingress.attributes["guid:x-request-id"]
    # All on one machine, so by one clock: the decision lies within the request, before the worker's part.
    assert ingress.start_s <= ours.start_s <= ours.end_s <= ingress.end_s
    assert ours.end_s <= upstream.start_s + 0.001
    assert told["http.response.status_code"] == 200
    assert upstream.attributes["upstream_address"] == told["extproc.served_by"]
    assert not told["extproc.displaced"]


@pytest.mark.parametrize("stack", ["opentelemetry"], indirect=True)
def test_envoys_own_trace_and_envoys_own_choice(stack: Stack, collector: Collector) -> None:
    """A client without a trace, and one that doesn't want one."""
    before = len(collector.wait_for(0, service="router-opentelemetry"))
    ask(stack, traceparent=f"00-{'ac' * 16}-{CLIENT}-00")
    ask(stack)
    ours = collector.wait_for(before + 1, service="router-opentelemetry")[-1]
    (stream,) = envoys(collector, 1, id=ours.parent)
    (ingress,) = envoys(collector, 1, id=stream.parent)
    assert (ingress.parent, ingress.trace) == ("", ours.trace)
    assert not [span for span in collector.spans if span.trace == "ac" * 16]


@pytest.mark.parametrize("stack", ["zipkin"], indirect=True)
def test_zipkin_propagates_in_b3(stack: Stack, collector: Collector) -> None:
    """Envoy's spans go nowhere here, but it hands on trace and sampling, in both of B3's forms."""
    ask(stack, **{"b3": f"{TRACE}-{CLIENT}-1"})
    ask(stack, **{"x-b3-traceid": TRACE, "x-b3-spanid": CLIENT, "x-b3-sampled": "1"})
    ask(stack, **{"b3": f"{'ac' * 16}-{CLIENT}-0"})
    ask(stack)
    *joined, own = collector.wait_for(3, service="router-zipkin")
    assert [span.trace for span in joined] == [TRACE, TRACE]
    assert all(span.parent not in ("", CLIENT) for span in joined)
    assert own.parent != ""
    assert own.trace not in (TRACE, "ac" * 16)
