"""``extproc simulate``: what routing would do for your traffic.

Built-in workloads or a recorded trace, against any policies and fleet, in virtual time: minutes of traffic
in seconds. Every policy gets the same requests. One table on the terminal, everything with ``--json``,
pictures with ``--report``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from extproc.fleet.config import PoolSettings
from extproc.fleet.settings import POOL_SETTINGS, parse
from extproc.sim import overload
from extproc.sim.cells import YARDSTICK, Cell, Row, Setup, Source, against, as_json, rows, run_cells
from extproc.sim.product import Distortion
from extproc.sim.report import render
from extproc.sim.report_sweep import sweep_svg
from extproc.sim.scenarios import POLICY_NAMES, SCENARIOS, Knobs
from extproc.sim.trace import TraceError

_DEFAULT_POLICIES = "round-robin,prefix-hash,predicted,oracle"
_SUITE_POLICIES = "predicted,oracle"
#: Loads at which the suite runs a trace.
_SUITE_LOADS = (0.5, 0.7, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = parser.add_argument_group("traffic")
    what.add_argument("--workload", default="", metavar="A,B", help="built-in workloads, or all; see --list")
    what.add_argument("--trace", type=Path, metavar="FILE", help="recorded traffic: Mooncake or OpenAI JSONL")
    what.add_argument("--trace-limit", type=_positive, metavar="N", help="read no more than N lines of it")
    what.add_argument(
        "--load",
        type=_loads,
        default=(),
        metavar="X,Y",
        help="share of the fleet's time that a trace takes without cache hits (default: its recorded pace)",
    )
    what.add_argument("--requests", type=_positive, metavar="N", help="requests in a run")
    what.add_argument("--streams", type=_positive, metavar="N", help="clients of a closed loop")
    what.add_argument("--personas", type=_positive, metavar="N", help="agent personas")
    what.add_argument("--seeds", type=_positive, default=1, metavar="N", help="runs with seeds 1 … N (1)")
    what.add_argument("--list", action="store_true", help="name the workloads and policies, and stop")
    whom = parser.add_argument_group("router")
    whom.add_argument("--policies", metavar="A,B", help=f"default: {_DEFAULT_POLICIES}; or all")
    whom.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a pool setting, named as in the Envoy YAML (repeatable)",
    )
    whom.add_argument(
        "--replicas", type=_positive, default=1, metavar="N", help="routers; each sees a share (1)"
    )
    whom.add_argument(
        "--delay-ms",
        type=_delay,
        default=0.1,
        metavar="MS",
        dest="delay_s",
        help="until replicas hear of each other's decisions (100); none: never",
    )
    for name, help_text in (
        ("token", "its estimate of prompt lengths"),
        ("cache", "the cache size that it assumes"),
        ("rate", "the prefill rate that it starts from"),
    ):
        whom.add_argument(
            f"--{name}-error", type=_factor, default=1.0, metavar="X", help=f"multiply {help_text} by X"
        )
    whom.add_argument(
        "--restart",
        choices=("empty", "saved"),
        help="the first router restarts at half time, with nothing or with the state it saved",
    )
    where = parser.add_argument_group("fleet")
    where.add_argument("--workers", type=_positive, metavar="N", help="engines (8)")
    where.add_argument("--cache-tokens", type=_positive, metavar="N", help="KV cache of each (190000)")
    where.add_argument(
        "--speeds", type=_speeds, metavar="X,Y", help="relative speeds, repeated over the workers"
    )
    how = parser.add_argument_group("output")
    how.add_argument(
        "--sweep", type=_sweep, metavar="OPTION=A,B", help=f"run for each value of {', '.join(_SWEEPS)}"
    )
    how.add_argument("--suite", action="store_true", help="every workload; a matrix relative to the oracle")
    how.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    how.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write an HTML page with pictures there (.svg: of a sweep)",
    )
    how.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="processes")


def run(args: argparse.Namespace) -> int:
    """The command."""
    if args.list:
        _list()
        return 0
    if args.workload in overload.DRILLS:
        return _drill(args)
    try:
        setup, sources, policies = _plan(args)
        cells = [
            Cell(source, policy, seed, each, note)
            for source in sources
            for note, each in _swept(setup, args.sweep)
            for policy in policies
            for seed in range(1, args.seeds + 1)
        ]
        for source in sources:
            source.scenario()  # a bad trace is told once, before any process starts
        began = time.perf_counter()
        results = run_cells(cells, args.jobs, _progress(len(cells)))
    except (TraceError, _UsageError) as error:
        print(f"extproc simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"extproc simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    table = rows(results)
    (_print_sweep if args.sweep else _print_suite if args.suite else _print_table)(table)
    requests = sum(interval.requests for result in results for interval in result.intervals)
    took = time.perf_counter() - began
    print(f"\n{requests:,} requests in {len(cells)} runs took {took:.1f} s.")
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(as_json(setup, table, results), default=str), encoding="utf-8")
        if args.report is not None:
            alone = args.sweep and args.report.suffix == ".svg"
            page = sweep_svg(table) if alone else render(setup, table, results)
            args.report.write_text(page, encoding="utf-8")
            print(f"Report: {args.report}")
    except OSError as error:
        print(f"extproc simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _drill(args: argparse.Namespace) -> int:
    """A drill of overload has a fleet and figures of its own."""
    try:
        settings = _settings(args.set)
    except _UsageError as error:
        print(f"extproc simulate: {error}", file=sys.stderr)
        return 2
    for line in overload.report(args.workload, args.seeds, settings):
        print(line, flush=True)
    return 0


class _UsageError(ValueError):
    """The options don't make sense; the message says which and what to do."""


def _plan(args: argparse.Namespace) -> tuple[Setup, list[Source], list[str]]:
    settings = _settings(args.set)
    setup = Setup(
        workers=args.workers,
        cache_tokens=args.cache_tokens,
        speeds=args.speeds,
        requests=args.requests,
        knobs=Knobs(args.streams, args.personas, args.load[0] if args.load and not args.trace else None),
        replicas=args.replicas,
        delay_s=args.delay_s,
        settings=settings,
        distortion=Distortion(args.token_error, args.cache_error, args.rate_error),
        restart=args.restart,
    )
    default = "all" if args.suite else "" if args.trace else "swarm-100"
    names = _choose("--workload", args.workload or default, SCENARIOS)
    sources = [Source(name) for name in names]
    if args.trace is not None:
        loads: Sequence[float | None] = args.load or (_SUITE_LOADS if args.suite else (None,))
        sources += [Source(args.trace.stem, args.trace.absolute(), load, args.trace_limit) for load in loads]
    chosen = args.policies or (_SUITE_POLICIES if args.suite else _DEFAULT_POLICIES)
    return setup, sources, _choose("--policies", chosen, POLICY_NAMES)


def _swept(setup: Setup, sweep: tuple[str, list[float]] | None) -> list[tuple[str, Setup]]:
    """The setup for each value of a sweep, and the value in words."""
    if sweep is None:
        return [("", setup)]
    name, values = sweep
    return [(f"{name}={value:g}", _SWEEPS[name](setup, value)) for value in values]


_SWEEPS: dict[str, Callable[[Setup, float], Setup]] = {
    "load": lambda s, v: replace(s, knobs=replace(s.knobs, load=v)),
    "streams": lambda s, v: replace(s, knobs=replace(s.knobs, streams=round(v))),
    "personas": lambda s, v: replace(s, knobs=replace(s.knobs, personas=round(v))),
    "workers": lambda s, v: replace(s, workers=round(v)),
    "cache-tokens": lambda s, v: replace(s, cache_tokens=round(v)),
    "replicas": lambda s, v: replace(s, replicas=round(v)),
    "delay-ms": lambda s, v: replace(s, delay_s=v / 1000),
    "token-error": lambda s, v: replace(s, distortion=replace(s.distortion, tokens=v)),
    "cache-error": lambda s, v: replace(s, distortion=replace(s.distortion, cache=v)),
    "rate-error": lambda s, v: replace(s, distortion=replace(s.distortion, rate=v)),
}


def _choose(option: str, text: str, known: Iterable[str]) -> list[str]:
    names = list(known)
    if text == "all":
        return names
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in names:
            raise _UsageError(f"{option}: there is no {name!r}; there are all, {', '.join(names)}")
    return chosen


def _settings(assignments: Sequence[str]) -> PoolSettings:
    values = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise _UsageError(f"--set: {assignment!r} has no value; write KEY=VALUE")
        values[key.strip()] = value.strip()
    parsed, errors = parse(POOL_SETTINGS, values, "--set")
    for error in errors:
        raise _UsageError(f"--set: {error.key}={error.value}: {error.message}; {error.fix}")
    return replace(PoolSettings(), **parsed)


def _list() -> None:
    width = max(len(name) for name in (*SCENARIOS, *POLICY_NAMES))
    print("Workloads:")
    for scenario in SCENARIOS.values():
        print(f"  {scenario.name:{width}}  {scenario.what}")
    print(f"Drills of overload (alone, with --seeds and --set): {', '.join(overload.DRILLS)}")
    print("Policies:")
    for name in POLICY_NAMES:
        print(f"  {name}")


def _print_table(table: Sequence[Row]) -> None:
    """One line for each workload and policy."""
    width = max(len(row.policy) for row in table)
    head = f"{'':{width}} TTFT mean     p50     p90     p99  e2e mean req/s   hits  busiest vs {YARDSTICK}"
    for workload in dict.fromkeys(row.workload for row in table):
        print(f"\n{workload}\n{head}")
        for row in table:
            if row.workload == workload:
                times = (row.ttft_mean, row.ttft_p50, row.ttft_p90, row.ttft_p99)
                cells = [f"{row.policy:{width}}", f"{times[0] * 1000:>9,.0f}"]
                cells += [f"{seconds * 1000:>7,.0f}" for seconds in times[1:]]
                cells += [f"{row.e2e_mean:>7.2f} s", f"{row.throughput:>5.1f}", f"{row.hit:>6.1%}"]
                cells += [f"{row.busiest:>7.2f}x", "" if row.relative is None else f"{row.relative:>9.2f}"]
                print(" ".join(cells))
    print("\nTTFT in ms; hits: share of prompt tokens from cache; busiest: its requests against the mean.")


def _print_sweep(table: Sequence[Row]) -> None:
    """Each measure over the values: policies by values."""
    for measure, title, form in (
        ("ttft_mean", "TTFT mean, s", "{:.3f}"),
        ("ttft_p99", "TTFT p99, s", "{:.3f}"),
        ("e2e_mean", "end to end, mean, s", "{:.2f}"),
        ("throughput", "requests a second", "{:.1f}"),
        ("hit", "prompt tokens from cache", "{:.1%}"),
    ):
        cells: dict[str, dict[str, float]] = {}
        for row in table:
            cells.setdefault(row.policy, {})[row.workload] = getattr(row, measure)
        columns = list(dict.fromkeys(row.workload for row in table))
        _matrix(title, columns, cells, form.format)


def _print_suite(table: Sequence[Row]) -> None:
    """A matrix for each measure: policies by workloads, relative to the yardstick."""
    measures = (
        ("ttft_mean", "TTFT mean"),
        ("ttft_p50", "TTFT p50"),
        ("ttft_p99", "TTFT p99"),
        ("e2e_mean", "end to end, mean"),
        ("throughput", "requests a second"),
    )
    for measure, title in measures:
        ratios = against(table, measure)
        if not ratios:
            continue
        columns = list(next(iter(ratios.values())))
        _matrix(f"{title}, relative to the {YARDSTICK}'s", columns, ratios, _ratio)
    hits: dict[str, dict[str, float]] = {}
    for row in table:
        hits.setdefault(row.policy, {})[row.workload] = row.hit
    _matrix("prompt tokens from cache", list(next(iter(hits.values()))), hits, lambda share: f"{share:.1%}")


def _matrix(
    title: str,
    columns: Sequence[str],
    cells: Mapping[str, Mapping[str, float]],
    form: Callable[[float], str],
) -> None:
    width = max(len(policy) for policy in cells)
    print(f"\n{title}\n{'':{width}}" + "".join(f"  {_short(column):>9}" for column in columns))
    for policy, found in cells.items():
        line = "".join(f"  {form(found[column]) if column in found else '':>9}" for column in columns)
        print(f"{policy:{width}}{line}")


def _short(name: str) -> str:
    name = name.rpartition("=")[2]  # in a sweep the value is enough
    return name if len(name) <= 9 else name[:4] + "…" + name[-4:]


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.0f}"


def _progress(total: int) -> Callable[[int], None]:
    def done(count: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{count} of {total} runs", end="\n" if count == total else "", file=sys.stderr, flush=True
            )

    return done


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def _factor(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text} is not a factor from 0.1 to 10")
    return value


def _loads(text: str) -> tuple[float, ...]:
    return tuple(_factor_of(part, "load") for part in text.split(","))


def _speeds(text: str) -> tuple[float, ...]:
    return tuple(_factor_of(part, "speed") for part in text.split(","))


def _factor_of(text: str, what: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a {what} from 0.01 to 100")
    return value


def _sweep(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    if name not in _SWEEPS:
        raise argparse.ArgumentTypeError(f"{text}: write OPTION=A,B,C with one of {', '.join(_SWEEPS)}")
    return name, [float(value) for value in values.split(",")]


def _delay(text: str) -> float | None:
    if text == "none":
        return None
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a delay in ms, or none")
    return value / 1000
