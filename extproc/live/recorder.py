"""Takes note of what happens, for `extproc.live.live`: a sink of events.

It runs beside every decision, so an event adds to a few numbers in place and no more; sums, percentiles and
lists are made when somebody asks, or once a second (`Recorder.tick`). Memory is bounded: about 30 KB for each
worker, and 3 MB for a pool with thousands of prefixes and tenants.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

from extproc.live.history import Circle, Track, expired
from extproc.live.hottest import Hottest
from extproc.live.status import HISTORY_POINTS, HISTORY_STEP_S, MAX_DECISIONS
from extproc.live.window import NOTES, TICK_S, Account, bucket, minus
from extproc.observe import events
from extproc.routing.pool import Pool

#: Workers remembered for each pool, those that left within the hour among them.
MAX_WORKERS = 1000

#: System prompts from this length on are worth caching; below a block they don't make the prefix key.
LONG_HEAD_TOKENS = 256

#: Moves remembered for each pool.
MAX_MOVES = 200

#: A step of the history may come so much early, since ticks don't come on time.
_SLACK_S = 0.5 * TICK_S


class DecisionRecord:
    """A decision or a refusal of late. ``duration_s``: None while it runs."""

    __slots__ = ("duration_s", "event", "served", "status")

    def __init__(self, event: events.Decided | events.Refused) -> None:
        self.event = event
        self.served = ""
        self.status = 0
        self.duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A pick that Envoy didn't use."""

    at_s: float
    picked: str
    served: str
    status: int


class WorkerRecord:
    """One worker of one pool."""

    __slots__ = ("account", "cause", "track")

    def __init__(self) -> None:
        self.account = Account()
        self.track = Track()
        self.cause = ""  # of its health's last change


@dataclass(frozen=True, slots=True)
class Words:
    """Counts by word, since the start: decisions by reason, refusals by reason, unreadable by reason."""

    reasons: Mapping[str, int]
    refused: Mapping[str, int]
    unreadable: Mapping[str, int]


class PoolRecord:
    """One pool."""

    __slots__ = (
        "account",
        "busiest",
        "hottest",
        "long_head_tokens",
        "moves",
        "notes",
        "reasons",
        "refused",
        "track",
        "unreadable",
        "workers",
    )

    def __init__(self, now: float) -> None:
        self.account = Account()
        self.track = Track()
        self.busiest = array("d", [nan]) * HISTORY_POINTS
        self.workers: dict[str, WorkerRecord] = {}
        self.reasons: dict[str, int] = {}
        self.refused: Counter[str] = Counter()
        self.unreadable: Counter[str] = Counter()
        self.notes: deque[Words] = deque([Words({}, {}, {})] * NOTES, maxlen=NOTES)
        self.hottest = Hottest(now)
        self.long_head_tokens = LONG_HEAD_TOKENS
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)

    def window(self) -> Words:
        """Counts by word in the time since the oldest note."""
        then = self.notes[0]
        return Words(
            _grown(self.reasons, then.reasons),
            _grown(self.refused, then.refused),
            _grown(self.unreadable, then.unreadable),
        )


class Recorder:
    """All pools' records. ``pools`` outlive their pool by an hour."""

    def __init__(self, now: float) -> None:
        self.started_s = now
        self.pools: dict[str, PoolRecord] = {}
        self.circle = Circle()
        self.faults = 0
        self.last_fault = ""
        self.reload_refused: Exception | None = None
        self.unrouted: Counter[str] = Counter()
        self._unrouted_notes: deque[Mapping[str, int]] = deque([{}] * NOTES, maxlen=NOTES)
        self._decisions: deque[DecisionRecord] = deque()
        self._running: dict[int, DecisionRecord] = {}  # by its decision's id(); those of `_decisions`
        self._marks = deque([now] * NOTES, maxlen=NOTES)
        self._step_s = now

    # --- events ----------------------------------------------------------------------------------

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """See `extproc.observe.observer.Sink`."""
        return {
            events.Decided: self._decided,
            events.Ended: self._ended,
            events.Displaced: self._displaced,
            events.Refused: self._refused,
            events.Unrouted: self._unrouted,
            events.PromptUnreadable: self._unreadable,
            events.HealthChanged: self._health_changed,
            events.Fault: self._fault,
            events.Reloaded: self._reloaded,
            events.ReloadRefused: self._reload_refused,
        }

    def _decided(self, event: events.Decided) -> None:
        decision = event.decision
        address = decision.order[0].address
        tokens, cached, ttft_s = decision.prompt_tokens, decision.cached_tokens, decision.predicted_ttft_s
        place = bucket(ttft_s)
        record = self.pools.get(decision.pool) or self._pool(decision.pool, event.now)
        worker = record.workers.get(address) or self._worker(record, address)
        pool, account = record.account, worker.account
        account.decisions += 1
        account.prompt_tokens += tokens
        account.cached_tokens += cached
        account.ttft[place] += 1
        pool.decisions += 1
        pool.prompt_tokens += tokens
        pool.cached_tokens += cached
        pool.predicted_s += ttft_s
        pool.ttft[place] += 1
        reasons, reason = record.reasons, decision.reason
        reasons[reason] = reasons.get(reason, 0) + 1
        if decision.overflow:
            pool.overflow += 1
        if event.prefix_key is not None:
            demand = event.demand
            tenant = demand.tenant if demand is not None else ""
            head = event.asked.head_tokens >= record.long_head_tokens
            if record.hottest.count(event.prefix_key, tokens, cached, address, tenant, head):
                pool.again_tokens += tokens
                if not cached:
                    pool.lost_tokens += tokens
        self._running[id(decision)] = self._remember(event)

    def _remember(self, event: events.Decided | events.Refused) -> DecisionRecord:
        decisions = self._decisions
        if len(decisions) >= MAX_DECISIONS:
            self._running.pop(id(decisions.popleft().event.decision), None)
        record = DecisionRecord(event)
        decisions.append(record)
        return record

    def _ended(self, event: events.Ended) -> None:
        record = self._running.get(id(event.decision))
        if record is not None:
            record.served, record.status = event.worker, event.status
            record.duration_s = event.duration_s

    def _displaced(self, event: events.Displaced) -> None:
        picked, name = event.decision.worker.address, event.decision.pool
        record = self.pools.get(name) or self._pool(name, event.now)
        worker = record.workers.get(picked) or self._worker(record, picked)
        record.account.moved += 1
        worker.account.moved += 1
        record.moves.append(Move(event.now, picked, event.upstream, event.status))
        remembered = self._running.get(id(event.decision))
        if remembered is not None:
            remembered.served, remembered.status = event.upstream, event.status

    def _refused(self, event: events.Refused) -> None:
        record = self.pools.get(event.pool) or self._pool(event.pool, event.now)
        record.account.refused += 1
        record.refused[event.shed.reason] += 1
        if event.decision is not None:
            address = event.decision.worker.address
            (record.workers.get(address) or self._worker(record, address)).account.refused += 1
        self._remember(event).status = event.shed.status

    def _unrouted(self, event: events.Unrouted) -> None:
        self.unrouted[event.reason] += 1

    def _unreadable(self, event: events.PromptUnreadable) -> None:
        record = self.pools.get(event.pool) or self._pool(event.pool, event.now)
        record.unreadable[event.reason.value] += 1

    def _health_changed(self, event: events.HealthChanged) -> None:
        record = self.pools.get(event.pool)
        if record is not None:
            worker = record.workers.get(event.worker) or self._worker(record, event.worker)
            worker.cause = event.change.cause.value if event.change.cause else ""

    def _fault(self, event: events.Fault) -> None:
        self.faults += 1
        self.last_fault = type(event.error).__name__

    def _reloaded(self, event: events.Reloaded) -> None:
        self.reload_refused = None

    def _reload_refused(self, event: events.ReloadRefused) -> None:
        self.reload_refused = event.error

    def _pool(self, name: str, now: float) -> PoolRecord:
        record = self.pools[name] = PoolRecord(now)
        record.track.last_step = self.circle.steps
        return record

    def _worker(self, pool: PoolRecord, address: str) -> WorkerRecord:
        record = pool.workers[address] = WorkerRecord()
        record.track.last_step = self.circle.steps
        return record

    # --- time ------------------------------------------------------------------------------------

    def tick(self, pools: Mapping[str, Pool], now: float) -> bool:
        """Once a second: sample gauges, take notes. True if the tables of hot prefixes began anew."""
        self._sample(pools, now)
        if now - self._step_s >= HISTORY_STEP_S - _SLACK_S:
            self._write(pools, now)
        turned = False
        self._marks.append(now)
        self._unrouted_notes.append(dict(self.unrouted))
        for pool in self.pools.values():
            pool.account.note()
            for worker in pool.workers.values():
                worker.account.note()
            pool.notes.append(Words(dict(pool.reasons), dict(pool.refused), dict(pool.unreadable)))
            turned |= pool.hottest.tick(now, pool.account.prompt_tokens)
        return turned

    def _sample(self, pools: Mapping[str, Pool], now: float) -> None:
        for name, pool in pools.items():
            record = self.pools.get(name) or self._pool(name, now)
            all_in_flight, all_pending = 0, 0.0
            for worker in pool.workers:
                found = record.workers.get(worker.address) or self._worker(record, worker.address)
                in_flight, pending = worker.in_flight, worker.pending_prefill_tokens(now)
                all_in_flight += in_flight
                all_pending += pending
                found.track.sample(in_flight, pending)
            record.track.sample(all_in_flight, all_pending)
            record.long_head_tokens = max(LONG_HEAD_TOKENS, pool.settings.block_tokens)

    def _write(self, pools: Mapping[str, Pool], now: float) -> None:
        """The history's step ends."""
        seconds, place = max(now - self._step_s, TICK_S), self.circle.place
        for name, record in list(self.pools.items()):
            present = {worker.address for worker in pools[name].workers} if name in pools else set()
            decisions = [
                self._write_one(worker.account, worker.track, place, seconds, present=address in present)
                for address, worker in record.workers.items()
            ]
            record.busiest[place] = share_of_busiest(decisions, len(present)) or nan
            self._write_one(record.account, record.track, place, seconds, present=name in pools)
            self._forget_workers(record)
            if expired(record.track.last_step, self.circle):
                del self.pools[name]
        self.circle.advance(now)
        self._step_s = now

    def _write_one(self, account: Account, track: Track, place: int, seconds: float, *, present: bool) -> int:
        counts = account.counts()
        step, account.step = minus(counts, account.step), counts
        if present:
            track.write(place, step, seconds)
            track.last_step = self.circle.steps
        else:
            track.skip(place)
        return step.decisions

    def _forget_workers(self, pool: PoolRecord) -> None:
        """Those that left an hour ago, or earlier where too many come and go."""
        gone = {
            address: worker.track.last_step
            for address, worker in pool.workers.items()
            if worker.track.last_step < self.circle.steps
        }
        excess = max(0, len(pool.workers) - MAX_WORKERS)
        for nth, address in enumerate(sorted(gone, key=gone.__getitem__)):
            if nth < excess or expired(gone[address], self.circle):
                del pool.workers[address]

    # --- what is known ---------------------------------------------------------------------------

    @property
    def decisions(self) -> list[DecisionRecord]:
        """Of late, newest first."""
        return list(reversed(self._decisions))

    def seconds(self, now: float) -> float:
        """How long the windows are, all of them."""
        return max(now - self._marks[0], TICK_S)

    def unrouted_window(self) -> Mapping[str, int]:
        """Requests left to Envoy in the window, by reason."""
        return _grown(self.unrouted, self._unrouted_notes[0])


def share_of_busiest(decisions: Collection[int], workers: int) -> float | None:
    """The busiest worker's share of the requests over the mean share; None without any."""
    total = sum(decisions)
    return max(decisions) * workers / total if total and workers else None


def _grown(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
    return {word: count - then.get(word, 0) for word, count in now.items() if count > then.get(word, 0)}
