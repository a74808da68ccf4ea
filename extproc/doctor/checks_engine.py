"""Workers: how they were started, whether those of a pool are alike, and whether their caches will do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from extproc.doctor.check import Check
from extproc.doctor.finding import Finding, Place, Severity, at
from extproc.doctor.fleet import Fleet, WorkerFacts
from extproc.fleet.config import PoolConfig

#: vLLM's default for a large GPU; the demo's workers have 2,048.
LARGE_STEP_TOKENS = 8192

#: A cache that holds fewer prompts of the largest size than this can't keep them for the next turn.
LEAST_PROMPTS = 2

#: Preemptions to requests that ended, and how many there must be to speak of a share.
PREEMPTED_SHARE, LEAST_PREEMPTIONS = 0.01, 5

#: By how much a ``cache_tokens`` of the YAML may differ from what the engine tells.
SIZE_TOLERANCE = 0.1


def _places(workers: Iterable[WorkerFacts]) -> tuple[Place, ...]:
    return tuple(Place(pool=worker.pool, worker=worker.address) for worker in workers)


def _unresolved(name: str, fleet: Fleet) -> Iterator[Finding]:
    node = fleet.setup.endpoint(name)
    yield Finding(
        Severity.ERROR,
        at(node) if node is not None else (Place(file=fleet.setup.config.source),),
        f"{name} can't be resolved: {fleet.unresolved[name]}",
        "The router and Envoy have no worker behind this name.",
        "put the name right, or run this where the names are known (--no-workers leaves them out)",
        name,
    )


def _unreachable(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    by_reason: dict[str, list[WorkerFacts]] = {}
    for worker in fleet.of(pool):
        if worker.silent:
            by_reason.setdefault(worker.health_error, []).append(worker)
    for reason, workers in by_reason.items():
        yield Finding(
            Severity.ERROR,
            _places(workers),
            f"can't be reached: {reason}",
            "Each request that is picked for it costs a retry, until the router has ejected it.",
            "start it, take its endpoint out, or run this where the workers can be reached (--no-workers"
            " leaves them out)",
            reason,
        )


def _unhealthy(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    for worker in fleet.of(pool):
        if worker.health is not None and not 200 <= worker.health < 300:
            path = pool.settings.health_path
            yield Finding(
                Severity.ERROR,
                _places([worker]),
                f"{path} answers {worker.health}",
                "The router gives a worker whose health page says 503 no requests."
                if worker.health == 503
                else "The router can't tell by this page whether the worker is well.",
                "look into its log; 503 means that its engine is dead or that it drains"
                if worker.health == 503
                else f"health_path: of the pool, if the page isn't {path}",
                worker.health,
            )


def _tls(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    workers = [worker for worker in fleet.of(pool) if worker.tls]
    if workers:
        yield Finding(
            Severity.WARNING,
            _places(workers),
            "speaks HTTPS only",
            "The router reads health and metrics over plain HTTP, so it takes this worker for unresponsive"
            " and doesn't know its cache's size.",
            "health_interval_s: 0 and scrape_interval_s: 0 with cache_tokens set, or plain HTTP inside the"
            " cluster",
        )


def _metrics(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    by_reason: dict[str, list[WorkerFacts]] = {}
    for worker in fleet.of(pool):
        if worker.report is None and not worker.silent and not worker.tls:
            by_reason.setdefault(worker.metrics_error, []).append(worker)
    for reason, workers in by_reason.items():
        yield Finding(
            Severity.WARNING,
            _places(workers),
            f"{pool.settings.metrics_path}: {reason}",
            "The router doesn't learn the size of its cache, its speed and its restarts: after one,"
            " prompts keep going to a cache that is empty.",
            "metrics_path of the pool, if it is another; SGLang: --enable-metrics",
            reason,
        )


def _prefix_caching(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    off = [
        worker
        for worker in fleet.of(pool)
        if worker.cache_info.get("enable_prefix_caching") == "False" or worker.radix_cache is False
    ]
    if off:
        vllm = off[0].radix_cache is None
        yield Finding(
            Severity.ERROR,
            _places(off),
            'enable_prefix_caching="False"' if vllm else "disable_radix_cache is true",
            "Every prompt is computed anew, wherever it goes: measured on three real workers, 3,072 tokens"
            " have their first token after 27 ms where 89 % of them are cached, and after some 280 ms with"
            " 44 %.",
            "--enable-prefix-caching" if vllm else "leave --disable-radix-cache out",
            False,
        )


def _steps(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    large = [worker for worker in fleet.of(pool) if worker.step_over >= LARGE_STEP_TOKENS]
    if large:
        over = min(worker.step_over for worker in large)
        yield Finding(
            Severity.WARNING,
            _places(large),
            f"computes more than {over:,} tokens in a step",
            "All streams of a worker stand still while it computes a step: at 11,000 tokens/s, 2,048"
            f" tokens take 0.2 s and {over:,} take {over / 11_000:.1f} s.",
            "--enable-chunked-prefill --max-num-batched-tokens 2048",
            over,
        )
    unchunked = [
        w for w in fleet.of(pool) if w.chunked_prefill_tokens is not None and w.chunked_prefill_tokens < 0
    ]
    if unchunked:
        yield Finding(
            Severity.WARNING,
            _places(unchunked),
            "chunked_prefill_size is -1",
            "All streams of a worker stand still while it computes a prompt as a whole.",
            "--chunked-prefill-size 2048",
            -1,
        )


def _differ(
    pool: PoolConfig,
    fleet: Fleet,
    what: str,
    value: Callable[[WorkerFacts], Any],
    severity: Severity,
    why: str,
    fix: str,
) -> Iterator[Finding]:
    """One finding about the workers whose value isn't the pool's most frequent one."""
    known = [(worker, value(worker)) for worker in fleet.of(pool)]
    known = [(worker, told) for worker, told in known if told]
    kinds = Counter(told for _, told in known)
    if len(kinds) < 2:
        return
    usual = max(kinds, key=lambda kind: (kinds[kind], str(kind)))
    odd = [(worker, told) for worker, told in known if told != usual]
    shown = ", ".join(sorted({_show(told) for _, told in odd}))
    yield Finding(
        severity,
        _places(worker for worker, _ in odd),
        f"{what} {shown}, where {kinds[usual]} of {len(known)} workers of pool {pool.name} have"
        f" {_show(usual)}",
        why,
        fix,
        shown,
    )


def _show(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _alike(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    split = "a pool of its own: pool in the extproc object of its cluster"
    engines = {worker.report.engine for worker in fleet.of(pool) if worker.report}
    if len(engines) > 1:
        yield from _differ(
            pool,
            fleet,
            "engine",
            lambda worker: worker.report and worker.report.engine,
            Severity.WARNING,
            "Engines cut and keep blocks by rules of their own, and one picture of the caches fits one of"
            " them only.",
            split,
        )
        return
    yield from _differ(
        pool,
        fleet,
        "serves",
        lambda worker: worker.models,
        Severity.ERROR,
        "The router takes workers of a pool for interchangeable: a request for a model that its worker"
        " doesn't serve gets 404, which is not retried.",
        split,
    )
    yield from _differ(
        pool,
        fleet,
        "version",
        lambda worker: worker.version,
        Severity.WARNING,
        "Versions render prompts and cut blocks differently: an answer's turn may miss the cache, and one"
        " version's failures look like the pool's.",
        "the same version everywhere",
    )
    yield from _differ(
        pool,
        fleet,
        "block size",
        lambda worker: worker.report and worker.report.block_tokens,
        Severity.WARNING,
        "A cached prefix ends at a full block, so the same prompt is cached to different lengths.",
        "--block-size, the same everywhere",
    )
    yield from _differ(
        pool,
        fleet,
        "max_model_len",
        lambda worker: worker.max_model_len,
        Severity.WARNING,
        "A prompt that one worker takes gets 400 from another, which is not retried.",
        "--max-model-len, the same everywhere",
    )


def _block_tokens(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    ours = pool.settings.block_tokens
    sizes = {w.report.block_tokens for w in fleet.of(pool) if w.report and w.report.block_tokens}
    for size in sorted(sizes):
        if ours % size:
            node = fleet.setup.pool_field(pool.name, "block_tokens")
            yield Finding(
                Severity.WARNING,
                at(node),
                f"{'is' if node.value is not None else 'is unset, so'} {ours}, the engine's blocks have"
                f" {size} tokens",
                "The router's blocks end inside of the engine's, which caches full blocks only, so the"
                " router counts tokens as cached that are not.",
                f"block_tokens: {max(1, round(ours / size)) * size}",
                ours,
            )


def _cache_size(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    small: dict[tuple[int, int], list[WorkerFacts]] = {}
    for worker in fleet.of(pool):
        report = worker.report
        if report is None or not report.cache_tokens:
            continue
        cache = report.cache_tokens // max(1, report.ranks)
        largest = max(worker.prompt_over, _mean_prompt(worker))
        if largest * LEAST_PROMPTS > cache:
            small.setdefault((cache, largest), []).append(worker)
    for (cache, largest), workers in small.items():
        yield Finding(
            Severity.WARNING,
            _places(workers),
            f"KV cache of {cache:,} tokens, prompts of more than {largest:,}",
            "One such prompt evicts nearly all that the cache holds, so no prompt is there for its next"
            " turn.",
            "--gpu-memory-utilization or --kv-cache-memory-bytes up, --kv-cache-dtype fp8, or more GPUs a"
            " worker (--tensor-parallel-size)",
            cache,
        )


def _mean_prompt(worker: WorkerFacts) -> int:
    report = worker.report
    if report is None or not report.ended_requests or report.ended_prompt_tokens is None:
        return 0
    return int(report.ended_prompt_tokens / report.ended_requests)


def _cache_setting(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    given = {endpoint.address: endpoint.cache_tokens for endpoint in pool.endpoints}
    for worker in fleet.of(pool):
        believed = given.get(worker.address) or pool.settings.cache_tokens
        told = worker.report.cache_tokens if worker.report else None
        if not believed or not told or abs(believed - told) <= SIZE_TOLERANCE * told:
            continue
        own = given.get(worker.address)
        places = _places([worker]) if own else at(fleet.setup.pool_field(pool.name, "cache_tokens"))
        yield Finding(
            Severity.WARNING,
            places,
            f"cache_tokens: {believed:,}, the engine tells {told:,}",
            "The router counts on tokens that were evicted long ago."
            if believed > told
            else "The router forgets what the worker still holds, and computes it elsewhere.",
            "leave cache_tokens out: the router learns the size from the engine",
            believed,
        )


def _preemptions(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    for worker in fleet.of(pool):
        report = worker.report
        if report is None or report.preemptions is None or report.preemptions < LEAST_PREEMPTIONS:
            continue
        requests = report.ended_requests or 0
        if report.preemptions > PREEMPTED_SHARE * requests:
            yield Finding(
                Severity.WARNING,
                _places([worker]),
                f"{report.preemptions:,.0f} preemptions in {requests:,.0f} requests",
                "Its KV cache runs out while it decodes: a preempted request loses its blocks and is"
                " computed anew.",
                "max_inflight or --max-num-seqs down, or a larger KV cache (--gpu-memory-utilization)",
                report.preemptions,
            )


def _ranks(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    several = [worker for worker in fleet.of(pool) if worker.report and worker.report.ranks > 1]
    if several:
        ranks = max(worker.report.ranks for worker in several if worker.report)
        yield Finding(
            Severity.NOTE,
            _places(several),
            f"{ranks} data-parallel engines behind one port",
            "A prefix is in the cache of one of them, and the router can't say which gets the request.",
            "a port and an endpoint for each engine",
            ranks,
        )


def _frozen(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    frozen = [worker for worker in fleet.of(pool) if worker.frozen]
    if frozen:
        yield Finding(
            Severity.WARNING,
            _places(frozen),
            "tells of no request, and its counters stand still, while the router has requests in flight"
            " there",
            "What it tells of its cache, its speed and its restarts is not of now.",
            "look for a cache or a proxy in front of its metrics page, and for multiprocess metrics that"
            " are stale",
        )


def _asked(fleet: Fleet) -> Iterable[PoolConfig]:
    return fleet.pools()


CHECKS = (
    Check("names", "DNS names of workers without an address", lambda fleet: fleet.unresolved, _unresolved),
    Check("unreachable", "workers that don't answer", _asked, _unreachable),
    Check("health", "workers whose health page says no", _asked, _unhealthy),
    Check("tls", "workers that the router can't ask, as they speak HTTPS only", _asked, _tls),
    Check("metrics", "workers whose metrics can't be read", _asked, _metrics),
    Check("frozen-metrics", "metrics that stand still under load", _asked, _frozen),
    Check("prefix-caching", "prefix caching off", _asked, _prefix_caching),
    Check("large-steps", "chunked prefill off, or steps of more than 8,192 tokens", _asked, _steps),
    Check("alike", "workers of one pool with other models, versions, block sizes, lengths", _asked, _alike),
    Check(
        "block-tokens", "`block_tokens` that is no multiple of the engine's block size", _asked, _block_tokens
    ),
    Check("cache-size", "a KV cache under twice the largest prompt seen", _asked, _cache_size),
    Check("cache-tokens", "a `cache_tokens` that isn't the engine's", _asked, _cache_setting),
    Check("preemptions", "more than 1 % of requests preempted", _asked, _preemptions),
    Check("ranks", "several data-parallel engines behind one port", _asked, _ranks),
)
