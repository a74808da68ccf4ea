"""Small SVG pictures for the report: curves, bars, and shares as shaded cells. Colours are CSS values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 24


def lines(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    colors: Mapping[str, str],
    *,
    x_ticks: Sequence[tuple[float, str]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    y_unit: str,
) -> str:
    """Curves of (x, y) points, one for each name."""
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
    for step in range(5):
        value = y_low + (y_high - y_low) * step / 4
        parts.append(_rule(place(x_low, value)[1], f"{value:.3g}{y_unit}"))
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
