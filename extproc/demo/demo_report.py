"""What a run of the load generator says: one row a workload and way of routing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from extproc.demo.loadgen import Result


@dataclass(frozen=True, slots=True)
class Row:
    """One arm of one workload, warm-up left out. Times are model seconds but for ``wall_s``.

    ``hit_rate``: share of prompt tokens that came from a cache, by the engines' own ``usage``.
    ``busiest_over_mean``: requests of the busiest worker over the mean of all workers.
    ``cpu_share``: CPU time of the demo over what the machine has, ``machine_busy_share``: of all that
    runs there. ``late_s``: wall seconds that the workers lost because they got no CPU.
    """

    workload: str
    arm: str
    requests: int
    failures: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    e2e_p50_s: float
    requests_per_s: float
    busiest_over_mean: float
    wall_s: float
    cpu_share: float
    machine_busy_share: float
    late_s: float
    first_error: str = ""

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(
    workload: str,
    arm: str,
    results: Sequence[Result],
    *,
    warmup: int,
    speedup: float,
    workers: int,
    cpu_share: float = 0.0,
    machine_busy_share: float = 0.0,
    late_s: float = 0.0,
) -> Row:
    """A row from all results of an arm; the first ``warmup`` requests count only if they failed."""
    failed = [result for result in results if result.error]
    measured = [result for result in results[warmup:] if not result.error]
    ttfts = sorted(result.ttft_s * speedup for result in measured)
    e2es = sorted((result.end_s - result.start_s) * speedup for result in measured)
    prompt_tokens = sum(result.prompt_tokens for result in measured)
    by_worker = Counter(result.worker for result in measured)
    span_s = max((r.end_s for r in measured), default=0.0) - min((r.start_s for r in measured), default=0.0)
    return Row(
        workload=workload,
        arm=arm,
        requests=len(measured),
        failures=len(failed),
        hit_rate=sum(result.cached_tokens for result in measured) / max(prompt_tokens, 1),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        ttft_mean_s=sum(ttfts) / max(len(ttfts), 1),
        e2e_p50_s=percentile(e2es, 50),
        requests_per_s=len(measured) / (span_s * speedup) if span_s else 0.0,
        busiest_over_mean=max(by_worker.values(), default=0) * workers / max(len(measured), 1),
        wall_s=results[-1].end_s - results[0].start_s if results else 0.0,
        cpu_share=cpu_share,
        machine_busy_share=machine_busy_share,
        late_s=late_s,
        first_error=failed[0].error if failed else "",
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of an ascending sequence; 0 for an empty one."""
    if not ordered:
        return 0.0
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def table(rows: Sequence[Row], titles: dict[str, str], caption: str) -> Table:
    """The rows for a terminal, workloads apart."""
    out = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    out.add_column("")
    for name in ("requests", "failed", "cached", "TTFT p50", "p90", "p99", "busiest", "time"):
        out.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in rows:
        if row.workload != last:
            if last:
                out.add_section()
            out.add_row(titles[row.workload], style="bold")
            last = row.workload
        out.add_row(
            "  " + row.arm,
            f"{row.requests:,}",
            str(row.failures),
            f"{row.hit_rate:.1%}",
            seconds(row.ttft_p50_s),
            seconds(row.ttft_p90_s),
            seconds(row.ttft_p99_s),
            f"{row.busiest_over_mean:.2f}",
            f"{row.wall_s:.0f} s",
        )
    return out


def seconds(value: float) -> str:
    """A duration with three digits that matter."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
