"""Checks of workers, router and Envoy, as pure functions of what these told; and how their pages are read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc.doctor import pages
from extproc.doctor.check import Verdict, run
from extproc.doctor.checks import CHECKS
from extproc.doctor.finding import Finding, Place, Severity
from extproc.doctor.fleet import EnvoyFacts, Fleet, RouterFacts, Sample, WorkerFacts
from extproc.doctor.manifests import read
from extproc.doctor.report import as_json, show
from extproc.doctor.setup import Setup, read_setup
from extproc.engine.report import EngineReport
from extproc.live.status import Status, WorkerStatus

FILE = Path(__file__).parents[2] / "envoy" / "envoy.yaml"
EXTPROC = "static_resources.clusters[0].metadata.filter_metadata.extproc"
ADDRESSES = [f"127.0.0.1:{port}" for port in (8001, 8002, 8003, 8004)]
REPORT = EngineReport(
    engine="vllm",
    ranks=1,
    running=2.0,
    waiting=0.0,
    cache_tokens=190_000,
    block_tokens=16,
    prefix_query_tokens=1_000_000.0,
    prefix_hit_tokens=800_000.0,
    preemptions=0.0,
    ended_requests=200.0,
    ended_prompt_tokens=1_000_000.0,
)
WELL = WorkerFacts(
    "workers",
    "",
    health=200,
    report=REPORT,
    cache_info={"enable_prefix_caching": "True"},
    version="0.32.0",
    models=("emulated",),
    max_model_len=131_072,
    prompt_over=20_000,
    step_over=1024,
)

ERROR, WARNING, NOTE = Severity


@cache
def setup() -> Setup:
    return read_setup(read(FILE))


def fleet(*odd: WorkerFacts, **more: Any) -> Fleet:
    """Four workers, of which the first are ``odd``."""
    workers = [
        replace(worker, address=address)
        for worker, address in zip((*odd, *[WELL] * 4), ADDRESSES, strict=False)
    ]
    return Fleet(setup(), tuple(workers), **more)


def find(fleet: Fleet) -> tuple[Finding, ...]:
    return run(CHECKS, fleet).findings


def engine(**fields: Any) -> WorkerFacts:
    return replace(WELL, report=replace(REPORT, **fields))


def test_a_fleet_that_is_well() -> None:
    assert find(fleet()) == ()


SGLANG = replace(
    WELL,
    report=replace(REPORT, engine="sglang", block_tokens=1),
    cache_info={},
    version=None,
    max_model_len=None,
)

#: One odd worker, and what is said of it.
ODD = {
    "gone": (WorkerFacts("workers", "", health_error="connection refused"), "unreachable", ERROR),
    "engine dead": (replace(WELL, health=503), "health", ERROR),
    "no such health page": (replace(WELL, health=404), "health", ERROR),
    "HTTPS": (WorkerFacts("workers", "", tls=True), "tls", WARNING),
    "no metrics": (replace(WELL, report=None, metrics_error="answers 404"), "metrics", WARNING),
    "frozen": (replace(WELL, frozen=True), "frozen-metrics", WARNING),
    "no prefix caching": (
        replace(WELL, cache_info={"enable_prefix_caching": "False"}),
        "prefix-caching",
        ERROR,
    ),
    "no radix cache": (replace(WELL, radix_cache=False), "prefix-caching", ERROR),
    "large steps": (replace(WELL, step_over=8192), "large-steps", WARNING),
    "no chunks": (replace(WELL, chunked_prefill_tokens=-1), "large-steps", WARNING),
    "another model": (replace(WELL, models=("other",)), "alike", ERROR),
    "another version": (replace(WELL, version="0.31.0"), "alike", WARNING),
    "another length": (replace(WELL, max_model_len=8192), "alike", WARNING),
    "other blocks": (engine(block_tokens=32), "alike", WARNING),
    "another engine": (SGLANG, "alike", WARNING),
    "tiny cache": (engine(cache_tokens=39_999), "cache-size", WARNING),
    "tiny cache, by the mean": (
        replace(engine(ended_prompt_tokens=30_000.0 * 200, cache_tokens=50_000), prompt_over=0),
        "cache-size",
        WARNING,
    ),
    "tiny share of a cache": (engine(cache_tokens=70_000, ranks=2), "cache-size", WARNING),
    "preempting": (engine(preemptions=5.0), "preemptions", WARNING),
}


@pytest.mark.parametrize("case", ODD.values(), ids=ODD)
def test_one_odd_worker(case: tuple[WorkerFacts, str, Severity]) -> None:
    worker, check, severity = case
    found = [f for f in find(fleet(worker)) if f.check != "ranks"]
    assert [(f.check, f.severity) for f in found] == [(check, severity)]
    assert found[0].places == (Place(pool="workers", worker=ADDRESSES[0]),)


NOT_ODD = {
    "few preemptions": engine(preemptions=4.0, ended_requests=10.0, ended_prompt_tokens=50_000.0),
    "rare preemptions": engine(preemptions=20.0, ended_requests=10_000.0),
    "a cache of two prompts": engine(cache_tokens=40_000),
    "nothing told": replace(WELL, report=EngineReport(engine="vllm"), cache_info={}, version=None, models=()),
    "steps of the default": replace(WELL, step_over=4096),
}


@pytest.mark.parametrize("worker", NOT_ODD.values(), ids=NOT_ODD)
def test_not_odd(worker: WorkerFacts) -> None:
    assert find(fleet(worker)) == ()


def test_ranks_are_a_note() -> None:
    (found,) = find(fleet(engine(ranks=2, cache_tokens=400_000)))
    assert (found.check, found.severity) == ("ranks", NOTE)


def test_many_workers_with_one_cause_are_one_finding() -> None:
    gone = WorkerFacts("workers", "", health_error="connection refused")
    (found,) = find(fleet(gone, gone, gone, gone))
    assert [place.worker for place in found.places] == ADDRESSES
    two = replace(gone, health_error="no answer within 5 s")
    assert [len(f.places) for f in find(fleet(gone, two, gone))] == [2, 1]


def test_the_minority_is_the_odd_one() -> None:
    old = replace(WELL, version="0.31.0")
    (found,) = find(fleet(WELL, old, WELL, WELL))
    assert [place.worker for place in found.places] == [ADDRESSES[1]]
    assert "0.31.0" in found.found
    assert "3 of 4 workers" in found.found


def test_blocks_of_the_pool_and_of_the_engine() -> None:
    eight = engine(block_tokens=48)
    (found,) = find(fleet(eight, eight, eight, eight))
    assert (found.check, found.places[0].path) == ("block-tokens", f"{EXTPROC}.block_tokens")
    assert found.fix == "block_tokens: 240"
    wide = engine(block_tokens=512)
    (found,) = find(fleet(wide, wide, wide, wide))
    assert found.fix == "block_tokens: 512"


def changed(**settings: Any) -> Setup:
    """The set-up with other settings of its pool."""
    config = setup().config
    pool = config.pools["workers"]
    pool = replace(pool, settings=replace(pool.settings, **settings))
    return replace(setup(), config=replace(config, pools={"workers": pool}))


def test_a_cache_that_is_smaller_than_the_yaml_says() -> None:
    (found,) = find(replace(fleet(), setup=changed(cache_tokens=400_000)))
    assert (found.check, found.places[0].path) == ("cache-tokens", f"{EXTPROC}.cache_tokens")
    assert find(replace(fleet(), setup=changed(cache_tokens=200_000))) == ()


def test_the_body_limit_against_prompts() -> None:
    """16 MiB of body are about 4.2 million tokens at 4 bytes."""
    big = engine(cache_tokens=50_000_000)
    (found,) = find(fleet(*[replace(big, max_model_len=5_000_000)] * 4))
    assert (found.check, found.severity, found.fix) == (
        "body-limit",
        WARNING,
        "request_body_buffer_limit: 33554432",
    )
    (found,) = find(fleet(*[replace(big, prompt_over=4_500_000)] * 4))
    assert (found.check, found.severity) == ("body-limit", ERROR)
    assert find(fleet(*[replace(big, max_model_len=4_000_000)] * 4)) == ()


def test_a_name_that_can_not_be_resolved_has_its_place() -> None:
    compose = FILE.parent / "compose.yaml"
    (found,) = find(Fleet(read_setup(read(compose)), unresolved={"worker-3": "Name or service not known"}))
    path = "static_resources.clusters[0].load_assignment.endpoints[0].lb_endpoints[2]"
    assert (found.check, found.severity) == ("names", ERROR)
    assert found.places[0].path == f"{path}.endpoint.address.socket_address.address"


# --- the router ----------------------------------------------------------------------------------


def router(**values: float) -> RouterFacts:
    """A router that told these: pool's series by name, and those of every worker by ``worker_`` and name."""
    samples: dict[str, list[Sample]] = {
        "extproc_inflight_requests": [({"pool": "workers", "worker": a}, 0.0) for a in ADDRESSES]
    }
    for name, value in values.items():
        samples[f"extproc_{name}"] = [({"pool": "workers", "reason": "any", "result": "refused"}, value)]
    return RouterFacts("http://127.0.0.1:9090/metrics", samples=samples, age_s=3600.0)


QUIET = {"decisions_total": 1000.0, "prompt_tokens_total": 4e6, "cached_tokens_total": 3.4e6}

TOLD = {
    "faults": ({"internal_errors_total": 2.0}, "router-faults", ERROR),
    "a refused file": ({"config_reloads_total": 1.0}, "router-faults", WARNING),
    "left to Envoy": ({"unrouted_total": 50.0}, "unrouted", WARNING),
    "panic": ({"panic": 1.0}, "workers-out", ERROR),
    "picks not used": ({"moved_total": 60.0}, "moved", WARNING),
    "no prompts": ({"unreadable_total": 200.0}, "unreadable", NOTE),
    "limits": ({"overflow_total": 30.0}, "overflow", NOTE),
    "hits that are none": ({"cached_tokens_total": 3.9e6}, "hit-rate", WARNING),
}


@pytest.mark.parametrize("case", TOLD.values(), ids=TOLD)
def test_what_a_router_tells(case: tuple[dict[str, float], str, Severity]) -> None:
    values, check, severity = case
    assert find(fleet(router=router(**QUIET))) == ()
    (found,) = find(fleet(router=router(**QUIET | values)))
    assert (found.check, found.severity) == (check, severity)
    assert found.places == (Place(url="http://127.0.0.1:9090/metrics"),)


@pytest.mark.parametrize(
    "values",
    [
        {"unrouted_total": 9.0},
        {"moved_total": 15.0},
        {"overflow_total": 10.0},
        {"unreadable_total": 90.0},
        {"cached_tokens_total": 3.7e6},
        # Other traffic than the engines speak of: nothing to compare.
        {"cached_tokens_total": 1.9e6, "prompt_tokens_total": 1.9e6},
        {"cached_tokens_total": 9e6, "prompt_tokens_total": 9e6},
    ],
    ids=str,
)
def test_a_little_is_nothing(values: dict[str, float]) -> None:
    assert find(fleet(router=router(**QUIET | values))) == ()


def live(tokens: int, hit_ratio: float | None, requests_per_s: float = 1.0, cache: int = 50_000) -> Status:
    """Ten hot prefixes of so many tokens, four workers."""
    rates = dict.fromkeys(("requests_per_s", "prompt_tokens_per_s", "moved_per_s", "utilisation"), 0.0)
    unknown = dict.fromkeys(("ttft", "engine_ttft_ms", "busiest"))
    prefix = {"prefix": "", "tenant": "", "tokens": tokens, "share": 0.1, "hit_ratio": 0.1, "spread": {}}
    worker = dict.fromkeys(WorkerStatus.__struct_fields__, 0) | {"cache_tokens": cache, "state": "healthy"}
    worker |= dict.fromkeys(("ttft", "hit_ratio", "engine_hit_ratio"))
    pool = {"name": "workers", "policy": "", "panic": False, "hit_ratio": hit_ratio, "engine_hit_ratio": None}
    pool |= rates | unknown | {"in_flight": 0, "pending_prefill_tokens": 0, "reasons": {}, "refused": {}}
    pool["workers"] = [worker | {"address": address} for address in ADDRESSES]
    pool["prefixes"] = [prefix | {"requests_per_s": requests_per_s}] * 10
    told = {"version": "", "now_s": 0.0, "started_s": 0.0, "config": "", "window_s": 10.0}
    return msgspec.convert(told | {"pools": [pool], "decisions": [], "alarms": []}, Status)


def test_a_working_set_that_does_not_fit() -> None:
    told = router(**QUIET | {"cached_tokens_total": 3.9e6})  # which would be a finding of its own
    (found,) = find(fleet(router=replace(told, status=live(20_001, 0.2))))
    assert (found.check, found.value) == (
        "working-set",
        {"working_set_tokens": 200_010, "cache_tokens": 200_000},
    )


@pytest.mark.parametrize(
    "status",
    [
        live(19_000, 0.2),
        live(30_000, 0.8),
        live(30_000, None),
        live(30_000, 0.2, 0.1),
        live(30_000, 0.2, cache=0),
    ],
    ids=["fits", "hits", "no requests", "nothing comes again", "sizes unknown"],
)
def test_a_working_set_that_does_no_harm(status: Status) -> None:
    assert find(fleet(router=replace(router(**QUIET), status=status))) == ()


def with_ages(*ages: float, started_s: float = 3600.0) -> RouterFacts:
    told = router(**QUIET)
    samples = [({"pool": "workers", "worker": a}, age) for a, age in zip(ADDRESSES, ages, strict=True)]
    return replace(
        told, samples=told.samples | {"extproc_engine_signal_age_seconds": samples}, age_s=started_s
    )


def test_metrics_that_the_router_has_not_read_of_late() -> None:
    (found,) = find(fleet(router=with_ages(2.0, 31.0, 29.0, 40.0)))
    assert (found.check, [place.worker for place in found.places]) == (
        "stale-metrics",
        [ADDRESSES[1], ADDRESSES[3]],
    )
    (found,) = find(fleet(router=with_ages(math.inf, 1.0, 1.0, 1.0)))
    assert found.found.endswith("never read")
    assert find(fleet(router=with_ages(math.inf, 1.0, 1.0, 1.0, started_s=5.0))) == ()


def test_a_worker_that_is_gone_is_said_once() -> None:
    gone = WorkerFacts("workers", "", health_error="connection refused")
    told = with_ages(500.0, 1.0, 1.0, 1.0)
    states = [({"pool": "workers", "worker": ADDRESSES[0], "state": "ejected"}, 1.0)]
    told = replace(told, samples=told.samples | {"extproc_worker_state": states})
    assert [f.check for f in find(fleet(gone, router=told))] == ["unreachable"]
    assert sorted(f.check for f in find(fleet(router=told))) == ["stale-metrics", "workers-out"]


def test_a_router_on_another_file() -> None:
    told = router(**QUIET)
    labels = told.samples["extproc_inflight_requests"]
    other = [*labels[:3], ({"pool": "workers", "worker": "10.0.0.1:8000"}, 0.0)]
    told = replace(told, samples=told.samples | {"extproc_inflight_requests": other})
    (found,) = find(fleet(router=told))
    assert found.check == "router-workers"
    assert ADDRESSES[3] in found.found
    assert "10.0.0.1:8000" in found.found


def test_who_can_not_be_asked() -> None:
    found = find(fleet(router=RouterFacts("u", error="no"), envoy=EnvoyFacts("v", error="no")))
    assert [(f.check, f.severity) for f in found] == [("router", ERROR), ("envoy", ERROR)]


# --- Envoy ---------------------------------------------------------------------------------------

STARTED = {"http.inference.ext_proc.streams_started": 1000}

COUNTED = {
    "413": ({"http.inference.downstream_rq_too_large": 1}, "envoy-413"),
    "breaker": ({"cluster.workers.upstream_rq_pending_overflow": 3}, "envoy-limits"),
    "router's breaker": ({"cluster.ext_proc.upstream_rq_pending_overflow": 3}, "envoy-limits"),
    "retries": ({"cluster.workers.upstream_rq_retry_overflow": 1}, "envoy-limits"),
    "late": (STARTED | {"http.inference.ext_proc.message_timeouts": 9}, "envoy-unsteered"),
    "without us": (STARTED | {"http.inference.ext_proc.failure_mode_allowed": 9}, "envoy-unsteered"),
}


@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED)
def test_what_envoy_counted(case: tuple[dict[str, int], str]) -> None:
    stats, check = case
    envoy = EnvoyFacts("http://127.0.0.1:9901", version=(1, 40), stats=stats)
    assert [f.check for f in find(fleet(envoy=envoy))] == [check]


def test_what_envoy_counted_and_is_nothing() -> None:
    stats = STARTED | {
        "cluster.others.upstream_rq_pending_overflow": 3,
        "http.inference.ext_proc.message_timeouts": 4,
        "listener.0.0.0.0_80.http.inference.downstream_rq_too_large": 4,
        "http.inference.ext_proc.rejected_header_mutations": 4,
    }
    assert find(fleet(envoy=EnvoyFacts("http://127.0.0.1:9901", version=(1, 40), stats=stats))) == ()


def test_ports_that_others_can_reach() -> None:
    told = replace(router(**QUIET), exposed="10.0.0.1:9090")
    envoy = EnvoyFacts("http://127.0.0.1:9901", version=(1, 40), exposed="10.0.0.1:9901")
    found = find(fleet(router=told, envoy=envoy))
    assert [(f.check, f.severity) for f in found] == [("admin-exposed", WARNING), ("router-exposed", NOTE)]


# --- how it is told ------------------------------------------------------------------------------


def test_told_to_people_and_to_programs() -> None:
    many = [replace(WELL, step_over=8192)] * 4
    odd = fleet(*many, router=router(**QUIET | {"moved_total": 60.0}))
    verdict = run(CHECKS, odd)
    text = show(verdict, odd)
    assert text.splitlines()[0] == "warning  worker 127.0.0.1:8001 of pool workers"
    assert "         fix: --enable-chunked-prefill --max-num-batched-tokens 2048" in text
    assert f"2 warnings with 4 workers, {verdict.looked_at} settings checked" in text
    assert "not looked at: the running Envoy (--envoy-admin)" in text
    assert max(map(len, text.splitlines())) <= 110
    told = json.loads(json.dumps(as_json(verdict, odd)))
    assert [finding["check"] for finding in told["findings"]] == ["large-steps", "moved"]
    assert told["findings"][0]["places"][0] == {"pool": "workers", "worker": "127.0.0.1:8001"}
    assert (told["workers"], told["settings_checked"]) == (4, verdict.looked_at)


def test_what_a_server_says_commands_no_terminal() -> None:
    odd = fleet(replace(WELL, version="0.31\x1b[2J\n"))
    verdict = run(CHECKS, odd)
    assert "0.31?[2J?" in show(verdict, odd)


def test_nothing_wrong_in_one_line() -> None:
    well = fleet(router=router(**QUIET), envoy=EnvoyFacts("http://127.0.0.1:9901", version=(1, 40)))
    verdict = run(CHECKS, well)
    assert show(verdict, well) == f"nothing wrong with 4 workers, {verdict.looked_at} settings checked"
    assert verdict.looked_at > 50


def test_many_places_are_cut_for_people() -> None:
    places = tuple(Place(pool="p", worker=f"10.0.0.{i}:8000") for i in range(128))
    verdict = Verdict((Finding(ERROR, places, "can't be reached", "Why.", "fix", check="unreachable"),), 1)
    assert "and 122 more" in show(verdict, fleet())
    assert len(as_json(verdict, fleet())["findings"][0]["places"]) == 128


def test_the_checks_have_names_of_their_own_and_are_documented() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    table = (FILE.parents[1] / "docs" / "doctor.md").read_text()
    for check in CHECKS:
        assert f"| `{check.name}` | {check.about} |" in table


# --- pages ---------------------------------------------------------------------------------------


def test_histograms_tell_the_largest() -> None:
    page = "\n".join(
        f'vllm:request_prompt_tokens_bucket{{engine="{engine}",le="{le}",model_name="m"}} {count}'
        for engine, counts in (("0", (1, 4, 4, 4)), ("1", (0, 2, 3, 3)))
        for le, count in zip(("100.0", "1000.0", "2000.0", "+Inf"), counts, strict=True)
    )
    _, largest, steps = pages.engine_extras(page)
    assert (largest, steps) == (1000, 0)
    beyond = page.replace('le="+Inf",model_name="m"} 3', 'le="+Inf",model_name="m"} 5')
    assert pages.engine_extras(beyond)[1] == 2000
    assert pages.engine_extras("") == ({}, 0, 0)


def test_other_pages() -> None:
    assert pages.version(b'{"version": "0.32.0"}') == "0.32.0"
    assert pages.version(b"<html>") is None
    assert pages.models(b'{"data": [{"id": "b", "max_model_len": 9}, {"id": "a"}, 3]}') == (("a", "b"), 9)
    assert pages.models(b'{"error": "unauthorized"}') == ((), None)
    told = b'{"version": "0.5.6", "chunked_prefill_size": -1, "disable_radix_cache": true}'
    assert pages.server_info(told) == ("0.5.6", -1, False)
    assert pages.server_info(b"[]") == (None, None, None)
    assert pages.envoy_version(b'{"version": "9e55/1.40.0/Clean/RELEASE/BoringSSL"}') == (1, 40)
    assert pages.envoy_version(b'{"version": "abc/1.41.0-dev/Modified/DEBUG/BoringSSL"}') == (1, 41)
    assert pages.envoy_version(b'{"version": "0.32.0"}') is None
    assert pages.envoy_stats("a.b: 3\nh: P0(nan,1) P99(2,3)\nc:d.e: 4\n") == {"a.b": 3, "c:d.e": 4}
