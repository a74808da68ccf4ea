"""Misconfigurations planted in the YAML that we ship, one at a time: found, in the right place, and alone."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from extproc.demo import envoy_setup
from extproc.doctor.check import run
from extproc.doctor.checks import CHECKS
from extproc.doctor.finding import Finding, Severity
from extproc.doctor.fleet import EnvoyFacts, Fleet
from extproc.doctor.manifests import read
from extproc.doctor.report import as_json, show
from extproc.doctor.setup import Source, read_setup
from extproc.envoyconf import ConfigError, Resources, arrange
from extproc.envoyconf.document import Document

FOLDER = Path(__file__).parents[2] / "envoy"
SHIPPED = sorted(path.relative_to(FOLDER) for path in FOLDER.glob("*.yaml"))

MANAGER = "static_resources.listeners[0].filter_chains[0].filters[0].typed_config"
FILTER = f"{MANAGER}.http_filters[0].typed_config"
MODE = f"{FILTER}.processing_mode"
HOST = f"{MANAGER}.route_config.virtual_hosts[0]"
RETRY = f"{HOST}.retry_policy"
ROUTE = f"{HOST}.routes[2]"
POOL = "static_resources.clusters[0]"
LIMITS = f"{POOL}.circuit_breakers.thresholds[0]"
OPTIONS = 'typed_extension_protocol_options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]'
EXTPROC = f"{POOL}.metadata.filter_metadata.extproc"
ROUTER = "static_resources.clusters[1]"
LB = f"{POOL}.load_balancing_policy.policies[0].typed_extension_config.typed_config"

ERROR, WARNING, NOTE = Severity


@dataclass(frozen=True)
class Plant:
    """Edits of a shipped file's text, each of one place, and the one finding that must come of them."""

    edits: tuple[tuple[str, str], ...]
    check: str
    severity: Severity
    path: str
    file: str = "envoy.yaml"


def plant(check: str, severity: Severity, path: str, *edits: str, file: str = "envoy.yaml") -> Plant:
    return Plant(tuple(zip(edits[::2], edits[1::2], strict=True)), check, severity, path, file)


TYPE = "type.googleapis.com/envoy.extensions"
PREDICATE = f"""                retry_host_predicate:
                - name: envoy.retry_host_predicates.previous_hosts
                  typed_config:
                    "@type": {TYPE}.retry.host.previous_hosts.v3.PreviousHostsPredicate
"""
FALLBACK = f"""            fallback_policy:
              policies:
              - typed_extension_config:
                  name: envoy.load_balancing_policies.least_request
                  typed_config:
                    "@type": {TYPE}.load_balancing_policies.least_request.v3.LeastRequest
"""
BREAKERS = """      - max_connections: 100000
        max_pending_requests: 100000
        max_requests: 100000
"""
BUDGET = "        retry_budget: {budget_percent: {value: 100}, min_retry_concurrency: 100}\n"
KEEPALIVE = """          http2_protocol_options:
            # Notices a router that is gone without a word.
            connection_keepalive: {interval: 10s, timeout: 5s}
"""
LIMIT = "                request_body_buffer_limit: 16777216\n"
SOURCE = "- metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}"
OVERRIDE = f"""                typed_per_filter_config:
                  envoy.filters.http.ext_proc:
                    "@type": {TYPE}.filters.http.ext_proc.v3.ExtProcPerRoute
                    overrides: {{%s}}
"""
TIMEOUT = "                  timeout: 0s   # a stream lasts as long as it takes\n"

PLANTS = {
    # The filter.
    "trailers and no way to ask for them": plant(
        "trailers",
        WARNING,
        f"{MODE}.response_trailer_mode",
        "                response_trailer_mode: SEND\n",
        "",
        "              allow_mode_override: true\n",
        "",
    ),
    "trailers left to a mode override": plant(
        "trailers",
        NOTE,
        f"{MODE}.response_trailer_mode",
        "response_trailer_mode: SEND",
        "response_trailer_mode: SKIP",
    ),
    "message timeout by default": plant(
        "message-timeout", WARNING, f"{FILTER}.message_timeout", "              message_timeout: 1s\n", ""
    ),
    "message timeout too short": plant(
        "message-timeout",
        WARNING,
        f"{FILTER}.message_timeout",
        "message_timeout: 1s",
        "message_timeout: 0.2s\n              max_message_timeout: 10s",
    ),
    "fail closed": plant(
        "failure-mode",
        ERROR,
        f"{FILTER}.failure_mode_allow",
        "failure_mode_allow: true",
        "failure_mode_allow: false",
    ),
    "fail closed on a route": plant(
        "failure-mode",
        ERROR,
        f'{ROUTE}.typed_per_filter_config["envoy.filters.http.ext_proc"].overrides.failure_mode_allow',
        LIMIT,
        LIMIT + OVERRIDE % "failure_mode_allow: false",
    ),
    "body streamed": plant(
        "request-mode",
        ERROR,
        f"{MODE}.request_body_mode",
        "request_body_mode: BUFFERED",
        "request_body_mode: STREAMED",
    ),
    "no body": plant(
        "request-mode",
        ERROR,
        f"{MODE}.request_body_mode",
        "                request_body_mode: BUFFERED\n",
        "",
    ),
    "no body on a route": plant(
        "request-mode",
        ERROR,
        f'{ROUTE}.typed_per_filter_config["envoy.filters.http.ext_proc"].overrides.processing_mode'
        ".request_body_mode",
        LIMIT,
        LIMIT + OVERRIDE % "processing_mode: {request_body_mode: NONE, response_trailer_mode: SEND}",
    ),
    "body without headers": plant(
        "request-mode",
        ERROR,
        f"{MODE}.request_header_mode",
        "request_header_mode: SEND",
        "request_header_mode: SKIP",
    ),
    "duplex without trailers": plant(
        "request-mode",
        ERROR,
        f"{MODE}.request_trailer_mode",
        "request_body_mode: BUFFERED",
        "request_body_mode: FULL_DUPLEX_STREAMED",
    ),
    "responses through the router": plant(
        "response-mode",
        WARNING,
        f"{MODE}.response_body_mode",
        "response_body_mode: NONE",
        "response_body_mode: STREAMED",
    ),
    "response headers kept": plant(
        "response-mode",
        WARNING,
        f"{MODE}.response_header_mode",
        "response_header_mode: SEND",
        "response_header_mode: SKIP",
        "              allow_mode_override: true\n",
        "",
    ),
    "only watching": plant(
        "observability",
        ERROR,
        f"{FILTER}.observability_mode",
        "message_timeout: 1s",
        "message_timeout: 1s\n              observability_mode: true",
    ),
    "metadata dropped": plant(
        "receiving-namespaces",
        ERROR,
        f"{FILTER}.metadata_options.receiving_namespaces.untyped",
        "              metadata_options: {receiving_namespaces: {untyped: [envoy.lb]}}\n",
        "",
    ),
    "other metadata let in": plant(
        "receiving-namespaces",
        ERROR,
        f"{FILTER}.metadata_options.receiving_namespaces.untyped",
        "untyped: [envoy.lb]",
        "untyped: [envoy.ld]",
    ),
    "retry-after dropped": plant(
        "mutation-rules", WARNING, f"{FILTER}.mutation_rules", "|retry-after[a-z-]*)$", ")$"
    ),
    "the bound on headers dropped": plant(
        "mutation-rules", WARNING, f"{FILTER}.mutation_rules", "|envoy-upstream-rq-per-try)", ")"
    ),
    "the cluster's header dropped": plant(
        "mutation-rules",
        ERROR,
        f"{FILTER}.mutation_rules",
        "gateway|extproc|envoy",
        "gateway|envoy",
        file="cluster-per-worker.yaml",
    ),
    "content type hidden": plant(
        "forward-rules",
        ERROR,
        f"{FILTER}.forward_rules",
        "message_timeout: 1s",
        "message_timeout: 1s\n"
        "              forward_rules: {disallowed_headers: {patterns: [{prefix: content-}]}}",
    ),
    "bounds hidden": plant(
        "forward-rules",
        WARNING,
        f"{FILTER}.forward_rules",
        "message_timeout: 1s",
        "message_timeout: 1s\n"
        "              forward_rules: {allowed_headers: {patterns:"
        " [{exact: ':path'}, {prefix: content-}, {exact: x-request-id}]}}",
    ),
    "who answered isn't told": plant(
        "response-attributes",
        WARNING,
        f"{FILTER}.response_attributes",
        "response_attributes: [upstream.address, ",
        "response_attributes: [",
    ),
    "routes not chosen again": plant(
        "route-cache",
        ERROR,
        f"{FILTER}.route_cache_action",
        "route_cache_action: CLEAR",
        "route_cache_action: RETAIN",
        file="cluster-per-worker.yaml",
    ),
    "no refusals": plant(
        "immediate-response",
        WARNING,
        f"{FILTER}.disable_immediate_response",
        "message_timeout: 1s",
        "message_timeout: 1s\n              disable_immediate_response: true",
    ),
    "no filter": plant(
        "no-filter",
        ERROR,
        MANAGER,
        "http.ext_proc.v3.ExternalProcessor\n",
        "http.ext_proc.v3.SomethingElse\n",
    ),
    # Routes.
    "asked in vain": plant(
        "in-vain",
        NOTE,
        f"{HOST}.routes[3].route.cluster",
        "                direct_response: {status: 404}\n                typed_per_filter_config:"
        " *without_router\n",
        "                route: {cluster: website, timeout: 5s}\n",
        "\n  - name: ext_proc\n    type",
        "\n  - name: website\n    type: STRICT_DNS\n\n  - name: ext_proc\n    type",
    ),
    "route timeout by default": plant("route-timeout", ERROR, f"{ROUTE}.route.timeout", TIMEOUT, ""),
    "route timeout of a minute": plant(
        "route-timeout", ERROR, f"{ROUTE}.route.timeout", "timeout: 0s", "timeout: 60s"
    ),
    "idle timeout by default": plant(
        "idle-timeout",
        NOTE,
        f"{MANAGER}.stream_idle_timeout",
        "          stream_idle_timeout: 1800s\n",
        "",
    ),
    "idle timeout of the route": plant(
        "idle-timeout",
        WARNING,
        f"{ROUTE}.route.idle_timeout",
        TIMEOUT,
        TIMEOUT + "                  idle_timeout: 20s\n",
    ),
    "streams of two minutes": plant(
        "stream-duration",
        ERROR,
        f"{MANAGER}.common_http_protocol_options.max_stream_duration",
        "          stream_idle_timeout: 1800s\n",
        "          stream_idle_timeout: 1800s\n"
        "          common_http_protocol_options: {max_stream_duration: 120s}\n",
    ),
    "no retries": plant("retries", ERROR, f"{RETRY}.num_retries", "num_retries: 3", "num_retries: 0"),
    "503 not retried": plant(
        "retries",
        WARNING,
        f"{RETRY}.retry_on",
        "retry_on: reset,retriable-status-codes",
        "retry_on: reset",
    ),
    "the bound on headers not retried": plant(
        "retries",
        WARNING,
        f"{RETRY}.retry_on",
        "retry_on: reset,retriable-status-codes",
        "retry_on: connect-failure,refused-stream,retriable-status-codes",
    ),
    "one retry": plant("tries", NOTE, f"{RETRY}.num_retries", "num_retries: 3", "num_retries: 1"),
    "answers begun anew": plant(
        "try-timeout",
        ERROR,
        f"{RETRY}.per_try_timeout",
        "                num_retries: 3\n",
        "                num_retries: 3\n                per_try_timeout: 30s\n",
    ),
    "any host for a retry": plant("retry-hosts", NOTE, f"{RETRY}.retry_host_predicate", PREDICATE, ""),
    "canaries left out": plant(
        "retry-hosts",
        WARNING,
        f"{RETRY}.retry_host_predicate[0]",
        "retry.host.previous_hosts.v3.PreviousHostsPredicate",
        "retry.host.omit_canary_hosts.v3.OmitCanaryHostsPredicate",
    ),
    "another priority for a retry": plant(
        "retry-hosts",
        WARNING,
        f"{RETRY}.retry_priority",
        "                num_retries: 3\n",
        "                num_retries: 3\n"
        "                retry_priority: {name: envoy.retry_priorities.previous_priorities}\n",
    ),
    "body limit by default": plant("body-limit", NOTE, f"{ROUTE}.request_body_buffer_limit", LIMIT, ""),
    "body limit of the connection": plant(
        "body-limit",
        NOTE,
        "static_resources.listeners[0].per_connection_buffer_limit_bytes",
        LIMIT,
        "",
        "  - name: inference\n    address",
        "  - name: inference\n    per_connection_buffer_limit_bytes: 524288\n    address",
    ),
    "bodies not kept for retries": plant(
        "retry-buffer",
        WARNING,
        f"{ROUTE}.request_body_buffer_limit",
        "request_body_buffer_limit: 16777216",
        "request_body_buffer_limit: 65536",
    ),
    "bodies not kept, the old way": plant(
        "retry-buffer",
        WARNING,
        f"{HOST}.per_request_buffer_limit_bytes",
        LIMIT,
        "",
        '              domains: ["*"]\n',
        '              domains: ["*"]\n              per_request_buffer_limit_bytes: 32768\n',
        "  - name: inference\n    address",
        "  - name: inference\n    per_connection_buffer_limit_bytes: 16777216\n    address",
    ),
    "workers by a client's header": plant(
        "spoofable-worker",
        ERROR,
        f"{LB}.override_host_sources[0].header",
        SOURCE,
        "- header: x-gateway-destination-endpoint",
        "              - remove: x-gateway-destination-endpoint\n",
        "",
    ),
    "clusters by a client's header": plant(
        "spoofable-cluster",
        ERROR,
        f"{HOST}.routes[2].route.cluster_header",
        "              - remove: x-extproc-cluster\n",
        "",
        file="cluster-per-worker.yaml",
    ),
    # Clusters.
    "no circuit breakers": plant(
        "circuit-breakers",
        WARNING,
        f"{POOL}.circuit_breakers",
        "    circuit_breakers:\n      thresholds:\n" + BREAKERS,
        "    anything_else:\n      thresholds:\n" + BREAKERS,
    ),
    "a low circuit breaker": plant(
        "circuit-breakers",
        WARNING,
        f"{LIMITS}.max_requests",
        BREAKERS,
        BREAKERS.replace("max_requests: 100000", "max_requests: 400"),
    ),
    "breakers for high priority only": plant(
        "circuit-breakers",
        WARNING,
        f"{POOL}.circuit_breakers.thresholds",
        BREAKERS,
        BREAKERS + "        priority: HIGH\n",
    ),
    "a breaker for each worker, too low": plant(
        "circuit-breakers",
        WARNING,
        "static_resources.clusters[1].circuit_breakers.thresholds[0].max_requests",
        "        max_requests: 240\n",
        "        max_requests: 100\n",
        file="cluster-per-worker.yaml",
    ),
    "three retries at a time": plant("retry-budget", WARNING, f"{LIMITS}.max_retries", BUDGET, ""),
    "no fallback policy": plant("fallback-policy", ERROR, f"{LB}.fallback_policy", FALLBACK, ""),
    "locality weights": plant(
        "fallback-policy",
        ERROR,
        f"{POOL}.common_lb_config.locality_weighted_lb_config",
        "    load_balancing_policy:\n",
        "    common_lb_config: {locality_weighted_lb_config: {}}\n    load_balancing_policy:\n",
    ),
    "two judges": plant(
        "outlier-detection",
        WARNING,
        f"{POOL}.outlier_detection",
        "    load_balancing_policy:\n",
        "    outlier_detection: {consecutive_5xx: 5}\n    load_balancing_policy:\n",
    ),
    "connections kept too long": plant(
        "upstream-idle",
        WARNING,
        f"{POOL}.{OPTIONS}.common_http_protocol_options.idle_timeout",
        "        common_http_protocol_options: {idle_timeout: 4s}\n",
        "",
    ),
    "HTTP/2 to workers": plant(
        "upstream-http2",
        ERROR,
        f"{POOL}.{OPTIONS}.explicit_http_config.http2_protocol_options",
        "explicit_http_config: {http_protocol_options: {}}",
        "explicit_http_config: {http2_protocol_options: {}}",
    ),
    "a long wait for a connection": plant(
        "connect-timeout",
        NOTE,
        f"{POOL}.connect_timeout",
        "    type: STATIC\n    connect_timeout: 0.25s\n    load_assignment:\n      cluster_name: workers\n",
        "    type: STATIC\n    load_assignment:\n      cluster_name: workers\n",
    ),
    "router's breakers by default": plant(
        "router-circuit-breakers",
        WARNING,
        f"{ROUTER}.circuit_breakers",
        "    circuit_breakers:\n      thresholds: [{max_requests: 100000, max_pending_requests: 100000}]\n",
        "",
    ),
    "router's breakers too low": plant(
        "router-circuit-breakers",
        WARNING,
        f"{ROUTER}.circuit_breakers.thresholds[0].max_requests",
        "[{max_requests: 100000, max_pending_requests",
        "[{max_requests: 64, max_pending_requests",
    ),
    "router without HTTP/2": plant(
        "router-http2",
        ERROR,
        f"{ROUTER}.{OPTIONS}.explicit_http_config.http2_protocol_options",
        KEEPALIVE,
        "          http_protocol_options: {}\n",
    ),
    "a router that may vanish": plant(
        "router-http2",
        WARNING,
        f"{ROUTER}.{OPTIONS}.explicit_http_config.http2_protocol_options.connection_keepalive",
        KEEPALIVE,
        "          http2_protocol_options: {}\n",
    ),
    "health pages not asked": plant(
        "health-checks",
        WARNING,
        f"{EXTPROC}.health_interval_s",
        "extproc: {max_inflight: 120}",
        "extproc: {max_inflight: 120, health_interval_s: 0}",
    ),
    "health without effect": plant(
        "health-checks",
        WARNING,
        f"{EXTPROC}.max_ejected_share",
        "extproc: {max_inflight: 120}",
        "extproc: {max_inflight: 120, max_ejected_share: 0}",
    ),
    "priorities by clients": plant(
        "client-priority",
        NOTE,
        f"{EXTPROC}.client_priority",
        "extproc: {max_inflight: 120}",
        "extproc: {max_inflight: 120, client_priority: true}",
    ),
    "a worker twice": plant(
        "yaml",
        WARNING,
        f"{POOL}.load_assignment.endpoints[0].lb_endpoints[3]",
        "port_value: 8004",
        "port_value: 8003",
    ),
    "a pool that nothing steers": plant(
        "yaml",
        WARNING,
        POOL,
        "load_balancing_policies.override_host.v3.OverrideHost",
        "load_balancing_policies.override_most.v3.OverrideMost",
    ),
}


def examine(path: Path, envoy: EnvoyFacts | None = None) -> tuple[Finding, ...]:
    return run(CHECKS, Fleet(read_setup(read(path)), envoy=envoy)).findings


def planted(plant: Plant, folder: Path) -> tuple[Path, str]:
    text = (FOLDER / plant.file).read_text()
    for old, new in plant.edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / plant.file
    file.write_text(text)
    return file, text


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_each_is_found_alone_and_in_its_place(plant: Plant, tmp_path: Path) -> None:
    file, text = planted(plant, tmp_path)
    (found,) = examine(file)
    assert (found.check, found.severity) == (plant.check, plant.severity)
    place = found.places[0]
    assert (place.file, place.path) == (str(file), plant.path)
    node, found_steps, missing = walk(yaml.safe_load(text), plant.path)
    if not missing and not isinstance(node, dict | list):
        assert node == found.value
    line = text.splitlines()[(place.line or 0) - 1]
    assert "- " in line if isinstance(found_steps[-1], int) else found_steps[-1] in line
    assert found.why.endswith(".")
    assert found.found
    assert found.fix


STEP = re.compile(r'\["([^"]+)"\]|([A-Za-z_@][\w@-]*)|\[(\d+)\]')


def walk(data: Any, path: str) -> tuple[Any, list[str | int], bool]:
    """What a path leads to, the steps that are there, and whether there are steps that aren't."""
    steps: list[str | int] = [key or name or int(index) for key, name, index in STEP.findall(path)]
    for position, step in enumerate(steps):
        if not (isinstance(data, list) or (isinstance(data, dict) and step in data)):
            return None, steps[:position], True
        data = data[step]
    return data, steps, False


@pytest.mark.parametrize("seed", range(100))
def test_any_value_anywhere_is_judged_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    data = envoy_setup.load(FOLDER / rng.choice(("envoy.yaml", "cluster-per-worker.yaml")))
    for _ in range(rng.choice((1, 1, 2, 4))):
        *way, last = rng.choice([path for path in paths(data) if path])
        inner = data
        for step in way:
            inner = inner[step]
        if rng.random() < 0.3:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(rng.choice(VALUES))
    resources = Resources(source="envoy.yaml")
    try:
        resources.add(Document("envoy.yaml", data))
        source = Source(arrange(resources), resources)
    except ConfigError:
        return
    fleet = Fleet(read_setup(source))
    verdict = run(CHECKS, fleet)
    assert show(verdict, fleet)
    assert msgspec.json.encode(as_json(verdict, fleet))


VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 2**40, 3.5, True, False, "", "x", "0s", "-1s", "1.5s", "true", "8001", "NONE", "SEND"),
    *(
        [],
        {},
        [1],
        ["a"],
        [{}],
        [None],
        [[]],
        {"a": 1},
        {"@type": "x"},
        {"value": {}},
        [{"typed_config": None}],
    ),
)


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    steps = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for step, inner in steps:
        yield from paths(inner, (*path, step))


def test_there_are_plants_for_every_check_of_the_yaml() -> None:
    from extproc.doctor import checks_cluster, checks_filter, checks_route

    names = {
        check.name for module in (checks_filter, checks_route, checks_cluster) for check in module.CHECKS
    }
    assert names - {plant.check for plant in PLANTS.values()} == {"request-attributes"}


@pytest.mark.parametrize("name", [*SHIPPED, Path("istio"), Path("istio/envoyfilter.yaml")], ids=str)
@pytest.mark.parametrize("version", [None, (1, 37), (1, 38), (1, 40)])
def test_what_we_ship_has_nothing_wrong(name: Path, version: tuple[int, int] | None) -> None:
    envoy = EnvoyFacts("http://127.0.0.1:9901", version=version) if version else None
    assert examine(FOLDER / name, envoy) == ()


TWO_POOLS = """
  - name: others
    metadata: {filter_metadata: {extproc: {}}}
    type: STATIC
    connect_timeout: 0.25s
    load_assignment:
      cluster_name: others
      endpoints:
      - lb_endpoints: [{endpoint: {address: {socket_address: {address: 10.0.0.9, port_value: 80}}}}]
    load_balancing_policy: *least
    circuit_breakers: *breakers
    typed_extension_protocol_options: *options
"""


def edited(folder: Path, *edits: str, file: str = "envoy.yaml") -> tuple[Finding, ...]:
    return examine(planted(plant("", NOTE, "", *edits, file=file), folder)[0])


SHARED = (
    "    load_balancing_policy:\n      policies:\n",
    "    load_balancing_policy: &least\n      policies:\n",
    "    circuit_breakers:\n      thresholds:\n      - max_connections",
    "    circuit_breakers: &breakers\n      thresholds:\n      - max_connections",
    "    typed_extension_protocol_options:\n      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:\n"
    '        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions\n'
    "        explicit_http_config: {http_protocol_options",
    "    typed_extension_protocol_options: &options\n     "
    " envoy.extensions.upstreams.http.v3.HttpProtocolOptions:\n"
    '        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions\n'
    "        explicit_http_config: {http_protocol_options",
    "\n  - name: ext_proc\n    type",
    f"{TWO_POOLS}\n  - name: ext_proc\n    type",
)


def test_two_pools_need_the_cluster_s_name(tmp_path: Path) -> None:
    assert edited(tmp_path, *SHARED) == ()
    told = "request_attributes: [xds.cluster_name, xds.route_name]"
    (found,) = edited(tmp_path, *SHARED, told, "request_attributes: [xds.route_name]")
    assert (found.check, found.places[0].path) == ("request-attributes", f"{FILTER}.request_attributes")
    named = LIMIT + OVERRIDE % "grpc_initial_metadata: [{key: x-extproc-pool, value: workers}]"
    assert edited(tmp_path, *SHARED, told, "request_attributes: [xds.route_name]", LIMIT, named) == ()


#: What is written differently from our files, and is right all the same.
RIGHT = {
    "full duplex": (
        "request_body_mode: BUFFERED",
        "request_body_mode: FULL_DUPLEX_STREAMED",
        "request_trailer_mode: SKIP",
        "request_trailer_mode: SEND",
    ),
    "a header that clients can't send": (SOURCE, "- header: x-gateway-destination-endpoint"),
    "a header for internal use": (
        SOURCE,
        "- header: x-gateway-destination-endpoint",
        "              - remove: x-gateway-destination-endpoint\n",
        "",
        "            name: inference\n            virtual_hosts",
        "            name: inference\n"
        "            internal_only_headers: [X-Gateway-Destination-Endpoint]\n            virtual_hosts",
    ),
    "the host's body limit": (
        LIMIT,
        "",
        '              domains: ["*"]\n',
        '              domains: ["*"]\n              request_body_buffer_limit: "16777216"\n',
    ),
    "the connection's body limit": (
        LIMIT,
        "",
        "  - name: inference\n    address",
        "  - name: inference\n    per_connection_buffer_limit_bytes: 16777216\n    address",
    ),
    "off but for routes that turn it on": (
        "          - name: envoy.filters.http.ext_proc\n",
        "          - name: envoy.filters.http.ext_proc\n            disabled: true\n",
        LIMIT,
        LIMIT + OVERRIDE % "",
    ),
    "health asked by Envoy": (
        "extproc: {max_inflight: 120}",
        "extproc: {max_inflight: 120, health_interval_s: 0}",
        "    load_balancing_policy:\n",
        "    health_checks: [{timeout: 1s, interval: 1s, http_health_check: {path: /health}}]\n"
        "    load_balancing_policy:\n",
    ),
    "ejection that only logs": (
        "    load_balancing_policy:\n",
        "    outlier_detection: {enforcing_consecutive_5xx: 0, enforcing_success_rate: 0}\n"
        "    load_balancing_policy:\n",
    ),
    "other names of the same": (
        "failure_mode_allow: true",
        "failureModeAllow: true",
        "response_trailer_mode: SEND",
        "responseTrailerMode: 1",
        "message_timeout: 1s",
        "messageTimeout: 1.500s",
    ),
    "many retries in place of a budget": (BUDGET, "        max_retries: 1000\n"),
    "TCP keepalive": (
        KEEPALIVE,
        "          http2_protocol_options: {}\n    upstream_connection_options: {tcp_keepalive: {}}\n",
    ),
    "no bound on headers": (
        "retry_on: reset,retriable-status-codes",
        "retry_on: connect-failure,refused-stream,retriable-status-codes",
        "extproc: {max_inflight: 120}",
        "extproc: {max_inflight: 120, header_timeout_s: 0}",
    ),
}


@pytest.mark.parametrize("edits", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_not_blamed(edits: tuple[str, ...], tmp_path: Path) -> None:
    assert edited(tmp_path, *edits) == ()


@pytest.mark.parametrize(
    ("version", "severity"), [((1, 36), None), ((1, 37), ERROR), ((1, 38), ERROR), ((1, 39), None)]
)
def test_trailers_matter_to_two_versions(
    version: tuple[int, int], severity: Severity | None, tmp_path: Path
) -> None:
    file, _ = planted(PLANTS["trailers and no way to ask for them"], tmp_path)
    found = [f for f in examine(file, EnvoyFacts("", version=version)) if f.check == "trailers"]
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_an_old_envoy_goes_by_the_connection_s_limit(tmp_path: Path) -> None:
    (found,) = examine(FOLDER / "envoy.yaml", EnvoyFacts("", version=(1, 36)))
    path = "static_resources.listeners[0].per_connection_buffer_limit_bytes"
    assert (found.check, found.places[0].path) == ("body-limit", path)
    old = examine(FOLDER / "envoy.yaml", EnvoyFacts("", version=(1, 35)))
    assert [f.check for f in old] == ["envoy-version", "body-limit"]


def test_several_findings_come_worst_first(tmp_path: Path) -> None:
    named = ("idle timeout by default", "fail closed", "retry-after dropped")
    edits = [edit for name in named for pair in PLANTS[name].edits for edit in pair]
    found = edited(tmp_path, *edits)
    assert [f.check for f in found] == ["failure-mode", "mutation-rules", "idle-timeout"]


def test_what_stands_in_several_places_is_said_once(tmp_path: Path) -> None:
    (found,) = edited(
        tmp_path, "        max_requests: 240\n", "        max_requests: 100\n", file="cluster-per-worker.yaml"
    )
    assert [place.path for place in found.places] == [
        f"static_resources.clusters[{index}].circuit_breakers.thresholds[0].max_requests"
        for index in range(1, 5)
    ]


def test_routes_in_a_file_of_their_own(tmp_path: Path) -> None:
    """RDS: the place is in the routes' file."""
    bootstrap = yaml.safe_load((FOLDER / "envoy.yaml").read_text())
    manager = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager.pop("route_config")
    routes["virtual_hosts"][0]["routes"][2]["route"]["timeout"] = "20s"
    routes["@type"] = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
    (tmp_path / "routes.yaml").write_text(yaml.safe_dump({"resources": [routes]}))
    source = {"path_config_source": {"path": str(tmp_path / "routes.yaml")}}
    manager["rds"] = {"route_config_name": "inference", "config_source": source}
    (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(bootstrap))
    (found,) = examine(tmp_path / "envoy.yaml")
    assert found.check == "route-timeout"
    assert found.places[0].file == str(tmp_path / "routes.yaml")
    assert found.places[0].path == "resources[0].virtual_hosts[0].routes[2].route.timeout"


def test_istio_s_manifests_are_read_in_place(tmp_path: Path) -> None:
    for file in (FOLDER / "istio").glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    assert examine(tmp_path) == ()
    for name, old, new in (
        ("envoyfilter.yaml", "failure_mode_allow: true", "failure_mode_allow: false"),
        ("router.yaml", "max_inflight: 120}", "max_inflight: 120, health_interval_s: 0}"),
    ):
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1
        (tmp_path / name).write_text(text.replace(old, new))
    filter_, health = examine(tmp_path)
    assert (filter_.check, health.check) == ("failure-mode", "health-checks")
    path = "spec.configPatches[0].patch.value.typed_config.failure_mode_allow"
    assert (filter_.places[0].file, filter_.places[0].path) == (str(tmp_path / "envoyfilter.yaml"), path)
    place = health.places[0]
    assert place.file == str(tmp_path / "router.yaml")
    inner = "static_resources.clusters[0].metadata.filter_metadata.extproc.health_interval_s"
    assert place.path == f'data["envoy.yaml"]: {inner}'
    assert "health_interval_s" in (tmp_path / "router.yaml").read_text().splitlines()[(place.line or 0) - 1]
