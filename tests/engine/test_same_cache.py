"""The emulated engine and the router's picture against a real vLLM's cache, request by request."""

from __future__ import annotations

import pytest
import real_vllm
import replay

from extproc.fleet.config import PoolSettings
from extproc.sim.process import free_ports

REQUESTS = 300

#: Blocks of the KV cache, and the seed: from one that holds two prompts to one that holds a few dozen.
CACHES = ((40, 1), (100, 2), (300, 3))


@pytest.fixture(scope="module", params=CACHES, ids=lambda cache: f"{cache[0]}-blocks")
def recording(request, lab, tmp_path_factory):
    num_blocks, seed = request.param
    folder = tmp_path_factory.mktemp("vllm")
    with real_vllm.serve(lab, free_ports(1), num_blocks, folder) as (server,):
        return replay.record(server, seed, REQUESTS)


def test_the_emulated_engine_caches_what_vllm_caches(recording, show):
    emulated = replay.Emulated(recording.num_blocks)
    wrong = [
        (index, turn.cached_tokens, cached)
        for index, turn in enumerate(recording.turns)
        if (cached := emulated.serve(turn)) != turn.cached_tokens
    ]
    rate = recording.cached_tokens / recording.prompt_tokens
    show(
        f"{recording.num_blocks} blocks: {len(recording.turns)} requests, {recording.prompt_tokens} prompt "
        f"tokens, {rate:.1%} of them cached; the emulated engine differs in {len(wrong)} requests"
    )
    assert not wrong, "(request, vLLM's cached tokens, ours): " + str(wrong[:10])
    # The sequence has to be worth it: hits, misses, and a cache that had to forget.
    assert 0.2 < rate < 0.9
    assert recording.prompt_tokens * (1 - rate) > 3 * recording.cache_tokens
    assert emulated.engine.prefix_queries == recording.queries
    assert emulated.engine.prefix_hits == recording.hits


@pytest.mark.parametrize("block_tokens", [real_vllm.BLOCK_TOKENS, PoolSettings().block_tokens])
def test_the_routers_picture_is_close(recording, show, block_tokens):
    picture = replay.Pictured(recording.cache_tokens, block_tokens)
    thought = [picture.serve(turn) for turn in recording.turns]
    errors = [cached - turn.cached_tokens for cached, turn in zip(thought, recording.turns, strict=True)]
    rate = recording.cached_tokens / recording.prompt_tokens
    believed = sum(thought) / recording.prompt_tokens
    mean = sum(map(abs, errors)) / len(errors)
    exact = sum(error == 0 for error in errors) / len(errors)
    show(
        f"{recording.num_blocks} blocks, picture in blocks of {block_tokens}: hit rate {believed:.1%} "
        f"against {rate:.1%}, mean error {mean:.0f} tokens of {recording.prompt_tokens / len(errors):.0f}, "
        f"{exact:.0%} of the requests exact"
    )
    assert mean < block_tokens / 2
    if block_tokens == real_vllm.BLOCK_TOKENS:
        assert abs(believed - rate) < 0.01
