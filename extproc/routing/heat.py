"""Hot prefixes: when a second copy of a prompt, in another worker's cache, is worth its price.

A cached prefix draws all its traffic to one worker. Few streams: fine. Many: their decode steps slow each
other down, while other workers idle. A copy costs a cold prefill once and helps every later request, but
nobody knows how many will come. That is the ski-rental problem, and its answer is: keep renting until
the rent paid adds up to the price, then buy. It never costs more than twice the best choice in hindsight.

Rent is what a request loses by going to the prefix's worker instead of the least loaded one, as far as the
prefix's own traffic is the reason (`extproc.routing.policy.predicted` has the formula). It is summed for
each key and halves every `HALF_LIFE_S`, so that slow traffic never buys. Copies shrink back by themselves:
a prefix that cools down ties on all its workers, rendezvous picks the same one each time, and the
other copies age out of the caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

#: Rent counts half after this long.
HALF_LIFE_S = 60.0

#: Keys remembered at most; the least recently charged are forgotten first.
MAX_KEYS = 20_000


class _Key:
    __slots__ = ("at_s", "rent_s", "running")

    def __init__(self) -> None:
        self.running: dict[str, int] = {}  # worker -> requests in flight
        self.rent_s = 0.0
        self.at_s = 0.0


class Heat:
    """Rent and requests in flight of each prefix key."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, _Key] = OrderedDict()

    def running(self, key: int) -> Mapping[str, int]:
        """Requests in flight with this key, by the worker's address."""
        entry = self._keys.get(key)
        return entry.running if entry else {}

    def rent_s(self, key: int, now: float) -> float:
        """Rent paid so far, as it counts now."""
        entry = self._keys.get(key)
        if entry is None or not entry.rent_s:
            return 0.0
        return entry.rent_s * float(0.5 ** ((now - entry.at_s) / HALF_LIFE_S))

    def set_rent(self, key: int, rent_s: float, now: float) -> None:
        """A decision paid rent, or bought a copy and so starts from zero."""
        entry = self._keys.get(key)
        if entry is not None:
            entry.rent_s, entry.at_s = rent_s, now

    def began(self, key: int, worker: str) -> None:
        """A request with this key runs on that worker."""
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _Key()
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        else:
            self._keys.move_to_end(key)
        entry.running[worker] = entry.running.get(worker, 0) + 1

    def ended(self, key: int, worker: str) -> None:
        """It is over, or runs elsewhere."""
        entry = self._keys.get(key)
        if entry is None:
            return
        left = entry.running.get(worker, 0) - 1
        if left > 0:
            entry.running[worker] = left
        else:
            entry.running.pop(worker, None)
            if not entry.running and not entry.rent_s:
                del self._keys[key]
