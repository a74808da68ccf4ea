"""The shipped Envoy YAML with other addresses: what the demo and the end-to-end tests run.

They drive the files that users copy, not variants written for them: only ports and the list of workers are
replaced, and a second way in can be added, to the same workers by Envoy's own round robin.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import extproc

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
#: Key of a cluster's ``filter_metadata`` that makes it a pool.
POOL_METADATA = "extproc"

Json = dict[str, Any]


def shipped(name: str = "envoy.yaml") -> Path:
    """A file of the ``envoy/`` folder, from the installed package or from the repository."""
    package = Path(extproc.__file__).parent
    for folder in (package / "_envoy", package.parent / "envoy"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name}: not among the Envoy configurations that come with this package")


def load(path: Path) -> Json:
    """Read a bootstrap as plain data. Aliases become copies, so that a change stays where it is made."""
    bootstrap: Json = json.loads(json.dumps(yaml.safe_load(path.read_text())))
    return bootstrap


def dump(bootstrap: Json) -> str:
    """Inverse of `load`."""
    return yaml.safe_dump(bootstrap, sort_keys=False)


def readdress(
    bootstrap: Json,
    *,
    listener_port: int,
    admin_port: int,
    router_ports: Sequence[int],
    workers: Sequence[tuple[str, int]],
    host: str = "127.0.0.1",
) -> Json:
    """A copy with our addresses in place of the shipped ones.

    ``workers``: (IP address, port) each. They become the endpoints of every cluster but the router's; a file
    with a cluster per worker gets as many copies of its first one, ``worker-1`` and so on, each with its own
    worker at priority 0.
    """
    out = copy.deepcopy(bootstrap)
    out["admin"]["address"] = _address(host, admin_port)
    listener = out["static_resources"]["listeners"][0]
    listener["address"] = _address(host, listener_port)
    router = router_cluster(out)
    router["load_assignment"] = _assignment(router["name"], [(host, port) for port in router_ports])
    pools = pool_clusters(out)
    if len(pools) > 1:
        _cluster_per_worker(out, pools, workers)
        pools = pool_clusters(out)
    for cluster in out["static_resources"]["clusters"]:
        if cluster is not router:
            localities = cluster["load_assignment"]["endpoints"]
            for locality in localities if len(pools) == 1 or cluster not in pools else localities[1:]:
                locality["lb_endpoints"] = [_endpoint(*worker) for worker in workers]
    return out


def add_round_robin(
    bootstrap: Json, port: int, workers: Sequence[tuple[str, int]], host: str = "127.0.0.1"
) -> None:
    """Add a listener that spreads over the same workers by round robin and never asks the router."""
    resources = bootstrap["static_resources"]
    cluster = copy.deepcopy(pool_clusters(bootstrap)[0])
    del cluster["metadata"]
    cluster.pop("load_balancing_policy", None)
    cluster |= {"name": "round-robin", "lb_policy": "ROUND_ROBIN"}
    cluster["load_assignment"] = _assignment("round-robin", workers)
    resources["clusters"].append(cluster)
    listener = copy.deepcopy(resources["listeners"][0])
    listener |= {"name": "round-robin", "address": _address(host, port)}
    for manager in _connection_managers(listener):
        manager["stat_prefix"] = "round-robin"
        manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] != EXT_PROC_FILTER]
        for virtual_host in manager["route_config"]["virtual_hosts"]:
            for route in virtual_host["routes"]:
                route.pop("typed_per_filter_config", None)
                if "route" in route:
                    route["route"].pop("cluster_header", None)
                    route["route"]["cluster"] = "round-robin"
    resources["listeners"].append(listener)


def pool_clusters(bootstrap: Json) -> list[Json]:
    """The clusters that are pools of workers."""
    clusters = bootstrap["static_resources"]["clusters"]
    return [c for c in clusters if POOL_METADATA in c.get("metadata", {}).get("filter_metadata", {})]


def router_cluster(bootstrap: Json) -> Json:
    """The cluster that the ext_proc filter asks."""
    name = next(iter(ext_proc_filters(bootstrap)))["grpc_service"]["envoy_grpc"]["cluster_name"]
    cluster: Json = next(c for c in bootstrap["static_resources"]["clusters"] if c["name"] == name)
    return cluster


def ext_proc_filters(bootstrap: Json) -> Iterator[Json]:
    """The ext_proc filters' configurations, for tests that change a mode or a timeout."""
    for listener in bootstrap["static_resources"]["listeners"]:
        for manager in _connection_managers(listener):
            for http_filter in manager["http_filters"]:
                if http_filter["name"] == EXT_PROC_FILTER:
                    yield http_filter["typed_config"]


def routes(bootstrap: Json) -> Iterator[Json]:
    """All routes of the first listener, for tests that change one."""
    for manager in _connection_managers(bootstrap["static_resources"]["listeners"][0]):
        for virtual_host in manager["route_config"]["virtual_hosts"]:
            yield from virtual_host["routes"]


def _cluster_per_worker(bootstrap: Json, pools: list[Json], workers: Sequence[tuple[str, int]]) -> None:
    clusters = bootstrap["static_resources"]["clusters"]
    first = clusters.index(pools[0])
    kept = [cluster for cluster in clusters if cluster not in pools]
    for number, worker in enumerate(workers):
        cluster = copy.deepcopy(pools[0])
        cluster["name"] = cluster["load_assignment"]["cluster_name"] = f"worker-{number + 1}"
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(*worker)]
        kept.insert(first + number, cluster)
    bootstrap["static_resources"]["clusters"] = kept


def _connection_managers(listener: Json) -> Iterator[Json]:
    for chain in listener["filter_chains"]:
        for network_filter in chain["filters"]:
            if "http_filters" in network_filter.get("typed_config", {}):
                yield network_filter["typed_config"]


def _assignment(cluster: str, addresses: Sequence[tuple[str, int]]) -> Json:
    endpoints = [_endpoint(*address) for address in addresses]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}


def _endpoint(host: str, port: int) -> Json:
    return {"endpoint": {"address": _address(host, port)}}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}
