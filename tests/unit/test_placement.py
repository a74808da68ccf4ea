"""Rendezvous placement: even, weighted, minimal movement."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.routing import placement

KEYS = [xxh3_64_intdigest(i.to_bytes(4, "big")) for i in range(4000)]


def order(key: int, names: list[str], weights: dict[str, float] | None = None) -> list[str]:
    return placement.order(key, names, str.encode, lambda n: (weights or {}).get(n, 1.0))


NAMES = [f"10.0.0.{i}:8000" for i in range(8)]


def test_golden_order_so_that_versions_agree() -> None:
    assert order(0x0123456789ABCDEF, NAMES) == [
        "10.0.0.0:8000",
        "10.0.0.3:8000",
        "10.0.0.5:8000",
        "10.0.0.7:8000",
        "10.0.0.4:8000",
        "10.0.0.2:8000",
        "10.0.0.6:8000",
        "10.0.0.1:8000",
    ]


def test_keys_spread_evenly() -> None:
    owners = Counter(order(key, NAMES)[0] for key in KEYS)
    assert len(owners) == 8
    assert all(abs(n - 500) < 5 * (500 * 7 / 8) ** 0.5 for n in owners.values())


def test_weights_share_the_keys() -> None:
    weights = {NAMES[0]: 3.0, NAMES[1]: 0.5}
    owners = Counter(order(key, NAMES, weights)[0] for key in KEYS)
    total = 3.0 + 0.5 + 6
    for name in NAMES:
        expected = 4000 * weights.get(name, 1.0) / total
        assert abs(owners[name] - expected) < 5 * expected**0.5


def test_a_leaving_worker_moves_only_its_own_keys_and_to_their_next() -> None:
    before = {key: order(key, NAMES) for key in KEYS}
    left = [name for name in NAMES if name != NAMES[2]]
    moved = 0
    for key in KEYS:
        after = order(key, left)
        assert after == [name for name in before[key] if name != NAMES[2]]
        moved += before[key][0] == NAMES[2]
    assert 0.5 / 8 < moved / len(KEYS) < 2 / 8


@given(st.integers(0, 2**64 - 1), st.sets(st.text(min_size=1), min_size=1, max_size=12))
def test_order_does_not_depend_on_the_list(key: int, names: set[str]) -> None:
    def by_name(listing: list[str]) -> list[str]:
        return placement.order(key, listing, lambda n: n.encode("utf-8", "surrogatepass"), lambda _: 1.0)

    assert by_name(sorted(names)) == by_name(sorted(names, reverse=True))


@given(st.integers(0, 2**64 - 1), st.floats(0.01, 1000))
def test_scores_are_finite_and_positive(key: int, weight: float) -> None:
    score = placement.score(key, b"w", weight)
    assert 0 < score < float("inf")
