"""A pool's accounts: exact whatever happens to requests, and the picture follows them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.decision import Ticket
from extproc.routing.pool import FOREIGN_TTL_S, Pool
from extproc.routing.records import Decided, Ended, Moved, Record


def config(n: int = 4, limit: int = 120, first: int = 0, **more: object) -> PoolConfig:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", limit) for i in range(first, first + n))
    return PoolConfig("pool", endpoints, PoolSettings(**more))  # type: ignore[arg-type]


def chain(name: int, blocks: int = 8) -> PrefixChain:
    return PrefixChain(tuple(hash((name, i)) & (2**64 - 1) for i in range(blocks)), 256, blocks * 256, name)


def send(pool: Pool, prompt: PrefixChain | None, now: float = 0.0) -> Ticket:
    decision = pool.decide(prompt, now)
    assert decision is not None
    return pool.begin(decision, prompt, now)


def in_flight(pool: Pool) -> list[int]:
    return [worker.in_flight for worker in pool.workers]


def test_affinity_after_the_first_request_even_before_it_ends() -> None:
    pool = Pool(config())
    first = send(pool, chain(1))
    decision = pool.decide(chain(1), 0.001)
    assert decision is not None
    assert decision.worker is first.worker
    assert (decision.reason, decision.cached_tokens) == ("affinity", 2048)


def test_no_worker_no_decision() -> None:
    assert Pool(config(0)).decide(chain(1), 0.0) is None


def test_a_prompt_that_cant_be_read_goes_by_load_and_ties_spread() -> None:
    pool = Pool(config())
    decisions = [pool.decide(None, 0.0) for _ in range(200)]
    assert {d.reason for d in decisions if d} == {"least-request"}
    assert min(Counter(d.worker.address for d in decisions if d).values()) > 20


@pytest.mark.parametrize("policy", ["predicted", "prefix-hash", "lmetric", "least-request"])
def test_a_worker_at_its_limit_is_passed_over_and_all_at_the_limit_is_overflow(policy: str) -> None:
    pool = Pool(config(n=3, limit=2, policy=policy, load_margin=100))
    seen = [send(pool, chain(1)) for _ in range(6)]
    assert in_flight(pool) == [2, 2, 2]
    decision = pool.decide(chain(1), 0.0)
    assert decision is not None
    assert (decision.reason, decision.overflow) == ("overflow", True)
    pool.end(seen[0], 1.0)
    after = pool.decide(chain(1), 1.0)
    assert after is not None
    assert (after.worker.in_flight, after.overflow) == (1, False)


def test_the_reason_names_the_limit() -> None:
    pool = Pool(config(n=2, limit=1))
    first = send(pool, chain(1))
    decision = pool.decide(chain(1), 100.0)
    assert decision is not None
    assert decision.worker is not first.worker
    assert decision.reason == "limit"


def test_moved_requests_are_counted_and_pictured_where_they_ran() -> None:
    pool = Pool(config(n=2))
    ticket = send(pool, chain(1))
    assert ticket.worker is not None
    picked = ticket.worker
    other = next(w for w in pool.workers if w is not picked)
    backlog = picked.free_at_s
    assert backlog > 0
    pool.served_by(ticket, other.address, 0.0)
    assert (picked.in_flight, other.in_flight) == (0, 1)
    assert picked.free_at_s == pytest.approx(0.0)
    assert other.free_at_s == pytest.approx(backlog)
    pool.end(ticket, 1.0)
    assert in_flight(pool) == [0, 0]
    assert pool.picture.lookup(chain(1).hashes)[other.slot] == 8


def test_served_by_nobody_or_a_stranger_counts_nowhere() -> None:
    pool = Pool(config())
    for upstream in ("", "192.0.2.1:80"):
        ticket = send(pool, chain(1))
        pool.served_by(ticket, upstream, 0.0)
        assert in_flight(pool) == [0, 0, 0, 0]
        pool.end(ticket, 1.0)
        pool.end(ticket, 2.0)
        assert in_flight(pool) == [0, 0, 0, 0]


def test_a_worker_that_leaves_and_returns_keeps_the_count_of_its_running_requests() -> None:
    pool = Pool(config(n=1))
    ticket = send(pool, chain(1))
    pool.update(config(n=0))
    assert pool.decide(chain(1), 0.0) is None
    pool.update(config(n=1))
    assert in_flight(pool) == [1]
    assert pool.picture.lookup(chain(1).hashes) == {}, "it may have restarted"
    pool.end(ticket, 1.0)
    assert in_flight(pool) == [0]


def test_removing_a_worker_moves_only_its_prompts() -> None:
    for policy in ("predicted", "prefix-hash"):
        pool = Pool(config(n=8, policy=policy))
        prompts = [chain(i * 0x9E3779B97F4A7C15 % 2**64) for i in range(50)]
        clock = itertools.count(1000)

        def place(
            pool: Pool = pool, prompts: list[PrefixChain] = prompts, clock: Iterator[int] = clock
        ) -> list[str]:
            homes = []
            for prompt in prompts:
                now = next(clock)
                ticket = send(pool, prompt, float(now))
                assert ticket.worker is not None
                homes.append(ticket.worker.address)
                pool.end(ticket, now + 0.5)
            return homes

        before = place()
        assert place() == before
        left = config(n=8, policy=policy)
        pool.update(replace(left, endpoints=left.endpoints[:3] + left.endpoints[4:]))
        after = place()
        gone = left.endpoints[3].address
        assert gone in before
        assert [b for b, a in zip(before, after, strict=True) if a != b] == [gone] * before.count(gone)


def test_a_change_of_block_size_forgets_the_pictures_and_survives_running_requests() -> None:
    pool = Pool(config(n=2))
    ticket = send(pool, chain(1))
    pool.update(config(n=2, block_tokens=512))
    assert pool.picture.block_tokens == 512
    pool.end(ticket, 1.0)
    assert in_flight(pool) == [0, 0]
    assert pool.picture.lookup(chain(1).hashes) == {}


def test_replicas_follow_each_other() -> None:
    records: list[Record] = []
    one, two = Pool(config(), origin=1, publish=records.append), Pool(config(), origin=2)
    ticket = send(one, chain(1))
    assert ticket.worker is not None
    for record in records:
        two.apply(record, 0.1)
        two.apply(record, 0.1)  # twice is once
    decision = two.decide(chain(1), 0.2)
    assert decision is not None
    assert (decision.worker.address, decision.reason) == (ticket.worker.address, "affinity")
    assert in_flight(two) == in_flight(one)
    other = next(w for w in one.workers if w is not ticket.worker)
    one.served_by(ticket, other.address, 0.3)
    one.end(ticket, 1.0, 100.0)
    for record in records:
        two.apply(record, 1.1)
    assert in_flight(two) == in_flight(one) == [0, 0, 0, 0]
    assert [type(r) for r in records] == [Decided, Moved, Ended]


def test_a_lost_end_and_a_lost_replica_leak_nothing() -> None:
    pool = Pool(config())
    address = pool.workers[0].address
    pool.apply(Decided(7, 1, address, chain(1).hashes, 2048), 0.0)
    pool.apply(Decided(8, 1, address, chain(1).hashes, 2048), 1.0)
    assert in_flight(pool)[0] == 2
    pool.replica_left(7, 2.0)
    assert in_flight(pool)[0] == 1
    pool.apply(Ended(9, 9, 0.0), FOREIGN_TTL_S + 2.0)
    assert in_flight(pool)[0] == 0


class Accounts(RuleBasedStateMachine):
    """Random lives of requests, against a plain list of where each one counts."""

    tickets = Bundle("tickets")

    @initialize()
    def start(self) -> None:
        self.records: list[Record] = []
        self.pool = Pool(config(n=3), origin=1, publish=self.records.append)
        self.replica = Pool(config(n=3), origin=2)
        self.where: dict[Ticket, str | None] = {}
        self.now = 0.0

    @rule(target=tickets, name=st.integers(0, 5), readable=st.booleans())
    def begin(self, name: int, readable: bool) -> Ticket:
        self.now += 0.01
        ticket = send(self.pool, chain(name) if readable else None, self.now)
        assert ticket.worker is not None
        self.where[ticket] = ticket.worker.address
        return ticket

    @rule(ticket=tickets, port=st.integers(7999, 8004))
    def serve(self, ticket: Ticket, port: int) -> None:
        address = f"10.0.0.1:{port}"
        if ticket in self.where:
            known = {w.address for w in self.pool.workers} | set(self.pool._departed)
            self.where[ticket] = address if address in known or self.where[ticket] == address else None
        self.pool.served_by(ticket, address, self.now)

    @rule(ticket=tickets, output=st.floats(0, 5000))
    def end(self, ticket: Ticket, output: float) -> None:
        self.where.pop(ticket, None)
        self.pool.end(ticket, self.now, output)

    @rule(first=st.integers(0, 2), n=st.integers(1, 4))
    def reload(self, first: int, n: int) -> None:
        self.pool.update(config(n=n, first=first))

    @invariant()
    def counts_are_exact(self) -> None:
        counted = Counter(a for a in self.where.values() if a is not None)
        accounts = {w.address: w.in_flight for w in self.pool.workers}
        accounts |= {a: w.in_flight for a, w in self.pool._departed.items()}
        assert {a: n for a, n in accounts.items() if n} == dict(counted)
        assert self.pool.tickets == len(self.where)

    def teardown(self) -> None:
        for ticket in list(self.where):
            self.pool.end(ticket, self.now)
        assert in_flight(self.pool) == [0] * len(self.pool.workers)
        assert not self.pool._departed
        for record in self.records:
            self.replica.apply(record, self.now)
        assert in_flight(self.replica) == [0, 0, 0]


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=150, stateful_step_count=40)
