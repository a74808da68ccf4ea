"""What the router is told: pools of workers, their limits, and how to steer Envoy.

Plain frozen data. `extproc.envoyconf` makes it from the Envoy YAML; everything else reads it.
Names, units, defaults and bounds of every setting stand in ``POOL_SETTINGS`` and ``WORKER_SETTINGS``
(`extproc.fleet.settings`), from which ``docs/configuration.md`` is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Dynamic metadata that Envoy's override_host policy reads (Gateway API endpoint picker protocol).
ENDPOINT_NAMESPACE = "envoy.lb"
ENDPOINT_KEY = "x-gateway-destination-endpoint"


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """One endpoint of a pool, as the YAML names it: an IP address, or a DNS name still to be resolved.

    ``lookup_family`` is the cluster's ``dns_lookup_family``; it matters for DNS names only.
    """

    host: str
    port: int
    cluster: str
    max_inflight: int
    weight: float = 1.0
    cache_tokens: int | None = None
    lookup_family: str = "AUTO"
    max_pending_prefill_tokens: int | None = None

    @property
    def address(self) -> str:
        """``host:port`` (``[host]:port`` for IPv6), the form that override_host takes."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The ``extproc`` object in a pool cluster's ``filter_metadata``; see docs/configuration.md."""

    policy: str = "predicted"
    max_inflight: int = 120
    max_pending_prefill_tokens: int | None = None
    max_load_ratio: float = 1.5
    load_margin: int = 4
    fallbacks: int = 3
    block_tokens: int = 256
    prefix_tokens: int = 4096
    chars_per_token: float = 4.0
    content_format: str = "string"
    cache_tokens: int | None = None
    prefill_tokens_per_s: float = 10_000.0
    learn_speed: bool = True
    alpha: float = 1.0
    decode_ms: float = 40.0
    eviction_weight: float = 0.5
    spread_ms: float = 50.0
    scrape_interval_s: float = 10.0
    scrape_timeout_s: float = 3.0
    metrics_path: str = "/metrics"
    shed_after_ms: float | None = None
    client_priority: bool = False
    contention_ms: float = 20.0
    tenant_header: str | None = None
    tenant_weights: tuple[tuple[str, float], ...] = ()
    retry_budget: float | None = None
    reject_if_empty: bool = False
    eject_s: float = 2.0
    eject_max_s: float = 60.0
    return_s: float = 10.0
    max_ejected_share: float = 0.5
    silence_s: float = 2.0
    header_timeout_s: float = 3.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    health_path: str = "/health"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A named set of workers that serve the same models, and how to choose among them."""

    name: str
    endpoints: tuple[EndpointConfig, ...]
    settings: PoolSettings = field(default_factory=PoolSettings)


@dataclass(frozen=True, slots=True)
class Steering:
    """Where Envoy looks for the pick, found in the YAML.

    ``endpoint_metadata``: (namespace, key) pairs that an override_host policy reads.
    ``endpoint_headers``: headers that an override_host policy reads.
    ``cluster_headers``: headers that routes use as ``cluster_header``; they carry the cluster's name.
    """

    endpoint_metadata: tuple[tuple[str, str], ...] = ((ENDPOINT_NAMESPACE, ENDPOINT_KEY),)
    endpoint_headers: tuple[str, ...] = ()
    cluster_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything the YAML says to the router.

    ``clusters``: Envoy cluster to pool, for each cluster that is (part of) a pool or is named like one.
    ``max_body_bytes``: the largest request body that Envoy buffers; sizes gRPC's message limit.
    ``source``: the file that was asked for, for messages; ``files``: every file that was read.
    ``warnings``: what was left out or looks like a slip, one readable line each.
    """

    pools: Mapping[str, PoolConfig]
    steering: Steering = field(default_factory=Steering)
    max_body_bytes: int = 16 * 1024 * 1024
    source: str = ""
    clusters: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
