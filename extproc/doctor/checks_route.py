"""Routes to a pool: how long a stream may last, who serves it after a failure, who may choose a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extproc.doctor.check import Check
from extproc.doctor.finding import Finding, Severity, at
from extproc.doctor.fleet import Fleet
from extproc.doctor.setup import Asking, Cluster
from extproc.doctor.values import count, seconds, told
from extproc.envoyconf.document import Node
from extproc.envoyconf.steering import DEFAULT_BUFFER_BYTES, override_hosts
from extproc.fleet.config import PoolConfig

#: Shorter bounds cut long answers.
LEAST_STREAM_S = 300.0

#: Envoy's defaults.
ROUTE_TIMEOUT_S = 15.0
STREAM_IDLE_TIMEOUT_S = 300.0

#: What covers a worker that can't be reached, one that resets, and one that answers 503.
_RESETS = frozenset({"reset", "5xx", "gateway-error"})
_REFUSALS = frozenset({"reset", "5xx", "gateway-error", "connect-failure"})

_PREVIOUS_HOSTS = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
_PREVIOUS_PRIORITIES = "envoy.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig"

#: A route's limit of the body is heeded from this version on.
_HEEDS_ROUTE_LIMIT = (1, 37)


def _asking(fleet: Fleet) -> Iterable[Asking]:
    return fleet.setup.serving


def _retrying(fleet: Fleet) -> list[Asking]:
    return [asking for asking in fleet.setup.serving if asking.retry_policy.value is not None]


def _in_vain(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    if fleet.setup.config.pools and not fleet.setup.pools_of(asking):
        node = asking.action.field("cluster")
        yield Finding(
            Severity.NOTE,
            at(node),
            f"{told(node)}, which is no pool",
            "The router is asked on this route, with the whole body, and has nothing to say.",
            "typed_per_filter_config of the route: envoy.filters.http.ext_proc with disabled: true",
            node.value,
        )


def _route_timeout(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    node = asking.action.field("timeout")
    timeout_s = seconds(node)
    timeout_s = ROUTE_TIMEOUT_S if timeout_s is None else timeout_s
    if 0.0 < timeout_s < LEAST_STREAM_S:
        yield Finding(
            Severity.ERROR,
            at(node),
            told(node, "15s"),
            f"Answers that take longer than {timeout_s:g} s, streams too, are cut off.",
            "timeout: 0s",
            node.value,
        )


def _idle_timeout(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    own = asking.action.get("idle_timeout")
    node = own or asking.manager.node.field("stream_idle_timeout")
    timeout_s = seconds(node)
    if timeout_s is None:
        timeout_s = STREAM_IDLE_TIMEOUT_S
    if 0.0 < timeout_s <= STREAM_IDLE_TIMEOUT_S:
        yield Finding(
            Severity.WARNING if timeout_s < STREAM_IDLE_TIMEOUT_S else Severity.NOTE,
            at(node),
            told(node, "300s"),
            "An answer that isn't streamed sends its first byte when its last token is ready, so one that"
            f" takes longer than {timeout_s:g} s gets 504; so does a stream that waits so long for its"
            " first token.",
            "stream_idle_timeout: 1800s" if own is None else "idle_timeout: 1800s",
            node.value,
        )


def _durations(asking: Asking) -> Iterator[Node]:
    yield asking.action.field("max_stream_duration", "max_stream_duration")
    yield asking.manager.node.field("common_http_protocol_options", "max_stream_duration")


def _stream_duration(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    for node in _durations(asking):
        bound_s = seconds(node)
        if bound_s is not None and 0.0 < bound_s < LEAST_STREAM_S:
            yield Finding(
                Severity.ERROR,
                at(node),
                told(node),
                f"Streams that last longer than {bound_s:g} s are cut off.",
                "leave max_stream_duration out",
                node.value,
            )


def _try_timeout(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    for name in ("per_try_timeout", "per_try_idle_timeout"):
        node = asking.retry_policy.field(name)
        bound_s = seconds(node)
        if bound_s is not None and 0.0 < bound_s < LEAST_STREAM_S:
            yield Finding(
                Severity.ERROR,
                at(node),
                told(node),
                "An answer that isn't streamed sends its headers with its last token, so one that takes"
                f" longer than {bound_s:g} s is begun anew on the next worker, as often as retries are"
                " allowed.",
                f"leave {name} out; the router bounds the wait of streams by itself (header_timeout_s)",
                node.value,
            )


def _retries(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    policy = asking.retry_policy
    tries = policy.field("num_retries")
    if policy.value is None or count(tries) == 0:
        node = policy if policy.value is None else tries
        yield Finding(
            Severity.ERROR,
            at(node),
            told(node),
            "A worker that refuses or answers 503 is the client's problem: measured, with retries 6 of 6 such"
            " requests were served by the next worker of the router's list, without them none.",
            "retry_policy: {retry_on: 'reset,retriable-status-codes', retriable_status_codes: [503],"
            " num_retries: 3}",
            node.value,
        )
        return
    conditions = {word.strip() for word in policy.text("retry_on").split(",")}
    codes = {count(item) for item in policy.items("retriable_status_codes")}
    missing = []
    if not conditions & _REFUSALS:
        missing.append("a worker that can't be reached (reset)")
    if not (
        conditions & {"5xx", "gateway-error"} or ("retriable-status-codes" in conditions and 503 in codes)
    ):
        missing.append("a full or draining worker's 503 (retriable-status-codes, 503)")
    if missing:
        node = policy.field("retry_on")
        yield Finding(
            Severity.WARNING,
            at(node),
            f"{told(node)}; not covered: {' and '.join(missing)}",
            "Envoy doesn't go on to the next worker of the router's list then.",
            "retry_on: reset,retriable-status-codes with retriable_status_codes: [503]",
            node.value,
        )
    elif not conditions & _RESETS and any(
        pool.settings.header_timeout_s > 0 for pool in fleet.setup.pools_of(asking)
    ):
        node = policy.field("retry_on")
        yield Finding(
            Severity.WARNING,
            at(node),
            told(node),
            "The router bounds a stream's wait for headers (header_timeout_s); these conditions don't"
            " cover that timeout, so Envoy answers 504 without a retry.",
            "retry_on: reset,retriable-status-codes, or header_timeout_s: 0 for the pool",
            node.value,
        )


def _tries(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    node = asking.retry_policy.field("num_retries")
    tries = count(node)
    tries = 1 if tries is None else tries
    for pool in fleet.setup.pools_of(asking):
        named = min(pool.settings.fallbacks, max(0, len(pool.endpoints) - 1))
        if 0 < tries < named:
            yield Finding(
                Severity.NOTE,
                at(node),
                told(node, "1"),
                f"The router names {named} workers for retries, Envoy tries {tries} of them.",
                f"num_retries: {named}",
                node.value,
            )


def _retry_hosts(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    policy = asking.retry_policy
    predicates = [item.field("typed_config").unpack()[0] for item in policy.items("retry_host_predicate")]
    for index, item in enumerate(policy.items("retry_host_predicate")):
        if predicates[index] != _PREVIOUS_HOSTS:
            yield Finding(
                Severity.WARNING,
                at(item),
                f"is {item.text('name') or predicates[index]}",
                "It passes over workers of the router's list that would do, and a retry may find none.",
                "retry_host_predicate: envoy.retry_host_predicates.previous_hosts, and no other",
                item.value,
            )
    if not predicates:
        node = policy.field("retry_host_predicate")
        yield Finding(
            Severity.NOTE,
            at(node),
            "is unset",
            "After the end of the router's list a retry may go to the worker that has just failed.",
            "retry_host_predicate: envoy.retry_host_predicates.previous_hosts,"
            " host_selection_retry_max_attempts: 5",
        )
    priority = policy.get("retry_priority")
    if priority is not None and asking.action.get("cluster_header") is None:
        yield Finding(
            Severity.WARNING,
            at(priority),
            f"is {priority.text('name')}",
            "It moves a retry to another priority, where the router's list doesn't count; only a cluster per"
            " worker needs it.",
            "leave retry_priority out",
            priority.text("name"),
        )


def _retry_buffer(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    buffer = asking.buffer
    accepted = buffer.accepted_bytes(heeds_own=_heeds_route_limit(fleet))
    if buffer.retried_bytes < accepted:
        node = buffer.own if buffer.own.value is not None else buffer.old
        yield Finding(
            Severity.WARNING,
            at(node),
            told(node),
            f"Bodies up to {accepted:,} bytes are accepted, but those of more than"
            f" {buffer.retried_bytes:,} are not kept for a retry: measured, they get 503 where smaller"
            " ones are served by the next worker.",
            f"request_body_buffer_limit: {max(accepted, 16 * 1024 * 1024)}",
            node.value,
        )


def _heeds_route_limit(fleet: Fleet) -> bool:
    return fleet.envoy_version is None or fleet.envoy_version >= _HEEDS_ROUTE_LIMIT


def _body_limit(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    buffer, heeds = asking.buffer, _heeds_route_limit(fleet)
    limit = buffer.accepted_bytes(heeds_own=heeds)
    node = (
        buffer.connection if buffer.own.value is None and buffer.connection.value is not None else buffer.own
    )
    if not heeds:
        node = buffer.connection
    pools = fleet.setup.pools_of(asking)
    workers = [worker for pool in pools for worker in fleet.of(pool)]
    seen = _bytes(max((worker.prompt_over for worker in workers), default=0), pools)
    possible = _bytes(max((worker.max_model_len or 0 for worker in workers), default=0), pools)
    fix = f"request_body_buffer_limit: {_round_up(max(seen, possible, 16 * 1024 * 1024))}"
    if not heeds:
        fix = f"per_connection_buffer_limit_bytes: {16 * 1024 * 1024} of the listener, or Envoy 1.37"
    found = (
        told(node, f"{limit:,} bytes") if heeds else f"{told(node)}, and Envoy before 1.37 goes by it alone"
    )
    if seen > limit:
        severity, why = (
            Severity.ERROR,
            (
                f"Workers have seen prompts of about {seen:,} bytes; through Envoy, bodies over {limit:,}"
                " get 413."
            ),
        )
    elif possible > limit:
        severity, why = (
            Severity.WARNING,
            (
                f"The workers take prompts of about {possible:,} bytes (max_model_len), but bodies over"
                f" {limit:,} get 413."
            ),
        )
    elif not possible and limit <= min(DEFAULT_BUFFER_BYTES, buffer.retried_bytes):
        severity, why = (
            Severity.NOTE,
            (
                f"Bodies over {limit:,} bytes get 413: at {_bytes_per_token(pools):g} bytes a token,"
                f" prompts of more than {int(limit / _bytes_per_token(pools)):,} tokens."
            ),
        )
    else:
        return
    yield Finding(severity, at(node), found, why, fix, node.value)


def _bytes_per_token(pools: list[PoolConfig]) -> float:
    return max((pool.settings.chars_per_token for pool in pools), default=4.0)


def _bytes(tokens: int, pools: list[PoolConfig]) -> int:
    return int(tokens * _bytes_per_token(pools))


def _round_up(size: int) -> int:
    """To the next power of two."""
    return 1 << (size - 1).bit_length()


def _spoofable_hosts(cluster: Cluster, fleet: Fleet) -> Iterator[Finding]:
    for policy in override_hosts(cluster.node):
        for source in policy.items("override_host_sources"):
            name = source.text("header").lower()
            if name and not _removed(name, cluster, fleet):
                node = source.field("header")
                yield Finding(
                    Severity.ERROR,
                    at(node),
                    f"is {name}, which clients may send",
                    "A client that sends it chooses the worker whenever the router has no opinion or isn't"
                    " asked.",
                    "metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]} in its"
                    " place, which no client can send; or remove it by the connection manager's"
                    " early_header_mutation_extensions",
                    name,
                )
    use = cluster.node.field("original_dst_lb_config", "use_http_header")
    if use.value is True:
        name = cluster.node.field("original_dst_lb_config").text("http_header_name").lower()
        name = name or "x-envoy-original-dst-host"
        if not _removed(name, cluster, fleet):
            yield Finding(
                Severity.ERROR,
                at(use),
                f"takes the address from {name}, which clients may send",
                "A client that sends it has Envoy connect to any address at all.",
                "override_host in place of ORIGINAL_DST, as in envoy/envoy.yaml",
                name,
            )


def _spoofable_clusters(asking: Asking, fleet: Fleet) -> Iterator[Finding]:
    node = asking.action.field("cluster_header")
    name = node.value.lower() if isinstance(node.value, str) else ""
    if name and name not in asking.manager.removed_headers:
        yield Finding(
            Severity.ERROR,
            at(node),
            f"is {name}, which clients may send",
            "A client that sends it reaches any cluster of this Envoy, past the router; a header_mutation"
            " filter or request_headers_to_remove comes too late, the route is chosen by then.",
            "early_header_mutation_extensions of the connection manager, with mutations:"
            f" [{{remove: {name}}}]",
            name,
        )


def _removed(name: str, cluster: Cluster, fleet: Fleet) -> bool:
    """Whether every way to the cluster takes the header from clients."""
    ways = [manager for manager in fleet.setup.managers if manager.leads_to(cluster.name)]
    return all(name in manager.removed_headers for manager in ways)


CHECKS = (
    Check("in-vain", "routes that ask the router and lead to no pool", lambda f: f.setup.asking, _in_vain),
    Check(
        "route-timeout", "a route's `timeout` that cuts streams (15 s by default)", _asking, _route_timeout
    ),
    Check("idle-timeout", "`stream_idle_timeout` under or at its default of 5 min", _asking, _idle_timeout),
    Check("stream-duration", "`max_stream_duration` that cuts streams", _asking, _stream_duration),
    Check("try-timeout", "`per_try_timeout` that restarts whole answers", _retrying, _try_timeout),
    Check("retries", "no retries, or not for what workers do when they fail", _asking, _retries),
    Check("tries", "fewer retries than workers are named for them", _retrying, _tries),
    Check(
        "retry-hosts", "host selection of retries that gets in the way of the list", _retrying, _retry_hosts
    ),
    Check("retry-buffer", "bodies that are accepted but not kept for a retry", _retrying, _retry_buffer),
    Check("body-limit", "a buffer limit under the largest prompt, seen or possible", _asking, _body_limit),
    Check(
        "spoofable-worker",
        "a worker chosen by a header that clients may send",
        lambda fleet: fleet.setup.clusters if fleet.setup.managers else (),
        _spoofable_hosts,
    ),
    Check("spoofable-cluster", "a `cluster_header` that clients may send", _asking, _spoofable_clusters),
)
