"""The product's router with its admission, as a simulated router that may refuse."""

from __future__ import annotations

from extproc.fleet.config import PoolSettings
from extproc.routing.admission import Admission, Shed
from extproc.routing.demand import Demand, read_demand
from extproc.routing.queueing import Entry
from extproc.sim.clients import Attempt
from extproc.sim.product import TRUTH, Distortion, PoolRouter, router_chain
from extproc.sim.simulation import Flight

#: The header by which simulated tenants are told apart, if the settings look at it.
TENANT_HEADER = "x-tenant"


class GuardedRouter(PoolRouter):
    """One router with one pool. ``expected_s``: the TTFT it predicted, by flight index, of the admitted."""

    def __init__(self, settings: PoolSettings, distortion: Distortion = TRUTH) -> None:
        super().__init__(settings, distortion=distortion)
        self.gate = Admission(self.pool)
        self.expected_s: dict[int, float] = {}
        self._demands: dict[int, Demand] = {}
        self._entries: dict[int, Entry] = {}

    def ask(self, attempt: Attempt, now: float) -> int | Shed:
        """As `extproc.router.Router.route` does."""
        self._read_engines(now)
        request = attempt.request
        chain = router_chain(request, self._settings, self._distortion.tokens)
        decision = self.pool.decide(chain, now)
        assert decision is not None
        headers = {TENANT_HEADER: attempt.client.tenant}
        if self.gate.minds(headers):
            body = b"%d" % request.chain[-1]
            demand = self._demands[attempt.index] = read_demand(headers, body, None, self.pool.settings)
            shed = self.gate.admit(decision, demand, now)
            if shed is not None:
                del self._demands[attempt.index]
                return shed
        miss = decision.prompt_tokens - decision.cached_tokens
        self.expected_s[attempt.index] = self.gate.queues.ttft_s(
            decision.worker, decision.prompt_tokens, miss, now
        )
        self._entries[attempt.index] = self.gate.began(decision, now)
        ticket = self.pool.begin(decision, chain, now)
        self._tickets[attempt.index] = (ticket, decision.predicted_ttft_s)
        return self._index[decision.worker.address]

    def choice(self, attempt: Attempt, now: float) -> int:
        """Where the request would go now, without sending it there."""
        decision = self.pool.decide(router_chain(attempt.request, self._settings), now)
        assert decision is not None
        return self._index[decision.worker.address]

    def ended(self, flight: Flight, now: float) -> None:
        """As `extproc.router.Router.ended` does, for streams, whose headers come at once."""
        self.gate.ended(
            self._entries.pop(flight.index),
            self._demands.pop(flight.index, None),
            age_s=now - flight.arrived_s,
            status=200,
            streamed=True,
            now=now,
        )
        super().ended(flight, now)
