"""Slow workers: found by what their engines count, and nobody else is taken for one."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.health import Cause, State
from extproc.routing.load import Worker
from extproc.routing.pace import FULL_KV, LEAST_READINGS, Pace
from extproc.routing.pool import Pool

READING_S = 10.0
CHECK_S = 0.25
#: Of an engine at its usual speed.
STEP_S, DECODE_S = 0.020, 0.001


class Fleet:
    """A pool whose engines decode by the clock; ``slow``: address → how many times slower."""

    def __init__(self, workers: int = 4, **settings: float) -> None:
        endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(workers))
        self.pool = Pool(PoolConfig("pool", endpoints, PoolSettings(**settings)))
        self.now = 0.0
        self.slow: dict[Worker, float] = {}
        self.kv_usage = 0.5
        self._tokens = dict.fromkeys(self.workers, 0.0)
        for worker in self.workers:
            self.load(worker, 10)

    @property
    def workers(self) -> list[Worker]:
        return list(self.pool.workers)

    def load(self, worker: Worker, in_flight: int) -> None:
        worker.in_flight = in_flight

    def run(self, readings: int) -> None:
        for _ in range(readings):
            for _ in range(round(READING_S / CHECK_S)):
                self.now += CHECK_S
                self.pool.check(self.now)
                for worker in self.workers:
                    step_s = (STEP_S + DECODE_S * worker.in_flight) * self.slow.get(worker, 1.0)
                    self._tokens[worker] += worker.in_flight * CHECK_S / step_s
            for worker in self.workers:
                self.pool.decoded(worker, self._tokens[worker], self.now, kv_usage=self.kv_usage)

    @property
    def out(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.health.out]


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.run(2 * LEAST_READINGS)
    assert fleet.out == []
    return fleet


def test_a_slow_worker_is_out_at_the_next_reading_and_back_when_it_is_well(fleet: Fleet) -> None:
    worker = fleet.workers[1]
    fleet.slow[worker] = 10.0
    fleet.run(1)
    assert fleet.out == [worker]
    assert fleet.pool.decide(PrefixChain((1, 2), 256, 512, 1), fleet.now).worker is not worker  # type: ignore[union-attr]
    fleet.run(1)
    assert fleet.out == [worker]
    del fleet.slow[worker]
    fleet.run(1)
    assert worker.health.state is State.RETURNING
    fleet.run(1)
    assert worker.health.state is State.HEALTHY


def test_it_comes_back_for_a_trial_when_nothing_is_left_to_be_read(fleet: Fleet) -> None:
    worker = fleet.workers[1]
    fleet.slow[worker] = 10.0
    fleet.run(1)
    fleet.load(worker, 0)
    fleet.run(2)
    assert fleet.out == [worker]
    fleet.run(2)
    assert fleet.out == []


def test_a_fleet_that_slows_down_as_a_whole_is_not_slow(fleet: Fleet) -> None:
    fleet.slow = dict.fromkeys(fleet.workers, 10.0)
    fleet.run(3)
    assert len(fleet.out) <= 1  # the first to be read; the others are compared with it


@pytest.mark.parametrize("in_flight", [0, 1, 3, 60, 120])
def test_more_or_less_load_is_not_slowness(fleet: Fleet, in_flight: int) -> None:
    fleet.load(fleet.workers[1], in_flight)
    fleet.run(5)
    assert fleet.out == []


def test_while_it_prefills_it_does_not_decode(fleet: Fleet) -> None:
    """Ten cold prompts in a row, by the router's account."""
    worker = fleet.workers[1]
    worker.free_at_s = fleet.now + 9.0
    fleet.slow[worker] = 1000.0
    fleet.run(1)
    assert fleet.out == []


def test_a_full_cache_is_not_slowness(fleet: Fleet) -> None:
    fleet.kv_usage = FULL_KV + 0.05
    fleet.slow[fleet.workers[1]] = 10.0
    fleet.run(3)
    assert fleet.out == []


def test_different_gpus_are_not_slow() -> None:
    fleet = Fleet()
    fleet.slow = {fleet.workers[0]: 8.0, fleet.workers[1]: 0.5}
    fleet.run(20)
    assert fleet.out == []


def test_what_lasts_becomes_usual(fleet: Fleet) -> None:
    worker = fleet.workers[1]
    fleet.slow[worker] = 10.0
    fleet.run(150)
    assert worker.health.state is State.HEALTHY
    fleet.run(50)
    assert worker.health.state is State.HEALTHY


def test_a_page_that_stops_lies_or_starts_anew_does_no_harm(fleet: Fleet) -> None:
    worker = fleet.workers[1]
    for tokens in (None, 0.0, None, 5.0, nan, inf, 1e300, 0.0, -5.0):
        fleet.pool.check(fleet.now + 1.0)
        fleet.pool.decoded(worker, tokens, fleet.now + 2.0)
    fleet.run(3)
    assert fleet.out == []


def test_a_frozen_page_is_as_bad_as_a_slow_engine_and_is_bounded() -> None:
    """It tells that nothing is generated. The rest of the pool keeps the requests, as for any other cause."""
    fleet = Fleet()
    fleet.run(2 * LEAST_READINGS)
    fleet.slow = dict.fromkeys(fleet.workers[:3], 1e9)
    fleet.run(4)
    assert fleet.pool.panic or len(fleet.out) <= len(fleet.workers) / 2


def test_the_cause_is_told(fleet: Fleet) -> None:
    changes = []
    fleet.pool._changed = lambda pool, worker, change: changes.append(change)
    fleet.slow[fleet.workers[1]] = 10.0
    fleet.run(1)
    assert [(change.after, change.cause) for change in changes] == [(State.EJECTED, Cause.SLOW)]
    assert changes[0].for_s == 3 * fleet.pool.settings.scrape_interval_s


NUMBERS = st.none() | st.floats() | st.sampled_from([nan, inf, -inf, 0.0, 1e300, -1.0])


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.0, 100.0), NUMBERS, st.floats(1.0, 1e6))))
def test_no_reading_is_too_odd(readings: list[tuple[int, float, float | None, float]]) -> None:
    pace = Pace()
    for now, (in_flight, seconds, tokens, others) in enumerate(readings):
        pace.observe(in_flight, seconds)
        judged = pace.told(tokens, others, now)
        assert judged is None or min(judged) >= 0.0
