"""Speeds from counters against the truth, with the emulator's engine in virtual time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest

from extproc.emulator.engine import Engine, EngineRequest
from extproc.engine.rates import MIN_PREFILLS, prefill_rate, prefill_rates
from extproc.engine.report import EngineReport

READING_S = 60.0

#: About what a request costs the engine: its prefill, and the decoding of 100 tokens on average.
PREFILL_TOKENS_PER_S = 9000
DECODE_S = 0.075


@dataclass(slots=True)
class _Watched:
    arrival_s: float
    request: EngineRequest
    scheduled_s: float = 0.0
    first_s: float = 0.0
    computed: int = 0


def _workload(miss: int, load: float, burst: int, end_s: float) -> list[_Watched]:
    """Cold prompts of about ``miss`` tokens, in bursts with exponential gaps between them."""
    rng = random.Random(1)
    gap_s = (miss / PREFILL_TOKENS_PER_S + DECODE_S) / load
    now, found = 0.0, []
    while (now := now + rng.expovariate(1 / (gap_s * burst))) < end_s:
        for _ in range(burst):
            prompt, output = rng.randint(miss // 2, miss * 3 // 2), rng.randint(1, 200)
            chain = [rng.getrandbits(60) for _ in range((prompt + output) // 16)]
            found.append(_Watched(now, EngineRequest(str(len(found)), prompt, output, chain)))
    return found


@dataclass(frozen=True, slots=True)
class _Reading:
    """``busy_s`` and ``tokens``: seconds of steps with prefill until now, and the prompt tokens in them."""

    report: EngineReport
    busy_s: float
    tokens: int


def _drive(arrivals: list[_Watched], end_s: float) -> list[_Reading]:
    """What a reading each minute shows."""
    engine, requests = Engine(), {each.request.request_id: each for each in arrivals}
    waiting, coming = set[str](), list(reversed(arrivals))
    queue_s = prefill_s = prefilled = prefills = 0.0
    busy_s, computed, now = 0.0, 0, 0.0
    readings: list[_Reading] = []
    while now < end_s:
        while coming and coming[-1].arrival_s <= now:
            each = coming.pop()
            engine.add(each.request, now)
            waiting.add(each.request.request_id)
        before = {name: engine.prefill_left(name) for name in waiting}
        duration_s = engine.begin_step(now)
        if duration_s is None:
            now = coming[-1].arrival_s if coming else end_s
        else:
            tokens = 0
            for name, left in before.items():
                after = engine.prefill_left(name)
                if after is None:
                    continue
                if left is None:
                    requests[name].scheduled_s = now
                    left = requests[name].request.prompt_tokens
                tokens += left - after
            if tokens:
                busy_s, computed = busy_s + duration_s, computed + tokens
            now += duration_s
            for output in engine.finish_step(now):
                each = requests[output.request_id]
                if output.first:
                    waiting.discard(output.request_id)
                    each.first_s = now
                if output.finished:
                    queue_s += each.scheduled_s - each.arrival_s
                    prefill_s += each.first_s - each.scheduled_s
                    prefills += 1
                    prefilled += each.request.prompt_tokens
        while now >= READING_S * (len(readings) + 1):
            report = EngineReport(
                engine="vllm",
                ranks=1,
                prompt_tokens=float(engine.prompt_tokens),
                prefix_hit_tokens=float(engine.prefix_hits),
                queue_s=queue_s,
                prefill_s=prefill_s,
                prefills=prefills,
                prefilled_tokens=prefilled,
            )
            readings.append(_Reading(report, busy_s, computed))
    return readings


def _against_truth(miss: int, load: float, burst: int = 1, minutes: int = 4) -> list[tuple[float, float]]:
    """For each minute: the lower bound, and the Poisson estimate, as shares of the true speed."""
    shares = []
    end_s = minutes * READING_S
    readings = _drive(_workload(miss, load, burst, end_s), end_s)
    for old, new in itertools.pairwise(readings):
        rates = prefill_rates(old.report, new.report, READING_S)
        if rates is not None:  # None in a minute with too few requests
            truth = (new.tokens - old.tokens) / (new.busy_s - old.busy_s)
            shares.append((rates.low / truth, rates.poisson / truth))
    return shares


def _explained_by_a_queue(miss: int, load: float, burst: int, minutes: int) -> float:
    """The speed at which a queue served one by one has the TTFTs that the engine told, over the true one."""
    end_s = minutes * READING_S
    arrivals = _workload(miss, load, burst, end_s)
    last = _drive(arrivals, end_s)[-1]
    told = last.report
    assert told.queue_s is not None
    assert told.prefill_s is not None
    assert told.prefills
    wanted_s = (told.queue_s + told.prefill_s) / told.prefills
    low, high = 100.0, 100_000.0  # tokens a second
    for _ in range(40):
        speed, free_s, total_s = math.sqrt(low * high), 0.0, 0.0
        for each in arrivals:
            free_s = max(free_s, each.arrival_s) + each.request.prompt_tokens / speed
            total_s += free_s - each.arrival_s
        low, high = (speed, high) if total_s / len(arrivals) > wanted_s else (low, speed)
    return low / (last.tokens / last.busy_s)


@pytest.mark.parametrize("miss", [400, 3000])
def test_close_to_the_truth_while_prefills_hardly_meet(miss: int) -> None:
    shares = _against_truth(miss, load=0.15)
    assert shares
    for low, poisson in shares:
        assert 0.88 < low < 1.02
        assert 0.95 < poisson < 1.08


@pytest.mark.parametrize(("miss", "burst"), [(400, 1), (400, 4), (3000, 1), (3000, 4), (16_000, 1)])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_never_too_high_at_any_load(miss: int, burst: int, load: float) -> None:
    shares = _against_truth(miss, load, burst)
    assert shares
    for low, _ in shares:
        assert 0.2 < low < 1.05


def test_bursts_that_share_steps_make_it_far_too_low() -> None:
    # Why no speed is learned from these counters alone: four prompts in one step each wait for all of it.
    shares = _against_truth(400, load=0.1, burst=4)
    assert shares
    assert all(low < 0.5 for low, _ in shares)


BEFORE = EngineReport(
    engine="vllm",
    ranks=1,
    prompt_tokens=0.0,
    prefix_hit_tokens=0.0,
    prefill_s=0.0,
    prefills=0.0,
    prefilled_tokens=0.0,
)
AFTER = replace(
    BEFORE,
    prompt_tokens=50_000.0,
    prefix_hit_tokens=20_000.0,
    prefill_s=5.0,
    prefills=20.0,
    prefilled_tokens=30_000.0,
)


def test_the_better_of_two_lower_bounds() -> None:
    assert prefill_rate(BEFORE, AFTER, 10.0) == 6000.0
    assert prefill_rate(BEFORE, replace(AFTER, prefill_s=40.0), 10.0) == 3000.0  # saturated: tokens / wall
    two = replace(AFTER, ranks=2)
    assert prefill_rate(BEFORE, replace(two, prefill_s=40.0), 10.0) == 1500.0  # by rank


@pytest.mark.parametrize(
    "change",
    [
        {"prefilled_tokens": None},
        {"prefill_s": None},
        {"prefills": None},
        {"prefills": MIN_PREFILLS - 1.0},
        {"prefilled_tokens": 0.0},
        {"prefill_s": 0.0},
        {"ranks": 3},
    ],
)
def test_no_speed_from_too_little(change: dict[str, float]) -> None:
    assert prefill_rate(BEFORE, replace(AFTER, **change), 10.0) is None  # type: ignore[arg-type]
    assert prefill_rate(BEFORE, AFTER, 0.0) is None


def test_no_speed_over_a_restart() -> None:
    again = replace(AFTER, prompt_tokens=1.0, prefills=100.0, prefilled_tokens=9e5, prefill_s=9.0)
    assert prefill_rate(AFTER, again, 10.0) is None


def main() -> None:
    """Print the table of docs/engine-signals.md."""
    for burst in (1, 4):
        for miss in (400, 3000, 16_000):
            for load in (0.1, 0.3, 0.6, 0.9):
                shares = _against_truth(miss, load, burst, minutes=11)
                if not shares:
                    continue
                low, poisson = (sum(column) / len(shares) for column in zip(*shares, strict=True))
                queue = _explained_by_a_queue(miss, load, burst, minutes=11)
                print(
                    f"| {burst} | {miss:,} | {load} | {low:.2f} | {poisson:.2f} | {queue:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
