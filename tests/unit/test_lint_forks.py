"""Forks in a cache picture that look like prompts breaking their own caching."""

from __future__ import annotations

from random import Random

import pytest

from extproc.routing.cache import CachePicture
from extproc.routing.forks import Fork, find_forks

BLOCK = 256


def grown(*prompts: list[int]) -> CachePicture:
    picture = CachePicture(BLOCK)
    slots = [picture.add_worker(10**9) for _ in range(3)]
    for number, prompt in enumerate(prompts):
        picture.touch(slots[number % 3], prompt, float(number))
    return picture


def chained(random: Random, length: int) -> list[int]:
    return [random.getrandbits(63) + 1 for _ in range(length)]


def test_a_template_with_something_new_early() -> None:
    random = Random(1)
    head = chained(random, 2)
    prompts = [head + chained(random, 30 + random.randint(0, 2)) for _ in range(20)]
    (fork,) = find_forks(grown(*prompts)).forks
    assert (fork.depth_tokens, fork.branches, fork.single, fork.alike) == (2 * BLOCK, 20, 20, 20)
    assert 30 * BLOCK <= fork.tail_tokens <= 32 * BLOCK
    assert 19 * 30 * BLOCK <= fork.lost_tokens <= 19 * 32 * BLOCK


def test_in_the_first_block_among_others() -> None:
    """Templates that part from the start are one fork at depth 0, whatever else is there."""
    random = Random(2)
    broken = [chained(random, 40) for _ in range(12)]
    heads = [chained(random, 20) for _ in range(5)]
    used = [head + chained(random, 1) for head in heads for _ in range(30)]
    (fork,) = find_forks(grown(*broken, *used)).forks
    assert fork == Fork(0, 17, 12, 12, 40 * BLOCK, 11 * 40 * BLOCK)


def conversations(random: Random) -> list[list[int]]:
    head, prompts = chained(random, 20), []
    for _ in range(20):
        prompt = head
        for _ in range(4):
            prompt = prompt + chained(random, 3)
            prompts.append(prompt)
    return prompts


def questions(random: Random) -> list[list[int]]:
    head = chained(random, 20)
    return [head + chained(random, 1) for _ in range(50)]


def documents(random: Random) -> list[list[int]]:
    """Each is asked about more than once."""
    head, found = chained(random, 2), [chained(random, 30) for _ in range(20)]
    return [head + document + chained(random, 2) for document in found for _ in range(3)]


def unlike(random: Random) -> list[list[int]]:
    return [chained(random, 2**n) for n in range(10)]


@pytest.mark.parametrize("traffic", [conversations, questions, documents, unlike])
def test_silent_on(traffic: object) -> None:
    assert find_forks(grown(*traffic(Random(3)))).forks == []  # type: ignore[operator]


def test_a_walk_has_an_end() -> None:
    random = Random(4)
    prompts = [chained(random, 4) + chained(random, 4) for _ in range(50)]
    prompts += [prompt[:4] + chained(random, 4) for prompt in prompts]
    whole = find_forks(grown(*prompts))
    assert (whole.nodes, whole.partial) == (150, False)
    part = find_forks(grown(*prompts), max_nodes=60)
    assert (part.nodes, part.partial) == (60, True)


def test_an_empty_picture() -> None:
    assert find_forks(CachePicture(BLOCK)).forks == []
