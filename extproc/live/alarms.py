"""What an operator should see, while it lasts.

A rule is a pure function from what is known of a pool to findings, with its threshold, in one table: `RULES`.
An alarm is raised when its finding has been there without a break for ``after_s``, and stays until it has
been away for ``keep_s``, so that nothing flickers. Names are those of the paragraphs in docs/operations.md
and of the Prometheus alerts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Generic, TypeVar

from msgspec import Struct

from extproc.live.status import MAX_ALARMS
from extproc.live.window import NOTHING, Counts

F = TypeVar("F")

WARNING, CRITICAL = "warning", "critical"

#: So many findings of one rule in one pool are told one by one; more are told as one.
MAX_NAMED = 8

#: Of a share to be worth a word: at least so many requests in the window.
MIN_REQUESTS = 5

#: Of a prefix or of a comparison with the engines: at least so many.
MANY_REQUESTS = 20

#: A prefix is hot from this share of the pool's prompt tokens on.
HOT_SHARE = 0.05

#: A prefix is spread wide from so many workers on.
WIDE_WORKERS = 3

#: A tenant with less of its prompt tokens cached may break its caching.
LOW_HIT_RATIO = 0.3

#: Times to the first token that differ by less than this are alike.
ALIKE_TTFT_S = 0.3

#: A worker is strained if half of its requests wait longer than that, or it has this share of its limit.
STRAINED_LOAD = 0.5


class WorkerFacts(Struct, frozen=True):
    """One worker. ``out``: it gets no new prompts, in what state, for what cause.

    ``stale``: the last reading of its engine is too old.
    """

    address: str
    decisions: int = 0
    stale: bool = False
    out: bool = False
    state: str = "healthy"
    cause: str = ""


class PrefixFacts(Struct, frozen=True):
    """A hot prefix. ``lost``: requests with it that found nothing of it cached."""

    prefix: str
    tenant: str
    share: float
    requests: int
    lost: int
    workers: int


class TenantFacts(Struct, frozen=True):
    """A tenant, "" for all that name none. ``heads``, ``new_heads``: see `TenantCount`."""

    tenant: str
    share: float
    hit_ratio: float
    heads: int
    new_heads: int


class PoolFacts(Struct, frozen=True):
    """What the rules look at; counts are the window's. The engines' means: see `extproc.live.engines`.

    ``busiest_strained``: requests wait at the worker with the most decisions, or soon will.
    """

    name: str
    workers: Sequence[WorkerFacts] = ()
    panic: bool = False
    counts: Counts = NOTHING
    refused: Mapping[str, int] | None = None
    engine_hit_ratio: float | None = None
    engine_ttft_s: float | None = None
    engine_first_tokens: float = 0.0
    prefixes: Sequence[PrefixFacts] = ()
    busiest_strained: bool = False
    tenants: Sequence[TenantFacts] = ()


class RouterFacts(Struct, frozen=True):
    """What isn't any pool's. ``new_faults``: since the rules were last asked."""

    reload_refused: str | None = None
    new_faults: int = 0
    faults: int = 0
    last_fault: str = ""


class Finding(Struct, frozen=True):
    """What a rule has found. ``worker``: "" if it is the pool's."""

    text: str
    worker: str = ""


# --- rules -------------------------------------------------------------------------------------------


def no_workers(pool: PoolFacts, share: float) -> Iterable[Finding]:
    """Nobody is there to serve."""
    count = len(pool.workers)
    out = sum(worker.out for worker in pool.workers)
    if not count:
        yield Finding("the pool has no worker")
    elif out >= share * count:
        yield Finding(f"all {count} workers are out")


def panic(pool: PoolFacts, threshold: float) -> Iterable[Finding]:
    """As many are out as `max_ejected_share` allows, and more."""
    if pool.panic:
        out = sum(worker.out for worker in pool.workers)
        yield Finding(f"{out} of {len(pool.workers)} workers are out: all count as healthy")


def worker_ejected(pool: PoolFacts, threshold: float) -> Iterable[Finding]:
    """A worker gets no prompts."""
    out = [worker for worker in pool.workers if worker.out]
    if len(out) > MAX_NAMED:
        yield Finding(f"{len(out)} of {len(pool.workers)} workers are out, {_some(out)} among them")
        return
    for worker in out:
        cause = f" ({worker.cause})" if worker.cause and worker.cause != worker.state else ""
        yield Finding(f"{worker.address} is {worker.state.replace('_', ' ')}{cause}", worker.address)


def overflow(pool: PoolFacts, share: float) -> Iterable[Finding]:
    """Every worker is at its limit."""
    found = pool.counts.overflow
    if found >= MIN_REQUESTS and found > share * pool.counts.decisions:
        yield Finding(
            f"{found / pool.counts.decisions:.0%} of the requests came while every worker was at its limit"
        )


def low_hit_rate(pool: PoolFacts, share: float) -> Iterable[Finding]:
    """Prompts repeat and nobody has them, or the engines have less than the router thinks."""
    counts = pool.counts
    if counts.decisions < MANY_REQUESTS:
        return
    expected, told = counts.hit_ratio or 0.0, pool.engine_hit_ratio
    if told is not None and expected - told > share:
        yield Finding(f"the engines find {told:.0%} of the prompt tokens cached, expected are {expected:.0%}")
    elif counts.lost_tokens > share * counts.prompt_tokens:
        lost = counts.lost_tokens / counts.prompt_tokens
        yield Finding(f"{lost:.0%} of the prompt tokens have a known prefix, and found nothing cached")


def prediction_off(pool: PoolFacts, ratio: float) -> Iterable[Finding]:
    """First tokens come much later, or sooner, than predicted."""
    told, counts = pool.engine_ttft_s, pool.counts
    if told is None or min(pool.engine_first_tokens, counts.decisions) < MANY_REQUESTS:
        return
    expected = counts.predicted_s / counts.decisions
    low, high = sorted((told, expected))
    if high > ratio * low and high - low > ALIKE_TTFT_S:
        yield Finding(
            f"first tokens come after {told * 1000:,.0f} ms on average,"
            f" predicted are {expected * 1000:,.0f} ms"
        )


def imbalance(pool: PoolFacts, ratio: float) -> Iterable[Finding]:
    """One worker has far more than its part, more than chance would give it, and it shows.

    While nobody waits for it, a hot prefix on one worker is what affinity wants.
    """
    if len(pool.workers) < 2 or not pool.busiest_strained:
        return
    busiest = max(pool.workers, key=lambda worker: worker.decisions)
    mean = sum(worker.decisions for worker in pool.workers) / len(pool.workers)
    most = busiest.decisions
    if most >= MANY_REQUESTS and most - 3.0 * sqrt(most) > ratio * mean:
        yield Finding(
            f"{busiest.address} gets {most / mean:.1f} times the mean of the requests", busiest.address
        )


def signals_stale(pool: PoolFacts, threshold: float) -> Iterable[Finding]:
    """Engines aren't heard of, though they serve."""
    stale = [worker for worker in pool.workers if worker.stale and not worker.out]
    if stale:
        yield Finding(
            f"no recent reading of the metrics of {_some(stale)}", stale[0].address if len(stale) == 1 else ""
        )


def picks_moved(pool: PoolFacts, share: float) -> Iterable[Finding]:
    """Envoy uses other workers than those picked."""
    moved = pool.counts.moved
    if moved >= MIN_REQUESTS and moved > share * pool.counts.decisions:
        part = moved / max(moved, pool.counts.decisions)
        yield Finding(f"Envoy didn't use {part:.0%} of the picks (retries, or it ignores them)")


def shedding(pool: PoolFacts, share: float) -> Iterable[Finding]:
    """Requests are refused."""
    refused = pool.counts.refused
    asked = refused + pool.counts.decisions
    if refused >= MIN_REQUESTS and refused > share * asked:
        reasons = sorted(pool.refused or {}, key=(pool.refused or {}).__getitem__, reverse=True)
        yield Finding(f"{refused / asked:.0%} of the requests are refused: {', '.join(reasons)}")


def prefix_scattered(pool: PoolFacts, share: float) -> Iterable[Finding]:
    """A hot prefix goes to many workers and none has it; or long system prompts are new each time."""
    for prefix in pool.prefixes:
        if (
            prefix.share >= HOT_SHARE
            and prefix.requests >= MANY_REQUESTS
            and prefix.workers >= WIDE_WORKERS
            and prefix.lost > share * prefix.requests
        ):
            who = f" of tenant {prefix.tenant}" if prefix.tenant else ""
            yield Finding(
                f"prefix {prefix.prefix}{who}: {prefix.lost / prefix.requests:.0%} of its requests found"
                f" nothing of it cached, on {prefix.workers} workers"
            )
            return  # the hottest; one paragraph explains them all
    for tenant in pool.tenants:
        if (
            tenant.share >= HOT_SHARE
            and tenant.heads >= MANY_REQUESTS
            and tenant.new_heads > share * tenant.heads
            and tenant.hit_ratio < LOW_HIT_RATIO
        ):
            who = f" of tenant {tenant.tenant}" if tenant.tenant else ""
            yield Finding(
                f"{tenant.new_heads / tenant.heads:.0%} of the system prompts{who} are new,"
                f" {tenant.hit_ratio:.0%} cached: do they change with each request?"
            )
            return  # the one that costs most


def reload_refused(router: RouterFacts, threshold: float) -> Iterable[Finding]:
    """A broken configuration waits to be mended."""
    if router.reload_refused is not None:
        yield Finding(f"a new configuration is refused, the old one in force: {router.reload_refused}")


def internal_errors(router: RouterFacts, threshold: float) -> Iterable[Finding]:
    """Faults of ours."""
    if router.new_faults:
        yield Finding(f"{router.faults} faults of the router, the last a {router.last_fault}; see its log")


@dataclass(frozen=True, slots=True)
class Rule(Generic[F]):
    """One line of a table. ``after_s``, ``keep_s``: see the top of this module."""

    name: str
    severity: str
    threshold: float
    after_s: float
    keep_s: float
    check: Callable[[F, float], Iterable[Finding]]


#: Of each pool. What takes a while to mean something has a minute.
RULES: tuple[Rule[PoolFacts], ...] = (
    Rule("NoWorkers", CRITICAL, 1.0, 0.0, 5.0, no_workers),
    Rule("Panic", CRITICAL, 0.0, 0.0, 10.0, panic),
    Rule("WorkerEjected", WARNING, 0.0, 0.0, 10.0, worker_ejected),
    Rule("Overflow", WARNING, 0.01, 0.0, 20.0, overflow),
    Rule("LowHitRate", WARNING, 0.25, 60.0, 30.0, low_hit_rate),
    Rule("PredictionOff", WARNING, 3.0, 60.0, 30.0, prediction_off),
    Rule("Imbalance", WARNING, 2.0, 60.0, 30.0, imbalance),
    Rule("SignalsStale", WARNING, 0.0, 15.0, 10.0, signals_stale),
    Rule("PicksMoved", WARNING, 0.05, 5.0, 20.0, picks_moved),
    Rule("Shedding", WARNING, 0.01, 0.0, 20.0, shedding),
    Rule("PrefixScattered", WARNING, 0.5, 60.0, 30.0, prefix_scattered),
)

#: Of the router itself.
ROUTER_RULES: tuple[Rule[RouterFacts], ...] = (
    Rule("ReloadRefused", WARNING, 0.0, 0.0, 0.0, reload_refused),
    Rule("InternalErrors", WARNING, 0.0, 0.0, 300.0, internal_errors),
)


@dataclass(slots=True)
class Standing:
    """A finding that was there lately. ``since_s``: without a break; ``seen_s``: last."""

    name: str
    severity: str
    pool: str
    finding: Finding
    since_s: float
    seen_s: float
    raised: bool = False


class Alarms:
    """Those of one router."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str, str], Standing] = {}

    def update(self, pools: Iterable[PoolFacts], router: RouterFacts, now: float) -> None:
        """Ask all rules."""
        seen = set()
        for rule, pool, finding in _findings(pools, router):
            key = (rule.name, pool, finding.worker)
            seen.add(key)
            standing = self._standing.get(key)
            if standing is None:
                standing = Standing(rule.name, rule.severity, pool, finding, now, now)
                self._standing[key] = standing
            standing.finding, standing.seen_s = finding, now
            standing.raised = standing.raised or now - standing.since_s >= rule.after_s
        for key, standing in list(self._standing.items()):
            if key not in seen and (not standing.raised or now - standing.seen_s > _KEEP_S[standing.name]):
                del self._standing[key]

    @property
    def raised(self) -> list[Standing]:
        """Critical ones first, then by age, the oldest first."""
        found = [standing for standing in self._standing.values() if standing.raised]
        return sorted(found, key=lambda each: (each.severity != CRITICAL, each.since_s))[:MAX_ALARMS]


_KEEP_S = {r.name: r.keep_s for r in RULES} | {r.name: r.keep_s for r in ROUTER_RULES}


def _findings(
    pools: Iterable[PoolFacts], router: RouterFacts
) -> Iterator[tuple[Rule[PoolFacts] | Rule[RouterFacts], str, Finding]]:
    for pool in pools:
        for rule in RULES:
            for finding in rule.check(pool, rule.threshold):
                yield rule, pool.name, finding
    for router_rule in ROUTER_RULES:
        for finding in router_rule.check(router, router_rule.threshold):
            yield router_rule, "", finding


def _some(workers: Sequence[WorkerFacts]) -> str:
    names = [worker.address for worker in workers]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
