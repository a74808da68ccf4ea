"""The doctor at set-ups that run: nothing to say of ours under traffic; Envoy's counters by their names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from traffic import Client, client, prompt

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig
from extproc.doctor.check import run
from extproc.doctor.checks import CHECKS
from extproc.doctor.finding import Finding
from extproc.doctor.fleet import Fleet
from extproc.doctor.gather import Wanted, gather, own_addresses
from extproc.doctor.manifests import read

pytestmark = pytest.mark.e2e


async def examine(stack: Stack) -> tuple[Fleet, tuple[Finding, ...]]:
    wanted = Wanted(
        server=stack.metrics_url, envoy_admin=stack.admin_url, timeout_s=30.0, own_addresses=own_addresses()
    )
    fleet = await gather(read(stack.envoy_config), wanted)
    return fleet, run(CHECKS, fleet).findings


def patient(bootstrap: envoy_setup.Json) -> None:
    """Bounds that a machine without time doesn't reach: then there would be something wrong indeed."""
    for ext_proc in envoy_setup.ext_proc_filters(bootstrap):
        ext_proc["message_timeout"] = "60s"
    for cluster in envoy_setup.pool_clusters(bootstrap):
        settings = cluster["metadata"]["filter_metadata"]["extproc"]
        settings |= {"silence_s": 0, "header_timeout_s": 0, "health_timeout_s": 60, "scrape_timeout_s": 60}


@pytest.fixture(scope="module", params=["envoy.yaml", "cluster-per-worker.yaml"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    arguments = ("--speedup", "20")
    config = StackConfig(workers=4, envoy_yaml=request.param, worker_arguments=arguments, edit=patient)
    with Stack(config) as running:
        yield running


async def keep_asking(c: Client, number: int, enough: asyncio.Event) -> None:
    turn = 0
    while not enough.is_set():
        turn += 1
        answer = await c.ask(prompt(number) + f" Turn {turn}?", max_tokens=20, stream=turn % 2 == 0)
        assert answer.status == 200, answer


async def test_nothing_wrong_under_traffic_and_one_thing_when_a_worker_is_gone(stack: Stack) -> None:
    enough = asyncio.Event()
    async with client(stack) as c:
        asking = [asyncio.create_task(keep_asking(c, number, enough)) for number in range(8)]
        fleet, found = await examine(stack)
        enough.set()
        await asyncio.gather(*asking)
        assert found == ()
        assert len(fleet.workers) == 4
        assert fleet.envoy_version is not None
        assert fleet.envoy_version >= (1, 37)
        assert fleet.router is not None
        assert fleet.router.status is not None
        assert [pool.name for pool in fleet.router.status.pools] == ["workers"]
        stack.workers[2].kill()
        for number in range(8):
            assert (await c.ask(prompt(number))).status == 200
        _, (found_gone,) = await examine(stack)
    assert found_gone.check == "unreachable"
    assert [place.worker for place in found_gone.places] == [f"127.0.0.1:{stack.worker_ports[2]}"]


def narrow(bootstrap: envoy_setup.Json) -> None:
    """A small buffer, one request at a time, and a router that is never in time."""
    bootstrap["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 65_536
    for route in envoy_setup.routes(bootstrap):
        route.pop("request_body_buffer_limit", None)
    for cluster in envoy_setup.pool_clusters(bootstrap):
        cluster["circuit_breakers"]["thresholds"][0] |= {"max_requests": 1, "max_pending_requests": 1}
    for ext_proc in envoy_setup.ext_proc_filters(bootstrap):
        ext_proc["message_timeout"] = "0.000001s"


async def test_what_envoy_counts_is_found_by_its_name() -> None:
    config = StackConfig(workers=1, edit=narrow, worker_arguments=("--speedup", "20"))
    with Stack(config) as running:
        async with client(running) as c:
            slow = {"fail": "delay", "seconds": 2}
            answers = await asyncio.gather(*(c.ask(prompt(number), emulate=slow) for number in range(8)))
            assert {answer.status for answer in answers} == {200, 503}
            assert (await c.ask(prompt(9, chars=100_000))).status == 413
            fleet, found = await examine(running)
    assert fleet.envoy is not None
    assert fleet.envoy.stats["http.inference.downstream_rq_too_large"] == 1
    assert {"envoy-413", "envoy-limits", "envoy-unsteered"} == {
        finding.check for finding in found if finding.check.startswith("envoy")
    }
