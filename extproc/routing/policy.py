"""Policies: pure functions that rank workers for one request.

A policy reads a `Query` and the workers' accounts and returns a `Ranking`, best first. It does no I/O,
keeps no state and never writes to a worker. Limits of requests in flight are not its business: it is
only asked about workers that may take the request. To add one, write the function and enter it in
`POLICIES`; the YAML's ``policy`` names it.

``predicted`` (the default) has one cost with a unit, seconds until the first token, summed from

- the worker's prefill backlog (the fluid queue of `extproc.routing.load`),
- this prompt's uncached tokens at the *pool's mean* time a token. Not the worker's own: a rate that is
  20 % too good would pull cold prompts to one worker and thrash its cache,
- ``alpha`` times the same again: a cold copy delays everybody else on that worker, and the more so the
  busier the fleet is with prefilling,
- ``decode_ms`` for each request in flight, scaled by the worker's speed: decode batches get slower,
- ``eviction_weight`` times the recomputing that this prompt causes by evicting others, discounted by
  how long the victim has not been used.

On top, a prefix whose own traffic crowds its worker gets a copy on the least loaded one once that has paid
for itself (``spread_ms``, `extproc.routing.heat`).

``prefix-hash`` is affinity without a picture of the caches: the rendezvous order of a fixed prefix,
passing over workers with more than ``max_load_ratio`` times the mean load (consistent hashing with
bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).

``lmetric``: least (new prefill tokens x batch size) (arXiv 2603.15202).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import sqrt

from extproc.fleet.config import PoolSettings
from extproc.routing import placement
from extproc.routing.load import Worker

#: A victim that nobody has used for this long counts half.
EVICTION_AGE_S = 30.0

#: Bound on what a second of prefill counts for others, for fleets that can't keep up.
MAX_DELAYED = 8.0

#: What evicting a recently used block counts when nobody needs the room: a copy of a hot prefix is a choice.
COPY_EVICTION_WEIGHT = 50.0


@dataclass(frozen=True, slots=True)
class Query:
    """What a policy may know of a request.

    ``key``: 64-bit hash of the prefix, for rendezvous; without a prompt, a new one for each request.
    ``prompt_tokens``: estimated length; 0 when the prompt could not be read.
    ``cached``: slot -> prompt tokens that the worker is thought to hold; 0 for slots not in it.
    ``serial``: counts the pool's decisions, for policies that take turns.
    ``mean_in_flight``: requests in flight a worker, over the whole pool.
    ``running``: address -> requests in flight there with this key; ``rent_s``: see `extproc.routing.heat`.
    ``utilisation``: share of the workers' time that prefills take of late, 0 to 1 and more.
    """

    key: int
    prompt_tokens: int
    cached: Mapping[int, int]
    serial: int
    mean_in_flight: float
    running: Mapping[str, int] = field(default_factory=dict)
    rent_s: float = 0.0
    utilisation: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Workers, best first, and why the first is first (a bounded set of words, used as a label).

    ``costs_s``: the costs of those workers in seconds, where the policy has such a cost.
    ``rent_s``: the key's rent from now on; None leaves it as it is.
    """

    order: Sequence[Worker]
    reason: str
    costs_s: Sequence[float] = ()
    rent_s: float | None = None


Policy = Callable[[Query, Sequence[Worker], PoolSettings, float], Ranking]


def predicted(query: Query, workers: Sequence[Worker], settings: PoolSettings, now: float) -> Ranking:
    """Least predicted time to the first token, with what the choice costs others."""
    tokens, cached = query.prompt_tokens, query.cached
    own_s, others_s, decode_s, evict_s = _prices(query, workers, settings)
    costs: list[tuple[float, int, int]] = []
    longest = 0
    for index, worker in enumerate(workers):
        hit = cached.get(worker.slot, 0)
        if hit > longest:
            longest = hit
        miss = tokens - hit
        # `terms` tells these apart; the sums agree to the last bit.
        cost = miss * own_s + miss * others_s + worker.in_flight * worker.prefill_s_per_token * decode_s
        if worker.free_at_s > now:
            cost += worker.free_at_s - now
        if miss > worker.room_tokens:
            cost += evict_s * _evicted_tokens(worker, miss, now)
        costs.append((cost, worker.in_flight, index))
    best = nsmallest(settings.fallbacks + 1, costs)
    # Equal costs (a cold prompt on an idle fleet) go by rendezvous, so that restarts and replicas agree.
    tied = [entry for entry in costs if entry[:2] == best[0][:2]]
    if len(tied) > 1:
        ranked = _rendezvous(query.key, [workers[index] for _, _, index in tied])
        places = {worker.slot: place for place, worker in enumerate(ranked)}
        best = nsmallest(
            settings.fallbacks + 1, costs, key=lambda c: (c[0], c[1], places.get(workers[c[2]].slot, 0))
        )
    chosen = [workers[index] for _, _, index in best]
    hit = cached.get(chosen[0].slot, 0)
    reason = "cold" if not longest else "affinity" if hit == longest else "load"
    rent_s = None
    if len(workers) > 1 and query.running.get(chosen[0].address, 0) > 1 and settings.spread_ms:
        copy, rent_s = _copy(query, costs, best[0], workers, settings, now)
        if copy is not None:
            best = [copy, *[entry for entry in best if entry is not copy]][: settings.fallbacks + 1]
            chosen = [workers[index] for _, _, index in best]
            reason = "spread"
    return Ranking(chosen, reason, [cost for cost, _, _ in best], rent_s)


@dataclass(frozen=True, slots=True)
class Terms:
    """What ``predicted`` adds up for one worker, in seconds, and the numbers that go in.

    ``own_s``: this prompt's prefill; ``others_s``: what that costs the others (``alpha``); ``decode_s``:
    batches that get slower; ``backlog_s``: prefill that waits; ``eviction_s``: recomputing what is evicted.
    """

    cached_tokens: int
    uncached_tokens: int
    own_s: float
    others_s: float
    decode_s: float
    backlog_s: float
    eviction_s: float

    @property
    def cost_s(self) -> float:
        """The sum, in the order in which ``predicted`` adds."""
        return self.own_s + self.others_s + self.decode_s + self.backlog_s + self.eviction_s


def terms(
    query: Query, worker: Worker, workers: Sequence[Worker], settings: PoolSettings, now: float
) -> Terms:
    """The terms of ``worker``'s cost in a ranking of ``workers``, which it need not be one of."""
    own_s, others_s, decode_s, evict_s = _prices(query, workers, settings)
    hit = query.cached.get(worker.slot, 0)
    miss = query.prompt_tokens - hit
    return Terms(
        hit,
        miss,
        miss * own_s,
        miss * others_s,
        worker.in_flight * worker.prefill_s_per_token * decode_s,
        worker.backlog_s(now),
        evict_s * _evicted_tokens(worker, miss, now) if miss > worker.room_tokens else 0.0,
    )


def _prices(
    query: Query, workers: Sequence[Worker], settings: PoolSettings
) -> tuple[float, float, float, float]:
    """Seconds an uncached token for its request and for others; of a decode's; of an evicted token."""
    mean_rate = sum([w.prefill_s_per_token for w in workers]) / len(workers)
    return (
        mean_rate,
        mean_rate * settings.alpha * _delayed(query.utilisation),
        settings.decode_ms * 1e-3 / mean_rate,
        settings.eviction_weight * mean_rate,
    )


def _delayed(utilisation: float) -> float:
    """How many seconds a second of prefill costs others, at least 1.

    In a queue that is busy a share ``u`` of the time, a second of additional work delays those behind it by
    ``u / (1 - u)`` seconds in all: the busier the fleet, the dearer a cold copy.
    """
    if utilisation <= 0.5:
        return 1.0
    return min(utilisation / (1.0 - utilisation), MAX_DELAYED) if utilisation < 1.0 else MAX_DELAYED


def _evicted_tokens(worker: Worker, miss: int, now: float) -> float:
    """Tokens that ``miss`` new ones push out, discounted by how long the first of them wasn't used."""
    evicted = min(miss - worker.room_tokens, miss)
    if evicted <= 0.0 or worker.oldest_s is None:
        return 0.0
    return evicted / (1.0 + (now - worker.oldest_s) / EVICTION_AGE_S)


def _copy(
    query: Query,
    costs: Sequence[tuple[float, int, int]],
    best: tuple[float, int, int],
    workers: Sequence[Worker],
    settings: PoolSettings,
    now: float,
) -> tuple[tuple[float, int, int] | None, float]:
    """The worker to copy a hot prefix to, if its price is paid, and the rent from now on.

    Rent: ``spread_ms`` for each request in flight that going to the least loaded worker would have spared
    this one, of those that run the same prefix, less what chance does to equally loaded workers (two standard
    deviations). Price: by how much that worker costs more, and what the copy evicts.
    """
    _, busy, index = best
    own = query.running[workers[index].address]
    least = min(costs, key=lambda entry: (entry[1], entry[0]))
    spared = min(busy - least[1], own) - 2.0 * sqrt(query.mean_in_flight)
    if spared <= 0:
        return None, query.rent_s
    rent_s = query.rent_s + spared * settings.spread_ms * 1e-3
    worker = workers[least[2]]
    price_s = least[0] - best[0]
    miss = query.prompt_tokens - query.cached.get(worker.slot, 0)
    price_s += COPY_EVICTION_WEIGHT * worker.prefill_s_per_token * _evicted_tokens(worker, miss, now)
    if rent_s >= price_s:
        return least, 0.0
    return None, rent_s


def prefix_hash(query: Query, workers: Sequence[Worker], settings: PoolSettings, now: float) -> Ranking:
    """The prefix's own order of workers, less those above the bound on load."""
    ranked = _rendezvous(query.key, workers)
    bound = settings.max_load_ratio * query.mean_in_flight + settings.load_margin
    below = [w for w in ranked if w.in_flight < bound]
    if not below:
        return Ranking(ranked, "affinity")
    above = [w for w in ranked if w.in_flight >= bound]
    return Ranking(below + above, "affinity" if below[0] is ranked[0] else "load")


def lmetric(query: Query, workers: Sequence[Worker], settings: PoolSettings, now: float) -> Ranking:
    """Least product of new prefill tokens (queued ones included) and batch size."""

    def product(worker: Worker) -> float:
        queued = worker.backlog_s(now) / worker.prefill_s_per_token
        miss = query.prompt_tokens - query.cached.get(worker.slot, 0)
        return (queued + miss + 1) * (worker.in_flight + 1)

    ranked = sorted(_rendezvous(query.key, workers), key=product)
    longest = max(query.cached.values(), default=0)
    hit = query.cached.get(ranked[0].slot, 0)
    return Ranking(ranked, "cold" if not longest else "affinity" if hit == longest else "load")


def least_request(query: Query, workers: Sequence[Worker], settings: PoolSettings, now: float) -> Ranking:
    """Fewest requests in flight for its weight; ties are spread, never the first in the list."""
    spread = _rendezvous(query.serial, workers)
    return Ranking(sorted(spread, key=lambda w: (w.in_flight + 1) / w.weight), "least-request")


def round_robin(query: Query, workers: Sequence[Worker], settings: PoolSettings, now: float) -> Ranking:
    """Each in turn."""
    start = query.serial % len(workers)
    return Ranking([*workers[start:], *workers[:start]], "round-robin")


def random(query: Query, workers: Sequence[Worker], settings: PoolSettings, now: float) -> Ranking:
    """Any, by weight."""
    return Ranking(_rendezvous(query.serial, workers), "random")


def _rendezvous(key: int, workers: Sequence[Worker]) -> list[Worker]:
    return placement.order(key, workers, lambda w: w.name, lambda w: w.weight)


POLICIES: Mapping[str, Policy] = {
    "predicted": predicted,
    "prefix-hash": prefix_hash,
    "lmetric": lmetric,
    "least-request": least_request,
    "round-robin": round_robin,
    "random": random,
}
