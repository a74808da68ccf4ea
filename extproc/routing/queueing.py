"""When a request will have its first token: the account that admission goes by.

Policies compare workers, so what slows all of them down alike doesn't matter to `extproc.routing.load`. A
refusal compares with the clock, and under steady overload every small error of the speed adds up, queue
after queue. So this account is finer: an engine decodes in the same steps in which it prefills, and each
decoding request makes the steps longer. A prompt takes

    uncached tokens * seconds a token * (1 + SLOWDOWN * requests decoding there)

behind everything that was sent before it. Decoding are the requests in flight that don't wait for prefill.
`SLOWDOWN` is the time of one sequence's decode step over that of a prefill step of 2,048 tokens: 0.3 to 0.5 %
on current GPUs. What is left of a request that ends early is taken off again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from extproc.routing.load import Worker

#: See above.
SLOWDOWN = 0.004

#: Before the engine sees a request: HTTP, the step in progress; and tokenizing, per prompt token.
OVERHEAD_S = 0.1
TOKENIZE_S = 5e-6


@dataclass(slots=True)
class Entry:
    """A request's place: its share of the queue in seconds, and when its prefill should be done."""

    queue: _Queue
    prefill_s: float
    prefilled_s: float


class _Queue:
    __slots__ = ("free_at_s", "waiting")

    def __init__(self) -> None:
        self.free_at_s = 0.0
        self.waiting: deque[float] = deque()  # when each request that waits will be prefilled


class Queues:
    """The prefill queues of a pool's workers. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    def wait_s(self, worker: Worker, now: float) -> float:
        """Prefill that stands before a new request at ``worker``."""
        queue = self._queues.get(worker.address)
        own_s = 0.0 if queue is None else max(0.0, queue.free_at_s - now)
        return max(own_s, worker.backlog_s(now))  # the worker's account knows other routers' requests

    def ttft_s(self, worker: Worker, prompt_tokens: int, miss_tokens: int, now: float) -> float:
        """Expected time to the first token of a new request at ``worker``."""
        overhead_s = OVERHEAD_S + TOKENIZE_S * prompt_tokens
        return self.wait_s(worker, now) + self._prefill_s(worker, miss_tokens, now) + overhead_s

    def enter(self, worker: Worker, miss_tokens: int, now: float) -> Entry:
        """A request is sent to ``worker``. Call it before the worker counts it in flight."""
        prefill_s = self._prefill_s(worker, miss_tokens, now)
        queue = self._queues.get(worker.address)
        if queue is None:
            self._forget_idle(now)
            queue = self._queues[worker.address] = _Queue()
        queue.free_at_s = max(queue.free_at_s, now) + prefill_s
        queue.waiting.append(queue.free_at_s)
        return Entry(queue, prefill_s, queue.free_at_s)

    def leave(self, entry: Entry, now: float) -> None:
        """A request is over: nothing of it waits any more."""
        left_s = min(entry.prefilled_s - now, entry.prefill_s)
        if left_s > 0.0:
            entry.queue.free_at_s -= left_s

    def _prefill_s(self, worker: Worker, miss_tokens: int, now: float) -> float:
        decoding = worker.in_flight
        queue = self._queues.get(worker.address)
        if queue is not None:
            waiting = queue.waiting
            while waiting and waiting[0] <= now:
                waiting.popleft()
            decoding = max(0, decoding - len(waiting))
        # The configured speed: the learned one has the slowdown by decoding in it already.
        return miss_tokens * worker.speed.prior_s_per_token * (1.0 + SLOWDOWN * decoding)

    def _forget_idle(self, now: float) -> None:
        """Addresses come and go; an empty queue need not be known."""
        for address in [a for a, queue in self._queues.items() if queue.free_at_s <= now]:
            del self._queues[address]
