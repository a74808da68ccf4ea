"""What ``extproc top`` shows, as lines of styled text: pure functions from a `Status` and a size.

`screen` fits what matters into so many columns and rows; `report` leaves nothing out. Where there are more
workers than rows, those with alarms and the busiest are shown, and one line speaks for the rest.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath

from rich.text import Text

from extproc.live import figures
from extproc.live.status import (
    Alarm,
    DecisionStatus,
    PoolStatus,
    PrefixStatus,
    Status,
    TenantStatus,
    WorkerStatus,
)
from extproc.live.tables import Column, clean, ended, flow, table

#: From so many rows on there is air between the parts.
AIRY_ROWS = 40

#: With fewer rows for its body, a screen has tables only.
REMARKS_ROWS = 12

#: How workers may be sorted. "order" is the YAML's.
SORTS: dict[str, Callable[[WorkerStatus], float]] = {
    "order": lambda worker: 0.0,
    "load": lambda worker: -_load(worker),
    "requests": lambda worker: -worker.requests_per_s,
    "hit": lambda worker: 2.0 if worker.hit_ratio is None else worker.hit_ratio,
    "ttft": lambda worker: -worker.ttft.p99_ms if worker.ttft else 0.0,
}

HELP = (
    "q quit, p next pool, s sort workers, space hold still, h this help",
    "",
    "state: ok; out: ejected; wait: its health page says it isn't ready; back: returning, with few requests;"
    " ! an alarm is about it",
    "load: requests in flight, of its limit",
    "queue: uncached prompt tokens that wait there",
    "hit, eng: share of the prompt tokens thought to be cached there, and what the engine says",
    "p50, p99: predicted time to the first token",
    "cache: how much of its cache is known to be filled",
    "",
    "Prefixes: the hottest by prompt tokens, and to how many workers they went. One is what affinity wants;"
    " a crowd pays for more. Tenants are digests.",
    "Decisions: an arrow means that Envoy sent it elsewhere.",
    "",
    "Rates and shares are of the last ten seconds; figures of engines are as old as their last reading.",
)

_STATES = {"healthy": "ok", "ejected": "out", "not_ready": "wait", "returning": "back"}
_STATE_STYLES = {"healthy": "green", "ejected": "bold red", "not_ready": "yellow", "returning": "cyan"}
_SEVERITY_STYLES = {"critical": "bold white on red", "warning": "bold yellow"}
_BAR_WIDTH = 6


def screen(status: Status, pool: PoolStatus, width: int, height: int, sort: str = "order") -> list[Text]:
    """The live view, without its last line: fewer than ``height`` lines, none wider than ``width``."""
    head = [
        _title(status, pool, width),
        *_alarms(status, width, max(2, height // 6)),
        *_summary(status, pool, width, max(1, height // 4)),
    ]
    room = height - 1 - len(head)
    return [*head, *_body(status, pool, width, room, sort, 1 if height >= AIRY_ROWS else 0)][: height - 1]


def report(status: Status, pools: Sequence[PoolStatus], width: int | None) -> list[Text]:
    """Everything about these pools. ``width``: of the terminal; None: as wide as it gets."""
    lines = _alarms(status, width, None)
    for pool in pools:
        lines += [Text(), _title(status, pool, width), *_summary(status, pool, width, None)]
        parts = [
            table(_workers(pool, _alarmed(status, pool)), pool.workers, width),
            _moves(pool, width, None),
            table(_TENANTS, pool.tenants, width) if pool.tenants else [],
            table(_PREFIXES, pool.prefixes, width) if pool.prefixes else [],
            table(_DECISIONS, decisions, width) if (decisions := _decisions(status, pool)) else [],
        ]
        for part in parts:
            lines += [Text(), *part] if part else []
    return lines if status.alarms else lines[1:]


def help_page(width: int, height: int) -> list[Text]:
    """What the columns mean; fewer than ``height`` lines."""
    lines = [line for text in HELP for line in textwrap.wrap(text, width, subsequent_indent="  ") or [""]]
    return [Text(line) for line in lines[: height - 1]]


# --- the head ----------------------------------------------------------------------------------------


def _title(status: Status, pool: PoolStatus, width: int | None) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(status.now_s))
    names = [each.name for each in status.pools]
    place = f" ({names.index(pool.name) + 1} of {len(names)})" if len(names) > 1 else ""
    items: list[Text | str] = [
        Text(clean(f"pool {pool.name}{place}"), "bold"),
        Text(clock),
        *([] if status.alarms else [Text("no alarms", "green")]),
        f"policy {pool.policy}",
        f"up {figures.age(status.now_s - status.started_s)}",
        PurePath(status.config).name,
        f"extproc {status.version}",
    ]
    return flow(items, width, 1)[0]


def _alarms(status: Status, width: int | None, most: int | None) -> list[Text]:
    """``most``: so many lines."""
    lines: list[Text] = []
    for index, alarm in enumerate(status.alarms):
        wrapped = _alarm(alarm, status, width)
        later = len(status.alarms) - index - 1
        if most is not None and width is not None:
            room = most - len(lines) - (later > 0)
            if room <= 0:
                return [*lines, Text(f"{later + 1} more alarms", "bold yellow")]
            if len(wrapped) > room:
                rest = " ".join(line.plain for line in wrapped[room - 1 :])
                cut = ended(Text(rest, spans=wrapped[room - 1].spans), width)
                wrapped = [*wrapped[: room - 1], cut]
        lines += wrapped
    return lines


def _alarm(alarm: Alarm, status: Status, width: int | None) -> list[Text]:
    style = _SEVERITY_STYLES.get(alarm.severity, "bold")
    where = f" {alarm.pool}:" if alarm.pool and len(status.pools) > 1 else ""
    since = figures.age(status.now_s - alarm.since_s)
    told = clean(f"! {alarm.name} {since}:{where} {alarm.text}")
    lines = [Text(line) for line in textwrap.wrap(told, width or len(told), subsequent_indent="  ")]
    lines[0].stylize(style, 0, 2 + len(alarm.name))
    return lines


def _summary(status: Status, pool: PoolStatus, width: int | None, most: int | None) -> list[Text]:
    ttft = pool.ttft
    traffic: list[Text | str] = [
        f"{figures.rate(pool.requests_per_s)} req/s",
        Text(f"hit {figures.share(pool.hit_ratio)}", "bold"),
        f"engines {figures.share(pool.engine_hit_ratio)}",
        f"ttft p50 {figures.time(ttft.p50_ms if ttft else None)}",
        f"p99 {figures.time(ttft.p99_ms if ttft else None)}",
        f"engines {figures.time(pool.engine_ttft_ms)}",
    ]
    load: list[Text | str] = [
        f"{pool.in_flight} in flight",
        f"{figures.count(pool.pending_prefill_tokens)} tokens queue",
        f"prefill {figures.share(pool.utilisation)}",
        "busiest –" if pool.busiest is None else f"busiest {pool.busiest:.1f} × mean",
        f"{figures.count(pool.prompt_tokens_per_s)} tokens/s",
    ]
    decided = sum(pool.reasons.values())
    reasons: list[Text | str] = [
        f"{reason} {figures.share(per_s / decided)}" for reason, per_s in pool.reasons.items() if decided
    ]
    for word, rates in (
        ("refused", pool.refused),
        ("moved", {"": pool.moved_per_s} if pool.moved_per_s else {}),
        ("unreadable", pool.unreadable),
        ("left to Envoy", status.unrouted),
    ):
        if rates:
            why = ", ".join(reason for reason in rates if reason)
            told = f"{word} {figures.rate(sum(rates.values()))}/s{f' ({why})' if why else ''}"
            reasons.append(Text(clean(told), "yellow"))
    lines: list[Text] = []
    for group in (traffic, load, reasons):
        lines += flow(group, width)
    return lines if most is None else lines[:most]


# --- the body ----------------------------------------------------------------------------------------


def _body(status: Status, pool: PoolStatus, width: int, room: int, sort: str, air: int) -> list[Text]:
    remarks = [*_moves(pool, width, 1), *_least_cached(pool, width)] if room >= REMARKS_ROWS else []
    decisions = _decisions(status, pool)
    wanted = [len(pool.workers), len(pool.prefixes), len(decisions)]
    gaps = air * (sum(1 for rows in wanted if rows) + bool(remarks))
    rows = _shares(room - len(remarks) - gaps, wanted)
    parts = [
        _worker_rows(status, pool, width, rows[0], sort),
        remarks,
        table(_PREFIXES, pool.prefixes[: rows[1]], width) if rows[1] else [],
        table(_DECISIONS, decisions[: rows[2]], width) if rows[2] else [],
    ]
    lines: list[Text] = []
    for part in parts:
        lines += [*[Text()] * air, *part] if part else []
    return lines


def _shares(room: int, wanted: Sequence[int]) -> list[int]:
    """How many rows each part gets, besides its title line: a few each, then the first all it wants."""
    rows = [0] * len(wanted)
    for least in (1, 3):
        for index, want in enumerate(wanted):
            more = min(want, least) - rows[index]
            cost = more + (not rows[index])
            if more > 0 and cost <= room:
                rows[index] += more
                room -= cost
    first = min(room, wanted[0] - rows[0]) if rows[0] else 0
    rows[0] += first
    room -= first
    while room > 0 and any(have and have < want for have, want in zip(rows, wanted, strict=True)):
        for index, want in enumerate(wanted):
            if room > 0 and rows[index] and rows[index] < want:
                rows[index] += 1
                room -= 1
    return rows


def _worker_rows(status: Status, pool: PoolStatus, width: int, rows: int, sort: str) -> list[Text]:
    if not rows:
        return []
    alarmed = _alarmed(status, pool)
    columns = _workers(pool, alarmed)
    if len(pool.workers) <= rows:
        return table(columns, sorted(pool.workers, key=SORTS[sort]), width)
    order = SORTS["load" if sort == "order" else sort]
    ranked = sorted(
        pool.workers,
        key=lambda w: (w.address not in alarmed and w.state == "healthy", order(w), -w.requests_per_s),
    )
    shown = ranked[: rows - 1]
    if sort == "order":  # they stay in their places while they are shown
        chosen = {worker.address for worker in shown}
        shown = [worker for worker in pool.workers if worker.address in chosen]
    rest = ranked[rows - 1 :]
    they = f"and {len(rest)} more" if shown else f"{len(rest)} workers"
    told = (
        f"{they}: {sum(w.in_flight for w in rest)} in flight,"
        f" {figures.rate(sum(w.requests_per_s for w in rest))} req/s"
    )
    table_lines = table(columns, shown, width) if shown else []
    return [*table_lines, ended(Text(told, "dim"), width)]


def _alarmed(status: Status, pool: PoolStatus) -> set[str]:
    return {alarm.worker for alarm in status.alarms if alarm.pool == pool.name}


def _decisions(status: Status, pool: PoolStatus) -> list[DecisionStatus]:
    return [decision for decision in status.decisions if decision.pool == pool.name]


def _moves(pool: PoolStatus, width: int | None, most: int | None) -> list[Text]:
    if not pool.moves:
        return []
    items = [
        f"{move.worker} → {move.served or 'nobody'} {move.moves}× ({move.status or 'no answer'})"
        for move in pool.moves
    ]
    return flow([Text(clean(f"moved in a minute: {items[0]}"), "yellow"), *items[1:]], width, most)


def _least_cached(pool: PoolStatus, width: int) -> list[Text]:
    items = [
        f"{clean(each.tenant)} hit {figures.share(each.hit_ratio)}, {figures.share(each.share)} of tokens"
        for each in pool.tenants
    ]
    return flow([f"least cached tenants: {items[0]}", *items[1:]], width, 1) if items else []


def _load(worker: WorkerStatus) -> float:
    return worker.in_flight / worker.max_inflight if worker.max_inflight else 0.0


def _state(worker: WorkerStatus, alarmed: set[str]) -> Text:
    mark = "!" if worker.address in alarmed else ""
    return Text(_STATES.get(worker.state, worker.state) + mark, _STATE_STYLES.get(worker.state, ""))


def _full(part: float) -> str:
    return "red" if part > 0.9 else "yellow" if part > 0.6 else "green"


def _workers(pool: PoolStatus, alarmed: set[str]) -> list[Column[WorkerStatus]]:
    longest = max([len(worker.address) for worker in pool.workers], default=0)  # shown or not: nothing jumps
    return [
        Column("worker", 12, 0, lambda w: clean(w.address).ljust(longest), kind="name"),
        Column("state", 5, 1, lambda w: _state(w, alarmed), kind="name"),
        Column("", _BAR_WIDTH, 5, lambda w: Text(figures.bar(_load(w), _BAR_WIDTH), _full(_load(w)))),
        Column("load", 6, 2, lambda w: f"{w.in_flight}/{w.max_inflight}"),
        Column("queue", 5, 7, lambda w: figures.count(w.pending_prefill_tokens)),
        Column("req/s", 5, 4, lambda w: figures.rate(w.requests_per_s)),
        Column("hit", 4, 3, lambda w: figures.share(w.hit_ratio)),
        Column("eng", 4, 8, lambda w: figures.share(w.engine_hit_ratio)),
        Column("p50", 5, 6, lambda w: figures.time(w.ttft.p50_ms if w.ttft else None)),
        Column("p99", 5, 6, lambda w: figures.time(w.ttft.p99_ms if w.ttft else None)),
        Column("cache", 5, 9, lambda w: figures.share(_filled(w))),
        Column("eng ttft", 8, 10, lambda w: figures.time(w.engine_ttft_ms)),
        Column("eng run", 7, 11, lambda w: figures.count(w.engine_running)),
        Column("eng wait", 8, 11, lambda w: figures.count(w.engine_waiting)),
        Column("kv used", 7, 12, lambda w: figures.share(w.kv_usage)),
        Column("read", 5, 13, lambda w: _age(w.signal_age_s)),
        Column("moved/s", 7, 14, lambda w: figures.rate(w.moved_per_s)),
        Column("tokens/s", 8, 15, lambda w: figures.count(w.prompt_tokens_per_s)),
        Column("speed", 6, 16, lambda w: figures.count(w.prefill_tokens_per_s)),
    ]


def _filled(worker: WorkerStatus) -> float | None:
    return worker.cache_used_tokens / worker.cache_tokens if worker.cache_tokens else None


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else figures.age(seconds)


def _spread(prefix: PrefixStatus) -> str:
    total = sum(prefix.spread.values())
    if len(prefix.spread) == 1:
        return f"1 {next(iter(prefix.spread))}"
    parts = [f"{worker} {requests / total:.0%}" for worker, requests in prefix.spread.items()]
    return f"{len(prefix.spread)} {', '.join(parts)}"


def _served(decision: DecisionStatus) -> Text:
    if not decision.worker:
        return Text("refused", "yellow")
    if decision.served and decision.served != decision.worker:
        return Text(clean(f"→{decision.served}"), "yellow")
    return Text(clean(decision.worker))


def _ended(decision: DecisionStatus) -> Text:
    if decision.status:
        return Text(str(decision.status), "" if decision.status < 400 else "bold red")
    return Text("" if decision.duration_ms is None and decision.worker else figures.UNKNOWN)


_PREFIXES: list[Column[PrefixStatus]] = [
    Column("prefix", 8, 0, lambda p: p.prefix, kind="name"),
    Column("tenant", 12, 6, lambda p: clean(p.tenant) or figures.UNKNOWN, kind="name"),
    Column("tokens", 6, 3, lambda p: figures.count(p.tokens)),
    Column("req/s", 5, 4, lambda p: figures.rate(p.requests_per_s)),
    Column("share", 5, 1, lambda p: figures.share(p.share)),
    Column("hit", 4, 2, lambda p: figures.share(p.hit_ratio)),
    Column("on workers", 10, 5, lambda p: clean(_spread(p)), kind="text"),
]

_TENANTS: list[Column[TenantStatus]] = [
    Column("tenant", 12, 0, lambda t: clean(t.tenant), kind="name"),
    Column("req/s", 5, 2, lambda t: figures.rate(t.requests_per_s)),
    Column("share", 5, 3, lambda t: figures.share(t.share)),
    Column("hit", 4, 1, lambda t: figures.share(t.hit_ratio)),
]

_DECISIONS: list[Column[DecisionStatus]] = [
    Column("time", 8, 0, lambda d: time.strftime("%H:%M:%S", time.localtime(d.at_s)), kind="name"),
    Column("decided", 12, 1, _served, kind="name"),
    Column("reason", 8, 2, lambda d: clean(d.reason), kind="name"),
    Column("tokens", 6, 4, lambda d: figures.count(d.prompt_tokens)),
    Column("hit", 4, 3, lambda d: _hit(d)),
    Column("ttft", 5, 5, lambda d: figures.time(d.predicted_ttft_ms)),
    Column("code", 4, 6, _ended),
    Column("took", 5, 7, lambda d: "" if d.duration_ms is None else figures.time(d.duration_ms)),
    Column("prefix", 8, 8, lambda d: d.prefix, kind="name"),
    Column("tenant", 12, 9, lambda d: clean(d.tenant), kind="name"),
    Column("request", 12, 10, lambda d: clean(d.request_id), kind="name"),
]


def _hit(decision: DecisionStatus) -> str:
    tokens = decision.prompt_tokens
    return figures.share(decision.cached_tokens / tokens if tokens else None)
