"""What a drill says: failures, TTFT in quiet and in chaos, how soon each fault was noticed and forgiven."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich import box
from rich.console import Console
from rich.table import Table

from extproc.demo.demo_report import percentile, seconds
from extproc.demo.drill_causes import Cause, Strike, cause, first_seen, floor, lost
from extproc.demo.loadgen import Result
from extproc.routing.health import State

#: TTFT's 99th percentile may grow by this factor.
P99_BOUND = 2.0

#: The JSON tells of so many slow requests.
SLOWEST = 60

_OUT = (State.EJECTED.value, State.NOT_READY.value)


@dataclass(frozen=True, slots=True)
class Phase:
    """A time on the monotonic clock; requests belong to the phase in which they started."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the router's log: the worker's new state."""

    wall_s: float
    worker: str
    state: str
    cause: str


@dataclass(frozen=True, slots=True)
class FaultFigures:
    """``ejected_s`` after the fault began, ``back_s`` (first traffic) and ``healthy_s`` after it ended.

    None: it never happened. ``cut``: streams that the worker was sending when it was killed.
    ``slowest``: of all the run's slowest hundredth, those during this fault, by their cause.
    """

    fault: str
    worker: str
    requests: int
    cut: int
    failed: int
    ttft_p99_s: float
    ttft_max_s: float
    cause: str | None
    ejected_s: float | None
    back_s: float | None
    healthy_s: float | None
    slowest: dict[str, int]


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """One of the slowest; ``after_s``: its start after the fault's."""

    fault: str
    cause: str
    after_s: float
    ttft_s: float
    cached: float
    served_by_struck: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All figures. TTFT in seconds, of requests that succeeded.

    ``lost_prompts``, ``floor_p99_s``: see `extproc.demo.drill_causes`.
    """

    quiet_requests: int
    chaos_requests: int
    cut: int
    failed: int
    first_error: str
    quiet_p50_s: float
    quiet_p99_s: float
    chaos_p50_s: float
    chaos_p99_s: float
    quiet_cached: float
    chaos_cached: float
    lost_prompts: int
    floor_p99_s: float
    false_ejections: int
    faults: tuple[FaultFigures, ...]
    slowest: tuple[SlowRequest, ...]

    @property
    def passed(self) -> bool:
        """No failure that wasn't inevitable, and TTFT within its bound."""
        return not self.failed and self.chaos_p99_s <= P99_BOUND * self.quiet_p99_s


def worker_events(log: str) -> list[Event]:
    """The changes of health in a router's log."""
    events = []
    for line in log.splitlines():
        if "health changed" not in line:
            continue
        fields = json.loads(line)
        at = datetime.fromisoformat(fields["timestamp"]).timestamp()
        events.append(Event(at, fields["worker"], fields["state"], fields["cause"] or ""))
    return events


def summarise(
    results: Sequence[Result],
    quiet: Phase,
    chaos: Phase,
    strikes: Sequence[Strike],
    events: Sequence[Event],
    alone_s: Callable[[int], float],
) -> Report:
    """Figures from all requests and the router's log. ``alone_s``: see `floor`."""
    failures = [r for r in results if r.error and r.start_s >= quiet.begin_s]
    cut = [r for r in failures if any(_was_cut(r, strike) for strike in strikes)]
    failed = [r for r in failures if r not in cut]
    first = _within(results, quiet)
    # The first fault comes an instant after the phase's begin.
    second = _within(results, Phase(strikes[0].began_s, chaos.end_s))
    struck = {(s.worker, i) for i, s in enumerate(strikes)}
    false = [
        e
        for e in events
        if e.state in _OUT
        and not any(
            e.worker == w and strikes[i].began_wall_s <= e.wall_s <= strikes[i].slot_end_wall_s
            for w, i in struck
        )
    ]
    ends = [s.began_s for s in strikes[1:]] + [chaos.end_s]
    answered = sorted((r for r in second if not r.error), key=lambda r: r.ttft_s, reverse=True)
    seen = first_seen(results)
    slow = [
        (r, strike, cause(r, strike, seen[r.persona] < r.start_s))
        for r in answered[: max(SLOWEST, len(answered) // 100)]
        for strike in [next(s for s in reversed(strikes) if s.began_s <= r.start_s)]
    ]
    causes: dict[int, Counter[str]] = {id(strike): Counter() for strike in strikes}
    for _, strike, why in slow[: len(answered) // 100]:
        causes[id(strike)][why.value] += 1
    gone = lost([r for r in results if not r.error], strikes, chaos.end_s)
    return Report(
        quiet_requests=len(first),
        chaos_requests=len(second),
        cut=len(cut),
        failed=len(failed),
        first_error=failed[0].error if failed else "",
        quiet_p50_s=_ttft(first, 50),
        quiet_p99_s=_ttft(first, 99),
        chaos_p50_s=_ttft(second, 50),
        chaos_p99_s=_ttft(second, 99),
        quiet_cached=_cached(first),
        chaos_cached=_cached(second),
        lost_prompts=len(gone),
        floor_p99_s=floor(
            [r.ttft_s for r in first if not r.error],
            [r.prompt_tokens for r in gone],
            len(answered),
            alone_s,
        ),
        false_ejections=len(false),
        faults=tuple(
            _figures(
                strike,
                _within(results, Phase(strike.began_s, end_s)),
                cut,
                failed,
                events,
                causes[id(strike)],
            )
            for strike, end_s in zip(strikes, ends, strict=True)
        ),
        slowest=tuple(_slow(*each) for each in slow[:SLOWEST]),
    )


def _slow(result: Result, strike: Strike, why: Cause) -> SlowRequest:
    return SlowRequest(
        fault=strike.fault,
        cause=why.value,
        after_s=round(result.start_s - strike.began_s, 2),
        ttft_s=round(result.ttft_s, 2),
        cached=round(result.cached_tokens / max(result.prompt_tokens, 1), 2),
        served_by_struck=result.worker == strike.worker,
    )


def _was_cut(result: Result, strike: Strike) -> bool:
    """Whether the worker was sending it, headers at least, when it was killed."""
    return (
        strike.cuts
        and result.worker == strike.worker
        and result.start_s <= strike.ended_s
        and result.end_s >= strike.began_s
    )


def _figures(
    strike: Strike,
    during: Sequence[Result],
    cut: Sequence[Result],
    failed: Sequence[Result],
    events: Sequence[Event],
    slowest: Counter[str],
) -> FaultFigures:
    mine = [e for e in events if e.worker == strike.worker and e.wall_s >= strike.began_wall_s]
    until_s = strike.slot_end_wall_s
    out = next((e for e in mine if e.state in _OUT and e.wall_s <= until_s), None)

    def after_end(*states: str) -> float | None:
        # The last one: while the fault goes on, trials fail and it is out again.
        last = next((e for e in reversed(mine) if e.wall_s <= until_s and e.state in states), None)
        return None if last is None else last.wall_s - strike.ended_wall_s

    return FaultFigures(
        fault=strike.fault,
        worker=strike.worker,
        requests=len(during),
        cut=sum(_was_cut(r, strike) for r in cut),
        failed=sum(r in during for r in failed),
        ttft_p99_s=_ttft(during, 99),
        ttft_max_s=_ttft(during, 100),
        cause=out.cause if out else None,
        ejected_s=out.wall_s - strike.began_wall_s if out else None,
        back_s=after_end(State.RETURNING.value),
        healthy_s=after_end(State.HEALTHY.value),
        slowest=dict(slowest.most_common()),
    )


def _within(results: Sequence[Result], phase: Phase) -> list[Result]:
    return [r for r in results if phase.begin_s <= r.start_s < phase.end_s]


def _ttft(results: Sequence[Result], percent: float) -> float:
    return percentile(sorted(r.ttft_s for r in results if not r.error), percent)


def _cached(results: Sequence[Result]) -> float:
    return sum(r.cached_tokens for r in results) / max(sum(r.prompt_tokens for r in results), 1)


def print_report(console: Console, report: Report) -> None:
    """For a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("fault", no_wrap=True)
    columns = ("requests", "cut", "failed", "TTFT p99", "max", "noticed", "as", "trial", "healthy")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of the slowest 1 %")
    for row in report.faults:
        table.add_row(
            row.fault,
            f"{row.requests:,}",
            str(row.cut),
            str(row.failed),
            seconds(row.ttft_p99_s),
            seconds(row.ttft_max_s),
            _after(row.ejected_s),
            row.cause or "-",
            _after(row.back_s),
            _after(row.healthy_s),
            ", ".join(f"{count} {why}" for why, count in row.slowest.items()),
        )
    console.print(table)
    console.print("noticed: after the fault began; trial, healthy: after it ended (negative: before)")
    ratio = report.chaos_p99_s / report.quiet_p99_s if report.quiet_p99_s else 0.0
    console.print(
        f"TTFT p50/p99: quiet {seconds(report.quiet_p50_s)}/{seconds(report.quiet_p99_s)} "
        f"({report.quiet_requests:,} requests, {report.quiet_cached:.1%} cached), faults "
        f"{seconds(report.chaos_p50_s)}/{seconds(report.chaos_p99_s)} ({report.chaos_requests:,} requests, "
        f"{report.chaos_cached:.1%} cached): p99 x {ratio:.2f}"
    )
    console.print(
        f"{report.lost_prompts} prompts lost their workers. If each were computed once, alone, and all else "
        f"was as in the quiet: p99 {seconds(report.floor_p99_s)}."
    )
    console.print(
        f"Cut by a killed worker: {report.cut}. Failed otherwise: {report.failed}. "
        f"Healthy workers ejected: {report.false_ejections}."
    )
    if report.first_error:
        console.print(f"The first failure: {report.first_error}")


def _after(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
