"""The product in the simulator: `extproc.routing.pool.Pool`, the server's own code, as a simulated router.

It is told what the server would be told: the prompt's blocks, how large the workers' caches are, when a
request's stream ends. `Distortion` makes some of that wrong, to see what an error costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from xxhash import xxh3_64_intdigest

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.router import DEFAULT_MAX_OUTPUT_TOKENS, TPOT_S
from extproc.routing import snapshot
from extproc.routing.decision import Ticket
from extproc.routing.pool import Pool
from extproc.routing.records import Record
from extproc.sim.simulation import Flight, Worker
from extproc.sim.workload import BLOCK_TOKENS, SimRequest

_PORT = 8000


@dataclass(frozen=True, slots=True)
class Distortion:
    """Factors on what the router believes; 1 is the truth.

    ``tokens``: on its estimate of a prompt's length (and so on where it thinks a block ends).
    ``cache``: on the workers' cache size. ``rate``: on the prefill rate that it starts from.
    """

    tokens: float = 1.0
    cache: float = 1.0
    rate: float = 1.0

    def __str__(self) -> str:
        parts = [
            f"{n} x{v:g}" for n, v in (("tokens", self.tokens), ("cache", self.cache), ("rate", self.rate))
        ]
        return ", ".join(
            part for part, v in zip(parts, (self.tokens, self.cache, self.rate), strict=True) if v != 1
        )


TRUTH = Distortion()


def address(index: int) -> str:
    """The address that worker ``index`` goes by."""
    return f"10.0.{index >> 8}.{index & 255}:{_PORT}"


class PoolRouter:
    """One replica of the router, with one pool."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        replica: int = 0,
        distortion: Distortion = TRUTH,
    ) -> None:
        self._distortion = distortion
        self._settings = replace(
            settings, prefill_tokens_per_s=settings.prefill_tokens_per_s * distortion.rate
        )
        self._endpoints: dict[int, EndpointConfig] = {}
        self._tickets: dict[int, tuple[Ticket, float]] = {}  # flight index → ticket, predicted TTFT in s
        self._index: dict[str, int] = {}
        self._readings: list[tuple[float, int]] = []  # heap: when whose metrics are read next
        self._engines: dict[int, Worker] = {}
        self._records: list[Record] = []
        self._replica = replica
        self.pool = self._new_pool()

    def _new_pool(self) -> Pool:
        return Pool(self._config(), origin=self._replica, publish=self._records.append)

    def route(self, flight: Flight, now: float) -> int:
        """As `extproc.router.Router.route` does."""
        self._read_engines(now)
        chain = router_chain(flight.request, self._settings, self._distortion.tokens)
        decision = self.pool.decide(chain, now)
        assert decision is not None
        ticket = self.pool.begin(decision, chain, now)
        self._tickets[flight.index] = (ticket, decision.predicted_ttft_s)
        return self._index[decision.worker.address]

    def ended(self, flight: Flight, now: float) -> None:
        """As `extproc.router.Router.ended` does, for a client that sets no ``max_tokens``."""
        known = self._tickets.pop(flight.index, None)
        if known is None:
            return  # decided before a restart
        ticket, ttft_s = known
        decoding_s = max(0.0, now - ticket.decided_s - ttft_s)
        self.pool.end(ticket, now, min(decoding_s / TPOT_S, float(DEFAULT_MAX_OUTPUT_TOKENS)))

    def join(self, worker: Worker, now: float) -> None:
        """The YAML names one worker more."""
        name = address(worker.index)
        tokens = round(worker.engine.config.cache_tokens * self._distortion.cache)
        self._index[name] = worker.index
        self._endpoints[worker.index] = EndpointConfig(
            host=name.removesuffix(f":{_PORT}"),
            port=_PORT,
            cluster="workers",
            max_inflight=self._settings.max_inflight,
            cache_tokens=tokens,
        )
        self.pool.update(self._config())
        self._engines[worker.index] = worker
        interval_s = self._settings.scrape_interval_s
        if interval_s:  # not all at once
            heappush(self._readings, (now + interval_s * (worker.index % 8 + 1) / 8, worker.index))

    def leave(self, worker: Worker, now: float) -> None:
        """The YAML names one worker less."""
        del self._endpoints[worker.index], self._engines[worker.index]
        self.pool.update(self._config())

    def _read_engines(self, now: float) -> None:
        """As `extproc.engine.scraper` does."""
        while self._readings and self._readings[0][0] <= now:
            time, index = heappop(self._readings)
            engine = self._engines.get(index)
            if engine is None:
                continue
            worker = next(w for w in self.pool.workers if self._index[w.address] == index)
            self.pool.timed(worker, engine.prefills, engine.waited_s)
            self.pool.measured(worker, engine.prefills, engine.prompt_tokens)
            heappush(self._readings, (time + self._settings.scrape_interval_s, index))

    def records(self) -> list[Record]:
        """What the pool published since the last call."""
        taken = self._records[:]
        self._records.clear()
        return taken

    def apply(self, record: Record, now: float) -> None:
        """Another replica's record."""
        self.pool.apply(record, now)

    def restart(self, now: float, *, keep: bool) -> None:
        """As a new process: nothing in flight, the picture empty or as it was (``extproc serve --state``)."""
        state = snapshot.save({self.pool.name: self.pool}, now, now) if keep else None
        self._tickets.clear()
        self.pool = self._new_pool()
        if state is not None:
            snapshot.restore(state, {self.pool.name: self.pool}, now, now)

    def _config(self) -> PoolConfig:
        return PoolConfig("workers", tuple(self._endpoints.values()), self._settings)


def pool_routers(settings: PoolSettings, distortion: Distortion = TRUTH) -> Callable[[int], PoolRouter]:
    """A maker of replicas for `extproc.sim.simulation.Simulation`."""
    return lambda replica: PoolRouter(settings, replica=replica, distortion=distortion)


def router_chain(request: SimRequest, settings: PoolSettings, token_factor: float = 1.0) -> PrefixChain:
    """The chain that the router makes of a prompt, its blocks ``1 / token_factor`` of their true length."""
    hashes = request.prompt_chain
    tokens = request.prompt_tokens
    block = settings.block_tokens
    scale = block / BLOCK_TOKENS / token_factor  # true blocks to one of the router's
    if scale != 1.0:
        tokens = round(tokens * token_factor)
        hashes = _resample(hashes, tokens // block, scale)
    return PrefixChain(hashes, block, tokens, _key(request, hashes, settings))


def _resample(hashes: tuple[int, ...], blocks: int, scale: float) -> tuple[int, ...]:
    """Blocks that end elsewhere: the i-th is known by the true block that its end lies in."""
    if not hashes:
        return ()
    last = len(hashes) - 1
    made = []
    for index in range(blocks):
        inside = min(last, int((index + 1) * scale - 1e-9))
        made.append(hashes[inside] ^ (index + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    return tuple(made)


def _key(request: SimRequest, hashes: tuple[int, ...], settings: PoolSettings) -> int:
    """As `extproc.prefix`: the head, cut at ``prefix_tokens``; without one the prompt's beginning."""
    if not hashes:
        return xxh3_64_intdigest(f"{request.group} {request.prompt_tokens}".encode())
    most = max(1, settings.prefix_tokens // settings.block_tokens)
    head = request.head_tokens // settings.block_tokens
    blocks = head if head else 1 << (len(hashes).bit_length() - 1)
    return hashes[min(blocks, most, len(hashes)) - 1]
