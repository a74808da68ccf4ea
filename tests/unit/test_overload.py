"""Drills of overload, small: clients that give up, shares, refusals held against the truth."""

from __future__ import annotations

from extproc.fleet.config import PoolSettings
from extproc.sim import foresight, overload
from extproc.sim.clients import Attempt, Client, ClientSimulation
from extproc.sim.guarded import TENANT_HEADER, GuardedRouter
from extproc.sim.simulation import Fleet

SETTINGS = PoolSettings(prefill_tokens_per_s=10_500.0)
FLEET = Fleet(workers=2, cache_tokens=400_000)


def run(settings=SETTINGS, *, rate=8.0, client=None, duration_s=60.0, **more):
    workload = overload.Stream(overload._swarm(1, rate=rate, personas=6), client or Client())
    simulation = ClientSimulation(workload, GuardedRouter(settings), FLEET, duration_s=duration_s, **more)
    simulation.run()
    return simulation


def test_clients_that_give_up_leave_nothing_behind():
    simulation = run(client=Client(timeout_s=2.0, retries=3))
    gone = [a for a in simulation.attempts if a.outcome == "gone"]
    assert len(gone) > 20
    assert max(a.tries_before for a in simulation.attempts) == 3
    assert all(0 <= a.prefilled_tokens <= a.request.prompt_tokens for a in simulation.attempts)
    assert any(a.prefilled_tokens == 0 for a in gone), "some never got their turn"
    under_way = [a for a in simulation.attempts if not a.outcome]
    pool = simulation.router.pool
    assert sum(w.in_flight for w in pool.workers) == pool.tickets == len(under_way)
    engines = [w.engine for w in simulation.workers]
    coming = sum(len(w.coming) for w in simulation.workers)
    assert sum(e.running + e.waiting for e in engines) + coming == len(under_way)


def test_the_guard_keeps_a_storm_useful():
    client = Client(timeout_s=overload.TIMEOUT_S, retries=overload.RETRIES)
    guarded = PoolSettings(prefill_tokens_per_s=10_500.0, shed_after_ms=4000.0, retry_budget=0.2)

    def answered(simulation):
        return sum(a.outcome == "done" for a in simulation.attempts)

    kept, lost = run(guarded, client=client), run(client=client)
    assert answered(kept) > 2 * answered(lost)
    assert sum(a.outcome == "gone" for a in kept.attempts) <= 0.02 * len(kept.attempts)


def test_expectations_are_close_to_what_happens():
    simulation = run(PoolSettings(prefill_tokens_per_s=10_500.0, shed_after_ms=4000.0))
    router = simulation.router
    errors = sorted(
        abs(a.ttft_s - router.expected_s[a.index]) for a in simulation.attempts if a.first_token_s >= 0
    )
    assert errors[int(0.9 * len(errors))] < 0.5
    assert any(a.outcome == "shed" for a in simulation.attempts)


def test_foresight_agrees_with_what_happens_and_changes_nothing():
    seen = []

    def counters(engine):
        return engine.running, engine.waiting, engine.steps, engine.kv_usage, engine.prefix_queries

    class Watched(GuardedRouter):
        def ask(self, attempt: Attempt, now: float):
            answer = super().ask(attempt, now)
            if len(seen) < 200 and attempt.index % 3 == 0:
                worker = simulation.workers[answer]
                before = counters(worker.engine)
                seen.append((attempt, foresight.ttft_s(worker, attempt.request, now, FLEET)))
                assert counters(worker.engine) == before
            return answer

    workload = overload.Stream(overload._swarm(1, rate=5.0, personas=6), Client())
    simulation = ClientSimulation(workload, Watched(SETTINGS), FLEET, duration_s=60.0)
    simulation.run()
    checked = [(a.ttft_s, foreseen) for a, foreseen in seen if a.first_token_s >= 0]
    assert len(checked) > 50
    close = sum(abs(true - foreseen) <= 0.05 + 0.05 * true for true, foreseen in checked)
    assert close >= 0.95 * len(checked)


def test_tenant_settings_reach_the_gate():
    client = Client("flood")
    simulation = run(PoolSettings(tenant_header=TENANT_HEADER), client=client, duration_s=10.0)
    assert len(simulation.router.gate.shares) == 1
