"""The live picture in simulated time: what it says is what happened, bounded, and nothing of a prompt."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_fleet import UNIX_S, Fleet, address, body, config, quiet  # noqa: F401 - a fixture

from extproc.bench.live import bench_live
from extproc.engine.report import EngineReport
from extproc.engine.state import EngineState, Target
from extproc.live.history import Track
from extproc.live.hottest import MAX_KEYS, MAX_SEEN, Hottest, short_hash
from extproc.live.recorder import MAX_WORKERS, Recorder
from extproc.live.status import HISTORY_POINTS, MAX_DECISIONS, History, Status
from extproc.live.window import BUCKET_RATIO, BUCKETS, bucket, ttft
from extproc.router import Routing
from extproc.routing.admission import Shed
from extproc.routing.demand import digest


def test_rates_and_ratios_are_of_the_last_seconds_and_then_nothing_is_known() -> None:
    fleet = Fleet()
    made = []
    for second in range(20):
        made += [(second, fleet.ask(body(f"agent {n % 3}", f"question {n}")).decision) for n in range(second)]
        fleet.pass_s(1.0)
    recent = [decision for second, decision in made if second >= 10]
    pool = fleet.pool()
    assert fleet.status.window_s == 10.0
    assert pool.requests_per_s == len(recent) / 10.0
    tokens = sum(decision.prompt_tokens for decision in recent)
    assert pool.prompt_tokens_per_s == pytest.approx(tokens / 10.0, abs=0.01)
    assert pool.hit_ratio == pytest.approx(sum(d.cached_tokens for d in recent) / tokens, abs=1e-4)
    reasons = Counter(decision.reason for decision in recent)
    assert pool.reasons == {reason: count / 10.0 for reason, count in reasons.items()}
    chosen = Counter(decision.worker.address for decision in recent)
    by_address = {worker.address: worker for worker in pool.workers}
    assert {a: w.requests_per_s * 10.0 for a, w in by_address.items() if w.requests_per_s} == chosen
    assert pool.busiest == pytest.approx(max(chosen.values()) * 4 / len(recent), abs=1e-3)
    idle = next(worker for worker in pool.workers if worker.address not in chosen)
    assert (idle.hit_ratio, idle.ttft, idle.requests_per_s) == (None, None, 0.0)

    fleet.pass_s(11.0)
    pool = fleet.pool()
    assert (pool.requests_per_s, pool.hit_ratio, pool.ttft, pool.busiest, pool.reasons) == (
        0,
        None,
        None,
        None,
        {},
    )
    told = json.loads(msgspec.json.encode(fleet.status))["pools"][0]
    assert told["hit_ratio"] is None
    assert told["ttft"] is None


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=300))
def test_percentiles_are_off_by_half_a_bucket_at_most(seconds: list[float]) -> None:
    counts = array("Q", [0]) * BUCKETS
    for each in seconds:
        counts[bucket(each)] += 1
    found = ttft(counts)
    assert found is not None
    ordered = sorted(seconds)
    for share, told_ms in ((0.5, found.p50_ms), (0.99, found.p99_ms)):
        true_ms = 1000 * ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
        assert told_ms / true_ms == pytest.approx(1.0, abs=BUCKET_RATIO**0.5 - 1.0 + 0.06 / true_ms)


def test_times_beyond_all_buckets_are_counted_too() -> None:
    assert [bucket(seconds) for seconds in (-1.0, 0.0, 1e-9)] == [0, 0, 0]
    assert [bucket(seconds) for seconds in (1e9, inf, nan)] == [BUCKETS - 1] * 3
    assert ttft(array("Q", [0]) * BUCKETS) is None


def test_decisions_tell_what_became_of_them() -> None:
    fleet = Fleet()
    first = fleet.route(body("a"))
    fleet.now += 0.5
    second = fleet.route(body("b"))
    assert isinstance(first, Routing)
    assert isinstance(second, Routing)
    newest, oldest = fleet.status.decisions
    assert (newest.worker, oldest.worker) == (second.decision.worker.address, first.decision.worker.address)
    assert (newest.status, newest.served, newest.duration_ms) == (0, "", None)
    assert (newest.at_s, oldest.at_s) == (UNIX_S + 0.5, UNIX_S)

    other = first.decision.order[1].address
    fleet.router.responded(first, other, 2, 200, fleet.now)
    moved = fleet.status.decisions[1]
    assert (moved.served, moved.status, moved.duration_ms) == (other, 200, None)
    fleet.now += 1.0
    fleet.router.ended(first, fleet.now)
    assert fleet.status.decisions[1].duration_ms == 1500.0
    assert fleet.status.decisions[0].duration_ms is None
    [move] = fleet.pool().moves
    assert (move.worker, move.served, move.moves) == (first.decision.worker.address, other, 1)
    assert (move.status, move.last_s) == (200, UNIX_S + 0.5)

    for n in range(MAX_DECISIONS):
        fleet.ask(body("a", f"{n}"))
    told = fleet.status.decisions
    assert len(told) == MAX_DECISIONS
    assert all(decision.duration_ms == 0.0 for decision in told)
    fleet.end(second)  # no longer remembered, and no harm done
    assert fleet.status.decisions == told
    fleet.pass_s(61.0)
    assert fleet.pool().moves == []


def test_only_refusals() -> None:
    fleet = Fleet(shed_after_ms=10_000.0)
    impatient = {"x-extproc-ttft-slo-ms": "1"}
    assert all(isinstance(fleet.route(body(f"{n}"), **impatient), Shed) for n in range(20))
    fleet.pass_s(2.0)
    pool = fleet.pool()
    assert (pool.requests_per_s, pool.hit_ratio, pool.ttft, pool.reasons) == (0.0, None, None, {})
    assert pool.refused == {"slo": 10.0}
    decision = fleet.status.decisions[0]
    assert (decision.worker, decision.reason, decision.status, decision.prefix) == ("", "slo", 429, "")
    assert decision.predicted_ttft_ms > 100.0
    assert fleet.alarms == ["Shedding"]
    fleet.pass_s(8.0)
    told = fleet.live.history(fleet.now).pools["p"]
    assert told.pool.refused_per_s == [2.0]
    assert sum(series.refused_per_s[0] or 0.0 for series in told.workers.values()) == 2.0


def test_prompts_that_cannot_be_read_have_no_ratio_and_no_prefix() -> None:
    fleet = Fleet()
    for _ in range(30):
        fleet.ask(b'{"messages": ')
    pool = fleet.pool()
    assert (pool.hit_ratio, pool.prefixes, pool.prompt_tokens_per_s) == (None, [], 0.0)
    assert pool.unreadable == {"bad_json": pool.requests_per_s}
    assert fleet.status.decisions[0].prefix == ""


def test_no_pool_and_no_worker() -> None:
    fleet = Fleet(workers=())
    assert fleet.route(body("a"), pool="q") is None
    assert fleet.route(body("a")) is None
    fleet.pass_s(1.0)
    pool = fleet.pool()
    assert (pool.workers, pool.busiest, pool.utilisation) == ([], None, 0.0)
    assert fleet.status.unrouted == {"no_pool": 1.0, "no_worker": 1.0}
    assert fleet.alarms == ["NoWorkers"]


def test_hot_prefixes_with_their_tenant_and_where_they_went() -> None:
    fleet = Fleet(tenant_header="x-tenant")
    asked: Counter[str] = Counter()
    for n in range(60):
        agent = f"agent {n % 7 % 4}"
        asked[agent] += 1
        headers = {"x-tenant": "acme" if agent != "agent 0" else f"tenant {n}"}
        fleet.ask(body(agent, chars=4000 + 4000 * (n % 7 % 4)), **headers)
    fleet.pass_s(2.0)
    pool = fleet.pool()
    assert sorted(round(prefix.requests_per_s * 2.0) for prefix in pool.prefixes) == sorted(asked.values())
    hottest = pool.prefixes[0]
    assert [prefix.share for prefix in pool.prefixes] == sorted(
        (prefix.share for prefix in pool.prefixes), reverse=True
    )
    assert sum(prefix.share for prefix in pool.prefixes) == pytest.approx(1.0, abs=1e-3)
    assert len(hottest.prefix) == 8
    assert hottest.hit_ratio is not None
    assert hottest.hit_ratio > 0.8
    assert {len(prefix.spread) for prefix in pool.prefixes} == {1}
    tenants = {prefix.tenant for prefix in pool.prefixes}
    assert tenants == {digest("acme"), ""}
    assert pool.tenants[0].share == max(tenant.share for tenant in pool.tenants)
    assert next(t for t in pool.tenants if t.tenant == digest("acme")).requests_per_s == 0.5 * (
        60 - asked["agent 0"]
    )
    fleet.pass_s(16.0)
    assert fleet.pool().prefixes == []
    assert fleet.pool().tenants == []


def test_ten_thousand_prefixes_take_bounded_memory_and_do_not_hide_a_hot_one() -> None:
    hottest = Hottest(0.0)
    for n in range(10_000):
        hottest.count(n << 40, 1000, 0, address(n % 5), f"tenant {n}")
        if n % 50 == 0:
            hottest.count(7, 1000, 900, address(1), "acme")
    table = hottest._generations[-1]
    assert (len(table.prefixes), len(table.tenants)) == (MAX_KEYS, MAX_KEYS)
    assert len(hottest._seen) == MAX_SEEN
    (key, entry), *_ = hottest.prefixes(5)
    assert (key, entry.requests, entry.tenant, entry.spread) == (7, 200, "acme", {address(1): 200})
    assert hottest.tick(5.0, 10_200_000)
    assert [key for key, _ in hottest.hot(0.01)] == [7]
    assert hottest.hot(0.05) == []
    assert short_hash(0xDEADBEEF << 32 | 5) == "deadbeef"


def test_an_hour_of_history_and_no_more() -> None:
    fleet = Fleet(workers=range(2), pools=("p", "q"))
    for _ in range(30):
        fleet.ask(body("a"), pool="p")
        fleet.pass_s(10.0)
    told = fleet.live.history(fleet.now)
    assert told.ends_s == [UNIX_S + 10.0 * (n + 1) for n in range(30)]
    series = told.pools["p"].pool
    assert [len(getattr(series, name)) for name in series.__struct_fields__] == [30] * 7
    assert series.requests_per_s == [0.1] * 30
    assert series.hit_ratio[0] == 0.0
    assert min(ratio or 0.0 for ratio in series.hit_ratio[1:]) > 0.8
    assert told.pools["p"].busiest == [2.0] * 30
    decoded = msgspec.json.decode(msgspec.json.encode(told), type=History)
    assert decoded.pools["q"].pool.hit_ratio == [None] * 30
    assert decoded.pools["q"].pool.requests_per_s == [0.0] * 30
    assert list(fleet.live.history(fleet.now, pool="q").pools) == ["q"]
    newer = fleet.live.history(fleet.now, since_s=told.ends_s[-3])
    assert newer.ends_s == told.ends_s[-2:]
    assert newer.pools["p"].pool.requests_per_s == [0.1] * 2
    assert fleet.live.history(fleet.now, since_s=told.ends_s[-1]).ends_s == []

    fleet.pass_s(3600.0)
    told = fleet.live.history(fleet.now)
    assert len(told.ends_s) == HISTORY_POINTS
    assert told.pools["p"].pool.requests_per_s == [0.0] * HISTORY_POINTS
    track = Track()
    assert sum(series.itemsize * len(series) for series in track.series) == 7 * 360 * 8


def test_gauges_of_the_history_are_means_over_the_step() -> None:
    fleet = Fleet(workers=range(1))
    fleet.pass_s(4.0)
    running = fleet.route(body("a"))
    assert isinstance(running, Routing)
    fleet.pass_s(6.0)
    series = fleet.live.history(fleet.now).pools["p"].workers[address(0)]
    assert series.in_flight == [0.6]


def test_a_reload_that_removes_workers_and_a_pool() -> None:
    fleet = Fleet(workers=range(3), pools=("p", "q"))
    fleet.ask(body("a"))
    fleet.pass_s(10.0)
    fleet.router.apply(config((0, 3)))
    fleet.ask(body("a"))
    fleet.pass_s(10.0)
    assert [pool.name for pool in fleet.status.pools] == ["p"]
    assert [worker.address for worker in fleet.pool().workers] == [address(0), address(3)]
    told = msgspec.json.decode(msgspec.json.encode(fleet.live.history(fleet.now)), type=History)
    workers = told.pools["p"].workers
    assert workers[address(1)].in_flight == [0.0, None]
    assert workers[address(3)].in_flight == [None, 0.0]
    assert told.pools["q"].pool.in_flight == [0.0, None]
    fleet.pass_s(3580.0)
    assert address(1) in fleet.live.history(fleet.now).pools["p"].workers
    fleet.pass_s(10.0)
    told = fleet.live.history(fleet.now)
    assert (list(told.pools), list(told.pools["p"].workers)) == (["p"], [address(0), address(3)])
    fleet.router.apply(config((1,)))  # back after more than an hour
    fleet.ask(body("a"))
    fleet.pass_s(10.0)
    assert fleet.live.history(fleet.now).pools["p"].workers[address(1)].requests_per_s[-1] == 0.1


def test_workers_that_come_and_go_all_the_time_are_forgotten_before_their_hour() -> None:
    fleet = Fleet(workers=range(1))
    fleet.pass_s(10.0)
    pool = fleet.recorder.pools["p"]
    for n in range(2 * MAX_WORKERS):
        fleet.recorder._worker(pool, f"gone-{n}")
    fleet.pass_s(20.0)
    assert len(pool.workers) == MAX_WORKERS
    assert address(0) in pool.workers


def test_the_engines_own_word_and_its_age() -> None:
    fleet = Fleet(workers=range(2), scrape_interval_s=10.0)
    pool = fleet.router.pools["p"]
    before = EngineReport(
        "vllm", prefix_query_tokens=1000.0, prefix_hit_tokens=0.0, ttft_s=5.0, first_tokens=50.0
    )
    after = EngineReport(
        "vllm",
        running=3.0,
        waiting=1.0,
        kv_usage=0.25,
        prefix_query_tokens=5000.0,
        prefix_hit_tokens=3000.0,
        ttft_s=25.0,
        first_tokens=150.0,
    )
    fleet.targets = [Target(pool, worker) for worker in pool.workers]
    fleet.targets[0].state = EngineState(after, fleet.now, before, fleet.now - 10.0)
    fleet.targets[1].state = EngineState(before, fleet.now)
    fleet.pass_s(2.0)
    told, other = fleet.pool().workers
    assert (told.engine_hit_ratio, told.engine_ttft_ms, told.signal_age_s) == (0.75, 200.0, 2.0)
    assert (told.engine_running, told.engine_waiting, told.kv_usage) == (3.0, 1.0, 0.25)
    assert (other.engine_hit_ratio, other.engine_ttft_ms) == (0.0, None)  # since its start; one reading only
    assert (fleet.pool().engine_hit_ratio, fleet.pool().engine_ttft_ms) == (0.75, 200.0)
    assert fleet.alarms == []
    fleet.pass_s(30.0)
    stale, _ = fleet.pool().workers
    assert (stale.engine_hit_ratio, stale.engine_ttft_ms, stale.engine_running, stale.kv_usage) == (None,) * 4
    assert stale.signal_age_s == 32.0
    fleet.pass_s(15.0)
    assert fleet.alarms == ["SignalsStale"]
    fleet.targets = []
    assert {worker.signal_age_s for worker in fleet.pool().workers} == {None}


def test_a_worker_whose_cache_is_of_unknown_size() -> None:
    fleet = Fleet(workers=range(1))
    fleet.ask(body("a"))
    [worker] = fleet.pool().workers
    assert (worker.cache_tokens, worker.cache_used_tokens) == (0, 1792)
    fleet.router.pools["p"].resize_cache(fleet.router.pools["p"].workers[0], 1024)
    [worker] = fleet.pool().workers
    assert (worker.cache_tokens, worker.cache_used_tokens) == (1024, 1024)


def test_unix_time_follows_a_clock_that_was_set() -> None:
    fleet = Fleet()
    fleet.ask(body("a"))
    fleet.pass_s(5.0)
    fleet.unix_s += 0.2  # that it runs a little slow moves nothing
    assert (fleet.status.decisions[0].at_s, fleet.status.now_s) == (UNIX_S, UNIX_S + 5.0)
    fleet.unix_s += 3600.0
    assert fleet.status.now_s == pytest.approx(UNIX_S + 3605.2)
    assert fleet.status.decisions[0].at_s == pytest.approx(UNIX_S + 3600.2)


def test_late_ticks_change_no_rate() -> None:
    fleet = Fleet()
    for _ in range(60):
        fleet.ask(body("a"))
        fleet.now += 0.5
        if fleet.now % 3.0 == 0.0:
            fleet.live.tick(fleet.now)
    assert fleet.pool().requests_per_s == pytest.approx(2.0, rel=0.1)


MARKER = "zanzibar-4711"


def test_nothing_of_a_prompt_or_a_tenant_is_told() -> None:
    fleet = Fleet(tenant_header="x-tenant", shed_after_ms=1.0, contention_ms=0.0)
    for n in range(50):
        fleet.route(body(MARKER, f"{MARKER}{n}", chars=100_000), **{"x-tenant": MARKER})
    fleet.route(f'{{"messages": "{MARKER}'.encode(), **{"x-tenant": MARKER})
    fleet.pass_s(20.0)
    status, history = msgspec.json.encode(fleet.status), msgspec.json.encode(fleet.live.history(fleet.now))
    assert digest(MARKER).encode() in status
    assert {decision.status for decision in fleet.status.decisions} == {0, 429}
    assert b"zanzibar" not in status + history
    assert msgspec.json.decode(status, type=Status) == fleet.status


def test_an_empty_recorder_has_a_status() -> None:
    fleet = Fleet()
    assert fleet.status.pools[0].requests_per_s == 0.0
    assert fleet.live.history(fleet.now).ends_s == []
    assert Recorder(0.0).decisions == []


def test_what_it_costs_is_measured() -> None:
    cost = bench_live(workers=2, requests_per_s=40, seconds=2, idle_s=98)
    assert cost.history_bytes > 3 * 7 * 10 * 2  # of a pool and two workers, ten steps
    assert 0.05 < cost.memory_mb < 2.0
    assert 0.0 < cost.decided_us < 1000.0
