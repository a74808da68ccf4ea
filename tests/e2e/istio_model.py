"""What istiod would send to the gateway for the resources in envoy/istio, as one Envoy bootstrap.

Only what those resources touch: a listener's routes from the VirtualService, clusters from Services and
DestinationRules, and the EnvoyFilter's patches on top, in istiod's own shapes and names
(pilot/pkg/networking/core). Endpoints, which istiod sends by EDS, are put in place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
#: Service name -> addresses of its pods.
Pods = Mapping[str, list[tuple[str, int]]]

FOLDER = Path(__file__).resolve().parents[2] / "envoy" / "istio"
_HCM = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_PREVIOUS_HOSTS = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"


def resources() -> list[Json]:
    """Every document of every file that the kustomization names."""
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    return [document for name in names for document in yaml.safe_load_all((FOLDER / name).read_text())]


def find(kind: str, name: str, documents: list[Json]) -> Json:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def cluster_name(service: Json) -> str:
    meta, (port,) = service["metadata"], service["spec"]["ports"]
    return f"outbound|{port['port']}||{meta['name']}.{meta['namespace']}.svc.cluster.local"


def gateway(documents: list[Json], pods: Pods, *, port: int, admin_port: int) -> Json:
    """The gateway's bootstrap, with the EnvoyFilter applied."""
    routes = [route for document in documents for route in _routes(document)]
    http_filters = [{"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}}]
    clusters = [
        _cluster(d, documents, pods[d["metadata"]["name"]]) for d in documents if d["kind"] == "Service"
    ]
    for patch in find("EnvoyFilter", "extproc", documents)["spec"]["configPatches"]:
        _apply(patch, http_filters, routes, clusters)
    manager = {
        "@type": _HCM,
        "stat_prefix": "outbound_0.0.0.0_80",
        "stream_idle_timeout": "0s",
        "route_config": {
            "name": "http.80",
            "virtual_hosts": [{"name": "*:80", "domains": ["*"], "routes": routes}],
        },
        "http_filters": http_filters,
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {
        "name": "0.0.0.0_80",
        "address": _address("127.0.0.1", port),
        "filter_chains": [{"filters": filters}],
    }
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _routes(document: Json) -> Iterator[Json]:
    if document["kind"] != "VirtualService":
        return
    for rule in document["spec"]["http"]:
        (target,) = rule["route"]
        host, number = target["destination"]["host"], target["destination"]["port"]["number"]
        action: Json = {"cluster": f"outbound|{number}||{host}", "timeout": rule.get("timeout", "0s")}
        if retries := rule.get("retries"):
            tokens = retries["retryOn"].split(",")
            action["retry_policy"] = {
                "retry_on": ",".join([*(t for t in tokens if not t.isdigit()), "retriable-status-codes"]),
                "retriable_status_codes": [int(t) for t in tokens if t.isdigit()],
                "num_retries": retries["attempts"],
                "retry_back_off": {"base_interval": f"{int(retries['backoff'].removesuffix('ms')) / 1000}s"},
                "host_selection_retry_max_attempts": 5,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {"@type": f"type.googleapis.com/{_PREVIOUS_HOSTS}"},
                    }
                ],
            }
        for match in rule["match"]:
            ((kind, value),) = match["uri"].items()
            envoy_match = {"path" if kind == "exact" else kind: value}
            yield {"name": rule["name"], "match": envoy_match, "route": copy.deepcopy(action)}


def _cluster(service: Json, documents: list[Json], addresses: list[tuple[str, int]]) -> Json:
    name = cluster_name(service)
    policy = find("DestinationRule", service["metadata"]["name"], documents)["spec"]["trafficPolicy"]
    pool = policy["connectionPool"]
    options: Json = {"@type": f"type.googleapis.com/{_HTTP_OPTIONS}"}
    options["explicit_http_config"] = (
        {"http2_protocol_options": {}}
        if service["spec"]["ports"][0]["name"].startswith("grpc")
        else {"http_protocol_options": {}}
    )
    if idle := pool.get("http", {}).get("idleTimeout"):
        options["common_http_protocol_options"] = {"idle_timeout": idle}
    largest = {"max_connections": 2**32 - 1, "max_pending_requests": 2**32 - 1}
    largest |= {"max_requests": 2**32 - 1, "max_retries": 2**32 - 1}
    locality = policy.get("loadBalancer", {}).get("localityLbSetting", {}).get("enabled", True)
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": f"{int(pool['tcp']['connectTimeout'].removesuffix('ms')) / 1000}s",
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {"locality_weighted_lb_config": {}} if locality else {},
        "circuit_breakers": {"thresholds": [largest]},
        "typed_extension_protocol_options": {_HTTP_OPTIONS: options},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _apply(patch: Json, http_filters: list[Json], routes: list[Json], clusters: list[Json]) -> None:
    match, operation = patch["match"], patch["patch"]["operation"]
    value = copy.deepcopy(patch["patch"]["value"])
    assert match["context"] == "GATEWAY"
    match (patch["applyTo"], operation):
        case ("HTTP_FILTER", "INSERT_FIRST"):
            http_filters.insert(0, value)
        case ("HTTP_ROUTE", "MERGE"):
            name = match["routeConfiguration"]["vhost"]["route"]["name"]
            matched = [route for route in routes if route["name"] == name]
            assert matched, f"no route is named {name}"
            for route in matched:
                _merge(route, value)
        case ("CLUSTER", "MERGE"):
            wanted = f"outbound|{match['cluster']['portNumber']}||{match['cluster']['service']}"
            (cluster,) = [cluster for cluster in clusters if cluster["name"] == wanted]
            _merge(cluster, value)
        case other:
            raise AssertionError(f"this model of istiod doesn't know {other}")


def _merge(into: Json, value: Json) -> None:
    """As protobuf merges: messages field by field, repeated fields appended, the rest replaced."""
    for key, new in value.items():
        if isinstance(new, dict) and isinstance(into.get(key), dict):
            _merge(into[key], new)
        elif isinstance(new, list) and isinstance(into.get(key), list):
            into[key] += new
        else:
            into[key] = new


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}
