"""Three drills of overload in virtual time: ``extproc simulate --workload storm``, ``tenants`` or ``shed``.

- **storm**: agents that give up after 5 s and retry three times at once, with tasks at 150 % of what the
  fleet can do. That is measured first: 300 patient agents that always ask again.
- **tenants**: a small tenant alone, and beside one that sends ten times its share.
- **shed**: 130 % load in an open loop with a bound on the time to first token. Each refused request is tried
  on a copy of its worker (`extproc.sim.foresight`), at once and again until it would fit.

Every run is determined by its seed. The first fifth of it is warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from extproc.fleet.config import PoolSettings
from extproc.sim import foresight
from extproc.sim.clients import Attempt, Client, ClientSimulation
from extproc.sim.guarded import TENANT_HEADER, GuardedRouter
from extproc.sim.simulation import Fleet
from extproc.sim.workload import Mixed, SimRequest, Swarm, Workload, even

DRILLS = ("storm", "tenants", "shed")

#: Eight workers, with room for the agents' personas and their turns.
FLEET = Fleet(cache_tokens=400_000)

#: Agents whose turns bring 2,000 to 8,000 new tokens, so that prefill is the bottleneck.
TURN_TOKENS = (2_000, 8_000)
OUTPUT_TOKENS = 60

TIMEOUT_S = 5.0
RETRIES = 3
AGENTS = 300
STORM_LOAD = 1.5
WARM_UP = 0.2


class Agents(Workload):
    """A closed loop of agents, each of which asks again when it has its answer."""

    def __init__(self, seed: int, agents: int) -> None:
        self._random = Random(f"{seed} start")
        self._swarm = _swarm(seed)
        self._agents = agents

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """Each agent's first request, within ten seconds."""
        for time in sorted(self._random.uniform(0.0, 10.0) for _ in range(self._agents)):
            yield time, self._swarm.request()

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """The next one, at once."""
        return now, self._swarm.request()


class Stream(Workload):
    """An open loop of one tenant's requests: ``rate`` a second, Poisson."""

    def __init__(self, swarm: Swarm, client: Client) -> None:
        self._swarm = swarm
        self._client = client

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """The swarm's."""
        for time, request in self._swarm.arrivals():
            request.source = self._client
            yield time, request

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """An open loop: nothing."""
        return None


def _swarm(seed: int, *, rate: float | None = None, personas: int = 40, name: str = "agent") -> Swarm:
    return Swarm(
        seed,
        weights=even(personas),
        rate=rate,
        turn_tokens=TURN_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        name=name,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run's figures.

    ``useful``: answered requests a second. ``wasted``: share of the prefill work that went into requests
    whose clients were gone by then.
    """

    name: str
    useful: float
    wasted: float
    gone: int
    shed: int
    ttft_p50_s: float
    ttft_p99_s: float


def _run(
    name: str, workload: Workload, settings: PoolSettings, duration_s: float, tenant: str | None = None
) -> Outcome:
    simulation = ClientSimulation(workload, GuardedRouter(settings), FLEET, duration_s=duration_s)
    simulation.run()
    start_s = duration_s * WARM_UP
    counted = [a for a in simulation.attempts if a.arrived_s >= start_s and tenant in (None, a.client.tenant)]
    done = [a for a in simulation.attempts if a.outcome == "done" and a.ended_s >= start_s]
    times = sorted(a.ttft_s for a in counted if a.first_token_s >= 0.0)
    work = sum(a.prefilled_tokens for a in counted)
    return Outcome(
        name,
        useful=len([a for a in done if tenant in (None, a.client.tenant)]) / (duration_s - start_s),
        wasted=sum(a.prefilled_tokens for a in counted if a.outcome == "gone") / work if work else 0.0,
        gone=sum(a.outcome == "gone" for a in counted),
        shed=sum(a.outcome == "shed" for a in counted),
        ttft_p50_s=_quantile(times, 0.5),
        ttft_p99_s=_quantile(times, 0.99),
    )


def _quantile(times: Sequence[float], share: float) -> float:
    return times[round(share * (len(times) - 1))] if times else float("nan")


def capacity(seed: int, settings: PoolSettings, duration_s: float) -> float:
    """Requests a second that the fleet answers when it always has work."""
    return _run("capacity", Agents(seed, AGENTS), settings, duration_s).useful


def storm(seed: int, settings: PoolSettings, duration_s: float = 240.0) -> tuple[float, list[Outcome]]:
    """The fleet's capacity, and how the routers fare."""
    able = capacity(seed, settings, duration_s)
    guarded = replace(
        settings,
        shed_after_ms=settings.shed_after_ms or 800 * TIMEOUT_S,
        retry_budget=0.2 if settings.retry_budget is None else settings.retry_budget,
    )
    runs = (
        ("guarded", guarded),
        ("retry budget only", replace(guarded, shed_after_ms=None)),
        ("unguarded", replace(settings, shed_after_ms=None, retry_budget=None)),
        ("round-robin", replace(settings, policy="round-robin", shed_after_ms=None, retry_budget=None)),
    )
    client = Client(timeout_s=TIMEOUT_S, retries=RETRIES)
    return able, [
        _run(name, Stream(_swarm(seed, rate=STORM_LOAD * able), client), used, duration_s)
        for name, used in runs
    ]


def tenants(seed: int, settings: PoolSettings, duration_s: float = 240.0) -> list[Outcome]:
    """The small tenant's figures: alone, beside the flood with shares, and without them."""
    able = capacity(seed, settings, duration_s)
    small, flood = Client("small"), Client("flood")

    def traffic(flooded: bool) -> Workload:
        parts: list[Workload] = [Stream(_swarm(seed, rate=0.2 * able, personas=5, name="small"), small)]
        if flooded:  # its share is half of the fleet
            parts.append(Stream(_swarm(seed, rate=10 * 0.5 * able, personas=20, name="flood"), flood))
        return Mixed(parts)

    fair = replace(settings, tenant_header=TENANT_HEADER)
    late = replace(settings, shed_after_ms=settings.shed_after_ms or 1000 * TIMEOUT_S)
    return [
        _run("alone", traffic(False), settings, duration_s, "small"),
        _run("flood, shares", traffic(True), fair, duration_s, "small"),
        _run("flood, shares: the flood", traffic(True), fair, duration_s, "flood"),
        _run("flood, no shares", traffic(True), late, duration_s, "small"),
    ]


@dataclass(frozen=True, slots=True)
class Honesty:
    """How refusals compare with what would have been.

    ``true_sheds``: share of the refused that would have missed their bound if it alone had been let in;
    ``true_if_all``: if all of them had been. ``missed``: share of the admitted that missed it.
    ``retry_after``: share of the refusals whose Retry-After was right within a factor of 2.
    """

    admitted: int
    shed: int
    true_sheds: float
    true_if_all: float
    missed: float
    retry_after: float
    retry_afters: int


def shed(
    seed: int, settings: PoolSettings, duration_s: float = 150.0, *, load: float = 1.3, every: int = 4
) -> Honesty:
    """Refuse above a bound, and look what would have been. Retry-After is checked for each ``every``-th."""
    able = capacity(seed, settings, duration_s)
    used = replace(settings, shed_after_ms=settings.shed_after_ms or 1000 * TIMEOUT_S)
    bound_s = (used.shed_after_ms or 0.0) / 1000
    router = GuardedRouter(used)
    would_s: list[float] = []
    fits_s: list[tuple[float, float]] = []  # Retry-After, and when it really fits

    def on_shed(simulation: ClientSimulation, attempt: Attempt) -> None:
        if attempt.arrived_s < duration_s * WARM_UP:
            return
        would_s.append(now_s(simulation, attempt))
        if len(would_s) % every == 0:
            simulation.at(simulation.now + 0.25, probe, simulation, attempt)

    def now_s(simulation: ClientSimulation, attempt: Attempt) -> float:
        worker = simulation.workers[router.choice(attempt, simulation.now)]
        return foresight.ttft_s(worker, attempt.request, simulation.now, FLEET)

    def probe(simulation: ClientSimulation, attempt: Attempt) -> None:
        waited_s = simulation.now - attempt.arrived_s
        if now_s(simulation, attempt) <= bound_s:
            assert attempt.answer is not None
            fits_s.append((attempt.answer.retry_after_s or 0.0, waited_s))
        elif waited_s < 30.0:
            simulation.at(simulation.now + 0.25, probe, simulation, attempt)

    def traffic() -> Workload:
        return Stream(_swarm(seed, rate=load * able), Client())

    simulation = ClientSimulation(traffic(), router, FLEET, duration_s=duration_s, on_shed=on_shed)
    simulation.run()
    open_gate = GuardedRouter(replace(used, shed_after_ms=None))
    all_in = ClientSimulation(traffic(), open_gate, FLEET, duration_s=duration_s)
    all_in.run()
    counted = [a for a in simulation.attempts if a.arrived_s >= duration_s * WARM_UP]
    done = [a for a in counted if a.first_token_s >= 0.0]
    return Honesty(
        admitted=len(done),
        shed=len(would_s),
        true_sheds=_share([time > bound_s for time in would_s]),
        true_if_all=_share([_missed(all_in.attempts[a.index], bound_s) for a in counted if a.answer]),
        missed=_share([a.ttft_s > bound_s for a in done]),
        retry_after=_share([_right(*pair) for pair in fits_s]),
        retry_afters=len(fits_s),
    )


def _missed(attempt: Attempt, bound_s: float) -> bool:
    """Whether it had no first token by its bound, the end of the run included."""
    return attempt.first_token_s < 0.0 or attempt.ttft_s > bound_s


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def _right(told_s: float, true_s: float) -> bool:
    """Within a factor of 2, in the whole seconds that the header has."""
    told, true = max(1, ceil(told_s)), max(1, ceil(true_s))
    return true / 2 <= told <= 2 * true


def report(drill: str, seeds: int, settings: PoolSettings) -> Iterator[str]:
    """A drill's figures as lines."""
    for seed in range(1, seeds + 1):
        if drill == "shed":
            told = shed(seed, settings)
            yield f"shed, seed {seed}: {told.admitted} admitted, {told.shed} refused"
            yield f"  refused that would have missed their bound  {told.true_sheds:6.1%}"
            yield f"  the same, had all of them been let in       {told.true_if_all:6.1%}"
            yield f"  admitted that missed it                     {told.missed:6.1%}"
            yield f"  Retry-After right within a factor of 2      {told.retry_after:6.1%}"
            continue
        if drill == "storm":
            able, outcomes = storm(seed, settings)
            yield f"storm, seed {seed}: the fleet can do {able:.1f} requests/s"
        else:
            able, outcomes = 0.0, tenants(seed, settings)
            yield f"tenants, seed {seed}"
        head = "useful/s  of capacity  wasted prefill  gave up  refused  TTFT p50  TTFT p99"
        yield f"  {'':25} {head}"
        for run in outcomes:
            share = f"{run.useful / able:.0%}" if able else ""
            yield (
                f"  {run.name:25} {run.useful:>8.1f}  {share:>11}  {run.wasted:>14.1%}  {run.gone:>7}"
                f"  {run.shed:>7}  {run.ttft_p50_s:>6.2f} s  {run.ttft_p99_s:>6.2f} s"
            )
