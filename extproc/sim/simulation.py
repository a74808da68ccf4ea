"""Discrete events in virtual time: a workload, a router (or several replicas of it), a fleet of engines.

A request arrives, one of the router's replicas decides at once, the worker's frontend takes its time, then
the engine (`extproc.emulator.engine`, the one that the emulated workers run) queues it. Engines take as many
decode steps at a time as nothing can happen in; an arrival cuts that short. Nothing is drawn here but the
replica that sees a request, so a run is determined by its workload, router and seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Literal, Protocol, runtime_checkable

from extproc.emulator.engine import CostModel, Engine, EngineConfig, EngineRequest
from extproc.sim.workload import BLOCK_TOKENS, SimRequest, Workload

#: How a router restarts.
Restart = Literal["empty", "saved"]

#: More decode steps than ever pass without an event.
_MANY_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class FleetChange:
    """At ``time_s`` the workers ``leave`` take no more requests (running ones end), ``join`` others come."""

    time_s: float
    leave: tuple[int, ...] = ()
    join: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """``workers`` engines of ``cache_tokens`` each. ``speeds``: relative, repeated over the workers."""

    workers: int = 8
    cache_tokens: int = 190_000
    speeds: tuple[float, ...] = (1.0,)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    cost: CostModel = field(default_factory=CostModel)
    changes: tuple[FleetChange, ...] = ()

    def engine_config(self, index: int) -> EngineConfig:
        """The configuration of worker ``index``."""
        return EngineConfig(
            block_size=BLOCK_TOKENS,
            num_gpu_blocks=self.cache_tokens // BLOCK_TOKENS + 1,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.cache_tokens,
            cost=self.cost.faster(self.speeds[index % len(self.speeds)]),
        )


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way. Times are seconds since the start; -1 for what hasn't happened."""

    index: int
    request: SimRequest
    arrived_s: float
    replica: int = 0
    worker: int = -1
    queued_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.ended_s - self.arrived_s


class Worker:
    """An engine in virtual time, and what is on its way to it."""

    __slots__ = (
        "coming",
        "end_s",
        "engine",
        "flights",
        "index",
        "prefills",
        "prompt_tokens",
        "version",
        "waited_s",
    )

    def __init__(self, index: int, config: EngineConfig) -> None:
        self.index = index
        self.engine = Engine(config)
        self.coming: dict[int, Flight] = {}  # flight index → in the frontend
        self.flights: dict[int, Flight] = {}  # flight index → in the engine
        self.version = 0  # of the step in progress: what was scheduled for an older one is void
        self.end_s = 0.0  # of the step in progress
        self.prefills = 0  # requests that ended, as vLLM counts them in its histograms ...
        self.prompt_tokens = 0  # ... their prompt tokens ...
        self.waited_s = 0.0  # ... and their times in its queue and in prefill, in sum

    def count(self, flight: Flight) -> None:
        """A request has ended here."""
        self.prefills += 1
        self.prompt_tokens += flight.request.prompt_tokens
        self.waited_s += flight.first_token_s - flight.queued_s


class Router(Protocol):
    """What decides. Workers are known by their index, which is never used twice."""

    def route(self, flight: Flight, now: float) -> int:
        """The worker for a request that arrived now."""
        ...

    def ended(self, flight: Flight, now: float) -> None:
        """The response of a request that this router decided has ended."""
        ...

    def join(self, worker: Worker, now: float) -> None:
        """A worker is there from now on (also called for each one at the start)."""
        ...

    def leave(self, worker: Worker, now: float) -> None:
        """A worker takes no requests any more."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """A router that can lose its memory."""

    def restart(self, now: float, *, keep: bool) -> None:
        """Start anew; ``keep``: with what it saved at the last moment."""
        ...


@runtime_checkable
class Gossip(Protocol):
    """A router whose replicas tell each other."""

    def records(self) -> Iterable[object]:
        """What happened here since the last call, for the other replicas."""
        ...

    def apply(self, record: object, now: float) -> None:
        """What happened at another replica."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that happened: the input of `extproc.sim.result.summarize`."""

    flights: list[Flight]
    workers: list[Worker]
    duration_s: float


class Simulation:
    """One run. ``make_router(replica)`` is called once for each replica.

    ``delay_s``: until a record of one replica reaches the others; None: they don't talk.
    ``restart``: the first replica starts anew when half of the requests have arrived, "empty" or with the
    state that it had "saved"; what it had in flight is no longer its own.
    """

    def __init__(
        self,
        workload: Workload,
        make_router: Callable[[int], Router],
        fleet: Fleet,
        *,
        requests: int,
        replicas: int = 1,
        delay_s: float | None = 0.1,
        seed: int = 0,
        restart: Restart | None = None,
    ) -> None:
        self.fleet = fleet
        self.workers: list[Worker] = []
        self.routers = [make_router(index) for index in range(replicas)]
        self.flights: list[Flight] = []
        self._workload = workload
        self._requests = requests
        self._delay_s = delay_s if replicas > 1 else None
        self._restart = restart
        self._random = Random(f"{seed} replicas")
        self._serial = count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.now = 0.0

    def run(self) -> Run:
        """Until the last of ``requests`` has ended."""
        for _ in range(self.fleet.workers):
            self._join()
        for change in self.fleet.changes:
            self._at(change.time_s, self._change, change)
        self._arrivals = self._workload.arrivals()
        self._next_arrival()
        events = self._events
        while events:
            self.now, _, handle, arguments = heapq.heappop(events)
            handle(*arguments)
        return Run(self.flights, self.workers, self.now)

    def _at(self, time: float, handle: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time, next(self._serial), handle, arguments))

    # --- requests --------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        following = next(self._arrivals, None)
        if following is not None:
            self._at(following[0], self._arrive_and_next, following[1])

    def _arrive_and_next(self, request: SimRequest) -> None:
        if len(self.flights) < self._requests:
            self._arrive(request)
            self._next_arrival()

    def _arrive(self, request: SimRequest) -> None:
        if len(self.flights) >= self._requests:
            return
        if self._restart is not None and len(self.flights) == self._requests // 2:
            router = self.routers[0]
            if isinstance(router, Restartable):
                router.restart(self.now, keep=self._restart == "saved")
        flight = Flight(len(self.flights), request, self.now)
        self.flights.append(flight)
        if len(self.routers) > 1:
            flight.replica = self._random.randrange(len(self.routers))
        flight.worker = self.routers[flight.replica].route(flight, self.now)
        self._tell(flight.replica)
        worker = self.workers[flight.worker]
        worker.coming[flight.index] = flight
        delay = self.fleet.cost.frontend_s(request.prompt_tokens)
        self._at(self.now + delay, self._queue, worker, flight)

    def _queue(self, worker: Worker, flight: Flight) -> None:
        request, now = flight.request, self.now
        del worker.coming[flight.index]
        worker.flights[flight.index] = flight
        flight.queued_s = now
        engine = worker.engine
        engine.add(
            EngineRequest(str(flight.index), request.prompt_tokens, request.output_tokens, request.chain), now
        )
        if engine.stepping:
            end = engine.shorten(now)
            if end < worker.end_s:
                self._step_until(worker, end)
        else:
            self._step(worker)

    def _step(self, worker: Worker) -> None:
        duration = worker.engine.begin_step(self.now, _MANY_STEPS)
        if duration is not None:
            self._step_until(worker, self.now + duration)

    def _step_until(self, worker: Worker, end: float) -> None:
        worker.end_s = end
        worker.version += 1
        self._at(end, self._stepped, worker, worker.version)

    def _stepped(self, worker: Worker, version: int) -> None:
        if version != worker.version:
            return
        ended = []
        for output in worker.engine.finish_step(self.now):
            if not (output.first or output.finished):
                continue
            flight = worker.flights[int(output.request_id)]
            if output.first:
                flight.first_token_s = self.now
                flight.cached_tokens = output.cached_tokens
            if output.finished:
                ended.append(flight)
        for flight in ended:
            self._end(worker, flight)
        self._step(worker)

    def _end(self, worker: Worker, flight: Flight) -> None:
        del worker.flights[flight.index]
        flight.ended_s = self.now
        worker.count(flight)
        self.routers[flight.replica].ended(flight, self.now)
        self._tell(flight.replica)
        if len(self.flights) < self._requests:
            following = self._workload.follow(flight.request, self.now)
            if following is not None:
                self._at(following[0], self._arrive, following[1])

    # --- fleet and replicas ----------------------------------------------------------------------

    def _join(self) -> None:
        worker = Worker(len(self.workers), self.fleet.engine_config(len(self.workers)))
        self.workers.append(worker)
        for router in self.routers:
            router.join(worker, self.now)

    def _change(self, change: FleetChange) -> None:
        for index in change.leave:
            for router in self.routers:
                router.leave(self.workers[index], self.now)
        for _ in range(change.join):
            self._join()

    def _tell(self, replica: int) -> None:
        if self._delay_s is None:
            return
        router = self.routers[replica]
        if not isinstance(router, Gossip):
            return
        for record in router.records():
            for other, peer in enumerate(self.routers):
                if other != replica:
                    self._at(self.now + self._delay_s, self._hear, peer, record)

    def _hear(self, router: Gossip, record: object) -> None:
        router.apply(record, self.now)
