"""What the router knows of each worker's load from its own accounts.

Two numbers matter. ``in_flight`` counts requests between their decision and the end of their stream;
it is exact, because the stream's end always arrives, however the request ends. ``free_at_s`` is a fluid
queue: the moment at which the worker will have prefilled everything that was sent to it. A decision
pushes it back by the uncached tokens times the worker's time a token; nothing but the clock drains it.
It needs no signal from the engine, which is as well: vLLM sends the headers of a streamed response long
before the first token, and its gauges are seconds late.
"""

from __future__ import annotations

from extproc.fleet.config import EndpointConfig


class Worker:
    """One worker's account. Policies read it; only `extproc.routing.pool.Pool` writes it."""

    __slots__ = (
        "address",
        "cluster",
        "free_at_s",
        "in_flight",
        "max_inflight",
        "name",
        "oldest_s",
        "prefill_s_per_token",
        "room_tokens",
        "slot",
        "weight",
    )

    def __init__(self, endpoint: EndpointConfig, slot: int, prefill_s_per_token: float) -> None:
        self.address = endpoint.address
        self.name = endpoint.address.encode()  # what rendezvous hashing knows it by
        self.slot = slot  # its number in the cache picture
        self.in_flight = 0  # requests
        self.free_at_s = 0.0  # the fluid prefill queue is empty then
        self.prefill_s_per_token = prefill_s_per_token
        self.room_tokens = 0.0  # free space in its cache, as pictured
        self.oldest_s: float | None = None  # last use of what it would evict first
        self.configure(endpoint)

    def configure(self, endpoint: EndpointConfig) -> None:
        """Take over what the YAML may change while the worker stays."""
        self.cluster = endpoint.cluster
        self.max_inflight = endpoint.max_inflight
        self.weight = endpoint.weight

    def backlog_s(self, now: float) -> float:
        """Seconds of prefill that wait in front of a new request."""
        return max(0.0, self.free_at_s - now)

    @property
    def has_room(self) -> bool:
        """Below its limit of requests in flight."""
        return self.in_flight < self.max_inflight

    def __repr__(self) -> str:
        return f"<Worker {self.address} in_flight={self.in_flight}/{self.max_inflight}>"
