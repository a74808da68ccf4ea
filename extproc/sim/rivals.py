"""Other routers' rules, from what they publish, to measure ours against.

Round robin, least request and random are policies of the product itself.
Idealised in their favour: no overhead, no polling delay unless the rule's own, exact engine state where a
rule asks for it, and their pictures of caches work on the simulator's blocks.

- ``modulo``: hash of the first 512 tokens modulo the number of workers. Folklore.
- ``ring``: hash of the first 256 tokens on a ring, load at most 1.25 x the mean. KubeAI; SGLang prefix_hash.
- ``radix``: the longest match if it is above 0.3 of the prompt, else the smallest tree; the least loaded if
  max - min > 64 and max > 1.5 min (loads over the fleet). SGLang cache_aware.
- ``radix-tight``: the same at 0.5, 32 and 1.1, SGLang's former defaults.
- ``lmetric-exact``: least (queued + own prefill tokens) x batch size. arXiv 2603.15202.
- ``weighted``: 3 x prefix + 2 x queue + 2 x KV use, each 0 ... 1, engine state up to 50 ms old. llm-d.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from extproc.sim.oracle import View
from extproc.sim.simulation import Flight, Worker
from extproc.sim.workload import SimRequest


class Rival:
    """What all have in common: the workers there are, and how many requests this router has on each."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(f"{seed} rival")
        self.workers: list[Worker] = []
        self.loads: dict[int, int] = {}  # worker index → requests in flight

    def choose(self, flight: Flight, now: float) -> int:
        """The index of the worker."""
        raise NotImplementedError

    def route(self, flight: Flight, now: float) -> int:
        """Choose and count."""
        index = self.choose(flight, now)
        self.loads[index] += 1
        return index

    def ended(self, flight: Flight, now: float) -> None:
        """Count."""
        self.loads[flight.worker] -= 1

    def join(self, worker: Worker, now: float) -> None:
        """One worker more."""
        self.workers.append(worker)
        self.loads[worker.index] = 0

    def leave(self, worker: Worker, now: float) -> None:
        """One worker less; its count goes on until its requests have ended."""
        self.workers.remove(worker)

    def least_loaded(self) -> int:
        """Fewest in flight, ties at random."""
        return min(self.workers, key=lambda w: (self.loads[w.index], self.random.random())).index


def _head_hash(request: SimRequest, blocks: int) -> int:
    """A hash of the first so many blocks, or of the whole prompt if it is shorter."""
    chain = request.prompt_chain[:blocks]
    return chain[-1] if chain else hash((request.prompt_tokens, request.output_tokens))


class Modulo(Rival):
    """A hash of a fixed prefix modulo the number of workers."""

    def choose(self, flight: Flight, now: float) -> int:
        """Whoever it hits, however busy."""
        return self.workers[_head_hash(flight.request, 2) % len(self.workers)].index


class Ring(Rival):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018)."""

    POINTS = 100
    BOUND = 1.25

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._ring: list[tuple[int, int]] = []

    def choose(self, flight: Flight, now: float) -> int:
        """From the prefix's place on, the first worker below the bound."""
        total = sum(self.loads[w.index] for w in self.workers)
        bound = self.BOUND * (total + 1) / len(self.workers)
        start = bisect(self._ring, (_head_hash(flight.request, 1), 0))
        for step in range(len(self._ring)):
            index = self._ring[(start + step) % len(self._ring)][1]
            if self.loads[index] + 1 <= bound:
                return index
        return self.least_loaded()

    def join(self, worker: Worker, now: float) -> None:
        """Its points come."""
        super().join(worker, now)
        points = Random(f"ring {worker.index}")
        for _ in range(self.POINTS):
            insort(self._ring, (points.getrandbits(64), worker.index))

    def leave(self, worker: Worker, now: float) -> None:
        """Its points go."""
        super().leave(worker, now)
        self._ring = [point for point in self._ring if point[1] != worker.index]


class Radix(Rival):
    """SGLang's cache_aware: an approximate tree per worker, and a gate on the fleet's imbalance."""

    def __init__(self, seed: int = 0, *, threshold: float = 0.3, gap: int = 64, ratio: float = 1.5) -> None:
        super().__init__(seed)
        self._threshold = threshold
        self._gap = gap
        self._ratio = ratio
        self._holders: dict[int, dict[int, None]] = {}  # hash → workers, the last to get it last
        self._sizes: dict[int, int] = {}

    def choose(self, flight: Flight, now: float) -> int:
        """By the gate, the match, or the smallest tree."""
        chain = flight.request.prompt_chain
        index = self._pick(chain)
        for block_hash in chain:
            holders = self._holders.setdefault(block_hash, {})
            if index in holders:
                del holders[index]
            else:
                self._sizes[index] += 1
            holders[index] = None
        return index

    def _pick(self, chain: Sequence[int]) -> int:
        loads = [self.loads[w.index] for w in self.workers]
        if max(loads) - min(loads) > self._gap and max(loads) > self._ratio * min(loads):
            return self.least_loaded()
        here = {w.index for w in self.workers}
        matched, owner = 0, -1
        for depth, block_hash in enumerate(chain, 1):
            holders = self._holders.get(block_hash)
            last = next((i for i in reversed(holders) if i in here), None) if holders else None
            if last is None:
                break
            matched, owner = depth, last
        if chain and matched / len(chain) > self._threshold:
            return owner
        return min(self.workers, key=lambda w: (self._sizes[w.index], self.random.random())).index

    def join(self, worker: Worker, now: float) -> None:
        """An empty tree."""
        super().join(worker, now)
        self._sizes[worker.index] = 0


class _Informed(Rival):
    """A rule that asks for an engine's state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.views: dict[int, View] = {}

    def join(self, worker: Worker, now: float) -> None:
        """See it."""
        super().join(worker, now)
        self.views[worker.index] = View(worker)

    def leave(self, worker: Worker, now: float) -> None:
        """Unsee it."""
        super().leave(worker, now)
        del self.views[worker.index]


class LMetricExact(_Informed):
    """LMetric with exact caches and queues."""

    def choose(self, flight: Flight, now: float) -> int:
        """Least product."""

        def product(view: View) -> tuple[float, float]:
            miss = flight.request.prompt_tokens - view.hit_tokens(flight)
            return (view.queued_tokens() + miss) * (view.in_flight + 1), self.random.random()

        best = min(self.views.values(), key=product)
        best.sent(flight)
        return best.worker.index


class Weighted(_Informed):
    """llm-d's scheduler: prefix, queue and KV-use scores, each 0 … 1, weighted and summed."""

    WEIGHTS = (3.0, 2.0, 2.0)
    REFRESH_S = 0.05
    BLOCKS = 31_250 // 4  # its index holds 31,250 blocks of 64 tokens a worker

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._index: dict[int, OrderedDict[int, None]] = {}
        self._state: dict[int, tuple[int, float]] = {}
        self._seen_s = -1.0

    def choose(self, flight: Flight, now: float) -> int:
        """The highest score."""
        if now - self._seen_s >= self.REFRESH_S:
            self._seen_s = now
            self._state = {
                i: (v.worker.engine.waiting, v.worker.engine.kv_usage) for i, v in self.views.items()
            }
        chain = flight.request.prompt_chain
        queues = [waiting for waiting, _ in self._state.values()]
        low, high = min(queues), max(queues)
        best = (-1.0, 0.0, -1)
        for index in self.views:
            waiting, usage = self._state.get(index, (0, 0.0))
            queue = (high - waiting) / (high - low) if high > low else 1.0
            prefix = self._match(index, chain) / len(chain) if chain else 0.0
            score = self.WEIGHTS[0] * prefix + self.WEIGHTS[1] * queue + self.WEIGHTS[2] * (1.0 - usage)
            best = max(best, (score, self.random.random(), index))
        index = best[2]
        blocks = self._index[index]
        for block_hash in chain:
            blocks[block_hash] = None
            blocks.move_to_end(block_hash)
        while len(blocks) > self.BLOCKS:
            blocks.popitem(last=False)
        return index

    def _match(self, index: int, chain: Sequence[int]) -> int:
        blocks = self._index[index]
        for depth, block_hash in enumerate(chain):
            if block_hash not in blocks:
                return depth
        return len(chain)

    def join(self, worker: Worker, now: float) -> None:
        """An empty index."""
        super().join(worker, now)
        self._index[worker.index] = OrderedDict()
