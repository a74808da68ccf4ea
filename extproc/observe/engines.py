"""What engines tell, told on: gauges with their age, counters, times to the first token; failures, restarts.

A gauge that is too old is left out: in Prometheus, too, unknown is not zero. A counter grows by what the
engine's own grew between two readings of one life, so an engine's restart loses what it counted since the
last reading, and the counter goes on. Labels are pools, workers of the YAML, and fixed words.

The time to the first token can't be seen from Envoy's messages: vLLM sends a stream's headers at once, and
no byte of an answer comes by here. So the engines' own histograms are read. Whether the prediction was right
is asked of the requests that ended between two readings: their mean time in queue and prefill, as the engine
told it, against the mean that was predicted for them (`extproc.routing.tally`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from extproc.engine.report import EngineReport, first_tokens_by_bound, grown, hit_ratio
from extproc.engine.state import EngineState, Target
from extproc.observe import events
from extproc.observe.families import Counter, Family, Gauge, Histogram, Labels, Summary, register
from extproc.observe.logs import Seldom
from extproc.observe.metrics import TTFT_BOUNDS_S
from extproc.routing.tally import Tally

#: Of seen minus predicted.
ERROR_BOUNDS_S = (
    *(-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05),
    *(0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)

FAILURES = ("connection", "timeout", "status", "too_large", "garbage", "fault")

_WORKER = ("pool", "worker")


class EngineObserver:
    """Counts and logs what happens while reading engines. A sink, too (`extproc.observe.observer.Sink`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._log = structlog.get_logger("extproc")
        self._seldom = Seldom()
        self._targets: Callable[[], Iterable[Target]] = tuple
        self._predicted_s: dict[Labels, Tally] = {}  # times to first tokens, by worker

        def workers() -> Iterator[Labels]:
            return ((target.pool.name, target.worker.address) for target in self._targets())

        def pools() -> list[Labels]:
            return [(name,) for name in {pool for pool, _ in workers()}]

        self._failures = Counter(
            "extproc_engine_scrape_failures",
            "Readings of a worker's metrics page that brought nothing, by reason.",
            ("pool", "reason"),
            starts=lambda: [(*pool, reason) for pool in pools() for reason in FAILURES],
        )
        self._restarts = Counter(
            "extproc_engine_restarts",
            "Engines seen to have started anew; the picture of their cache was emptied.",
            ("pool",),
            starts=pools,
        )
        self._grown = {field: Counter(name, text, _WORKER, starts=workers) for field, name, text in _COUNTERS}
        self._ttft = Histogram(
            "extproc_engine_ttft_seconds",
            "Time to the first token, by the engines' word; of all their requests, not only ours.",
            ("pool",),
            TTFT_BOUNDS_S,
            "max",
            starts=pools,
        )
        self._worker_ttft = Summary(
            "extproc_engine_worker_ttft_seconds",
            "Time to the first token by the worker's own word, for its mean.",
            _WORKER,
            "max",
            starts=workers,
        )
        self._error = Histogram(
            "extproc_ttft_error_seconds",
            "Seen minus predicted time to the first token: for each reading of a worker, the means of the"
            " requests that ended since the one before. vLLM only; none where others use the worker, too.",
            ("pool",),
            ERROR_BOUNDS_S,
            starts=pools,
        )
        #: In the order of the page.
        self.families: list[Family] = [
            *(self._failures, self._restarts, *self._grown.values()),
            *(self._ttft, self._worker_ttft, self._error),
            Gauge(
                "extproc_engine_signal_age_seconds",
                "Time since the worker's metrics page was last read; +Inf: never.",
                _WORKER,
                "min",
                self._ages,
            ),
            Gauge(
                "extproc_worker_prefill_tokens_per_second",
                "Uncached prompt tokens that the worker prefills in a second, as the router believes.",
                _WORKER,
                "any",
                lambda: [
                    ((target.pool.name, target.worker.address), 1.0 / target.worker.prefill_s_per_token)
                    for target in self._targets()
                ],
            ),
            *(Gauge(name, text, _WORKER, "any", self._reader(value)) for name, text, value in _GAUGES),
        ]
        register(registry, self.families)

    def watch(self, targets: Callable[[], Iterable[Target]]) -> None:
        """Export gauges of these from now on."""
        self._targets = targets

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See `extproc.observe.observer.Sink`."""
        return {events.Ended: self._on_ended, events.Reloaded: lambda event: self._prune()}

    def told(self, target: Target) -> None:
        """A worker's page was read; ``target.state`` has it."""
        report, previous = target.state.report, target.state.previous
        if report is None:
            return
        worker = (target.pool.name, target.worker.address)
        waited_s = None
        if report.queue_s is not None and report.prefill_s is not None:
            waited_s = report.queue_s + report.prefill_s
        times_s = self._predicted_s.setdefault(worker, Tally()).told(report.prefills, waited_s)
        if times_s is not None:
            self._error.observe((target.pool.name,), times_s.told_mean - times_s.own_mean)
        if previous is None:
            return
        for field, counter in self._grown.items():
            if more := grown(previous, report, field):
                counter.add(worker, more)
        count, total_s = grown(previous, report, "first_tokens"), grown(previous, report, "ttft_s")
        if count and total_s is not None:
            self._worker_ttft.take_over(worker, count, total_s)
            if counts := first_tokens_by_bound(previous, report):
                self._ttft.take_over((target.pool.name,), counts, total_s)

    def failed(self, pool: str, worker: str, reason: str, detail: str) -> None:
        """A reading brought nothing."""
        self._failures.add((pool, reason))
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
        self._restarts.add((pool,))
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
        self._failures.add((pool, "fault"))
        if held := self._seldom(("fault", type(error))):
            self._log.error(
                "internal error while reading an engine",
                pool=pool,
                worker=worker,
                exc_info=error,
                times=held,
            )

    def _on_ended(self, event: events.Ended) -> None:
        decision = event.decision
        if decision.prompt_tokens and event.worker == decision.worker.address:
            tally = self._predicted_s.get((decision.pool, event.worker))
            if tally is not None:
                tally.ended(decision.predicted_ttft_s)

    def _prune(self) -> None:
        """Forget workers and pools that aren't followed any more."""
        workers = {(target.pool.name, target.worker.address) for target in self._targets()}
        pools = {pool for pool, _ in workers}
        for family in self.families:
            if family.labels == _WORKER:
                family.prune(lambda labels: labels in workers)
            else:
                family.prune(lambda labels: labels[0] in pools)
        for worker in self._predicted_s.keys() - workers:
            del self._predicted_s[worker]

    def _ages(self) -> Iterable[tuple[Labels, float]]:
        now = time.monotonic()
        for target in self._targets():
            age_s = target.state.age_s(now)
            yield (target.pool.name, target.worker.address), math.inf if age_s is None else age_s

    def _reader(
        self, value: Callable[[EngineState, EngineReport], float | None]
    ) -> Callable[[], Iterable[tuple[Labels, float]]]:
        def read() -> Iterable[tuple[Labels, float]]:
            now = time.monotonic()
            for target in self._targets():
                state = target.state
                report = state.current(now, target.pool.settings.scrape_interval_s)
                told = None if report is None else value(state, report)
                if told is not None:
                    yield (target.pool.name, target.worker.address), told

        return read


#: Field of `EngineReport`, name, meaning.
_COUNTERS = (
    (
        "prefix_query_tokens",
        "extproc_engine_prefix_query_tokens",
        "Prompt tokens that the engine looked up in its cache.",
    ),
    ("prefix_hit_tokens", "extproc_engine_prefix_hit_tokens", "Of those, tokens that it found."),
    ("generation_tokens", "extproc_engine_generation_tokens", "Tokens that the engine generated."),
    (
        "preemptions",
        "extproc_engine_preemptions",
        "Requests that the engine put back for want of KV cache, to be prefilled again.",
    ),
)

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
