"""A running router: whether it has this fleet, hears its engines, and believes what is true."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from extproc.doctor.check import Check
from extproc.doctor.finding import Finding, Place, Severity
from extproc.doctor.fleet import Fleet, RouterFacts
from extproc.engine.state import STALE_INTERVALS
from extproc.fleet.config import PoolConfig
from extproc.fleet.dns import names
from extproc.routing.health import State

#: So long after its start a router may not have heard of every engine.
STARTING_S = 15.0

#: Shares of the decisions from which on something is worth a word, and how many there must be.
UNROUTED_SHARE, UNREADABLE_SHARE, MOVED_SHARE, OVERFLOW_SHARE = 0.01, 0.1, 0.05, 0.01
LEAST_REQUESTS = 20

#: By how much the router's hit rate may be above the engines' own, over how many prompt tokens.
HIT_GAP, LEAST_TOKENS = 0.15, 50_000

#: Prefixes that came so often of late are the working set; it is judged where fewer hits than this are seen.
LEAST_REPEATS, LOW_HITS = 2.0, 0.5

#: They speak of the same requests if their prompt tokens differ by less than this factor.
SAME_TRAFFIC = 2.0


def _router(fleet: Fleet) -> list[RouterFacts]:
    """The router, if it told something."""
    return [fleet.router] if fleet.router is not None and not fleet.router.error else []


def _pools(fleet: Fleet) -> Iterable[PoolConfig]:
    """Pools that a router told of."""
    for router in _router(fleet):
        told = router.by("extproc_inflight_requests", "pool")
        yield from (pool for name, pool in fleet.setup.config.pools.items() if name in told)


def _place(router: RouterFacts) -> tuple[Place, ...]:
    return (Place(url=router.url),)


def _workers(pool: str, addresses: Iterable[str]) -> tuple[Place, ...]:
    return tuple(Place(pool=pool, worker=address) for address in addresses)


def _unreachable(router: RouterFacts, fleet: Fleet) -> Iterator[Finding]:
    if router.error:
        yield Finding(
            Severity.ERROR,
            _place(router),
            router.error,
            "Without a router requests go to Envoy's fallback policy, and nothing is seen of what it does.",
            "extproc serve --metrics 127.0.0.1:9090, and --server with that address",
            router.error,
        )


def _exposed(router: RouterFacts, fleet: Fleet) -> Iterator[Finding]:
    if router.exposed:
        yield Finding(
            Severity.NOTE,
            _place(router),
            f"answers at {router.exposed}, too",
            "Other machines can read what the fleet looks like and how busy it is.",
            "--metrics 127.0.0.1:PORT, or a firewall that lets Prometheus through only",
            router.exposed,
        )


def _same_fleet(router: RouterFacts, fleet: Fleet) -> Iterator[Finding]:
    pools = fleet.setup.config.pools
    if fleet.unresolved or names(fleet.setup.config):
        return
    theirs = {
        (labels["pool"], labels["worker"])
        for labels, _ in router.samples.get("extproc_inflight_requests", ())
        if "worker" in labels
    }
    ours = {(pool.name, endpoint.address) for pool in pools.values() for endpoint in pool.endpoints}
    missing, more = sorted(ours - theirs), sorted(theirs - ours)
    if missing or more:
        lacks = f"lacks {_list(missing)}" if missing else ""
        has = f"has {_list(more)}" if more else ""
        yield Finding(
            Severity.WARNING,
            _place(router),
            f"its workers aren't those of {fleet.setup.config.source}:"
            f" {' and '.join(filter(None, (lacks, has)))}",
            "It runs on another file, or a later version of this one was refused.",
            "give both the same file; extproc_config_reloads_total{result='refused'} and the log tell of"
            " refusals",
            {"missing": [list(pair) for pair in missing], "more": [list(pair) for pair in more]},
        )


def _list(pairs: list[tuple[str, str]]) -> str:
    shown = ", ".join(f"{worker} of {pool}" for pool, worker in pairs[:4])
    return shown if len(pairs) <= 4 else f"{shown} and {len(pairs) - 4} more"


def _faults(router: RouterFacts, fleet: Fleet) -> Iterator[Finding]:
    errors = router.total("extproc_internal_errors_total")
    if errors:
        yield Finding(
            Severity.ERROR,
            _place(router),
            f"{errors:,.0f} internal errors",
            "Faults of the router itself; the requests went on unsteered.",
            "report it, with the log's lines at level error",
            errors,
        )
    refused = router.total("extproc_config_reloads_total", result="refused")
    in_force = router.samples.get("extproc_config_last_reload_successful")
    if refused and not (in_force and in_force[0][1]):  # since then a good one may have come
        yield Finding(
            Severity.WARNING,
            _place(router),
            f"{refused:,.0f} new configurations refused",
            "The router goes on with the last good one, and Envoy may have taken the new one.",
            "extproc doctor on that file, or the router's log, tells what is wrong with it",
            refused,
        )


def _unrouted(router: RouterFacts, fleet: Fleet) -> Iterator[Finding]:
    decisions = router.total("extproc_decisions_total")
    reasons = router.by("extproc_unrouted_total", "reason")
    unrouted = sum(reasons.values())
    if unrouted >= LEAST_REQUESTS and unrouted > UNROUTED_SHARE * (decisions + unrouted):
        worst = max(reasons, key=lambda reason: reasons[reason])
        yield Finding(
            Severity.WARNING,
            _place(router),
            f"{unrouted:,.0f} of {decisions + unrouted:,.0f} requests left to Envoy, most of them: {worst}",
            "They went to the least busy worker, wherever their prompt is cached.",
            "ext_proc disabled on routes that aren't for generation, and a pool for those that are",
            reasons,
        )


def _health(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    if router.total("extproc_panic", pool=pool.name):
        yield Finding(
            Severity.ERROR,
            _place(router),
            f"pool {pool.name} is in panic",
            "So many workers are out that all count as healthy, the failing ones too.",
            "look at its workers; max_ejected_share is the bound",
            pool.name,
        )
    silent = {
        worker.address for worker in fleet.of(pool) if worker.silent or worker.health not in (None, 200)
    }
    for state in (State.EJECTED, State.NOT_READY):
        found = router.by("extproc_worker_state", "worker", pool=pool.name, state=str(state))
        out = sorted(address for address, value in found.items() if value and address not in silent)
        if out:
            yield Finding(
                Severity.WARNING,
                _workers(pool.name, out),
                f"is {state}",
                "It gets no prompts, or none but its fair share of a panic.",
                "the router's log tells the cause (extproc_ejections_total counts them); docs/health.md",
                str(state),
            )


def _stale(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    if pool.settings.scrape_interval_s == 0:
        return
    told = {worker.address for worker in fleet.of(pool) if worker.report is None}
    bound_s = STALE_INTERVALS * pool.settings.scrape_interval_s
    starting = router.age_s is not None and router.age_s < STARTING_S
    ages = router.by("extproc_engine_signal_age_seconds", "worker", pool=pool.name)
    never = [a for a, age_s in ages.items() if math.isinf(age_s) and a not in told and not starting]
    old = {a: age_s for a, age_s in ages.items() if bound_s < age_s < math.inf and a not in told}
    for addresses, found in (
        (never, "never read"),
        (sorted(old), f"up to {max(old.values(), default=0.0):.0f} s old"),
    ):
        if addresses:
            yield Finding(
                Severity.WARNING,
                _workers(pool.name, addresses),
                f"its metrics, as the router has them: {found}",
                "After a restart of the engine prompts keep going to a cache that is empty.",
                "extproc_engine_scrape_failures_total tells why; the router needs the way to the workers that"
                " this machine has",
                found,
            )


def _unreadable(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    decisions = router.total("extproc_decisions_total", pool=pool.name)
    reasons = router.by("extproc_unreadable_total", "reason", pool=pool.name)
    unreadable = sum(reasons.values())
    if unreadable >= LEAST_REQUESTS and unreadable > UNREADABLE_SHARE * decisions:
        worst = max(reasons, key=lambda reason: reasons[reason])
        yield Finding(
            Severity.NOTE,
            _place(router),
            f"{unreadable:,.0f} of {decisions:,.0f} requests of pool {pool.name} without a prompt that"
            f" could be read, most of them: {worst}",
            "They went by load alone.",
            "ext_proc disabled on routes that carry no prompts; no content-encoding from clients",
            reasons,
        )


def _moved(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    decisions = router.total("extproc_decisions_total", pool=pool.name)
    moved = router.total("extproc_moved_total", pool=pool.name)
    if moved >= LEAST_REQUESTS and moved > MOVED_SHARE * decisions:
        yield Finding(
            Severity.WARNING,
            _place(router),
            f"{moved:,.0f} of {decisions:,.0f} picks of pool {pool.name} were not used",
            "Envoy sent these requests elsewhere, or nowhere: picks that it can't reach, retries, or a"
            " pick that doesn't steer.",
            "the router's log names pick and worker (a pick was not used); compare the addresses",
            moved,
        )


def _overflow(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    decisions = router.total("extproc_decisions_total", pool=pool.name)
    overflow = router.total("extproc_overflow_total", pool=pool.name)
    if overflow >= LEAST_REQUESTS and overflow > OVERFLOW_SHARE * decisions:
        yield Finding(
            Severity.NOTE,
            _place(router),
            f"{overflow:,.0f} of {decisions:,.0f} decisions of pool {pool.name} with every worker at its"
            " limit",
            "Affinity counts for little then, and queues grow inside the engines.",
            "more workers; a higher max_inflight, if the engines run so many at once; or shed_after_ms",
            overflow,
        )


def _hit_gap(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    reports = [worker.report for worker in fleet.of(pool) if worker.report is not None]
    queries = sum(report.prefix_query_tokens or 0.0 for report in reports)
    hits = sum(report.prefix_hit_tokens or 0.0 for report in reports)
    prompts = router.total("extproc_prompt_tokens_total", pool=pool.name)
    cached = router.total("extproc_cached_tokens_total", pool=pool.name)
    if min(queries, prompts) < LEAST_TOKENS or not 1 / SAME_TRAFFIC < queries / prompts < SAME_TRAFFIC:
        return
    believed, seen = cached / prompts, hits / queries
    if believed - seen > HIT_GAP and _thrash(pool, fleet) is None:  # or else that is why
        yield Finding(
            Severity.WARNING,
            _place(router),
            f"pool {pool.name}: the router believed {believed:.0%} of the prompt tokens cached, the"
            f" engines found {seen:.0%}",
            "Picks go to caches that no longer hold the prompt: they are smaller than believed, shared"
            " with other traffic, emptied, or the engine renders prompts in a way of its own.",
            "compare cache_tokens, content_format and chars_per_token of the pool with the engines; look for"
            " clients that go past the router; a KV cache that is larger",
            {"believed": round(believed, 4), "seen": round(seen, 4)},
        )


@dataclass(frozen=True, slots=True)
class _Thrash:
    """What comes again and again is larger than all caches together. Tokens; ``hits``: share found."""

    prefixes: int
    wanted: int
    held: int
    hits: float


def _thrash(pool: PoolConfig, fleet: Fleet) -> _Thrash | None:
    (router,) = _router(fleet)
    if router.status is None:
        return None
    for told in router.status.pools:
        if told.name != pool.name or not all(worker.cache_tokens for worker in told.workers):
            continue
        again = [p for p in told.prefixes if p.requests_per_s * router.status.window_s >= LEAST_REPEATS]
        wanted, held = sum(p.tokens for p in again), sum(w.cache_tokens for w in told.workers)
        hits = told.hit_ratio if told.engine_hit_ratio is None else told.engine_hit_ratio
        if wanted > held and hits is not None and hits < LOW_HITS:
            return _Thrash(len(again), wanted, held, hits)
    return None


def _working_set(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    (router,) = _router(fleet)
    thrash = _thrash(pool, fleet)
    if thrash is not None:
        yield Finding(
            Severity.WARNING,
            _place(router),
            f"pool {pool.name}: the {thrash.prefixes} hottest prompts that come again have"
            f" {thrash.wanted:,} tokens, the KV caches of all workers hold {thrash.held:,};"
            f" {thrash.hits:.0%} of the prompt tokens are found",
            "What is asked again and again doesn't fit, so each prompt evicts one that comes back soon.",
            "larger KV caches (--gpu-memory-utilization, --kv-cache-dtype fp8), more workers, or shorter"
            " prompts (extproc lint tells which break their own caching)",
            {"working_set_tokens": thrash.wanted, "cache_tokens": thrash.held},
        )


CHECKS = (
    Check("router", "a router that can't be asked", lambda f: [f.router] if f.router else [], _unreachable),
    Check("router-workers", "a router that runs on another file", _router, _same_fleet),
    Check("router-faults", "internal errors, refused configurations", _router, _faults),
    Check("unrouted", "more than 1 % of requests left to Envoy", _router, _unrouted),
    Check("workers-out", "workers that are ejected or not ready, pools in panic", _pools, _health),
    Check("stale-metrics", "engines' metrics older than three intervals", _pools, _stale),
    Check("hit-rate", "hit rates of the engines well under the router's estimate", _pools, _hit_gap),
    Check("working-set", "hot prefixes that don't fit into all caches together", _pools, _working_set),
    Check("moved", "more than 5 % of picks not used", _pools, _moved),
    Check("overflow", "more than 1 % of decisions with all workers at their limits", _pools, _overflow),
    Check("unreadable", "more than 10 % of requests without a readable prompt", _pools, _unreadable),
    Check("router-exposed", "a metrics port that other machines can reach", _router, _exposed),
)
