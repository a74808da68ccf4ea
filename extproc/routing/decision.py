"""What a decision is, what it is made from, and the ticket that follows its request to the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.prefix import PrefixChain
from extproc.routing.load import Worker
from extproc.routing.policy import Policy, Query


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    ``order``: the worker first, then its fallbacks. ``reason``: a word from a bounded set.
    ``cached_tokens``: what the first worker is thought to hold of the prompt.
    ``predicted_ttft_s``: backlog plus own prefill at the first worker. ``costs_s``: the policy's costs.
    ``rent_s``: what the prefix has paid towards a copy (`extproc.routing.heat`); None: nothing new.
    """

    pool: str
    policy: str
    reason: str
    order: tuple[Worker, ...]
    prompt_tokens: int
    cached_tokens: int
    predicted_ttft_s: float
    overflow: bool
    costs_s: tuple[float, ...]
    rent_s: float | None = None

    @property
    def worker(self) -> Worker:
        """The one that the request should go to."""
        return self.order[0]


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made from.

    ``workers``: those that may get prompts at all. ``candidates``: those of them with room; with
    ``overflow`` there are none, and these are the least bad. ``rank``: not ``policy``'s own function where
    that can't be used.
    """

    policy: str
    rank: Policy
    query: Query
    workers: Sequence[Worker]
    candidates: Sequence[Worker]
    overflow: bool
    panic: bool


class Ticket:
    """One request between its decision and the end of its stream."""

    __slots__ = (
        "chain",
        "decided_s",
        "decision",
        "foretold_s",
        "miss_tokens",
        "prefill_s",
        "prefilled_s",
        "serial",
        "stream",
        "waiting",
        "worker",
    )

    def __init__(self, serial: int, worker: Worker, chain: PrefixChain | None, miss: int, now: float) -> None:
        self.serial = serial
        self.worker: Worker | None = worker
        self.chain = chain
        self.miss_tokens = miss
        self.prefill_s = 0.0  # what it adds to its worker's queue
        self.foretold_s: float | None = None  # queue and own prefill, if they were known at the decision
        self.decided_s = now
        self.prefilled_s = now  # when its prefill will be done, by the fluid queue
        self.decision: Decision | None = None
        self.stream = False  # the client wants a stream, so that headers are due at once
        self.waiting = False  # no response headers so far
