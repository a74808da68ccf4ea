"""What a run came to: figures over the requests that arrived after warm-up.

The first fifth of the requests is left out: caches are cold and the queues of a closed loop haven't settled.
Rates are taken over the window from there to the last arrival, so that the drain at the end doesn't count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from extproc.sim.simulation import Flight, Run

#: Share of the requests that is warm-up.
WARM_UP = 0.2

#: Percentiles that make the distributions of the report: finer at the top, where they differ.
CURVE = (*[p / 100 for p in range(1, 100)], 0.992, 0.994, 0.996, 0.998, 0.999)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in seconds. ``curve``: their quantiles at `CURVE`."""

    mean: float
    p50: float
    p90: float
    p99: float
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """One worker's share: requests, prompt tokens from its cache, time its GPU was busy."""

    name: str
    requests: int
    hit: float
    busy: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of the run: requests that arrived in it."""

    start_s: float
    requests: int
    hit: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A shared prefix, and how many of its requests each worker got."""

    name: str
    requests: int
    ttft_s: float
    hit: float
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run.

    ``hit``: share of prompt tokens from cache, 0 … 1. ``throughput``: requests that ended, a second.
    ``busiest``: requests of the busiest worker over the mean of all that were there throughout.
    ``busy``: mean share of the time that GPUs were computing. ``under_2s``: share of TTFTs below 2 s.
    """

    workload: str
    policy: str
    seed: int
    requests: int
    ttft: Distribution
    e2e: Distribution
    under_2s: float
    hit: float
    throughput: float
    busiest: float
    busy: float
    duration_s: float
    workers: tuple[WorkerResult, ...]
    intervals: tuple[Interval, ...]
    groups: tuple[GroupResult, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return asdict(self)


def summarize(run: Run, *, workload: str, policy: str, seed: int) -> Result:
    """The figures of a run."""
    counted = run.flights[int(len(run.flights) * WARM_UP) :]
    if not counted:
        raise ValueError(f"{workload}: no request arrived")
    start, end = counted[0].arrived_s, counted[-1].arrived_s
    window_s = max(end - start, 1e-9)
    ended = sum(start <= flight.ended_s < end for flight in run.flights)
    present = Counter(flight.worker for flight in counted)
    whole = [w.index for w in run.workers if _throughout(w.index, counted)]
    mean = sum(present[i] for i in whole) / len(whole) if whole else 0.0
    return Result(
        workload=workload,
        policy=policy,
        seed=seed,
        requests=len(counted),
        ttft=_distribution([flight.ttft_s for flight in counted]),
        e2e=_distribution([flight.e2e_s for flight in counted]),
        under_2s=sum(flight.ttft_s < 2.0 for flight in counted) / len(counted),
        hit=_hit(counted),
        throughput=ended / window_s,
        busiest=max((present[i] for i in whole), default=0) / mean if mean else 0.0,
        busy=sum(w.engine.busy_s for w in run.workers) / (run.duration_s * len(run.workers)),
        duration_s=run.duration_s,
        workers=tuple(_worker(run, w.index, counted) for w in run.workers),
        intervals=_intervals(run.flights),
        groups=_groups(counted, len(run.workers)),
    )


def _throughout(index: int, counted: Sequence[Flight]) -> bool:
    """Whether a worker got requests in the first and in the last tenth of those that count."""
    tenth = max(1, len(counted) // 10)
    return any(f.worker == index for f in counted[:tenth]) and any(
        f.worker == index for f in counted[-tenth:]
    )


def _distribution(times: list[float]) -> Distribution:
    times.sort()
    last = len(times) - 1

    def quantile(share: float) -> float:
        place = share * last
        low = int(place)
        high = min(low + 1, last)
        return times[low] + (times[high] - times[low]) * (place - low)

    curve = tuple(round(quantile(share), 5) for share in CURVE)
    return Distribution(sum(times) / len(times), quantile(0.5), quantile(0.9), quantile(0.99), curve)


def _hit(flights: Sequence[Flight]) -> float:
    tokens = sum(flight.request.prompt_tokens for flight in flights)
    return sum(flight.cached_tokens for flight in flights) / tokens if tokens else 0.0


def _worker(run: Run, index: int, counted: Sequence[Flight]) -> WorkerResult:
    engine = run.workers[index].engine
    own = [flight for flight in counted if flight.worker == index]
    return WorkerResult(
        name=f"worker {index}",
        requests=len(own),
        hit=_hit(own),
        busy=engine.busy_s / run.duration_s,
        preemptions=engine.preemptions,
    )


def _intervals(flights: Sequence[Flight], number: int = 50) -> tuple[Interval, ...]:
    span = flights[-1].arrived_s / number or 1.0
    parts: dict[int, list[Flight]] = defaultdict(list)
    for flight in flights:
        parts[min(number - 1, int(flight.arrived_s / span))].append(flight)
    return tuple(
        Interval(
            start_s=round(part * span, 3),
            requests=len(found),
            hit=_hit(found),
            ttft_s=sum(flight.ttft_s for flight in found) / len(found),
        )
        for part, found in sorted(parts.items())
    )


def _groups(counted: Sequence[Flight], workers: int, number: int = 8) -> tuple[GroupResult, ...]:
    parts: dict[str, list[Flight]] = defaultdict(list)
    for flight in counted:
        parts[flight.request.group].append(flight)
    largest = sorted(parts.items(), key=lambda item: (-len(item[1]), item[0]))[:number]
    results = []
    for name, found in largest:
        spread = Counter(flight.worker for flight in found)
        results.append(
            GroupResult(
                name=name,
                requests=len(found),
                ttft_s=sum(flight.ttft_s for flight in found) / len(found),
                hit=_hit(found),
                workers=tuple(spread[index] for index in range(workers)),
            )
        )
    return tuple(results)
