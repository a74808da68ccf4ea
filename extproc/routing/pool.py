"""A pool's state: its workers' accounts, the picture of their caches, the requests in flight.

`Pool.decide` ranks the workers for a request and opens its `Ticket`; the ticket follows the request to
its end. What tickets do to the accounts stands in one place each: `_charge`, `_refund`. Replicas tell
each other decisions and ends as `extproc.routing.records`; a foreign request has a ticket like our own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from xxhash import xxh3_64_intdigest

from extproc.fleet.config import EndpointConfig, PoolConfig
from extproc.prefix import PrefixChain
from extproc.routing.cache import CachePicture
from extproc.routing.decision import Decision, Situation, Ticket
from extproc.routing.health import Cause, Change, Probe, State, usable
from extproc.routing.heat import Heat
from extproc.routing.lengths import Scale
from extproc.routing.load import Meter, Worker
from extproc.routing.pace import FULL_KV, LOW_FACTOR, SLOW_FACTOR, WELL_FACTOR, common_slowness
from extproc.routing.patience import Patience
from extproc.routing.policy import POLICIES, Policy, Query, least_request
from extproc.routing.records import Decided, Ended, Moved, Record
from extproc.routing.speed import SHRINK

#: A cache of unknown size is pictured as this large; it bounds the router's memory.
UNKNOWN_CACHE_TOKENS = 4_000_000

#: The caches' sizes follow the token scale in steps of this share.
SCALE_STEP = 0.03

#: Time constant of the pool's prefill utilisation.
UTILISATION_S = 30.0

#: A foreign request whose end never came is taken as ended after this long.
FOREIGN_TTL_S = 900.0

#: Checks that are further apart than this say nothing of the time between them.
LONGEST_CHECK_S = 1.0

#: Policies that take no notice of the prompt, and so need none.
_BLIND = frozenset({"least-request", "round-robin", "random"})

#: Policies whose cost counts load: least loaded is what they choose anyway, and beyond all limits a choice
#: without regard to caches would thrash them just when there is no time for it.
_PRICED = frozenset({"predicted", "lmetric"})


class Pool:
    """The workers of one pool, their load and caches. Not thread-safe; it lives in one event loop."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        origin: int = 0,
        publish: Callable[[Record], None] | None = None,
        changed: Callable[[Pool, Worker, Change], None] = lambda pool, worker, change: None,
        suspect: Callable[[Pool, Worker], None] = lambda pool, worker: None,
    ) -> None:
        """``origin`` names this router among replicas; ``publish`` gets a record of all it does.

        ``changed`` is told of each change of a worker's health, ``suspect`` of workers to be probed now.
        """
        self.name = config.name
        self.settings = config.settings
        self.picture = CachePicture(config.settings.block_tokens)
        self.heat = Heat()
        self.token_scale = 1.0  # the engines' tokens to one of our estimates
        self._scale = Scale()
        self._prefilling = Meter(UTILISATION_S)
        self._patience = Patience()
        self._checked_s = float("-inf")
        self.origin = origin
        self._publish = publish
        self._changed = changed
        self._suspect = suspect
        self._unwell: set[Worker] = set()  # all but the healthy; mostly empty, which keeps decisions quick
        self._workers: dict[str, Worker] = {}
        self._list: list[Worker] = []
        self._limits_prefill = False  # whether any worker has a max_pending_prefill_tokens
        self._departed: dict[str, Worker] = {}  # gone from the YAML, with requests still in flight
        self._serial = 0
        self._tickets: set[Ticket] = set()
        self._foreign: OrderedDict[tuple[int, int], Ticket] = OrderedDict()
        self.update(config)

    # --- the fleet -------------------------------------------------------------------------------

    @property
    def workers(self) -> Sequence[Worker]:
        """Today's workers, in the YAML's order."""
        return self._list

    @property
    def tickets(self) -> int:
        """Own requests in flight."""
        return len(self._tickets)

    def update(self, config: PoolConfig) -> None:
        """Follow a new configuration: workers that stay keep their accounts and their cache picture."""
        if config.settings.block_tokens != self.picture.block_tokens:
            self._forget_caches(config.settings.block_tokens)
        self.settings = config.settings
        wanted = {endpoint.address: endpoint for endpoint in config.endpoints}
        for address in [a for a in self._workers if a not in wanted]:
            self._remove(self._workers.pop(address))
        for address, endpoint in wanted.items():
            worker = self._workers.get(address)
            if worker is None:
                self._workers[address] = self._add(endpoint)
            else:
                worker.configure(endpoint, self.settings)
                self.resize_cache(worker, self._cache_tokens(endpoint))
        self._list = [self._workers[address] for address in wanted]
        self._limits_prefill = any(w.max_pending_prefill_tokens is not None for w in self._list)

    def _cache_tokens(self, endpoint: EndpointConfig) -> int:
        return endpoint.cache_tokens or self.settings.cache_tokens or UNKNOWN_CACHE_TOKENS

    def _add(self, endpoint: EndpointConfig) -> Worker:
        slot = self.picture.add_worker(self._cache_tokens(endpoint))
        worker = self._departed.pop(endpoint.address, None)
        if worker is None:
            worker = Worker(endpoint, slot, self.settings)
            worker.health.patience = self._patience
            worker.learned(self._log_factor())
        else:  # back while some of its old requests still run: their count goes on
            worker.slot = slot
            worker.configure(endpoint, self.settings)
            if worker.health.state is not State.HEALTHY:
                self._unwell.add(worker)
        self.resize_cache(worker, self._cache_tokens(endpoint))
        return worker

    def _remove(self, worker: Worker) -> None:
        self.picture.remove_worker(worker.slot)
        worker.slot = -1
        self._unwell.discard(worker)
        if worker.in_flight:
            self._departed[worker.address] = worker

    def _forget_caches(self, block_tokens: int) -> None:
        """Chains of another block size can't be compared with the old ones."""
        self.picture = CachePicture(block_tokens)
        for worker in self._workers.values():
            worker.slot = self.picture.add_worker(UNKNOWN_CACHE_TOKENS)

    def resize_cache(self, worker: Worker, capacity_tokens: int) -> None:
        """The engine, or the YAML, told how many tokens the worker's KV cache holds."""
        worker.cache_tokens = capacity_tokens
        if worker.slot >= 0:
            self.picture.resize(worker.slot, int(capacity_tokens / self.token_scale))
            self.observe_cache(worker)

    def measured(self, worker: Worker, requests: float | None, prompt_tokens: float | None) -> None:
        """The engine told how long its requests' prompts were: see `Tally.told`.

        The picture counts estimated tokens, so the caches' sizes follow the scale between the two.
        """
        if worker.slot < 0 or (learned := worker.lengths.told(requests, prompt_tokens)) is None:
            return
        self._scale.learn(learned)
        if abs(self._scale.value / self.token_scale - 1.0) > SCALE_STEP:
            self.token_scale = self._scale.value
            for each in self._list:
                self.resize_cache(each, each.cache_tokens)

    def timed(self, worker: Worker, requests: float | None, waited_s: float | None) -> None:
        """The engine told how long its requests took to their first tokens: see `Speed.told`."""
        if self.settings.learn_speed and worker.slot >= 0 and worker.speed.told(requests, waited_s):
            worker.learned(worker.speed.log_factor + SHRINK * (self._log_factor() - worker.speed.log_factor))

    def decoded(
        self, worker: Worker, tokens: float | None, now: float, *, kv_usage: float | None = None
    ) -> None:
        """The engine told how many tokens it has generated: see `Pace.told`. ``kv_usage``: 0 to 1."""
        if kv_usage is not None and kv_usage > FULL_KV:
            tokens = None
        others = common_slowness((each.pace for each in self._list if each is not worker), now)
        judged = worker.pace.told(tokens, others, now) if worker.slot >= 0 else None
        if judged is None:
            return
        slower, less = judged
        if slower >= SLOW_FACTOR * others and less >= LOW_FACTOR:
            self._note(worker, worker.health.paced(slow=True, now=now))
        elif slower < WELL_FACTOR * others:
            self._note(worker, worker.health.paced(slow=False, now=now))

    def _log_factor(self) -> float:
        """The workers' mean."""
        return sum([worker.speed.log_factor for worker in self._list]) / max(1, len(self._list))

    def restarted(self, worker: Worker, now: float) -> None:
        """The engine started anew: its cache is empty, and old failures are not its own."""
        self._forget_cache(worker)
        self._note(worker, worker.health.restarted(now))

    def _forget_cache(self, worker: Worker) -> None:
        if worker.slot >= 0:
            self.picture.clear(worker.slot)
            self.observe_cache(worker)

    # --- health ----------------------------------------------------------------------------------

    def probed(self, worker: Worker, probe: Probe, asked_s: float, now: float) -> None:
        """The worker's health page was asked at ``asked_s``."""
        change = worker.health.probed(probe, asked_s, now)
        if change is not None and change.before is State.EJECTED and change.cause is Cause.REFUSED:
            self._forget_cache(worker)  # its port was closed, so that is another process
        self._note(worker, change)

    def check(self, now: float) -> None:
        """What time shows: silence, and the end of ejections. Call it a few times a second."""
        seconds = min(now - self._checked_s, LONGEST_CHECK_S)
        self._checked_s = now
        for worker in self._list:
            if worker.free_at_s <= now:
                worker.pace.observe(worker.in_flight, seconds)
            self._note(worker, worker.health.advance(now))
            self._note(worker, worker.health.listen(now))

    def heard(self, ticket: Ticket, upstream: str, attempts: int, status: int, now: float) -> None:
        """Response headers came: what they say of the workers. Call it before `served_by`.

        ``attempts``: 0 when unknown. Workers are blamed for a request that another one could serve; one
        that fails everywhere may be the fault itself, so it only makes them suspects.
        """
        decision = ticket.decision
        if ticket not in self._tickets or decision is None:
            return
        self._stop_waiting(ticket)
        if ticket.stream:
            self._headers_came(ticket, decision, upstream, attempts, now)
        served = self._workers.get(upstream)
        if served is not None:
            self._note(served, served.health.answered(status, now))
            if status >= 500:
                self._suspect(self, served)
        failed = decision.order[: max(0, attempts - 1 if upstream else attempts)]
        for worker in failed:
            if worker is served:
                continue
            if served is not None and 0 < status < 500:
                self._note(worker, worker.health.failed(Cause.UNREACHED, now))
            self._suspect(self, worker)

    def _headers_came(
        self, ticket: Ticket, decision: Decision, upstream: str, attempts: int, now: float
    ) -> None:
        after_s = now - ticket.decided_s
        if attempts <= 1:
            if upstream == decision.worker.address:
                self._patience.came(after_s, now)
            return
        bound_s = self._patience.header_timeout_s(self.settings.header_timeout_s)
        if after_s > 1.9 * bound_s > 0.0:  # two in a row took too long
            self._patience.too_short()

    def _stop_waiting(self, ticket: Ticket) -> None:
        if ticket.waiting and ticket.decision is not None:
            ticket.waiting = False
            ticket.decision.worker.health.settled(stream=ticket.stream)

    def _note(self, worker: Worker, change: Change | None) -> None:
        if change is None:
            return
        if worker.slot >= 0 and change.after is not State.HEALTHY:
            self._unwell.add(worker)
        else:
            self._unwell.discard(worker)
        self._changed(self, worker, change)

    @property
    def panic(self) -> bool:
        """Whether so many workers are out that all count as healthy."""
        return bool(self._unwell) and usable(self._list, self.settings.max_ejected_share)[1]

    # --- a request's life ------------------------------------------------------------------------

    def decide(self, chain: PrefixChain | None, now: float, policy: str | None = None) -> Decision | None:
        """Choose a worker; None when the pool has none. Changes nothing but the turn counter.

        ``chain``: None when the prompt could not be read; the request then goes by load alone.
        ``policy``: overrides the pool's own.
        """
        situation = self.situation(chain, now, policy)
        if situation is None:
            return None
        self._serial += 1
        return self.choose(situation, now)

    def situation(self, chain: PrefixChain | None, now: float, policy: str | None = None) -> Situation | None:
        """What the next decision would be made from; None when the pool has no worker."""
        workers: Sequence[Worker] = self._list
        if not workers:
            return None
        serial = self._serial + 1
        name = policy or self.settings.policy
        rank = POLICIES[name]
        panic = False
        if self._unwell:
            for worker in list(self._unwell):
                self._note(worker, worker.health.advance(now))
            workers, panic = usable(workers, self.settings.max_ejected_share)
        mean_in_flight = sum([w.in_flight for w in workers]) / len(workers)
        candidates: Sequence[Worker] = [w for w in workers if w.in_flight < w.max_inflight]
        if self._limits_prefill:
            candidates = [w for w in candidates if w.has_room(now)]
        if self._unwell and not panic:
            candidates = [w for w in candidates if w.health.has_room(w.in_flight, mean_in_flight, now)]
        overflow = not candidates
        if overflow:
            candidates = [w for w in workers if w.health.state is State.HEALTHY] or workers
        cached: dict[int, int] = {}
        tokens = 0
        # Without a prompt every request has a key of its own, so that ties are spread.
        key = xxh3_64_intdigest(serial.to_bytes(8, "little"), self.origin)
        if chain is not None:
            tokens, key = chain.tokens, chain.key
            block = chain.block_tokens
            cached = {
                slot: min(blocks * block, tokens)
                for slot, blocks in self.picture.lookup(chain.hashes).items()
            }
        query = Query(
            key,
            tokens,
            cached,
            serial,
            mean_in_flight,
            self.heat.running(key),
            self.heat.rent_s(key, now),
            self.utilisation(now),
        )
        if name not in _BLIND and (chain is None or (overflow and name not in _PRICED)):
            rank = least_request
        return Situation(name, rank, query, workers, candidates, overflow, panic)

    def choose(self, situation: Situation, now: float) -> Decision:
        """The decision in that situation."""
        rank, query, workers = situation.rank, situation.query, situation.workers
        candidates, cached, overflow = situation.candidates, query.cached, situation.overflow
        ranking = rank(query, candidates, self.settings, now)
        order = tuple(ranking.order[: self.settings.fallbacks + 1])
        if situation.panic:
            order = self._well_behind(order, rank, query, now)
        elif len(order) <= self.settings.fallbacks and len(order) < len(workers):
            # Behind those with room come busy ones, before Envoy takes any, the ejected among them.
            busy = [w for w in rank(query, workers, self.settings, now).order if w not in order]
            order = (*order, *busy)[: self.settings.fallbacks + 1]
        order = _spread_fallbacks(order, cached)
        chosen = order[0]
        reason = ranking.reason
        if overflow:
            reason = "overflow"
        elif len(candidates) < len(self._list):
            reason = self._why_passed_over(query, chosen, rank, now) or reason
        hit = cached.get(chosen.slot, 0)
        tokens = query.prompt_tokens
        ttft_s = chosen.backlog_s(now) + (tokens - hit) * chosen.prefill_s_per_token
        return Decision(
            self.name,
            situation.policy,
            reason,
            order,
            tokens,
            hit,
            ttft_s,
            overflow,
            tuple(ranking.costs_s),
            ranking.rent_s,
        )

    def _why_passed_over(self, query: Query, chosen: Worker, rank: Policy, now: float) -> str:
        """Why the choice isn't the one that it would be among all workers; "" if it is."""
        favourite = rank(query, self._list, self.settings, now).order[0]
        if favourite is chosen:
            return ""
        if favourite.health.state is not State.HEALTHY:
            return "health"
        return "" if favourite.has_room(now) else "limit"

    def _well_behind(
        self, order: tuple[Worker, ...], rank: Policy, query: Query, now: float
    ) -> tuple[Worker, ...]:
        """In a panic any worker may be first, but behind it come those that are thought to live."""
        well = [w for w in self._list if not w.health.out]
        if not well:
            return order
        first, *others = order
        behind = [*rank(query, well, self.settings, now).order, *others]
        return (first, *[w for w in dict.fromkeys(behind) if w is not first][: self.settings.fallbacks])

    def utilisation(self, now: float) -> float:
        """Share of the workers' time that the prefills of the last half minute or so take."""
        if not self._list:
            return 0.0
        return self._prefilling.rate(now) / len(self._list)

    def begin(
        self, decision: Decision, chain: PrefixChain | None, now: float, *, stream: bool = False
    ) -> Ticket:
        """The decision goes to Envoy: count it. ``stream``: the client wants a stream."""
        miss = decision.prompt_tokens - decision.cached_tokens
        ticket = Ticket(self._serial, decision.worker, chain, miss, now)
        ticket.decision = decision
        ticket.stream = stream
        ticket.waiting = True
        decision.worker.health.sent(now, stream=stream)
        self._tickets.add(ticket)
        self._charge(ticket, decision.worker, now)
        if decision.rent_s is not None and chain is not None:
            self.heat.set_rent(chain.key, decision.rent_s, now)
        if self._publish is not None:
            hashes = chain.hashes if chain else ()
            address = decision.worker.address
            self._publish(Decided(self.origin, ticket.serial, address, hashes, decision.prompt_tokens))
        return ticket

    def served_by(self, ticket: Ticket, address: str, now: float) -> None:
        """Envoy used this worker; the count and the picture follow. "" or an unknown one: nobody's."""
        if ticket not in self._tickets or (ticket.worker is not None and ticket.worker.address == address):
            return
        self._move(ticket, address, now)
        if self._publish is not None:
            self._publish(Moved(self.origin, ticket.serial, address))

    def end(self, ticket: Ticket, now: float, output_tokens: float = 0.0) -> None:
        """The request's stream is over. A second end of the same ticket changes nothing."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        self._stop_waiting(ticket)
        self._settle(ticket, now, output_tokens)
        if self._publish is not None:
            self._publish(Ended(self.origin, ticket.serial, output_tokens))

    # --- what a request does to the accounts -----------------------------------------------------

    def _charge(self, ticket: Ticket, worker: Worker, now: float) -> None:
        ticket.worker = worker
        worker.in_flight += 1
        ticket.prefill_s = ticket.miss_tokens * worker.prefill_s_per_token
        self._prefilling.add(ticket.prefill_s, now)
        worker.free_at_s = max(worker.free_at_s, now) + ticket.prefill_s
        ticket.prefilled_s = worker.free_at_s
        ticket.foretold_s = None if ticket.chain is None else worker.free_at_s - now
        if ticket.chain is not None:
            self.heat.began(ticket.chain.key, worker.address)
        # At the decision, not at the first token: a simultaneous twin must find the prefix there.
        self._touch(ticket, worker, now)

    def _touch(self, ticket: Ticket, worker: Worker, now: float) -> None:
        chain = ticket.chain
        if worker.slot < 0:
            return
        # A chain from before a reload may have blocks of another size.
        if chain is not None and chain.block_tokens == self.picture.block_tokens:
            self.picture.touch(worker.slot, chain.hashes, now)
        self.observe_cache(worker)

    def _refund(self, ticket: Ticket) -> None:
        """The worker never did the work."""
        worker = ticket.worker
        if worker is None:
            return
        worker.free_at_s -= ticket.prefill_s
        self._leave(ticket, worker)

    def _leave(self, ticket: Ticket, worker: Worker) -> None:
        worker.in_flight -= 1
        if ticket.chain is not None:
            self.heat.ended(ticket.chain.key, worker.address)
        if not worker.in_flight and self._departed.get(worker.address) is worker:
            del self._departed[worker.address]

    def _move(self, ticket: Ticket, address: str, now: float) -> None:
        self._refund(ticket)
        worker = self._workers.get(address) or self._departed.get(address)
        ticket.worker = None
        if worker is not None:
            if ticket.chain is not None and worker.slot >= 0:
                blocks = self.picture.lookup(ticket.chain.hashes).get(worker.slot, 0)
                ticket.miss_tokens = max(0, ticket.chain.tokens - blocks * ticket.chain.block_tokens)
            self._charge(ticket, worker, now)
            ticket.foretold_s = None  # it came there before now

    def _settle(self, ticket: Ticket, now: float, output_tokens: float) -> None:
        worker = ticket.worker
        ticket.worker = None
        if worker is None:
            return
        if output_tokens and worker.slot >= 0:
            self.picture.add_output(worker.slot, output_tokens, now)
        self._touch(ticket, worker, now)
        # Refused by the engine, given up by the client, or faster than thought: nothing of it waits any more.
        left_s = min(ticket.prefilled_s - now, ticket.prefill_s)
        worker.free_at_s -= max(0.0, left_s)
        if ticket.foretold_s is not None:
            worker.speed.ended(ticket.foretold_s)
        if ticket.chain is not None and output_tokens:  # answered; others aren't in the engine's count
            worker.lengths.ended(ticket.chain.tokens)
        self._leave(ticket, worker)

    def observe_cache(self, worker: Worker) -> None:
        """Tell the worker's account what the picture says of its cache's room."""
        worker.room_tokens = self.picture.free_blocks(worker.slot) * self.picture.block_tokens
        worker.oldest_s = self.picture.oldest_s(worker.slot)

    # --- replicas --------------------------------------------------------------------------------

    def apply(self, record: Record, now: float) -> None:
        """Follow what another router did. Late, repeated or lost records are harmless."""
        request = (record.origin, record.serial)
        while self._foreign and next(iter(self._foreign.values())).decided_s < now - FOREIGN_TTL_S:
            self._settle(self._foreign.popitem(last=False)[1], now, 0.0)
        if isinstance(record, Decided):
            worker = self._workers.get(record.worker)
            if worker is None or request in self._foreign:
                return
            chain = PrefixChain(record.hashes, self.picture.block_tokens, record.prompt_tokens, 0)
            blocks = self.picture.lookup(record.hashes).get(worker.slot, 0)
            miss = max(0, record.prompt_tokens - blocks * self.picture.block_tokens)
            ticket = self._foreign[request] = Ticket(record.serial, worker, chain, miss, now)
            self._charge(ticket, worker, now)
        elif isinstance(record, Moved):
            if request in self._foreign:
                self._move(self._foreign[request], record.worker, now)
        elif request in self._foreign:
            self._settle(self._foreign.pop(request), now, record.output_tokens)

    def replica_left(self, origin: int, now: float) -> None:
        """That router is gone: take its requests as ended."""
        for request in [r for r in self._foreign if r[0] == origin]:
            self._settle(self._foreign.pop(request), now, 0.0)


def _spread_fallbacks(order: tuple[Worker, ...], cached: Mapping[int, int]) -> tuple[Worker, ...]:
    """Let requests that wait at the same worker, which may hang, have different seconds.

    The list can't be changed later, and Envoy's retries come all at once. Only workers that hold as much of
    the prompt as the second change places.
    """
    waiting = order[0].health.waiting
    if not waiting or len(order) < 3:
        return order
    held = cached.get(order[1].slot, 0)
    equal = next((i for i, w in enumerate(order[1:], 1) if cached.get(w.slot, 0) != held), len(order))
    turn = 1 + waiting % (equal - 1)
    return (order[0], *order[turn:equal], *order[1:turn], *order[equal:])
