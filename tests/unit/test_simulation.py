"""The simulator: its bookkeeping, the routers in it, the oracle's knowledge, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal
from xml.etree import ElementTree

import pytest

from extproc import cli
from extproc.emulator.engine import CostModel
from extproc.sim.cells import Cell, Setup, Source, against, rows, run_cell, run_cells
from extproc.sim.oracle import Oracle, View
from extproc.sim.product import PoolRouter, address
from extproc.sim.result import summarize
from extproc.sim.scenarios import POLICY_NAMES, router_maker
from extproc.sim.simulation import Fleet, FleetChange, Flight, Run, Simulation, Worker
from extproc.sim.workload import SimRequest, Swarm, Text, Workload, even


class Script:
    """Arrivals as written; remembers what has ended."""

    def __init__(self, arrivals: list[tuple[float, SimRequest]]) -> None:
        self._arrivals = arrivals
        self.ended: list[float] = []

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        return iter(self._arrivals)

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        self.ended.append(now)
        return None


def prompt(tokens: int, output: int = 10, base: Text | None = None, seed: int = 0) -> SimRequest:
    random = Random(f"{tokens} {output} {seed}")
    text = (base or Text()).then(tokens - (base.tokens if base else 0), random)
    return SimRequest(tokens, output, text.then(output, random).hashes, 0, "group")


def simulate(workload: Workload, policy: str = "round-robin", requests: int = 100, **more: object) -> Run:
    fleet = more.pop("fleet", Fleet(workers=2))
    assert isinstance(fleet, Fleet)
    return Simulation(workload, router_maker(policy, 0), fleet, requests=requests, **more).run()  # type: ignore[arg-type]


def test_times_are_the_cost_models() -> None:
    cost = CostModel()
    run = simulate(Script([(1.0, prompt(1000, 5))]))
    (flight,) = run.flights
    prefill_s = cost.step_duration_s(1000, 0)
    decode_s = 4 * cost.step_duration_s(0, 1)
    assert flight.ttft_s == pytest.approx(cost.frontend_s(1000) + prefill_s)
    assert flight.e2e_s == pytest.approx(flight.ttft_s + decode_s)
    assert run.duration_s == flight.ended_s


def test_an_arrival_waits_for_the_step_in_progress_and_no_more() -> None:
    cost = CostModel()
    alone, second = prompt(1000, 2000, seed=1), prompt(600, 5, seed=2)
    run = simulate(Script([(0.0, alone), (5.0, second)]), fleet=Fleet(workers=1))
    late = run.flights[1].ttft_s - cost.frontend_s(600) - cost.step_duration_s(600, 1)
    assert 0.0 <= late <= cost.step_duration_s(0, 1)


def test_every_request_ends_and_a_closed_loop_keeps_its_streams() -> None:
    run = simulate(Swarm(1, weights=even(4), streams=5), "predicted", requests=120)
    assert len(run.flights) == 120
    assert all(f.arrived_s <= f.queued_s <= f.first_token_s <= f.ended_s for f in run.flights)
    for at in (f.arrived_s for f in run.flights[10:]):
        assert sum(f.arrived_s <= at < f.ended_s for f in run.flights) <= 5
    assert sum(w.engine.generation_tokens for w in run.workers) == 120 * 120


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_everybody_and_repeats_itself(policy: str) -> None:
    def once() -> list[tuple[int, float]]:
        workload = Swarm(2, weights=even(6), streams=12)
        fleet = Fleet(workers=3, changes=(FleetChange(8.0, (0,), 1),))
        run = simulate(workload, policy, requests=150, fleet=fleet)
        change = [f for f in run.flights if f.arrived_s > 8.0]
        assert change
        assert all(f.worker != 0 for f in change)
        return [(f.worker, f.ended_s) for f in run.flights]

    assert once() == once()


def test_a_worker_that_joins_gets_requests() -> None:
    fleet = Fleet(workers=2, changes=(FleetChange(5.0, (), 2),))
    run = simulate(Swarm(3, weights=even(12), streams=30), "least-request", requests=300, fleet=fleet)
    assert {f.worker for f in run.flights} == {0, 1, 2, 3}
    assert all(f.worker < 2 for f in run.flights if f.arrived_s < 5.0)


def test_the_pools_accounts_are_empty_in_the_end() -> None:
    simulation = Simulation(
        Swarm(4, weights=even(6), streams=20),
        router_maker("predicted", 0),
        Fleet(workers=3, changes=(FleetChange(6.0, (1,), 1),)),
        requests=200,
        replicas=3,
        delay_s=0.05,
    )
    simulation.run()
    for router in simulation.routers:
        assert isinstance(router, PoolRouter)
        assert router.pool.tickets == 0
        assert [w.in_flight for w in router.pool.workers] == [0, 0, 0]


def test_replicas_share_the_requests_and_what_they_know() -> None:
    def hits(delay_s: float | None) -> float:
        workload = Swarm(5, weights=even(24), streams=40)
        run = simulate(
            workload, "predicted", requests=600, fleet=Fleet(workers=4), replicas=4, delay_s=delay_s
        )
        assert {f.replica for f in run.flights} == {0, 1, 2, 3}
        return summarize(run, workload="w", policy="p", seed=0).hit

    assert hits(0.02) > hits(None) + 0.05


def test_faster_workers_are_faster() -> None:
    both = [(0.0, prompt(4000, 50, seed=1)), (0.0, prompt(4000, 50, seed=2))]
    run = simulate(Script(both), "round-robin", fleet=Fleet(workers=2, speeds=(2.0, 1.0)))
    fast, slow = sorted(run.flights, key=lambda f: f.e2e_s)
    assert run.workers[fast.worker].engine.busy_s == pytest.approx(run.workers[slow.worker].engine.busy_s / 2)


# --- the oracle --------------------------------------------------------------------------------------


class Seeing(Oracle):
    """An oracle that notes what it would have predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted: dict[int, float] = {}

    def route(self, flight: Flight, now: float) -> int:
        index = next(iter(self.views))
        view = self.views[index]
        miss = flight.request.prompt_tokens - view.hit_tokens(flight)
        self.predicted[flight.index] = view.ttft_s(flight, miss, now)
        return super().route(flight, now)


def test_the_oracle_predicts_what_happens() -> None:
    base = prompt(20_000, 10).prompt_chain
    text = Text(20_000 // 256 * 256, base)
    plan = [
        (0.0, prompt(20_000, 10)),
        (0.1, prompt(20_400, 10, base=text, seed=1)),  # its twin is being prefilled: a hit
        (0.2, prompt(9_000, 10, seed=2)),
        (0.3, prompt(3_000, 10, seed=3)),
        (9.0, prompt(20_800, 10, base=text, seed=4)),
    ]
    oracle = Seeing()
    run = Simulation(Script(plan), lambda _: oracle, Fleet(workers=1), requests=9).run()
    for flight in run.flights:
        assert oracle.predicted[flight.index] == pytest.approx(flight.ttft_s, rel=0.15, abs=0.03)
    assert [f.cached_tokens // 256 for f in run.flights] == [0, 78, 0, 0, 78]
    (view,) = oracle.views.values()
    assert view.queued_tokens() == 0
    assert view.in_flight == 0


def test_the_oracle_forgets_what_was_promised_when_it_is_there() -> None:
    worker = Worker(0, Fleet().engine_config(0))
    view = View(worker)
    flight = Flight(0, prompt(2_000), 0.0)
    worker.coming[0] = flight
    view.sent(flight)
    assert view.queued_tokens() == 2_000
    assert view.hit_tokens(Flight(1, prompt(2_000), 0.0)) == 1_792
    del worker.coming[0]
    assert view.queued_tokens() == 0
    assert view.hit_tokens(Flight(1, prompt(2_000), 0.0)) == 0


# --- figures -----------------------------------------------------------------------------------------


def test_figures_of_a_run() -> None:
    run = simulate(Swarm(6, weights=even(4), streams=8), requests=200)
    result = summarize(run, workload="w", policy="p", seed=6)
    counted = run.flights[40:]
    assert result.requests == 160
    assert result.ttft.mean == pytest.approx(sum(f.ttft_s for f in counted) / 160)
    assert result.ttft.p50 <= result.ttft.p90 <= result.ttft.p99 <= max(f.ttft_s for f in counted)
    assert result.hit == pytest.approx(
        sum(f.cached_tokens for f in counted) / sum(f.request.prompt_tokens for f in counted)
    )
    assert result.busiest == pytest.approx(1.0, abs=0.02)
    assert sum(w.requests for w in result.workers) == 160
    assert sum(i.requests for i in result.intervals) == 200
    assert sum(g.requests for g in result.groups) == 160
    assert all(sum(g.workers) == g.requests for g in result.groups)
    window = counted[-1].arrived_s - counted[0].arrived_s
    assert result.throughput == pytest.approx(160 / window, rel=0.1)


SMALL = Setup(requests=120, workers=2)


def test_cells_are_the_same_in_other_processes() -> None:
    cells = [Cell(Source("swarm-20"), policy, 1, SMALL) for policy in ("round-robin", "oracle")]
    heard: list[int] = []
    assert run_cells(cells, 2, heard.append) == [run_cell(cell) for cell in cells]
    assert heard == [1, 2]


def test_policies_are_measured_against_the_oracle() -> None:
    cells = [Cell(Source("swarm-20"), p, s, SMALL) for p in ("round-robin", "oracle") for s in (1, 2)]
    table = rows([run_cell(cell) for cell in cells])
    assert [(row.policy, row.relative == 1.0) for row in table] == [("round-robin", False), ("oracle", True)]
    ratios = against(table, "ttft_mean")
    assert ratios["oracle"] == {"swarm-20": 1.0, "geomean": 1.0}
    assert ratios["round-robin"]["swarm-20"] == pytest.approx(table[0].relative or 0.0)


# --- the command -------------------------------------------------------------------------------------


def test_the_command_writes_figures_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, page = tmp_path / "out.json", tmp_path / "out.html"
    command = (
        "simulate --workload swarm-20,hot --requests 100 --workers 3 --policies round-robin,oracle --jobs 1"
    )
    assert cli.main([*command.split(), "--json", str(figures), "--report", str(page)]) == 0
    out = capsys.readouterr().out
    assert "swarm-20" in out
    assert "vs oracle" in out
    data = json.loads(figures.read_text())
    assert [(run["workload"], run["policy"]) for run in data["runs"]] == [
        ("swarm-20", "round-robin"),
        ("swarm-20", "oracle"),
        ("hot", "round-robin"),
        ("hot", "oracle"),
    ]
    html = page.read_text()
    assert html.count("<svg") == 12
    assert "http" not in html.replace("http://www.w3.org", "")  # nothing is loaded from elsewhere


def test_the_suite_prints_a_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    line = {"input_length": 3000, "output_length": 20, "hash_ids": [1, 2, 3, 4, 5, 6]}
    trace.write_text("".join(json.dumps({"timestamp": i * 900, **line}) + "\n" for i in range(60)))
    command = [
        "simulate",
        "--suite",
        "--workload",
        "chat",
        "--requests",
        "60",
        "--jobs",
        "1",
        "--trace",
        str(trace),
    ]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "TTFT p99, relative to the oracle's" in out
    assert "geomean" in out
    assert "t@0.9" in out


def test_a_sweep_is_tabled_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "simulate --workload swarm-20 --requests 80 --policies predicted,oracle --jobs 1 --sweep personas=2,8"
    )
    for name in ("sweep.svg", "sweep.html"):
        assert cli.main([*command.split(), "--report", str(tmp_path / name)]) == 0
    assert "end to end, mean, s" in capsys.readouterr().out
    drawn = (tmp_path / "sweep.svg").read_text()
    assert "swarm-20 personas" in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (tmp_path / "sweep.html").read_text().count("<polyline") == 8


def test_a_router_that_keeps_its_state_restarts_as_if_nothing_was() -> None:
    def hits(restart: Literal["empty", "saved"] | None) -> float:
        workload = Swarm(7, weights=even(16), streams=24)
        return summarize(
            simulate(workload, "predicted", requests=500, fleet=Fleet(workers=4), restart=restart),
            workload="w",
            policy="p",
            seed=0,
        ).hit

    assert hits("saved") == pytest.approx(hits(None), abs=0.01)
    assert hits("empty") < hits("saved") - 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--workload nonsense", "there is no 'nonsense'"),
        ("--policies best", "there is no 'best'"),
        ("--trace /does/not/exist", "/does/not/exist: No such file"),
        ("--set alfa=2", "did you mean alpha?"),
        ("--set alpha", "write KEY=VALUE"),
        ("--requests 50 --workers 2 --json /does/not/exist", "/does/not/exist"),
    ],
)
def test_mistakes_are_explained(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--jobs", "1", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_workloads_and_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--list"]) == 0
    out = capsys.readouterr().out
    assert "swarm-100" in out
    assert "radix-tight" in out


def test_addresses_are_unique() -> None:
    assert len({address(i) for i in range(600)}) == 600
