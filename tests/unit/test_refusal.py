"""Refusals in every processing mode: one immediate response, nothing after it, nothing counted."""

from __future__ import annotations

import pytest
from test_exchange import (
    BODY,
    BUFFERED,
    DUPLEX,
    NONE,
    PARTIAL,
    STREAMED,
    Life,
    config,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
)

HARD = {"x_extproc_ttft_slo_ms": "0.001"}


def only_refusal(replies):
    """The immediate response among replies to a whole request; it must be the last of them."""
    assert [reply.WhichOneof("response") for reply in replies][-1] == "immediate_response"
    assert sum(reply.HasField("immediate_response") for reply in replies) == 1
    reply = replies[-1]
    assert not reply.HasField("dynamic_metadata")
    assert not reply.HasField("mode_override")
    return reply.immediate_response


@pytest.mark.parametrize(
    "messages",
    [
        (request_headers(BUFFERED, **HARD), request_body()),
        (request_headers(PARTIAL, **HARD), request_body()),
        (request_headers(STREAMED, **HARD), request_body(BODY[:10], last=False), request_body(BODY[10:])),
        (request_headers(DUPLEX, **HARD), request_body(BODY[:10], last=False), request_body(BODY[10:])),
        (request_headers(DUPLEX, **HARD), request_body(last=False), request_trailers()),
        (request_headers(STREAMED, **HARD), request_body(last=False), request_trailers()),
        (request_headers(NONE, **HARD),),
        (request_headers(BUFFERED, end=True, **HARD),),
    ],
)
def test_refused_in_every_mode(messages):
    life = Life()
    answer = only_refusal(life.send(*messages))
    assert answer.status.code == 429
    life.expect_nothing_in_flight()
    life.close()
    life.expect_nothing_in_flight()
    assert life.count("extproc_shed_total", pool="pool", reason="slo") == 1
    assert life.count("extproc_ended_total", pool="pool", status="none") == 0


def test_what_envoy_answers_itself_is_not_routed_anew():
    life = Life()
    only_refusal(life.send(request_headers(BUFFERED, **HARD), request_body()))
    assert [r.WhichOneof("response") for r in life.send(response_headers("429"))] == ["response_headers"]
    life.expect_nothing_in_flight()


def test_a_response_that_came_first_is_never_refused():
    life = Life()
    (_, reply) = life.send(request_headers(BUFFERED, **HARD), response_headers())
    assert reply.WhichOneof("response") == "response_headers"


def test_in_observability_mode_the_request_goes_on_and_is_counted():
    life = Life()
    messages = [request_headers(BUFFERED, **HARD), request_body()]
    for message in messages:
        message.observability_mode = True
    assert life.send(*messages) == []
    assert sum(life.in_flight().values()) == 1
    life.close()
    life.expect_nothing_in_flight()


@pytest.mark.parametrize("reject", [False, True])
def test_an_empty_pool_is_envoy_s_business_unless_told_otherwise(reject):
    life = Life(config(0, reject_if_empty=reject))
    replies = life.send(request_headers(), request_body())
    if reject:
        assert only_refusal(replies).status.code == 503
    else:
        assert [r.WhichOneof("response") for r in replies] == ["request_headers", "request_body"]
        assert not replies[-1].HasField("dynamic_metadata")


def test_the_account_of_admission_is_empty_after_the_end():
    life = Life(config(1, shed_after_ms=60_000.0, prefill_tokens_per_s=100.0))
    life.send(request_headers(), request_body())
    gate = life.exchange.routing.gate
    worker = life.router.pools["pool"].workers[0]
    assert gate.queues.wait_s(worker, life.now) > 1.0
    life.close()
    assert gate.queues.wait_s(worker, life.now) == 0.0
