"""Admission: bounds, shares, retries, and what is left of a refused request (nothing)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.refusal import immediate
from extproc.routing.admission import Admission, Shed, bound_of
from extproc.routing.decision import Decision
from extproc.routing.demand import Demand, digest, read_demand, wanted_headers
from extproc.routing.fairness import ACTIVE_S, GUARANTEED, MAX_TENANTS, SAVED_S, FairShares
from extproc.routing.pool import Pool
from extproc.routing.queueing import OVERHEAD_S, Queues
from extproc.routing.retries import FREE_RETRIES, MAX_BODIES, MEMORY_S, STREAM_REPEAT_S, Retry, RetryGuard

RATE = 1000.0  # tokens/s of a worker


def make_pool(workers: int = 1, **settings: object) -> Pool:
    used = replace(PoolSettings(prefill_tokens_per_s=RATE), **settings)  # type: ignore[arg-type]
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(workers))
    return Pool(PoolConfig("p", endpoints, used))


def cold(serial: int, tokens: int = 1024) -> PrefixChain:
    hashes = tuple(serial * 1000 + i for i in range(tokens // 256))
    return PrefixChain(hashes, 256, tokens, serial)


class Front:
    """A pool with its gate, as the router drives them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.gate = Admission(pool)
        self.serial = 0

    def ask(self, demand: Demand, now: float, tokens: int = 1024) -> Shed | Decision:
        self.serial += 1
        chain = cold(self.serial, tokens)
        decision = self.pool.decide(chain, now)
        assert decision is not None
        shed = self.gate.admit(decision, demand, now)
        if shed is None:
            self.gate.began(decision, now)
            self.pool.begin(decision, chain, now)
            return decision
        return shed


# --- bounds ---------------------------------------------------------------------------------------------


def test_the_least_bound_counts():
    settings = PoolSettings(shed_after_ms=4000)
    assert bound_of(Demand(), PoolSettings()) is None
    assert bound_of(Demand(timeout_s=1.0), PoolSettings()) is None, (
        "a timeout counts only where the pool sheds"
    )
    for demand, patience, seconds, reason in (
        (Demand(), None, 4.0, "load"),
        (Demand(slo_s=1.0), None, 1.0, "slo"),
        (Demand(slo_s=9.0), None, 4.0, "load"),
        (Demand(timeout_s=2.0), None, 2.0, "timeout"),
        (Demand(), 3.0, 3.0, "retry"),
        (Demand(priority=1), None, 8.0, "load"),
        (Demand(priority=-1), None, 2.0, "load"),
        (Demand(slo_s=1.0, priority=3), None, 1.0, "slo"),
        (Demand(slo_s=1.0, priority=-2), None, 0.25, "slo"),
    ):
        bound = bound_of(demand, settings, patience)
        assert bound is not None
        assert (bound.seconds, bound.reason) == (seconds, reason)


def test_requests_are_let_in_until_the_bound_and_again_after_retry_after():
    front = Front(make_pool(shed_after_ms=5000))
    answers = [front.ask(Demand(), 100.0) for _ in range(10)]
    let_in = [a for a in answers if isinstance(a, Decision)]
    refused = [a for a in answers if isinstance(a, Shed)]
    assert len(let_in) == 4, "four prompts of 1.024 s, and not a fifth"
    assert {(a.status, a.reason) for a in refused} == {(429, "load")}
    assert front.pool.tickets == 4
    assert front.pool.workers[0].in_flight == 4
    after_s = refused[0].retry_after_s
    assert after_s is not None
    assert isinstance(front.ask(Demand(), 100.0 + after_s * 0.9), Shed)
    assert isinstance(front.ask(Demand(), 100.0 + after_s * 1.01), Decision)


def test_the_lowest_priority_is_refused_first():
    front = Front(make_pool(shed_after_ms=5000))
    taken = {
        priority: sum(isinstance(front.ask(Demand(priority=priority), 0.0), Decision) for _ in range(20))
        for priority in (-2, -1, 0, 1)
    }
    assert taken == {-2: 1, -1: 1, 0: 2, 1: 5}, "each goes on where the lower ones had to stop"


def test_a_long_prompt_on_an_idle_pool_is_no_overload_but_its_own_bound_holds():
    front = Front(make_pool(shed_after_ms=1000))
    assert isinstance(front.ask(Demand(), 0.0, tokens=10_240), Decision)
    front = Front(make_pool(shed_after_ms=1000))
    assert isinstance(front.ask(Demand(slo_s=0.5), 0.0, tokens=10_240), Shed)


def test_off_unless_configured():
    front = Front(make_pool())
    assert not front.gate.minds({})
    assert front.gate.minds({"x-extproc-ttft-slo-ms": "5"})
    assert all(isinstance(front.ask(Demand(tenant="a", body=7), 0.0), Decision) for _ in range(100))


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 4096), st.booleans()), max_size=60))
def test_queues_are_never_negative_and_empty_when_everything_has_left(steps):
    pool = make_pool()
    worker, queues, now, entries = pool.workers[0], Queues(), 0.0, []
    for pause_s, tokens, leave in steps:
        now += pause_s
        entries.append(queues.enter(worker, tokens, now))
        if leave:
            queues.leave(entries.pop(len(entries) // 2), now)
        assert queues.wait_s(worker, now) >= 0.0
        assert queues.ttft_s(worker, 0, 0, now) >= OVERHEAD_S
    for entry in entries:
        queues.leave(entry, now)
    assert queues.wait_s(worker, now) < 1e-6


# --- fairness -------------------------------------------------------------------------------------------


def test_who_stays_within_its_share_is_never_refused_for_others():
    front = Front(make_pool(tenant_header="x-tenant", contention_ms=100))
    refused = {"quiet": 0, "flood": 0}
    for tick in range(400):  # 4 s: the quiet one asks for a quarter of it, the flood for ten times it
        now = tick * 0.01
        if tick % 100 == 50:
            refused["quiet"] += isinstance(front.ask(Demand(tenant="quiet"), now, tokens=256), Shed)
        for _ in range(2):
            answer = front.ask(Demand(tenant="flood"), now, tokens=256)
            refused["flood"] += isinstance(answer, Shed)
    assert refused["quiet"] == 0
    assert refused["flood"] > 600


def test_a_tenant_alone_has_it_all():
    shares = FairShares()
    for tick in range(100):
        assert shares.overdrawn_s("a", 1.0, 1000.0, "w", 100.0, 100.0, tick * 0.01) == 0.0
        shares.debit("a", "w", 1000.0)


def test_shares_follow_the_weights():
    shares, taken = FairShares(), {"a": 0, "b": 0}
    weights = {"a": 3.0, "b": 1.0}
    for tick in range(2000):
        for tenant, weight in weights.items():
            if not shares.overdrawn_s(tenant, weight, 1e6, "w", 1000.0, 1000.0, tick * 0.01):
                shares.debit(tenant, "w", 50.0)
                taken[tenant] += 50
    assert taken["a"] == pytest.approx(GUARANTEED * 0.75 * 1000 * (20 + SAVED_S), rel=0.05)
    assert taken["b"] == pytest.approx(GUARANTEED * 0.25 * 1000 * (20 + SAVED_S), rel=0.05)


def test_tenants_are_bounded_and_forgotten():
    shares = FairShares()
    for number in range(MAX_TENANTS + 50):
        shares.overdrawn_s(str(number), 1.0, 1.0, "w", 1.0, 1.0, 0.0)
    assert len(shares) == MAX_TENANTS
    shares.overdrawn_s("new", 1.0, 1.0, "w", 1.0, 1.0, ACTIVE_S + 1.0)
    assert len(shares) == 1


# --- retries --------------------------------------------------------------------------------------------


def test_what_is_a_retry():
    guard = RetryGuard()
    assert guard.recognize(1, False, 0.0) is None
    assert guard.recognize(1, True, 0.0) == Retry()
    guard.ended(1, age_s=5.0, status=0, streamed=False, now=5.0)
    assert guard.recognize(1, False, 5.0) == Retry(patience_s=5.0)
    assert guard.recognize(2, False, 5.0) is None
    assert guard.recognize(1, False, 6.0 + MEMORY_S) is None
    guard.ended(1, age_s=1.0, status=200, streamed=False, now=7.0)
    assert guard.recognize(1, False, 7.0) is None, "it was answered"
    guard.ended(3, age_s=5.0, status=200, streamed=True, now=10.0)
    assert guard.recognize(3, False, 10.0) == Retry(5.0)
    assert guard.recognize(3, False, 10.1 + STREAM_REPEAT_S) is None, "its stream may have been whole"
    guard.ended(4, age_s=0.2, status=503, streamed=False, now=10.0)
    assert guard.recognize(4, False, 10.0) == Retry(None)


def test_who_comes_back_when_told_is_no_retry():
    guard = RetryGuard()
    guard.refused(1, 10.0, 0.0)
    assert guard.recognize(1, True, 5.0) == Retry()
    assert guard.recognize(1, True, 10.0) is None


def test_a_budget_is_spent_and_earned():
    guard = RetryGuard()
    spent = sum(guard.within_budget("a", 0.2, True, 0.0) for _ in range(100))
    assert spent == FREE_RETRIES
    assert guard.within_budget("b", 0.2, True, 0.0), "each tenant has its own"
    for _ in range(10):
        assert guard.within_budget("a", 0.25, False, 0.0)
    assert [guard.within_budget("a", 0.25, True, 0.0) for _ in range(3)] == [True, True, False]


def test_a_retry_is_refused_if_it_would_take_longer_than_its_client_waits():
    front = Front(make_pool(retry_budget=1.0))
    demand = Demand(body=5)
    for _ in range(4):
        front.ask(Demand(), 0.0)
    front.gate.retries.ended(5, age_s=2.0, status=0, streamed=True, now=0.0)
    shed = front.ask(demand, 0.0)
    assert isinstance(shed, Shed)
    assert shed.reason == "retry"
    assert isinstance(front.ask(demand, 4.0), Decision)


def test_bodies_are_bounded():
    guard = RetryGuard()
    for body in range(MAX_BODIES + 10):
        guard.ended(body, age_s=2.0, status=0, streamed=True, now=0.0)
    assert guard.waits_s(0, 0.0) is None
    assert guard.waits_s(MAX_BODIES, 0.0) == 2.0


# --- what a request says, and what it is told ------------------------------------------------------------


def test_headers_are_read_and_nonsense_is_not():
    settings = PoolSettings(
        tenant_header="Authorization",
        tenant_weights=(("gold", 4.0), (digest("silver"), 2.0)),
        retry_budget=0.2,
        client_priority=True,
    )
    assert "authorization" in wanted_headers(settings)
    headers = {
        "x-extproc-ttft-slo-ms": "1500",
        "x-envoy-expected-rq-timeout-ms": "9000",
        "x-envoy-upstream-rq-timeout-ms": "8000",
        "x-extproc-priority": "-2",
        "x-stainless-retry-count": "1",
        "authorization": "silver",
    }
    demand = read_demand(headers, b"{}", None, settings)
    assert (demand.slo_s, demand.timeout_s, demand.priority, demand.weight) == (1.5, 8.0, -2, 2.0)
    assert demand.declared_retry
    assert "silver" not in repr(demand)
    assert read_demand({"authorization": "gold"}, b"{}", None, settings).weight == 4.0
    assert read_demand(headers, b"{}", 3, settings).priority == 3, "the route's word goes before the client's"
    assert read_demand(headers, b"{}", None, PoolSettings()).priority == 0
    assert read_demand(
        {"x-stainless-retry-count": "0", "x-envoy-attempt-count": "1"}, b"", None, settings
    ) == (Demand(tenant="", body=0))


@given(st.text(max_size=30), st.binary(max_size=10))
def test_any_header_value_is_survived(value, body):
    settings = PoolSettings(tenant_header="t", retry_budget=0.1, client_priority=True)
    headers = dict.fromkeys((*wanted_headers(settings), "t"), value)
    demand = read_demand(headers, body, None, settings)
    assert -4 <= demand.priority <= 4
    assert demand.slo_s is None or demand.slo_s > 0


def test_the_answer_is_one_that_clients_understand():
    answer = immediate(Shed(429, "load", "Later.", 1.2))
    headers = {h.header.key: h.header.raw_value.decode() for h in answer.headers.set_headers}
    assert answer.status.code == 429
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1200")
    assert headers["content-type"] == "application/json"
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {
            "message": "Later.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        },
    }
    assert "retry-after" not in str(immediate(Shed(503, "no_worker", "None.")).headers)
