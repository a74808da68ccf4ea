"""Retries: which requests are repeats of one that failed, how many a tenant may make, how long clients wait.

A client that gave up and asks again sends the very same body, so a request is a retry if an identical one of
the same tenant has just failed: ended without an answer, with an error, or as a stream that nobody knows the
end of. Client libraries and proxies say it, too (`extproc.routing.demand`). A repeat of an answered request
is none, and neither is one beside a running twin: that is how people draw several samples.

What is done about them:

- Retries come out of a budget, as in Finagle: each request of a tenant adds ``ratio`` of a retry to it, a
  retry takes one, and some are free so that a client with few requests can retry at all.
- An identical request that was given up after ``t`` seconds told how long its client waits. To serve the
  retry would be wasted unless its first token is expected sooner than that.
- One that was refused with ``Retry-After`` and comes back no earlier is no retry.

Entries are bounded in number and age; a body is known by its hash only.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass

#: A request that failed longer ago than this is forgotten.
MEMORY_S = 60.0

#: A streamed answer, which may have been whole, counts as given up only if the repeat comes this soon after.
STREAM_REPEAT_S = 10.0

#: Given up earlier than this, it wasn't a timeout: somebody pressed a button.
MIN_PATIENCE_S = 1.0

#: Retries that a tenant may always make: saved up at most, and regained per second.
FREE_RETRIES = 10.0
FREE_RETRIES_PER_S = 1.0

#: Bodies and tenants known at a time.
MAX_BODIES = 20_000
MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True)
class Retry:
    """A request that is one. ``patience_s``: how long its client waits, if known."""

    patience_s: float | None = None


class _Past:
    __slots__ = ("ended_s", "failed", "patience_s", "streamed", "welcome_s")

    def __init__(self, now: float) -> None:
        self.ended_s = now
        self.failed = False
        self.streamed = False
        self.patience_s: float | None = None
        self.welcome_s: float | None = None  # refused: may come back then


class _Budget:
    __slots__ = ("retries", "seen_s")

    def __init__(self, now: float) -> None:
        self.retries = FREE_RETRIES
        self.seen_s = now


class RetryGuard:
    """What one pool remembers of past requests. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self._past: OrderedDict[int, _Past] = OrderedDict()
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()

    def aside(self, tenant: str, body: int) -> RetryGuard:
        """A copy to try a request of this tenant and body on: the original doesn't notice."""
        copied = RetryGuard()
        copied._past, copied._budgets = self._past.copy(), self._budgets.copy()
        if body in copied._past:
            copied._past[body] = deepcopy(copied._past[body])
        if tenant in copied._budgets:
            copied._budgets[tenant] = deepcopy(copied._budgets[tenant])
        return copied

    def recognize(self, body: int, declared: bool, now: float) -> Retry | None:
        """Whether a request with this body hash is a retry. ``declared``: it says so itself."""
        past = self._past.get(body)
        if past is None or now - past.ended_s > MEMORY_S:
            return Retry() if declared else None
        if past.welcome_s is not None:
            return None if now >= past.welcome_s else Retry(past.patience_s)
        given_up = past.failed and not (past.streamed and now - past.ended_s > STREAM_REPEAT_S)
        return Retry(past.patience_s) if declared or given_up else None

    def waits_s(self, body: int, now: float) -> float | None:
        """How long the client of this body is known to wait."""
        past = self._past.get(body)
        return None if past is None or now - past.ended_s > MEMORY_S else past.patience_s

    def within_budget(self, tenant: str, ratio: float, retry: bool, now: float) -> bool:
        """Count a request of ``tenant``; False for a retry that has no budget left."""
        budget = self._budgets.get(tenant)
        if budget is None:
            if len(self._budgets) >= MAX_TENANTS:
                self._budgets.popitem(last=False)
            budget = self._budgets[tenant] = _Budget(now)
        self._budgets.move_to_end(tenant)
        most = FREE_RETRIES * (1.0 + ratio)
        budget.retries = min(budget.retries + (now - budget.seen_s) * FREE_RETRIES_PER_S, most)
        budget.seen_s = now
        if not retry:
            budget.retries = min(budget.retries + ratio, most)
            return True
        if budget.retries < 1.0:
            return False
        budget.retries -= 1.0
        return True

    def refused(self, body: int, retry_after_s: float, now: float) -> None:
        """A request was answered with ``Retry-After``."""
        past = self._remember(body, now)
        past.welcome_s = now + 0.9 * retry_after_s  # clocks and networks

    def ended(self, body: int, *, age_s: float, status: int, streamed: bool, now: float) -> None:
        """An admitted request is over. ``status``: 0 if no response headers were seen."""
        if 200 <= status < 500 and not streamed:  # answered; the engine's refusals aren't for us to judge
            self._past.pop(body, None)
            return
        past = self._remember(body, now)
        past.failed = True
        past.welcome_s = None
        past.streamed = streamed and 200 <= status < 300
        given_up = status == 0 or past.streamed
        past.patience_s = age_s if given_up and age_s >= MIN_PATIENCE_S else None

    def _remember(self, body: int, now: float) -> _Past:
        past = self._past.get(body)
        if past is None:
            if len(self._past) >= MAX_BODIES:
                self._past.popitem(last=False)
            past = self._past[body] = _Past(now)
        past.ended_s = now
        self._past.move_to_end(body)
        return past
