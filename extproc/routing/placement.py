"""Weighted rendezvous (highest random weight) hashing.

Every worker gets a score from its name and the key; the order of the scores is the key's own order of
workers. It needs no ring and no state: two routers with the same list agree without talking, a worker
that joins or leaves moves only the keys that it wins or had won (about 1/N), and the rest of the order
is a list of fallbacks. Source: Thaler and Ravishankar, "Using name-based mappings to increase hit
rates" (1998); weights by Schindelhauer and Schomaker (2005): score = weight / -ln(u).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log
from typing import TypeVar

from xxhash import xxh3_64_intdigest

_SCALE = 2.0**-64
T = TypeVar("T")


def score(key: int, name: bytes, weight: float = 1.0) -> float:
    """How strongly ``key`` (64 bits) belongs to the worker ``name``; the largest score wins.

    ``weight`` (> 0) is the worker's share relative to the others.
    """
    uniform = (xxh3_64_intdigest(name, key) + 0.5) * _SCALE
    # uniform rounds to 1.0 for the topmost 2**11 hashes, whose logarithm would be zero.
    return weight / -log(min(uniform, 1.0 - 2**-53))


def order(
    key: int, workers: Iterable[T], name: Callable[[T], bytes], weight: Callable[[T], float]
) -> list[T]:
    """All workers, the key's owner first, then its fallbacks."""
    return sorted(workers, key=lambda w: score(key, name(w), weight(w)), reverse=True)
