"""What ``extproc top`` shows, by size: it fits, and what matters is there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from extproc.live import figures
from extproc.live.status import (
    Alarm,
    DecisionStatus,
    MoveStatus,
    PoolStatus,
    PrefixStatus,
    Status,
    TenantStatus,
    Ttft,
    WorkerStatus,
)
from extproc.live.top_view import SORTS, help_page, report, screen

NOW_S = 1_700_000_000.0
TENANT = "5994471abb01"


def worker(index: int, **changes: Any) -> WorkerStatus:
    usual = WorkerStatus(
        address=f"10.0.{index // 256}.{index % 256}:8000",
        state="healthy",
        in_flight=index % 50,
        max_inflight=120,
        pending_prefill_tokens=1234 * index,
        prefill_tokens_per_s=10_000.0,
        requests_per_s=index / 10,
        prompt_tokens_per_s=1000.0 * index,
        hit_ratio=0.87,
        engine_hit_ratio=0.81,
        ttft=Ttft(12.0, 345.0),
        engine_ttft_ms=23.0,
        engine_running=3.0,
        engine_waiting=0.0,
        kv_usage=0.31,
        cache_used_tokens=95_000,
        cache_tokens=190_000,
        signal_age_s=4.2,
        moved_per_s=0.0,
    )
    return replace(usual, **changes)


def pool(workers: list[WorkerStatus], name: str = "workers", **changes: Any) -> PoolStatus:
    usual = PoolStatus(
        name=name,
        policy="predicted",
        panic=False,
        requests_per_s=123.4,
        prompt_tokens_per_s=456_000.0,
        hit_ratio=0.91,
        engine_hit_ratio=0.89,
        ttft=Ttft(12.0, 1345.0),
        engine_ttft_ms=56.7,
        in_flight=678,
        pending_prefill_tokens=98_765,
        utilisation=0.43,
        busiest=1.42,
        reasons={"affinity": 97.0, "load": 2.0, "cold": 1.0},
        refused={},
        moved_per_s=0.0,
        workers=workers,
        prefixes=[
            PrefixStatus(
                f"{n:08x}", "5994471abb01", 12_345, 9.8, 0.2, 0.95, {w.address: 7 for w in workers[:n]}
            )
            for n in range(1, 20)
        ],
    )
    return replace(usual, **changes)


DECISION = DecisionStatus(
    at_s=NOW_S,
    request_id="r-1",
    pool="workers",
    worker="10.0.0.1:8000",
    served="10.0.0.1:8000",
    reason="affinity",
    prefix="0a1b2c3d",
    tenant="",
    prompt_tokens=2000,
    cached_tokens=1500,
    predicted_ttft_ms=34.5,
    status=200,
    duration_ms=987.0,
)
DECISIONS = [
    DECISION,
    replace(DECISION, served="10.0.0.7:8000", status=503),
    replace(DECISION, worker="", served="", reason="slo", status=429, duration_ms=None),
    replace(DECISION, served="", status=0, duration_ms=None),
] * 10
PANIC = Alarm(
    "Panic", "critical", "workers", "", "3 of 4 workers are out: all count as healthy", NOW_S - 75.0
)
EJECTED = Alarm(
    "WorkerEjected", "warning", "workers", "10.0.0.100:8000", "10.0.0.100:8000 is ejected", NOW_S - 9
)


def status(*pools: PoolStatus, alarms: tuple[Alarm, ...] = ()) -> Status:
    return Status(
        "1.2.3", NOW_S, NOW_S - 4000.0, "/etc/envoy.yaml", 10.0, list(pools), DECISIONS, list(alarms)
    )


def shown(given: Status, width: int, height: int, **options: Any) -> list[str]:
    return [line.plain for line in screen(given, given.pools[0], width, height, **options)]


EIGHT = pool([worker(n) for n in range(8)])
MANY = pool([worker(n) for n in range(128)], moves=[MoveStatus("10.0.0.1:8000", "", 3, NOW_S, 0)])


@given(
    st.integers(20, 250),
    st.integers(2, 90),
    st.sampled_from([EIGHT, MANY, pool([]), pool([worker(0, address="[2001:db8:1:2:3:4:5:6]:8000")])]),
    st.lists(st.sampled_from([PANIC, EJECTED]), max_size=9),
    st.sampled_from(sorted(SORTS)),
)
def test_nothing_is_wider_or_higher_than_the_screen(
    width: int, height: int, given: PoolStatus, alarms: list[Alarm], sort: str
) -> None:
    lines = shown(status(given, alarms=tuple(alarms)), width, height, sort=sort)
    assert len(lines) < height
    assert max(cell_len(line) for line in lines) <= width


def test_eight_workers_fit_80_by_24_with_all_that_matters() -> None:
    lines = shown(status(EIGHT), 80, 24)
    assert len(lines) == 23
    assert "pool workers" in lines[0]
    assert "no alarms" in lines[0]
    assert lines[1].split("  ") == [
        "123 req/s",
        "hit 91%",
        "engines 89%",
        "ttft p50 12ms",
        "p99 1.3s",
        "engines 57ms",
    ]
    assert lines[3] == "affinity 97%  load 2%  cold 1%"
    title, *rows = lines[4:13]
    assert " ".join(title.split()) == "worker state load queue req/s hit eng p50 p99 cache"
    assert [row.split()[0] for row in rows] == [w.address for w in EIGHT.workers]
    assert " ".join(rows[7].split()) == "10.0.0.7:8000 ok █░░░░░ 7/120 8.6k 0.7 87% 81% 12ms 345ms 50%"
    prefixes = lines.index(next(line for line in lines if line.startswith("prefix")))
    assert " ".join(lines[prefixes + 1].split()).startswith(f"00000001 {TENANT} 12k 9.8 20% 95% 1 10.")
    decisions = [line for line in lines if line.startswith("time")]
    assert " ".join(decisions[0].split()) == "time decided reason tokens hit ttft code took prefix"
    assert any("→10.0.0.7:8000" in line and "503" in line for line in lines)
    assert any("refused" in line and "slo" in line and "429" in line for line in lines)


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (80, 12), (200, 50)])
def test_the_essentials_are_whole_at_any_width(width: int, height: int) -> None:
    lines = shown(status(EIGHT, alarms=(PANIC, EJECTED)), width, height)
    assert lines[1].startswith("! Panic 75s: 3 of 4 workers are out")
    text = "\n".join(lines)
    assert "123 req/s" in text
    assert "hit 91%" in text
    row = next(line for line in lines if line.startswith("10.0.0.7:8000"))
    assert {"ok", "7/120", "87%"} <= set(row.split())


def test_alarmed_and_busiest_workers_are_shown_where_not_all_fit() -> None:
    workers = [
        *MANY.workers[:100],
        replace(MANY.workers[100], state="ejected", in_flight=0),
        *MANY.workers[101:],
    ]
    crowded = status(replace(MANY, workers=workers), alarms=(EJECTED,))
    lines = shown(crowded, 80, 24)
    addresses = [line.split()[0] for line in lines if line.startswith("10.0.")]
    assert "10.0.0.100:8000" in addresses
    assert "10.0.0.99:8000" in addresses  # 49 in flight
    assert addresses == [w.address for w in workers if w.address in addresses]
    assert "out!" in next(line for line in lines if line.startswith("10.0.0.100:8000"))
    rest = next(line for line in lines if line.startswith("and "))
    left = [w for w in workers if w.address not in addresses]
    assert rest.startswith(f"and {len(left)} more: {sum(w.in_flight for w in left)} in flight")
    by_requests = [
        line.split()[0] for line in shown(crowded, 80, 24, sort="requests") if line.startswith("10.0.")
    ]
    assert by_requests[:2] == ["10.0.0.100:8000", "10.0.0.127:8000"]
    assert "moved in a minute: 10.0.0.1:8000 → nobody 3× (no answer)" in lines


def test_more_alarms_than_room() -> None:
    lines = shown(status(EIGHT, alarms=(PANIC, *[EJECTED] * 9)), 80, 24)
    assert [line[:9] for line in lines[1:4]] == ["! Panic 7", "! WorkerE", "! WorkerE"]
    assert lines[4] == "7 more alarms"


def test_a_report_leaves_nothing_out() -> None:
    other = pool([worker(200)], name="other")
    given = status(MANY, other, alarms=(PANIC, *[EJECTED] * 9))
    for width in (None, 100):
        lines = [line.plain for line in report(given, given.pools, width)]
        text = "\n".join(lines)
        assert text.count("WorkerEjected") == 9
        assert all(f"{w.address} " in text for w in [*MANY.workers, *other.workers])
        assert all(prefix.prefix in text for prefix in MANY.prefixes)
        assert text.count("affinity  ") >= len(DECISIONS) * 3 // 4
        assert max(map(len, lines)) <= (width or 10_000)
    assert "…" not in "\n".join(line.plain for line in report(given, given.pools, None))


def test_tenants_that_break_caching_are_named() -> None:
    tenants = [TenantStatus("aaaaaaaaaaaa", 5.0, 0.4, 0.02), TenantStatus("bbbbbbbbbbbb", 5.0, 0.6, 0.95)]
    lines = shown(status(replace(EIGHT, tenants=tenants)), 80, 24)
    assert "least cached tenants: aaaaaaaaaaaa hit 2%, 40% of tokens" in "\n".join(lines)
    table = [line.plain for line in report(status(replace(EIGHT, tenants=tenants)), [EIGHT], None)]
    assert not any("aaaaaaaaaaaa" in line for line in table)
    full = [line.plain for line in report(status(), [replace(EIGHT, tenants=tenants)], None)]
    assert "aaaaaaaaaaaa   5.0   40%   2%" in full


def test_nothing_is_known_of_an_idle_pool() -> None:
    idle = worker(0, hit_ratio=None, engine_hit_ratio=None, ttft=None, cache_tokens=0, signal_age_s=None)
    nothing = pool(
        [idle], ttft=None, hit_ratio=None, busiest=None, reasons={}, prefixes=[], requests_per_s=0.0
    )
    lines = shown(replace(status(nothing), decisions=[]), 80, 24)
    assert lines[1].startswith("0 req/s  hit –")
    assert " ".join(lines[4].split()) == "10.0.0.0:8000 ok ░░░░░░ 0/120 0 0 – – – – –"
    assert len(lines) == 5


def test_what_came_from_outside_can_do_nothing_to_a_terminal() -> None:
    evil = "a\x1b[2Jb\x9b5n\r\n"
    given = status(pool([worker(0, address=evil)], name=evil), alarms=(replace(PANIC, text=evil, pool=evil),))
    given = replace(given, decisions=[replace(DECISION, pool=evil, request_id=evil, reason=evil)])
    for lines in (screen(given, given.pools[0], 200, 50), report(given, given.pools, None)):
        text = "".join(line.plain for line in lines)
        assert text.isprintable()
        assert "[2J" in text


def test_help_fits_and_names_all_columns() -> None:
    for width, height in ((80, 24), (40, 24), (20, 10)):
        lines = [line.plain for line in help_page(width, height)]
        assert len(lines) < height
        assert max(map(len, lines)) <= width
    text = "\n".join(line.plain for line in help_page(80, 24))
    assert all(word in text for word in ("load:", "queue:", "hit, eng:", "p50, p99:", "cache:", "Prefixes:"))


@pytest.mark.parametrize(
    ("say", "value", "said"),
    [
        (figures.count, 0, "0"),
        (figures.count, 999.4, "999"),
        (figures.count, 999.6, "1.0k"),
        (figures.count, 12_345, "12k"),
        (figures.count, 1_200_000, "1.2M"),
        (figures.count, None, "–"),
        (figures.rate, 0.0, "0"),
        (figures.rate, 0.04, "0.04"),
        (figures.rate, 12.34, "12.3"),
        (figures.rate, 99.96, "100"),
        (figures.share, 1.0, "100%"),
        (figures.share, 0.004, "0.4%"),
        (figures.share, 0.0, "0%"),
        (figures.time, 0.4, "0ms"),
        (figures.time, 999.6, "1.0s"),
        (figures.time, 65_432, "65s"),
        (figures.time, 3_600_000, "60m"),
        (figures.age, 119, "119s"),
        (figures.age, 7200, "2h"),
    ],
)
def test_figures(say: Any, value: float | None, said: str) -> None:
    assert say(value) == said


@given(st.floats(0.0, 1e12))
def test_figures_are_short(value: float) -> None:
    assert max(len(figures.count(value)), len(figures.rate(value)), len(figures.time(min(value, 5e6)))) <= 5
