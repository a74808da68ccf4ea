"""A running Envoy: its version, and what its counters say happened."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.doctor.check import Check
from extproc.doctor.finding import Finding, Place, Severity
from extproc.doctor.fleet import EnvoyFacts, Fleet

#: The oldest version that our files were run with.
OLDEST = (1, 36)

#: Shares of the streams to the router from which on something is worth a word, and how many there must be.
LEAST_SHARE, LEAST_COUNT = 0.001, 5


def _envoy(fleet: Fleet) -> list[EnvoyFacts]:
    return [fleet.envoy] if fleet.envoy is not None and not fleet.envoy.error else []


def _place(envoy: EnvoyFacts) -> tuple[Place, ...]:
    return (Place(url=envoy.url),)


def _unreachable(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    if envoy.error:
        yield Finding(
            Severity.ERROR,
            _place(envoy),
            envoy.error,
            "Its version and counters are unknown.",
            "--envoy-admin with the address of admin in the YAML, if Envoy runs",
            envoy.error,
        )


def _version(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    if envoy.version is not None and envoy.version < OLDEST:
        version = "{}.{}".format(*envoy.version)
        yield Finding(
            Severity.ERROR,
            _place(envoy),
            f"Envoy {version}",
            "It is older than all that the router was tried with, and lacks fields of our files.",
            "Envoy 1.37 or newer",
            version,
        )


def _exposed(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    if envoy.exposed:
        yield Finding(
            Severity.WARNING,
            _place(envoy),
            f"answers at {envoy.exposed}, too",
            "Whoever reaches it can read the configuration, change the log level and stop Envoy.",
            "admin: {address: {socket_address: {address: 127.0.0.1, ...}}}",
            envoy.exposed,
        )


def _too_large(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    refused = envoy.total("http.", ".downstream_rq_too_large")
    if refused:
        yield Finding(
            Severity.WARNING,
            _place(envoy),
            f"{refused:,} requests got 413 (downstream_rq_too_large)",
            "Their bodies were larger than Envoy may buffer.",
            "request_body_buffer_limit of the route, larger; or a clear limit for clients",
            refused,
        )


def _breakers(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    names = [cluster.name for cluster in fleet.setup.clusters]
    names += [cluster.text("name") for cluster in fleet.setup.router_clusters]
    counters = (
        (
            "upstream_rq_pending_overflow",
            "circuit_breakers of the cluster: max_requests, max_pending_requests",
        ),
        ("upstream_cx_overflow", "circuit_breakers of the cluster: max_connections"),
        ("upstream_rq_retry_overflow", "circuit_breakers of the cluster: retry_budget"),
    )
    for name in names:
        for counter, fix in counters:
            times = envoy.stats.get(f"cluster.{name}.{counter}", 0)
            if times:
                yield Finding(
                    Severity.WARNING,
                    _place(envoy),
                    f"cluster {name}: {counter} is {times:,}",
                    "Envoy's own limits stopped requests or retries that the router had allowed.",
                    fix,
                    times,
                )


def _asking(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    def ext_proc(counter: str) -> int:
        return sum(
            value
            for name, value in envoy.stats.items()
            if name.startswith("http.") and ".ext_proc." in name and name.endswith("." + counter)
        )

    started = ext_proc("streams_started")
    late, failed = ext_proc("message_timeouts"), ext_proc("failure_mode_allowed")
    if late >= LEAST_COUNT and late > LEAST_SHARE * started:
        yield Finding(
            Severity.WARNING,
            _place(envoy),
            f"{late:,} of {started:,} answers of the router came too late (message_timeouts)",
            "These requests went unsteered after they had waited.",
            "message_timeout: 1s or more; more CPU for the router",
            late,
        )
    elif failed >= LEAST_COUNT and failed > LEAST_SHARE * started:
        yield Finding(
            Severity.WARNING,
            _place(envoy),
            f"{failed:,} of {started:,} requests went on without the router (failure_mode_allowed)",
            "The router was down or refused streams; these requests went to the least busy worker.",
            "keep the router up: its log, its limits of memory and CPU; and more than one replica",
            failed,
        )


def _rejected(envoy: EnvoyFacts, fleet: Fleet) -> Iterator[Finding]:
    rejected = sum(
        value
        for name, value in envoy.stats.items()
        if name.startswith("http.") and name.endswith("rejected_header_mutations")
    )
    # With the filter in sight, the check of its mutation_rules says which headers.
    if rejected and not fleet.setup.filters:
        yield Finding(
            Severity.WARNING,
            _place(envoy),
            f"{rejected:,} headers of the router's were dropped (rejected_header_mutations)",
            "The pick, the bound on a stream's headers, or a refusal's retry-after is lost.",
            "mutation_rules of the ext_proc filter, as in envoy/envoy.yaml",
            rejected,
        )


CHECKS = (
    Check("envoy", "an Envoy that can't be asked", lambda f: [f.envoy] if f.envoy else [], _unreachable),
    Check("envoy-version", "an Envoy before 1.36", _envoy, _version),
    Check("envoy-413", "bodies that were refused as too large", _envoy, _too_large),
    Check("envoy-limits", "requests that Envoy's own limits stopped", _envoy, _breakers),
    Check("envoy-unsteered", "requests that went on without the router", _envoy, _asking),
    Check("envoy-mutations", "headers of the router's that Envoy dropped", _envoy, _rejected),
    Check("admin-exposed", "an admin interface that other machines can reach", _envoy, _exposed),
)
