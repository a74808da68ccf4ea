"""Weighted fair shares of prefill work between tenants, without a queue.

The router holds no request back, so it can't serve tenants in turn as fair queueing does; it can refuse one.
Two things decide, both in prefill tokens:

- What a tenant asks for, over `ASKED_S`. Who asks for no more than its weighted share of what the pool
  prefills is never refused on account of others. The shares are those of the tenants seen lately.
- Who asks for more has an account at each worker, for it is a worker's time that is contended for (a deficit
  counter, as in Shreedhar and Varghese's deficit round robin, 1996). It is refilled at `GUARANTEED` of the
  share, and debited with what admitted requests will compute. In the black, a request is let in; in the
  red, only while nobody has to wait there. So no capacity is lost, and that surplus costs nothing later, as
  virtual time has it in start-time fair queueing (Goyal, Vin and Cheng 1996).

The guarantee is less than the whole share because a worker that is promised away to the last token always has
a queue, in which the small tenants would wait, too. A tenant alone has the pool for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from math import exp

#: Time over which it is judged how much a tenant asks for.
ASKED_S = 10.0

#: Part of its share that a tenant gets whatever the queue.
GUARANTEED = 0.25

#: What a tenant may save up, in seconds of that; the larger, the longer a new flood is felt by others.
SAVED_S = 1.0

#: A tenant counts in the shares for so long after its last request; its account at a worker, which may have
#: left for good, is kept for so long after the last one there.
ACTIVE_S = 60.0

#: Tenants known at a time; beyond it the one that has been silent the longest is forgotten.
MAX_TENANTS = 10_000


class _Tenant:
    __slots__ = ("accounts", "asked_tokens", "seen_s", "weight")

    def __init__(self, weight: float, now: float) -> None:
        self.weight = weight
        self.seen_s = now
        self.asked_tokens = 0.0  # decaying
        self.accounts: dict[str, _Account] = {}  # by worker; the longest unused first

    def account(self, worker: str, rate: float, now: float) -> _Account:
        """Its account there, refilled at ``rate`` tokens a second; a new one is full."""
        accounts = self.accounts
        account = accounts.pop(worker, None)
        if account is None:
            while accounts and accounts[oldest := next(iter(accounts))].refilled_s < now - ACTIVE_S:
                del accounts[oldest]
            account = _Account(rate * SAVED_S, now)
        else:
            account.tokens = min(account.tokens + rate * (now - account.refilled_s), rate * SAVED_S)
            account.refilled_s = now
        accounts[worker] = account
        return account


class _Account:
    __slots__ = ("refilled_s", "tokens")

    def __init__(self, tokens: float, now: float) -> None:
        self.tokens = tokens  # prefill tokens it may still have; negative: in the red
        self.refilled_s = now


class FairShares:
    """The tenants' accounts in one pool. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the longest silent first
        self._weights = 0.0

    def __len__(self) -> int:
        return len(self._tenants)

    def aside(self, name: str) -> FairShares:
        """A copy to try a request of this tenant on: the original doesn't notice."""
        copied = FairShares()
        copied._tenants = self._tenants.copy()
        copied._weights = self._weights
        if name in copied._tenants:
            copied._tenants[name] = deepcopy(copied._tenants[name])
        return copied

    def overdrawn_s(
        self,
        name: str,
        weight: float,
        tokens: float,
        worker: str,
        worker_tokens_per_s: float,
        pool_tokens_per_s: float,
        now: float,
    ) -> float:
        """Note a request of ``tokens`` to compute at ``worker``; 0 if its tenant is within its rights.

        Otherwise the seconds until it is in the black there again. The rates are what the worker and the
        whole pool prefill.
        """
        self._forget_silent(now)
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                self._drop(next(iter(self._tenants)))
            tenant = self._tenants[name] = _Tenant(weight, now)
            self._weights += weight
        elif tenant.weight != weight:
            self._weights += weight - tenant.weight
            tenant.weight = weight
        share = weight / self._weights
        tenant.asked_tokens = tenant.asked_tokens * exp((tenant.seen_s - now) / ASKED_S) + tokens
        tenant.seen_s = now
        self._tenants.move_to_end(name)
        rate = GUARANTEED * worker_tokens_per_s * share
        account = tenant.account(worker, rate, now)
        if (
            account.tokens > 0.0
            or len(self._tenants) == 1
            or tenant.asked_tokens <= share * pool_tokens_per_s * ASKED_S
        ):
            return 0.0
        return max(-account.tokens / rate, 1e-3)

    def debit(self, name: str, worker: str, tokens: float) -> None:
        """An admitted request will compute so many tokens there. What is taken in the red is free."""
        tenant = self._tenants.get(name)
        account = tenant.accounts.get(worker) if tenant else None
        if account is not None and account.tokens > 0.0:
            account.tokens -= tokens

    def _forget_silent(self, now: float) -> None:
        while self._tenants:
            name = next(iter(self._tenants))
            if self._tenants[name].seen_s > now - ACTIVE_S:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._weights -= self._tenants.pop(name).weight
        if not self._tenants:
            self._weights = 0.0  # and with it what rounding left
