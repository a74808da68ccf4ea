"""What the router knows of each worker's load from its own accounts.

Two numbers matter. ``in_flight`` counts requests between their decision and the end of their stream;
it is exact, because the stream's end always arrives, however the request ends. ``free_at_s`` is a fluid
queue: the moment at which the worker will have prefilled everything that was sent to it. A decision
pushes it back by the uncached tokens times the worker's time a token; nothing but the clock drains it.
It needs no signal from the engine, which is as well: vLLM sends the headers of a streamed response long
before the first token, and its gauges are seconds late.
"""

from __future__ import annotations

from math import exp

from extproc.fleet.config import EndpointConfig, PoolSettings
from extproc.routing.health import Health
from extproc.routing.pace import Pace
from extproc.routing.speed import Speed
from extproc.routing.tally import Tally


class Worker:
    """One worker's account. Policies read it; only `extproc.routing.pool.Pool` writes it."""

    __slots__ = (
        "address",
        "cache_tokens",
        "cluster",
        "engine_started_s",
        "free_at_s",
        "health",
        "in_flight",
        "lengths",
        "max_inflight",
        "max_pending_prefill_tokens",
        "name",
        "oldest_s",
        "pace",
        "prefill_s_per_token",
        "room_tokens",
        "slot",
        "speed",
        "weight",
    )

    def __init__(self, endpoint: EndpointConfig, slot: int, settings: PoolSettings) -> None:
        self.address = endpoint.address
        self.name = endpoint.address.encode()  # what rendezvous hashing knows it by
        self.slot = slot  # its number in the cache picture
        self.in_flight = 0  # requests
        self.free_at_s = 0.0  # the fluid prefill queue is empty then
        self.speed = Speed(1.0 / settings.prefill_tokens_per_s)
        self.prefill_s_per_token = 0.0  # by `configure`, then as learned
        self.room_tokens = 0.0  # free space in its cache, as pictured
        self.oldest_s: float | None = None  # last use of what it would evict first
        self.engine_started_s: float | None = None  # start of the engine's process (Unix time), if told
        self.cache_tokens = 0  # size of its cache, in its own tokens
        self.lengths = Tally()  # estimated tokens of its prompts
        self.pace = Pace()
        self.health = Health(settings)
        self.configure(endpoint, settings)

    def configure(self, endpoint: EndpointConfig, settings: PoolSettings) -> None:
        """Take over what the YAML may change while the worker stays."""
        self.cluster = endpoint.cluster
        self.max_inflight = endpoint.max_inflight
        self.max_pending_prefill_tokens = (
            endpoint.max_pending_prefill_tokens or settings.max_pending_prefill_tokens
        )
        self.weight = endpoint.weight
        prior_s_per_token = 1.0 / settings.prefill_tokens_per_s
        if prior_s_per_token != self.speed.prior_s_per_token or not settings.learn_speed:
            self.speed = Speed(prior_s_per_token)
        self.prefill_s_per_token = self.speed.s_per_token
        self.health.configure(settings)

    def learned(self, log_factor: float) -> None:
        """The logarithm of its speed over the prior is this."""
        self.speed.log_factor = log_factor
        self.prefill_s_per_token = self.speed.s_per_token

    def backlog_s(self, now: float) -> float:
        """Seconds of prefill that wait in front of a new request."""
        return max(0.0, self.free_at_s - now)

    def pending_prefill_tokens(self, now: float) -> float:
        """Uncached prompt tokens that wait in front of a new request."""
        return self.backlog_s(now) / self.prefill_s_per_token

    def has_room(self, now: float) -> bool:
        """Below its limits."""
        limit = self.max_pending_prefill_tokens
        return self.in_flight < self.max_inflight and (
            limit is None or self.pending_prefill_tokens(now) < limit
        )

    def __repr__(self) -> str:
        return f"<Worker {self.address} in_flight={self.in_flight}/{self.max_inflight}>"


class Meter:
    """How much of something there is a second, of late: an average that forgets exponentially."""

    __slots__ = ("_amount", "_at_s", "_memory_s")

    def __init__(self, memory_s: float) -> None:
        """``memory_s``: what is older than this counts little."""
        self._memory_s = memory_s
        self._amount = 0.0
        self._at_s = 0.0

    def add(self, amount: float, now: float) -> None:
        """So much more, at ``now`` (s)."""
        self._amount = self._amount * exp((self._at_s - now) / self._memory_s) + amount
        self._at_s = now

    def rate(self, now: float) -> float:
        """How much a second."""
        return self._amount * exp((self._at_s - now) / self._memory_s) / self._memory_s
