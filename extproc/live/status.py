"""The JSON of ``GET /status`` and ``GET /history``: what a running router tells of itself, live.

It is read by ``extproc top``, by the page, and by whoever wants to. Nothing in it is text of a prompt;
tenants are digests, prefixes short hashes. Unknown is null, never 0. Times are Unix seconds unless their
name says milliseconds; rates and ratios are of the last `WINDOW_S` seconds or little more, those of the
engines between their last two readings.
"""

from __future__ import annotations

from msgspec import Struct, field

STATUS_PATH = "/status"
HISTORY_PATH = "/history"

#: Rates, ratios and percentiles speak of this long.
WINDOW_S = 10.0

#: One point of the history stands for so long, and so many are kept: an hour.
HISTORY_STEP_S = 10.0
HISTORY_POINTS = 360

#: Bounds of the lists.
MAX_DECISIONS = 100
MAX_PREFIXES = 50
MAX_ALARMS = 50
MAX_TENANTS = 20

#: Moves are rare: those of so long are told.
MOVES_S = 60.0


class Ttft(Struct, frozen=True):
    """Predicted time to the first token, milliseconds."""

    p50_ms: float
    p99_ms: float


class WorkerStatus(Struct, frozen=True):
    """One worker.

    ``state``: `extproc.routing.health.State`. ``hit_ratio``: share of the prompt tokens sent to it that it
    was thought to hold; ``engine_hit_ratio``, ``engine_ttft_ms`` (mean), ``engine_running``,
    ``engine_waiting``, ``kv_usage``: by its own word, null when stale or not told. ``moved_per_s``: picks of
    it that Envoy sent elsewhere. ``cache_tokens``: 0 when unknown. ``signal_age_s``: null: never heard.
    """

    address: str
    state: str
    in_flight: int
    max_inflight: int
    pending_prefill_tokens: int
    prefill_tokens_per_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    hit_ratio: float | None
    engine_hit_ratio: float | None
    ttft: Ttft | None
    engine_ttft_ms: float | None
    engine_running: float | None
    engine_waiting: float | None
    kv_usage: float | None
    cache_used_tokens: int
    cache_tokens: int
    signal_age_s: float | None
    moved_per_s: float


class PrefixStatus(Struct, frozen=True):
    """One hot prefix, by its prompt tokens of late.

    ``prefix``: 8 hexadecimal digits. ``tenant``: digest, "" for none or several. ``tokens``: of its latest
    prompt. ``share``: of the pool's prompt tokens. ``spread``: requests in the window by worker.
    """

    prefix: str
    tenant: str
    tokens: int
    requests_per_s: float
    share: float
    hit_ratio: float | None
    spread: dict[str, int]


class TenantStatus(Struct, frozen=True):
    """One tenant, where the pool knows tenants, by its uncached prompt tokens of late.

    ``tenant``: digest. ``share``: of the pool's prompt tokens.
    """

    tenant: str
    requests_per_s: float
    share: float
    hit_ratio: float | None


class MoveStatus(Struct, frozen=True):
    """Picks of ``worker`` that Envoy sent to ``served`` ("": none answered) in the last `MOVES_S`.

    ``last_s``, ``status``: of the latest.
    """

    worker: str
    served: str
    moves: int
    last_s: float
    status: int


class PoolStatus(Struct, frozen=True):
    """One pool. ``reasons``: decisions a second by reason; ``refused``: refusals a second by reason.

    ``busiest``: the busiest worker's share of the requests over the mean share; null without requests.
    ``utilisation``: share of the workers' time that prefills take. ``unreadable``: requests a second without
    a readable prompt, by reason; they are routed by load. ``moves``, ``tenants``: see there, most first.
    """

    name: str
    policy: str
    panic: bool
    requests_per_s: float
    prompt_tokens_per_s: float
    hit_ratio: float | None
    engine_hit_ratio: float | None
    ttft: Ttft | None
    engine_ttft_ms: float | None
    in_flight: int
    pending_prefill_tokens: int
    utilisation: float
    busiest: float | None
    reasons: dict[str, float]
    refused: dict[str, float]
    moved_per_s: float
    workers: list[WorkerStatus]
    prefixes: list[PrefixStatus]
    unreadable: dict[str, float] = field(default_factory=dict)
    moves: list[MoveStatus] = field(default_factory=list)
    tenants: list[TenantStatus] = field(default_factory=list)


class DecisionStatus(Struct, frozen=True):
    """One decision of late, newest first in its list. ``status``: 0 while it runs or when unknown.

    ``served``: the worker that answered, "" so far none. ``reason`` of a refusal is the refusal's, and
    ``worker`` is "" then.
    """

    at_s: float
    request_id: str
    pool: str
    worker: str
    served: str
    reason: str
    prefix: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    predicted_ttft_ms: float
    status: int
    duration_ms: float | None


class Alarm(Struct, frozen=True):
    """Something that an operator should see, while it lasts. ``severity``: "warning" or "critical".

    ``name``: a fixed word, the name of its paragraph in docs/operations.md and of the Prometheus alert.
    ``since_s``: when it began.
    """

    name: str
    severity: str
    pool: str
    worker: str
    text: str
    since_s: float


class Status(Struct, frozen=True):
    """Everything at one moment. ``config``: the file in force.

    ``unrouted``: requests a second left to Envoy, by reason, whatever their pool would have been.
    """

    version: str
    now_s: float
    started_s: float
    config: str
    window_s: float
    pools: list[PoolStatus]
    decisions: list[DecisionStatus]
    alarms: list[Alarm]
    unrouted: dict[str, float] = field(default_factory=dict)


class Series(Struct, frozen=True):
    """A pool's or a worker's last hour: lists of equal length, oldest first, null where nothing is known.

    ``refused_per_s`` of a worker: of requests that would have gone there.
    """

    requests_per_s: list[float | None]
    hit_ratio: list[float | None]
    ttft_p50_ms: list[float | None]
    ttft_p99_ms: list[float | None]
    in_flight: list[float | None]
    pending_prefill_tokens: list[float | None]
    refused_per_s: list[float | None]


class PoolHistory(Struct, frozen=True):
    """``busiest``: as in `PoolStatus`. ``workers``: by address."""

    pool: Series
    busiest: list[float | None]
    workers: dict[str, Series]


class History(Struct, frozen=True):
    """The last hour. Point i is the `HISTORY_STEP_S` seconds that ended at ``ends_s[i]``."""

    step_s: float
    ends_s: list[float]
    pools: dict[str, PoolHistory]
