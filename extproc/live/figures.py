"""Figures as short as a terminal's columns: at most five characters, unknown is a dash."""

from __future__ import annotations

UNKNOWN = "–"


def count(value: float | None) -> str:
    """Such as 7, 950, 1.2k, 34k, 5.6M."""
    if value is None:
        return UNKNOWN
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000.0
    return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"


def rate(value: float | None) -> str:
    """Such as 0, 0.03, 1.2, 34.5, 678, 1.2k."""
    if value is None:
        return UNKNOWN
    if not value or value >= 99.95:
        return count(value)
    return f"{value:.2f}" if value < 0.095 else f"{value:.1f}"


def share(value: float | None) -> str:
    """Such as 0%, 0.3%, 97%."""
    if value is None:
        return UNKNOWN
    return f"{value:.1%}" if 0.0005 <= value < 0.0095 else f"{value:.0%}"


def time(ms: float | None) -> str:
    """Such as 0ms, 7ms, 950ms, 1.2s, 34s, 5m."""
    if ms is None:
        return UNKNOWN
    if ms < 999.5:
        return f"{ms:.0f}ms"
    seconds = ms / 1000.0
    return (
        f"{seconds:.1f}s"
        if seconds < 9.95
        else f"{seconds:.0f}s"
        if seconds < 600
        else f"{seconds / 60:.0f}m"
    )


def age(seconds: float) -> str:
    """Such as 7s, 5m, 3h, 2d."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def bar(part: float, width: int) -> str:
    """A bar of so many characters, filled by this part; something is never nothing."""
    filled = round(min(1.0, max(0.0, part)) * width)
    if part > 0.0:
        filled = max(1, filled)
    return "█" * filled + "░" * (width - filled)
