"""The set-up with a cluster per worker and `cluster_header`, through real Envoy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest
from traffic import Client, addresses, at_rest, client, envoy_counter, metrics_when, prompt

from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    config = StackConfig(
        workers=4, worker_arguments=("--speedup", "100"), envoy_yaml="cluster-per-worker.yaml"
    )
    with Stack(config) as started:
        yield started


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Client]:
    async with client(stack) as opened:
        yield opened
    await at_rest(stack)


async def test_each_prompt_goes_to_its_workers_cluster(stack: Stack, http: Client) -> None:
    for text in [prompt(index) for index in range(20)]:
        home = await http.worker_of(text)
        cluster = f"cluster.worker-{addresses(stack).index(home) + 1}.upstream_rq_total"
        before = await envoy_counter(stack, cluster)
        assert {await http.worker_of(text) for _ in range(4)} == {home}
        assert await envoy_counter(stack, cluster) - before == 4
    metrics = await at_rest(stack)
    assert metrics.workers() == set(addresses(stack))
    assert metrics.total("extproc_moved_total") == 0
    assert await envoy_counter(stack, "cluster.workers.upstream_rq_total") == 0


async def test_mixed_ends_leave_no_count(stack: Stack, http: Client) -> None:
    silent = {"fail": "hang", "after_tokens": 1}

    async def one(index: int) -> None:
        text = prompt(100 + index % 10)
        if index % 3 == 0:
            assert await http.worker_of(text)
        elif index % 3 == 1:
            async with http.open(text, stream=True, max_tokens=20, emulate=silent) as response:
                assert response.status == 200
                response.close()
        else:
            assert (await http.ask(text, emulate={"fail": "reset"})).status == 503

    await asyncio.gather(*[one(index) for index in range(60)])
    metrics = await at_rest(stack)
    assert metrics.total("extproc_decisions_total") == metrics.total("extproc_ended_total")


async def test_a_503_is_followed_by_the_next_worker(stack: Stack, http: Client) -> None:
    home = await http.worker_of(prompt(200))
    for _ in range(5):
        async with http.session.post(f"http://{home}/emulate", json={"fail": 503}) as armed:
            assert armed.status == 200
        assert await http.worker_of(prompt(200)) != home
        assert await http.worker_of(prompt(200)) in addresses(stack)
    assert (await at_rest(stack)).total("extproc_moved_total") > 0


async def test_a_dead_worker_costs_no_request(stack: Stack, http: Client) -> None:
    victim = random.choice(stack.workers)
    address = addresses(stack)[stack.workers.index(victim)]
    victim.kill()
    try:
        workers = {await http.worker_of(prompt(300 + index)) for index in range(40)}
        # Every one was answered, by the living; chance may leave one of those out.
        assert workers <= set(addresses(stack)) - {address}
        assert len(workers) > 1
    finally:
        victim.start()
        await asyncio.to_thread(victim.wait_ready)


async def test_without_a_router_all_workers_serve(stack: Stack, http: Client) -> None:
    before = await envoy_counter(stack, "cluster.workers.upstream_rq_total")
    await asyncio.to_thread(stack.router.stop)
    try:
        workers = {await http.worker_of(prompt(400)) for _ in range(100)}
    finally:
        stack.router.start()
        await asyncio.to_thread(stack.router.wait_ready)
    assert workers == set(addresses(stack))
    assert await envoy_counter(stack, "cluster.workers.upstream_rq_total") - before == 100
    home = await http.worker_of(prompt(400))
    assert {await http.worker_of(prompt(400)) for _ in range(5)} == {home}
    await metrics_when(stack, lambda m: m.total("extproc_decisions_total") >= 6)
