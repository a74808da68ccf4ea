"""The ext_proc filter: whether the router is asked in time, may answer, and learns what became of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from extproc.doctor.check import Check
from extproc.doctor.finding import Finding, Severity, at
from extproc.doctor.fleet import Fleet
from extproc.doctor.setup import ExtProc
from extproc.doctor.values import enum, flag, seconds, texts, told
from extproc.envoyconf.document import Node
from extproc.exchange import DEBUG_HEADER, TRY_TIMEOUT_HEADER
from extproc.routing.demand import wanted_headers

#: Shorter ones are missed by a router that is only busy; Envoy's default is 0.2 s.
LEAST_MESSAGE_TIMEOUT_S = 0.5

_HEADER_MODES = ("DEFAULT", "SEND", "SKIP")
_BODY_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED")

#: Envoy versions that close the router's stream at the response headers unless trailers are asked for.
_CLOSE_EARLY = ((1, 37), (1, 38))

#: What a refusal says to clients.
_REFUSAL_HEADERS = ("retry-after", "retry-after-ms", "content-type")

_RULES = (
    'mutation_rules: {disallow_all: true, allow_expression: {regex: "^(x-(gateway|extproc|'
    'envoy-upstream-rq-per-try)-[a-z-]+|content-type|retry-after[a-z-]*)$"}}'
)


def _settings(name: str) -> Callable[[Fleet], Iterable[Node]]:
    return lambda fleet: fleet.setup.settings(name)


def _filters(fleet: Fleet) -> Iterable[ExtProc]:
    return fleet.setup.filters


def _no_filter(managers: tuple[Node, ...], fleet: Fleet) -> Iterator[Finding]:
    if not fleet.setup.filters:
        yield Finding(
            Severity.ERROR,
            at(*managers),
            "has no ext_proc filter",
            "Nobody asks the router, so no request is steered.",
            "copy the filter envoy.filters.http.ext_proc from envoy/envoy.yaml, before the router filter",
        )


def _request_mode(mode: Node, fleet: Fleet) -> Iterator[Finding]:
    headers, body = mode.field("request_header_mode"), mode.field("request_body_mode")
    if enum(headers, _HEADER_MODES) == "SKIP":
        yield Finding(
            Severity.ERROR,
            at(headers),
            "is SKIP",
            "Without the headers' message Envoy picks the worker before the body is read, so no pick counts.",
            "request_header_mode: SEND",
            "SKIP",
        )
    kind = enum(body, _BODY_MODES)
    why = {
        "NONE": "The router never sees a prompt, so it goes by load alone.",
        "STREAMED": "Envoy picks the worker when it has read the body's beginning: measured, bodies of"
        " 900 KB were steered and bodies of 2 MB were not, without a word.",
        "BUFFERED_PARTIAL": "Bodies over the buffer's limit reach the router in part and are not steered,"
        " without a word.",
    }.get(kind)
    if why is not None:
        yield Finding(
            Severity.ERROR,
            at(body),
            told(body, "NONE"),
            why,
            "request_body_mode: BUFFERED",
            body.value,
        )
    trailers = mode.field("request_trailer_mode")
    if kind == "FULL_DUPLEX_STREAMED" and enum(trailers, _HEADER_MODES) != "SEND":
        yield Finding(
            Severity.ERROR,
            at(trailers),
            told(trailers, "SKIP"),
            "With FULL_DUPLEX_STREAMED a body may end with trailers, and the router waits for that end.",
            "request_trailer_mode: SEND",
            trailers.value,
        )


def _response_mode(mode: Node, fleet: Fleet) -> Iterator[Finding]:
    headers, body = mode.field("response_header_mode"), mode.field("response_body_mode")
    if enum(headers, _HEADER_MODES) == "SKIP" and not _may_override(mode, fleet):
        yield Finding(
            Severity.WARNING,
            at(headers),
            "is SKIP",
            "The router doesn't learn which worker Envoy used, so after a retry it counts the request at the"
            " wrong one, and no failure is noticed.",
            "response_header_mode: SEND",
            "SKIP",
        )
    if enum(body, _BODY_MODES) != "NONE":
        yield Finding(
            Severity.WARNING,
            at(body),
            told(body),
            "Every chunk of every response goes through the router, a round trip for each token; it has no"
            " use for them.",
            "response_body_mode: NONE",
            body.value,
        )


def _trailers(mode: Node, fleet: Fleet) -> Iterator[Finding]:
    trailers = mode.field("response_trailer_mode")
    version = fleet.envoy_version
    if enum(trailers, _HEADER_MODES) == "SEND" or (version is not None and version not in _CLOSE_EARLY):
        return
    overridden = _may_override(mode, fleet)
    why = (
        "Envoy 1.37 and 1.38 then close the router's stream at the response headers: measured, a stream"
        " counts as over while it still runs, so load is underestimated and max_inflight doesn't hold."
    )
    if overridden:
        why = (
            "Requests in flight are counted on Envoy 1.37 and 1.38 only because allow_mode_override lets the"
            " router ask for trailers anew with each request."
        )
    severity = Severity.NOTE if overridden else Severity.ERROR if version else Severity.WARNING
    yield Finding(
        severity,
        at(trailers),
        told(trailers, "SKIP"),
        why,
        "response_trailer_mode: SEND",
        trailers.value,
    )


def _may_override(mode: Node, fleet: Fleet) -> bool:
    """Whether the router can ask for what this mode leaves out, in its answer to the request headers."""
    used = [
        ext_proc
        for ext_proc in fleet.setup.filters
        if mode.path[: len(ext_proc.node.path)] == ext_proc.node.path
        or any(a.ext_proc is ext_proc and a.setting("processing_mode") == mode for a in fleet.setup.asking)
    ]
    return (
        bool(used)
        and all(flag(e.node.field("allow_mode_override")) for e in used)
        and not any(e.node.get("allowed_override_modes") for e in used)
        and enum(mode.field("request_header_mode"), _HEADER_MODES) != "SKIP"
    )


def _observability(ext_proc: ExtProc, fleet: Fleet) -> Iterator[Finding]:
    node = ext_proc.node.field("observability_mode")
    if flag(node):
        yield Finding(
            Severity.ERROR,
            at(node),
            "is true",
            "Envoy then ignores what the router answers, so nothing is steered, and ends are told 5 s late.",
            "observability_mode: false",
            True,
        )


def _failure_mode(node: Node, fleet: Fleet) -> Iterator[Finding]:
    if not flag(node):
        yield Finding(
            Severity.ERROR,
            at(node),
            told(node, "false"),
            "When the router is down every request gets 500, and streams that run when it dies break;"
            " measured, with true all of them complete.",
            "failure_mode_allow: true",
            node.value,
        )


def _message_timeout(ext_proc: ExtProc, fleet: Fleet) -> Iterator[Finding]:
    node = ext_proc.node.field("message_timeout")
    timeout_s = seconds(node)
    modes = {enum(mode.field("request_body_mode"), _BODY_MODES) for mode in _modes(ext_proc, fleet)}
    if modes == {"FULL_DUPLEX_STREAMED"}:  # no timeout there
        return
    if (0.2 if timeout_s is None else timeout_s) >= LEAST_MESSAGE_TIMEOUT_S:
        return
    why = (
        "An answer takes milliseconds, but a busy machine may pause a process for longer; the request then"
        " goes unsteered, and a pick that is 1 s late still beats a cold prefill of several seconds."
    )
    if ext_proc.node.get("max_message_timeout") is not None:
        why += (
            " max_message_timeout doesn't help: it bounds what a router may ask for; ours asks for nothing."
        )
    yield Finding(Severity.WARNING, at(node), told(node, "0.2s"), why, "message_timeout: 1s", node.value)


def _modes(ext_proc: ExtProc, fleet: Fleet) -> list[Node]:
    used = [a.setting("processing_mode") for a in fleet.setup.asking if a.ext_proc is ext_proc]
    return used or [ext_proc.node.field("processing_mode")]


def _namespaces(options: Node, fleet: Fleet) -> Iterator[Finding]:
    untyped = options.field("receiving_namespaces", "untyped")
    given = set(texts(untyped))
    for namespace in dict.fromkeys(name for name, _ in fleet.setup.config.steering.endpoint_metadata):
        if namespace not in given:
            yield Finding(
                Severity.ERROR,
                at(untyped),
                f"doesn't have {namespace}" if given else "is unset",
                "Envoy drops the metadata that carries the pick, without a word, so nothing is steered.",
                f"metadata_options: {{receiving_namespaces: {{untyped: [{namespace}]}}}}",
                untyped.value,
            )


def _mutation_rules(ext_proc: ExtProc, fleet: Fleet) -> Iterator[Finding]:
    rules = ext_proc.node.field("mutation_rules")
    setup = fleet.setup
    steering = (*setup.config.steering.endpoint_headers, *setup.config.steering.cluster_headers)
    bounds = (
        [TRY_TIMEOUT_HEADER] if any(p.settings.header_timeout_s for p in setup.config.pools.values()) else []
    )
    debug = [DEBUG_HEADER] if _debugs(fleet) else []
    lost = [name for name in (*steering, *bounds, *_REFUSAL_HEADERS, *debug) if not _allowed(rules, name)]
    if not lost:
        return
    if flag(rules.field("disallow_is_error")):
        severity, why = Severity.ERROR, "disallow_is_error makes every answer with such a header a 500."
    elif set(lost) & set(steering):
        severity, why = Severity.ERROR, "Envoy drops the header that carries the pick, without a word."
    else:
        severity, why = Severity.WARNING, "Envoy drops these headers without a word: " + _lost(lost)
    yield Finding(severity, at(rules), "don't let pass: " + ", ".join(lost), why, _RULES, rules.value)


def _lost(names: list[str]) -> str:
    lost = []
    if TRY_TIMEOUT_HEADER in names:
        lost.append("a worker that hangs before a stream's headers holds the stream instead of 3 s only")
    if set(names) & set(_REFUSAL_HEADERS):
        lost.append("clients that are refused aren't told when to come again, nor that the answer is JSON")
    if DEBUG_HEADER in names:
        lost.append("x-extproc-debug shows nothing")
    return "; ".join(lost) + "."


def _debugs(fleet: Fleet) -> bool:
    entries = (
        entry
        for asking in fleet.setup.asking
        for override in asking.overrides
        for entry in override.items("grpc_initial_metadata")
    )
    return any(e.text("key").lower() == "x-extproc-debug" and e.text("value") == "true" for e in entries)


def _allowed(rules: Node, name: str) -> bool:
    """Envoy's ``HeaderMutationRules``, in its own order (source/extensions/filters/common/mutation_rules)."""
    if _matches(rules.field("disallow_expression"), name):
        return False
    if _matches(rules.field("allow_expression"), name):
        return True
    if flag(rules.field("disallow_all")):
        return False
    return flag(rules.field("allow_envoy")) or not name.startswith("x-envoy")


def _matches(matcher: Node, name: str) -> bool:
    try:
        return re.fullmatch(matcher.text("regex"), name) is not None
    except re.error:  # RE2 knows more than Python: taken for a match
        return True


def _forward_rules(ext_proc: ExtProc, fleet: Fleet) -> Iterator[Finding]:
    rules = ext_proc.node.field("forward_rules")
    wanted = frozenset().union(*(wanted_headers(p.settings) for p in fleet.setup.config.pools.values()))
    needed = (":path", "content-type", "content-encoding", *sorted(wanted))
    hidden = [name for name in needed if not _forwarded(rules, name)]
    if hidden:
        blind = ":path" in hidden or "content-type" in hidden
        yield Finding(
            Severity.ERROR if blind else Severity.WARNING,
            at(rules),
            "hide from the router: " + ", ".join(hidden),
            "It can't read a prompt without knowing path and content type, so it goes by load alone."
            if blind
            else "Bounds, priorities and tenants that these headers tell have no effect.",
            "leave forward_rules out, or add these headers to allowed_headers",
            rules.value,
        )


def _forwarded(rules: Node, name: str) -> bool:
    allowed, hidden = rules.get("allowed_headers"), rules.get("disallowed_headers")
    if hidden is not None and _listed(hidden, name):
        return False
    return allowed is None or _listed(allowed, name)


def _listed(matchers: Node, name: str) -> bool:
    """``ListStringMatcher``; kinds that we don't know are taken for a match."""
    for pattern in matchers.items("patterns"):
        given = {kind: pattern.text(kind) for kind in ("exact", "prefix", "suffix", "contains")}
        regex = pattern.get("safe_regex")
        folded = {kind: text.lower() for kind, text in given.items() if text}
        if not folded and regex is None:
            return True
        if (
            folded.get("exact") == name
            or ("prefix" in folded and name.startswith(folded["prefix"]))
            or ("suffix" in folded and name.endswith(folded["suffix"]))
            or ("contains" in folded and folded["contains"] in name)
            or (regex is not None and _matches(regex, name))
        ):
            return True
    return False


def _request_attributes(node: Node, fleet: Fleet) -> Iterator[Finding]:
    pools, asking = len(fleet.setup.config.pools), fleet.setup.asking
    if pools < 2 or "xds.cluster_name" in texts(node):
        return
    if asking and all(any(_names_pool(override) for override in a.overrides) for a in asking):
        return
    yield Finding(
        Severity.ERROR,
        at(node),
        "doesn't have xds.cluster_name",
        f"The router can't tell which of {pools} pools a request belongs to, and leaves it to Envoy.",
        "request_attributes: [xds.cluster_name, xds.route_name]",
        node.value,
    )


def _names_pool(override: Node) -> bool:
    return any(e.text("key").lower() == "x-extproc-pool" for e in override.items("grpc_initial_metadata"))


def _response_attributes(node: Node, fleet: Fleet) -> Iterator[Finding]:
    if "upstream.address" not in texts(node):
        yield Finding(
            Severity.WARNING,
            at(node),
            "doesn't have upstream.address",
            "The router takes each pick for used, so after a retry it counts the request at the wrong"
            " worker.",
            "response_attributes: [upstream.address, upstream.request_attempt_count, response.code]",
            node.value,
        )


def _route_cache(ext_proc: ExtProc, fleet: Fleet) -> Iterator[Finding]:
    if not fleet.setup.config.steering.cluster_headers:
        return
    action, disabled = (
        ext_proc.node.field("route_cache_action"),
        ext_proc.node.field("disable_clear_route_cache"),
    )
    for node in (action, disabled):
        if node.value == "RETAIN" or flag(node):
            yield Finding(
                Severity.ERROR,
                at(node),
                told(node),
                "The route is then not chosen again after the router's answer, so cluster_header never"
                " steers.",
                "route_cache_action: CLEAR",
                node.value,
            )


def _immediate(ext_proc: ExtProc, fleet: Fleet) -> Iterator[Finding]:
    node = ext_proc.node.field("disable_immediate_response")
    if flag(node):
        yield Finding(
            Severity.WARNING,
            at(node),
            "is true",
            "The router can't refuse: a request that it would answer 429 or 503 is treated as a fault of"
            " its own.",
            "disable_immediate_response: false",
            True,
        )


CHECKS = (
    Check(
        "no-filter",
        "listeners without an ext_proc filter",
        lambda fleet: [tuple(m.node for m in fleet.setup.managers)] if fleet.setup.managers else [],
        _no_filter,
    ),
    Check(
        "request-mode",
        "processing modes in which no pick counts",
        _settings("processing_mode"),
        _request_mode,
    ),
    Check(
        "response-mode",
        "response headers not sent to the router, or bodies sent through it",
        _settings("processing_mode"),
        _response_mode,
    ),
    Check("trailers", "`response_trailer_mode` not SEND", _settings("processing_mode"), _trailers),
    Check("observability", "`observability_mode`: answers are ignored", _filters, _observability),
    Check("failure-mode", "`failure_mode_allow` not true", _settings("failure_mode_allow"), _failure_mode),
    Check("message-timeout", "`message_timeout` under 0.5 s (200 ms by default)", _filters, _message_timeout),
    Check(
        "receiving-namespaces",
        "metadata of the pick that Envoy drops",
        _settings("metadata_options"),
        _namespaces,
    ),
    Check("mutation-rules", "`mutation_rules` that drop a header of the router's", _filters, _mutation_rules),
    Check("forward-rules", "`forward_rules` that hide a header from the router", _filters, _forward_rules),
    Check(
        "request-attributes",
        "several pools, and requests that don't tell theirs",
        _settings("request_attributes"),
        _request_attributes,
    ),
    Check(
        "response-attributes",
        "the address of the worker that answered isn't told",
        _settings("response_attributes"),
        _response_attributes,
    ),
    Check("route-cache", "a `cluster_header` whose route is not chosen again", _filters, _route_cache),
    Check("immediate-response", "`disable_immediate_response`", _filters, _immediate),
)
