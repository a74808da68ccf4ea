"""The built-in workloads, each with the fleet that it is measured on, and the policies, by name.

Eight workers with 190,000 tokens of KV cache each, about six agent personas, unless a scenario says
otherwise.
Loads are chosen so that a good router serves them with ease or nearly so, and a bad one drowns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from extproc.emulator.engine import CostModel
from extproc.fleet.config import PoolSettings
from extproc.routing.policy import POLICIES
from extproc.sim import rivals
from extproc.sim.oracle import Oracle
from extproc.sim.product import TRUTH, Distortion, PoolRouter
from extproc.sim.simulation import Fleet, FleetChange, Router
from extproc.sim.trace import Recorded, TraceWorkload, read_trace
from extproc.sim.workload import Burst, Chat, Mixed, Rag, Swarm, Unique, Workload, even, zipf

_COST = CostModel()
#: GPU seconds of a swarm's request whose persona is cached, in batches of 16: what a load of 1 is made of.
_WARM_TURN_S = _COST.step_duration_s(500, 0) + 120 * (_COST.decode_s + _COST.step_s / 16)

#: Share of the fleet's time that a trace would take without any cache hit, unless ``--load`` says otherwise.
DEFAULT_LOAD = 0.7


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the command line may change in a scenario; None leaves it as it is.

    ``load``: of open loops, and of swarms, which become open by it. 1 is about what the fleet can do: with no
    cache hit for a trace, with nothing but its own turn to prefill for a swarm.
    """

    streams: int | None = None
    personas: int | None = None
    load: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload to be measured. ``make``: seed and knobs to a fresh workload."""

    name: str
    what: str
    make: Callable[[int, Knobs, Fleet], Workload]
    requests: int = 2_500
    fleet: Fleet = field(default_factory=Fleet)


def _swarm(
    streams: int, *, law: Callable[[int], list[float]] = even, head: int = 0
) -> Callable[..., Workload]:
    def make(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
        return Swarm(
            seed,
            weights=law(knobs.personas or 40),
            streams=knobs.streams or streams,
            rate=None if knobs.load is None else knobs.load * capacity(fleet) / _WARM_TURN_S,
            shared_head_tokens=head,
        )

    return make


def _hot(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
    others = (knobs.personas or 40) - 1
    return Swarm(seed, weights=[max(1.0, float(others)), *even(others)], streams=knobs.streams or 60)


def _chat(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
    return Chat(seed, sessions=knobs.streams or 160)


def _rag(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
    return Rag(seed, rate=12.0 * (knobs.load or DEFAULT_LOAD) / DEFAULT_LOAD)


def _mixed(usual: float) -> Callable[..., Workload]:
    def make(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
        load = knobs.load or usual
        agents = Swarm(
            seed, weights=zipf(knobs.personas or 20), streams=max(1, round(34 * load)), name="agent"
        )
        chat = Chat(seed, sessions=max(1, round(115 * load)))
        return Mixed([agents, chat, Rag(seed, rate=5.7 * load, documents=120), Unique(seed, rate=4.3 * load)])

    return make


def _burst(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
    factor = (knobs.load or DEFAULT_LOAD) / DEFAULT_LOAD
    swarm = Swarm(seed, weights=even(knobs.personas or 40), rate=8.0 * factor)
    return Burst(seed, swarm=swarm, size=round(50 * factor))


SCENARIOS: Mapping[str, Scenario] = {
    s.name: s
    for s in (
        Scenario("swarm-20", "20 streams over 40 agent personas, evenly drawn", _swarm(20)),
        Scenario("swarm-40", "40 streams over 40 personas", _swarm(40)),
        Scenario("swarm-60", "60 streams over 40 personas", _swarm(60)),
        Scenario("swarm-100", "100 streams over 40 personas", _swarm(100)),
        Scenario("zipf-60", "60 streams, personas by Zipf's law", _swarm(60, law=zipf)),
        Scenario("zipf-100", "100 streams, personas by Zipf's law", _swarm(100, law=zipf)),
        Scenario("head-60", "60 streams, all personas share 2,000 tokens", _swarm(60, head=2_000)),
        Scenario("hot", "60 streams, half of them for one persona", _hot),
        Scenario("chat", "160 conversations of 4–16 turns", _chat),
        Scenario("rag", "questions about 250 documents, 12 a second", _rag),
        Scenario("mixed", "agents, conversations, documents and unique prompts together", _mixed(0.6)),
        # Running requests alone fill the KV caches here, so that some wait for memory, which no router sees.
        Scenario(
            "mixed-full", "the same, but 17 % more: the caches are full of running requests", _mixed(0.7)
        ),
        Scenario("burst", "an open-loop swarm with bursts of 50 requests for one persona", _burst),
        Scenario(
            "change",
            "swarm-60; one worker leaves and one joins at half time",
            _swarm(60),
            fleet=Fleet(changes=(FleetChange(60.0, (0,), 1),)),
        ),
        Scenario(
            "speeds",
            "swarm-60; half the workers are twice as fast",
            _swarm(60),
            fleet=Fleet(speeds=(2.0, 1.0)),
        ),
    )
}


def trace_scenario(path: Path, load: float | None = None, limit: int | None = None) -> Scenario:
    """A recorded trace on workers with 400,000 tokens of cache. Raises `extproc.sim.trace.TraceError`.

    ``load``: see `offered_load`; None keeps the recorded pace of a trace with timestamps.
    """
    recorded = read_trace(path, limit)

    def make(seed: int, knobs: Knobs, fleet: Fleet) -> Workload:
        wanted = knobs.load if knobs.load is not None else load
        if recorded[0].time_s is None:
            if knobs.streams:
                return TraceWorkload(recorded, seed=seed, streams=knobs.streams)
            rate = (wanted or DEFAULT_LOAD) / mean_work_s(recorded, fleet) * capacity(fleet)
            return TraceWorkload(recorded, seed=seed, rate=rate)
        speedup = 1.0 if wanted is None else wanted / offered_load(recorded, fleet)
        return TraceWorkload(recorded, seed=seed, speedup=speedup)

    name = path.stem if load is None else f"{path.stem}@{load:g}"
    what = f"{path.name}: {len(recorded)} requests"
    return Scenario(name, what, make, requests=len(recorded), fleet=Fleet(cache_tokens=400_000))


def mean_work_s(recorded: list[Recorded], fleet: Fleet) -> float:
    """GPU seconds that a request of this trace takes on average, without cache hits, in full batches."""
    cost = fleet.cost
    prompt_s = cost.prefill_s + cost.step_s / fleet.max_num_batched_tokens
    work = sum(r.request.prompt_tokens * prompt_s + r.request.output_tokens * cost.decode_s for r in recorded)
    return work / len(recorded)


def capacity(fleet: Fleet) -> float:
    """GPU seconds a second that the fleet has, in those of a worker of speed 1."""
    return sum(fleet.speeds[i % len(fleet.speeds)] for i in range(fleet.workers))


def offered_load(recorded: list[Recorded], fleet: Fleet) -> float:
    """Share of the fleet's time that the trace would take at its recorded pace without any cache hit."""
    span_s = max(recorded[-1].time_s or 0.0, 1e-9)
    return mean_work_s(recorded, fleet) * len(recorded) / span_s / capacity(fleet)


#: Other routers' rules, and the oracles: name → maker, given the seed.
RIVALS: Mapping[str, Callable[[int], Router]] = {
    "modulo": rivals.Modulo,
    "ring": rivals.Ring,
    "radix": rivals.Radix,
    "radix-tight": lambda seed: rivals.Radix(seed, threshold=0.5, gap=32, ratio=1.1),
    "lmetric-exact": rivals.LMetricExact,
    "weighted": rivals.Weighted,
    "oracle": lambda seed: Oracle(1.0, seed),
    "oracle-selfish": lambda seed: Oracle(0.0, seed),
}

#: All that ``--policies`` understands.
POLICY_NAMES = (*POLICIES, *RIVALS)


def router_maker(
    policy: str, seed: int, settings: PoolSettings | None = None, distortion: Distortion = TRUTH
) -> Callable[[int], Router]:
    """Makes the replicas of a router that follows this policy: one of the product's, or a rival."""
    if policy in RIVALS:
        rival = RIVALS[policy]
        return lambda replica: rival(seed * 1_000 + replica)
    own = replace(settings or PoolSettings(), policy=policy)
    return lambda replica: PoolRouter(own, replica=replica, distortion=distortion)
