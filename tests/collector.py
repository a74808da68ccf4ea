"""A collector of traces that keeps what it gets: OTLP over gRPC and over HTTP, as the protocol says."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Received:
    """A span in plain words; ids are hexadecimal, "" for no parent."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start_s: float
    end_s: float
    status: int
    attributes: dict[str, Any]


class Collector:
    """Both ports on this host; a context manager."""

    def __init__(self) -> None:
        self._seen: list[ExportTraceServiceRequest] = []
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        add_TraceServiceServicer_to_server(_Service(self._seen), self._grpc)
        self.grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        seen = self._seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    seen.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http_port = self._http.server_address[1]

    def __enter__(self) -> Collector:
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(None)
        self._http.shutdown()
        self._http.server_close()

    @property
    def raw(self) -> bytes:
        """All that came, as bytes, to look for what must not be there."""
        return b"".join(message.SerializeToString() for message in list(self._seen))

    @property
    def spans(self) -> list[Received]:
        return [
            _received(service, span)
            for message in list(self._seen)
            for resource in message.resource_spans
            for service in [_attributes(resource.resource.attributes).get("service.name", "")]
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, count: int = 1, timeout_s: float = 30.0, **wanted: Any) -> list[Received]:
        """Wait until so many spans have these fields, or these attributes (``__`` for a dot)."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [span for span in self.spans if _fits(span, wanted)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"no {count} spans with {wanted} in {self.spans}"
            time.sleep(0.02)


class _Service(TraceServiceServicer):
    def __init__(self, seen: list[ExportTraceServiceRequest]) -> None:
        self._seen = seen

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802
        self._seen.append(request)
        return ExportTraceServiceResponse()


def _fits(span: Received, wanted: dict[str, Any]) -> bool:
    return all(
        getattr(span, key, span.attributes.get(key.replace("__", "."))) == value
        for key, value in wanted.items()
    )


def _received(service: str, span: Any) -> Received:
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
