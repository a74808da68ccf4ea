"""``extproc simulate --report``: one self-contained HTML page, pictures as inline SVG, light and dark.

For each workload: the table, the distributions of TTFT and of end-to-end time, hits and TTFT over the run,
the load of each worker, and to which workers each policy sent the requests of the hottest prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from math import ceil, floor, log10
from statistics import fmean

from extproc.sim.cells import Row, Setup
from extproc.sim.charts import CHART_STYLE, bars, lines, percent, seconds_label, share_rows
from extproc.sim.report_sweep import is_swept, sweep_pictures, sweeps
from extproc.sim.result import CURVE, Distribution, Result

_STYLE = """
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1120px; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 40px 0 4px; }
h3 { font-size: 14px; margin: 0 0 6px; } p { color: var(--dim); margin: 0 0 12px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
.scroll { overflow-x: auto; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px;
  margin-top: 16px; }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0 0; font-size: 13px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
svg { width: 100%; height: auto; display: block; }
@media (max-width: 520px) { .grid { grid-template-columns: 1fr; } }
"""

_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("TTFT mean, ms", lambda r: f"{r.ttft_mean * 1000:,.0f}"),
    ("p50", lambda r: f"{r.ttft_p50 * 1000:,.0f}"),
    ("p90", lambda r: f"{r.ttft_p90 * 1000:,.0f}"),
    ("p99", lambda r: f"{r.ttft_p99 * 1000:,.0f}"),
    ("end to end, s", lambda r: f"{r.e2e_mean:.2f}"),
    ("requests/s", lambda r: f"{r.throughput:.1f}"),
    ("from cache", lambda r: f"{r.hit:.1%}"),
    ("busiest worker", lambda r: f"{r.busiest:.2f}×"),
    ("vs oracle", lambda r: "" if r.relative is None else f"{r.relative:.2f}×"),
)


def render(setup: Setup, table: Sequence[Row], results: Sequence[Result]) -> str:
    """The page."""
    workloads = list(dict.fromkeys(result.workload for result in results))
    policies = list(dict.fromkeys(result.policy for result in results))
    seeds = len({result.seed for result in results})
    colors = _colors(policies)
    sections = "".join(
        f"<h2>{escape(name)}</h2>{_legend(colors)}<div class='grid'>"
        f"{''.join(_card(title, picture) for title, picture in sweep_pictures(found, colors))}</div>"
        for name, found in sweeps(table).items()
    )
    sections += "".join(
        _section(workload, policies, table, results) for workload in workloads if not is_swept(workload)
    )
    runs = f"{seeds} seeds" if seeds > 1 else "one seed"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>extproc simulate</title><style>{CHART_STYLE}{_STYLE}</style></head><body>"
        "<h1>What routing does for this traffic</h1>"
        f"<p>{escape(_describe(setup))}; {runs}. The first fifth of each run is warm-up and left out.</p>"
        f"{sections}</body></html>\n"
    )


def _describe(setup: Setup) -> str:
    parts = [f"{setup.workers or 'default'} workers"]
    if setup.cache_tokens:
        parts.append(f"{setup.cache_tokens:,} tokens of KV cache each")
    if setup.speeds:
        parts.append("speeds " + ", ".join(f"{speed:g}" for speed in setup.speeds))
    if setup.replicas > 1:
        told = "that don't talk" if setup.delay_s is None else f"{setup.delay_s * 1000:g} ms apart"
        parts.append(f"{setup.replicas} routers {told}")
    wrong = ", ".join(f"{key} × {value:g}" for key, value in asdict(setup.distortion).items() if value != 1)
    if wrong:
        parts.append(f"the router's estimates wrong: {wrong}")
    return ", ".join(parts)


def _section(workload: str, policies: Sequence[str], table: Sequence[Row], results: Sequence[Result]) -> str:
    by_policy = {p: [r for r in results if r.workload == workload and r.policy == p] for p in policies}
    by_policy = {policy: found for policy, found in by_policy.items() if found}
    colors = {policy: color for policy, color in _colors(policies).items() if policy in by_policy}
    first = {policy: found[0] for policy, found in by_policy.items()}
    cards = [
        _card("Time to first token", _distribution(by_policy, colors, lambda r: r.ttft)),
        _card("End-to-end time", _distribution(by_policy, colors, lambda r: r.e2e)),
        _card("Prompt tokens from cache over the run", _hits(first, colors)),
        _card("Mean TTFT over the run", _ttft_over_time(first, colors)),
        _card("Requests per worker", _loads(first, colors)),
        _card("The hottest prefixes: which workers got their requests", _groups(first)),
    ]
    return (
        f"<h2>{escape(workload)}</h2><p>{sum(r.requests for r in first.values()) // len(first):,} requests "
        f"a run.</p>{_table([row for row in table if row.workload == workload])}"
        f"{_legend(colors)}<div class='grid'>{''.join(cards)}</div>"
    )


def _colors(policies: Sequence[str]) -> dict[str, str]:
    return {policy: f"var(--c{index % 10})" for index, policy in enumerate(policies)}


def _legend(colors: Mapping[str, str]) -> str:
    entries = "".join(
        f"<span><span class='swatch' style='background:{color}'></span>{escape(policy)}</span>"
        for policy, color in colors.items()
    )
    return f"<div class='legend'>{entries}</div>"


def _card(title: str, content: str) -> str:
    return f"<div class='card'><h3>{escape(title)}</h3>{content}</div>"


def _table(table: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in _COLUMNS)
    body = "".join(
        f"<tr><td>{escape(row.policy)}</td>{''.join(f'<td>{form(row)}</td>' for _, form in _COLUMNS)}</tr>"
        for row in table
    )
    return f"<div class='scroll'><table><tr><th>policy</th>{head}</tr>{body}</table></div>"


def _distribution(
    by_policy: Mapping[str, Sequence[Result]],
    colors: Mapping[str, str],
    pick: Callable[[Result], Distribution],
) -> str:
    """Cumulative shares over a logarithm of time; quantiles are means over the seeds."""
    curves = {}
    for policy, found in by_policy.items():
        quantiles = [fmean(column) for column in zip(*(pick(r).curve for r in found), strict=True)]
        curves[policy] = [
            (log10(max(time, 1e-3)), share * 100) for time, share in zip(quantiles, CURVE, strict=True)
        ]
    low = floor(min(points[0][0] for points in curves.values()) * 10) / 10
    high = ceil(max(points[-1][0] for points in curves.values()) * 10) / 10
    ticks = [
        (log10(step * 10.0**power), seconds_label(step * 10.0**power))
        for power in range(-3, 5)
        for step in (1, 2, 5)
        if low <= log10(step * 10.0**power) <= high
    ]
    thinned = ticks if len(ticks) <= 9 else [tick for tick in ticks if tick[1][0] == "1"] or ticks[::2]
    return lines(curves, colors, x_ticks=thinned, x_range=(low, high), y_range=(0, 100), y_label=percent)


def _over_time(
    first: Mapping[str, Result], colors: Mapping[str, str], pick: Callable[[int, Result], float], unit: str
) -> str:
    """Over the share of the run, since slow policies take longer for the same requests."""
    curves = {
        policy: [
            (100 * interval.start_s / max(result.intervals[-1].start_s, 1e-9), pick(index, result))
            for index, interval in enumerate(result.intervals)
        ]
        for policy, result in first.items()
    }
    highest = max(max(y for _, y in points) for points in curves.values())
    top = 100.0 if unit == " %" else highest or 1.0
    ticks = [(float(share), percent(share)) for share in (0, 25, 50, 75, 100)]
    label = percent if unit == " %" else lambda y: f"{y:.3g}{unit}"
    return lines(curves, colors, x_ticks=ticks, x_range=(0, 100), y_range=(0, top), y_label=label)


def _hits(first: Mapping[str, Result], colors: Mapping[str, str]) -> str:
    return _over_time(first, colors, lambda index, result: 100 * result.intervals[index].hit, " %")


def _ttft_over_time(first: Mapping[str, Result], colors: Mapping[str, str]) -> str:
    return _over_time(first, colors, lambda index, result: result.intervals[index].ttft_s, " s")


def _loads(first: Mapping[str, Result], colors: Mapping[str, str]) -> str:
    return bars({policy: [w.requests for w in result.workers] for policy, result in first.items()}, colors)


def _groups(first: Mapping[str, Result]) -> str:
    """For each policy the prefixes with most requests; a cell is as dark as the worker's share is large."""
    return share_rows(
        {
            policy: [(group.name, group.requests, group.workers) for group in result.groups[:5]]
            for policy, result in first.items()
        }
    )
