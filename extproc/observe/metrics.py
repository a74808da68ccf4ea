"""What happens, as Prometheus metrics: counters and histograms, written as things happen.

Labels are bounded: pools and workers of the YAML, and fixed words. What a worker or a pool left behind is
forgotten when the configuration lets it go. `docs/metrics.md` shows every family.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from extproc.observe import events
from extproc.observe.families import Counter, Family, Gauge, Histogram, Labels, register
from extproc.observe.gauges import each_pool, each_worker, gauges
from extproc.prompt import Unreadable
from extproc.routing.health import Cause, State
from extproc.routing.pool import Pool

#: vLLM's own bounds of its time to the first token, so that its counts can be taken over as they are, and
#: what was predicted stands beside them in the same buckets.
TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
STAGE_BOUNDS_S = (
    *(10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6),
    *(1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 500e-3),
)
BODY_BOUNDS_BYTES = tuple(float(4**power) for power in range(4, 14))  # 256 to 64 Mi

#: Words of `extproc.routing.admission`, and of an empty pool, that are shown from the start.
SHED_REASONS = ("load", "slo", "timeout", "tenant", "retry", "retry_budget", "no_worker")
UNROUTED_REASONS = ("no_pool", "no_worker")

_POOL = ("pool",)
_WORKER = ("pool", "worker")


class Metrics:
    """The registry, and what counts events in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._pools: Callable[[], Mapping[str, Pool]] = dict
        self._streams: Callable[[], int] = int
        self._refused: Callable[[], bool] = bool
        self._reloaded_s = 0.0
        self._state_saved_s = 0.0

        def pools() -> Iterator[Labels]:
            return each_pool(self._pools)

        def workers() -> Iterator[Labels]:
            return each_worker(self._pools)

        def pools_and(words: Iterable[str]) -> Callable[[], Iterator[Labels]]:
            return lambda: ((pool, word) for (pool,), word in product(each_pool(self._pools), words))

        self._decisions = Counter(
            "extproc_decisions", "Requests that a worker was chosen for, by reason.", ("pool", "reason")
        )
        self._picks = Counter(
            "extproc_picks", "Requests that the worker was chosen for.", _WORKER, starts=workers
        )
        self._prompt_tokens = Counter(
            "extproc_prompt_tokens",
            "Estimated prompt tokens of the requests that the worker was chosen for.",
            _WORKER,
            starts=workers,
        )
        self._cached_tokens = Counter(
            "extproc_cached_tokens",
            "Of those, tokens that the worker was thought to have cached.",
            _WORKER,
            starts=workers,
        )
        self._predicted = Histogram(
            "extproc_predicted_ttft_seconds",
            "Predicted time to the first token at the chosen worker.",
            _POOL,
            TTFT_BOUNDS_S,
            starts=pools,
        )
        self._overflow = Counter(
            "extproc_overflow", "Decisions made while every worker was at its limit.", _POOL, starts=pools
        )
        self._shed = Counter(
            "extproc_shed",
            "Requests refused in place of a worker, by reason.",
            ("pool", "reason"),
            starts=pools_and(SHED_REASONS),
        )
        self._unrouted = Counter(
            "extproc_unrouted",
            "Requests left to Envoy's own balancing, by reason.",
            ("reason",),
            starts=lambda: [(reason,) for reason in UNROUTED_REASONS],
        )
        self._unreadable = Counter(
            "extproc_unreadable",
            "Requests routed by load alone because no prompt could be read, by reason.",
            ("pool", "reason"),
            starts=pools_and(Unreadable),
        )
        self._moved = Counter(
            "extproc_moved",
            "Picks of the worker that Envoy sent to another one, or to none.",
            _WORKER,
            starts=workers,
        )
        self._retries = Counter(
            "extproc_retries",
            "Envoy's tries beyond the first, of requests that ended; where Envoy tells them.",
            _POOL,
            starts=pools,
        )
        self._ejections = Counter(
            "extproc_ejections",
            "Times that a worker was taken out, by cause.",
            ("pool", "cause"),
            starts=pools_and(Cause),
        )
        self._ended = Counter(
            "extproc_ended",
            "Requests that ended, by class of the HTTP status; none: no response headers were seen.",
            ("pool", "status"),
            starts=pools_and(("2xx", "4xx", "5xx", "none")),
        )
        self._durations = Histogram(
            "extproc_request_duration_seconds",
            "From the decision to the end of an answer with a 2xx status. streamed: whether the answer comes"
            " bit by bit, as the request asked; without, its headers come at the end, too.",
            ("pool", "streamed"),
            DURATION_BOUNDS_S,
            starts=pools_and(("true", "false")),
        )
        self._bodies = Histogram(
            "extproc_request_body_bytes",
            "Request bodies of routed requests, as far as they were seen to their ends.",
            _POOL,
            BODY_BOUNDS_BYTES,
            starts=pools,
        )
        self._stages = Histogram(
            "extproc_stage_seconds",
            "What a request costs the router, by stage: read (the body to a prompt), hash, decide.",
            ("stage",),
            STAGE_BOUNDS_S,
            starts=lambda: [("read",), ("hash",), ("decide",)],
        )
        self._errors = Counter("extproc_internal_errors", "Faults of the router; requests went on unsteered.")
        self._reloads = Counter(
            "extproc_config_reloads",
            "New configurations, changed DNS answers among them, by result.",
            ("result",),
            starts=lambda: [("ok",), ("refused",)],
        )
        self._unresolved = Counter(
            "extproc_dns_failures", "Times that a worker's DNS name had no answer; its last one stays."
        )
        self._state_saves = Counter(
            "extproc_state_saves",
            "Times that the state file was written, by result; none without --state.",
            ("result",),
            starts=lambda: [("ok",), ("failed",)],
        )
        #: In the order of the page.
        self.families: list[Family] = [
            *(self._decisions, self._picks, self._prompt_tokens, self._cached_tokens, self._predicted),
            *(self._overflow, self._shed, self._unrouted, self._unreadable),
            *(self._moved, self._retries, self._ejections, self._ended, self._durations),
            *(self._bodies, self._stages, self._errors),
            Gauge(
                "extproc_open_streams",
                "Streams that Envoy holds open, one for each request that it asked about.",
                (),
                "sum",
                lambda: [((), self._streams())],
            ),
            *(self._reloads, self._unresolved),
            Gauge(
                "extproc_config_last_reload_successful",
                "1 if the newest version of the YAML is in force, 0 while that is one that was refused.",
                (),
                "min",
                lambda: [((), not self._refused())],
            ),
            Gauge(
                "extproc_config_last_reload_success_timestamp_seconds",
                "When the configuration in force was taken, in Unix time.",
                (),
                "min",
                lambda: [((), self._reloaded_s)],
            ),
            self._state_saves,
            Gauge(
                "extproc_state_last_save_timestamp_seconds",
                "When the state file was last written, in Unix time; 0: never.",
                (),
                "min",
                lambda: [((), self._state_saved_s)],
            ),
            *gauges(lambda: self._pools()),
        ]
        register(self.registry, self.families)

    def watch(self, pools: Callable[[], Mapping[str, Pool]]) -> None:
        """Export gauges of these pools from now on."""
        self._pools = pools

    def watch_config(self, refused: Callable[[], bool]) -> None:
        """Export whether the newest configuration was refused from now on."""
        self._refused = refused

    def watch_streams(self, streams: Callable[[], int]) -> None:
        """Export this count of open streams from now on."""
        self._streams = streams

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See `extproc.observe.observer.Sink`."""
        return {
            events.Decided: self._on_decided,
            events.Unrouted: lambda event: self._unrouted.add((event.reason,)),
            events.Refused: lambda event: self._shed.add((event.pool, event.shed.reason)),
            events.PromptUnreadable: lambda event: self._unreadable.add((event.pool, event.reason)),
            events.Displaced: self._on_displaced,
            events.HealthChanged: self._on_health_changed,
            events.Ended: self._on_ended,
            events.Fault: lambda event: self._errors.add(),
            events.Reloaded: self._on_reloaded,
            events.ReloadRefused: lambda event: self._reloads.add(("refused",)),
            events.Unresolved: lambda event: self._unresolved.add(),
            events.StateSaved: self._on_state_saved,
            events.StateNotSaved: lambda event: self._state_saves.add(("failed",)),
        }

    def _on_decided(self, event: events.Decided) -> None:
        decision = event.decision
        pool = (decision.pool,)
        worker = (decision.pool, decision.worker.address)
        self._decisions.add((decision.pool, decision.reason))
        self._picks.add(worker)
        if decision.prompt_tokens:
            self._prompt_tokens.add(worker, decision.prompt_tokens)
            self._cached_tokens.add(worker, decision.cached_tokens)
        self._predicted.observe(pool, decision.predicted_ttft_s)
        if decision.overflow:
            self._overflow.add(pool)
        if event.body_bytes is not None:
            self._bodies.observe(pool, event.body_bytes)
        self._stages.observe(("read",), event.work.read_s)
        self._stages.observe(("hash",), event.work.hash_s)
        self._stages.observe(("decide",), event.work.decide_s)

    def _on_displaced(self, event: events.Displaced) -> None:
        self._moved.add((event.decision.pool, event.decision.worker.address))

    def _on_health_changed(self, event: events.HealthChanged) -> None:
        if event.change.after in (State.EJECTED, State.NOT_READY):
            self._ejections.add((event.pool, str(event.change.cause)))

    def _on_ended(self, event: events.Ended) -> None:
        pool = event.decision.pool
        self._ended.add((pool, f"{event.status // 100}xx" if event.status else "none"))
        if event.attempts > 1:
            self._retries.add((pool,), event.attempts - 1)
        if 200 <= event.status < 300:
            self._durations.observe((pool, "true" if event.streamed else "false"), event.duration_s)

    def _on_reloaded(self, event: events.Reloaded) -> None:
        self._reloads.add(("ok",))
        self._reloaded_s = time.time()
        prune(self.families, self._pools())

    def _on_state_saved(self, event: events.StateSaved) -> None:
        self._state_saves.add(("ok",))
        self._state_saved_s = time.time()


def prune(families: Iterable[Family], pools: Mapping[str, Pool]) -> None:
    """Forget what pools and workers left behind that are gone."""
    workers = {(name, worker.address) for name, pool in pools.items() for worker in pool.workers}
    for family in families:
        if family.labels[:2] == _WORKER:
            family.prune(lambda labels: labels[:2] in workers)
        elif family.labels[:1] == _POOL:
            family.prune(lambda labels: labels[0] in pools)
