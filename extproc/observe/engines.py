"""What engines tell, told on: gauges with their age, failures, restarts.

A gauge that is too old is left out: in Prometheus, too, unknown is not zero. Labels are pools, workers of the
YAML, and fixed words.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import structlog
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.engine.report import EngineReport, hit_ratio
from extproc.engine.state import EngineState, Target
from extproc.observe.logs import Seldom


class EngineObserver:
    """Counts and logs what happens while reading engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._log = structlog.get_logger("extproc")
        self._seldom = Seldom()
        self._failures = Counter(
            "extproc_engine_scrape_failures",
            "Readings of a worker's metrics page that brought nothing, by reason.",
            ["pool", "reason"],
            registry=registry,
        )
        self._restarts = Counter(
            "extproc_engine_restarts",
            "Engines seen to have started anew; the picture of their cache was emptied.",
            ["pool"],
            registry=registry,
        )

    def watch(self, targets: Callable[[], Iterable[Target]]) -> None:
        """Export gauges of these from now on."""
        self._registry.register(_Gauges(targets))

    def failed(self, pool: str, worker: str, reason: str, detail: str) -> None:
        """A reading brought nothing."""
        self._failures.labels(pool, reason).inc()
        if held := self._seldom((pool, worker, reason)):
            self._log.info(
                "a worker's metrics can't be read",
                pool=pool,
                worker=worker,
                reason=reason,
                detail=detail,
                times=held,
            )

    def restarted(self, pool: str, worker: str) -> None:
        """An engine started anew."""
        self._restarts.labels(pool).inc()
        self._log.info("an engine restarted; its cache counts as empty", pool=pool, worker=worker)

    def cache_size(self, target: Target) -> None:
        """An engine told its cache's size, for the first time or a new one."""
        report = target.state.report
        if report is not None:
            self._log.info(
                "an engine told the size of its cache",
                pool=target.pool.name,
                worker=target.worker.address,
                cache_tokens=report.cache_tokens,
                ranks=report.ranks,
                used=target.learns_size,
            )

    def fault(self, pool: str, worker: str, error: BaseException) -> None:
        """A fault of ours while reading."""
        self._failures.labels(pool, "fault").inc()
        if held := self._seldom(("fault", type(error))):
            self._log.error(
                "internal error while reading an engine",
                pool=pool,
                worker=worker,
                exc_info=error,
                times=held,
            )


class _Gauges(Collector):
    """The last readings, as far as they speak of the present."""

    def __init__(self, targets: Callable[[], Iterable[Target]]) -> None:
        self._targets = targets

    def collect(self) -> Iterable[Metric]:
        now = time.monotonic()
        found = [(target, target.state) for target in self._targets()]
        age = GaugeMetricFamily(
            "extproc_engine_signal_age_seconds",
            "Time since the worker's metrics page was last read; +Inf: never.",
            labels=["pool", "worker"],
        )
        for target, state in found:
            age_s = state.age_s(now)
            labels = [target.pool.name, target.worker.address]
            age.add_metric(labels, math.inf if age_s is None else age_s)
        yield age
        speed = GaugeMetricFamily(
            "extproc_worker_prefill_tokens_per_second",
            "Uncached prompt tokens that the worker prefills in a second, as the router believes.",
            labels=["pool", "worker"],
        )
        for target, _ in found:
            speed.add_metric(
                [target.pool.name, target.worker.address], 1.0 / target.worker.prefill_s_per_token
            )
        yield speed
        for name, help_text, value in _GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=["pool", "worker"])
            for target, state in found:
                report = state.current(now, target.pool.settings.scrape_interval_s)
                told = None if report is None else value(state, report)
                if told is not None:
                    family.add_metric([target.pool.name, target.worker.address], told)
            yield family


_GAUGES: tuple[tuple[str, str, Callable[[EngineState, EngineReport], float | None]], ...] = (
    (
        "extproc_engine_running_requests",
        "Requests that the engine is running, as it told; not only ours.",
        lambda state, report: report.running,
    ),
    (
        "extproc_engine_waiting_requests",
        "Requests that wait in the engine, as it told.",
        lambda state, report: report.waiting,
    ),
    (
        "extproc_engine_kv_usage_ratio",
        "Share of the KV cache that running requests use, as the engine told.",
        lambda state, report: report.kv_usage,
    ),
    (
        "extproc_engine_cache_tokens",
        "Tokens that the engine's KV cache holds, all ranks together, as it told.",
        lambda state, report: report.cache_tokens,
    ),
    (
        "extproc_engine_hit_ratio",
        "Share of prompt tokens found in the engine's cache between its last two readings.",
        lambda state, report: hit_ratio(state.previous, report),
    ),
)
