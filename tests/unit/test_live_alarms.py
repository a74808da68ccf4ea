"""Alarms: each when it should, not when it shouldn't, and without flicker."""

from __future__ import annotations

import pytest
from live_fleet import UNIX_S, Fleet, address, body, config, quiet  # noqa: F401 - a fixture
from msgspec.structs import replace

from extproc.envoyconf import ConfigError
from extproc.envoyconf.problems import Problem
from extproc.live.alarms import (
    MAX_NAMED,
    ROUTER_RULES,
    RULES,
    Alarms,
    PoolFacts,
    PrefixFacts,
    RouterFacts,
    TenantFacts,
    WorkerFacts,
)
from extproc.live.window import NOTHING
from extproc.observe import events
from extproc.routing.demand import digest
from extproc.routing.health import Cause, Probe, State

WELL = tuple(WorkerFacts(address(n), decisions=25) for n in range(4))
OUT = WorkerFacts(address(9), out=True, state="ejected", cause="silent")
BUSY = replace(NOTHING, decisions=100, prompt_tokens=100_000, cached_tokens=80_000, predicted_s=20.0)
QUIET = PoolFacts("p", WELL, counts=BUSY, engine_hit_ratio=0.78, engine_ttft_s=0.3, engine_first_tokens=100.0)
SCATTERED = PrefixFacts("deadbeef", "5994471abb01", share=0.3, requests=40, lost=30, workers=4)


def crowd(most: int) -> tuple[WorkerFacts, ...]:
    return (replace(WELL[0], decisions=most), *WELL[1:])


#: Rule, what raises it, and words of its text; then what is close to it and doesn't.
CASES = [
    ("NoWorkers", PoolFacts("p"), "no worker", replace(QUIET, workers=(*WELL, OUT))),
    ("NoWorkers", PoolFacts("p", [OUT, OUT]), "all 2 workers", replace(QUIET, workers=WELL[:1])),
    (
        "Panic",
        replace(QUIET, workers=(*WELL, OUT), panic=True),
        "1 of 5",
        replace(QUIET, workers=(*WELL, OUT)),
    ),
    ("WorkerEjected", replace(QUIET, workers=(*WELL, OUT)), "10.0.0.9:8000 is ejected (silent)", QUIET),
    (
        "Overflow",
        replace(QUIET, counts=replace(BUSY, overflow=6)),
        "6% of the requests",
        replace(QUIET, counts=replace(BUSY, overflow=4)),
    ),
    (
        "LowHitRate",
        replace(QUIET, engine_hit_ratio=0.5),
        "engines find 50% of the prompt tokens cached, expected are 80%",
        replace(QUIET, engine_hit_ratio=0.6),
    ),
    (
        "LowHitRate",
        replace(QUIET, counts=replace(BUSY, lost_tokens=30_000), engine_hit_ratio=None),
        "30% of the prompt tokens",
        replace(
            QUIET, counts=replace(BUSY, cached_tokens=0), engine_hit_ratio=0.0
        ),  # prompts that never repeat
    ),
    ("PredictionOff", replace(QUIET, engine_ttft_s=0.9), "after 900 ms", replace(QUIET, engine_ttft_s=0.45)),
    (
        "PredictionOff",
        replace(QUIET, counts=replace(BUSY, predicted_s=200.0)),
        "predicted are 2,000 ms",
        replace(QUIET, engine_ttft_s=0.9, engine_first_tokens=5.0),
    ),
    (
        "Imbalance",
        replace(QUIET, workers=crowd(150), busiest_strained=True),
        "2.7 times",
        replace(QUIET, workers=crowd(60), busiest_strained=True),
    ),
    (
        "Imbalance",
        replace(QUIET, workers=crowd(300), busiest_strained=True),
        address(0),
        replace(QUIET, workers=crowd(300)),  # a hot prefix and nobody waits: affinity
    ),
    (
        "SignalsStale",
        replace(QUIET, workers=(replace(WELL[0], stale=True), *WELL[1:])),
        address(0),
        replace(QUIET, workers=(*WELL, replace(OUT, stale=True))),
    ),
    (
        "PicksMoved",
        replace(QUIET, counts=replace(BUSY, moved=10)),
        "10%",
        replace(QUIET, counts=replace(BUSY, moved=4)),
    ),
    (
        "Shedding",
        replace(QUIET, counts=replace(BUSY, refused=25), refused={"tenant": 5, "load": 20}),
        "20% of the requests are refused: load, tenant",
        replace(QUIET, counts=replace(BUSY, refused=4), refused={"load": 4}),
    ),
    (
        "PrefixScattered",
        replace(QUIET, prefixes=[SCATTERED]),
        "deadbeef of tenant 5994471abb01: 75%",
        replace(QUIET, prefixes=[replace(SCATTERED, lost=15), replace(SCATTERED, workers=2)]),
    ),
    (
        "PrefixScattered",
        replace(QUIET, prefixes=[replace(SCATTERED, tenant=""), SCATTERED]),
        "deadbeef: 75%",
        replace(QUIET, prefixes=[replace(SCATTERED, share=0.04), replace(SCATTERED, requests=10)]),
    ),
    (
        "PrefixScattered",
        replace(QUIET, tenants=[TenantFacts("", 0.3, 0.1, heads=40, new_heads=36)]),
        "90% of the system prompts are new, 10% cached",
        replace(QUIET, tenants=[TenantFacts("", 0.3, 0.1, 40, 12), TenantFacts("", 0.3, 0.6, 40, 36)]),
    ),
]


@pytest.mark.parametrize(("name", "raises", "says", "stays_quiet"), CASES)
def test_rule(name: str, raises: PoolFacts, says: str, stays_quiet: PoolFacts) -> None:
    found = [rule for rule in RULES if rule.name == name]
    assert len(found) == 1
    [rule] = found
    texts = [finding.text for finding in rule.check(raises, rule.threshold)]
    assert len(texts) == 1
    assert says in texts[0]
    assert list(rule.check(stays_quiet, rule.threshold)) == []


def test_a_quiet_pool_raises_nothing() -> None:
    for pool in (QUIET, PoolFacts("p", WELL)):
        assert [finding for rule in RULES for finding in rule.check(pool, rule.threshold)] == []
    idle = RouterFacts(faults=3, last_fault="KeyError")
    assert [finding for rule in ROUTER_RULES for finding in rule.check(idle, rule.threshold)] == []


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == {case[0] for case in CASES}


def test_many_ejected_workers_are_one_alarm() -> None:
    rule = next(rule for rule in RULES if rule.name == "WorkerEjected")
    few = [replace(OUT, address=address(n)) for n in range(MAX_NAMED)]
    assert len(list(rule.check(PoolFacts("p", few), 0.0))) == MAX_NAMED
    [finding] = rule.check(PoolFacts("p", [*few, OUT]), 0.0)
    assert "9 of 9 workers" in finding.text
    assert finding.worker == ""


def test_an_alarm_comes_after_its_time_and_stays_while_it_flickers() -> None:
    alarms, calm, now = Alarms(), QUIET, 0.0
    low = replace(QUIET, engine_hit_ratio=0.1)
    rule = next(rule for rule in RULES if rule.name == "LowHitRate")

    def seconds(count: int, pool: PoolFacts) -> list[bool]:
        nonlocal now
        raised = []
        for _ in range(count):
            alarms.update([pool], RouterFacts(), now)
            raised.append(any(alarm.name == "LowHitRate" for alarm in alarms.raised))
            now += 1.0
        return raised

    assert not any(seconds(int(rule.after_s), low))
    assert not any(seconds(1, calm))  # a break: it must begin anew
    assert not any(seconds(int(rule.after_s), low))
    assert all(seconds(5, low))
    began_s = alarms.raised[0].since_s
    assert began_s == rule.after_s + 1.0
    for _ in range(5):
        assert all(seconds(int(rule.keep_s) - 1, calm))
        assert all(seconds(1, low))
    assert alarms.raised[0].since_s == began_s
    assert seconds(int(rule.keep_s) + 2, calm)[-3:] == [True, False, False]
    assert not any(seconds(3, low))


def test_critical_alarms_come_first() -> None:
    alarms = Alarms()
    alarms.update([replace(QUIET, counts=replace(BUSY, overflow=50))], RouterFacts(), 0.0)
    alarms.update([PoolFacts("q"), replace(QUIET, counts=replace(BUSY, overflow=50))], RouterFacts(), 1.0)
    assert [(a.name, a.severity, a.pool) for a in alarms.raised] == [
        ("NoWorkers", "critical", "q"),
        ("Overflow", "warning", "p"),
    ]


# --- in a whole router ---------------------------------------------------------------------------


def test_a_worker_that_is_ejected_then_all_of_them() -> None:
    fleet = Fleet()
    pool = fleet.router.pools["p"]
    fleet.pass_s(1.0)
    pool.probed(pool.workers[0], Probe.REFUSED, fleet.now, fleet.now)
    assert pool.workers[0].health.state is State.EJECTED
    fleet.pass_s(1.0)
    [alarm] = fleet.status.alarms
    assert (alarm.name, alarm.worker, alarm.pool, alarm.since_s) == (
        "WorkerEjected",
        address(0),
        "p",
        UNIX_S + 2.0,
    )
    assert alarm.text == f"{address(0)} is ejected ({Cause.REFUSED.value})"
    for worker in pool.workers:
        pool.probed(worker, Probe.REFUSED, fleet.now, fleet.now)
    fleet.pass_s(1.0)
    assert fleet.alarms[:2] == ["NoWorkers", "Panic"]


def test_a_cache_too_small_for_what_repeats() -> None:
    fleet = Fleet(workers=range(1), cache_tokens=8000)
    for _ in range(80):
        for agent in range(5):
            fleet.ask(body(f"agent {agent}", chars=16_000))  # 20,000 tokens in turn: each pushes another out
        fleet.pass_s(1.0)
    assert fleet.pool().hit_ratio == 0.0
    assert fleet.alarms == ["LowHitRate"]


def test_documents_that_never_repeat_are_nobodys_fault() -> None:
    fleet = Fleet()
    for n in range(100):
        for each in range(5):
            fleet.ask(body("Sum it up.", f"document {n} {each}: " + "and so on. " * 1500, chars=20))
        fleet.pass_s(1.0)
    assert fleet.pool().hit_ratio == 0.0
    assert fleet.alarms == []


def test_a_tenant_whose_system_prompt_begins_with_the_time() -> None:
    fleet = Fleet(tenant_header="x-tenant")
    for n in range(90):
        for each in range(3):
            fleet.ask(body(f"agent {each}"), **{"x-tenant": "good"})
            fleet.ask(body(f"It is {n}:0{each} now. You are an agent."), **{"x-tenant": "careless"})
        fleet.pass_s(1.0)
    [alarm] = fleet.status.alarms
    assert alarm.name == "PrefixScattered"
    assert f"100% of the system prompts of tenant {digest('careless')} are new, 0% cached" in alarm.text
    assert [tenant.tenant for tenant in fleet.pool().tenants] == [digest("careless"), digest("good")]


def test_a_hot_prefix_sent_everywhere_by_a_blind_policy_is_found_once_nothing_is_cached() -> None:
    fleet = Fleet(range(3), policy="round-robin", cache_tokens=5000, tenant_header="x-tenant")
    for n in range(80):
        for _ in range(4):
            fleet.ask(body("the hot one", chars=16_000), **{"x-tenant": "acme"})
            fleet.ask(body(f"a document {n}", chars=20_000))
        fleet.pass_s(1.0)
    assert "PrefixScattered" in fleet.alarms
    text = next(alarm.text for alarm in fleet.status.alarms if alarm.name == "PrefixScattered")
    hottest = next(prefix for prefix in fleet.pool().prefixes if prefix.tenant)
    assert f"prefix {hottest.prefix} of tenant {hottest.tenant}" in text
    assert len(hottest.spread) == 3


def test_a_refused_configuration_until_a_good_one_comes() -> None:
    fleet = Fleet()
    problems = [Problem("envoy.yaml", "a.b", "secret-key", "is no number", "", 7)] * 2
    fleet.observer.tell(events.ReloadRefused(ConfigError(problems)))
    fleet.pass_s(1.0)
    [alarm] = fleet.status.alarms
    assert (alarm.name, alarm.pool) == ("ReloadRefused", "")
    assert "envoy.yaml:7 and 1 more" in alarm.text
    assert "secret-key" not in alarm.text
    fleet.router.apply(config(range(4)))
    fleet.observer.tell(events.Reloaded("envoy.yaml", ()))
    fleet.pass_s(2.0)
    assert fleet.alarms == []


def test_faults_of_ours_are_told_for_a_while() -> None:
    fleet = Fleet()
    fleet.observer.tell(events.Fault(KeyError("the prompt: hello")))
    fleet.pass_s(200.0)
    [alarm] = fleet.status.alarms
    assert alarm.name == "InternalErrors"
    assert "KeyError" in alarm.text
    assert "hello" not in alarm.text
    fleet.pass_s(105.0)
    assert fleet.alarms == []
