"""What the router tells of itself: Prometheus metrics and log events, in one place.

Counters are written as things happen. Gauges are read from the pools when a scrape asks for them, so
they can't disagree with the accounts. Labels are bounded: pools, workers of the YAML, and fixed words.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc import __version__
from extproc.observe.logs import Seldom
from extproc.prompt import Unreadable
from extproc.routing.admission import Shed
from extproc.routing.decision import Decision
from extproc.routing.demand import Demand
from extproc.routing.health import Change, State
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of a decision.

    ``worker``: ``ip:port`` of the one that answered, "" for none. ``status``, ``attempts``: 0 when unknown.
    ``headers_s``: from the decision to the response headers, None if they never came: an upper bound on the
    time to the first token only where the answer isn't a stream. ``duration_s``: to the stream's end.
    """

    request_id: str
    worker: str
    status: int
    attempts: int
    headers_s: float | None
    duration_s: float


class Observer:
    """Counts and logs. One for each server process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter that nobody reads
        self.registry = registry = CollectorRegistry()
        self.log = structlog.get_logger("extproc")
        self._seldom = Seldom()
        ProcessCollector(registry=registry)
        self._decisions = Counter(
            "extproc_decisions",
            "Requests that a worker was chosen for, by reason.",
            ["pool", "reason"],
            registry=registry,
        )
        self._overflow = Counter(
            "extproc_overflow",
            "Decisions made while every worker was at its limit.",
            ["pool"],
            registry=registry,
        )
        self._unreadable = Counter(
            "extproc_unreadable",
            "Requests routed by load alone because no prompt could be read, by reason.",
            ["pool", "reason"],
            registry=registry,
        )
        self._unrouted = Counter(
            "extproc_unrouted",
            "Requests left to Envoy's own balancing, by reason.",
            ["reason"],
            registry=registry,
        )
        self._shed = Counter(
            "extproc_shed",
            "Requests refused in place of a worker, by reason.",
            ["pool", "reason"],
            registry=registry,
        )
        self._moved = Counter(
            "extproc_moved",
            "Requests that Envoy sent to another worker than the one picked, or to none.",
            ["pool"],
            registry=registry,
        )
        self._ejections = Counter(
            "extproc_ejections",
            "Times that a worker was taken out, by cause.",
            ["pool", "cause"],
            registry=registry,
        )
        self._responses = Counter(
            "extproc_ended",
            "Requests that ended, by class of the HTTP status; none: no response headers were seen.",
            ["pool", "status"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "extproc_prompt_tokens",
            "Estimated prompt tokens of routed requests.",
            ["pool"],
            registry=registry,
        )
        self._cached_tokens = Counter(
            "extproc_cached_tokens",
            "Of those, tokens that the chosen worker is thought to have cached.",
            ["pool"],
            registry=registry,
        )
        self._ttft = Histogram(
            "extproc_predicted_ttft_seconds",
            "Predicted time to the first token at the chosen worker.",
            ["pool"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._reloads = Counter(
            "extproc_config_reloads", "New configurations, by result.", ["result"], registry=registry
        )
        self._errors = Counter(
            "extproc_internal_errors",
            "Faults of the router; requests went on unsteered.",
            registry=registry,
        )

    def watch(self, pools: Callable[[], Mapping[str, Pool]]) -> None:
        """Export gauges of these pools from now on."""
        self.registry.register(_Gauges(pools))

    # --- events ----------------------------------------------------------------------------------

    def decided(self, decision: Decision, request_id: str) -> None:
        """A request was sent to a worker."""
        pool = decision.pool
        self._decisions.labels(pool, decision.reason).inc()
        if decision.overflow:
            self._overflow.labels(pool).inc()
            if held := self._seldom(("overflow", pool)):
                self.log.warning("every worker is at max_inflight", pool=pool, decisions=held)
        if decision.prompt_tokens:
            self._prompt_tokens.labels(pool).inc(decision.prompt_tokens)
            self._cached_tokens.labels(pool).inc(decision.cached_tokens)
        self._ttft.labels(pool).observe(decision.predicted_ttft_s)
        self.log.debug(
            "decided",
            request_id=request_id,
            pool=pool,
            policy=decision.policy,
            worker=decision.worker.address,
            fallbacks=[worker.address for worker in decision.order[1:]],
            reason=decision.reason,
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=decision.cached_tokens,
            predicted_ttft_ms=round(decision.predicted_ttft_s * 1000, 1),
        )

    def unrouted(self, reason: str, request_id: str, detail: str) -> None:
        """We had no opinion: Envoy's fallback policy chooses."""
        self._unrouted.labels(reason).inc()
        if held := self._seldom((reason, detail)):
            self.log.warning("request left to Envoy", reason=reason, detail=detail, requests=held)

    def shed(
        self,
        pool: str,
        shed: Shed,
        request_id: str,
        demand: Demand | None = None,
        decision: Decision | None = None,
    ) -> None:
        """A request was refused. Of its tenant, only the digest is told."""
        self._shed.labels(pool, shed.reason).inc()
        event = {
            "request_id": request_id,
            "pool": pool,
            "reason": shed.reason,
            "status": shed.status,
            "retry_after_s": shed.retry_after_s,
            "tenant": demand.tenant or None if demand else None,
            "priority": demand.priority if demand else None,
            "predicted_ttft_ms": round(decision.predicted_ttft_s * 1000, 1) if decision else None,
        }
        self.log.debug("refused", **event)
        if held := self._seldom(("shed", pool, shed.reason, demand.tenant if demand else "")):
            self.log.warning("requests are refused", **event, requests=held)

    def unreadable(self, pool: str, reason: Unreadable, request_id: str) -> None:
        """No prompt: routed by load, left to the engine to judge."""
        self._unreadable.labels(pool, reason.value).inc()
        if held := self._seldom((pool, reason)):
            self.log.info(
                "no prompt to route by; going by load",
                pool=pool,
                reason=reason.value,
                request_id=request_id,
                requests=held,
            )

    def moved(self, decision: Decision, request_id: str, upstream: str, attempts: int, status: int) -> None:
        """Envoy's retry or fallback used another worker, or reached none."""
        self._moved.labels(decision.pool).inc()
        if held := self._seldom(("moved", decision.worker.address)):
            self.log.info(
                "a pick was not used",
                request_id=request_id,
                pool=decision.pool,
                picked=decision.worker.address,
                used=upstream or None,
                attempts=attempts,
                status=status,
                requests=held,
            )

    def health_changed(self, pool: str, worker: str, change: Change) -> None:
        """A worker was taken out, returns, or is well again."""
        if change.after in (State.EJECTED, State.NOT_READY):
            self._ejections.labels(pool, str(change.cause)).inc()
        self.log.info(
            "a worker's health changed",
            pool=pool,
            worker=worker,
            state=change.after.value,
            before=change.before.value,
            cause=change.cause.value if change.cause else None,
            for_s=round(change.for_s, 1) or None,
        )

    def ended(self, decision: Decision, seen: Seen) -> None:
        """A request's stream is over."""
        self._responses.labels(decision.pool, f"{seen.status // 100}xx" if seen.status else "none").inc()
        self.log.debug(
            "ended",
            request_id=seen.request_id,
            pool=decision.pool,
            picked=decision.worker.address,
            worker=seen.worker or None,
            status=seen.status or None,
            attempts=seen.attempts or None,
            headers_ms=None if seen.headers_s is None else round(seen.headers_s * 1000, 1),
            duration_ms=round(seen.duration_s * 1000, 1),
            predicted_ttft_ms=round(decision.predicted_ttft_s * 1000, 1),
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=decision.cached_tokens,
        )

    def route_problem(self, problem: str) -> None:
        """A route's gRPC metadata has a key or a value that we don't know."""
        if self._seldom(("route", problem)):
            self.log.warning("route setting ignored", problem=problem)

    def internal_error(self, error: BaseException) -> None:
        """A fault of ours. If it was in a request, that goes on without us."""
        self._errors.inc()
        if held := self._seldom(("error", type(error))):
            self.log.error("internal error", exc_info=error, errors=held)

    def reloaded(self, source: str, warnings: Iterable[str]) -> None:
        """A new configuration is in force."""
        self._reloads.labels("ok").inc()
        self.log.info("configuration in force", source=source)
        for warning in warnings:
            self.log.warning("configuration", warning=warning)

    def unresolved(self, name: str, why: str) -> None:
        """A worker's DNS name has no answer; its last known addresses stay in force."""
        self.log.warning("a worker's name can't be resolved", name=name, why=why)

    def refused(self, error: Exception) -> None:
        """A new configuration was refused; the old one stays in force."""
        self._reloads.labels("refused").inc()
        self.log.error(
            "new configuration refused, the old one stays in force", problems=str(error).splitlines()
        )


class _Gauges(Collector):
    """The pools' present state, read at each scrape."""

    def __init__(self, pools: Callable[[], Mapping[str, Pool]]) -> None:
        self._pools = pools

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily(
            "extproc_build_info", "Always 1; its labels are versions.", labels=["version", "python"]
        )
        build.add_metric([__version__, platform.python_version()], 1)
        yield build
        for name, help_text, value in _WORKER_GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=["pool", "worker"])
            for pool in list(self._pools().values()):
                for worker in list(pool.workers):
                    family.add_metric([pool.name, worker.address], value(pool, worker))
            yield family
        states = GaugeMetricFamily(
            "extproc_worker_state",
            "1 for the state of health that the worker is in, 0 for the others.",
            labels=["pool", "worker", "state"],
        )
        panic = GaugeMetricFamily(
            "extproc_panic",
            "1 while so many workers are out that all count as healthy.",
            labels=["pool"],
        )
        for pool in list(self._pools().values()):
            panic.add_metric([pool.name], pool.panic)
            for worker in list(pool.workers):
                for state in State:
                    states.add_metric([pool.name, worker.address, state], worker.health.state is state)
        yield states
        yield panic


_WORKER_GAUGES: tuple[tuple[str, str, Callable[[Pool, Worker], float]], ...] = (
    ("extproc_inflight_requests", "Requests in flight.", lambda pool, worker: worker.in_flight),
    (
        "extproc_max_inflight_requests",
        "Limit of requests in flight.",
        lambda pool, worker: worker.max_inflight,
    ),
    (
        "extproc_pending_prefill_tokens",
        "Uncached prompt tokens that wait at the worker, by the router's account.",
        lambda pool, worker: worker.pending_prefill_tokens(time.monotonic()),
    ),
    (
        "extproc_cache_picture_tokens",
        "Prompt tokens that the worker is thought to hold in its KV cache.",
        lambda pool, worker: (
            pool.picture.used_blocks(worker.slot) * pool.picture.block_tokens if worker.slot >= 0 else 0
        ),
    ),
)
