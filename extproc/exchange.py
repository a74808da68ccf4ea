"""One HTTP request's life as a sans-IO state machine.

Envoy opens one gRPC stream for each HTTP request and sends a message at each phase; every message wants
exactly one reply of its own kind (a wrong kind fails the request). What matters:

- **When a pick still counts.** Envoy chooses the host after the filter chain let the request headers
  and, in BUFFERED mode, the body pass. So the pick goes into the reply to the *body's end*. Without a
  body it goes into the reply to the headers. In FULL_DUPLEX_STREAMED mode Envoy takes a pick only in
  the *headers'* reply, so that reply is held back until the body's end (or its trailers), and the body
  is then given back in chunks. In STREAMED mode Envoy may have chosen before the body's end: the pick
  is a best effort there, and what really happened is seen at the response headers.
- **How an end is seen.** The stream lives as long as the HTTP request (with
  ``response_trailer_mode: SEND``, which a mode override asks for where the YAML doesn't say it). It
  ends by EOF or by cancellation, whatever happened to the request: `close` covers both.
- **Who served.** At the response headers Envoy tells the upstream's address; after a retry it isn't
  the pick.

States: ``HEADERS`` (nothing seen) → ``BODY`` (waiting for the body's end) → ``RESPONSE`` → ``CLOSED``.
`receive` takes a message and returns the replies to send, in order; `close` ends the life. The times
are passed in (seconds, monotonic). No I/O here, and no exception leaves: a request that we can't
understand is let through unsteered, which means Envoy's own load balancing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from math import isfinite

from google.protobuf.struct_pb2 import Value

from extproc.facts import RequestFacts
from extproc.fleet.settings import RouteOverrides
from extproc.refusal import immediate
from extproc.router import Router, Routing
from extproc.routing.admission import Shed
from extproc.wire import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

#: Key of our filter's entry in ``ProcessingRequest.attributes``.
ATTRIBUTES_KEY = "envoy.filters.http.ext_proc"

#: Largest piece of a body given back in FULL_DUPLEX_STREAMED mode: Envoy's customary chunk.
STREAMED_CHUNK_BYTES = 62_000

#: The opt-in response header (route setting ``x-extproc-debug``).
DEBUG_HEADER = "x-extproc-decision"

#: Envoy's: a bound on the time until response headers, for each try. A stream may last longer.
TRY_TIMEOUT_HEADER = "x-envoy-upstream-rq-per-try-timeout-ms"

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class State(Enum):
    """Where a request stands."""

    HEADERS = auto()
    BODY = auto()
    RESPONSE = auto()
    CLOSED = auto()


class Exchange:
    """The server's side of one ext_proc stream."""

    def __init__(
        self,
        router: Router,
        overrides: RouteOverrides,
        max_body_bytes: int,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """``max_body_bytes``: a longer body (possible only in streamed modes) is routed by load.

        ``metadata``: see `RequestFacts`.
        """
        self.state = State.HEADERS
        self.routing: Routing | None = None
        self._router = router
        self._overrides = overrides
        self._max_body_bytes = max_body_bytes
        self._metadata = metadata or {}
        self._facts = RequestFacts()
        self._decided = False
        self._observed = False  # observability mode: nothing that we say has an effect
        self._request_body_mode: int | None = None  # None: Envoy didn't tell
        self._duplex_request = False
        self._duplex_response = False
        self._chunks: list[bytes] = []
        self._body_bytes = 0

    @property
    def closed(self) -> bool:
        """Whether the stream is over."""
        return self.state is State.CLOSED

    def receive(self, message: ProcessingRequest, now: float) -> list[ProcessingResponse]:
        """Answer one message. In observability mode, and after the end, there is no answer."""
        if self.closed:  # a decision now would never end
            return []
        if message.HasField("protocol_config"):  # in the first message, whichever that is
            self._request_body_mode = message.protocol_config.request_body_mode
            self._duplex_request = self._request_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
            self._duplex_response = (
                message.protocol_config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
            )
        self._observed = message.observability_mode
        replies = self._answer(message, now)
        return [] if message.observability_mode else replies

    def close(self, now: float) -> None:
        """The stream is over: by EOF, cancellation or our own shutdown."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self._chunks.clear()
        if self.routing is not None:
            self._router.ended(self.routing, now)

    def _answer(self, message: ProcessingRequest, now: float) -> list[ProcessingResponse]:
        match message.WhichOneof("request"):
            case "request_headers":
                return self._request_headers(message, now)
            case "request_body":
                body = message.request_body
                return self._request_body(body.body, body.end_of_stream, now)
            case "request_trailers":
                return self._request_trailers(now)
            case "response_headers":
                return self._response_headers(message, now)
            case "response_body":
                body = message.response_body
                if self._duplex_response:
                    return [_echo(body.body, body.end_of_stream, response=True)]
                return [ProcessingResponse(response_body=BodyResponse())]
            case "response_trailers":
                return [ProcessingResponse(response_trailers=TrailersResponse())]
        return []  # a phase newer than this code: no reply is better than one of the wrong kind

    # --- request ---------------------------------------------------------------------------------

    def _request_headers(self, message: ProcessingRequest, now: float) -> list[ProcessingResponse]:
        if self.state is not State.HEADERS:  # out of order: a second decision would never be ended
            return [ProcessingResponse(request_headers=HeadersResponse())]
        headers = message.request_headers
        self._facts = _facts(headers, message, self._router.wanted_headers, self._metadata, now)
        if headers.end_of_stream or self._request_body_mode == ProcessingMode.NONE:
            reply = ProcessingResponse(request_headers=HeadersResponse())
            if self._steer(reply, reply.request_headers.response, b"", now):
                self._ask_for_the_end(reply, message)
            return [reply]
        self.state = State.BODY
        if self._duplex_request:
            return []
        reply = ProcessingResponse(request_headers=HeadersResponse())
        self._ask_for_the_end(reply, message)
        return [reply]

    def _request_body(self, data: bytes, last: bool, now: float) -> list[ProcessingResponse]:
        if self._duplex_request:
            return self._duplex_body(data, last, now)
        reply = ProcessingResponse(request_body=BodyResponse())
        if not self._decided:
            self._keep(data)
            # BUFFERED sends the whole body at once, and without "last" when trailers follow. A partial
            # body (BUFFERED_PARTIAL over its limit) has no "last", and no successor either; its pick is
            # then made, and counted, at the response headers.
            if last or self._request_body_mode == ProcessingMode.BUFFERED:
                self._steer(reply, reply.request_body.response, self._take_body(), now)
        return [reply]

    def _request_trailers(self, now: float) -> list[ProcessingResponse]:
        reply = ProcessingResponse(request_trailers=TrailersResponse())
        if self._decided:
            return [reply]
        if self._duplex_request:
            released = self._duplex_release(last=False, now=now)
            return released if released[0].HasField("immediate_response") else [*released, reply]
        # A body that ended with trailers: metadata still steers an override_host cluster.
        self._steer(reply, None, self._take_body(), now)
        return [reply]

    def _duplex_body(self, data: bytes, last: bool, now: float) -> list[ProcessingResponse]:
        if self._decided:
            return [_echo(data, last, response=False)]
        self._keep(data)
        if last or self._body_bytes > self._max_body_bytes:
            return self._duplex_release(last=last, now=now)
        return []

    def _duplex_release(self, *, last: bool, now: float) -> list[ProcessingResponse]:
        """The held-back headers' reply with the pick, then the body so far."""
        chunks = list(self._chunks)
        reply = ProcessingResponse(request_headers=HeadersResponse())
        if not self._steer(reply, reply.request_headers.response, self._take_body(), now):
            return [reply]
        data = b"".join(chunks)
        pieces = [data[i : i + STREAMED_CHUNK_BYTES] for i in range(0, len(data), STREAMED_CHUNK_BYTES)]
        if last and not pieces:
            pieces = [b""]
        return [
            reply,
            *(
                _echo(piece, last and index == len(pieces) - 1, response=False)
                for index, piece in enumerate(pieces)
            ),
        ]

    def _keep(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes <= self._max_body_bytes or self._duplex_request:
            self._chunks.append(data)
        else:
            self._chunks.clear()

    def _take_body(self) -> bytes | None:
        """The body so far, or None when it is too long to be read."""
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        return body if self._body_bytes <= self._max_body_bytes else None

    # --- the pick --------------------------------------------------------------------------------

    def _steer(
        self,
        reply: ProcessingResponse,
        common: CommonResponse | None,
        body: bytes | None,
        now: float,
        *,
        may_refuse: bool = True,
    ) -> bool:
        """Decide, and write the pick into the reply; without an opinion the reply stays as it is.

        False: the request is refused, and the reply has become the answer to the client.
        """
        self._decided = True
        self.state = State.RESPONSE
        routing = self._router.route(
            self._facts, self._overrides, body, now, may_refuse=may_refuse and not self._observed
        )
        if isinstance(routing, Shed):
            reply.immediate_response.CopyFrom(immediate(routing))
            return False
        self.routing = routing
        if self.routing is None:
            return True
        steering = self._router.config.steering
        workers = self.routing.decision.order
        picks = ",".join([worker.address for worker in workers])
        for namespace, key in steering.endpoint_metadata:
            reply.dynamic_metadata.get_or_create_struct(namespace)[key] = picks
        if common is None:
            return True
        for name in steering.endpoint_headers:
            _set_header(common.header_mutation, name, picks)
        if self.routing.header_timeout_ms:
            _set_header(common.header_mutation, TRY_TIMEOUT_HEADER, str(self.routing.header_timeout_ms))
        for name in steering.cluster_headers:
            _set_header(common.header_mutation, name, workers[0].cluster)
            # The route was chosen by this header's absence; choose again. Needs the mutation above.
            common.clear_route_cache = True
        return True

    def _ask_for_the_end(self, reply: ProcessingResponse, message: ProcessingRequest) -> None:
        """Ask for response headers and trailers, so that the stream lives to the request's end.

        Envoy 1.37 and 1.38 close it at the response headers otherwise. Where the filter doesn't
        ``allow_mode_override``, Envoy ignores this. The body modes must be repeated as they are.
        """
        if not message.HasField("protocol_config"):
            return
        reply.mode_override.CopyFrom(
            ProcessingMode(
                response_header_mode=ProcessingMode.SEND,
                request_body_mode=message.protocol_config.request_body_mode,
                response_body_mode=message.protocol_config.response_body_mode,
                response_trailer_mode=ProcessingMode.SEND,
            )
        )

    # --- response --------------------------------------------------------------------------------

    def _response_headers(self, message: ProcessingRequest, now: float) -> list[ProcessingResponse]:
        reply = ProcessingResponse(response_headers=HeadersResponse())
        if not self._decided:
            # The engine, or Envoy itself, answered before the body's end; or the body was partial.
            self._steer(ProcessingResponse(), None, None, now, may_refuse=False)
        routing = self.routing
        if routing is not None:
            seen = _attributes(message)
            status = _status(_header(message.response_headers, ":status"))
            upstream = _text(seen, "upstream.address")
            # An error without an address is Envoy's own answer, no worker was reached. Otherwise the YAML
            # doesn't ask for the address, so believe that the pick was used.
            if not upstream and (not seen or 200 <= status < 300):
                upstream = routing.decision.worker.address
            attempts = _whole(seen, "upstream.request_attempt_count")
            self._router.responded(routing, upstream, attempts, status, now)
            if self._overrides.debug:
                decision = routing.decision
                share = decision.cached_tokens / decision.prompt_tokens if decision.prompt_tokens else 0.0
                _set_header(
                    reply.response_headers.response.header_mutation,
                    DEBUG_HEADER,
                    f"worker={upstream or 'none'}, picked={decision.worker.address},"
                    f" reason={decision.reason}, cached={share:.3f}",
                )
        return [reply]


def _facts(
    headers: HttpHeaders,
    message: ProcessingRequest,
    wanted: frozenset[str],
    metadata: Mapping[str, str],
    now: float,
) -> RequestFacts:
    seen = {
        "x-request-id": "",
        ":path": "",
        "content-type": "",
        "content-encoding": "",
    }
    others = {}
    for header in headers.headers.headers:
        if header.key in seen:
            seen[header.key] = _value(header)
        elif header.key in wanted:
            others[header.key] = _value(header)
    return RequestFacts(
        request_id=seen["x-request-id"],
        path=seen[":path"],
        content_type=seen["content-type"],
        content_encoding=seen["content-encoding"],
        cluster=_text(_attributes(message), "xds.cluster_name"),
        headers=others,
        metadata=metadata,
        arrived_s=now,
    )


def _attributes(message: ProcessingRequest) -> Mapping[str, Value]:
    """The attributes that Envoy sent for our filter, whatever name the YAML gives it."""
    if ATTRIBUTES_KEY in message.attributes:
        return message.attributes[ATTRIBUTES_KEY].fields
    for entry in message.attributes.values():
        return entry.fields
    return {}


def _text(attributes: Mapping[str, Value], name: str) -> str:
    return attributes[name].string_value if name in attributes else ""


def _whole(attributes: Mapping[str, Value], name: str) -> int:
    """A count; 0 when it isn't there or is none."""
    number = attributes[name].number_value if name in attributes else 0.0
    return int(number) if isfinite(number) else 0


def _status(text: str) -> int:
    """An HTTP status; 0 when it is none."""
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0


def _value(header: HeaderValue) -> str:
    return header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value


def _header(headers: HttpHeaders, name: str) -> str:
    for header in headers.headers.headers:
        if header.key == name:
            return _value(header)
    return ""


def _set_header(mutation: HeaderMutation, name: str, value: str) -> None:
    mutation.set_headers.append(
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE)
    )


def _echo(data: bytes, last: bool, *, response: bool) -> ProcessingResponse:
    """Give a piece of a streamed body back unchanged."""
    body = BodyResponse(
        response=CommonResponse(
            body_mutation=BodyMutation(streamed_response=StreamedBodyResponse(body=data, end_of_stream=last))
        )
    )
    return ProcessingResponse(response_body=body) if response else ProcessingResponse(request_body=body)
