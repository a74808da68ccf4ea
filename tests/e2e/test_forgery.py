"""Only the router steers: clients that send the routing headers themselves gain nothing, in either set-up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from traffic import Client, addresses, client, endpoints, port_of, prompt

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e

PICK = "x-gateway-destination-endpoint"
CLUSTER = "x-extproc-cluster"


def without_the_last(bootstrap: envoy_setup.Json) -> None:
    """The last worker runs, but Envoy and the router don't know it."""
    clusters = bootstrap["static_resources"]["clusters"]
    assignments = [c["load_assignment"] for c in clusters if c["name"] != "ext_proc"]
    every = [e for a in assignments for locality in a["endpoints"] for e in locality["lb_endpoints"]]
    last = port_of(every[-1])
    clusters[:] = [c for c in clusters if port_of(endpoints(c)[0]) != last]
    for assignment in assignments:
        for locality in assignment["endpoints"]:
            locality["lb_endpoints"] = [e for e in locality["lb_endpoints"] if port_of(e) != last]


@pytest.fixture(scope="module", params=["envoy.yaml", "cluster-per-worker.yaml"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    config = StackConfig(
        workers=4,
        worker_arguments=("--speedup", "100"),
        envoy_yaml=request.param,
        edit=without_the_last,
    )
    with Stack(config) as started:
        yield started


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Client]:
    async with client(stack) as opened:
        yield opened


def forgeries(stack: Stack) -> list[dict[str, str]]:
    """Ways to ask for a certain worker, for one that isn't in the pool, and for what isn't a worker."""
    known = addresses(stack)[:3]
    outsider = addresses(stack)[3]
    values = [*known, outsider, f"{outsider},{known[0]}", "nonsense", ""]
    names = ["worker-1", "worker-2", "worker-3", "worker-4", "ext_proc", "workers", "nonsense", ""]
    return [
        *[{PICK: value} for value in values],
        *[{PICK.title(): value} for value in values[:1]],
        *[{CLUSTER: name} for name in names],
        *[{CLUSTER.upper(): name} for name in names[:1]],
        {PICK: outsider, CLUSTER: "ext_proc"},
    ]


async def test_a_forged_header_never_steers(stack: Stack, http: Client) -> None:
    home = await http.worker_of(prompt(1))
    for forged in forgeries(stack):
        assert await http.worker_of(prompt(1), headers=forged) == home, forged
    unreadable = {await http.worker_of("", headers={PICK: addresses(stack)[0]}) for _ in range(40)}
    assert unreadable == set(addresses(stack)[:3])


async def test_a_forged_header_never_steers_without_a_router(stack: Stack, http: Client) -> None:
    await asyncio.to_thread(stack.router.stop)
    try:
        for forged in forgeries(stack):
            # Every worker takes its share, so nothing chose one.
            workers = {await http.worker_of(prompt(1), headers=forged) for _ in range(25)}
            assert workers == set(addresses(stack)[:3]), forged
    finally:
        stack.router.start()
        await asyncio.to_thread(stack.router.wait_ready)
