"""What lost tokens come to in a day."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.lint.linter import Totals

DAY_S = 86_400.0

#: A log of less than this says little about a day.
_LEAST_SPAN_S = 60.0

_PER_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Rate:
    """How tokens in the log become tokens per ``unit`` ("day", or "1,000 requests"), and milliseconds."""

    factor: float
    unit: str
    why: str
    prefill_tokens_per_s: float

    def tokens(self, lost: float) -> float:
        """Tokens per unit."""
        return lost * self.factor

    def ms(self, lost: float) -> float:
        """Milliseconds of prefill per unit."""
        return lost * self.factor / self.prefill_tokens_per_s * 1000


def rate_of(totals: Totals, *, requests_per_day: float | None, prefill_tokens_per_s: float) -> Rate:
    """How the log is scaled: to what a day is said to have, or by its timestamps, or to 1,000 requests."""
    requests = max(1, totals.requests)
    if requests_per_day is not None:
        why = f"the log's {totals.requests:,} requests taken for {requests_per_day:,.0f} a day"
        return Rate(requests_per_day / requests, "day", why, prefill_tokens_per_s)
    span_s = totals.span_s
    if span_s is not None and span_s >= _LEAST_SPAN_S:
        why = f"the log spans {_duration(span_s)}"
        return Rate(DAY_S / span_s, "day", why, prefill_tokens_per_s)
    if totals.untimed == totals.requests:
        why = "no timestamps; --requests-per-day gives costs by day"
    elif totals.untimed:
        why = f"{totals.untimed:,} requests have no timestamp; --requests-per-day gives costs by day"
    else:
        why = "the log spans less than a minute; --requests-per-day gives costs by day"
    return Rate(_PER_REQUESTS / requests, f"{_PER_REQUESTS:,} requests", why, prefill_tokens_per_s)


def _duration(seconds: float) -> str:
    for unit, name in ((DAY_S, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.0f} seconds"
