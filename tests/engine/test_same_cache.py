"""The emulated engine and the router's picture against a real vLLM's cache, request by request.

Recordings of a real engine are replayed in every run of the tests. With a vLLM at hand (``make test-engine``)
new ones are made; ``RECORD=FOLDER`` keeps them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import real_vllm
import replay

from extproc.demo.process import free_ports
from extproc.fleet.config import PoolSettings

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))

REQUESTS = 300

#: Blocks of the KV cache, and the seed: from one that holds two prompts to one that holds a few dozen.
CACHES = ((40, 1), (100, 2), (300, 3))


@pytest.fixture(scope="module", params=CACHES, ids=lambda cache: f"{cache[0]}-blocks")
def fresh(request, lab, tmp_path_factory):
    num_blocks, seed = request.param
    folder = tmp_path_factory.mktemp("vllm")
    with real_vllm.serve(lab, free_ports(1), num_blocks, folder) as (server,):
        recording = replay.record(server, seed, REQUESTS)
    if keep := os.environ.get("RECORD"):
        recording.write(Path(keep) / f"vllm-{recording.vllm}-{num_blocks}-blocks.jsonl")
    return recording


@pytest.fixture(scope="module", params=RECORDINGS, ids=lambda path: path.stem)
def recorded(request):
    return replay.Recording.read(request.param)


def test_there_are_recordings():
    assert len(RECORDINGS) >= len(CACHES)


def test_the_emulated_engine_caches_what_vllm_caches(recorded):
    check_engine(recorded)


def test_the_emulated_engine_caches_what_this_vllm_caches(fresh, show):
    rate = fresh.cached_tokens / fresh.prompt_tokens
    show(
        f"vLLM {fresh.vllm}, {fresh.num_blocks} blocks: {len(fresh.turns)} requests, "
        f"{fresh.prompt_tokens} prompt tokens, {rate:.1%} of them cached"
    )
    check_engine(fresh)


@pytest.mark.parametrize("block_tokens", [real_vllm.BLOCK_TOKENS, PoolSettings().block_tokens])
def test_the_routers_picture_is_close(recorded, block_tokens):
    check_picture(recorded, block_tokens)


@pytest.mark.parametrize("block_tokens", [real_vllm.BLOCK_TOKENS, PoolSettings().block_tokens])
def test_the_routers_picture_of_this_vllm_is_close(fresh, show, block_tokens):
    show(check_picture(fresh, block_tokens))


def check_engine(recording: replay.Recording) -> None:
    emulated = replay.Emulated(recording.num_blocks)
    served = [emulated.serve(turn) for turn in recording.turns]
    wrong = [
        (index, turn.cached_tokens, cached)
        for index, (turn, cached) in enumerate(zip(recording.turns, served, strict=True))
        if cached != turn.cached_tokens
    ]
    assert not wrong, "(request, vLLM's cached tokens, ours): " + str(wrong[:10])
    assert emulated.engine.prefix_queries == recording.queries
    assert emulated.engine.prefix_hits == recording.hits
    # The sequence has to be worth it: hits, misses, and a cache that had to forget.
    rate = recording.cached_tokens / recording.prompt_tokens
    assert 0.2 < rate < 0.9
    assert recording.prompt_tokens * (1 - rate) > 3 * recording.cache_tokens


def check_picture(recording: replay.Recording, block_tokens: int) -> str:
    picture = replay.Pictured(recording.cache_tokens, block_tokens)
    thought = [picture.serve(turn) for turn in recording.turns]
    errors = [cached - turn.cached_tokens for cached, turn in zip(thought, recording.turns, strict=True)]
    rate = recording.cached_tokens / recording.prompt_tokens
    believed = sum(thought) / recording.prompt_tokens
    mean = sum(map(abs, errors)) / len(errors)
    exact = sum(error == 0 for error in errors) / len(errors)
    # Half a block is what rounding down to the router's blocks costs.
    assert mean < block_tokens / 2
    if block_tokens == real_vllm.BLOCK_TOKENS:
        assert abs(believed - rate) < 0.01
    return (
        f"{recording.num_blocks} blocks, picture in blocks of {block_tokens}: hit rate {believed:.1%} "
        f"against {rate:.1%}, mean error {mean:.0f} tokens of {recording.prompt_tokens / len(errors):.0f}, "
        f"{exact:.0%} of the requests exact"
    )
