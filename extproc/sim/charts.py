"""Small SVG pictures for the report: curves, bars, and shares as shaded cells. Colours are CSS values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

#: Colours --c0 to --c9 and others, light and dark, and how the pictures' texts and rules look.
CHART_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2330; --dim: #667085; --grid: #e4e7ec;
  --card: #f8f9fb; --c0: #2563eb; --c1: #e07b00; --c2: #15924b; --c3: #c026d3; --c4: #dc2626;
  --c5: #0891b2; --c6: #7c5c2e; --c7: #6d5bd0; --c8: #84932a; --c9: #64748b; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161d; --fg: #e6e9ef; --dim: #98a2b3;
  --grid: #2b3340; --card: #1a2029; --c0: #6ea0ff; --c1: #f5a44a; --c2: #4fc98a; --c3: #e27df0;
  --c4: #ff7b72; --c5: #4cc9e0; --c6: #c9a36a; --c7: #a79bff; --c8: #c3d05a; --c9: #a3b0c2; } }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg .grid-line { stroke: var(--grid); } svg .curve { fill: none; stroke-width: 2; }
"""

_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 24


def lines(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    colors: Mapping[str, str],
    *,
    x_ticks: Sequence[tuple[float, str]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    y_label: Callable[[float], str],
    y_steps: int = 4,
) -> str:
    """Curves of (x, y) points, one for each name; ``y_steps`` + 1 rules across."""
    x_low, x_high = x_range
    y_low, y_high = y_range

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1.0)
        up = (min(y, y_high) - y_low) / ((y_high - y_low) or 1.0)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for step in range(y_steps + 1):
        value = y_low + (y_high - y_low) * step / y_steps
        parts.append(_rule(place(x_low, value)[1], y_label(value)))
    for x, label in x_ticks:
        parts.append(
            f"<text x='{place(x, 0)[0]:.1f}' y='{_HEIGHT - 8}' text-anchor='middle'>{escape(label)}</text>"
        )
    for name, points in curves.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(
            f"<polyline class='curve' style='stroke:{colors[name]}' points='{path}'>"
            f"<title>{escape(name)}</title></polyline>"
        )
    return _svg(_HEIGHT, parts)


def percent(share: float) -> str:
    """A label for a share in per cent."""
    return f"{share:.0f} %"


def seconds_label(seconds: float) -> str:
    """A label for a time."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9999 else f"{seconds:,.0f} s"


def bars(groups: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> str:
    """Side by side for each position (a worker) one bar for each name."""
    count = max(len(values) for values in groups.values())
    top = max(max(values) for values in groups.values()) or 1.0
    room = (_WIDTH - _LEFT - _RIGHT) / count
    bar = room * 0.84 / len(groups)
    height = _HEIGHT - _TOP - _BOTTOM
    parts = [_rule(_HEIGHT - _BOTTOM - height * step / 4, f"{top * step / 4:,.0f}") for step in range(5)]
    for position in range(count):
        left = _LEFT + room * position
        parts.append(
            f"<text x='{left + room / 2:.1f}' y='{_HEIGHT - 8}' text-anchor='middle'>{position}</text>"
        )
        for index, (name, values) in enumerate(groups.items()):
            value = values[position] if position < len(values) else 0
            tall = height * value / top
            parts.append(
                f"<rect x='{left + room * 0.08 + bar * index:.1f}' y='{_HEIGHT - _BOTTOM - tall:.1f}' "
                f"width='{max(bar - 1, 0.5):.1f}' height='{tall:.1f}' style='fill:{colors[name]}'>"
                f"<title>{escape(name)}, worker {position}: {value:,.0f}</title></rect>"
            )
    return _svg(_HEIGHT, parts)


def share_rows(blocks: Mapping[str, Sequence[tuple[str, int, Sequence[int]]]]) -> str:
    """Blocks of rows (label, total, counts): a cell for each count, shaded by its share of the total."""
    columns = max((len(counts) for rows in blocks.values() for _, _, counts in rows), default=1)
    left, row_height = 150, 15
    cell = (_WIDTH - left - _RIGHT) / columns
    parts = []
    y = 14.0
    for block, rows in blocks.items():
        parts.append(f"<text x='0' y='{y:.0f}' style='font-weight:600'>{escape(block)}</text>")
        y += 5
        for label, total, counts in rows:
            parts.append(f"<text x='8' y='{y + 11:.0f}'>{escape(label[:18])} ({total:,})</text>")
            for column, count in enumerate(counts):
                share = count / total if total else 0.0
                parts.append(
                    f"<rect x='{left + cell * column:.1f}' y='{y + 1:.0f}' width='{cell - 1.5:.1f}' "
                    f"height='{row_height - 2}' rx='2' style='fill:var(--grid)'/>"
                    f"<rect x='{left + cell * column:.1f}' y='{y + 1:.0f}' width='{cell - 1.5:.1f}' "
                    f"height='{row_height - 2}' rx='2' style='fill:var(--c0);opacity:{share**0.5:.2f}'>"
                    f"<title>{escape(label)}, worker {column}: {count:,} ({share:.0%})</title></rect>"
                )
            y += row_height
        y += 16
    return _svg(max(y - 8, 20), parts)


def _rule(y: float, label: str) -> str:
    return (
        f"<line class='grid-line' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        f"<text x='{_LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{escape(label)}</text>"
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return f"<svg viewBox='0 0 {_WIDTH} {height:.0f}' role='img'>{''.join(parts)}</svg>"
