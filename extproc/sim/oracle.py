"""The yardstick: a router that sees every cache and every queue.

It sends a request to the worker with the least (true predicted TTFT + alpha x own prefill time). With
alpha = 0 it is selfish: near saturation it trades everybody's cache for its own queue and thrashes. With
alpha = 1 a cold copy has to be worth twice what it takes. No real router can know this much.

`View` is this knowledge; rivals whose rules ask for an engine's state read it there, exact and up to date,
which is more than they would get.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from extproc.sim.simulation import Flight, Worker
from extproc.sim.workload import BLOCK_TOKENS


class View:
    """What is true of one worker: its engine's cache, its queue, and what is on its way to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        # Sent and not prefilled yet: flight index → tokens it will prefill, and the blocks it will bring.
        self._sent: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._promised: Counter[int] = Counter()

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self.worker.coming) + len(self.worker.flights)

    def hit_tokens(self, flight: Flight) -> int:
        """Prompt tokens that will be cached when the request is admitted: there now, or queued before it."""
        request = flight.request
        cached, promised = self.worker.engine.pool.cached, self._promised
        blocks = 0
        for block_hash in request.chain[: (request.prompt_tokens - 1) // BLOCK_TOKENS]:
            if block_hash not in cached and block_hash not in promised:
                break
            blocks += 1
        return blocks * BLOCK_TOKENS

    def queued_tokens(self) -> int:
        """Prompt tokens to prefill before a new request gets its turn, the step in progress left out."""
        worker = self.worker
        queued = 0
        done = []
        for index, (miss, _) in self._sent.items():
            left = None if index in worker.coming else worker.engine.prefill_left(str(index))
            if left is None:
                queued += miss
            elif left:
                queued += left
            else:
                done.append(index)
        for index in done:
            for block_hash in self._sent.pop(index)[1]:
                if self._promised[block_hash] > 1:
                    self._promised[block_hash] -= 1
                else:
                    del self._promised[block_hash]
        return queued

    def sent(self, flight: Flight) -> None:
        """A request is on its way here."""
        hit = self.hit_tokens(flight)
        blocks = flight.request.prompt_chain[hit // BLOCK_TOKENS :]
        self._sent[flight.index] = (flight.request.prompt_tokens - hit, blocks)
        self._promised.update(blocks)

    def ttft_s(self, flight: Flight, miss_tokens: int, now: float) -> float:
        """Seconds to the first token, if the request came here now and nobody after it."""
        worker = self.worker
        config = worker.engine.config
        cost = config.cost
        step_s = cost.step_duration_s(0, worker.engine.running)
        step_tokens_s = cost.prefill_s + step_s / config.max_num_batched_tokens
        wait_s = self.queued_tokens() * step_tokens_s
        if worker.engine.stepping:
            # A batch of decode steps gives way after the one in progress.
            wait_s += min(worker.end_s - now, max(step_s, worker.engine.step_s))
        return (
            max(wait_s, cost.frontend_s(flight.request.prompt_tokens)) + miss_tokens * step_tokens_s + step_s
        )


class Oracle:
    """Routes by the truth. One replica only: the truth needs no gossip."""

    def __init__(self, alpha: float = 1.0, seed: int = 0) -> None:
        self._alpha = alpha
        self._random = Random(f"{seed} oracle")
        self.views: dict[int, View] = {}

    def route(self, flight: Flight, now: float) -> int:
        """The worker with the least cost; ties go to the least busy one, then to any."""
        tokens = flight.request.prompt_tokens
        best: tuple[float, int, float] | None = None
        chosen = None
        for view in self.views.values():
            miss = tokens - view.hit_tokens(flight)
            own_s = miss * view.worker.engine.config.cost.prefill_s
            cost = view.ttft_s(flight, miss, now) + self._alpha * own_s
            key = (cost, view.in_flight, self._random.random())
            if best is None or key < best:
                best, chosen = key, view
        assert chosen is not None
        chosen.sent(flight)
        return chosen.worker.index

    def ended(self, flight: Flight, now: float) -> None:
        """Nothing to learn."""

    def join(self, worker: Worker, now: float) -> None:
        """See one worker more."""
        self.views[worker.index] = View(worker)

    def leave(self, worker: Worker, now: float) -> None:
        """Send nothing there any more."""
        del self.views[worker.index]
