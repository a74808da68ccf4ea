"""What a request says of itself that matters for admission, read from its headers.

Headers are the client's word, so each can only do what a client may do: a bound of its own makes a request
easier to refuse, never harder; a priority counts only where the pool believes clients. A tenant is known by a
digest from here on: the header may hold an API key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from extproc.fleet.config import PoolSettings

SLO_HEADER = "x-extproc-ttft-slo-ms"
PRIORITY_HEADER = "x-extproc-priority"
#: Set by an Envoy in front of ours, or by a client that Envoy trusts.
TIMEOUT_HEADERS = ("x-envoy-expected-rq-timeout-ms", "x-envoy-upstream-rq-timeout-ms")
#: Counts tries from 1: an Envoy in front with ``include_request_attempt_count``.
ATTEMPT_HEADER = "x-envoy-attempt-count"
#: Counts retries from 0: the OpenAI and Anthropic client libraries.
SDK_RETRY_HEADER = "x-stainless-retry-count"

HEADERS = frozenset({SLO_HEADER, PRIORITY_HEADER, *TIMEOUT_HEADERS, ATTEMPT_HEADER, SDK_RETRY_HEADER})

#: Priorities from - to + this; 0 is the usual one.
MAX_PRIORITY = 4

#: Hexadecimal digits of a tenant's SHA-256 that it is known by.
DIGEST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Demand:
    """One request's own terms.

    ``slo_s``: its own bound on the time to first token. ``timeout_s``: when Envoy will give it up.
    ``priority``: higher ones are refused later. ``tenant``: digest, "" for all that name none.
    ``body``: hash of tenant and body. ``declared_retry``: it says that it is one.
    """

    slo_s: float | None = None
    timeout_s: float | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    body: int = 0
    declared_retry: bool = False


def wanted_headers(settings: PoolSettings) -> frozenset[str]:
    """Names of the request headers that `read_demand` wants to see for such a pool."""
    return HEADERS | {settings.tenant_header.lower()} if settings.tenant_header else HEADERS


def read_demand(
    headers: Mapping[str, str], body: bytes | None, priority: int | None, settings: PoolSettings
) -> Demand:
    """A request's terms. ``priority``: the route's, if it has one. Values that make no sense don't count."""
    if priority is None:
        priority = 0
        if settings.client_priority:
            asked = _number(headers.get(PRIORITY_HEADER))
            priority = 0 if asked is None else round(max(-MAX_PRIORITY, min(MAX_PRIORITY, asked)))
    tenant, weight = "", 1.0
    if settings.tenant_header:
        name = headers.get(settings.tenant_header.lower(), "")
        tenant = digest(name)
        weights = dict(settings.tenant_weights)
        weight = weights.get(name) or weights.get(tenant) or 1.0
    key = 0
    if settings.retry_budget is not None and body:
        key = xxh3_64_intdigest(body, seed=xxh3_64_intdigest(tenant.encode()))
    timeouts = [t for t in (_positive_s(headers.get(name)) for name in TIMEOUT_HEADERS) if t is not None]
    return Demand(
        slo_s=_positive_s(headers.get(SLO_HEADER)),
        timeout_s=min(timeouts, default=None),
        priority=priority,
        tenant=tenant,
        weight=weight,
        body=key,
        declared_retry=(_number(headers.get(ATTEMPT_HEADER)) or 0) > 1
        or (_number(headers.get(SDK_RETRY_HEADER)) or 0) > 0,
    )


def digest(tenant: str) -> str:
    """What a tenant is known by: ``printf %s NAME | sha256sum | cut -c1-12``; "" for none."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:DIGEST_DIGITS] if tenant else ""


def _number(text: str | None) -> float | None:
    """A plain decimal number; None for anything else."""
    if not text or len(text) > 20:
        return None
    unsigned = text[1:] if text[0] in "+-" else text
    whole, _, part = unsigned.partition(".")
    if not (whole.isascii() and whole.isdigit() and (not part or (part.isascii() and part.isdigit()))):
        return None
    return float(text)


def _positive_s(text: str | None) -> float | None:
    """Milliseconds as seconds; None unless above 0."""
    number = _number(text)
    return number / 1000 if number is not None and number > 0 else None
