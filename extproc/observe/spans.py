"""What happens, as OpenTelemetry spans: one for each request, from its headers to the decision about it.

**Whose child.** An Envoy that traces puts its own span of the ext_proc stream, a child of its span of the
request, into the stream's metadata; the request's headers hold what the client sent. So the metadata comes
first, and the headers speak only where Envoy doesn't trace. Which formats are understood is the propagator's
business.

**When.** A span lasts from the request's headers to the decision: the rest of the time is in Envoy's spans
already, and what the router costs would be lost in it. It is made at the request's end, of events that are
there anyway, so that it can also say what became of the decision: who served, after how many tries, with
which status.

**What.** ``gen_ai.*`` and ``server.*`` are OpenTelemetry's conventions for generative AI. There are none for
the choice of a worker, so the rest is ``extproc.*``. Estimated tokens aren't ``gen_ai.usage.*``, or they
would be added to the engine's own count. A prompt's text is nowhere, a tenant is a digest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, TextMapPropagator
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, get_current_span

from extproc.facts import RequestFacts
from extproc.observe import events
from extproc.routing.decision import Decision
from extproc.routing.demand import Demand

#: End of the path → ``gen_ai.operation.name``.
_OPERATIONS = (
    ("/chat/completions", "chat"),
    ("/completions", "text_completion"),
    ("/messages", "chat"),
    ("/responses", "chat"),
    ("/embeddings", "embeddings"),
)

#: Longest text taken from a request: a model's name, a request id.
_MAX_CHARS = 256


class Spans:
    """Makes spans of events."""

    def __init__(self, tracer: Tracer, propagator: TextMapPropagator, *, obedient: bool = False) -> None:
        """``obedient``: the sampler takes no request that its parent didn't take."""
        self._tracer = tracer
        self._propagator = propagator
        self._obedient = obedient

    @property
    def wanted_headers(self) -> frozenset[str]:
        """Names of headers, lower case, that may hold a trace's context."""
        asked = _Asked()
        self._propagator.extract({}, Context(), asked)
        return frozenset(name.lower() for name in asked.names | self._propagator.fields)

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See `extproc.observe.observer.Sink`."""
        return {
            events.Ended: self._ended,
            events.Refused: self._refused,
            events.Unrouted: self._unrouted,
        }

    def _ended(self, event: events.Ended) -> None:
        decided = event.decided
        operation = _operation(event.facts.path)
        span = self._start(event.facts, operation)
        if not span.is_recording():
            return
        decision, work = event.decision, decided.work
        attributes = _request(event.facts, operation, decided.asked, decided.demand)
        attributes |= _decision(decision)
        if decided.prefix_key is not None:
            attributes["extproc.prefix"] = f"{decided.prefix_key >> 32:08x}"
        if decided.body_bytes is not None:
            attributes["extproc.body_bytes"] = decided.body_bytes
        attributes["extproc.read_ms"] = _ms(work.read_s)
        attributes["extproc.hash_ms"] = _ms(work.hash_s)
        attributes["extproc.decide_ms"] = _ms(work.decide_s)
        if event.worker:
            attributes["extproc.served_by"] = event.worker
        if event.headers_s is not None:  # a response, from a worker or from Envoy
            attributes["extproc.displaced"] = event.worker != decision.worker.address
            attributes["extproc.headers_ms"] = _ms(event.headers_s)
        if event.attempts:
            attributes["extproc.attempts"] = event.attempts
        attributes["extproc.duration_ms"] = _ms(event.duration_s)
        _end(span, attributes, event.status, decided.now + work.read_s + work.hash_s + work.decide_s)

    def _refused(self, event: events.Refused) -> None:
        operation = _operation(event.facts.path)
        span = self._start(event.facts, operation)
        if not span.is_recording():
            return
        shed = event.shed
        attributes = _request(event.facts, operation, event.asked, event.demand)
        attributes["extproc.pool"] = event.pool
        attributes["extproc.refused"] = shed.reason
        if shed.retry_after_s is not None:
            attributes["extproc.retry_after_s"] = shed.retry_after_s
        if event.decision is not None:
            attributes |= _decision(event.decision)
        _end(span, attributes, shed.status, time.monotonic(), shed.reason)

    def _unrouted(self, event: events.Unrouted) -> None:
        operation = _operation(event.facts.path)
        span = self._start(event.facts, operation)
        if not span.is_recording():
            return
        attributes = _request(event.facts, operation, events.Asked(), None)
        attributes["extproc.unrouted"] = event.reason
        attributes["error.type"] = event.reason
        span.set_status(Status(StatusCode.ERROR, f"left to Envoy: {event.reason} {event.detail}".strip()))
        _end(span, attributes, 0, time.monotonic())

    def _start(self, facts: RequestFacts, operation: str) -> Span:
        # Most requests are not sampled, and W3C's last two characters say so; reading the rest takes 15 µs.
        if self._obedient and facts.metadata.get("traceparent", "").endswith("-00"):
            return INVALID_SPAN
        # Models' names are the clients' words, and backends make metrics of spans' names.
        return self._tracer.start_span(
            f"route {operation}" if operation else "route",
            self._parent(facts),
            SpanKind.SERVER,
            start_time=_unix_ns(facts.arrived_s),
        )

    def _parent(self, facts: RequestFacts) -> Context:
        for carrier in (facts.metadata, facts.headers):
            if carrier:
                context = self._propagator.extract(carrier, Context())
                if get_current_span(context).get_span_context().is_valid:
                    return context
        return Context()


class _Asked(Getter[Mapping[str, str]]):
    """Has nothing, and notes what it was asked for: a propagator may read more fields than it names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def get(self, carrier: Mapping[str, str], key: str) -> list[str] | None:
        self.names.add(key)
        return None

    def keys(self, carrier: Mapping[str, str]) -> list[str]:
        return []


def _operation(path: str) -> str:
    path = path.partition("?")[0]
    return next((operation for suffix, operation in _OPERATIONS if path.endswith(suffix)), "")


def _request(
    facts: RequestFacts, operation: str, asked: events.Asked, demand: Demand | None
) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if operation:
        attributes["gen_ai.operation.name"] = operation
    if asked.unreadable is not None:
        attributes["extproc.unreadable"] = asked.unreadable.value
    if asked.model:
        attributes["gen_ai.request.model"] = asked.model[:_MAX_CHARS]
    if asked.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = asked.max_tokens
    if asked.stream:
        attributes["gen_ai.request.stream"] = True
    if facts.request_id:
        attributes["extproc.request_id"] = facts.request_id[:_MAX_CHARS]
    if demand is not None:
        if demand.tenant:
            attributes["extproc.tenant"] = demand.tenant
        if demand.priority:
            attributes["extproc.priority"] = demand.priority
    return attributes


def _decision(decision: Decision) -> dict[str, Any]:
    host, _, port = decision.worker.address.rpartition(":")
    attributes: dict[str, Any] = {
        "server.address": host.strip("[]"),
        "server.port": int(port),
        "extproc.pool": decision.pool,
        "extproc.policy": decision.policy,
        "extproc.reason": decision.reason,
        "extproc.fallbacks": [worker.address for worker in decision.order[1:]],
        "extproc.prompt_tokens": decision.prompt_tokens,
        "extproc.cached_tokens": decision.cached_tokens,
        "extproc.predicted_ttft_ms": _ms(decision.predicted_ttft_s),
    }
    if decision.overflow:
        attributes["extproc.overflow"] = True
    return attributes


def _end(span: Span, attributes: dict[str, Any], status: int, end_s: float, cause: str = "") -> None:
    """``status``: of HTTP, 0 if unknown. As for any HTTP server, only 5xx is an error."""
    if status:
        attributes["http.response.status_code"] = status
    if status >= 500:
        attributes["error.type"] = cause or str(status)
        span.set_status(Status(StatusCode.ERROR))
    span.set_attributes(attributes)
    span.end(_unix_ns(end_s))


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
