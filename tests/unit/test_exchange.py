"""The life of one request, message by message, over a real router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from counted import total
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.exchange import DEBUG_HEADER, STREAMED_CHUNK_BYTES, TRY_TIMEOUT_HEADER, Exchange, State
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig, Steering
from extproc.fleet.settings import RouteOverrides
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.routing.health import Probe
from extproc.wire import (
    HeaderMap,
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "What is a prefix? " * 200}]}
).encode()
MAX_BODY_BYTES = 300_000

BUFFERED = ProcessingMode.BUFFERED
STREAMED = ProcessingMode.STREAMED
PARTIAL = ProcessingMode.BUFFERED_PARTIAL
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
NONE = ProcessingMode.NONE


def config(
    workers: int = 4,
    *,
    steering: Steering | None = None,
    clusters: Mapping[str, str] | None = None,
    **pool: Any,
) -> RouterConfig:
    endpoints = tuple(
        EndpointConfig("10.0.0.1", 8000 + index, f"worker-{index}", max_inflight=120)
        for index in range(workers)
    )
    return RouterConfig(
        pools={"pool": PoolConfig("pool", endpoints, PoolSettings(**pool))},
        steering=steering or Steering(),
        clusters=clusters or {},
    )


class Life:
    """A router and one exchange of it."""

    def __init__(self, given: RouterConfig | None = None, overrides: RouteOverrides | None = None) -> None:
        self.observer = Observer()
        self.router = Router(given or config(), self.observer)
        self.exchange = self.another(overrides)
        self.now = 100.0

    def another(self, overrides: RouteOverrides | None = None) -> Exchange:
        return Exchange(self.router, overrides or RouteOverrides(), MAX_BODY_BYTES)

    def send(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        replies = []
        for message in messages:
            self.now += 0.01
            replies += self.exchange.receive(message, self.now)
        return replies

    def close(self) -> None:
        self.exchange.close(self.now)

    def in_flight(self, pool: str = "pool") -> dict[str, int]:
        return {w.address: w.in_flight for w in self.router.pools[pool].workers if w.in_flight}

    def count(self, name: str, **labels: str) -> float:
        return total(self.observer.registry, name, **labels)

    def expect_nothing_in_flight(self) -> None:
        assert self.in_flight() == {}
        assert self.router.pools["pool"].tickets == 0


def request_headers(
    mode: int | None = BUFFERED,
    *,
    end: bool = False,
    response_mode: int = NONE,
    path: str = "/v1/chat/completions",
    cluster: str = "",
    **extra: str,
) -> ProcessingRequest:
    fields = {":method": "POST", ":path": path, "content-type": "application/json", "x-request-id": "r-1"} | {
        key.replace("_", "-"): value for key, value in extra.items()
    }
    message = ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in fields.items()]),
            end_of_stream=end,
        )
    )
    if mode is not None:
        message.protocol_config.CopyFrom(
            ProtocolConfiguration(request_body_mode=mode, response_body_mode=response_mode)
        )
    if cluster:
        message.attributes["envoy.filters.http.ext_proc"]["xds.cluster_name"] = cluster
    return message


def request_body(data: bytes = BODY, *, last: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=last))


def request_trailers() -> ProcessingRequest:
    return ProcessingRequest(request_trailers=HttpTrailers())


def response_headers(
    status: str = "200", *, filter_name: str = "envoy.filters.http.ext_proc", **attributes: str | float
) -> ProcessingRequest:
    message = ProcessingRequest(
        response_headers=HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key=":status", value=status)]))
    )
    for key, value in attributes.items():
        message.attributes[filter_name][key.replace("__", ".")] = value
    return message


def response_body(data: bytes = b"data", *, last: bool = True) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=last))


def response_trailers() -> ProcessingRequest:
    return ProcessingRequest(response_trailers=HttpTrailers())


def picks(reply: ProcessingResponse) -> list[str]:
    value = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
    return value.string_value.split(",") if value.string_value else []


def kinds(replies: list[ProcessingResponse]) -> list[str | None]:
    return [reply.WhichOneof("response") for reply in replies]


def set_headers(mutation: HeaderMutation) -> dict[str, str]:
    assert all(h.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD for h in mutation.set_headers)
    return {h.header.key: h.header.raw_value.decode() for h in mutation.set_headers}


def echoed(replies: list[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    """The pieces of the request's body given back, and whether each ends it."""
    pieces = [r.request_body.response.body_mutation for r in replies if r.HasField("request_body")]
    assert all(piece.HasField("streamed_response") for piece in pieces)
    return [(piece.streamed_response.body, piece.streamed_response.end_of_stream) for piece in pieces]


# --- processing modes --------------------------------------------------------------------------------


def test_buffered_body_carries_the_pick_in_its_reply() -> None:
    life = Life()
    headers, body = life.send(request_headers(), request_body())
    assert headers.HasField("request_headers")
    assert picks(headers) == []
    assert body.HasField("request_body")
    assert not body.request_body.response.HasField("body_mutation")
    order = picks(body)
    assert len(order) == len(set(order)) == 4
    assert set(order) == {w.address for w in life.router.pools["pool"].workers}
    assert life.in_flight() == {order[0]: 1}
    assert kinds(life.send(response_headers(), response_body(), response_trailers())) == [
        "response_headers",
        "response_body",
        "response_trailers",
    ]
    assert life.in_flight() == {order[0]: 1}
    life.close()
    life.expect_nothing_in_flight()
    assert life.count("extproc_ended_total", pool="pool", status="2xx") == 1
    assert life.count("extproc_moved_total", pool="pool") == 0


def test_buffered_body_that_trailers_follow_is_whole() -> None:
    life = Life()
    replies = life.send(request_headers(), request_body(last=False))
    assert len(picks(replies[-1])) == 4
    assert life.count("extproc_unreadable_total", pool="pool", reason="incomplete") == 0
    assert picks(life.send(request_trailers())[0]) == []
    life.close()
    life.expect_nothing_in_flight()


@pytest.mark.parametrize("message", [request_headers(end=True), request_headers(NONE)])
def test_without_a_body_the_headers_reply_carries_the_pick(message: ProcessingRequest) -> None:
    life = Life()
    (reply,) = life.send(message)
    assert reply.HasField("request_headers")
    assert len(picks(reply)) == 4
    assert sum(life.in_flight().values()) == 1
    assert life.count("extproc_decisions_total", pool="pool", reason="least-request") == 1
    life.close()
    life.expect_nothing_in_flight()


def test_partial_body_is_decided_and_counted_at_the_response() -> None:
    life = Life()
    replies = life.send(request_headers(PARTIAL), request_body(BODY[:1000], last=False))
    assert kinds(replies) == ["request_headers", "request_body"]
    assert [picks(reply) for reply in replies] == [[], []]
    assert life.in_flight() == {}
    life.send(response_headers(upstream__address="10.0.0.1:8002"))
    assert life.in_flight() == {"10.0.0.1:8002": 1}
    assert life.count("extproc_unreadable_total", pool="pool", reason="incomplete") == 1
    life.close()
    life.expect_nothing_in_flight()


def test_partial_mode_with_a_whole_body_steers() -> None:
    life = Life()
    assert len(picks(life.send(request_headers(PARTIAL), request_body())[-1])) == 4


def test_streamed_body_is_decided_at_its_last_chunk() -> None:
    whole = Life()
    expected = picks(whole.send(request_headers(), request_body())[-1])
    life = Life()
    chunks = [BODY[i : i + 700] for i in range(0, len(BODY), 700)]
    replies = life.send(
        request_headers(STREAMED),
        *[request_body(c, last=i == len(chunks) - 1) for i, c in enumerate(chunks)],
    )
    assert kinds(replies) == ["request_headers"] + ["request_body"] * len(chunks)
    assert [picks(reply) for reply in replies[:-1]] == [[]] * len(chunks)
    assert picks(replies[-1]) == expected
    assert all(not reply.request_body.response.HasField("body_mutation") for reply in replies)


def test_streamed_body_that_ends_with_trailers_steers_by_metadata() -> None:
    life = Life()
    replies = life.send(request_headers(STREAMED), request_body(last=False), request_trailers())
    assert kinds(replies) == ["request_headers", "request_body", "request_trailers"]
    assert len(picks(replies[-1])) == 4
    assert sum(life.in_flight().values()) == 1


def test_streamed_body_that_is_too_long_goes_by_load() -> None:
    life = Life()
    replies = life.send(
        request_headers(STREAMED), request_body(bytes(MAX_BODY_BYTES), last=False), request_body(b"x")
    )
    assert kinds(replies) == ["request_headers", "request_body", "request_body"]
    assert len(picks(replies[-1])) == 4
    assert life.count("extproc_unreadable_total", pool="pool", reason="incomplete") == 1


def test_duplex_headers_are_held_back_until_the_body_ends() -> None:
    expected = picks(Life().send(request_headers(), request_body())[-1])
    life = Life()
    assert life.send(request_headers(DUPLEX), request_body(BODY[:500], last=False)) == []
    assert life.in_flight() == {}
    replies = life.send(request_body(BODY[500:]))
    assert kinds(replies) == ["request_headers", "request_body"]
    assert picks(replies[0]) == expected
    assert echoed(replies) == [(BODY, True)]


def test_duplex_body_comes_back_in_customary_pieces() -> None:
    body = json.dumps({"prompt": "x" * 200_000}).encode()
    life = Life()
    life.send(request_headers(DUPLEX, path="/v1/completions"))
    assert (
        life.send(*[request_body(body[i : i + 16_384], last=False) for i in range(0, len(body), 16_384)])
        == []
    )
    replies = life.send(request_body(b""))
    pieces = echoed(replies)
    assert b"".join(data for data, _ in pieces) == body
    assert max(len(data) for data, _ in pieces) <= STREAMED_CHUNK_BYTES <= 62_000
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(picks(replies[0])) == 4


def test_duplex_body_that_ends_with_trailers_releases_the_headers_first() -> None:
    life = Life()
    replies = life.send(request_headers(DUPLEX), request_body(last=False), request_trailers())
    assert kinds(replies) == ["request_headers", "request_body", "request_trailers"]
    assert len(picks(replies[0])) == 4
    assert echoed(replies) == [(BODY, False)]


def test_duplex_without_a_byte_of_body_still_ends_it() -> None:
    life = Life()
    replies = life.send(request_headers(DUPLEX), request_body(b""))
    assert kinds(replies) == ["request_headers", "request_body"]
    assert echoed(replies) == [(b"", True)]
    trailers = Life().send(request_headers(DUPLEX), request_trailers())
    assert kinds(trailers) == ["request_headers", "request_trailers"]
    assert len(Life().send(request_headers(DUPLEX, end=True))) == 1


def test_duplex_body_that_is_too_long_flows_on() -> None:
    life = Life()
    first, second, third = b"a" * MAX_BODY_BYTES, b"b" * 10, b"c" * 10
    assert life.send(request_headers(DUPLEX), request_body(first, last=False)) == []
    replies = life.send(request_body(second, last=False))
    assert kinds(replies)[0] == "request_headers"
    assert b"".join(data for data, _ in echoed(replies)) == first + second
    assert not any(last for _, last in echoed(replies))
    assert echoed(life.send(request_body(third))) == [(third, True)]
    assert life.count("extproc_unreadable_total", pool="pool", reason="incomplete") == 1
    assert sum(life.in_flight().values()) == 1


def test_duplex_response_is_given_back() -> None:
    life = Life()
    life.send(request_headers(DUPLEX, response_mode=DUPLEX), request_body(), response_headers())
    (reply,) = life.send(response_body(b"token", last=False))
    streamed = reply.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"token", False)


def test_duplex_response_is_given_back_when_its_headers_come_first() -> None:
    message = response_headers()
    message.protocol_config.response_body_mode = DUPLEX
    life = Life()
    life.send(message)
    (reply,) = life.send(response_body(b"token"))
    assert reply.response_body.response.body_mutation.streamed_response.body == b"token"


# --- what the replies say ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BUFFERED, STREAMED, PARTIAL, NONE])
@pytest.mark.parametrize("response_mode", [NONE, STREAMED])
def test_mode_override_asks_for_the_end_and_repeats_the_body_modes(mode: int, response_mode: int) -> None:
    (reply,) = Life().send(request_headers(mode, response_mode=response_mode))
    assert reply.mode_override.response_header_mode == ProcessingMode.SEND
    assert reply.mode_override.response_trailer_mode == ProcessingMode.SEND
    assert reply.mode_override.request_body_mode == mode
    assert reply.mode_override.response_body_mode == response_mode


def test_no_mode_override_when_envoy_does_not_tell_its_modes() -> None:
    (reply,) = Life().send(request_headers(None))
    assert not reply.HasField("mode_override")


def test_steering_by_headers() -> None:
    life = Life(config(steering=Steering(endpoint_metadata=(), endpoint_headers=("x-pick",))))
    reply = life.send(request_headers(), request_body())[-1]
    assert not reply.HasField("dynamic_metadata")
    common = reply.request_body.response
    order = set_headers(common.header_mutation)["x-pick"].split(",")
    assert life.in_flight() == {order[0]: 1}
    assert not common.clear_route_cache


def test_steering_by_cluster_header_has_the_route_chosen_again() -> None:
    steering = Steering(cluster_headers=("x-extproc-cluster",))
    life = Life(config(steering=steering))
    reply = life.send(request_headers(), request_body())[-1]
    common = reply.request_body.response
    cluster = set_headers(common.header_mutation)["x-extproc-cluster"]
    first = picks(reply)[0]
    assert cluster == f"worker-{int(first.rpartition(':')[2]) - 8000}"
    assert common.clear_route_cache


def test_metadata_alone_needs_no_mutation() -> None:
    common = Life().send(request_headers(), request_body())[-1].request_body.response
    assert not common.header_mutation.set_headers
    assert not common.clear_route_cache


def test_only_a_stream_that_can_go_elsewhere_has_its_wait_for_headers_bounded() -> None:
    stream = json.dumps(json.loads(BODY) | {"stream": True}).encode()

    def bound(life: Life, body: bytes) -> str | None:
        reply = life.send(request_headers(), request_body(body))[-1]
        found = set_headers(reply.request_body.response.header_mutation).get(TRY_TIMEOUT_HEADER)
        life.close()
        life.exchange = life.another()
        return found

    life = Life()
    assert bound(life, stream) == "3000"
    assert bound(life, BODY) is None
    pool = life.router.pools["pool"]
    for worker in pool.workers:
        pool.probed(worker, Probe.REFUSED, life.now, life.now)
    assert bound(life, stream) is None, "nobody else is any better"
    assert bound(Life(config(header_timeout_s=0.25)), stream) == "250"
    assert bound(Life(config(header_timeout_s=0)), stream) is None
    assert bound(Life(config(fallbacks=0)), stream) is None


def test_the_pick_has_as_many_fallbacks_as_the_pool_says() -> None:
    life = Life(config(8, fallbacks=2))
    assert len(picks(life.send(request_headers(), request_body())[-1])) == 3


@pytest.mark.parametrize(
    ("given", "overrides", "reason"),
    [
        (config(0), RouteOverrides(), "no_worker"),
        (config(), RouteOverrides(pool="nobody"), "no_pool"),
        (RouterConfig(pools={}), RouteOverrides(), "no_pool"),
    ],
)
def test_without_an_opinion_the_reply_is_bare(
    given: RouterConfig, overrides: RouteOverrides, reason: str
) -> None:
    life = Life(given, overrides)
    reply = life.send(request_headers(), request_body())[-1]
    assert not reply.HasField("dynamic_metadata")
    assert not reply.request_body.response.header_mutation.set_headers
    assert kinds(life.send(response_headers())) == ["response_headers"]
    assert life.count("extproc_unrouted_total", reason=reason) == 1
    life.close()


def test_the_pool_is_the_routes_then_the_clusters() -> None:
    one = config(2)
    other = EndpointConfig("10.9.9.9", 1, "other", 120)
    both = replace(
        one,
        pools={**one.pools, "other": PoolConfig("other", (other,))},
        clusters={"pool": "pool", "other": "other"},
    )
    by_cluster = Life(both)
    assert picks(by_cluster.send(request_headers(cluster="other"), request_body())[-1]) == ["10.9.9.9:1"]
    by_route = Life(both, RouteOverrides(pool="other"))
    assert picks(by_route.send(request_headers(cluster="pool"), request_body())[-1]) == ["10.9.9.9:1"]
    neither = Life(both)
    assert picks(neither.send(request_headers(cluster="elsewhere"), request_body())[-1]) == []


def test_a_routes_policy_counts_for_its_requests() -> None:
    life = Life(overrides=RouteOverrides(policy="round-robin"))
    life.send(request_headers(), request_body())
    assert life.count("extproc_decisions_total", pool="pool", reason="round-robin") == 1


# --- who served --------------------------------------------------------------------------------------


def test_count_moves_to_the_worker_that_served() -> None:
    life = Life()
    order = picks(life.send(request_headers(), request_body())[-1])
    life.send(response_headers(upstream__address=order[2], upstream__request_attempt_count=3.0))
    assert life.in_flight() == {order[2]: 1}
    assert life.count("extproc_moved_total", pool="pool") == 1
    life.close()
    life.expect_nothing_in_flight()


def test_the_pick_that_served_keeps_the_count() -> None:
    life = Life()
    order = picks(life.send(request_headers(), request_body())[-1])
    life.send(response_headers(upstream__address=order[0]))
    assert life.in_flight() == {order[0]: 1}
    assert life.count("extproc_moved_total", pool="pool") == 0


def test_attributes_of_a_filter_with_another_name_count() -> None:
    life = Life()
    order = picks(life.send(request_headers(), request_body())[-1])
    life.send(response_headers(filter_name="my-router", upstream__address=order[1]))
    assert life.in_flight() == {order[1]: 1}


def test_envoys_own_answer_refunds_the_pick() -> None:
    life = Life()
    before = {w.address: w.backlog_s(life.now) for w in life.router.pools["pool"].workers}
    life.send(request_headers(), request_body())
    life.send(response_headers("503", response__code=503.0))
    assert life.in_flight() == {}
    assert {w.address: w.backlog_s(life.now) for w in life.router.pools["pool"].workers} == before
    life.close()
    life.expect_nothing_in_flight()
    assert life.count("extproc_ended_total", pool="pool", status="5xx") == 1


@pytest.mark.parametrize("attributes", [{}, {"response__code": 200.0}])
def test_without_an_address_a_success_is_the_picks(attributes: dict[str, float]) -> None:
    life = Life()
    order = picks(life.send(request_headers(), request_body())[-1])
    life.send(response_headers("200", **attributes))
    assert life.in_flight() == {order[0]: 1}


def test_an_upstream_outside_the_pool_is_nobodys() -> None:
    life = Life()
    life.send(request_headers(), request_body())
    life.send(response_headers(upstream__address="192.0.2.1:1"))
    assert life.in_flight() == {}
    life.close()
    life.expect_nothing_in_flight()


def test_answer_before_the_bodys_end_is_counted_where_it_came_from() -> None:
    life = Life()
    life.send(request_headers(STREAMED), request_body(b"{", last=False))
    life.send(response_headers("413", upstream__address="10.0.0.1:8001"))
    assert life.in_flight() == {"10.0.0.1:8001": 1}
    (late,) = life.send(request_body(b"}"))
    assert picks(late) == []
    life.close()
    life.expect_nothing_in_flight()


def test_worker_removed_while_it_serves() -> None:
    life = Life()
    order = picks(life.send(request_headers(), request_body())[-1])
    present = life.router.config
    pool = present.pools["pool"]
    fewer = replace(pool, endpoints=tuple(e for e in pool.endpoints if e.address != order[0]))
    life.router.apply(replace(present, pools={"pool": fewer}))
    life.send(response_headers(upstream__address=order[0]))
    life.router.apply(present)
    assert life.in_flight() == {order[0]: 1}
    life.close()
    life.expect_nothing_in_flight()


def test_pool_removed_while_it_serves() -> None:
    life = Life()
    life.send(request_headers(), request_body())
    pool = life.router.pools["pool"]
    life.router.apply(RouterConfig(pools={}))
    life.send(response_headers(upstream__address="10.0.0.1:8000"))
    life.close()
    assert pool.tickets == 0


def test_debug_header_tells_the_decision() -> None:
    life = Life(overrides=RouteOverrides(debug=True))
    order = picks(life.send(request_headers(), request_body())[-1])
    (reply,) = life.send(response_headers(upstream__address=order[1]))
    header = set_headers(reply.response_headers.response.header_mutation)[DEBUG_HEADER]
    assert header == f"worker={order[1]}, picked={order[0]}, reason=cold, cached=0.000"
    life.close()
    life.exchange = life.another(RouteOverrides(debug=True))
    order = picks(life.send(request_headers(), request_body())[-1])
    (reply,) = life.send(response_headers(upstream__address=order[0]))
    header = set_headers(reply.response_headers.response.header_mutation)[DEBUG_HEADER]
    fields = dict(part.split("=") for part in header.split(", "))
    assert fields["reason"] == "affinity"
    assert 0.5 < float(fields["cached"]) <= 1.0


def test_no_debug_header_unless_asked_for() -> None:
    life = Life()
    life.send(request_headers(), request_body())
    assert not life.send(response_headers())[0].response_headers.response.header_mutation.set_headers


# --- the end -----------------------------------------------------------------------------------------


def test_observability_mode_gets_no_answers_but_counts() -> None:
    life = Life()
    messages = [request_headers(), request_body(), response_headers(upstream__address="10.0.0.1:8003")]
    for message in messages:
        message.observability_mode = True
    assert life.send(*messages) == []
    assert life.in_flight() == {"10.0.0.1:8003": 1}
    life.close()
    life.expect_nothing_in_flight()


def test_a_second_close_changes_nothing() -> None:
    life = Life()
    life.send(request_headers(), request_body())
    life.close()
    life.close()
    life.expect_nothing_in_flight()
    assert life.exchange.state is State.CLOSED
    assert life.count("extproc_ended_total", pool="pool", status="none") == 1


def test_messages_that_come_after_the_end_count_nothing() -> None:
    """The server may have one in hand when the stream is cancelled."""
    life = Life()
    life.send(request_headers())
    life.close()
    assert life.send(request_body(), response_headers(upstream__address="10.0.0.1:8001")) == []
    life.expect_nothing_in_flight()


@pytest.mark.parametrize("mode", [BUFFERED, STREAMED, DUPLEX])
def test_close_before_the_decision(mode: int) -> None:
    life = Life()
    life.send(request_headers(mode), *([] if mode == BUFFERED else [request_body(b"{", last=False)]))
    life.close()
    life.expect_nothing_in_flight()
    assert life.count("extproc_decisions_total", pool="pool", reason="cold") == 0


def test_unknown_phase_gets_no_answer() -> None:
    assert Life().send(ProcessingRequest()) == []


@pytest.mark.parametrize("status", ["", "²²²", "9" * 5000, "abc", "-20", "2000"])
@pytest.mark.parametrize("attempts", [float("nan"), float("inf"), -1.0, 1e300])
def test_odd_status_and_attempts_are_survived(status: str, attempts: float) -> None:
    life = Life()
    life.send(request_headers(), request_body())
    message = response_headers(
        status, upstream__address="10.0.0.1:8001", upstream__request_attempt_count=attempts
    )
    assert kinds(life.send(message)) == ["response_headers"]
    life.close()
    assert life.count("extproc_ended_total", pool="pool", status="none") == 1


@pytest.mark.parametrize("status", ["400", "200", ""])
def test_an_ended_request_leaves_no_backlog(status: str) -> None:
    """Refused by the engine, answered sooner than predicted, given up by the client."""
    life = Life()
    life.send(request_headers(), request_body())
    if status:
        life.send(response_headers(status))
    assert max(w.backlog_s(life.now) for w in life.router.pools["pool"].workers) > 0
    life.close()
    assert max(w.backlog_s(life.now) for w in life.router.pools["pool"].workers) < 1e-9


# --- any order ---------------------------------------------------------------------------------------

ADDRESSES = st.sampled_from(["", "10.0.0.1:8000", "10.0.0.1:8003", "192.0.2.1:1"])
MODES = st.sampled_from([NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX, None])


class AnyOrder(RuleBasedStateMachine):
    """Messages in any order, of several requests at once, with the fleet changing meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(config(), Observer())
        self.pool = self.router.pools["pool"]
        self.open: list[Exchange] = []
        self.now = 0.0

    def deliver(self, index: int, message: ProcessingRequest) -> None:
        self.now += 0.5
        exchange = self.open[index % len(self.open)]
        kind = message.WhichOneof("request")
        got = kinds(exchange.receive(message, self.now))
        if message.observability_mode:
            assert got == []
        elif kind in ("request_body", "request_headers", "request_trailers"):
            # The duplex mode holds back; what it then gives is the headers' reply, the body, the trailers'.
            rank = {"request_headers": 0, "request_body": 1, "request_trailers": 2}
            places = [rank[str(k)] for k in got]
            assert places == sorted(places)
            assert got.count("request_headers") <= 1
            if got and len(got) == 1:
                assert got == [kind]
            elif got:
                assert got[0] == "request_headers"
                assert got[-1] == kind
        else:
            assert got == ([kind] if kind else [])

    @rule()
    def begin(self) -> None:
        self.open.append(Exchange(self.router, RouteOverrides(debug=True), 2_000))

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 9), mode=MODES, end=st.booleans(), observed=st.booleans())
    def request_headers(self, i: int, mode: int | None, end: bool, observed: bool) -> None:
        message = request_headers(mode, end=end)
        message.observability_mode = observed
        self.deliver(i, message)

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 9), data=st.binary(max_size=3_000) | st.just(BODY[:1500]), last=st.booleans())
    def request_body(self, i: int, data: bytes, last: bool) -> None:
        self.deliver(i, request_body(data, last=last))

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 9))
    def request_trailers(self, i: int) -> None:
        self.deliver(i, request_trailers())

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 9), status=st.text(max_size=4), address=ADDRESSES, attempts=st.floats())
    def response_headers(self, i: int, status: str, address: str, attempts: float) -> None:
        attributes: dict[str, str | float] = {"upstream__request_attempt_count": attempts}
        if address:
            attributes["upstream__address"] = address
        self.deliver(i, response_headers(status, **attributes))

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 9), kind=st.sampled_from(["body", "trailers", "unknown"]))
    def rest(self, i: int, kind: str) -> None:
        messages = {"body": response_body(), "trailers": response_trailers(), "unknown": ProcessingRequest()}
        self.deliver(i, messages[kind])

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 9))
    def close(self, i: int) -> None:
        exchange = self.open.pop(i % len(self.open))
        exchange.close(self.now)
        exchange.close(self.now)

    @rule(workers=st.integers(0, 6), block_tokens=st.sampled_from([16, 256]))
    def reload(self, workers: int, block_tokens: int) -> None:
        self.router.apply(config(workers, block_tokens=block_tokens))

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.tickets <= len(self.open)
        assert all(w.in_flight >= 0 for w in self.pool.workers)
        assert sum(w.in_flight for w in self.pool.workers) <= self.pool.tickets

    def teardown(self) -> None:
        for exchange in self.open:
            exchange.close(self.now)
        self.router.apply(config(6))
        assert self.pool.tickets == 0
        assert [w.in_flight for w in self.pool.workers] == [0] * 6


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_parsable_bytes_are_survived(data: bytes) -> None:
    try:
        message = ProcessingRequest.FromString(data)
    except DecodeError:
        return
    life = Life()
    life.send(message)
    life.close()
    life.expect_nothing_in_flight()
