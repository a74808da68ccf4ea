"""Bounds on the wait for headers: as configured until there is something to go by, never above it."""

from __future__ import annotations

import pytest

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.patience import LEAST_COUNT, LEAST_HEADER_S, LEAST_SILENCE_S, PERIOD_S, SPARED, Patience
from extproc.routing.pool import Pool


def patience(after_s: float, count: int = LEAST_COUNT, now: float = 1.0) -> Patience:
    it = Patience()
    for _ in range(count):
        it.came(after_s, now)
    return it


@pytest.mark.parametrize(
    ("after_s", "header_s", "silence_s"),
    [
        (0.001, LEAST_HEADER_S, LEAST_SILENCE_S),
        (0.2, 1.6, 0.8),
        (0.45, 3.0, 1.8),
        (2.9, 3.0, 2.0),
    ],
)
def test_multiples_of_the_slowest_within_bounds(after_s: float, header_s: float, silence_s: float) -> None:
    it = patience(after_s)
    assert it.header_timeout_s(3.0) == pytest.approx(header_s)
    assert it.silence_s(2.0) == pytest.approx(silence_s)


def test_as_configured_while_little_is_known() -> None:
    it = patience(0.001, LEAST_COUNT - 1)
    assert (it.header_timeout_s(3.0), it.silence_s(2.0)) == (3.0, 2.0)


def test_a_few_that_are_slower_do_not_count() -> None:
    it = patience(0.01)
    for spared in range(1, SPARED + 2):
        it.came(2.0, 1.0)
        assert it.header_timeout_s(3.0) == (LEAST_HEADER_S if spared <= SPARED else 3.0)


def test_never_above_what_is_configured_and_off_stays_off() -> None:
    it = patience(0.5)
    assert (it.header_timeout_s(0.25), it.silence_s(0.1)) == (0.25, 0.1)
    assert (it.header_timeout_s(0.0), it.silence_s(0.0)) == (0.0, 0.0)


def test_the_slowest_counts_for_one_period_at_least_and_two_at_most() -> None:
    it = patience(0.3)
    for period, expected in ((0.9, 2.4), (1.8, 2.4), (2.9, LEAST_HEADER_S)):
        for _ in range(LEAST_COUNT):
            it.came(0.001, 1.0 + period * PERIOD_S)
        assert it.header_timeout_s(3.0) == pytest.approx(expected)


# --- in a pool ---------------------------------------------------------------------------------------


class Streams:
    """Requests for streams to a pool of four."""

    def __init__(self) -> None:
        endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(4))
        self.pool = Pool(PoolConfig("pool", endpoints, PoolSettings()))
        self.now = 0.0

    def send(self, after_s: float, *, attempts: int = 1, answered: bool = True, stream: bool = True) -> None:
        chain = PrefixChain((round(self.now * 1000), 2), 256, 512, round(self.now * 1000))
        decision = self.pool.decide(chain, self.now)
        assert decision is not None
        ticket = self.pool.begin(decision, chain, self.now, stream=stream)
        self.now += after_s
        served = decision.order[attempts - 1].address if answered else ""
        self.pool.heard(ticket, served, attempts, 200 if answered else 504, self.now)
        self.pool.served_by(ticket, served, self.now)
        self.pool.end(ticket, self.now)
        self.now += 0.1

    @property
    def bound_s(self) -> float:
        return self.pool.workers[0].health.header_timeout_s


def test_a_pool_learns_from_its_streams_alone() -> None:
    streams = Streams()
    for _ in range(2 * LEAST_COUNT):
        streams.send(0.01)
        streams.send(0.5, stream=False)
    assert streams.bound_s == LEAST_HEADER_S


def test_one_worker_that_hangs_leaves_the_bound_as_it_is() -> None:
    streams = Streams()
    for _ in range(LEAST_COUNT):
        streams.send(0.01)
    streams.send(LEAST_HEADER_S + 0.02, attempts=2)
    assert streams.bound_s == LEAST_HEADER_S


@pytest.mark.parametrize("answered", [True, False])
def test_two_in_a_row_widen_it(answered: bool) -> None:
    streams = Streams()
    for _ in range(LEAST_COUNT):
        streams.send(0.01)
    streams.send(2 * LEAST_HEADER_S + 0.02, attempts=3, answered=answered)
    assert streams.bound_s == 3.0
