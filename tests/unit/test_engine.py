"""The engine core against vLLM's rules: a naive model of its cache, its calibration, its scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.emulator.engine import CostModel, Engine, EngineConfig, EngineRequest, Output

BLOCK = 16


def hashes(*texts: tuple[int, int]) -> tuple[int, ...]:
    """The chain of texts one after the other, each (identity, blocks)."""
    chain: list[int] = []
    parent = 0
    for identity, blocks in texts:
        for index in range(blocks):
            parent = hash((parent, identity, index))
            chain.append(parent)
    return tuple(chain)


def request(name: str, prompt: int, output: int, *texts: tuple[int, int]) -> EngineRequest:
    total = (prompt + output) // BLOCK
    known = sum(blocks for _, blocks in texts)
    chain = hashes(*texts, (hash(name), max(0, total - known)))
    return EngineRequest(name, prompt, output, chain[:total])


def drain(
    engine: Engine, now: float = 0.0, max_steps: int = 1
) -> tuple[dict[str, float], dict[str, int], float]:
    """Run until idle: first token times, cached tokens, the time."""
    first: dict[str, float] = {}
    cached: dict[str, int] = {}
    while (duration := engine.begin_step(now, max_steps)) is not None:
        now += duration
        for output in engine.finish_step(now):
            if output.first:
                first[output.request_id] = now
                cached[output.request_id] = output.cached_tokens
    return first, cached, now


def engine(blocks: int = 1000, **limits: int) -> Engine:
    return Engine(EngineConfig(block_size=BLOCK, num_gpu_blocks=blocks, **limits))


# --- calibration ----------------------------------------------------------------------------------


def test_calibration() -> None:
    cost = CostModel()
    cold = Engine()
    cold.add(request("cold", 30_000, 1, (1, 1875)), 0.0)
    first, _, _ = drain(cold)
    assert first["cold"] + cost.frontend_s(30_000) == pytest.approx(3.0, rel=0.02)

    warm = Engine()
    warm.add(request("before", 29_504, 1, (1, 1844)), 0.0)
    _, _, now = drain(warm)
    warm.add(request("warm", 30_000, 1, (1, 1844)), now)
    first, cached, _ = drain(warm, now)
    assert cached["warm"] == 29_504
    assert first["warm"] - now + cost.frontend_s(30_000) == pytest.approx(0.2, rel=0.02)

    assert cost.step_duration_s(0, 20) == pytest.approx(0.025)


def test_a_faster_gpu_has_the_same_frontend() -> None:
    cost, fast = CostModel(), CostModel().faster(2.0)
    assert fast.step_duration_s(1000, 10) == pytest.approx(cost.step_duration_s(1000, 10) / 2)
    assert fast.frontend_s(1000) == cost.frontend_s(1000)


# --- the cache, against a naive model -------------------------------------------------------------


@dataclass
class NaiveCache:
    """One request at a time. Free blocks in their order: (when cached, hash), or None if blank."""

    blocks: int
    free: list[tuple[int, int] | None] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.free = [None] * (self.blocks - 1)  # one is a placeholder

    def serve(self, asked: EngineRequest) -> int:
        """Cached prompt tokens, by vLLM's rules."""
        used: list[tuple[int, int] | None] = []
        for block_hash in asked.chain[: (asked.prompt_tokens - 1) // BLOCK]:
            copies = [block for block in self.free if block is not None and block[1] == block_hash]
            if not copies:
                break
            used.append(min(copies))  # the one cached first
        hits = len(used)
        for block in used:
            self.free.remove(block)
        computed = asked.prompt_tokens + asked.output_tokens - 1  # the last token's KV is never computed
        for index in range(hits, -(-computed // BLOCK)):
            del self.free[0]
            self.serial += 1
            used.append((self.serial, asked.chain[index]) if index < computed // BLOCK else None)
        tail_first = used[::-1]
        self.free += [block for block in tail_first if block is not None]
        self.free = [block for block in tail_first if block is None] + self.free
        return hits * BLOCK


@st.composite
def conversations(draw: st.DrawFn) -> list[EngineRequest]:
    """Requests that share, extend and repeat each other's prompts, on a cache that can't hold them all."""
    requests: list[EngineRequest] = []
    for number in range(draw(st.integers(1, 30))):
        if requests and draw(st.booleans()):
            old = draw(st.sampled_from(requests))
            keep = draw(st.integers(0, len(old.chain)))
            base, tokens = old.chain[:keep], keep * BLOCK
        else:
            base, tokens = (), 0
        prompt = tokens + draw(st.integers(0 if tokens else 1, 200))
        output = draw(st.integers(1, 60))
        total = (prompt + output) // BLOCK
        fresh = tuple(hash((base, number, i)) for i in range(total - len(base)))
        requests.append(EngineRequest(str(number), prompt, output, (base + fresh)[:total]))
    return requests


@settings(max_examples=150, deadline=None)
@given(conversations(), st.integers(45, 90))
def test_one_at_a_time_the_cache_is_vllms(requests: list[EngineRequest], blocks: int) -> None:
    real, naive = engine(blocks), NaiveCache(blocks)
    now = 0.0
    for asked in requests:
        if asked.prompt_tokens + asked.output_tokens > real.config.cache_tokens:
            continue
        real.add(asked, now)
        _, cached, now = drain(real, now)
        assert cached[asked.request_id] == naive.serve(asked)
    assert real.running == real.waiting == 0
    assert real.kv_usage == 0.0


def test_a_prompt_that_is_wholly_cached_computes_its_last_block() -> None:
    e = engine()
    e.add(request("a", 64, 1, (1, 4)), 0.0)
    drain(e)
    e.add(request("b", 64, 1, (1, 4)), 0.0)
    _, cached, _ = drain(e)
    assert cached["b"] == 48


def test_heads_outlive_tails() -> None:
    e = engine(blocks=11)  # ten to use
    e.add(request("a", 96, 1, (1, 6)), 0.0)
    drain(e)
    e.add(request("b", 100, 1, (2, 6)), 0.0)  # seven blocks: evicts the last three of a's six
    drain(e)
    e.add(request("c", 96, 1, (1, 6)), 0.0)
    _, cached, _ = drain(e)
    assert cached["c"] == 48


def test_generated_blocks_are_cached_but_for_the_last_token() -> None:
    e = engine()
    e.add(request("a", 16, 16, (1, 1), (2, 1)), 0.0)  # 32 tokens, of which 31 have their KV
    drain(e)
    e.add(request("b", 64, 1, (1, 1), (2, 1)), 0.0)
    _, cached, _ = drain(e)
    assert cached["b"] == 16
    e.add(request("c", 16, 17, (1, 1), (2, 1)), 0.0)
    drain(e)
    e.add(request("d", 64, 1, (1, 1), (2, 1)), 0.0)
    _, cached, _ = drain(e)
    assert cached["d"] == 32


def test_a_twin_in_the_same_step_hits_what_the_first_is_computing() -> None:
    e = engine()
    for name in "ab":
        e.add(request(name, 160, 4, (1, 10)), 0.0)
    _, cached, _ = drain(e)
    assert cached == {"a": 0, "b": 144}


def test_copies_of_a_block_survive_each_other() -> None:
    # Prompts of one block each are never hits for each other, so both compute and cache the same block.
    e = engine()
    for name in "ab":
        e.add(request(name, 16, 2, (1, 1)), 0.0)
    _, cached, now = drain(e)
    assert cached == {"a": 0, "b": 0}
    e.add(request("c", 32, 1, (1, 1)), now)
    _, cached, _ = drain(e, now)
    assert cached["c"] == 16


# --- the scheduler --------------------------------------------------------------------------------


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    e = engine(max_num_batched_tokens=100)
    e.add(request("a", 10, 50), 0.0)
    now = e.begin_step(0.0) or 0.0
    assert [o.request_id for o in e.finish_step(now)] == ["a"]
    e.add(request("b", 290, 5), now)
    got: list[list[Output]] = []
    for _ in range(3):
        now += e.begin_step(now) or 0.0
        got.append(e.finish_step(now))
    # 99 prompt tokens a step beside a's one: b's first token comes with the third.
    assert [[o.request_id for o in outputs] for outputs in got] == [["a"], ["a"], ["a", "b"]]
    assert got[2][1].first


def test_max_num_seqs_makes_others_wait_first_come_first_served() -> None:
    e = engine(max_num_seqs=2)
    for name in "abcd":
        e.add(request(name, 20, 10), 0.0)
    e.begin_step(0.0)
    assert (e.running, e.waiting) == (2, 2)
    e.finish_step(1.0)
    first, _, _ = drain(e, 1.0)
    assert sorted(first, key=lambda name: first[name]) == ["c", "d"]


def test_out_of_blocks_the_last_admitted_is_preempted_and_still_ends() -> None:
    e = engine(blocks=14)  # thirteen to use; each sequence grows to ten
    for name in "ab":
        e.add(request(name, 96, 64), 0.0)
    tokens = {"a": 0, "b": 0}
    firsts: list[str] = []
    now = 0.0
    while (duration := e.begin_step(now)) is not None:
        now += duration
        for output in e.finish_step(now):
            tokens[output.request_id] += output.new_tokens
            firsts += [output.request_id] if output.first else []
    assert e.preemptions > 0
    assert tokens == {"a": 64, "b": 64}
    assert sorted(firsts) == ["a", "b"]
    assert e.kv_usage == 0.0


def test_the_whole_prompt_must_fit_before_it_is_admitted() -> None:
    e = engine(blocks=12, max_num_batched_tokens=32)
    e.add(request("a", 100, 20), 0.0)
    e.begin_step(0.0)
    e.finish_step(0.1)
    e.add(request("b", 160, 2), 0.1)  # its first chunk would fit, the whole wouldn't
    e.begin_step(0.1)
    assert (e.running, e.waiting) == (1, 1)


def test_aborting_frees_blocks_in_every_state() -> None:
    e = engine(max_num_seqs=1)
    e.add(request("a", 100, 20), 0.0)
    e.add(request("b", 100, 20), 0.0)
    e.begin_step(0.0)
    e.abort("a", 0.0)
    e.abort("b", 0.0)
    e.abort("never heard of", 0.0)
    assert e.finish_step(0.1) == []
    assert (e.running, e.waiting, e.kv_usage) == (0, 0, 0.0)
    assert e.begin_step(0.1) is None


def test_a_full_queue_says_so() -> None:
    e = Engine(EngineConfig(max_queued=1))
    assert not e.full
    e.add(request("a", 10, 1), 0.0)
    assert e.full


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("x", 0, 5), "at least 1"),
        (request("x", 5, 0), "at least 1"),
        (request("x", 3000, 200), "more than max_model_len"),
        (EngineRequest("x", 64, 1, (1, 2)), "chain of 2 hashes"),
    ],
)
def test_what_can_never_be_served_is_refused(asked: EngineRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(num_gpu_blocks=200)).add(asked, 0.0)


def test_an_id_in_use_is_refused() -> None:
    e = engine()
    e.add(request("a", 10, 1), 0.0)
    with pytest.raises(ValueError, match="already"):
        e.add(request("a", 10, 1), 0.0)


def test_counters() -> None:
    e = engine()
    for name in "ab":
        e.add(request(name, 160, 4, (1, 10)), 0.0)
        drain(e)
    assert (e.prefix_queries, e.prefix_hits) == (320, 144)
    assert (e.prompt_tokens, e.generation_tokens, e.preemptions) == (320, 8, 0)


# --- many steps at once ---------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 300), st.integers(1, 80), st.integers(0, 3)),
    min_size=1,
    max_size=15,
)


def play(plan: list[tuple[float, int, int, int]], max_steps: int) -> dict[str, tuple[float, float, int]]:
    """Arrivals at their times; each request's first token, its end, its hits."""
    e = engine(blocks=60, max_num_batched_tokens=64)
    queue = sorted(plan)
    result: dict[str, tuple[float, float, int]] = {}
    started: dict[str, float] = {}
    now = end = 0.0
    number = 0
    while queue or e.stepping or e.waiting or e.running:
        if e.stepping and (not queue or end <= queue[0][0]):
            now = end
            for output in e.finish_step(now):
                if output.first:
                    started[output.request_id] = now
                if output.finished:
                    result[output.request_id] = (started[output.request_id], now, output.cached_tokens)
        elif queue and not e.stepping and not e.waiting and not e.running:
            now = queue[0][0]
        while (queue and queue[0][0] <= now) or (queue and e.stepping and queue[0][0] < end):
            time, prompt, output_tokens, text = queue.pop(0)
            e.add(request(str(number), prompt, output_tokens, (text, prompt // BLOCK)), time)
            number += 1
            if e.stepping:
                end = e.shorten(time)
        if not e.stepping:
            duration = e.begin_step(now, max_steps)
            if duration is not None:
                end = now + duration
    return result


@settings(max_examples=60, deadline=None)
@given(arrivals)
def test_many_steps_at_once_are_the_same_as_one_by_one(plan: list[tuple[float, int, int, int]]) -> None:
    one, many = play(plan, 1), play(plan, 1000)
    assert one.keys() == many.keys()
    for name, (first, end, cached) in one.items():
        assert many[name] == (pytest.approx(first, abs=1e-6), pytest.approx(end, abs=1e-6), cached)


def test_many_steps_are_taken_only_when_nothing_can_happen() -> None:
    e = engine()
    e.add(request("a", 20, 8), 0.0)
    assert e.begin_step(0.0, 1000) == pytest.approx(e.step_s)  # a prefill goes alone
    e.finish_step(1.0)
    assert e.begin_step(1.0, 1000) == pytest.approx(7 * e.step_s)
    e.add(request("b", 20, 8), 1.0 + 2.5 * e.step_s)
    assert e.shorten(1.0 + 2.5 * e.step_s) == pytest.approx(1.0 + 3 * e.step_s)
    assert [o.new_tokens for o in e.finish_step(1.0 + 3 * e.step_s)] == [3]
