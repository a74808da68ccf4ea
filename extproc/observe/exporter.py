"""Prometheus' ``/metrics`` on a port of its own, in a thread, off the event loop."""

from __future__ import annotations

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from extproc.errors import ListenError


def serve_metrics(address: str, registry: CollectorRegistry) -> WSGIServer:
    """Serve on ``host:port`` until `WSGIServer.shutdown`. ListenError names what is wrong."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not host:
        raise ListenError(f"--metrics {address}: use host:port, for example 127.0.0.1:9090")
    try:
        server, _thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except (OSError, OverflowError) as error:
        raise ListenError(f"can't serve metrics on {address}: {error}") from error
    return server
