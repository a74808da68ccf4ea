"""What the engines of a pool tell together, as far as their readings speak of the present."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from extproc.engine.report import EngineReport, hit_ratio, restarted
from extproc.engine.state import STALE_INTERVALS, EngineState


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, or several added up, between the last two readings. None: not told, or too old.

    ``hit_ratio``: as in the metrics, since the engine's start if there is one reading only. The rest needs
    two: of ``query_tokens`` looked up ``hit_tokens`` were cached; ``first_tokens`` came after ``ttft_s`` in
    sum.
    """

    report: EngineReport | None = None
    hit_ratio: float | None = None
    query_tokens: float = 0.0
    hit_tokens: float = 0.0
    ttft_s: float = 0.0
    first_tokens: float = 0.0

    @property
    def mean_ttft_s(self) -> float | None:
        """None if no first token came."""
        return self.ttft_s / self.first_tokens if self.first_tokens > 0 else None


UNKNOWN = EngineView()


def view(state: EngineState, now: float, interval_s: float) -> EngineView:
    """One engine. ``interval_s``: between readings."""
    report, previous = state.current(now, interval_s), state.previous
    if report is None:
        return UNKNOWN
    ratio = hit_ratio(previous, report)
    if previous is None or restarted(previous, report):
        return EngineView(report, ratio)
    queries = _grown(previous.prefix_query_tokens, report.prefix_query_tokens)
    firsts = _grown(previous.first_tokens, report.first_tokens)
    return EngineView(
        report,
        ratio,
        queries,
        min(queries, _grown(previous.prefix_hit_tokens, report.prefix_hit_tokens)),
        _grown(previous.ttft_s, report.ttft_s),
        firsts,
    )


def together(views: Iterable[EngineView]) -> EngineView:
    """Several, by the weight of their prompts; where none tells these, the mean of what they say."""
    known = list(views)
    queries, hits = sum(v.query_tokens for v in known), sum(v.hit_tokens for v in known)
    ratios = [v.hit_ratio for v in known if v.hit_ratio is not None]
    ratio = hits / queries if queries > 0 else sum(ratios) / len(ratios) if ratios else None
    return EngineView(
        None, ratio, queries, hits, sum(v.ttft_s for v in known), sum(v.first_tokens for v in known)
    )


def stale(state: EngineState, now: float, interval_s: float) -> bool:
    """Whether it should have been read by now."""
    return interval_s > 0 and (state.report is None or now - state.at_s > STALE_INTERVALS * interval_s)


def _grown(before: float | None, after: float | None) -> float:
    return max(0.0, after - before) if before is not None and after is not None else 0.0
