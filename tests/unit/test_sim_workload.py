"""Workloads: what they share, and that they ask for the same whatever the router does."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from extproc.fleet.config import PoolSettings
from extproc.prefix import chain
from extproc.prompt import Prompt, read_prompt
from extproc.sim.product import router_chain
from extproc.sim.scenarios import SCENARIOS, Knobs, mean_work_s, offered_load
from extproc.sim.simulation import Fleet
from extproc.sim.trace import TraceError, TraceWorkload, read_trace
from extproc.sim.workload import BLOCK_TOKENS, Burst, Chat, Draw, Rag, SimRequest, Swarm, Text, even, zipf


def shared(a: SimRequest, b: SimRequest) -> int:
    """Blocks that two prompts share."""
    count = 0
    for left, right in zip(a.prompt_chain, b.prompt_chain, strict=False):
        if left != right:
            break
        count += 1
    return count


def test_a_text_that_goes_on_keeps_its_full_blocks() -> None:
    random = Random(1)
    start = Text().then(1000, random)
    assert (start.tokens, len(start.hashes)) == (1000, 3)
    longer = start.then(100, random)
    assert (longer.tokens, len(longer.hashes), longer.hashes[:3]) == (1100, 4, start.hashes)
    assert start.then(100, random).hashes[3] != longer.hashes[3]


def test_draw_follows_its_weights() -> None:
    draw = Draw([3.0, 0.0, 1.0], Random(2))
    counts = [0, 0, 0]
    for _ in range(4000):
        counts[draw()] += 1
    assert counts[1] == 0
    assert 2.5 < counts[0] / counts[2] < 3.5
    assert even(3) == [1.0, 1.0, 1.0]
    assert zipf(3) == [1.0, 0.5, 1 / 3]


def test_a_swarm_shares_its_personas_and_their_head() -> None:
    swarm = Swarm(3, weights=even(4), shared_head_tokens=2_000)
    a, again, other = swarm.request(0), swarm.request(0), swarm.request(1)
    assert shared(a, again) == swarm.personas[0].tokens // BLOCK_TOKENS
    assert shared(a, other) == 2_000 // BLOCK_TOKENS
    assert a.head_tokens == swarm.personas[0].tokens
    assert 24_000 <= a.head_tokens <= 32_000
    assert a.output_tokens == 120
    assert len(a.chain) == (a.prompt_tokens + 120) // BLOCK_TOKENS


def test_a_conversation_contains_its_past_with_the_answers() -> None:
    chat = Chat(4, sessions=1)
    _, first = next(chat.arrivals())
    last = first
    for _ in range(40):
        following = chat.follow(last, 100.0)
        assert following is not None
        time, turn = following
        assert time > 100.0
        if turn.group == last.group:
            assert turn.prompt_chain[: len(last.chain)] == last.chain
        else:
            assert shared(turn, last) <= 2_000 // BLOCK_TOKENS
        last = turn


def test_documents_are_asked_about_again() -> None:
    asked = [request for _, request in islice(Rag(5, documents=3).arrivals(), 30)]
    assert {request.group for request in asked} == {"document 0", "document 1", "document 2"}
    same = [request for request in asked if request.group == "document 0"]
    assert shared(same[0], same[1]) > 10
    assert shared(same[0], next(r for r in asked if r.group == "document 1")) == 700 // BLOCK_TOKENS


def test_bursts_come_on_time() -> None:
    burst = Burst(6, swarm=Swarm(6, weights=even(5), rate=1.0), every_s=10.0, size=40)
    times = [time for time, _ in islice(burst.arrivals(), 200)]
    assert times == sorted(times)
    assert 40 <= sum(10.0 <= time <= 11.0 for time in times) <= 50
    assert sum(9.0 <= time < 10.0 for time in times) < 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_asks_the_same(name: str) -> None:
    scenario = SCENARIOS[name]

    def begin(seed: int) -> list[tuple[float, tuple[int, ...]]]:
        workload = scenario.make(seed, Knobs(), scenario.fleet)
        return [(time, request.chain) for time, request in islice(workload.arrivals(), 10)]

    assert begin(1) == begin(1)
    assert begin(1) != begin(2)


# --- traces ------------------------------------------------------------------------------------------


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_mooncake_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 1500, "output_length": 40, "hash_ids": [7, 8, 9]},
        {"timestamp": 3500, "input_length": 1300, "output_length": 0, "hash_ids": [7, 8, 10]},
    ]
    recorded = read_trace(write(tmp_path / "t.jsonl", lines))
    assert [r.time_s for r in recorded] == [0.0, 2.5]
    a, b = (r.request for r in recorded)
    assert (a.prompt_tokens, a.output_tokens, b.output_tokens) == (1500, 40, 1)
    assert len(a.prompt_chain) == 1500 // BLOCK_TOKENS
    assert shared(a, b) == 1024 // BLOCK_TOKENS
    assert (a.group, b.group) == ("prefix 8", "prefix 8")


def test_a_trace_is_played_at_the_load_that_was_asked_for(tmp_path: Path) -> None:
    lines = [
        {"timestamp": i * 1000, "input_length": 5000, "output_length": 100, "hash_ids": list(range(10))}
        for i in range(11)
    ]
    recorded = read_trace(write(tmp_path / "t.jsonl", lines))
    fleet = Fleet(workers=2)
    load = offered_load(recorded, fleet)
    assert load == pytest.approx(11 / 10 * mean_work_s(recorded, fleet) / 2)
    assert offered_load(recorded, Fleet(workers=2, speeds=(3.0, 1.0))) == pytest.approx(load / 2)
    times = [time for time, _ in islice(TraceWorkload(recorded, speedup=2.0).arrivals(), 13)]
    assert times[:11] == [i / 2 for i in range(11)]
    assert times[11] == 6.0  # it starts again a second after its end


def test_a_log_of_request_bodies_is_read_as_the_router_reads_it(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a helpful assistant. " * 200}
    bodies = [
        {"model": "m", "max_tokens": 33, "messages": [system, {"role": "user", "content": f"Question {i}"}]}
        for i in range(2)
    ]
    recorded = read_trace(
        write(
            tmp_path / "t.jsonl", [{"timestamp": 5, "body": bodies[0]}, {"timestamp": 6, "body": bodies[1]}]
        )
    )
    assert [r.time_s for r in recorded] == [0.0, 1.0]
    a, b = (r.request for r in recorded)
    prompt = read_prompt("/v1/chat/completions", "application/json", "", json.dumps(bodies[0]).encode())
    assert isinstance(prompt, Prompt)
    expected = chain(prompt, block_tokens=BLOCK_TOKENS, chars_per_token=4.0, prefix_tokens=4096)
    assert a.prompt_chain == expected.hashes
    assert a.prompt_tokens == expected.tokens
    assert (a.output_tokens, shared(a, b)) == (33, len(expected.hashes))

    bare = read_trace(write(tmp_path / "bare.jsonl", [bodies[0], {"model": "m", "prompt": "x" * 5000}]))
    assert [r.time_s for r in bare] == [None, None]
    closed = TraceWorkload(bare, streams=3)
    assert [request.prompt_tokens for _, request in closed.arrivals()] == [
        bare[0].request.prompt_tokens,
        bare[1].request.prompt_tokens,
        bare[0].request.prompt_tokens,
    ]
    _, first = next(TraceWorkload(bare, streams=1).arrivals())
    assert closed.follow(first, 9.0) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests in it"),
        ("{oops\n", "line 1: not JSON"),
        ("[1]\n", "line 1: a list"),
        ('{"hash_ids": [1], "input_length": "many", "output_length": 1}\n', "input_length is 'many'"),
        ('{"hash_ids": 5, "input_length": 5, "output_length": 1}\n', "hash_ids '5' is not a list"),
        ('{"hash_ids": [1], "input_length": 5, "output_length": 1, "timestamp": -1}\n', "timestamp is -1"),
        ('\n{"body": 5}\n', "line 2: body is a int"),
        ('{"model": "m"}\n', "line 1: no prompt in it"),
        (
            '{"hash_ids": [1], "input_length": 5, "output_length": 1, "timestamp": 0}\n'
            '{"hash_ids": [1], "input_length": 5, "output_length": 1}\n',
            "request 2: no timestamp",
        ),
    ],
)
def test_a_bad_trace_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


# --- what the router sees ----------------------------------------------------------------------------


def test_the_router_sees_the_prompt_and_not_the_output() -> None:
    request = Swarm(7, weights=even(1)).request()
    seen = router_chain(request, PoolSettings())
    assert seen.hashes == request.prompt_chain
    assert seen.tokens == request.prompt_tokens
    assert seen.key == request.chain[4096 // BLOCK_TOKENS - 1]


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_wrong_idea_of_tokens_moves_the_blocks_but_not_what_is_shared(factor: float) -> None:
    swarm = Swarm(8, weights=even(2), shared_head_tokens=5_000)
    a, b, other = (router_chain(swarm.request(i), PoolSettings(), factor) for i in (0, 0, 1))
    assert len(a.hashes) == a.tokens // BLOCK_TOKENS
    common = sum(x == y for x, y in zip(a.hashes, b.hashes, strict=False))
    assert abs(common - swarm.personas[0].tokens * factor / BLOCK_TOKENS) <= 2
    head = sum(x == y for x, y in zip(a.hashes, other.hashes, strict=False))
    assert abs(head - 5_000 * factor / BLOCK_TOKENS) <= 2
    assert len(set(a.hashes)) == len(a.hashes)
