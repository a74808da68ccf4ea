"""A worker's learned speed: bounded whatever comes, right where it can be, unmoved where nothing is told."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.pool import Pool
from extproc.routing.snapshot import restore, save
from extproc.routing.speed import MAX_FACTOR, MAX_OVERHEAD_S, Speed
from extproc.sim.product import Distortion, PoolRouter
from extproc.sim.scenarios import SCENARIOS, Knobs
from extproc.sim.simulation import Simulation

PRIOR = 1e-4
SETTINGS = PoolSettings(learn_speed=True)


def live(speed: Speed, intervals: int, *, tokens: float, s_per_token: float, overhead_s: float = 0.0) -> None:
    """Intervals of 20 requests, each with so many uncached tokens in front of its end."""
    count, waited_s = 0.0, 0.0
    speed.told(count, waited_s)
    for _ in range(intervals):
        for _ in range(20):
            speed.ended(tokens * speed.s_per_token)
            count += 1
            waited_s += overhead_s + tokens * s_per_token
        speed.told(count, waited_s)


@pytest.mark.parametrize("factor", [0.25, 0.67, 1.0, 1.5, 4.0])
def test_long_prefills_tell_the_speed_in_spite_of_an_overhead(factor: float) -> None:
    speed = Speed(PRIOR)
    live(speed, 100, tokens=20_000, s_per_token=PRIOR * factor, overhead_s=0.05)
    assert speed.s_per_token == pytest.approx(PRIOR * factor, rel=0.15)


def test_cached_prompts_that_take_their_time_are_no_sign_of_slowness() -> None:
    speed = Speed(PRIOR)
    live(speed, 100, tokens=100, s_per_token=PRIOR, overhead_s=0.14)
    assert speed.log_factor == pytest.approx(0.0, abs=0.1)
    assert speed.overhead_s == pytest.approx(0.14, abs=0.02)


NUMBERS = st.one_of(st.floats(), st.floats(0.0, 1e4), st.sampled_from([nan, inf, -inf, 0.0, 1e300, -1.0]))


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0.0, 1e6), st.none() | NUMBERS, st.none() | NUMBERS)))
def test_bounded_whatever_comes(lives: list[tuple[int, float, float | None, float | None]]) -> None:
    speed = Speed(PRIOR)
    for requests, foretold_s, count, waited_s in lives:
        for _ in range(requests):
            speed.ended(foretold_s)
        speed.told(count, waited_s)
        assert PRIOR / MAX_FACTOR * 0.999 <= speed.s_per_token <= PRIOR * MAX_FACTOR * 1.001
        assert 0.0 <= speed.overhead_s <= MAX_OVERHEAD_S


@given(st.lists(st.tuples(st.integers(4, 100), st.floats(0.0, 1e3), st.floats(0.0, 1e9)), min_size=1))
def test_one_interval_moves_it_by_a_tenth_at_most(intervals: list[tuple[int, float, float]]) -> None:
    speed = Speed(PRIOR)
    count, sum_s = 0.0, 0.0
    speed.told(count, sum_s)
    for requests, foretold_s, waited_s in intervals:
        for _ in range(requests):
            speed.ended(foretold_s)
        before, count, sum_s = speed.log_factor, count + requests, sum_s + waited_s
        assert speed.told(count, sum_s)
        assert abs(speed.log_factor - before) <= 0.1 + 1e-9


@pytest.mark.parametrize("engine", [10.0, 40.0])
def test_an_interval_with_other_clients_requests_teaches_nothing(engine: float) -> None:
    speed = Speed(PRIOR)
    speed.told(0.0, 0.0)
    for _ in range(20):
        speed.ended(1.0)
    assert not speed.told(engine, 100.0)
    assert speed.s_per_token == PRIOR


def test_few_requests_are_joined_with_the_next_ones() -> None:
    speed = Speed(PRIOR)
    speed.told(0.0, 0.0)
    for reading in range(1, 5):
        speed.ended(1.0)
        assert speed.told(float(reading), 2.0 * reading) is (reading == 4)
    assert speed.s_per_token > PRIOR


def test_a_restarted_or_silent_engine_starts_a_new_account() -> None:
    for count, waited_s in ((2.0, 1.0), (None, None), (120.0, nan)):
        speed = Speed(PRIOR)
        speed.told(100.0, 100.0)
        for _ in range(20):
            speed.ended(1.0)
        assert not speed.told(count, waited_s)
        speed.told(2.0, 1.0)
        for _ in range(20):
            speed.ended(1.0)
        assert speed.told(22.0, 41.0)


def chain(tokens: int, key: int) -> PrefixChain:
    return PrefixChain(tuple(range(key, key + tokens // 16)), 16, tokens, key)


def pool(workers: int = 1, settings: PoolSettings = SETTINGS) -> Pool:
    return Pool(config(workers, settings))


def config(workers: int, settings: PoolSettings = SETTINGS) -> PoolConfig:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(workers))
    return PoolConfig("p", endpoints, replace(settings, block_tokens=16))


def serve(it: Pool, requests: int, readable: bool = True) -> None:
    """Cold prompts of 10,000 tokens, one after the other: a second each, as foretold."""
    for index in range(requests):
        now = 10.0 * index
        prompt = chain(10_000, 100_000 * (index + 1)) if readable else None
        decision = it.decide(prompt, now)
        assert decision is not None
        it.end(it.begin(decision, prompt, now), now + 5.0)


def test_a_pool_learns_if_it_may_and_forgets_when_it_may_not() -> None:
    for learns in (True, False):
        it = pool(settings=replace(SETTINGS, learn_speed=learns))
        (worker,) = it.workers
        it.timed(worker, 0.0, 0.0)
        serve(it, 20)
        it.timed(worker, 20.0, 40.0)
        assert (worker.prefill_s_per_token > PRIOR) is learns
    it = pool()
    (worker,) = it.workers
    worker.learned(0.5)
    it.update(config(1))
    assert worker.prefill_s_per_token == pytest.approx(PRIOR * exp(-0.5))
    it.update(config(1, replace(SETTINGS, learn_speed=False)))
    assert worker.prefill_s_per_token == PRIOR


def test_prompts_that_cant_be_read_teach_nothing() -> None:
    it = pool()
    (worker,) = it.workers
    it.timed(worker, 0.0, 0.0)
    serve(it, 20, readable=False)
    it.timed(worker, 20.0, 40.0)
    assert worker.prefill_s_per_token == PRIOR


def test_a_worker_that_joins_starts_at_the_pools_mean() -> None:
    it = pool(2)
    for worker in it.workers:
        worker.learned(0.5)
    it.update(config(3))
    assert it.workers[2].prefill_s_per_token == pytest.approx(PRIOR * exp(-0.5))


def test_a_saved_picture_brings_the_speed_back() -> None:
    old, new = pool(), pool()
    old.workers[0].learned(0.5)
    data = save({"p": old}, 0.0, 0.0)
    restore(data, {"p": new}, 0.0, 0.0)
    assert new.workers[0].prefill_s_per_token == pytest.approx(PRIOR * exp(-0.5))
    # Files from before speeds were saved have nothing there; damaged ones anything.
    for speed in ([], [None], [-1.0], [nan], [0.0]):
        saved = msgspec.msgpack.decode(data)
        address, kept = next(iter(saved["pools"]["p"]["workers"].items()))
        saved["pools"]["p"]["workers"][address] = kept[:2] + speed
        other = pool()
        restore(msgspec.msgpack.encode(saved), {"p": other}, 0.0, 0.0)
        assert other.workers[0].prefill_s_per_token == PRIOR


@pytest.mark.parametrize("error", [0.6, 1.6])
def test_a_wrong_prior_is_put_right_on_a_busy_fleet(error: float) -> None:
    scenario = SCENARIOS["rag"]
    routers: list[PoolRouter] = []

    def make(replica: int) -> PoolRouter:
        routers.append(PoolRouter(SETTINGS, replica=replica, distortion=Distortion(rate=error)))
        return routers[-1]

    workload = scenario.make(1, Knobs(), scenario.fleet)
    Simulation(workload, make, scenario.fleet, requests=3_000).run()
    mean = sum(1.0 / worker.prefill_s_per_token for worker in routers[0].pool.workers) / 8
    assert mean == pytest.approx(9_500, rel=0.25)
