"""Tracing: whether it is asked for, and the way of spans to a collector.

OpenTelemetry's own environment variables say where spans go, how many are taken and which propagation formats
count; its SDK reads most of them. The SDK is an extra, and is imported only if tracing is asked for.

The collector is never waited for. Ended spans go into a bounded queue that drops the oldest, a thread of the
SDK's sends them, and the end of the process waits `FLUSH_S` for it at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from extproc import __version__
from extproc.errors import TracingError
from extproc.observe.logs import Seldom

if TYPE_CHECKING:
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.sdk.trace import TracerProvider

    from extproc.observe.spans import Spans

#: The end of the process waits this long for spans on their way.
FLUSH_S = 3.0

#: Envoy's OpenTelemetry tracer speaks the first, its Zipkin tracer the second, in one header or in several.
#: A stream's metadata has only one of them, so both can be listened for.
DEFAULT_PROPAGATORS = "b3multi,tracecontext"

_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
#: The specification's default.
_DEFAULT_PROTOCOL = "http/protobuf"

#: What brings the SDK.
INSTALL = "pip install 'envoy-prefix-router[tracing]'"


def asked_for(flag: bool, environ: Mapping[str, str]) -> bool:
    """By ``--tracing``, or by a variable that says where spans go; OpenTelemetry's off switches win."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return flag or bool(exporter) or any(environ.get(name) for name in endpoints)


@dataclass(frozen=True, slots=True)
class Tracing:
    """Running. ``spans``: the sink of events."""

    spans: Spans
    provider: TracerProvider

    async def stop(self) -> None:
        """Send what waits, for `FLUSH_S` at most. The SDK's own bounds are longer, or aren't heeded."""
        flush = threading.Thread(target=self.provider.shutdown, daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_S)


def start(flag: bool) -> Tracing | None:
    """Start tracing if it is asked for, else None. Raises TracingError."""
    if not asked_for(flag, os.environ):
        return None
    log = structlog.get_logger("extproc")
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased

        from extproc.observe.spans import Spans
    except ModuleNotFoundError as error:
        problem = f"tracing needs the package {error.name}: {INSTALL}"
        if flag:
            raise TracingError(f"--tracing: {problem}") from error
        # Such variables are often set for everything that runs on a cluster.
        log.warning("no tracing, though OTEL_* variables ask for it", problem=problem)
        return None
    _take_over_log()
    resource = Resource.create({"service.name": "extproc", "service.version": __version__})
    try:
        provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        names = _exporters()
        for name in names:
            provider.add_span_processor(BatchSpanProcessor(_load("opentelemetry_traces_exporter", name)))
        formats = propagator(_variable("OTEL_PROPAGATORS", DEFAULT_PROPAGATORS))
        obedient = isinstance(provider.sampler, ParentBased)
        spans = Spans(provider.get_tracer("extproc", __version__), formats, obedient=obedient)
    except TracingError:
        raise
    except Exception as error:  # the SDK's, of a variable that it can't read
        raise TracingError(f"tracing: an OTEL_* variable has a value that can't be used: {error}") from error
    log.info("tracing", exporters=names, endpoint=_endpoint() or None)
    return Tracing(spans, provider)


def _exporters() -> list[str]:
    """Entry points of ``OTEL_TRACES_EXPORTER``."""
    protocol = _variable("OTEL_EXPORTER_OTLP_PROTOCOL", _DEFAULT_PROTOCOL)
    protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    if protocol not in _PROTOCOLS:
        raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: use one of {', '.join(_PROTOCOLS)}")
    names = _split(_variable("OTEL_TRACES_EXPORTER", "otlp"))
    return [_PROTOCOLS[protocol] if name == "otlp" else name for name in names if name != "none"]


def propagator(names: str) -> TextMapPropagator:
    """Of a list as ``OTEL_PROPAGATORS`` has it. Raises TracingError."""
    from opentelemetry.propagators.composite import CompositePropagator

    # Baggage is the client's, and nothing of it is used.
    chosen = [name for name in _split(names) if name not in ("none", "baggage")]
    return CompositePropagator([_load("opentelemetry_propagator", name) for name in chosen])


def _variable(name: str, default: str) -> str:
    return os.environ.get(name, "").strip() or default


def _split(names: str) -> list[str]:
    return list(dict.fromkeys(name for part in names.split(",") if (name := part.strip())))


def _load(group: str, name: str) -> Any:
    """A new exporter or propagator by the name that its package registered it with."""
    installed = entry_points(group=group)
    for entry in installed.select(name=name):
        return entry.load()()
    variable = "OTEL_PROPAGATORS" if group == "opentelemetry_propagator" else "OTEL_TRACES_EXPORTER"
    known = ", ".join(sorted(installed.names))
    raise TracingError(f"{variable}: {name} is not installed here; there are: {known}. {INSTALL}")


def _endpoint() -> str:
    """Host and port of the collector, without what else an address may hold."""
    endpoint = _variable("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    url = urlsplit(_variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint))
    return url.netloc.rpartition("@")[2] or url.path


#: Where a collector's address may hold a password or key.
_SECRET = re.compile(r"[^\s/@]+@|\?\S+")


class _OneLine(logging.Handler):
    """The SDK's complaints as records of our log: one a minute, which says how many they were."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = structlog.get_logger("extproc")
        self._seldom = Seldom()

    def emit(self, record: logging.LogRecord) -> None:
        if held := self._seldom("tracing"):
            problem = _SECRET.sub("", record.getMessage())[:300]
            self._log.warning("traces are lost or late", problem=problem, complaints=held)


def _take_over_log() -> None:
    for name in ("opentelemetry", "urllib3"):
        logger = logging.getLogger(name)
        logger.handlers = [_OneLine()]
        logger.setLevel(logging.WARNING)
        logger.propagate = False
