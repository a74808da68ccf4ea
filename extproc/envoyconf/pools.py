"""Clusters that carry the key ``extproc`` in their metadata, as pools of workers.

Only such clusters are looked into. Of them, the fields that matter here are cut out, checked for their shape
(so that an error can say where), and read as ``envoy_data_plane`` messages; everything else in a cluster,
known or not, passes by.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from extproc.envoyconf.document import Node
from extproc.envoyconf.problems import Problem
from extproc.envoyconf.resources import Resources
from extproc.envoyconf.typed import read_assignment, read_cluster
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.fleet.settings import POOL_SETTINGS, WORKER_SETTINGS, parse

_METADATA = ("metadata", "filter_metadata")

#: Envoy doesn't send to these (core.v3.HealthStatus); its override_host would be told of a dead worker.
_LEFT_OUT = frozenset({"UNHEALTHY", "DRAINING", "TIMEOUT"})


@dataclass(slots=True)
class _Found:
    """An endpoint with what decides between two mentions of the same address."""

    endpoint: EndpointConfig
    priority: int
    node: Node
    own_limit: bool


@dataclass(slots=True)
class _Draft:
    """A pool while its clusters are being merged.

    ``node`` is the first of them, ``origin`` is where each setting was given.
    """

    name: str
    node: Node
    settings: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Node] = field(default_factory=dict)
    found: list[_Found] = field(default_factory=list)


def is_pool(cluster: Node) -> bool:
    """Whether the cluster's ``filter_metadata`` has the key ``extproc``; null counts as an empty object."""
    metadata = cluster.get(*_METADATA)
    return metadata is not None and isinstance(metadata.value, dict) and "extproc" in metadata.value


def read_pools(resources: Resources) -> tuple[dict[str, PoolConfig], dict[str, str]]:
    """Pools by name, and cluster name to pool name; what is wrong goes to ``resources.problems``.

    A cluster that is named like a pool stands for it, too.
    """
    drafts: dict[str, _Draft] = {}
    clusters: dict[str, str] = {}
    for node in resources.clusters:
        if not is_pool(node):
            continue
        name = node.text("name")
        if not name:
            resources.problems.append(node.problem("is a pool without a name", "give the cluster a name"))
            continue
        if name in clusters:
            resources.warnings.append(node.problem("is named twice; the first one counts", value=name))
            continue
        pool, settings, where = _settings(node, resources.problems)
        draft = drafts.setdefault(pool or name, _Draft(pool or name, node))
        clusters[name] = draft.name
        _merge_settings(draft, settings, where, resources.problems)
        draft.found.extend(_endpoints(node, name, resources))
    for node in resources.clusters:
        # The cluster that requests without a pick go to, next to a cluster per worker.
        if (name := node.text("name")) in drafts:
            clusters.setdefault(name, name)
    pools = {name: _pool(draft, resources.warnings) for name, draft in drafts.items()}
    for name, pool_config in pools.items():
        if not pool_config.endpoints:
            message = f"pool {name!r} has no worker that can be picked"
            resources.warnings.append(drafts[name].node.problem(message))
    return pools, clusters


def _settings(cluster: Node, problems: list[Problem]) -> tuple[str | None, dict[str, Any], Node]:
    metadata = cluster.get(*_METADATA)
    assert metadata is not None
    where = metadata.child("extproc")
    if where.value is None:
        return None, {}, where
    if not isinstance(where.value, dict):
        problems.append(
            where.problem("is not an object", "write {} for a pool with default settings", value=where.value)
        )
        return None, {}, where
    values, errors = parse(POOL_SETTINGS, where.value, "a pool's settings")
    problems.extend(where.child(e.key).problem(e.message, e.fix, value=e.value) for e in errors)
    return values.pop("pool", None), values, where


def _merge_settings(draft: _Draft, settings: dict[str, Any], where: Node, problems: list[Problem]) -> None:
    for key, value in settings.items():
        if key in draft.settings and draft.settings[key] != value:
            first = draft.origin[key].child(key).problem("")
            there = f"{first.path} in {first.file}"
            problems.append(
                where.child(key).problem(
                    f"contradicts {draft.settings[key]!r} in {there}, of the same pool {draft.name!r}",
                    "give the setting once, or the same value in both",
                    value=value,
                )
            )
            continue
        draft.settings.setdefault(key, value)
        draft.origin.setdefault(key, where)


def _pool(draft: _Draft, warnings: list[Problem]) -> PoolConfig:
    settings = PoolSettings(**draft.settings)
    endpoints = tuple(
        found.endpoint if found.own_limit else replace(found.endpoint, max_inflight=settings.max_inflight)
        for found in _once(draft, warnings)
    )
    return PoolConfig(draft.name, endpoints, settings)


def _once(draft: _Draft, warnings: list[Problem]) -> Iterable[_Found]:
    """Each address once: where it has the lowest priority, and of equals the first.

    With a cluster per worker the others are listed behind each worker, at a higher priority, for retries.
    """
    kept: dict[str, _Found] = {}
    for found in sorted(draft.found, key=lambda found: found.priority):
        address = found.endpoint.address
        held = kept.setdefault(address, found)
        if held is not found and held.priority == found.priority:
            message = f"is in pool {draft.name!r} twice; the one of {held.endpoint.cluster!r} counts"
            warnings.append(found.node.problem(message, value=address))
    return kept.values()


def _endpoints(cluster: Node, name: str, resources: Resources) -> Iterator[_Found]:
    message, assignment = read_cluster(cluster, resources.problems)
    if message is None:
        return
    family = _lookup_family(cluster)
    loads = [(message.load_assignment, assignment)] if assignment is not None else []
    eds = cluster.get("eds_cluster_config")
    if eds is not None:
        loads += _from_eds(eds, name, resources)
    for load, node in loads:
        for locality, group in zip(load.endpoints, node.items("endpoints"), strict=True):
            for lb_endpoint, where in zip(locality.lb_endpoints, group.items("lb_endpoints"), strict=True):
                endpoint = _endpoint(lb_endpoint, where, name, family, resources)
                if endpoint is not None:
                    yield _Found(endpoint[0], locality.priority or 0, where, endpoint[1])


def _lookup_family(cluster: Node) -> str:
    """``dns_lookup_family``, of the cluster or of its DNS extension; AUTO, Envoy's default, if unset."""
    own = cluster.text("dns_lookup_family")
    return own or cluster.text("cluster_type", "typed_config", "dns_lookup_family") or "AUTO"


def _from_eds(eds: Node, name: str, resources: Resources) -> list[tuple[Any, Node]]:
    if not resources.follow(eds.get("eds_config"), needed=True):
        resources.warnings.append(
            eds.problem(
                "gets its endpoints over the network, so the router can't see them",
                "name a file by path_config_source",
            )
        )
        return []
    wanted = eds.text("service_name") or name
    loads = []
    for node in resources.assignments:
        if node.text("cluster_name") == wanted:
            load = read_assignment(node, resources.problems)
            if load is not None:
                loads.append((load, node))
    return loads[:1]


def _endpoint(
    lb_endpoint: Any, where: Node, cluster: str, family: str, resources: Resources
) -> tuple[EndpointConfig, bool] | None:
    """The endpoint and whether it has its own max_inflight; None for one that can't be picked."""
    if lb_endpoint.health_status and lb_endpoint.health_status.name in _LEFT_OUT:
        return None
    endpoint = lb_endpoint.endpoint
    socket_address = endpoint.address.socket_address if endpoint and endpoint.address else None
    if socket_address is None or not socket_address.address or not socket_address.port_value:
        problem = where.problem("has no IP address or DNS name with a port, so it can't be picked; left out")
        resources.warnings.append(problem)
        return None
    values: dict[str, Any] = {}
    metadata = where.get(*_METADATA, "extproc")
    if metadata is not None and not isinstance(metadata.value, dict):
        resources.problems.append(
            metadata.problem("is not an object", "write the worker's settings as keys", value=metadata.value)
        )
    elif metadata is not None:
        values, errors = parse(WORKER_SETTINGS, metadata.value, "a worker's settings")
        resources.problems.extend(
            metadata.child(e.key).problem(e.message, e.fix, value=e.value) for e in errors
        )
    weight = values.get("weight", float(lb_endpoint.load_balancing_weight or 1))
    config = EndpointConfig(
        host=_normal(socket_address.address),
        port=socket_address.port_value,
        cluster=cluster,
        max_inflight=values.get("max_inflight", 0),
        weight=weight,
        cache_tokens=values.get("cache_tokens"),
        max_pending_prefill_tokens=values.get("max_pending_prefill_tokens"),
        lookup_family=family,
    )
    return config, "max_inflight" in values


def _normal(host: str) -> str:
    """The spelling that Envoy prints (inet_ntop), so that the pick and ``upstream.address`` compare equal."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.inet_ntop(family, address.packed)
