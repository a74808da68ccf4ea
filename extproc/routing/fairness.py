"""Weighted fair shares of prefill work between tenants, without a queue.

The router holds no request back, so it can't serve tenants in turn as fair queueing does; it can refuse one.
Each tenant has an account of prefill tokens (a deficit counter, as in Shreedhar and Varghese's deficit round
robin, 1996). It is refilled at the tenant's weighted share of what the pool can prefill, where the shares are
those of the tenants seen lately; every admitted request is debited with the tokens that it will compute. Who
is in the black is never refused on account of others. Who is in the red has had its share and may go on only
while nobody has to wait for it: so no capacity is lost, and that surplus costs nothing later, as virtual time
has it in start-time fair queueing (Goyal, Vin and Cheng 1996).

Refused requests cost nothing, and a tenant alone has the pool for itself.
"""

from __future__ import annotations

from collections import OrderedDict

#: What a tenant may save up, in seconds of its share; the larger, the longer a new flood is felt by others.
SAVED_S = 2.0

#: A tenant counts in the shares for so long after its last request.
ACTIVE_S = 60.0

#: Tenants known at a time; beyond it the one that has been silent the longest is forgotten.
MAX_TENANTS = 10_000


class _Account:
    __slots__ = ("seen_s", "tokens", "weight")

    def __init__(self, weight: float, tokens: float, now: float) -> None:
        self.weight = weight
        self.tokens = tokens  # prefill tokens it may still have; negative: in the red
        self.seen_s = now


class FairShares:
    """The tenants' accounts in one pool. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()  # the longest silent first
        self._weights = 0.0

    def __len__(self) -> int:
        return len(self._accounts)

    def overdrawn_s(self, tenant: str, weight: float, capacity_tokens_per_s: float, now: float) -> float:
        """Note a request of ``tenant``; seconds until it is in the black again, 0 if it is.

        ``capacity_tokens_per_s``: what all workers together prefill.
        """
        self._forget_silent(now)
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= MAX_TENANTS:
                self._drop(next(iter(self._accounts)))
            account = self._accounts[tenant] = _Account(weight, 0.0, now)
            self._weights += weight
            account.tokens = self._rate(account, capacity_tokens_per_s) * SAVED_S
        elif account.weight != weight:
            self._weights += weight - account.weight
            account.weight = weight
        rate = self._rate(account, capacity_tokens_per_s)
        account.tokens = min(account.tokens + rate * (now - account.seen_s), rate * SAVED_S)
        account.seen_s = now
        self._accounts.move_to_end(tenant)
        if account.tokens > 0.0 or len(self._accounts) == 1:
            return 0.0
        return max(-account.tokens / rate, 1e-3)

    def debit(self, tenant: str, tokens: float) -> None:
        """An admitted request will compute so many tokens. What is taken while in the red is free."""
        account = self._accounts.get(tenant)
        if account is not None and account.tokens > 0.0:
            account.tokens -= tokens

    def _rate(self, account: _Account, capacity_tokens_per_s: float) -> float:
        return capacity_tokens_per_s * account.weight / self._weights

    def _forget_silent(self, now: float) -> None:
        while self._accounts:
            tenant = next(iter(self._accounts))
            if self._accounts[tenant].seen_s > now - ACTIVE_S:
                return
            self._drop(tenant)

    def _drop(self, tenant: str) -> None:
        self._weights -= self._accounts.pop(tenant).weight
        if not self._accounts:
            self._weights = 0.0  # and with it what rounding left
