"""How this Envoy can be steered, and how much body it buffers: read from listeners, routes and policies.

A pick reaches Envoy as dynamic metadata or a header that a pool cluster's ``override_host`` policy reads, or
as the header that a route takes the cluster's name from (``cluster_header``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extproc.envoyconf.document import Node
from extproc.envoyconf.pools import is_pool
from extproc.envoyconf.resources import Resources
from extproc.envoyconf.typed import read_override_host
from extproc.fleet.config import Steering

_OVERRIDE_HOST = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
EXT_PROC_PER_ROUTE = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
_FILTER_CONFIG = "envoy.config.route.v3.FilterConfig"

#: Envoy's own limit when nothing sets one.
DEFAULT_BUFFER_BYTES = 1024 * 1024

#: The largest body that fits into one gRPC message (2 GiB) with what else it carries.
_MOST_BUFFER_BYTES = 2**31 - 2**20

_BUFFER_FIELDS = (
    "request_body_buffer_limit",
    "per_request_buffer_limit_bytes",
    "per_connection_buffer_limit_bytes",
)


def read_steering(resources: Resources) -> Steering:
    """The ways to steer that the YAML has; the endpoint picker protocol's metadata if it shows none."""
    metadata: dict[tuple[str, str], None] = {}
    headers: dict[str, None] = {}
    unsteered = []
    for cluster in resources.clusters:
        if not is_pool(cluster):
            continue
        policies = list(override_hosts(cluster))
        if not policies:
            unsteered.append(cluster)
        for policy in policies:
            _sources(policy, metadata, headers, resources)
    cluster_headers = dict.fromkeys(
        header for config in route_configs(resources) for header in _cluster_headers(config)
    )
    if resources.listeners and not cluster_headers:
        resources.warnings.extend(
            cluster.problem(
                "is a pool, but no override_host policy and no route's cluster_header lets a pick steer",
                "see envoy/envoy.yaml",
                value=cluster.text("name"),
            )
            for cluster in unsteered
        )
    if not metadata and not headers and not cluster_headers:
        return Steering()
    return Steering(tuple(metadata), tuple(headers), tuple(cluster_headers))


def read_max_body_bytes(resources: Resources) -> int | None:
    """The largest body that any listener or route lets Envoy buffer; None if no listener is in sight."""
    if not resources.listeners and not resources.routes:
        return None
    most = DEFAULT_BUFFER_BYTES
    for root in (*resources.listeners, *resources.routes):
        for mapping in root.mappings():
            for name in _BUFFER_FIELDS:
                limit = mapping.get(name)
                if limit is not None:
                    most = max(most, whole_bytes(limit.value))
    return min(most, _MOST_BUFFER_BYTES)


def route_configs(resources: Resources) -> Iterator[Node]:
    """Route configurations of all HTTP connection managers, inline or in RDS files (which are read here)."""
    for listener in list(resources.listeners):
        for mapping in listener.mappings():
            name, body = mapping.unpack()
            if name != HCM:
                continue
            inline = body.get("route_config")
            if inline is not None:
                yield inline
            resources.follow(body.get("rds", "config_source"), needed=False)
    yield from resources.routes


def override_hosts(cluster: Node) -> Iterator[Node]:
    """The cluster's ``override_host`` policies; more than one where they are nested."""
    policy = cluster.get("load_balancing_policy")
    for mapping in policy.mappings() if policy is not None else ():
        name, body = mapping.unpack()
        if name == _OVERRIDE_HOST:
            yield body


def _sources(
    policy: Node, metadata: dict[tuple[str, str], None], headers: dict[str, None], resources: Resources
) -> None:
    message = read_override_host(policy, resources.problems)
    if message is None:
        return
    nodes = policy.items("override_host_sources")
    for source, node in zip(message.override_host_sources, nodes, strict=True):
        if source.header:
            headers[source.header.lower()] = None
        elif source.metadata and len(source.metadata.path) == 1:
            metadata[source.metadata.key, source.metadata.path[0].key] = None
        elif source.metadata:
            problem = node.problem(
                "has a metadata path that is not exactly one key; the router can't steer by it",
                "use one key, such as path: [{key: x-gateway-destination-endpoint}]",
            )
            resources.warnings.append(problem)


def _cluster_headers(config: Node) -> Iterator[str]:
    for mapping in config.mappings():
        header = mapping.text("route", "cluster_header")
        if header and not _disabled(mapping):
            yield header.lower()


def _disabled(route: Node) -> bool:
    """Whether the route turns ext_proc off."""
    filters = route.get("typed_per_filter_config")
    if filters is None or not isinstance(filters.value, dict):
        return False
    for key in filters.value:
        name, body = filters.child(key).unpack()
        off = body.get("disabled")
        if off is not None and off.value is True and (name == EXT_PROC_PER_ROUTE or "ext_proc" in key):
            return True
    return False


def whole_bytes(value: Any) -> int:
    """A byte count as a number or, for 64-bit fields in JSON, a string; 0 if it is neither."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else 0
