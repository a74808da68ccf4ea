"""Everything that is known of a fleet at one moment, as plain data; unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from extproc.doctor.setup import Setup
from extproc.engine.report import EngineReport
from extproc.fleet.config import PoolConfig
from extproc.live.status import Status


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What one worker told.

    ``health``: status of its health page, None with ``health_error`` if it gave none. ``report``: its metrics
    page, None with ``metrics_error``. ``cache_info``: labels of vLLM's ``cache_config_info``. ``version``,
    ``models`` (names), ``max_model_len`` (tokens). ``prompt_over``, ``step_over``: the largest prompt and
    the largest step had more tokens than this. ``chunked_prefill_tokens``, ``radix_cache``: SGLang's own.
    ``tls``: it speaks HTTPS only. ``frozen``: its metrics stood still while the router had requests there.
    """

    pool: str
    address: str
    health: int | None = None
    health_error: str = ""
    report: EngineReport | None = None
    metrics_error: str = ""
    cache_info: dict[str, str] = field(default_factory=dict)
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    prompt_over: int = 0
    step_over: int = 0
    chunked_prefill_tokens: int | None = None
    radix_cache: bool | None = None
    tls: bool = False
    frozen: bool = False

    @property
    def silent(self) -> bool:
        """Whether it answered nothing at all."""
        return self.health is None and self.report is None and not self.tls


#: Labels and value of a series.
Sample = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """A running router's metrics.

    ``error``: why there are none. ``samples``: by name. ``age_s``: how long it has been running. ``status``:
    its live picture, which it shows to its own machine only. ``exposed``: another address of this machine at
    which its port answers, too.
    """

    url: str
    error: str = ""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    age_s: float | None = None
    status: Status | None = None
    exposed: str = ""

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of that name that have these labels."""
        return sum(value for found, value in self.samples.get(name, ()) if labels.items() <= found.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Such sums, by the value of a label."""
        sums: dict[str, float] = {}
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items() and label in found:
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums


@dataclass(frozen=True, slots=True)
class EnvoyFacts:
    """What Envoy's admin interface told; ``error`` and ``exposed`` as in `RouterFacts`.

    ``version``: (major, minor). ``stats``: counters and gauges by name.
    """

    url: str
    error: str = ""
    version: tuple[int, int] | None = None
    stats: dict[str, int] = field(default_factory=dict)
    exposed: str = ""

    def total(self, prefix: str, suffix: str) -> int:
        """The sum over the names that begin and end so."""
        return sum(
            value for name, value in self.stats.items() if name.startswith(prefix) and name.endswith(suffix)
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet's facts.

    ``workers``: none if nobody was asked. ``unresolved``: DNS names without an address, and why.
    """

    setup: Setup
    workers: tuple[WorkerFacts, ...] = ()
    unresolved: dict[str, str] = field(default_factory=dict)
    router: RouterFacts | None = None
    envoy: EnvoyFacts | None = None

    @property
    def envoy_version(self) -> tuple[int, int] | None:
        """(major, minor), if it is known."""
        return self.envoy.version if self.envoy is not None else None

    def of(self, pool: PoolConfig) -> list[WorkerFacts]:
        """The pool's workers that were asked."""
        return [worker for worker in self.workers if worker.pool == pool.name]

    def pools(self) -> Iterator[PoolConfig]:
        """Pools whose workers were asked."""
        asked = {worker.pool for worker in self.workers}
        yield from (pool for name, pool in self.setup.config.pools.items() if name in asked)
