"""The gRPC face: one stream an HTTP request, each feeding an `Exchange`.

Messages are parsed by the generated classes straight from gRPC's bytes. A fault in our own code never
becomes a gRPC error, which a fail-closed Envoy would turn into a 500: the stream is closed with OK, and
Envoy goes on with the request without us.

Draining (SIGTERM): health turns NOT_SERVING, a new stream is closed at once with OK, so that its request
takes Envoy's fallback policy, and running streams get ``drain_s`` to end; those left are closed with OK,
too, which their requests survive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.errors import ListenError
from extproc.exchange import Exchange
from extproc.fleet.settings import route_overrides
from extproc.observe import events
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.wire import METHOD, SERVICE, ProcessingRequest, ProcessingResponse

#: A message holds a body and its headers and attributes; Envoy's headers are at most 8 MiB.
MESSAGE_OVERHEAD_BYTES = 8 * 1024 * 1024

#: The message limit can't follow a reload, so there is room for larger bodies from the start.
MIN_MESSAGE_BYTES = 64 * 1024 * 1024

_NOTHING: Mapping[str, str] = {}

#: A silent connection is asked for a sign of life after this long, and given up after as long again: so an
#: Envoy that is gone without a word, its machine lost or cut off, has no requests in flight for ever.
KEEPALIVE_S = 15.0


class Server:
    """A running ext_proc server on one address."""

    def __init__(self, router: Router, observer: Observer, *, keepalive_s: float = KEEPALIVE_S) -> None:
        self._router = router
        self._observer = observer
        self._draining = False
        self._closing = False
        self._streams: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                (
                    "grpc.max_receive_message_length",
                    max(MIN_MESSAGE_BYTES, router.config.max_body_bytes + MESSAGE_OVERHEAD_BYTES),
                ),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not half the streams
                # Envoy's connection_keepalive: by default the third ping without data in between ends the
                # connection, and with it the count of every request that is just being decoded.
                ("grpc.http2.max_ping_strikes", 0),
                # Our own; by default once in two hours.
                ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
                ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
                ("grpc.http2.ping_timeout_ms", int(keepalive_s * 1000)),  # gRPC's own pings, else a minute
                ("grpc.http2.max_pings_without_data", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def open_streams(self) -> int:
        """Streams that Envoy holds open now."""
        return len(self._streams)

    async def start(self, listen: str) -> str:
        """Listen on ``host:port`` or ``unix:PATH`` (port 0: any); returns the address. ListenError."""
        _check(listen)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:  # gRPC writes the system's reason to standard error by itself
            raise ListenError(
                f"can't listen on {listen}: in use, or not an address of this machine"
            ) from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return listen if listen.startswith("unix") else f"{listen.rpartition(':')[0]}:{port}"

    async def drain(self, drain_s: float) -> None:
        """End in peace: see the module's docstring."""
        self._draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            # New streams are still answered, by closing them, while this waits.
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            self._closing = True
            for stream in list(self._streams):
                stream.cancel()
        await self._server.stop(grace=1.0)

    async def _set_health(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def _process(
        self, _: object, context: grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]
    ) -> None:
        if self._draining:
            return
        metadata = context.invocation_metadata() or ()
        overrides, problems = route_overrides((str(key), value) for key, value in metadata)
        for problem in problems:
            self._observer.tell(events.RouteSettingIgnored(problem))
        wanted = self._observer.wanted_headers
        exchange = Exchange(
            self._router,
            overrides,
            self._router.config.max_body_bytes,
            {str(k): v for k, v in metadata if k in wanted and isinstance(v, str)} if wanted else _NOTHING,
        )
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._streams.add(task)
        self._idle.clear()
        try:
            # An aborted request's stream is cancelled, and gRPC never frees what a read or write holds that
            # is cancelled (grpc/grpc#43360). Shielded ones end by themselves with the call.
            await asyncio.shield(self._converse(exchange, context))
        except asyncio.CancelledError:
            # The usual end of an aborted request; or we are closing, and returning means OK.
            if not self._closing:
                raise
        finally:
            exchange.close(time.monotonic())
            self._streams.discard(task)
            if not self._streams:
                self._idle.set()

    async def _converse(
        self, exchange: Exchange, context: grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]
    ) -> None:
        """Answer messages until there are no more. Once the exchange is closed the call isn't touched."""
        try:
            while not exchange.closed and (message := await context.read()) is not grpc.aio.EOF:
                for reply in exchange.receive(message, time.monotonic()):
                    if exchange.closed:
                        return
                    await context.write(reply)
        except grpc.aio.InternalError:  # a write to a call that is over; on our own loop it isn't told
            pass
        except Exception as error:  # anything: the request must go on without us
            if not exchange.closed:
                self._observer.tell(events.Fault(error))


def _check(listen: str) -> None:
    """Refuse what gRPC would bend: no port becomes 443, and one too large is cut down to 16 bits."""
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ListenError(f"--listen {listen}: use host:port, [v6]:port or unix:PATH")
