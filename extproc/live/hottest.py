"""Who and what fills the caches of late: hot prefixes, and tenants, by their prompt tokens.

Tables of exact counts, a new one every `GENERATION_S`, of which the last `GENERATIONS` count. A table takes
the first `MAX_KEYS` keys that come along and no others. A prefix of a share p of the requests is missed with
probability (1 - p) ** MAX_KEYS, which is one in 30,000 at 1 %; one that gets hot while a table is full waits
for the next. So the cost of a decision and the memory are bounded whatever the traffic, nothing has to be
evicted, and what is told was really counted.

**Seen before.** To tell prompts that are new from prompts whose cache was lost, keys are remembered for
longer: two sets that take turns, each `SEEN_S` long, with at most `MAX_SEEN` keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import nlargest

#: Of the live figures: 10 to 15 seconds count.
GENERATION_S = 5.0
GENERATIONS = 3
MAX_KEYS = 1024

SEEN_S = 300.0
MAX_SEEN = 8192


class Entry:
    """One prefix in one table, or in several added up. ``tenant``: "" for none or several.

    ``lost``: requests that found nothing of it cached.
    """

    __slots__ = ("cached_tokens", "latest_tokens", "lost", "prompt_tokens", "requests", "spread", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.lost = 0
        self.latest_tokens = 0  # of the latest prompt
        self.spread: dict[str, int] = {}  # worker -> requests

    def count(self, tokens: int, cached: int, worker: str, tenant: str) -> None:
        """One more request."""
        self.requests += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        if not cached:
            self.lost += 1
        self.latest_tokens = tokens
        spread = self.spread
        spread[worker] = spread.get(worker, 0) + 1
        if tenant != self.tenant:
            self.tenant = ""

    def add(self, later: Entry) -> None:
        """Those of a later table, too."""
        if later.tenant != self.tenant:
            self.tenant = ""
        self.requests += later.requests
        self.prompt_tokens += later.prompt_tokens
        self.cached_tokens += later.cached_tokens
        self.lost += later.lost
        self.latest_tokens = later.latest_tokens
        for worker, requests in later.spread.items():
            self.spread[worker] = self.spread.get(worker, 0) + requests


class TenantCount:
    """One tenant in one table, or in several added up.

    ``heads``: requests with a long system prompt; ``new_heads``: with one that wasn't seen before.
    """

    __slots__ = ("cached_tokens", "heads", "new_heads", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.heads = 0
        self.new_heads = 0

    def count(self, tokens: int, cached: int, head: bool, again: bool) -> None:
        """One more request."""
        self.requests += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        if head:
            self.heads += 1
            if not again:
                self.new_heads += 1

    def add(self, other: TenantCount) -> None:
        """Those of another table, too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.heads += other.heads
        self.new_heads += other.new_heads


@dataclass(slots=True)
class Generation:
    """One table. ``total_tokens``: the pool's prompt tokens since its start, when the table began."""

    began_s: float
    total_tokens: int
    prefixes: dict[int, Entry] = field(default_factory=dict)
    tenants: dict[str, TenantCount] = field(default_factory=dict)


class Hottest:
    """One pool's tables."""

    def __init__(self, now: float) -> None:
        self._generations = deque([Generation(now, 0)], maxlen=GENERATIONS)
        self._now = self._generations[-1]
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()
        self._seen_since_s = now

    def count(self, key: int, tokens: int, cached: int, worker: str, tenant: str, head: bool = False) -> bool:
        """Take note of a decision; returns whether the prefix had been seen before.

        ``head``: the key stands for a long system prompt.
        """
        table = self._now
        entry = table.prefixes.get(key)
        again = True
        if entry is None:
            again = self._meet(key)
            if len(table.prefixes) < MAX_KEYS:
                entry = table.prefixes[key] = Entry(tenant)
        if entry is not None:
            entry.count(tokens, cached, worker, tenant)
        account = table.tenants.get(tenant)
        if account is None:
            if len(table.tenants) >= MAX_KEYS:
                return again
            account = table.tenants[tenant] = TenantCount()
        account.count(tokens, cached, head, again)
        return again

    def _meet(self, key: int) -> bool:
        if key in self._seen:
            return True
        if len(self._seen) < MAX_SEEN:
            self._seen.add(key)
        return key in self._seen_before

    def tick(self, now: float, total_tokens: int) -> bool:
        """Time passes; True if a table ended. ``total_tokens``: the pool's, since its start."""
        if now - self._seen_since_s >= SEEN_S:
            self._seen_before, self._seen, self._seen_since_s = self._seen, set(), now
        if now - self._now.began_s < GENERATION_S:
            return False
        self._now = Generation(now, total_tokens)
        self._generations.append(self._now)
        return True

    def span(self, now: float, total_tokens: int) -> tuple[float, int]:
        """Of the time that counts: how long it is, in seconds, and the pool's prompt tokens in it."""
        oldest = self._generations[0]
        return max(now - oldest.began_s, 1.0), total_tokens - oldest.total_tokens

    def prefixes(self, limit: int) -> list[tuple[int, Entry]]:
        """The hottest, first first: of the hottest in each table, those hottest in all."""
        tables = [generation.prefixes for generation in self._generations]
        keys = {
            key
            for table in tables
            for key, _ in nlargest(limit, table.items(), key=lambda item: item[1].prompt_tokens)
        }
        found = [(key, _sum(key, tables)) for key in keys]
        return nlargest(limit, found, key=lambda item: item[1].prompt_tokens)

    def hot(self, share: float) -> list[tuple[int, Entry]]:
        """The same of those that had more than a share of the tokens in the last whole table: cheaper."""
        if len(self._generations) < 2:
            return []
        whole = self._generations[-2]
        least = share * (self._now.total_tokens - whole.total_tokens)
        keys = [key for key, entry in whole.prefixes.items() if entry.prompt_tokens > least]
        tables = [generation.prefixes for generation in self._generations]
        found = [(key, _sum(key, tables)) for key in keys]
        return sorted(found, key=lambda item: -item[1].prompt_tokens)

    def tenants(self, limit: int) -> list[tuple[str, TenantCount]]:
        """Those with the most uncached prompt tokens, first first; "" is all that name none."""
        sums: dict[str, TenantCount] = {}
        for generation in self._generations:
            for tenant, account in generation.tenants.items():
                sums.setdefault(tenant, TenantCount()).add(account)
        return nlargest(limit, sums.items(), key=lambda item: item[1].prompt_tokens - item[1].cached_tokens)


def _sum(key: int, tables: list[dict[int, Entry]]) -> Entry:
    found = [table[key] for table in tables if key in table]
    total = Entry(found[0].tenant)
    for entry in found:
        total.add(entry)
    return total


def short_hash(key: int | None) -> str:
    """What a prefix key is shown as: its first 8 hexadecimal digits; "" for none."""
    return "" if key is None else f"{key >> 32:08x}"
