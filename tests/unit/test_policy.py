"""Policies: pure functions over a query and the workers' accounts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from extproc.fleet.config import EndpointConfig, PoolSettings
from extproc.fleet.settings import POLICIES as NAMES
from extproc.routing.load import Worker
from extproc.routing.policy import POLICIES, Query, Ranking, predicted, prefix_hash

SETTINGS = PoolSettings()
C = 1 / SETTINGS.prefill_tokens_per_s


def fleet(n: int = 4) -> list[Worker]:
    workers = [Worker(EndpointConfig("10.0.0.1", 8000 + i, "c", 120), i, SETTINGS) for i in range(n)]
    for worker in workers:
        worker.room_tokens = 1e9
    return workers


def query(**more: object) -> Query:
    base = Query(key=42, prompt_tokens=1000, cached={}, serial=1, mean_in_flight=0.0)
    return replace(base, **more)  # type: ignore[arg-type]


def pick(ranking: Ranking) -> int:
    return ranking.order[0].slot


def test_the_settings_table_and_the_policies_agree() -> None:
    assert set(NAMES) == set(POLICIES)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_pure_and_ranks_a_single_worker_too(name: str) -> None:
    workers = fleet()
    workers[1].in_flight, workers[2].free_at_s = 3, 50.0
    before = [(w.in_flight, w.free_at_s, w.room_tokens, w.oldest_s) for w in workers]
    first = POLICIES[name](query(cached={2: 512}), workers, SETTINGS, 10.0)
    again = POLICIES[name](query(cached={2: 512}), workers, SETTINGS, 10.0)
    assert [w.slot for w in first.order] == [w.slot for w in again.order]
    assert len({w.slot for w in first.order}) == len(first.order) == 4
    assert before == [(w.in_flight, w.free_at_s, w.room_tokens, w.oldest_s) for w in workers]
    assert pick(POLICIES[name](query(), workers[3:], SETTINGS, 10.0)) == 3


def test_predicted_goes_where_the_prefix_is() -> None:
    ranking = predicted(query(cached={2: 768}), fleet(), SETTINGS, 0.0)
    assert pick(ranking) == 2
    assert ranking.reason == "affinity"
    # 232 tokens missing, twice: own prefill and alpha.
    assert ranking.costs_s[0] == pytest.approx(232 * C * 2)
    assert ranking.costs_s[1] == pytest.approx(1000 * C * 2)


def test_predicted_leaves_a_worker_whose_backlog_costs_more_than_a_cold_copy() -> None:
    workers = fleet()
    workers[2].free_at_s = 10.0 + 1000 * C * 2 - 0.001
    assert pick(predicted(query(cached={2: 1000}), workers, SETTINGS, 10.0)) == 2
    workers[2].free_at_s = 10.0 + 1000 * C * 2 + 0.001
    ranking = predicted(query(cached={2: 1000}), workers, SETTINGS, 10.0)
    assert pick(ranking) != 2
    assert ranking.reason == "load"


def test_predicted_prices_decode_load_and_eviction() -> None:
    workers = fleet(2)
    workers[0].in_flight = 1
    ranking = predicted(query(), workers, SETTINGS, 0.0)
    assert pick(ranking) == 1
    assert ranking.costs_s[1] - ranking.costs_s[0] == pytest.approx(SETTINGS.decode_ms / 1000)
    workers = fleet(2)
    workers[0].room_tokens, workers[0].oldest_s = 400.0, 0.0
    ranking = predicted(query(), workers, SETTINGS, 30.0)
    assert pick(ranking) == 1
    # 600 of the 1,000 tokens evict something last used 30 s ago, which halves the price.
    assert ranking.costs_s[1] - ranking.costs_s[0] == pytest.approx(0.5 * 600 * C / 2)


def test_predicted_breaks_ties_by_rendezvous_and_spreads_cold_keys() -> None:
    owners = Counter(
        pick(predicted(query(key=key * 0x9E3779B97F4A7C15 % 2**64), fleet(), SETTINGS, 0.0))
        for key in range(400)
    )
    assert len(owners) == 4
    assert min(owners.values()) > 60
    settings = replace(SETTINGS, fallbacks=3)
    full = [w.slot for w in predicted(query(), fleet(), settings, 0.0).order]
    without = [w for w in fleet() if w.slot != full[0]]
    assert [w.slot for w in predicted(query(), without, settings, 0.0).order] == full[1:]


def test_predicted_ranks_the_best_other_worker_second() -> None:
    ranking = predicted(query(cached={0: 512, 1: 1000, 3: 768}), fleet(), SETTINGS, 0.0)
    assert [w.slot for w in ranking.order] == [1, 3, 0, 2]


def test_one_wrong_rate_does_not_attract_cold_work() -> None:
    """The own miss is priced at the pool's mean rate: a fast-looking worker with a queue doesn't win."""
    workers = fleet()
    workers[0].prefill_s_per_token = C / 4
    workers[0].free_at_s = 0.05
    assert pick(predicted(query(), workers, SETTINGS, 0.0)) != 0


def test_prefix_hash_passes_over_a_worker_above_the_bound_only() -> None:
    workers = fleet()
    order = [w.slot for w in prefix_hash(query(), workers, SETTINGS, 0.0).order]
    owner = workers[order[0]]
    # Mean 4, bound 1.5 x 4 + 4 = 10.
    owner.in_flight = 9
    ranking = prefix_hash(query(mean_in_flight=4.0), workers, SETTINGS, 0.0)
    assert (pick(ranking), ranking.reason) == (order[0], "affinity")
    owner.in_flight = 10
    ranking = prefix_hash(query(mean_in_flight=4.0), workers, SETTINGS, 0.0)
    assert ([w.slot for w in ranking.order], ranking.reason) == ([*order[1:], order[0]], "load")


def test_prefix_hash_keeps_affinity_on_a_quiet_fleet() -> None:
    workers = fleet()
    order = [w.slot for w in prefix_hash(query(), workers, SETTINGS, 0.0).order]
    workers[order[0]].in_flight = 3
    assert pick(prefix_hash(query(mean_in_flight=0.75), workers, SETTINGS, 0.0)) == order[0]


def test_least_request_counts_by_weight_and_spreads_ties() -> None:
    workers = fleet()
    for worker in workers:
        worker.in_flight = 5
    workers[2].in_flight = 4
    assert pick(POLICIES["least-request"](query(), workers, SETTINGS, 0.0)) == 2
    workers[2].in_flight, workers[3].weight = 5, 2.0
    assert pick(POLICIES["least-request"](query(), workers, SETTINGS, 0.0)) == 3
    idle = fleet()
    first = Counter(pick(POLICIES["least-request"](query(serial=i), idle, SETTINGS, 0.0)) for i in range(400))
    assert min(first.values()) > 60


def test_round_robin_takes_turns() -> None:
    workers = fleet()
    assert [pick(POLICIES["round-robin"](query(serial=i), workers, SETTINGS, 0.0)) for i in range(6)] == [
        0,
        1,
        2,
        3,
        0,
        1,
    ]


def test_lmetric_weighs_new_tokens_against_the_batch() -> None:
    workers = fleet(2)
    workers[0].in_flight = 3
    assert (
        pick(POLICIES["lmetric"](query(cached={0: 900}), workers, SETTINGS, 0.0)) == 0
    )  # 101 x 4 < 1001 x 1
    workers[0].in_flight = 10
    assert pick(POLICIES["lmetric"](query(cached={0: 900}), workers, SETTINGS, 0.0)) == 1  # 101 x 11 > 1001


def test_a_busy_fleet_makes_a_cold_copy_dearer() -> None:
    costs = [
        predicted(query(utilisation=u), fleet(), SETTINGS, 0.0).costs_s[0]
        for u in (0.0, 0.5, 0.75, 0.9, 1.0, 7.0)
    ]
    alphas = [1.0, 1.0, 3.0, 8.0, 8.0, 8.0]  # u / (1 - u), from 1 to 8
    assert costs == pytest.approx([1000 * C * (1 + alpha) for alpha in alphas])


def crowd(own: int, others: int = 0) -> tuple[list[Worker], Query]:
    """``own`` requests of a 1,000-token prefix on worker 0, ``others`` of other prefixes on each worker."""
    workers = fleet()
    for worker in workers:
        worker.in_flight = others
    workers[0].in_flight += own
    mean = sum(w.in_flight for w in workers) / len(workers)
    return workers, query(cached={0: 1000}, running={workers[0].address: own}, mean_in_flight=mean)


def test_a_crowd_of_one_prefix_pays_rent_and_buys_a_copy_when_it_has_paid_the_price() -> None:
    settings = replace(SETTINGS, decode_ms=0.0)
    workers, asked = crowd(own=20)
    rent_s, decisions = 0.0, 0
    while True:
        ranking = predicted(replace(asked, rent_s=rent_s), workers, settings, 0.0)
        decisions += 1
        assert ranking.rent_s is not None
        if ranking.reason == "spread":
            break
        assert pick(ranking) == 0
        rent_s = ranking.rent_s
    # 20 more than elsewhere, less two standard deviations of chance at a mean of 5.
    each_s = (20 - 2 * 5**0.5) * settings.spread_ms / 1000
    price_s = 1000 * C * 2
    assert decisions == -(-price_s // each_s)
    assert pick(ranking) != 0
    assert ranking.order[1].slot == 0, "the full copy is the fallback"
    assert ranking.rent_s == 0.0


def test_chance_and_other_peoples_load_pay_no_rent() -> None:
    workers, asked = crowd(own=4, others=4)
    assert predicted(asked, workers, SETTINGS, 0.0).rent_s == 0.0
    workers, asked = crowd(own=20)
    assert predicted(replace(asked, running={0: 1}), workers, SETTINGS, 0.0).rent_s is None
    assert predicted(asked, workers, replace(SETTINGS, spread_ms=0.0), 0.0).rent_s is None


def test_a_copy_does_not_push_out_what_is_in_use() -> None:
    workers, asked = crowd(own=20)
    asked, settings = replace(asked, rent_s=2.0), replace(SETTINGS, decode_ms=0.0)
    for worker in workers:
        worker.room_tokens, worker.oldest_s = 0.0, 100.0
    assert predicted(asked, workers, settings, 101.0).reason == "affinity"
    assert predicted(asked, workers, settings, 5000.0).reason == "spread"
