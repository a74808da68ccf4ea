"""What `extproc explain` says is what the router does, and saying it changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cli import main
from extproc.demo.envoy_setup import shipped
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe.observer import Observer
from extproc.router import Router, Routing
from extproc.routing.admission import Shed
from extproc.routing.explanation import Explanation
from extproc.routing.health import Probe
from extproc.routing.load import Worker
from extproc.routing.policy import Query, predicted, terms
from extproc.routing.pool import Pool

PATH = "/v1/chat/completions"
WORKERS = 5


def body(text: str = "What is a prefix? ", times: int = 400) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text * times}], "max_tokens": 9}).encode()


def facts(**headers: str) -> RequestFacts:
    return RequestFacts("r-1", PATH, headers={k.replace("_", "-"): v for k, v in headers.items()})


def router_of(**settings: object) -> tuple[Router, Pool]:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", max_inflight=3) for i in range(WORKERS))
    pool = PoolConfig("pool", endpoints, PoolSettings(**settings))  # type: ignore[arg-type]
    router = Router(RouterConfig(pools={"pool": pool}), Observer())
    return router, router.pools["pool"]


def explained(router: Router, given: bytes, now: float, asked: RequestFacts | None = None) -> Explanation:
    explanation = router.explain(asked or facts(), RouteOverrides(), given, now)
    assert explanation is not None
    return explanation


NUMBERS = st.floats(0.0, 1e7)


@given(
    states=st.lists(
        st.tuples(
            st.integers(0, 300),  # in flight
            st.floats(-50.0, 500.0),  # free at
            st.floats(1e-7, 1.0),  # rate
            NUMBERS,  # room
            st.none() | st.floats(-1e4, 10.0),  # oldest use
            st.integers(0, 90_000),  # cached
        ),
        min_size=1,
        max_size=12,
    ),
    beyond=st.integers(0, 200_000),
    alpha=st.floats(0.0, 10.0),
    decode_ms=st.floats(0.0, 50.0),
    eviction_weight=st.floats(0.0, 5.0),
    utilisation=st.floats(0.0, 2.0),
)
def test_the_terms_add_up_to_the_rankings_costs_exactly(
    states: list[tuple[int, float, float, float, float | None, int]],
    beyond: int,
    alpha: float,
    decode_ms: float,
    eviction_weight: float,
    utilisation: float,
) -> None:
    settings = PoolSettings(
        alpha=alpha, decode_ms=decode_ms, eviction_weight=eviction_weight, fallbacks=len(states)
    )
    workers = [Worker(EndpointConfig("h", i + 1, "c", 120), i, settings) for i in range(len(states))]
    cached = {}
    for worker, state in zip(workers, states, strict=True):
        worker.in_flight, worker.free_at_s, worker.prefill_s_per_token = state[:3]
        worker.room_tokens, worker.oldest_s, cached[worker.slot] = state[3:]
    tokens = max(cached.values()) + beyond
    query = Query(7, tokens, cached, 1, 2.0, utilisation=utilisation)
    ranking = predicted(query, workers, settings, 10.0)
    assert len(ranking.order) == len(workers)
    found = [terms(query, worker, workers, settings, 10.0).cost_s for worker in ranking.order]
    assert found == list(ranking.costs_s)


def test_it_says_what_the_router_then_does() -> None:
    router, pool = router_of(fallbacks=2)
    now = 10.0
    for number in range(60):
        now += 0.05
        given = body(f"Prompt {number % 7} ", 300 + 50 * (number % 3))
        said = explained(router, given, now)
        done = router.route(facts(), RouteOverrides(), given, now)
        assert isinstance(done, Routing)
        assert said.picks == tuple(worker.address for worker in done.decision.order)
        assert said.reason == done.decision.reason
        assert said.predicted_ttft_ms == done.decision.predicted_ttft_s * 1000
        assert [cost.place for cost in said.workers[:3]] == [1, 2, 3]
        if not said.overflow:
            costs = sorted(cost.total_ms for cost in said.workers if not cost.passed_over)
            assert said.workers[0].total_ms == done.decision.costs_s[0] * 1000
            assert said.reason == "spread" or said.workers[0].total_ms == costs[0]
        if number % 4:
            router.ended(done, now + 0.01)
    assert any(cost.passed_over == "limit" for cost in said.workers) or said.overflow
    assert pool.tickets == 15


def test_asking_changes_nothing() -> None:
    router, pool = router_of(
        policy="round-robin", tenant_header="x-tenant", retry_budget=0.1, shed_after_ms=100.0
    )
    twin, _ = router_of(policy="round-robin", tenant_header="x-tenant", retry_budget=0.1, shed_after_ms=100.0)
    outcomes = []
    for asked in (router, twin):
        seen: list[object] = []
        for number in range(80):
            now = 10.0 + number * 0.02
            request = facts(x_tenant=f"t{number % 3}", x_envoy_attempt_count=str(1 + number % 2))
            given = body(f"Prompt {number % 5} ", 2000)
            if asked is router:
                for _ in range(3):
                    explained(router, given, now, request)
            done = asked.route(request, RouteOverrides(), given, now)
            assert done is not None
            seen.append(done if isinstance(done, Shed) else done.decision.worker.address)
            if isinstance(done, Routing) and number % 3 == 0:
                asked.ended(done, now + 0.01)
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
    assert any(isinstance(outcome, Shed) for outcome in outcomes[0])
    assert 0 < pool.tickets < 80


def test_a_refusal_is_foretold() -> None:
    router, _ = router_of()
    asked = facts(x_extproc_ttft_slo_ms="1")
    said = explained(router, body(), 10.0, asked)
    done = router.route(asked, RouteOverrides(), body(), 10.0)
    assert isinstance(done, Shed)
    assert said.refusal is not None
    assert (said.refusal.status, said.refusal.reason, said.refusal.message) == (429, "slo", done.message)
    assert explained(router, body(), 10.0).refusal is None


def test_unreadable_prompts_sick_workers_and_empty_pools() -> None:
    router, pool = router_of(fallbacks=4)
    assert explained(router, b"{", 10.0).unreadable == "bad_json"
    assert not explained(router, b"{", 10.0).by_cost
    sick = pool.workers[0]
    pool.probed(sick, Probe.REFUSED, 9.8, 9.9)
    (cost,) = [c for c in explained(router, body(), 10.0).workers if c.worker == sick.address]
    assert (cost.state, cost.passed_over) == ("ejected", "health")
    settings = replace(pool.settings, reject_if_empty=True)
    router.apply(RouterConfig(pools={"pool": PoolConfig("pool", (), settings)}))
    said = explained(router, body(), 10.0)
    assert (said.picks, said.workers) == ((), ())
    assert said.refusal is not None
    assert said.refusal.status == 503
    assert router.explain(facts(), RouteOverrides(pool="another"), b"", 10.0) is None


def test_the_command_with_a_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(body("zanzibar "))
    yaml = str(shipped("envoy.yaml"))
    assert main(["explain", "--body", str(file), "--envoy-config", yaml]) == 0
    shown = capsys.readouterr().out
    assert "because: cold" in shown
    assert shown.count("127.0.0.1:800") >= 8
    assert "zanzibar" not in shown
    assert main(["explain", "--body", str(file), "--envoy-config", yaml, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pool"] == "workers"
    assert main(["explain", "--body", str(file), "--envoy-config", yaml, "--pool", "none"]) == 2
    assert "workers" in capsys.readouterr().err
    assert main(["explain", "--body", str(tmp_path / "no"), "--envoy-config", yaml]) == 2
    assert "No such file" in capsys.readouterr().err
