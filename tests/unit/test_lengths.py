"""How long prompts really are, learned from the engines' counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.lengths import HIGHEST, LOWEST, Scale
from extproc.routing.pool import Pool
from extproc.routing.tally import Interval, Tally

MAYBE = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


def pool(cache_tokens: int | None = 100_000) -> Pool:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 1000) for i in range(2))
    return Pool(PoolConfig("p", endpoints, PoolSettings(cache_tokens=cache_tokens)))


def serve(pool: Pool, requests: int, estimated_tokens: int) -> dict[str, int]:
    """Let requests run to their end; returns how many ended on each worker."""
    ended = {worker.address: 0 for worker in pool.workers}
    for i in range(requests):
        prompt = PrefixChain((i + 1,), 256, estimated_tokens, i)
        decision = pool.decide(prompt, float(i))
        assert decision is not None
        ended[decision.worker.address] += 1
        pool.end(pool.begin(decision, prompt, float(i)), i + 0.5, 10.0)
    return ended


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_the_caches_sizes_follow_the_true_length_of_a_token(factor: float) -> None:
    target = pool()
    for worker in target.workers:
        target.measured(worker, 0.0, 0.0)
    ended = serve(target, 60, 1000)
    for worker in target.workers:
        target.measured(worker, float(ended[worker.address]), ended[worker.address] * 1000 / factor)
    assert target.token_scale == pytest.approx(1 / factor)
    for worker in target.workers:
        assert target.picture.capacity_blocks(worker.slot) == int(100_000 * factor) // 256
    target.resize_cache(target.workers[0], 50_000)
    assert target.picture.capacity_blocks(target.workers[0].slot) == int(50_000 * factor) // 256


def test_prompts_of_others_teach_nothing() -> None:
    target = pool()
    for worker in target.workers:
        target.measured(worker, 0.0, 0.0)
    ended = serve(target, 60, 1000)
    for worker in target.workers:
        count = ended[worker.address] * 1.3 + 5
        target.measured(worker, count, count * 5000)
    assert target.token_scale == 1.0


def test_a_restarted_engine_and_a_silent_one_teach_nothing() -> None:
    lengths = Tally()
    assert lengths.told(100.0, 1e6) is None
    for _ in range(10):
        lengths.ended(1000)
    assert lengths.told(5.0, 5e3) is None  # counters went back
    assert lengths.told(None, None) is None
    for _ in range(10):
        lengths.ended(1000)
    assert lengths.told(15.0, 2e4) is None  # the first after the silence
    for _ in range(10):
        lengths.ended(1000)
    assert lengths.told(25.0, 4e4) == Interval(10.0, 2e3, 1000.0)


def test_recent_requests_count_more() -> None:
    scale = Scale()
    for _ in range(50):
        scale.learn(Interval(20.0, 1000.0, 1000.0))
    assert scale.value == pytest.approx(1.0)
    for _ in range(50):
        scale.learn(Interval(20.0, 2000.0, 1000.0))
    assert scale.value == pytest.approx(2.0, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10**9), MAYBE, MAYBE), max_size=40))
def test_whatever_engines_say_the_scale_is_bounded(
    told: list[tuple[int, int, float | None, float | None]],
) -> None:
    scale, lengths = Scale(), Tally()
    for ended, estimate, requests, tokens in told:
        for _ in range(ended):
            lengths.ended(estimate)
        learned = lengths.told(requests, tokens)
        if learned is not None:
            scale.learn(learned)
        assert LOWEST <= scale.value <= HIGHEST
