"""The router proper: configuration and pools on one side, requests on the other.

`Router.route` turns what Envoy showed of a request into a `Routing`: which pool, which worker, why, and
the open ticket. It is synchronous and free of I/O; `extproc.exchange` calls it at the right moment of a
request's life, `extproc.serve` feeds it new configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from extproc.facts import RequestFacts
from extproc.fleet.config import PoolConfig, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe import events
from extproc.observe.observer import Observer
from extproc.prefix import PrefixChain, chain
from extproc.prompt import Prompt, Unreadable, read_prompt
from extproc.routing.admission import Admission, Shed
from extproc.routing.decision import Decision, Ticket
from extproc.routing.demand import read_demand, wanted_headers
from extproc.routing.explanation import Explanation, explain
from extproc.routing.health import Change
from extproc.routing.load import Worker
from extproc.routing.pool import Pool
from extproc.routing.queueing import Entry

#: Seconds a generated token takes, to guess how many there were from how long a stream lived.
TPOT_S = 0.025

#: Output tokens assumed at most where the request sets no limit of its own.
DEFAULT_MAX_OUTPUT_TOKENS = 2048


@dataclass(slots=True)
class Routing:
    """A routed request: the decision and its open ticket.

    ``header_timeout_ms``: how long Envoy shall wait for response headers at each try; 0: no limit.
    """

    pool: Pool
    decision: Decision
    ticket: Ticket
    gate: Admission
    entry: Entry
    max_output_tokens: int
    decided: events.Decided
    header_timeout_ms: int = 0
    status: int = 0
    attempts: int = 0  # by Envoy; 0: unknown
    headers_s: float | None = None  # when response headers came
    served: str = ""  # by whom: ip:port; "" if nobody


class Router:
    """All pools, and the way into them. Lives in one event loop."""

    def __init__(self, config: RouterConfig, observer: Observer, *, origin: int = 0) -> None:
        self._origin = origin
        self._observer = observer
        self.pools: dict[str, Pool] = {}
        self._gates: dict[str, Admission] = {}
        #: Request headers to be handed in as `RequestFacts.headers`.
        self.wanted_headers: frozenset[str] = frozenset()
        #: Told of a worker that failed a request, to be probed at once.
        self.on_suspect: Callable[[Pool, Worker], None] = lambda pool, worker: None
        self.config = config
        self.apply(config)

    def apply(self, config: RouterConfig) -> None:
        """Follow a new configuration; requests in flight keep their accounts."""
        for name in [n for n in self.pools if n not in config.pools]:
            # An empty pool: its tickets stay valid, new requests find no worker.
            self.pools.pop(name).update(PoolConfig(name, (), config.pools.get(name, _NOTHING).settings))
            del self._gates[name]
        for name, pool_config in config.pools.items():
            pool = self.pools.get(name)
            if pool is None:
                self.pools[name] = Pool(
                    pool_config,
                    origin=self._origin,
                    changed=self._health_changed,
                    suspect=lambda pool, worker: self.on_suspect(pool, worker),
                )
            else:
                pool.update(pool_config)
            if name not in self._gates:
                self._gates[name] = Admission(self.pools[name])
        self.wanted_headers = self._observer.wanted_headers.union(
            *(wanted_headers(p.settings) for p in config.pools.values())
        )
        self.config = config

    def pool_for(self, facts: RequestFacts, overrides: RouteOverrides) -> Pool | None:
        """By the route's ``x-extproc-pool``, else by the route's cluster, else the only pool there is."""
        if overrides.pool:
            return self.pools.get(overrides.pool)
        if facts.cluster:
            name = self.config.clusters.get(facts.cluster)
            if name is not None:
                return self.pools.get(name)
        if len(self.pools) == 1:
            return next(iter(self.pools.values()))
        return None

    def route(
        self,
        facts: RequestFacts,
        overrides: RouteOverrides,
        body: bytes | None,
        now: float,
        *,
        may_refuse: bool = True,
    ) -> Routing | Shed | None:
        """Choose a worker and count the request there; None when we have no opinion.

        ``body``: None when its end was not seen. The engine judges bad requests, never we.
        ``may_refuse``: whether the pool's admission is asked; what it refuses isn't counted.
        """
        pool = self.pool_for(facts, overrides)
        if pool is None:
            self._observer.tell(events.Unrouted(facts, "no_pool", overrides.pool or facts.cluster, now))
            return None
        begun_s = perf_counter()
        prompt = _read(pool, facts, body)
        read_s = perf_counter()
        prefix: PrefixChain | None = None
        max_output_tokens = DEFAULT_MAX_OUTPUT_TOKENS
        if isinstance(prompt, Prompt):
            prefix = _chain(pool, prompt)
            max_output_tokens = prompt.max_tokens or max_output_tokens
            head_tokens = int(prompt.head_bytes / pool.settings.chars_per_token)
            asked = events.Asked(prompt.model, prompt.max_tokens, prompt.stream, head_tokens=head_tokens)
        else:
            asked = events.Asked(unreadable=prompt)
            self._observer.tell(events.PromptUnreadable(facts, pool.name, prompt, now))
        hashed_s = perf_counter()
        decision = pool.decide(prefix, now, overrides.policy)
        work = events.Work(read_s - begun_s, hashed_s - read_s, perf_counter() - hashed_s)
        if decision is None:
            if may_refuse and pool.settings.reject_if_empty:
                shed = Shed(503, "no_worker", f"No worker serves {pool.name} at the moment.")
                self._observer.tell(events.Refused(facts, asked, pool.name, shed, None, None, now))
                return shed
            self._observer.tell(events.Unrouted(facts, "no_worker", pool.name, now))
            return None
        demand = None
        gate = self._gates[pool.name]
        if may_refuse and gate.minds(facts.headers):
            demand = read_demand(facts.headers, body, overrides.priority, pool.settings)
            refusal = gate.admit(decision, demand, now)
            if refusal is not None:
                self._observer.tell(events.Refused(facts, asked, pool.name, refusal, demand, decision, now))
                return refusal
        entry = gate.began(decision, now)
        ticket = pool.begin(decision, prefix, now, stream=asked.stream)
        decided = events.Decided(
            facts,
            asked,
            decision,
            prefix.key if prefix else None,
            demand,
            None if body is None else len(body),
            work,
            now,
        )
        self._observer.tell(decided)
        # Only a stream's headers come before its work; and where nobody else is any better, waiting is.
        timeout_ms = 0
        if asked.stream and not decision.overflow and len(decision.order) > 1 and not pool.panic:
            timeout_ms = round(decision.worker.health.header_timeout_s * 1000)
        return Routing(
            pool,
            decision,
            ticket,
            gate,
            entry,
            max_output_tokens,
            decided,
            timeout_ms,
        )

    def explain(
        self, facts: RequestFacts, overrides: RouteOverrides, body: bytes, now: float
    ) -> Explanation | None:
        """What `route` would do with such a request now, and why; None when no pool is meant.

        Nothing is counted, remembered or logged.
        """
        pool = self.pool_for(facts, overrides)
        if pool is None:
            return None
        prompt = _read(pool, facts, body)
        return explain(
            pool,
            self._gates[pool.name],
            _chain(pool, prompt) if isinstance(prompt, Prompt) else None,
            read_demand(facts.headers, body, overrides.priority, pool.settings),
            now,
            policy=overrides.policy,
            unreadable="" if isinstance(prompt, Prompt) else prompt.value,
        )

    def responded(self, routing: Routing, upstream: str, attempts: int, status: int, now: float) -> None:
        """Response headers came, from ``upstream`` (``ip:port``; "" when no worker was reached)."""
        routing.status, routing.attempts = status, attempts
        routing.served, routing.headers_s = upstream, now
        routing.pool.heard(routing.ticket, upstream, attempts, status, now)
        picked = routing.decision.worker.address
        if upstream != picked:
            routing.pool.served_by(routing.ticket, upstream, now)
            self._observer.tell(
                events.Displaced(routing.decided.facts, routing.decision, upstream, attempts, status, now)
            )

    def _health_changed(self, pool: Pool, worker: Worker, change: Change) -> None:
        self._observer.tell(events.HealthChanged(pool.name, worker.address, change))

    def ended(self, routing: Routing, now: float) -> None:
        """The request's stream is over, however it ended."""
        output = 0.0
        if routing.status == 200:
            decoding_s = now - routing.ticket.decided_s - routing.decision.predicted_ttft_s
            output = min(max(decoding_s, 0.0) / TPOT_S, float(routing.max_output_tokens))
        routing.pool.end(routing.ticket, now, output)
        routing.gate.ended(
            routing.entry,
            routing.decided.demand,
            age_s=now - routing.ticket.decided_s,
            status=routing.status,
            streamed=routing.decided.asked.stream,
            now=now,
        )
        decided_s = routing.ticket.decided_s
        self._observer.tell(
            events.Ended(
                routing.decided.facts,
                routing.decided,
                routing.decision,
                routing.served,
                routing.status,
                routing.attempts,
                None if routing.headers_s is None else routing.headers_s - decided_s,
                now - decided_s,
                routing.decided.asked.stream,
                now,
            )
        )


def _read(pool: Pool, facts: RequestFacts, body: bytes | None) -> Prompt | Unreadable:
    if body is None:
        return Unreadable.INCOMPLETE
    return read_prompt(
        facts.path,
        facts.content_type,
        facts.content_encoding,
        body,
        content_format=pool.settings.content_format,
    )


def _chain(pool: Pool, prompt: Prompt) -> PrefixChain:
    return chain(
        prompt,
        block_tokens=pool.settings.block_tokens,
        chars_per_token=pool.settings.chars_per_token,
        prefix_tokens=pool.settings.prefix_tokens,
    )


_NOTHING = PoolConfig("", ())
