"""The cache picture against a naive model: a list of blocks for each worker, least recently used first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.cache import CachePicture

BLOCK = 16


class Naive:
    """Per worker, an ordered dict of single blocks; no tree, no runs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[int, None] = {}

    def touch(self, chain: list[int]) -> None:
        for block in reversed(chain):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.capacity:
            del self.blocks[next(iter(self.blocks))]

    def held(self, chain: list[int]) -> int:
        depth = 0
        for block in chain:
            if block not in self.blocks:
                break
            depth += 1
        return depth


def chain_of(path: list[int]) -> list[int]:
    """A chain whose hashes are equal exactly where the paths are equal up to there."""
    return [hash(tuple(path[: i + 1])) & (2**64 - 1) for i in range(len(path))]


#: Few symbols, so that chains share prefixes and split runs all the time.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 3), PATHS), max_size=60), st.lists(PATHS, max_size=10))
def test_without_eviction_it_is_the_naive_model(
    ops: list[tuple[int, list[int]]], asked: list[list[int]]
) -> None:
    picture = CachePicture(BLOCK)
    slots = [picture.add_worker(BLOCK * 100_000) for _ in range(4)]
    naive = [Naive(100_000) for _ in range(4)]
    for now, (worker, path) in enumerate(ops):
        picture.touch(slots[worker], chain_of(path), float(now))
        naive[worker].touch(chain_of(path))
    for path in [*asked, *(path for _, path in ops)]:
        found = picture.lookup(chain_of(path))
        assert [found.get(slot, 0) for slot in slots] == [n.held(chain_of(path)) for n in naive]
    assert [picture.used_blocks(s) for s in slots] == [len(n.blocks) for n in naive]


@settings(max_examples=400)
@given(st.lists(PATHS, max_size=60), st.integers(1, 25))
def test_one_worker_evicts_like_the_naive_model(paths: list[list[int]], capacity: int) -> None:
    """With one worker no split promotes anything that isn't touched anyway, so the match is exact."""
    picture = CachePicture(BLOCK)
    slot = picture.add_worker(BLOCK * capacity)
    naive = Naive(capacity)
    for now, path in enumerate(paths):
        chain = chain_of(path)
        picture.touch(slot, chain, float(now))
        naive.touch(chain)
        assert picture.used_blocks(slot) == len(naive.blocks) <= capacity
        for other in paths[: now + 1]:
            assert picture.lookup(chain_of(other)).get(slot, 0) == naive.held(chain_of(other))


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("touch"), st.integers(0, 2), PATHS),
            st.tuples(st.just("output"), st.integers(0, 2), st.integers(0, 100)),
            st.tuples(st.just("clear"), st.integers(0, 2), st.none()),
            st.tuples(st.just("replace"), st.integers(0, 2), st.none()),
            st.tuples(st.just("resize"), st.integers(0, 2), st.integers(1, 30)),
        ),
        max_size=60,
    )
)
def test_invariants_hold_whatever_happens(ops: list[tuple[str, int, object]]) -> None:
    picture = CachePicture(BLOCK)
    slots = [picture.add_worker(BLOCK * 20) for _ in range(3)]
    for now, (op, worker, argument) in enumerate(ops):
        slot = slots[worker]
        if op == "touch":
            chain = chain_of(argument)  # type: ignore[arg-type]
            picture.touch(slot, chain, float(now))
            held = picture.lookup(chain).get(slot, 0)
            assert held == min(len(chain), picture.capacity_blocks(slot))
        elif op == "output":
            picture.add_output(slot, float(argument), float(now))  # type: ignore[arg-type]
        elif op == "clear":
            picture.clear(slot)
            assert picture.used_blocks(slot) == 0
        elif op == "replace":
            picture.remove_worker(slot)
            slots[worker] = picture.add_worker(BLOCK * 20)
            assert picture.used_blocks(slots[worker]) == 0
        else:
            picture.resize(slot, BLOCK * int(argument))  # type: ignore[call-overload]
        check(picture)
    for slot in slots:
        picture.clear(slot)
    assert picture.nodes() == 0, "nothing is held, so nothing is remembered"


def check(picture: CachePicture) -> None:
    """Held blocks add up, prefixes are closed, every node is held by someone, order keeps heads last."""
    for slot, holdings in picture._holdings.items():
        used = 0
        place = {node: i for i, node in enumerate(holdings.lru)}
        for node in holdings.lru:
            full = bool(node.full >> slot & 1)
            held = node.length if full else (node.partial or {})[slot]
            assert 0 < held <= node.length
            used += held
            parent = node.parent
            if parent is not None and parent is not picture.root:
                assert parent.full >> slot & 1, "a child is held only below a whole parent"
                assert place[parent] > place[node], "a head outlives its tail"
        assert used == holdings.used_blocks <= holdings.capacity_blocks
    stack = [picture.root]
    while stack:
        node = stack.pop()
        for first, child in (node.children or {}).items():
            assert child.hashes[0] == first
            assert len(child.hashes) == child.length
            assert child.full or child.partial
            stack.append(child)


def test_a_removed_worker_takes_its_blocks_along_and_its_slot_is_reused_empty() -> None:
    picture = CachePicture(BLOCK)
    a, b = picture.add_worker(BLOCK * 10), picture.add_worker(BLOCK * 10)
    chain = chain_of([1, 2, 3])
    picture.touch(a, chain, 1.0)
    picture.touch(b, chain[:2], 2.0)
    picture.remove_worker(a)
    assert picture.lookup(chain) == {b: 2}
    c = picture.add_worker(BLOCK * 10)
    assert c == a
    assert picture.lookup(chain) == {b: 2}


def test_oldest_and_room() -> None:
    picture = CachePicture(BLOCK)
    slot = picture.add_worker(BLOCK * 4)
    assert picture.oldest_s(slot) is None
    picture.touch(slot, chain_of([1, 1]), 5.0)
    picture.touch(slot, chain_of([2]), 7.0)
    assert picture.oldest_s(slot) == 5.0
    assert picture.free_blocks(slot) == 1
    picture.add_output(slot, BLOCK * 2.5, 8.0)
    assert picture.free_blocks(slot) == 0
    assert picture.lookup(chain_of([1, 1])) == {slot: 1}, "the tail went, the head stayed"


@pytest.mark.parametrize("length", [1, 2, 3, 1000])
def test_a_long_run_is_one_node_however_many_hold_it(length: int) -> None:
    picture = CachePicture(BLOCK)
    chain = list(range(1, length + 1))
    for _ in range(128):
        picture.touch(picture.add_worker(BLOCK * 2000), chain, 1.0)
    assert picture.nodes() == 1
    assert picture.lookup(chain) == dict.fromkeys(range(128), length)
    assert picture.lookup([*chain, 7]) == dict.fromkeys(range(128), length)
