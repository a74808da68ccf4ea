"""What a pool would decide for a prompt, and why: every worker's cost, term by term.

The situation, the choice and the terms come from the code that decides real requests; nothing is counted.
The terms are those of the ``predicted`` policy. Other policies rank by other things (as all do without a
readable prompt, and when every worker is at its limit), and the terms then only show what they didn't see.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from extproc.prefix import PrefixChain
from extproc.routing.admission import Admission
from extproc.routing.decision import Situation
from extproc.routing.demand import Demand
from extproc.routing.load import Worker
from extproc.routing.policy import Terms, predicted, terms
from extproc.routing.pool import Pool


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """One worker. Times are milliseconds; ``total_ms`` is the sum of the five before it.

    ``place``: in the list for Envoy, 1 is the pick; None: not in it. ``passed_over``: why it was no
    candidate, "" if it was one.
    """

    worker: str
    place: int | None
    passed_over: str
    state: str
    in_flight: int
    max_inflight: int
    cached_tokens: int
    uncached_tokens: int
    own_ms: float
    others_ms: float
    decode_ms: float
    backlog_ms: float
    eviction_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Admission would answer so."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would become of a request.

    ``unreadable``: why there is no prompt to route by, "" if there is one. ``picks``: addresses, best first;
    none when the pool has no worker. ``utilisation``: share of the workers' time that prefills take.
    ``by_cost``: whether the policy's ranking goes by the workers' costs.
    """

    pool: str
    policy: str
    reason: str
    picks: tuple[str, ...]
    predicted_ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    unreadable: str
    overflow: bool
    panic: bool
    utilisation: float
    by_cost: bool
    refusal: Refusal | None
    workers: tuple[WorkerCost, ...]


def explain(
    pool: Pool,
    gate: Admission,
    chain: PrefixChain | None,
    demand: Demand,
    now: float,
    *,
    policy: str | None = None,
    unreadable: str = "",
) -> Explanation:
    """Explain the decision that `Pool.decide` would make now."""
    situation = pool.situation(chain, now, policy)
    if situation is None:
        shed = Refusal(503, "no_worker", "The pool has no worker.", None)
        return Explanation(
            pool.name,
            policy or pool.settings.policy,
            "no_worker",
            (),
            0.0,
            chain.tokens if chain else 0,
            0,
            unreadable,
            False,
            False,
            0.0,
            False,
            shed if pool.settings.reject_if_empty else None,
            (),
        )
    decision = pool.choose(situation, now)
    shed_ = gate.foresee(decision, demand, now)
    places = {worker: place for place, worker in enumerate(decision.order, 1)}
    costs = [_cost(worker, places.get(worker), situation, pool, now) for worker in pool.workers]
    costs.sort(key=lambda cost: (cost.place or inf, cost.total_ms))
    return Explanation(
        pool.name,
        situation.policy,
        decision.reason,
        tuple([worker.address for worker in decision.order]),
        _ms(decision.predicted_ttft_s),
        decision.prompt_tokens,
        decision.cached_tokens,
        unreadable,
        situation.overflow,
        situation.panic,
        situation.query.utilisation,
        situation.rank is predicted,
        Refusal(shed_.status, shed_.reason, shed_.message, shed_.retry_after_s) if shed_ else None,
        tuple(costs),
    )


def _cost(worker: Worker, place: int | None, situation: Situation, pool: Pool, now: float) -> WorkerCost:
    found: Terms = terms(situation.query, worker, situation.candidates, pool.settings, now)
    return WorkerCost(
        worker.address,
        place,
        _passed_over(worker, situation, now),
        worker.health.state.value,
        worker.in_flight,
        worker.max_inflight,
        found.cached_tokens,
        found.uncached_tokens,
        _ms(found.own_s),
        _ms(found.others_s),
        _ms(found.decode_s),
        _ms(found.backlog_s),
        _ms(found.eviction_s),
        _ms(found.cost_s),
    )


def _passed_over(worker: Worker, situation: Situation, now: float) -> str:
    if worker in situation.candidates:
        return ""
    return "limit" if worker in situation.workers and not worker.has_room(now) else "health"


def _ms(seconds: float) -> float:
    return seconds * 1000
