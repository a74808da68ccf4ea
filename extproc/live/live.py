"""A running router's live picture: what `Recorder` noted, joined with the pools and the engines' readings.

`Live.tick` runs once a second, `Live.status` and `Live.history` when somebody asks. All of them are given the
monotonic time; Unix time comes in where something is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from extproc import __version__
from extproc.engine.state import EngineState, Target
from extproc.envoyconf import ConfigError
from extproc.live import telling
from extproc.live.alarms import (
    ALIKE_TTFT_S,
    HOT_SHARE,
    STRAINED_LOAD,
    Alarms,
    PoolFacts,
    PrefixFacts,
    RouterFacts,
    TenantFacts,
    WorkerFacts,
)
from extproc.live.engines import stale, together, view
from extproc.live.hottest import short_hash
from extproc.live.recorder import PoolRecord, Recorder, WorkerRecord, share_of_busiest
from extproc.live.status import (
    HISTORY_STEP_S,
    MAX_TENANTS,
    Alarm,
    History,
    PoolHistory,
    PoolStatus,
    Series,
    Status,
)
from extproc.live.window import TICK_S, ttft
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

#: Unix time runs with the monotonic clock unless it is set by more than this.
CLOCK_STEP_S = 0.5

#: Moments that were rounded when they were told.
_SAME_TIME_S = 0.002

_NEVER_READ = EngineState()

#: Pool, worker (None: the pool itself), its series, and of a pool `PoolHistory.busiest`.
HistoryPart = tuple[str, str | None, Series, list[float | None]]


class Live:
    """One router's. Not thread-safe; it lives in the router's event loop."""

    def __init__(
        self,
        recorder: Recorder,
        pools: Callable[[], Mapping[str, Pool]],
        targets: Callable[[], Iterable[Target]] = tuple,
        source: Callable[[], str] = str,
        refused: Callable[[], bool] = lambda: True,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """``targets``: the engines that are read; ``source``: the configuration in force.

        ``refused``: whether the last refusal of a new one still stands.
        """
        self._recorder = recorder
        self._pools = pools
        self._targets = targets
        self._source = source
        self._refused = refused
        self._unix_s = unix_s
        self._alarms = Alarms()
        self._faults = recorder.faults
        self._prefixes: dict[str, list[PrefixFacts]] = {}
        self._tenants: dict[str, list[TenantFacts]] = {}
        self._offset_s = unix_s() - recorder.started_s

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(time.monotonic())

    # --- once a second ---------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Take notes, and see whether something is wrong."""
        pools = self._pools()
        if self._recorder.tick(pools, now):
            records = {name: self._recorder.pools[name] for name in pools}
            self._prefixes = {name: _watched(record, now) for name, record in records.items()}
            self._tenants = {name: _watched_tenants(record, now) for name, record in records.items()}
        states = self._states()
        facts = [self._facts(name, pool, states, now) for name, pool in pools.items()]
        self._alarms.update(facts, self._router_facts(), now)

    def _facts(
        self, name: str, pool: Pool, states: Mapping[tuple[str, str], EngineState], now: float
    ) -> PoolFacts:
        record, interval_s = self._recorder.pools[name], pool.settings.scrape_interval_s
        workers, views = [], []
        for worker in pool.workers:
            noted = record.workers[worker.address]
            state = states.get((name, worker.address), _NEVER_READ)
            views.append(view(state, now, interval_s))
            account, health = noted.account, worker.health
            workers.append(
                WorkerFacts(
                    worker.address,
                    account.decisions - account.notes[0].decisions,
                    stale(state, now, interval_s),
                    health.out,
                    health.state.value,
                    noted.cause,
                )
            )
        engines = together(views)
        return PoolFacts(
            name,
            workers,
            pool.panic,
            record.account.window(),
            record.window().refused,
            engines.hit_ratio if engines.query_tokens else None,
            engines.mean_ttft_s,
            engines.first_tokens,
            self._prefixes.get(name, ()),
            _strained(pool, record),
            self._tenants.get(name, ()),
        )

    def _router_facts(self) -> RouterFacts:
        recorder = self._recorder
        new_faults, self._faults = recorder.faults - self._faults, recorder.faults
        refused = recorder.reload_refused if self._refused() else None
        return RouterFacts(
            None if refused is None else _where(refused), new_faults, recorder.faults, recorder.last_fault
        )

    def _states(self) -> dict[tuple[str, str], EngineState]:
        return {(target.pool.name, target.worker.address): target.state for target in self._targets()}

    # --- when asked ------------------------------------------------------------------------------

    def status(self, now: float) -> Status:
        """Everything at this moment."""
        unix_s = self._unix(now)
        recorder = self._recorder
        seconds = recorder.seconds(now)
        states = self._states()
        return Status(
            version=__version__,
            now_s=round(unix_s + now, 3),
            started_s=round(unix_s + recorder.started_s, 3),
            config=self._source(),
            window_s=round(seconds, 3),
            pools=[
                self._pool(pool, recorder.pools.get(name) or PoolRecord(now), states, seconds, now)
                for name, pool in self._pools().items()
            ],
            decisions=[telling.decision(record, unix_s) for record in recorder.decisions],
            alarms=[
                Alarm(
                    standing.name,
                    standing.severity,
                    standing.pool,
                    standing.finding.worker,
                    standing.finding.text,
                    round(unix_s + standing.since_s, 3),
                )
                for standing in self._alarms.raised
            ],
            unrouted=telling.rates(recorder.unrouted_window(), seconds),
        )

    def history(self, now: float, pool: str | None = None, since_s: float | None = None) -> History:
        """The last hour. ``pool``: only this one; ``since_s``: only what ended later (Unix time)."""
        ends_s, parts = self.history_parts(now, pool, since_s)
        found: dict[str, PoolHistory] = {}
        for name, worker, series, busiest in parts:
            if worker is None:
                found[name] = PoolHistory(series, busiest, {})
            else:
                found[name].workers[worker] = series
        return History(HISTORY_STEP_S, ends_s, found)

    def history_parts(
        self, now: float, pool: str | None = None, since_s: float | None = None
    ) -> tuple[list[float], Iterator[HistoryPart]]:
        """The same in parts, each quickly made. They fit together as long as `steps` is the same."""
        circle, unix_s = self._recorder.circle, self._unix(now)
        points = circle.points(None if since_s is None else since_s - unix_s + _SAME_TIME_S)
        names = [name for name in self._recorder.pools if pool is None or name == pool]
        ends_s = [round(unix_s + end_s, 3) for end_s in circle.ends(points)]
        return ends_s, self._parts(names, points)

    @property
    def steps(self) -> int:
        """Of the history, since the start."""
        return self._recorder.circle.steps

    def _parts(self, names: Sequence[str], points: int) -> Iterator[HistoryPart]:
        circle, pools = self._recorder.circle, self._recorder.pools
        for name in names:
            if name in pools:
                record = pools[name]
                yield name, None, record.track.told(circle, points), circle.in_order(record.busiest, points)
                for address, worker in list(record.workers.items()):
                    yield name, address, worker.track.told(circle, points), []

    def _unix(self, now: float) -> float:
        """Unix time of the monotonic clock's zero; it moves only if the clock was set."""
        offset_s = self._unix_s() - now
        if abs(offset_s - self._offset_s) > CLOCK_STEP_S:
            self._offset_s = offset_s
        return self._offset_s

    def _pool(
        self,
        pool: Pool,
        record: PoolRecord,
        states: Mapping[tuple[str, str], EngineState],
        seconds: float,
        now: float,
    ) -> PoolStatus:
        counts, words = record.account.window(), record.window()
        workers, views, decisions = [], [], []
        for worker in pool.workers:
            noted = record.workers.get(worker.address) or WorkerRecord()
            state = states.get((pool.name, worker.address), _NEVER_READ)
            views.append(view(state, now, pool.settings.scrape_interval_s))
            window = noted.account.window()
            decisions.append(window.decisions)
            workers.append(telling.worker(pool, worker, window, state.age_s(now), views[-1], seconds, now))
        engines = together(views)
        busiest = share_of_busiest(decisions, len(workers))
        return PoolStatus(
            name=pool.name,
            policy=pool.settings.policy,
            panic=pool.panic,
            requests_per_s=telling.rate(counts.decisions, seconds),
            prompt_tokens_per_s=telling.rate(counts.prompt_tokens, seconds),
            hit_ratio=telling.ratio(counts.hit_ratio),
            engine_hit_ratio=telling.ratio(engines.hit_ratio),
            ttft=ttft(counts.ttft),
            engine_ttft_ms=telling.ms(engines.mean_ttft_s),
            in_flight=sum(worker.in_flight for worker in workers),
            pending_prefill_tokens=sum(worker.pending_prefill_tokens for worker in workers),
            utilisation=round(max(0.0, pool.utilisation(now)), 4),
            busiest=None if busiest is None else round(busiest, 3),
            reasons=telling.rates(words.reasons, seconds),
            refused=telling.rates(words.refused, seconds),
            moved_per_s=telling.rate(counts.moved, seconds),
            workers=workers,
            prefixes=telling.prefixes(record, now),
            unreadable=telling.rates(words.unreadable, seconds),
            moves=telling.moves(record, now, self._offset_s),
            tenants=telling.tenants(record, now),
        )


def _strained(pool: Pool, record: PoolRecord) -> bool:
    """Whether the worker with the most decisions has too many; see `alarms.STRAINED_LOAD`."""

    def decisions(worker: Worker) -> int:
        account = record.workers[worker.address].account
        return account.decisions - account.notes[0].decisions

    if not pool.workers:
        return False
    busiest = max(pool.workers, key=decisions)
    times = ttft(record.workers[busiest.address].account.window().ttft)
    waits = times is not None and times.p50_ms > ALIKE_TTFT_S * 1000
    return waits or busiest.in_flight >= STRAINED_LOAD * busiest.max_inflight


def _watched(record: PoolRecord, now: float) -> list[PrefixFacts]:
    _, total_tokens = record.hottest.span(now, record.account.prompt_tokens)
    return [
        PrefixFacts(
            short_hash(key),
            entry.tenant,
            entry.prompt_tokens / max(1, total_tokens),
            entry.requests,
            entry.lost,
            len(entry.spread),
        )
        for key, entry in record.hottest.hot(HOT_SHARE)
    ]


def _watched_tenants(record: PoolRecord, now: float) -> list[TenantFacts]:
    _, total_tokens = record.hottest.span(now, record.account.prompt_tokens)
    return [
        TenantFacts(
            tenant,
            count.prompt_tokens / max(1, total_tokens),
            count.cached_tokens / max(1, count.prompt_tokens),
            count.heads,
            count.new_heads,
        )
        for tenant, count in record.hottest.tenants(MAX_TENANTS)
    ]


def _where(error: Exception) -> str:
    """Which file can't be used. Not its words: settings may name tenants."""
    if isinstance(error, ConfigError) and error.problems:
        first, more = error.problems[0], len(error.problems) - 1
        line = "" if first.line is None else f":{first.line}"
        return f"{first.file}{line}{f' and {more} more places' if more else ''}; the log says what is wrong"
    return f"{type(error).__name__}; the log says what is wrong"
