"""Clusters and pool settings: limits that end before the router's, and second opinions on who is healthy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extproc.doctor.check import Check
from extproc.doctor.finding import Finding, Place, Severity, at
from extproc.doctor.fleet import Fleet
from extproc.doctor.setup import HTTP_OPTIONS, Cluster
from extproc.doctor.values import count, seconds, told
from extproc.envoyconf import Problem
from extproc.envoyconf.document import Node
from extproc.envoyconf.steering import override_hosts
from extproc.fleet.config import PoolConfig
from extproc.routing.demand import PRIORITY_HEADER

#: Envoy's defaults.
DEFAULT_LIMIT = 1024
DEFAULT_RETRIES = 3

#: uvicorn, under vLLM and SGLang, closes idle connections after this long.
WORKER_KEEPALIVE_S = 5.0

#: A longer wait for a connection is a wait for a machine that isn't there; Envoy's default is 5 s.
LONGEST_CONNECT_S = 2.0


def _clusters(fleet: Fleet) -> list[Cluster]:
    """Pool clusters that an Envoy runs on, not those of a file for the router alone."""
    return [
        cluster
        for cluster in fleet.setup.clusters
        if fleet.setup.listening or cluster.node.get("load_balancing_policy") is not None
    ]


def _breakers(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    wanted = cluster.max_inflight
    yield from _low(
        cluster.node,
        ("max_connections", "max_pending_requests", "max_requests"),
        wanted,
        f"The router lets {wanted:,} requests be in flight here (max_inflight, {len(cluster.own)}"
        " workers); beyond Envoy's limit, which is one for the whole cluster, it answers 503 without a"
        " retry.",
        "circuit_breakers: {thresholds: [{max_connections: 100000, max_pending_requests: 100000,"
        " max_requests: 100000, retry_budget: {budget_percent: {value: 100}, min_retry_concurrency: 100}}]}",
    )


def _low(cluster: Node, names: tuple[str, ...], wanted: int, why: str, fix: str) -> Iterator[Finding]:
    """One finding about all of these limits that are unset, or lower than ``wanted``."""
    limits = _default_priority(cluster)
    if limits is None:
        node = cluster.field("circuit_breakers", "thresholds")
        node = node if node.value is not None else cluster.field("circuit_breakers")
        told_of = f"{told(node)}: {', '.join(names)} are {DEFAULT_LIMIT} each"
        yield Finding(Severity.WARNING, at(node), told_of, why, fix, node.value)
        return
    low = []
    for name in names:
        node = limits.field(name)
        limit = count(node)
        if limit is None or limit < wanted:
            low.append((name, node))
    if low:
        found = ", ".join(f"{name} {told(node, str(DEFAULT_LIMIT))}" for name, node in low)
        value = {name: node.value for name, node in low} if len(low) > 1 else low[0][1].value
        yield Finding(Severity.WARNING, at(*(node for _, node in low)), found, why, fix, value)


def _default_priority(cluster: Node) -> Node | None:
    """The thresholds of ordinary requests; None if there are none."""
    for thresholds in cluster.items("circuit_breakers", "thresholds"):
        if thresholds.field("priority").value in (None, "DEFAULT", 0):
            return thresholds
    return None


def _retry_budget(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    limits = _default_priority(cluster.node)
    most = max((endpoint.max_inflight for endpoint in cluster.own), default=0)
    if limits is None or limits.get("retry_budget") is not None:
        return  # without any thresholds, the breakers' finding says it all
    retries = limits.field("max_retries")
    allowed = count(retries)
    allowed = DEFAULT_RETRIES if allowed is None else allowed
    if allowed < most:
        yield Finding(
            Severity.WARNING,
            at(retries),
            told(retries, "3"),
            f"When a worker dies, all its requests, up to {most}, must move at once; Envoy moves {allowed}"
            " at a time and answers 503 to the rest.",
            "retry_budget: {budget_percent: {value: 100}, min_retry_concurrency: 100}",
            retries.value,
        )


def _fallback(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    for policy in override_hosts(cluster.node):
        node = policy.field("fallback_policy")
        if not list(node.items("policies")):
            yield Finding(
                Severity.ERROR,
                at(node),
                told(node),
                "A request without a pick, or with a list that is used up, has no worker to go to; Envoy"
                " refuses the cluster.",
                "fallback_policy: {policies: [{typed_extension_config:"
                " envoy.load_balancing_policies.least_request}]}",
                node.value,
            )
        locality = cluster.node.field("common_lb_config", "locality_weighted_lb_config")
        if locality.value is not None:
            yield Finding(
                Severity.ERROR,
                at(locality),
                "is set",
                "Envoy refuses a cluster that has locality weights and an override_host policy.",
                "leave locality_weighted_lb_config out (Istio: localityLbSetting: {enabled: false})",
                locality.value,
            )


def _outlier(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    node = cluster.node.field("outlier_detection")
    if node.value is None or len(cluster.own) < 2:  # alone in its cluster, a worker has a priority behind it
        return
    names = ("enforcing_consecutive_5xx", "enforcing_success_rate")
    if all(count(node.field(name)) == 0 for name in names):
        return
    yield Finding(
        Severity.WARNING,
        at(node),
        "is on",
        "Envoy counts a full engine's 503 as a failure and takes its worker from the fallback policy, while"
        " override_host doesn't look and sends it the router's picks: two judges, two pictures.",
        "leave outlier_detection out; the router ejects failing workers (max_ejected_share, eject_s)",
        node.value,
    )


def _upstream_idle(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    node = cluster.options.field("common_http_protocol_options", "idle_timeout")
    older = cluster.node.get("common_http_protocol_options", "idle_timeout")
    node = older if older is not None and node.value is None else node
    idle_s = seconds(node)
    if idle_s is None or idle_s == 0.0 or idle_s >= WORKER_KEEPALIVE_S:
        yield Finding(
            Severity.WARNING,
            at(node),
            told(node, "1h"),
            "vLLM and SGLang close idle connections after 5 s; a request that is sent just then is reset.",
            "common_http_protocol_options: {idle_timeout: 4s}",
            node.value,
        )


def _upstream_http2(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    options = cluster.options.get("explicit_http_config", "http2_protocol_options")
    options = options or cluster.node.get("http2_protocol_options")
    if options is not None:
        yield Finding(
            Severity.ERROR,
            at(options),
            "is set",
            "vLLM and SGLang speak HTTP/1.1 only, so no request gets an answer.",
            "explicit_http_config: {http_protocol_options: {}}",
            options.value,
        )


def _connect_timeout(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    node = cluster.node.field("connect_timeout")
    wait_s = seconds(node)
    if wait_s is None or wait_s > LONGEST_CONNECT_S:
        yield Finding(
            Severity.NOTE,
            at(node),
            told(node, "5s"),
            "A worker whose machine is gone costs each of its requests so long before the next one is tried.",
            "connect_timeout: 0.25s",
            node.value,
        )


def _router_breakers(cluster: Node, fleet: Fleet) -> Iterator[Finding]:
    wanted = sum(e.max_inflight for pool in fleet.setup.config.pools.values() for e in pool.endpoints)
    yield from _low(
        cluster,
        ("max_requests", "max_pending_requests"),
        wanted,
        f"Each request in flight holds one stream to the router, and there may be {wanted:,} and more; the"
        " rest goes unsteered, or gets 500 without failure_mode_allow.",
        "circuit_breakers: {thresholds: [{max_requests: 100000, max_pending_requests: 100000}]}",
    )


def _router_http2(cluster: Node, fleet: Fleet) -> Iterator[Finding]:
    options = cluster.field("typed_extension_protocol_options", HTTP_OPTIONS)
    node = options.field("explicit_http_config", "http2_protocol_options")
    older = cluster.get("http2_protocol_options")
    if node.value is None and older is None and options.get("auto_config") is None:
        yield Finding(
            Severity.ERROR,
            at(node),
            "is unset, so Envoy speaks HTTP/1.1",
            "ext_proc is gRPC, which needs HTTP/2: the router is never reached.",
            "explicit_http_config: {http2_protocol_options: {connection_keepalive: {interval: 10s,"
            " timeout: 5s}}}",
        )
        return
    found = older or (
        node if node.value is not None else options.field("auto_config", "http2_protocol_options")
    )
    keepalive = found.field("connection_keepalive")
    tcp = cluster.get("upstream_connection_options", "tcp_keepalive")
    if seconds(keepalive.field("interval")) is None and tcp is None:
        yield Finding(
            Severity.WARNING,
            at(keepalive),
            told(keepalive),
            "A router that is gone without a word (its machine, a network) is noticed only when messages"
            " time out, one by one, and streams that are quiet never end.",
            "connection_keepalive: {interval: 10s, timeout: 5s}",
            keepalive.value,
        )


def _health(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    settings = pool.settings
    checked = any(
        list(cluster.node.items("health_checks"))
        for cluster in fleet.setup.clusters
        if cluster.pool.name == pool.name
    )
    if settings.health_interval_s == 0 and not checked:
        node = fleet.setup.pool_field(pool.name, "health_interval_s")
        yield Finding(
            Severity.WARNING,
            at(node),
            told(node),
            "Nobody asks the workers' health pages: one that drains or has lost its engine is noticed by"
            " failing requests only.",
            "health_interval_s: 2",
            node.value,
        )
    if settings.max_ejected_share == 0:
        node = fleet.setup.pool_field(pool.name, "max_ejected_share")
        yield Finding(
            Severity.WARNING,
            at(node),
            told(node),
            "Health has no effect: a dead worker keeps getting its share of the picks, each of which costs"
            " a retry.",
            "max_ejected_share: 0.5",
            node.value,
        )


def _client_priority(pool: PoolConfig, fleet: Fleet) -> Iterator[Finding]:
    managers = {id(a.manager): a.manager for a in fleet.setup.asking}.values()
    if pool.settings.client_priority and not all(PRIORITY_HEADER in m.removed_headers for m in managers):
        node = fleet.setup.pool_field(pool.name, "client_priority")
        yield Finding(
            Severity.NOTE,
            at(node),
            told(node),
            f"Any client may send {PRIORITY_HEADER} and be served while others are refused.",
            "client_priority: false, and x-extproc-priority per route in grpc_initial_metadata; leave it"
            " if all clients are yours",
            node.value,
        )


def _warning(problem: Problem, fleet: Fleet) -> Iterator[Finding]:
    yield Finding(
        Severity.WARNING,
        (Place(problem.file, problem.line, problem.path),),
        f"{problem.message}",
        "It looks like a slip: the router goes on without it.",
        problem.fix or "put it right, or leave it out",
        problem.value,
    )


def _pools(fleet: Fleet) -> Iterable[PoolConfig]:
    return fleet.setup.config.pools.values()


def _told_of(fleet: Fleet) -> list[Problem]:
    return fleet.setup.warnings


CHECKS = (
    Check("yaml", "what the router itself warns of when it reads the YAML", _told_of, _warning),
    Check(
        "circuit-breakers",
        "a pool's circuit breakers at their default of 1024, or under the sum of `max_inflight`",
        _clusters,
        _breakers,
    ),
    Check(
        "retry-budget", "fewer retries at a time than a dying worker has requests", _clusters, _retry_budget
    ),
    Check("fallback-policy", "an `override_host` that Envoy refuses", _clusters, _fallback),
    Check("outlier-detection", "Envoy's ejection beside the router's", _clusters, _outlier),
    Check("upstream-idle", "connections kept longer than workers keep them", _clusters, _upstream_idle),
    Check("upstream-http2", "HTTP/2 to workers", _clusters, _upstream_http2),
    Check("connect-timeout", "a long wait for machines that are gone", _clusters, _connect_timeout),
    Check(
        "router-circuit-breakers",
        "the router's cluster at the default of 1024 requests, or under the sum of `max_inflight`",
        lambda fleet: fleet.setup.router_clusters,
        _router_breakers,
    ),
    Check(
        "router-http2",
        "the router's cluster without HTTP/2 or keepalive",
        lambda fleet: fleet.setup.router_clusters,
        _router_http2,
    ),
    Check("health-checks", "health pages that nobody asks, or whose answer has no effect", _pools, _health),
    Check("client-priority", "priorities that any client may set", _pools, _client_priority),
)
