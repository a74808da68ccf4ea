"""The drill in virtual time: the router's own pool, the emulator's engine core, and no machine to be busy.

Between them stands what Envoy, the probes and the scraper do, as far as it matters to a request: tries along
the router's list, a bound on headers, health pages, readings of counters. Streams' headers come when the
worker takes the request. A run is determined by its seed, takes a second or two a minute of drill, and has
quiet figures that a busy machine can't show; how long real processes take to die and to start is left out.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from extproc.demo.drill_causes import Strike
from extproc.demo.drill_plan import (
    COST,
    DOWN_S,
    FAULT_S,
    FAULT_SHARE,
    PREFILL_TOKENS_PER_S,
    PROMPT_TOKENS,
    SLOWNESS,
    STOP_S,
    request_rate,
)
from extproc.demo.drill_report import Event, Phase
from extproc.demo.loadgen import Result
from extproc.demo.personas import OUTPUT_TOKENS
from extproc.emulator.engine import Engine, EngineConfig, EngineRequest
from extproc.engine.prober import CHECK_INTERVAL_S, JITTER, LEAST_INTERVAL_S, UNWELL_INTERVAL_S
from extproc.engine.scraper import START_SPREAD_S
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.router import TPOT_S
from extproc.routing.decision import Decision, Ticket
from extproc.routing.health import Change, Probe, State
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

#: From the client through Envoy and the router to a worker; and from a refusal to the next try.
HOP_S, RETRY_S = 0.003, 0.010

#: Envoy's retries, as the shipped YAML has them.
TRIES = 4

#: A process that starts is ready after this.
START_S = 1.0

#: Tokens of a user's turn, and of the template around it.
TURN_TOKENS = (30, 120)

#: The last requests have this long to end.
LAST_S = 60.0

_GONE = ("kill", "refuse")


@dataclass(slots=True, eq=False)
class _Flight:
    """A request. ``tried``: counts its tries, so that what belongs to an earlier one is void."""

    result: Result
    chain: list[int]
    decision: Decision
    ticket: Ticket
    header_timeout_s: float
    tried: int = 0
    queued_s: float = -1.0


@dataclass(slots=True, eq=False)
class _Engine:
    """A worker. ``fault``: that it has now. ``held``: tries that arrived while it was stopped."""

    account: Worker
    engine: Engine
    fault: str = ""
    slowness: float = 1.0
    flights: dict[int, _Flight] = field(default_factory=dict)
    held: list[tuple[_Flight, int]] = field(default_factory=list)
    step: int = 0
    step_due: bool = False
    asked_s: float = float("-inf")
    prefills: int = 0
    waited_s: float = 0.0
    prompt_tokens: int = 0

    @property
    def runs(self) -> bool:
        return self.fault not in (*_GONE, "stop")


class VirtualDrill:
    """One run; `run` fills ``results``, ``phases``, ``strikes`` and ``events``, as a real one does."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.results: list[Result] = []
        self.phases: list[Phase] = []
        self.strikes: list[Strike] = []
        self.events: list[Event] = []
        self.rate = request_rate(args.workers, args.load, args.cold_share)
        self._args = args
        self._random = Random(f"{args.seed} virtual")
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        self._settings = PoolSettings(prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
        endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "drill", 120) for i in range(args.workers))
        self._pool = Pool(
            PoolConfig("drill", endpoints, self._settings),
            changed=self._health_changed,
            suspect=self._suspect,
        )
        self._engines = [_Engine(account, self._new_engine()) for account in self._pool.workers]
        self._by_address = {engine.account.address: engine for engine in self._engines}
        for engine in self._engines:
            self._pool.resize_cache(engine.account, engine.engine.config.cache_tokens)
        self._heads = [self._head() for _ in range(args.personas)]

    def run(self) -> VirtualDrill:
        """Warm up, be quiet, break things, and wait for the last requests."""
        args = self._args
        quiet_s = args.warm_up_s
        faults_s = quiet_s + args.quiet_s
        end_s = faults_s + args.seconds
        self.phases = [Phase(quiet_s, faults_s), Phase(faults_s, end_s)]
        self._at(0.0, lambda: self._arrive(end_s))
        self._at(CHECK_INTERVAL_S, self._check)
        for engine in self._engines:
            self._later(
                self._random.uniform(0.0, self._settings.health_interval_s), self._keep_probing, engine
            )
            self._later(self._random.uniform(0.0, START_SPREAD_S), self._keep_reading, engine)
        names = args.faults.split(",")
        slot_s = args.seconds / len(names)
        for number, name in enumerate(names):
            engine = self._engines[number % len(self._engines)]
            begin_s = faults_s + number * slot_s
            strike = Strike(name, engine.account.address, begin_s, begin_s, cuts=name in _GONE)
            strike.slot_end_wall_s = begin_s + slot_s
            self.strikes.append(strike)
            self._at(begin_s, partial(self._strike, engine, strike, min(FAULT_S, FAULT_SHARE * slot_s)))
        while self._queue and self._queue[0][0] <= end_s + LAST_S:
            self._now, _, handle = heapq.heappop(self._queue)
            handle()
        return self

    def _at(self, time_s: float, handle: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._serial), handle))

    def _later(self, seconds: float, handle: Callable[[_Engine], object], engine: _Engine) -> None:
        self._at(self._now + seconds, partial(handle, engine))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(1.0 - JITTER, 1.0 + JITTER)

    @staticmethod
    def _new_engine() -> Engine:
        return Engine(EngineConfig(cost=COST))

    def _head(self) -> tuple[int, list[int]]:
        """A prompt's length and the hashes of its blocks."""
        tokens = self._random.randint(*PROMPT_TOKENS)
        return tokens, [self._random.getrandbits(63) for _ in range(tokens // EngineConfig().block_size)]

    # --- what watches the workers ----------------------------------------------------------------

    def _check(self) -> None:
        self._pool.check(self._now)
        self._at(self._now + CHECK_INTERVAL_S, self._check)

    def _health_changed(self, pool: Pool, worker: Worker, change: Change) -> None:
        cause = change.cause.value if change.cause else ""
        self.events.append(Event(self._now, worker.address, change.after.value, cause))

    def _suspect(self, pool: Pool, worker: Worker) -> None:
        engine = self._by_address[worker.address]
        wait_s = max(0.0, engine.asked_s + LEAST_INTERVAL_S - self._now)
        self._later(wait_s, self._probe, engine)

    def _probe(self, engine: _Engine) -> float:
        """Ask the health page; how long the answer takes."""
        asked_s = engine.asked_s = self._now
        if engine.fault == "stop":
            timeout_s = self._settings.health_timeout_s
            self._at(
                self._now + timeout_s,
                lambda: self._pool.probed(engine.account, Probe.NO_ANSWER, asked_s, self._now),
            )
            return timeout_s
        probe = Probe.REFUSED if engine.fault in _GONE else Probe.READY
        self._pool.probed(engine.account, probe, asked_s, self._now)
        return 0.0

    def _keep_probing(self, engine: _Engine) -> None:
        took_s = self._probe(engine)
        healthy = engine.account.health.state is State.HEALTHY
        interval_s = self._settings.health_interval_s if healthy else UNWELL_INTERVAL_S
        self._later(took_s + self._jittered(interval_s), self._keep_probing, engine)

    def _keep_reading(self, engine: _Engine) -> None:
        if engine.runs:
            pool, account, core = self._pool, engine.account, engine.engine
            pool.timed(account, engine.prefills, engine.waited_s)
            pool.measured(account, engine.prefills, engine.prompt_tokens)
            pool.decoded(account, core.generation_tokens, self._now, kv_usage=core.kv_usage)
        self._later(self._jittered(self._settings.scrape_interval_s), self._keep_reading, engine)

    # --- faults ----------------------------------------------------------------------------------

    def _strike(self, engine: _Engine, strike: Strike, seconds: float) -> None:
        engine.fault = strike.fault
        if strike.fault == "kill":
            seconds = min(seconds, DOWN_S) + START_S
        elif strike.fault == "stop":
            seconds = min(seconds, STOP_S)
        elif strike.fault == "slow":
            engine.slowness = SLOWNESS
        if strike.cuts:
            for flight in list(engine.flights.values()):
                engine.engine.abort(str(flight.result.index), self._now)
                self._ended(flight, "cut")
            engine.flights.clear()
        self._at(self._now + seconds, lambda: self._relent(engine, strike))

    def _relent(self, engine: _Engine, strike: Strike) -> None:
        strike.ended_s = strike.ended_wall_s = self._now
        engine.fault, engine.slowness = "", 1.0
        if strike.fault == "kill":
            engine.engine = self._new_engine()
            engine.step += 1
            engine.step_due = False
            engine.prefills, engine.waited_s, engine.prompt_tokens = 0, 0.0, 0
        if engine.step_due:  # it ended while the process was stopped
            engine.step_due = False
            self._stepped(engine, engine.step)
        held, engine.held = engine.held, []
        for flight, tried in held:
            if flight.tried == tried:
                self._take(engine, flight)
        self._run(engine)

    # --- requests --------------------------------------------------------------------------------

    def _arrive(self, end_s: float) -> None:
        if self._now >= end_s:
            return
        self._at(self._now + self._random.expovariate(self.rate), lambda: self._arrive(end_s))
        persona = self._random.randrange(len(self._heads))
        tokens, head = self._heads[persona]
        if self._random.random() < self._args.cold_share:
            persona = len(self._heads) + len(self.results)
            tokens, head = self._head()
        prompt_tokens = tokens + self._random.randint(*TURN_TOKENS)
        blocks = (prompt_tokens + OUTPUT_TOKENS) // EngineConfig().block_size
        chain = head + [self._random.getrandbits(63) for _ in range(blocks - len(head))]
        result = Result(len(self.results), persona, self._now, prompt_tokens=prompt_tokens)
        self.results.append(result)
        self._decide(result, chain)

    def _decide(self, result: Result, chain: list[int]) -> None:
        pool, size = self._pool, self._settings.block_tokens
        ours = tuple(chain[size // EngineConfig().block_size - 1 :: size // EngineConfig().block_size])
        hashes = ours[: result.prompt_tokens // size]
        prefix = PrefixChain(hashes, size, result.prompt_tokens, hashes[0])
        decision = pool.decide(prefix, self._now)
        assert decision is not None
        timeout_s = 0.0  # as in `extproc.router.Router.route`
        if not decision.overflow and len(decision.order) > 1 and not pool.panic:
            timeout_s = decision.worker.health.header_timeout_s
        flight = _Flight(
            result, chain, decision, pool.begin(decision, prefix, self._now, stream=True), timeout_s
        )
        self._at(self._now + HOP_S, lambda: self._try(flight))

    def _try(self, flight: _Flight) -> None:
        order = flight.decision.order
        if flight.tried >= min(TRIES, len(order)):
            self._pool.heard(flight.ticket, "", flight.tried, 503, self._now)
            self._pool.served_by(flight.ticket, "", self._now)
            self._ended(flight, "no worker took it")
            return
        engine = self._by_address[order[flight.tried].address]
        flight.tried += 1
        if engine.fault in (*_GONE, "503"):
            self._at(self._now + self._random.uniform(0.0, RETRY_S), lambda: self._try(flight))
        elif engine.fault in ("stop", "hang"):
            tried = flight.tried
            if engine.fault == "stop":
                engine.held.append((flight, tried))
            if flight.header_timeout_s:
                self._at(self._now + flight.header_timeout_s, lambda: self._give_up(flight, tried))
        else:
            self._take(engine, flight)

    def _give_up(self, flight: _Flight, tried: int) -> None:
        if flight.tried == tried and not flight.result.headers_s:
            self._try(flight)

    def _take(self, engine: _Engine, flight: _Flight) -> None:
        """The worker sends the headers, and works on the prompt."""
        address = engine.account.address
        flight.result.worker = address
        flight.result.headers_s = self._now - flight.result.start_s
        self._pool.heard(flight.ticket, address, flight.tried, 200, self._now)
        self._pool.served_by(flight.ticket, address, self._now)
        engine.flights[flight.result.index] = flight
        frontend_s = COST.frontend_s(flight.result.prompt_tokens)
        self._at(self._now + frontend_s, lambda: self._submit(engine, flight))

    def _submit(self, engine: _Engine, flight: _Flight) -> None:
        if flight.result.error:
            return
        flight.queued_s = self._now
        request = EngineRequest(
            str(flight.result.index), flight.result.prompt_tokens, OUTPUT_TOKENS, flight.chain
        )
        engine.engine.add(request, self._now)
        self._run(engine)

    def _run(self, engine: _Engine) -> None:
        if not engine.runs or engine.engine.stepping:
            return
        duration_s = engine.engine.begin_step(self._now)
        if duration_s is not None:
            engine.step += 1
            step = engine.step
            self._at(self._now + duration_s * engine.slowness, lambda: self._stepped(engine, step))

    def _stepped(self, engine: _Engine, step: int) -> None:
        if step != engine.step:
            return
        if engine.fault == "stop":
            engine.step_due = True
            return
        for output in engine.engine.finish_step(self._now):
            flight = engine.flights.get(int(output.request_id))
            if flight is None:
                continue
            result = flight.result
            if output.first:
                result.ttft_s = self._now - result.start_s
                result.cached_tokens = output.cached_tokens
            if output.finished:
                engine.prefills += 1
                engine.waited_s += result.start_s + result.ttft_s - flight.queued_s
                engine.prompt_tokens += result.prompt_tokens
                del engine.flights[result.index]
                self._ended(flight, "")
        self._run(engine)

    def _ended(self, flight: _Flight, error: str) -> None:
        result, ticket = flight.result, flight.ticket
        result.error, result.end_s = error, self._now
        output_tokens = 0.0
        if not error:
            result.completion_tokens = OUTPUT_TOKENS
            decoding_s = self._now - ticket.decided_s - flight.decision.predicted_ttft_s
            output_tokens = min(max(decoding_s, 0.0) / TPOT_S, float(OUTPUT_TOKENS))
        self._pool.end(ticket, self._now, output_tokens)
