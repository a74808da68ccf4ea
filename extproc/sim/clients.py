"""Clients that give up, try again, and take no for an answer, around `extproc.sim.simulation`.

A client waits ``timeout_s`` for the first token, then drops the connection; it tries again at once, as often
as ``retries`` says. Refused, it comes back after the time it was told, as the OpenAI and Anthropic libraries
do, and that is one of its retries. Either way its next request is up to the workload (`Workload.follow`).

An engine drops a request whose client is gone. What it has prefilled of it until then is wasted work, even
though its blocks stay in the cache and a retry may find them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from extproc.routing.admission import Shed
from extproc.sim.simulation import Fleet, Flight, Router, Simulation, Worker
from extproc.sim.workload import SimRequest, Workload


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends a request: the ``source`` of a `SimRequest`. ``timeout_s``: until the first token."""

    tenant: str = ""
    timeout_s: float | None = None
    retries: int = 0


@dataclass(slots=True, eq=False)
class Attempt(Flight):
    """One try of a request. ``outcome``: done, gone (its client gave up), or shed.

    ``prefilled_tokens``: what engines computed of its prompt. ``answer``: the refusal, if it was refused.
    """

    tries_before: int = 0
    outcome: str = ""
    prefilled_tokens: int = 0
    answer: Shed | None = None

    @property
    def client(self) -> Client:
        """Who sends it."""
        source = self.request.source
        return source if isinstance(source, Client) else _PATIENT


_PATIENT = Client()


class Gatekeeper(Router, Protocol):
    """A router that may refuse."""

    def ask(self, attempt: Attempt, now: float) -> int | Shed:
        """The worker for a request that arrived now, or a refusal."""
        ...


class ClientSimulation(Simulation):
    """One run, of one router, until ``duration_s``; what is under way then is left unfinished.

    ``on_shed`` is told of each refusal, before anything else happens.
    """

    def __init__(
        self,
        workload: Workload,
        router: Gatekeeper,
        fleet: Fleet,
        *,
        duration_s: float,
        on_shed: Callable[[ClientSimulation, Attempt], None] = lambda simulation, attempt: None,
    ) -> None:
        super().__init__(workload, lambda replica: router, fleet, requests=1 << 60)
        self.router = router
        self.attempts: list[Attempt] = []
        self._duration_s = duration_s
        self._on_shed = on_shed

    def at(self, time: float, handle: Callable[..., None], *arguments: object) -> None:
        """Have something happen at a time."""
        self._at(time, handle, *arguments)

    def _at(self, time: float, handle: Callable[..., None], *arguments: object) -> None:
        if time <= self._duration_s:
            super()._at(time, handle, *arguments)

    def _arrive(self, request: SimRequest) -> None:
        self._try(request, 0)

    def _try(self, request: SimRequest, tries_before: int) -> None:
        now = self.now
        attempt = Attempt(len(self.attempts), request, now, tries_before=tries_before)
        self.attempts.append(attempt)
        self.flights.append(attempt)
        answer = self.router.ask(attempt, now)
        if isinstance(answer, Shed):
            attempt.outcome, attempt.answer, attempt.ended_s = "shed", answer, now
            self._on_shed(self, attempt)
            self._again(attempt, answer.retry_after_s or 0.0)
            return
        attempt.worker = answer
        worker = self.workers[answer]
        worker.coming[attempt.index] = attempt
        self._at(now + self.fleet.cost.frontend_s(request.prompt_tokens), self._queue, worker, attempt)
        if attempt.client.timeout_s is not None:
            self._at(now + attempt.client.timeout_s, self._give_up, attempt)

    def _again(self, attempt: Attempt, delay_s: float) -> None:
        if attempt.tries_before < attempt.client.retries:
            self._at(self.now + delay_s, self._try, attempt.request, attempt.tries_before + 1)
        else:
            self._follow(attempt)

    def _follow(self, attempt: Attempt) -> None:
        following = self._workload.follow(attempt.request, self.now)
        if following is not None:
            self._at(following[0], self._arrive, following[1])

    def _queue(self, worker: Worker, flight: Flight) -> None:
        if flight.index in worker.coming:  # its client may be gone already
            super()._queue(worker, flight)

    def _give_up(self, attempt: Attempt) -> None:
        if attempt.first_token_s >= 0.0:
            return
        worker = self.workers[attempt.worker]
        if worker.coming.pop(attempt.index, None) is None:
            left = worker.engine.prefill_left(str(attempt.index))
            if left is not None:
                cached = worker.engine.cached_tokens(str(attempt.index))
                attempt.prefilled_tokens = attempt.request.prompt_tokens - cached - left
            worker.engine.abort(str(attempt.index), self.now)
            del worker.flights[attempt.index]
        attempt.outcome, attempt.ended_s = "gone", self.now
        self.router.ended(attempt, self.now)
        self._again(attempt, 0.0)

    def _end(self, worker: Worker, flight: Flight) -> None:
        assert isinstance(flight, Attempt)
        del worker.flights[flight.index]
        flight.ended_s = self.now
        worker.count(flight)
        flight.outcome = "done"
        flight.prefilled_tokens = flight.request.prompt_tokens - flight.cached_tokens
        self.router.ended(flight, self.now)
        self._follow(flight)
