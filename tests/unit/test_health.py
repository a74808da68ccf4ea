"""Health of workers: what ejects, what brings back, and never too many at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import PrefixChain
from extproc.routing.decision import Decision, Ticket
from extproc.routing.health import Cause, Change, Health, Probe, State, usable
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

DEFAULTS = PoolSettings()


def ejected(cause: Cause = Cause.REFUSED, now: float = 100.0) -> Health:
    health = Health(DEFAULTS)
    while health.state is not State.EJECTED:
        health.failed(cause, now)
    return health


# --- one worker --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "count"),
    [
        (Cause.REFUSED, 1),
        (Cause.SILENT, 1),
        (Cause.UNRESPONSIVE, 2),
        (Cause.UNREACHED, 3),
        (Cause.ERROR, 5),
    ],
)
def test_how_much_evidence_ejects(cause: Cause, count: int) -> None:
    health = Health(DEFAULTS)
    for _ in range(count - 1):
        assert health.failed(cause, 1.0) is None
    assert health.failed(cause, 1.0) == Change(State.HEALTHY, State.EJECTED, cause, DEFAULTS.eject_s)


def test_a_success_in_between_starts_the_count_anew() -> None:
    health = Health(DEFAULTS)
    for _ in range(20):
        health.failed(Cause.UNREACHED, 1.0)
        health.failed(Cause.UNREACHED, 1.0)
        health.answered(200, 1.0)
    assert health.state is State.HEALTHY


def test_statuses() -> None:
    for status, limit in ((500, 5), (502, 5), (503, 3)):
        health = Health(DEFAULTS)
        changes = [health.answered(status, 1.0) for _ in range(limit)]
        assert [change is not None for change in changes] == [False] * (limit - 1) + [True]
    health = Health(DEFAULTS)
    for status in (200, 400, 404, 429, 504) * 20:
        assert health.answered(status, 1.0) is None


def test_each_ejection_lasts_twice_as_long_up_to_the_bound_and_health_takes_it_back() -> None:
    health, now, lasted = Health(DEFAULTS), 0.0, []
    for _ in range(8):
        change = health.failed(Cause.REFUSED, now)
        assert change is not None
        lasted.append(change.for_s)
        assert health.advance(now + change.for_s - 0.01) is None
        now += change.for_s
        assert health.advance(now) == Change(State.EJECTED, State.RETURNING, Cause.REFUSED)
    assert lasted == [2, 4, 8, 16, 32, 60, 60, 60]
    now += DEFAULTS.return_s
    health.advance(now)
    assert health.state is State.HEALTHY
    now += 6.5 * DEFAULTS.eject_max_s
    change = health.failed(Cause.REFUSED, now)
    assert change is not None
    assert change.for_s == pytest.approx(2.0 * 2**1.5)


def test_overload_is_avoided_shortly_however_often() -> None:
    health, now = Health(DEFAULTS), 0.0
    for _ in range(20):
        while (change := health.failed(Cause.UNREACHED, now)) is None:
            pass
        assert change.for_s <= 4 * DEFAULTS.eject_s
        now += change.for_s
        health.advance(now)


def test_silence() -> None:
    health = Health(DEFAULTS)
    health.sent(0.0, stream=False)
    assert health.listen(60.0) is None, "an answer that isn't streamed takes as long as it takes"
    health.sent(100.0, stream=True)
    assert health.listen(102.0) is None
    health.answered(200, 101.5)
    assert health.listen(103.0) is None, "others are answered"
    change = health.listen(103.6)
    assert change is not None
    assert change.cause is Cause.SILENT
    assert health.probed(Probe.READY, 103.7, 103.7) is None, "a health page answers while requests hang"
    assert health.answered(200, 104.0) == Change(State.EJECTED, State.RETURNING, Cause.SILENT)


def test_a_client_that_goes_away_is_no_silence() -> None:
    health = Health(DEFAULTS)
    health.sent(0.0, stream=True)
    health.settled(stream=True)
    assert health.listen(10.0) is None
    health.sent(10.0, stream=True)
    assert health.listen(11.0) is None, "the wait of the first is not the second's"


def test_probes() -> None:
    health = ejected(Cause.REFUSED)
    assert health.probed(Probe.UNKNOWN, 100.0, 100.0) is None
    assert health.probed(Probe.READY, 100.5, 100.5) == Change(State.EJECTED, State.RETURNING, Cause.REFUSED)
    assert health.probed(Probe.NOT_READY, 101.0, 101.0) == Change(
        State.RETURNING, State.NOT_READY, Cause.NOT_READY
    )
    assert health.out
    health.advance(1e6)
    assert health.out, "not before it says so"
    change = health.probed(Probe.READY, 102.0, 102.0)
    assert change is not None
    assert change.after is State.RETURNING


def test_a_late_health_page_is_forgiven_while_requests_are_answered() -> None:
    health = Health(DEFAULTS)
    for i in range(10):
        health.answered(200, i + 0.5)
        assert health.probed(Probe.NO_ANSWER, float(i), i + 1.0) is None
    assert health.probed(Probe.NO_ANSWER, 20.0, 21.0) is None
    assert health.probed(Probe.NO_ANSWER, 22.0, 23.0) is not None


def test_a_restarted_engine_owes_nothing() -> None:
    health = ejected()
    change = health.restarted(100.1)
    assert change is not None
    assert change.after is State.RETURNING
    health.failed(Cause.REFUSED, 101.0)
    assert health.advance(103.0) is not None, "the back-off starts anew"


def test_a_slow_return() -> None:
    health = ejected(Cause.UNREACHED, 100.0)
    health.advance(102.0)
    assert health.has_room(50, 10.0, 102.0), "old streams don't count in its trial"
    health.sent(102.0, stream=True)
    assert not health.has_room(51, 10.0, 103.0), "one trial at a time"
    health.settled(stream=True)
    health.answered(200, 103.0)
    rooms = [
        next(n for n in range(100) if not health.has_room(n, 10.0, 102.0 + t)) for t in (1.0, 2, 4, 6, 9.9)
    ]
    assert rooms == [1, 2, 4, 6, 10]
    assert health.failed(Cause.ERROR, 103.0) is not None, "while it returns, one failure is enough"


class Life(RuleBasedStateMachine):
    """Anything may happen to a worker: it is never out for longer than the bound without new evidence."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health(DEFAULTS)
        self.now = 0.0
        self.streams = 0
        self.last_evidence_s = 0.0

    def note(self, change: Change | None) -> None:
        if change is not None:
            assert change.after is self.health.state
            assert 0.0 <= change.for_s <= DEFAULTS.eject_max_s
            assert (change.for_s > 0) == (change.after is State.EJECTED)

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.health.advance(self.now))
        self.note(self.health.listen(self.now))

    @rule(cause=st.sampled_from([c for c in Cause if c is not Cause.NOT_READY]))
    def fail(self, cause: Cause) -> None:
        self.last_evidence_s = self.now
        self.note(self.health.failed(cause, self.now))

    @rule(probe=st.sampled_from(Probe), ago=st.floats(0.0, 3.0))
    def probe(self, probe: Probe, ago: float) -> None:
        self.last_evidence_s = self.now
        self.note(self.health.probed(probe, self.now - ago, self.now))

    @rule(status=st.sampled_from([200, 404, 429, 500, 503, 504]))
    def answer(self, status: int) -> None:
        self.last_evidence_s = self.now
        self.note(self.health.answered(status, self.now))

    @rule()
    def send(self) -> None:
        self.health.sent(self.now, stream=True)
        self.streams += 1

    @rule()
    def settle(self) -> None:
        if self.streams:
            self.streams -= 1
            self.health.settled(stream=True)

    @rule()
    def restart(self) -> None:
        self.note(self.health.restarted(self.now))
        assert self.health.state is not State.EJECTED

    @invariant()
    def time_heals(self) -> None:
        if self.health.state is State.EJECTED:
            assert self.health._until_s <= self.last_evidence_s + DEFAULTS.eject_max_s + 1e-6 or (
                self.health._cause is Cause.SILENT
            )
            assert self.health._until_s <= self.now + DEFAULTS.eject_max_s


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# --- a pool ------------------------------------------------------------------------------------------


def pool(n: int = 4, **more: object) -> Pool:
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "c", 120) for i in range(n))
    return Pool(PoolConfig("pool", endpoints, PoolSettings(**more)))  # type: ignore[arg-type]


def chain(name: int, blocks: int = 8) -> PrefixChain:
    return PrefixChain(tuple(hash((name, i)) & (2**64 - 1) for i in range(blocks)), 256, blocks * 256, name)


def decide(pool: Pool, prompt: PrefixChain | None, now: float = 0.0, policy: str | None = None) -> Decision:
    decision = pool.decide(prompt, now, policy)
    assert decision is not None
    return decision


def send(pool: Pool, prompt: PrefixChain, now: float, *, stream: bool = True) -> Ticket:
    return pool.begin(decide(pool, prompt, now), prompt, now, stream=stream)


def eject(pool: Pool, worker: Worker, now: float = 0.0) -> None:
    pool.probed(worker, Probe.REFUSED, now, now)


@pytest.mark.parametrize("policy", ["predicted", "prefix-hash", "lmetric", "least-request", "random"])
def test_an_ejected_worker_is_in_no_list(policy: str) -> None:
    it = pool(5, fallbacks=4)
    first = decide(it, chain(1), policy=policy).worker
    eject(it, first)
    for _ in range(20):
        order = decide(it, chain(1), policy=policy).order
        assert first not in order
        assert len(order) == 4


def test_the_reason_is_health_and_the_worker_returns_to_its_prompts() -> None:
    it = pool(4)
    ticket = send(it, chain(1), 0.0)
    it.end(ticket, 1.0)
    home = ticket.worker or decide(it, chain(1), 1.0).worker
    for _ in range(3):
        it._note(home, home.health.failed(Cause.UNREACHED, 1.0))
    assert decide(it, chain(1), 1.0).reason == "health"
    back = decide(it, chain(1), 1.0 + DEFAULTS.eject_s)
    assert (back.worker, back.reason) == (home, "affinity")


def test_behind_those_with_room_come_busy_ones_and_no_ejected_one() -> None:
    it = pool(4)
    free, dead, *busy = it.workers
    eject(it, dead)
    for worker in busy:
        worker.in_flight = worker.max_inflight
    order = decide(it, chain(1)).order
    assert order[0] is free
    assert set(order) == {free, *busy}


def test_more_than_the_share_out_is_panic_and_the_living_come_second() -> None:
    it = pool(8, fallbacks=3)
    for worker in it.workers[:4]:
        eject(it, worker)
    assert not it.panic
    eject(it, it.workers[4])
    assert it.panic
    living = set(it.workers[5:])
    firsts = set()
    for name in range(200):
        decision = decide(it, chain(name * 7919))
        firsts.add(decision.worker)
        assert set(decision.order[1:]) >= living - {decision.worker}
    assert firsts == set(it.workers)


def test_retried_away_from_a_dead_worker() -> None:
    suspects: list[Worker] = []
    it = pool(4)
    it._suspect = lambda _, worker: suspects.append(worker)
    for _ in range(3):
        ticket = send(it, chain(1), 0.0)
        assert ticket.decision is not None
        dead, other, *_ = ticket.decision.order
        it.heard(ticket, other.address, 2, 200, 0.1)
        it.served_by(ticket, other.address, 0.1)
        it.end(ticket, 0.2)
        if dead.health.out:
            break
        it.picture.clear(other.slot)
    assert dead.health.state is State.EJECTED
    assert set(suspects) == {dead}


def test_a_request_that_fails_everywhere_ejects_nobody() -> None:
    suspects: set[Worker] = set()
    it = pool(4)
    it._suspect = lambda _, worker: suspects.add(worker)
    for _ in range(50):
        ticket = send(it, chain(1), 0.0)
        it.heard(ticket, "", 4, 503, 0.1)
        it.end(ticket, 0.2)
    assert {w.health.state for w in it.workers} == {State.HEALTHY}
    assert suspects == set(it.workers)


def test_a_pick_that_envoy_does_not_know_is_not_the_workers_fault() -> None:
    it = pool(4)
    for _ in range(20):
        ticket = send(it, chain(1), 0.0)
        assert ticket.decision is not None
        it.heard(ticket, ticket.decision.order[1].address, 1, 200, 0.1)
        it.end(ticket, 0.2)
    assert {w.health.state for w in it.workers} == {State.HEALTHY}


def test_aborts_and_quiet_are_nobodys_failure() -> None:
    it = pool(2)
    for step in range(100):
        now = step * 5.0
        ticket = send(it, chain(step), now)
        it.check(now + 1.5)
        it.end(ticket, now + 1.5)
        it.check(now + 4.9)
    assert {w.health.state for w in it.workers} == {State.HEALTHY}


def test_silence_ejects_the_silent_one_and_headers_bring_it_back() -> None:
    it = pool(4)
    ticket = send(it, chain(1), 0.0)
    silent = ticket.worker
    assert silent is not None
    it.check(2.1)
    assert silent.health.state is State.EJECTED
    assert silent not in decide(it, chain(1), 2.2).order
    it.heard(ticket, silent.address, 1, 200, 3.0)
    assert silent.health.state is State.RETURNING


def test_requests_that_wait_at_one_worker_have_different_seconds() -> None:
    it = pool(8, fallbacks=3, alpha=1000.0)
    seconds = [send(it, chain(1), 0.0).decision for _ in range(6)]
    orders = [decision.order for decision in seconds[1:] if decision is not None]
    assert {order[0] for order in orders} == {orders[0][0]}
    assert {frozenset(order) for order in orders} == {frozenset(orders[0])}
    assert len({order[1] for order in orders[:3]}) == 3
    answered = send(it, chain(2), 0.0)
    it.heard(answered, answered.worker.address if answered.worker else "", 1, 200, 0.0)
    holder = next(w for w in it.workers if w is not orders[0][0])
    it.picture.touch(holder.slot, chain(1).hashes[:6], 0.0)
    assert {decide(it, chain(1)).order[1] for _ in range(5)} == {holder}, "the one that holds most of it"


def test_a_closed_port_means_another_cache_afterwards() -> None:
    it = pool(4)
    home = send(it, chain(1), 0.0).worker
    assert home is not None
    eject(it, home, 1.0)
    it.probed(home, Probe.READY, 2.0, 2.0)
    assert it.picture.lookup(chain(1).hashes).get(home.slot, 0) == 0


def test_max_pending_prefill_tokens() -> None:
    it = pool(3, max_pending_prefill_tokens=5000)
    homes = [send(it, chain(1, blocks=40), 0.0).worker for _ in range(2)]
    assert homes[0] is not homes[1], "10,240 tokens wait at the first"
    assert decide(it, chain(1, blocks=40), 0.0).worker not in homes
    again = decide(it, chain(1, blocks=40), 0.6)
    assert again.worker in homes, "the queue drains by itself"
    endpoints = (EndpointConfig("10.0.0.1", 8000, "c", 120, max_pending_prefill_tokens=7),)
    it.update(PoolConfig("pool", endpoints, PoolSettings(max_pending_prefill_tokens=5000)))
    assert it.workers[0].max_pending_prefill_tokens == 7


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 12),
    share=st.floats(0.0, 1.0),
    data=st.data(),
)
def test_never_more_than_the_share_and_always_someone(n: int, share: float, data: st.DataObject) -> None:
    it = pool(n, max_ejected_share=share)
    for worker in data.draw(st.sets(st.sampled_from(list(it.workers)))):
        it.probed(worker, data.draw(st.sampled_from([Probe.REFUSED, Probe.NOT_READY])), 0.0, 0.0)
    well, panic = usable(it.workers, share)
    assert len(well) >= 1
    assert n - len(well) <= share * n
    decision = decide(it, chain(data.draw(st.integers(0, 5))))
    out = {w for w in it.workers if w.health.out}
    if not panic:
        assert not out & set(decision.order)
    assert decision.worker in it.workers
    assert len(set(decision.order)) == len(decision.order)
