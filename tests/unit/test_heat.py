"""Rent and requests in flight of hot prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing import heat
from extproc.routing.decision import Ticket
from extproc.routing.heat import HALF_LIFE_S, Heat
from extproc.routing.pool import Pool


def test_rent_halves_and_starts_anew() -> None:
    prefixes = Heat()
    prefixes.began(1, "a")
    prefixes.set_rent(1, 4.0, 10.0)
    assert prefixes.rent_s(1, 10.0) == 4.0
    assert prefixes.rent_s(1, 10.0 + HALF_LIFE_S) == pytest.approx(2.0)
    prefixes.set_rent(1, 0.0, 20.0)
    assert prefixes.rent_s(1, 20.0) == 0.0
    assert prefixes.rent_s(2, 20.0) == 0.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from("abc")), max_size=80))
def test_counts_are_those_of_a_plain_list(ops: list[tuple[bool, int, str]]) -> None:
    prefixes, running = Heat(), []
    for begin, key, worker in ops:
        if begin:
            prefixes.began(key, worker)
            running.append((key, worker))
        elif (key, worker) in running:
            prefixes.ended(key, worker)
            running.remove((key, worker))
        for k in range(4):
            counted = {w: running.count((k, w)) for w in "abc" if (k, w) in running}
            assert dict(prefixes.running(k)) == counted


def test_what_is_over_and_paid_nothing_is_forgotten_and_the_rest_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heat, "MAX_KEYS", 10)
    prefixes = Heat()
    prefixes.began(1, "a")
    prefixes.ended(1, "a")
    assert not prefixes._keys
    for key in range(100):
        prefixes.began(key, "a")
        prefixes.set_rent(key, 1.0, 0.0)
        prefixes.ended(key, "a")
    assert list(prefixes._keys) == list(range(90, 100))
    prefixes.ended(5, "a")  # forgotten: harmless


def test_a_hot_prefix_spreads_over_the_pool_and_cools_down_to_one_worker() -> None:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 1000) for i in range(4))
    pool = Pool(PoolConfig("p", endpoints, PoolSettings(cache_tokens=1_000_000)))
    chain = PrefixChain(tuple(range(1, 101)), 256, 25_600, 7)
    now, running, reasons = 0.0, [], set()

    def send() -> Ticket:
        decision = pool.decide(chain, now)
        assert decision is not None
        reasons.add(decision.reason)
        return pool.begin(decision, chain, now)

    for _ in range(400):
        now += 0.1
        running.append(send())
        if len(running) > 40:
            pool.end(running.pop(0), now)
    assert reasons == {"cold", "affinity", "spread"}
    assert sorted(w.in_flight for w in pool.workers)[0] >= 6, "all four share the crowd"
    for ticket in running:
        pool.end(ticket, now)
    homes = set()
    for _ in range(20):
        now += 60.0
        ticket = send()
        assert ticket.worker is not None
        homes.add(ticket.worker.address)
        pool.end(ticket, now + 1.0)
    assert len(homes) == 1, "a cool prefix lives on one worker"
