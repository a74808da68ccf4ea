"""What happens in a router, as data. `extproc.observe.observer.Observer` hands each event to who wants it.

No event holds anything of a prompt's text, and of a tenant only the digest. Times are seconds; ``now`` is
the monotonic clock's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.facts import RequestFacts
from extproc.prompt import Unreadable
from extproc.routing.admission import Shed
from extproc.routing.decision import Decision
from extproc.routing.demand import Demand
from extproc.routing.health import Change


@dataclass(frozen=True, slots=True)
class Work:
    """What one request cost the router, in seconds: reading its body, hashing the prompt, deciding."""

    read_s: float = 0.0
    hash_s: float = 0.0
    decide_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, besides its prompt.

    ``model``: "" for the engine's default. ``max_tokens``: of output, if the client set a limit.
    ``head_tokens``: how long its tools and system prompt are, estimated. ``unreadable``: why nothing of this
    is known; None: it is.
    """

    model: str = ""
    max_tokens: int | None = None
    stream: bool = False
    unreadable: Unreadable | None = None
    head_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decided:
    """A worker was chosen for a request.

    ``prefix_key``: `extproc.prefix.PrefixChain.key`, None without a readable prompt. ``body_bytes``: None
    where the body's end was not seen.
    """

    facts: RequestFacts
    asked: Asked
    decision: Decision
    prefix_key: int | None
    demand: Demand | None
    body_bytes: int | None
    work: Work
    now: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Admission, or an empty pool, refused a request. ``decision``: what it would have been, if known."""

    facts: RequestFacts
    asked: Asked
    pool: str
    shed: Shed
    demand: Demand | None
    decision: Decision | None
    now: float


@dataclass(frozen=True, slots=True)
class Unrouted:
    """We had no opinion: Envoy's fallback policy chooses."""

    facts: RequestFacts
    reason: str
    detail: str
    now: float


@dataclass(frozen=True, slots=True)
class PromptUnreadable:
    """No prompt: routed by load, left to the engine to judge."""

    facts: RequestFacts
    pool: str
    reason: Unreadable
    now: float


@dataclass(frozen=True, slots=True)
class Displaced:
    """Envoy's retry or fallback used another worker than the one picked; ``upstream`` "": none."""

    facts: RequestFacts
    decision: Decision
    upstream: str
    attempts: int
    status: int
    now: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's stream is over.

    ``decided``: the event that was its beginning. ``worker``: ``ip:port`` of the one that answered, "" for
    none. ``status``, ``attempts``: 0 when unknown. ``headers_s``: from the decision to the response headers,
    None if they never came: an upper bound on the time to the first token only where the answer isn't a
    stream (``streamed``). ``duration_s``: to the stream's end.
    """

    facts: RequestFacts
    decided: Decided
    decision: Decision
    worker: str
    status: int
    attempts: int
    headers_s: float | None
    duration_s: float
    streamed: bool
    now: float


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """A worker was taken out, returns, or is well again."""

    pool: str
    worker: str
    change: Change


@dataclass(frozen=True, slots=True)
class RouteSettingIgnored:
    """A route's gRPC metadata has a key or a value that we don't know."""

    problem: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of ours. If it was in a request, that goes on without us."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A new configuration is in force."""

    source: str
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReloadRefused:
    """A new configuration was refused; the old one stays in force."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A worker's DNS name has no answer; its last known addresses stay in force."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class StateSaved:
    """The state file was written."""


@dataclass(frozen=True, slots=True)
class StateNotSaved:
    """The state file can't be written."""


Event = (
    Decided
    | Refused
    | Unrouted
    | PromptUnreadable
    | Displaced
    | Ended
    | HealthChanged
    | RouteSettingIgnored
    | Fault
    | Reloaded
    | ReloadRefused
    | Unresolved
    | StateSaved
    | StateNotSaved
)
