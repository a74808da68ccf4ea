"""Saving and restoring the picture of the caches."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.routing.pool import Pool
from extproc.routing.snapshot import SnapshotError, restore, save


def pool(n: int = 3, capacity: int = 20, block_tokens: int = 16) -> Pool:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(n))
    return Pool(
        PoolConfig(
            "p", endpoints, PoolSettings(cache_tokens=capacity * block_tokens, block_tokens=block_tokens)
        )
    )


def chain_of(path: list[int]) -> list[int]:
    return [hash(tuple(path[: i + 1])) & (2**64 - 1) for i in range(len(path))]


TOUCHES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=50
)


@settings(max_examples=200)
@given(TOUCHES, TOUCHES)
def test_a_restored_picture_answers_and_goes_on_as_the_old_one(
    before: list[tuple[int, list[int]]], after: list[tuple[int, list[int]]]
) -> None:
    old, new = pool(), pool()
    for now, (worker, path) in enumerate(before):
        old.picture.touch(old.workers[worker].slot, chain_of(path), float(now))
    data = save({"p": old}, 100.0, 1_000.0)
    # Another process: its clock started elsewhere; 50 s went by.
    assert restore(data, {"p": new}, 7_000.0, 1_050.0) == sum(
        old.picture.used_blocks(w.slot) for w in old.workers
    )
    for one, two in zip(old.workers, new.workers, strict=True):
        if (oldest := old.picture.oldest_s(one.slot)) is not None:
            assert new.picture.oldest_s(two.slot) == pytest.approx(7_000.0 - 50.0 - (100.0 - oldest))
        assert two.room_tokens == new.picture.free_blocks(two.slot) * 16
    for now, (worker, path) in enumerate(after, 200):
        old.picture.touch(old.workers[worker].slot, chain_of(path), float(now))
        new.picture.touch(new.workers[worker].slot, chain_of(path), 7_000.0 + now)
        for _, asked in [*before, *after]:
            chain = chain_of(asked)
            assert [old.picture.lookup(chain).get(w.slot, 0) for w in old.workers] == [
                new.picture.lookup(chain).get(w.slot, 0) for w in new.workers
            ]


def test_workers_that_left_are_forgotten_and_new_ones_start_empty() -> None:
    old, new = pool(3), pool(2)
    for worker in old.workers:
        old.picture.touch(worker.slot, chain_of([1, 2, 3]), 1.0)
        old.picture.add_output(worker.slot, 64.0, 1.0)
    data = save({"p": old}, 2.0, 0.0)
    assert restore(data, {"p": new}, 2.0, 0.0) == 6
    assert new.picture.lookup(chain_of([1, 2, 3])) == {worker.slot: 3 for worker in new.workers}
    assert restore(data, {"other": pool()}, 2.0, 0.0) == 0
    assert restore(data, {"p": pool(block_tokens=32)}, 2.0, 0.0) == 0


def test_a_smaller_cache_now_keeps_the_most_recent() -> None:
    old, new = pool(1), pool(1, capacity=3)
    old.picture.touch(old.workers[0].slot, chain_of([1, 1]), 1.0)
    old.picture.touch(old.workers[0].slot, chain_of([2, 2]), 2.0)
    restore(save({"p": old}, 3.0, 0.0), {"p": new}, 3.0, 0.0)
    slot = new.workers[0].slot
    assert new.picture.lookup(chain_of([2, 2])) == {slot: 2}
    assert new.picture.lookup(chain_of([1, 1])) == {slot: 1}


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_and_change_nothing(data: bytes) -> None:
    target = pool()
    with pytest.raises(SnapshotError):
        restore(data, {"p": target}, 0.0, 0.0)
    assert target.picture.nodes() == 0


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_file_is_refused_or_harmless(place: int, byte: int) -> None:
    old, target = pool(), pool()
    for i in range(6):
        old.picture.touch(old.workers[i % 3].slot, chain_of([i % 2, i, i]), float(i))
    data = bytearray(save({"p": old}, 10.0, 0.0))
    data[place % len(data)] = byte
    try:
        restore(bytes(data), {"p": target}, 10.0, 0.0)
    except SnapshotError:
        assert target.picture.nodes() == 0


def test_another_version_is_refused_by_name() -> None:
    data = msgspec.msgpack.decode(save({"p": pool()}, 0.0, 0.0))
    data["version"] = 99
    with pytest.raises(SnapshotError, match="version 99"):
        restore(msgspec.msgpack.encode(data), {"p": pool()}, 0.0, 0.0)
