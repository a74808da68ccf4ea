"""Pictures of a sweep: TTFT, end-to-end time, hits and throughput over the values of one option."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from extproc.sim.cells import Row
from extproc.sim.charts import CHART_STYLE, lines, percent, seconds_label

#: Rows of one sweep, each with the value that it is for.
Sweep = list[tuple[float, Row]]


def is_swept(workload: str) -> bool:
    """Whether a row's workload is one value of a sweep (``swarm-60 load=0.5``)."""
    return "=" in workload


def sweeps(table: Sequence[Row]) -> dict[str, Sweep]:
    """The sweeps among the rows, by workload and option."""
    found: dict[str, Sweep] = {}
    for row in table:
        if is_swept(row.workload):
            name, _, value = row.workload.rpartition("=")
            found.setdefault(name, []).append((float(value), row))
    return found


def sweep_pictures(sweep: Sweep, colors: Mapping[str, str]) -> list[tuple[str, str]]:
    """Titles and SVG elements; times on a logarithmic scale."""
    return [
        ("Mean time to first token", _times(sweep, colors, lambda row: row.ttft_mean)),
        ("Mean end-to-end time", _times(sweep, colors, lambda row: row.e2e_mean)),
        ("Prompt tokens from cache", _plain(sweep, colors, lambda row: 100 * row.hit, percent, 100)),
        ("Requests a second", _plain(sweep, colors, lambda row: row.throughput, "{:.3g}".format, None)),
    ]


def sweep_svg(table: Sequence[Row]) -> str:
    """The pictures of the first sweep as a file of their own."""
    name, sweep = next(iter(sweeps(table).items()))
    policies = list(dict.fromkeys(row.policy for _, row in sweep))
    colors = {policy: f"var(--c{index % 10})" for index, policy in enumerate(policies)}
    legend = "".join(
        f"<text x='{20 + 130 * index}' y='44' style='fill:{color};font-weight:600'>{escape(policy)}</text>"
        for index, (policy, color) in enumerate(colors.items())
    )
    panels = []
    for index, (title, picture) in enumerate(sweep_pictures(sweep, colors)):
        x, y = 20 + 480 * (index % 2), 84 + 280 * (index // 2)
        sized = picture.replace("<svg", "<svg width='460' height='240'", 1)
        panels.append(
            f"<g transform='translate({x},{y})'><text y='-10' class='title'>{title}</text>{sized}</g>"
        )
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 980 620'>"
        f"<style>{CHART_STYLE}svg text.title {{ fill: var(--fg); font-size: 14px; }}</style>"
        "<rect width='980' height='620' style='fill:var(--bg)'/>"
        f"<text x='20' y='22' class='title'>{escape(name)}</text>{legend}{''.join(panels)}</svg>\n"
    )


def _times(sweep: Sweep, colors: Mapping[str, str], pick: Callable[[Row], float]) -> str:
    curves = _curves(sweep, colors, lambda row: log10(max(pick(row), 1e-3)))
    heights = [y for points in curves.values() for _, y in points]
    low, high = floor(min(heights)), ceil(max(heights))
    high += low == high
    return lines(
        curves,
        colors,
        x_ticks=_ticks(sweep),
        x_range=_span(sweep),
        y_range=(low, high),
        y_label=lambda y: seconds_label(10.0**y),
        y_steps=high - low,
    )


def _plain(
    sweep: Sweep,
    colors: Mapping[str, str],
    pick: Callable[[Row], float],
    label: Callable[[float], str],
    top: float | None,
) -> str:
    curves = _curves(sweep, colors, pick)
    highest = max(y for points in curves.values() for _, y in points)
    return lines(
        curves,
        colors,
        x_ticks=_ticks(sweep),
        x_range=_span(sweep),
        y_range=(0, top or ceil(highest) or 1),
        y_label=label,
    )


def _curves(
    sweep: Sweep, colors: Mapping[str, str], pick: Callable[[Row], float]
) -> dict[str, list[tuple[float, float]]]:
    return {policy: [(value, pick(row)) for value, row in sweep if row.policy == policy] for policy in colors}


def _span(sweep: Sweep) -> tuple[float, float]:
    values = [value for value, _ in sweep]
    return min(values), max(values)


def _ticks(sweep: Sweep) -> list[tuple[float, str]]:
    """The values, as far as their labels have room."""
    low, high = _span(sweep)
    kept: list[float] = []
    for value in sorted({value for value, _ in sweep}):
        if not kept or value - kept[-1] >= (high - low) / 12:
            kept.append(value)
    return [(value, f"{value:g}") for value in kept]
