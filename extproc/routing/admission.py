"""Admission: to answer "not now" at once is better than to let a request wait for what it can't get.

A decision says when the first token is expected at the worker of choice. `Admission.admit` refuses the
request, before it is counted anywhere, if

- its tenant has had its share and others would wait for it (`extproc.routing.fairness`),
- it is a retry beyond its tenant's budget while requests wait (`extproc.routing.retries`),
- the first token is expected later than its bound.

The bound is the least of: the request's own (``x-extproc-ttft-slo-ms``); how long its client is known to
wait, if it is a retry; and where the pool has ``shed_after_ms``, that and Envoy's timeout. ``shed_after_ms``
doubles with each step of priority and halves with each step down, so the lowest are refused first. A client's
own bound and a timeout can't be stretched; below priority 0 they halve, too. ``shed_after_ms`` refuses only
where waiting is the matter: a prompt that takes longer all by itself is let in when there is no queue.

``Retry-After`` comes from the queue (`extproc.routing.queueing`): it drains a second each second, so what was
expected too late by ``x`` seconds fits ``x`` seconds later if nothing else comes. Whole seconds, at least
one; ``retry-after-ms``, which the OpenAI and Anthropic clients read, is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.fleet.config import PoolSettings
from extproc.routing.decision import Decision
from extproc.routing.demand import SLO_HEADER, Demand
from extproc.routing.fairness import FairShares
from extproc.routing.pool import Pool
from extproc.routing.queueing import Entry, Queues
from extproc.routing.retries import RetryGuard


@dataclass(frozen=True, slots=True)
class Shed:
    """A refusal. ``reason``: a word from a bounded set. ``retry_after_s``: when it should fit, if known."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """The latest time to the first token that makes sense, in seconds, and whose it is."""

    seconds: float
    reason: str
    even_alone: bool  # it holds without a queue, too


def bound_of(demand: Demand, settings: PoolSettings, patience_s: float | None = None) -> Bound | None:
    """The least of a request's bounds; None if it has none."""
    scale = 2.0**demand.priority
    bounds = []
    if demand.slo_s is not None:
        bounds.append(Bound(demand.slo_s * min(scale, 1.0), "slo", True))
    if patience_s is not None:
        bounds.append(Bound(patience_s, "retry", False))
    if settings.shed_after_ms is not None:
        bounds.append(Bound(settings.shed_after_ms / 1000 * scale, "load", False))
        if demand.timeout_s is not None:
            bounds.append(Bound(demand.timeout_s * min(scale, 1.0), "timeout", True))
    return min(bounds, key=lambda bound: bound.seconds, default=None)


class Admission:
    """One pool's gate: the tenants' accounts, the retries it remembers. Lives as long as the pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.queues = Queues()
        self.shares = FairShares()
        self.retries = RetryGuard()

    def minds(self, headers: Mapping[str, str]) -> bool:
        """Whether there is anything to look at, for a request with these headers."""
        settings = self._pool.settings
        return (
            settings.shed_after_ms is not None
            or settings.tenant_header is not None
            or settings.retry_budget is not None
            or SLO_HEADER in headers
        )

    def admit(self, decision: Decision, demand: Demand, now: float) -> Shed | None:
        """None: the request may go where the decision says. Counts it with its tenant either way."""
        settings = self._pool.settings
        wait_s = self.queues.wait_s(decision.worker, now)
        contended = wait_s > settings.contention_ms / 1000 or decision.overflow
        shed = (
            self._beyond_share(decision, demand, wait_s, contended, now)
            or self._beyond_retries(demand, wait_s, contended, now)
            or self._too_late(decision, demand, wait_s, contended, now)
        )
        if shed is None:
            if settings.tenant_header:
                miss_tokens = decision.prompt_tokens - decision.cached_tokens
                self.shares.debit(demand.tenant, decision.worker.address, miss_tokens)
        elif demand.body and shed.retry_after_s is not None:
            self.retries.refused(demand.body, shed.retry_after_s, now)
        return shed

    def foresee(self, decision: Decision, demand: Demand, now: float) -> Shed | None:
        """What `admit` would say; nothing is counted or remembered."""
        twin = Admission(self._pool)
        twin.queues = self.queues
        twin.shares = self.shares.aside(demand.tenant)
        twin.retries = self.retries.aside(demand.tenant, demand.body)
        return twin.admit(decision, demand, now)

    def began(self, decision: Decision, now: float) -> Entry:
        """The request goes to its worker; call it for each one, before `Pool.begin`. For `ended`."""
        return self.queues.enter(decision.worker, decision.prompt_tokens - decision.cached_tokens, now)

    def ended(
        self, entry: Entry, demand: Demand | None, *, age_s: float, status: int, streamed: bool, now: float
    ) -> None:
        """An admitted request's stream is over, ``age_s`` after its decision. ``demand``: if read."""
        self.queues.leave(entry, now)
        if demand is not None and demand.body:
            self.retries.ended(demand.body, age_s=age_s, status=status, streamed=streamed, now=now)

    def _beyond_share(
        self, decision: Decision, demand: Demand, wait_s: float, contended: bool, now: float
    ) -> Shed | None:
        settings = self._pool.settings
        if not settings.tenant_header:
            return None
        worker = decision.worker
        overdrawn_s = self.shares.overdrawn_s(
            demand.tenant,
            demand.weight,
            decision.prompt_tokens - decision.cached_tokens,
            worker.address,
            1.0 / worker.speed.prior_s_per_token,
            sum([1.0 / each.speed.prior_s_per_token for each in self._pool.workers]),
            now,
        )
        if not overdrawn_s or not contended:
            return None
        quiet_s = wait_s - settings.contention_ms / 1000
        return Shed(
            429,
            "tenant",
            "You have used your share of this service, and others are waiting. Please retry later.",
            min(overdrawn_s, quiet_s) if quiet_s > 0 else overdrawn_s,
        )

    def _beyond_retries(self, demand: Demand, wait_s: float, contended: bool, now: float) -> Shed | None:
        settings = self._pool.settings
        if settings.retry_budget is None:
            return None
        retry = self.retries.recognize(demand.body, demand.declared_retry, now)
        within = self.retries.within_budget(demand.tenant, settings.retry_budget, retry is not None, now)
        if within or not contended:
            return None
        return Shed(
            429,
            "retry_budget",
            "Too many of your requests are retries, and others are waiting. Please retry later.",
            max(wait_s - settings.contention_ms / 1000, 0.0),
        )

    def _too_late(
        self, decision: Decision, demand: Demand, wait_s: float, contended: bool, now: float
    ) -> Shed | None:
        settings = self._pool.settings
        patience_s = None
        if settings.retry_budget is not None:
            patience_s = self.retries.waits_s(demand.body, now)
        bound = bound_of(demand, settings, patience_s)
        if bound is None or not (contended or bound.even_alone):
            return None
        miss_tokens = decision.prompt_tokens - decision.cached_tokens
        ttft_s = self.queues.ttft_s(decision.worker, decision.prompt_tokens, miss_tokens, now)
        late_s = ttft_s - bound.seconds
        if late_s <= 0.0:
            return None
        return Shed(
            429,
            bound.reason,
            f"The first token is expected after {ttft_s:.1f} s,"
            f" and this request's bound is {bound.seconds:.1f} s. Please retry later.",
            min(late_s, wait_s),
        )
