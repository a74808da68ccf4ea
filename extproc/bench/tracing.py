"""What tracing adds to a request: on the event loop, and in the thread that sends."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe.logs import configure
from extproc.observe.observer import Observer
from extproc.observe.tracing import DEFAULT_PROPAGATORS, INSTALL, propagator
from extproc.router import Router, Routing


@dataclass(frozen=True, slots=True)
class TracingCost:
    """Microseconds of CPU for one request.

    ``loop_us``: from the request's headers to its end, in the router, without gRPC. ``thread_us``: to encode
    its span for the collector.
    """

    tracing: str
    loop_us: float
    thread_us: float


def bench_tracing(requests: int = 500, rounds: int = 20) -> list[TracingCost]:
    """The least of some rounds that take turns, of small requests: in larger ones tracing counts less."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

    from extproc.observe.spans import Spans

    class Kept(SpanProcessor):
        def __init__(self) -> None:
            self.spans: list[ReadableSpan] = []

        def on_end(self, span: ReadableSpan) -> None:
            self.spans.append(span)

    configure("warning")
    kept = Kept()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(kept)
    on = Observer()
    spans = Spans(provider.get_tracer("bench"), propagator(DEFAULT_PROPAGATORS), obedient=True)
    on.add(spans, spans.wanted_headers)
    variants = {
        "off": (_router(Observer()), {}),
        "on, request not sampled": (_router(on), _metadata("00")),
        "on, request sampled": (_router(on), _metadata("01")),
    }
    best_us = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name, (router, metadata) in variants.items():
            best_us[name] = min(best_us[name], _round_us(router, metadata, requests))
    some = kept.spans[: 10 * requests]
    begun_s = time.process_time()
    for start in range(0, len(some), 512):  # the SDK's batches
        encode_spans(some[start : start + 512]).SerializeToString()
    thread_us = (time.process_time() - begun_s) / len(some) * 1e6
    return [
        TracingCost(name, us, thread_us if name == "on, request sampled" else 0.0)
        for name, us in best_us.items()
    ]


def _metadata(flags: str) -> dict[str, str]:
    return {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-{flags}", "tracestate": ""}


def _router(observer: Observer) -> Router:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "bench", 1000) for i in range(8))
    return Router(RouterConfig(pools={"bench": PoolConfig("bench", endpoints, PoolSettings())}), observer)


def _round_us(router: Router, metadata: dict[str, str], requests: int) -> float:
    body = json.dumps({"model": "bench", "prompt": "One of many prompts. " * 100, "max_tokens": 64}).encode()
    begun_s = time.process_time()
    for number in range(requests):
        now = time.monotonic()
        facts = RequestFacts(
            request_id=f"request-{number}",
            path="/v1/completions",
            content_type="application/json",
            metadata=metadata,
            arrived_s=now,
        )
        routing = router.route(facts, RouteOverrides(), body, now)
        assert isinstance(routing, Routing)
        router.responded(routing, routing.decision.worker.address, 1, 200, now)
        router.ended(routing, now)
    return (time.process_time() - begun_s) / requests * 1e6


def report_tracing(costs: Sequence[TracingCost]) -> str:
    """The costs as a table."""
    lines = [f"{'tracing':<24} {'router µs':>10} {'added':>7} {'encoding µs, another thread':>28}"]
    for cost in costs:
        added = cost.loop_us - costs[0].loop_us
        lines.append(f"{cost.tracing:<24} {cost.loop_us:>10.0f} {added:>7.1f} {cost.thread_us:>28.0f}")
    return "\n".join(lines)


def report() -> str:
    """The table, or what is missing."""
    try:
        return report_tracing(bench_tracing())
    except ModuleNotFoundError as error:
        return f"needs the package {error.name}: {INSTALL}"
