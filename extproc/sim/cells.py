"""Many runs: a cell is one scenario, one policy and one seed; cells run side by side in processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from extproc.fleet.config import PoolSettings
from extproc.sim.product import TRUTH, Distortion
from extproc.sim.result import Result, summarize
from extproc.sim.scenarios import SCENARIOS, Knobs, Scenario, router_maker, trace_scenario
from extproc.sim.simulation import Fleet, Restart, Simulation

#: What policies are measured against, if it is among them.
YARDSTICK = "oracle"


@dataclass(frozen=True, slots=True)
class Source:
    """Which scenario: a built-in one by name, or a trace file at a load (None: as recorded)."""

    name: str
    trace: Path | None = None
    load: float | None = None
    limit: int | None = None

    def scenario(self) -> Scenario:
        """Look it up, or read the file (once in a process)."""
        return SCENARIOS[self.name] if self.trace is None else _trace(self.trace, self.load, self.limit)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all cells of a simulation have in common; None leaves the scenario's own."""

    workers: int | None = None
    cache_tokens: int | None = None
    speeds: tuple[float, ...] | None = None
    requests: int | None = None
    knobs: Knobs = field(default_factory=Knobs)
    replicas: int = 1
    delay_s: float | None = 0.1
    settings: PoolSettings = field(default_factory=PoolSettings)
    distortion: Distortion = TRUTH
    restart: Restart | None = None

    def fleet(self, scenario: Scenario) -> Fleet:
        """The scenario's fleet with what was asked for instead."""
        own = scenario.fleet
        return Fleet(
            workers=self.workers or own.workers,
            cache_tokens=self.cache_tokens or own.cache_tokens,
            speeds=self.speeds or own.speeds,
            changes=own.changes,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. ``note``: what tells it from others of the same scenario, for its workload's name."""

    source: Source
    policy: str
    seed: int
    setup: Setup = field(default_factory=Setup)
    note: str = ""


def run_cell(cell: Cell) -> Result:
    """Run it: determined by the cell alone."""
    scenario = cell.source.scenario()
    setup = cell.setup
    fleet = setup.fleet(scenario)
    simulation = Simulation(
        scenario.make(cell.seed, setup.knobs, fleet),
        router_maker(cell.policy, cell.seed, setup.settings, setup.distortion),
        fleet,
        requests=setup.requests or scenario.requests,
        replicas=1 if cell.policy.startswith("oracle") else setup.replicas,
        delay_s=setup.delay_s,
        seed=cell.seed,
        restart=setup.restart,
    )
    name = f"{scenario.name} {cell.note}".strip()
    return summarize(simulation.run(), workload=name, policy=cell.policy, seed=cell.seed)


def run_cells(cells: Sequence[Cell], jobs: int, done: Callable[[int], None]) -> list[Result]:
    """Run all, in their order; ``done`` hears how many have ended."""
    results = []
    if jobs <= 1 or len(cells) <= 1:
        for cell in cells:
            results.append(run_cell(cell))
            done(len(results))
        return results
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        for result in pool.map(run_cell, cells):
            results.append(result)
            done(len(results))
    return results


@dataclass(frozen=True, slots=True)
class Row:
    """A policy on a workload, over all seeds. Seconds; ``relative``: mean TTFT over the yardstick's."""

    workload: str
    policy: str
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    e2e_mean: float
    throughput: float
    hit: float
    busiest: float
    under_2s: float
    relative: float | None = None


def rows(results: Sequence[Result]) -> list[Row]:
    """One row for each workload and policy, in order of appearance: means over the seeds."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.workload, result.policy), []).append(result)
    base = {w: fmean(r.ttft.mean for r in found) for (w, p), found in groups.items() if p == YARDSTICK}
    table = []
    for (workload, policy), found in groups.items():
        mean = fmean(r.ttft.mean for r in found)
        table.append(
            Row(
                workload=workload,
                policy=policy,
                ttft_mean=mean,
                ttft_p50=fmean(r.ttft.p50 for r in found),
                ttft_p90=fmean(r.ttft.p90 for r in found),
                ttft_p99=fmean(r.ttft.p99 for r in found),
                e2e_mean=fmean(r.e2e.mean for r in found),
                throughput=fmean(r.throughput for r in found),
                hit=fmean(r.hit for r in found),
                busiest=fmean(r.busiest for r in found),
                under_2s=fmean(r.under_2s for r in found),
                relative=mean / base[workload] if workload in base else None,
            )
        )
    return table


def against(table: Sequence[Row], measure: str) -> Mapping[str, Mapping[str, float]]:
    """``measure`` relative to the yardstick's: policy → workload → ratio; "geomean" over all of them."""
    base = {row.workload: getattr(row, measure) for row in table if row.policy == YARDSTICK}
    ratios: dict[str, dict[str, float]] = {}
    for row in table:
        if base.get(row.workload):
            ratios.setdefault(row.policy, {})[row.workload] = getattr(row, measure) / base[row.workload]
    for found in ratios.values():
        found["geomean"] = exp(fmean(log(max(ratio, 1e-9)) for ratio in found.values()))
    return ratios


@lru_cache(maxsize=8)
def _trace(path: Path, load: float | None, limit: int | None) -> Scenario:
    return trace_scenario(path, load, limit)


def as_json(setup: Setup, table: Sequence[Row], results: Sequence[Result]) -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "setup": asdict(setup),
        "rows": [asdict(row) for row in table],
        "runs": [result.as_json() for result in results],
    }
