"""Every pool, worker and route setting: name, type, unit, default, bounds.

The tables here are the single source: the ``extproc`` objects of the Envoy YAML are read with them, and
``docs/configuration.md`` is checked against them. Defaults stand once, in the dataclasses of
`extproc.fleet.config`.

Envoy turns YAML numbers with a decimal point, and integers beyond 32 bits, into strings before they reach a
``Struct``; so a numeric string is a number here too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from extproc.fleet.config import PoolSettings

POLICIES = ("prefix-hash", "predicted", "lmetric", "least-request", "round-robin", "random")
CONTENT_FORMATS = ("string", "openai")

#: gRPC initial metadata that is ours begins with this.
ROUTE_PREFIX = "x-extproc-"


Kind = Literal["integer", "number", "string", "boolean", "weights"]

#: What a weight in a "weights" setting may be.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a settings table. ``low`` and ``high`` are inclusive; ``default`` None means unset."""

    name: str
    kind: Kind
    default: Any
    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def row(self) -> str:
        """The setting as a row of the table in docs/configuration.md."""
        default = "" if self.default in (None, ()) else _plain(self.default)
        cells = (f"`{self.name}`", self.kind, self.unit, default, self.bounds, self.help)
        return f"| {' | '.join(cells)} |"

    @property
    def bounds(self) -> str:
        """The allowed values as text: ``1 to 100000``, or the choices."""
        if self.kind == "boolean":
            return "true, false"
        if self.choices:
            return ", ".join(self.choices)
        if self.low is None or self.high is None:
            return ""
        return f"{_plain(self.low)} to {_plain(self.high)}"


@dataclass(frozen=True, slots=True)
class SettingError:
    """What is wrong with one key of an ``extproc`` object, and how to put it right."""

    key: str
    value: Any
    message: str
    fix: str


_DEFAULTS = PoolSettings()


def _pool(name: str, kind: Kind, help: str, **more: Any) -> Setting:
    return Setting(name=name, kind=kind, default=getattr(_DEFAULTS, name), help=help, **more)


POOL_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "pool",
        "string",
        None,
        "The pool's name; the cluster's name if unset. Clusters that give the same name form one pool.",
    ),
    _pool("policy", "string", "How to choose among the workers.", choices=POLICIES),
    _pool(
        "max_inflight",
        "integer",
        "Requests that one worker may have in flight; at the limit another worker takes the request.",
        unit="requests",
        low=1,
        high=1_000_000,
    ),
    _pool(
        "max_pending_prefill_tokens",
        "integer",
        "Uncached prompt tokens that may wait at a worker; above it another takes the request. Unset: any.",
        unit="tokens",
        low=1,
        high=10_000_000_000,
    ),
    _pool(
        "max_load_ratio",
        "number",
        "Policy prefix-hash: a worker with more in flight than this times the pool's mean is passed over.",
        low=1.0,
        high=1000.0,
    ),
    _pool(
        "load_margin",
        "integer",
        "Policy prefix-hash: requests allowed on top of that, so that a quiet pool keeps its affinity.",
        unit="requests",
        low=0,
        high=1_000_000,
    ),
    _pool(
        "fallbacks",
        "integer",
        "Workers named after the first choice; Envoy's retries go to them in this order.",
        unit="workers",
        low=0,
        high=16,
    ),
    _pool(
        "block_tokens",
        "integer",
        "Tokens to one hashed block of the prompt.",
        unit="tokens",
        low=1,
        high=65_536,
    ),
    _pool(
        "prefix_tokens",
        "integer",
        "Tokens at the head of the prompt that decide its order of workers (policy prefix-hash, and ties).",
        unit="tokens",
        low=1,
        high=10_000_000,
    ),
    _pool(
        "chars_per_token",
        "number",
        "Bytes of UTF-8 text that make a token on average, for prompts that come as text.",
        unit="bytes/token",
        low=0.1,
        high=100.0,
    ),
    _pool(
        "content_format",
        "string",
        "How the engine's chat template reads list content: joined to one string, or part by part.",
        choices=CONTENT_FORMATS,
    ),
    _pool(
        "cache_tokens",
        "integer",
        "Tokens that one worker's KV cache holds; unset: as many as the engine tells.",
        unit="tokens",
        low=1,
        high=10_000_000_000,
    ),
    _pool(
        "prefill_tokens_per_s",
        "number",
        "A worker's prefill speed, until it has been measured.",
        unit="tokens/s",
        low=1.0,
        high=100_000_000.0,
    ),
    _pool(
        "learn_speed",
        "boolean",
        "Whether to learn each worker's prefill speed from the times that its engine tells (vLLM).",
    ),
    _pool(
        "alpha",
        "number",
        "Policy predicted: how much of a cold prefill's time counts again, for delaying the worker's others.",
        low=0.0,
        high=1000.0,
    ),
    _pool(
        "decode_ms",
        "number",
        "Policy predicted: time that each request in flight adds to the expected time to first token.",
        unit="ms",
        low=0.0,
        high=60_000.0,
    ),
    _pool(
        "eviction_weight",
        "number",
        "Policy predicted: how much of the prefill that evicted blocks will need again counts.",
        low=0.0,
        high=1000.0,
    ),
    _pool(
        "spread_ms",
        "number",
        "Policy predicted: what each request with the same prefix in flight costs the next one, as long as"
        " it is on a worker that is busier than others; once that adds up to the price of a copy, the prefix"
        " gets one. 0 never copies for that reason.",
        unit="ms",
        low=0.0,
        high=60_000.0,
    ),
    _pool(
        "scrape_interval_s",
        "number",
        "How often each worker's metrics are read, for its cache's size and its restarts; 0 is never.",
        unit="s",
        low=0.0,
        high=3600.0,
    ),
    _pool(
        "scrape_timeout_s",
        "number",
        "How long such a reading may take.",
        unit="s",
        low=0.01,
        high=60.0,
    ),
    _pool("metrics_path", "string", "Path of the workers' metrics page, read over plain HTTP."),
    _pool(
        "shed_after_ms",
        "number",
        "Expected time to first token above which a request is answered 429 at once; unset: never.",
        unit="ms",
        low=1.0,
        high=86_400_000.0,
    ),
    _pool(
        "client_priority",
        "boolean",
        "Whether clients may set their priority by the header x-extproc-priority.",
    ),
    _pool(
        "contention_ms",
        "number",
        "Prefill backlog at the chosen worker from which on tenants' shares and retry budgets count.",
        unit="ms",
        low=0.0,
        high=3_600_000.0,
    ),
    _pool(
        "tenant_header",
        "string",
        "Request header that tells tenants apart, such as authorization; unset: no shares.",
    ),
    _pool("tenant_weights", "weights", "Shares of tenants, by header value or its digest; 1 for all others."),
    _pool(
        "retry_budget",
        "number",
        "Retries that a tenant may make for each of its requests while others wait; unset: any.",
        low=0.0,
        high=10.0,
    ),
    _pool(
        "reject_if_empty",
        "boolean",
        "Answer 503 when the pool has no worker, in place of leaving the request to Envoy.",
    ),
    _pool(
        "eject_s",
        "number",
        "How long a failing worker gets no new prompts; each time again twice as long.",
        unit="s",
        low=0.01,
        high=3600.0,
    ),
    _pool(
        "eject_max_s",
        "number",
        "The longest such time; so long in good health takes one doubling back.",
        unit="s",
        low=0.01,
        high=86_400.0,
    ),
    _pool(
        "return_s",
        "number",
        "Time in which a worker that returns goes from one request to its full share; 0: at once.",
        unit="s",
        low=0.0,
        high=3600.0,
    ),
    _pool(
        "max_ejected_share",
        "number",
        "If more than this share of the pool is out, all count as healthy; 0: health has no effect.",
        low=0.0,
        high=1.0,
    ),
    _pool(
        "silence_s",
        "number",
        "A worker asked for streams that has sent no response headers for so long is ejected; 0: never.",
        unit="s",
        low=0.0,
        high=3600.0,
    ),
    _pool(
        "header_timeout_s",
        "number",
        "How long Envoy waits for the headers of a stream before it tries the next worker; 0: no limit.",
        unit="s",
        low=0.0,
        high=3600.0,
    ),
    _pool(
        "health_interval_s",
        "number",
        "How often each worker's health page is asked; 0 is never.",
        unit="s",
        low=0.0,
        high=3600.0,
    ),
    _pool("health_timeout_s", "number", "How long its answer may take.", unit="s", low=0.01, high=60.0),
    _pool("health_path", "string", "Path of the workers' health page, asked over plain HTTP."),
)

_BY_NAME = {setting.name: setting for setting in POOL_SETTINGS}

WORKER_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "max_inflight",
        "integer",
        None,
        "As the pool's, for this worker.",
        unit="requests",
        low=_BY_NAME["max_inflight"].low,
        high=_BY_NAME["max_inflight"].high,
    ),
    Setting(
        "max_pending_prefill_tokens",
        "integer",
        None,
        "As the pool's, for this worker.",
        unit="tokens",
        low=_BY_NAME["max_pending_prefill_tokens"].low,
        high=_BY_NAME["max_pending_prefill_tokens"].high,
    ),
    Setting(
        "weight",
        "number",
        1.0,
        "Share of prefixes relative to the other workers; the endpoint's load_balancing_weight if unset.",
        low=0.01,
        high=1000.0,
    ),
    Setting(
        "cache_tokens",
        "integer",
        None,
        "As the pool's, for this worker.",
        unit="tokens",
        low=_BY_NAME["cache_tokens"].low,
        high=_BY_NAME["cache_tokens"].high,
    ),
)

ROUTE_SETTINGS: tuple[Setting, ...] = (
    Setting("x-extproc-pool", "string", None, "The pool for this route's requests, by name."),
    Setting("x-extproc-policy", "string", None, "The policy for this route's requests.", choices=POLICIES),
    Setting(
        "x-extproc-priority",
        "integer",
        None,
        "The priority of this route's requests, whatever clients say; the lowest are refused first.",
        low=-4,
        high=4,
    ),
    Setting(
        "x-extproc-debug",
        "boolean",
        False,
        "Answer with response headers that tell worker, reason and estimated cached share.",
    ),
)


def parse(
    settings: Iterable[Setting], values: Mapping[str, Any], where: str = "an extproc object"
) -> tuple[dict[str, Any], list[SettingError]]:
    """Check ``values`` against a table; return the ones that are set (null is unset) and what is wrong.

    Numbers come back as the table's type: an int for "integer", a float for "number".
    """
    table = {setting.name: setting for setting in settings}
    parsed: dict[str, Any] = {}
    errors: list[SettingError] = []
    for key, value in values.items():
        setting = table.get(key)
        if setting is None:
            errors.append(SettingError(key, value, f"unknown key in {where}", _did_you_mean(key, table)))
            continue
        if value is None:
            continue
        try:
            parsed[key] = _convert(setting, value)
        except ValueError as error:
            errors.append(SettingError(key, value, str(error), _fix(setting)))
    return parsed, errors


def _convert(setting: Setting, value: Any) -> Any:
    match setting.kind:
        case "string":
            if not isinstance(value, str) or not value:
                raise ValueError("must be a non-empty string")
            if setting.choices and value not in setting.choices:
                raise ValueError("is none of the known values")
            return value
        case "boolean":
            if isinstance(value, bool):
                return value
            if value not in ("true", "false"):
                raise ValueError("must be true or false")
            return value == "true"
        case "weights":
            return _weights(value)
    number = _number(value)
    if setting.kind == "integer":
        if isinstance(number, float):
            if not number.is_integer():
                raise ValueError("must be a whole number")
            number = int(number)
    else:
        number = float(number)
    if setting.low is not None and number < setting.low:
        raise ValueError("is too small")
    if setting.high is not None and number > setting.high:
        raise ValueError("is too large")
    return number


def _weights(value: Any) -> tuple[tuple[str, float], ...]:
    """Names and weights from an object, or from pairs as they come out."""
    if isinstance(value, tuple | list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in value):
        pairs = list(value)
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise ValueError("must be an object of names and weights")
    weights = []
    for name, weight in pairs:
        if not isinstance(name, str) or not name:
            raise ValueError("has a name that is no text")
        number = float(_number(weight))
        if not MIN_WEIGHT <= number <= MAX_WEIGHT:
            raise ValueError(f"has a weight out of bounds for {name}")
        weights.append((name, number))
    return tuple(weights)


def _number(value: Any) -> int | float:
    """An int or a finite float from a YAML or JSON scalar; ValueError if it is none."""
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise ValueError("must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if isinstance(value, int):
        # Larger ones have no float and exceed every bound anyway.
        return max(min(value, 10**18), -(10**18))
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _fix(setting: Setting) -> str:
    if setting.choices or setting.kind == "boolean":
        return f"use one of {setting.bounds}"
    if setting.kind == "weights":
        return f"use an object of names and weights from {_plain(MIN_WEIGHT)} to {_plain(MAX_WEIGHT)}"
    if setting.kind == "string":
        return "give a name in quotes"
    kind = "a whole number" if setting.kind == "integer" else "a number"
    unit = f" ({setting.unit})" if setting.unit else ""
    default = "" if setting.default is None else f"; the default is {_plain(setting.default)}"
    return f"use {kind}{unit} from {setting.bounds}{default}"


def _plain(value: Any) -> str:
    """A value as YAML would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, int | float) else str(value)


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"remove it; known keys: {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class RouteOverrides:
    """What a route says by gRPC initial metadata; None leaves the pool's own setting."""

    pool: str | None = None
    policy: str | None = None
    debug: bool = False
    priority: int | None = None


def route_overrides(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[RouteOverrides, list[str]]:
    """Read the ``x-extproc-*`` keys of a stream's initial metadata.

    Returns the overrides and a readable line for each key that is unknown or has a bad value; such a key has
    no effect. Other metadata is left alone. A key given twice: the last one counts.
    """
    ours = {
        key: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        for key, value in metadata
        if key.startswith(ROUTE_PREFIX)
    }
    if not ours:
        return _NO_OVERRIDES, []
    parsed, errors = parse(ROUTE_SETTINGS, ours, "the route's grpc_initial_metadata")
    fields = {key.removeprefix(ROUTE_PREFIX): value for key, value in parsed.items()}
    problems = [f"{error.key}: {error.value!r}: {error.message}; {error.fix}" for error in errors]
    return RouteOverrides(**fields), problems


_NO_OVERRIDES = RouteOverrides()
