"""What happens, as Prometheus metrics.

Counters are written as things happen. Gauges are read from the pools when a scrape asks for them, so
they can't disagree with the accounts. Labels are bounded: pools, workers of the YAML, and fixed words.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
from extproc.observe import events
from extproc.routing.health import State
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)


class Metrics:
    """The registry, and what counts events in it."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter that nobody reads
        self.registry = registry = CollectorRegistry()
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

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See `extproc.observe.observer.Sink`."""
        return {
            events.Decided: self._decided,
            events.Unrouted: lambda event: self._unrouted.labels(event.reason).inc(),
            events.Refused: lambda event: self._shed.labels(event.pool, event.shed.reason).inc(),
            events.PromptUnreadable: lambda event: self._unreadable.labels(event.pool, event.reason).inc(),
            events.Displaced: lambda event: self._moved.labels(event.decision.pool).inc(),
            events.HealthChanged: self._health_changed,
            events.Ended: self._ended,
            events.Fault: lambda event: self._errors.inc(),
            events.Reloaded: lambda event: self._reloads.labels("ok").inc(),
            events.ReloadRefused: lambda event: self._reloads.labels("refused").inc(),
        }

    def _decided(self, event: events.Decided) -> None:
        decision = event.decision
        pool = decision.pool
        self._decisions.labels(pool, decision.reason).inc()
        if decision.overflow:
            self._overflow.labels(pool).inc()
        if decision.prompt_tokens:
            self._prompt_tokens.labels(pool).inc(decision.prompt_tokens)
            self._cached_tokens.labels(pool).inc(decision.cached_tokens)
        self._ttft.labels(pool).observe(decision.predicted_ttft_s)

    def _health_changed(self, event: events.HealthChanged) -> None:
        if event.change.after in (State.EJECTED, State.NOT_READY):
            self._ejections.labels(event.pool, str(event.change.cause)).inc()

    def _ended(self, event: events.Ended) -> None:
        status = f"{event.status // 100}xx" if event.status else "none"
        self._responses.labels(event.decision.pool, status).inc()


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
