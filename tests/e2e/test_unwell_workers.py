"""Workers that fail, through real Envoy: no request is lost, they are left alone, and they come back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from traffic import Client, Metrics, addresses, at_rest, client, metrics_when, prompt, scrape

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e

WORKERS = 4


def quick(bootstrap: envoy_setup.Json) -> None:
    """Short bounds, so that the tests are."""
    pool = envoy_setup.pool_clusters(bootstrap)[0]
    pool["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA] |= {
        "eject_s": 1.0,
        "return_s": 0.5,
        "silence_s": 0.5,
        "header_timeout_s": 1.0,
        "health_interval_s": 0.2,
        "scrape_interval_s": 0.2,
    }


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    arguments = ("--speedup", "10", "--stream-interval", "10")
    with Stack(StackConfig(workers=WORKERS, worker_arguments=arguments, edit=quick)) as started:
        yield started


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Client]:
    await metrics_when(stack, lambda m: m.total("extproc_worker_state", state="healthy") == WORKERS)
    async with client(stack) as opened:
        yield opened


def state(metrics: Metrics, worker: str) -> str:
    """The one that the worker is in."""
    (found,) = [
        s.labels["state"]
        for s in metrics.samples
        if s.name == "extproc_worker_state" and s.labels["worker"] == worker and s.value
    ]
    return found


def ejections(metrics: Metrics, cause: str) -> float:
    return metrics.total("extproc_ejections_total", cause=cause)


async def emulate(http: Client, worker: str, **fault: object) -> None:
    async with http.session.post(f"http://{worker}/emulate", json=fault) as armed:
        assert armed.status == 200


async def disarm(http: Client, worker: str) -> None:
    async with http.session.delete(f"http://{worker}/emulate") as disarmed:
        assert disarmed.status == 200


async def test_killed_and_started_again(stack: Stack, http: Client) -> None:
    text = prompt(1)
    home = await http.worker_of(text)
    process = stack.workers[addresses(stack).index(home)]
    await asyncio.to_thread(process.kill)
    try:
        others = {await http.worker_of(text) for _ in range(5)}
        assert home not in others
        await metrics_when(stack, lambda m: state(m, home) == "ejected")
        before = await scrape(stack)
        answers = await asyncio.gather(*[http.worker_of(prompt(100 + i)) for i in range(20)])
        assert home not in answers
        after = await scrape(stack)
        assert after.total("extproc_moved_total") == before.total("extproc_moved_total"), "it was picked"
    finally:
        process.start()
        await asyncio.to_thread(process.wait_ready)
    await metrics_when(stack, lambda m: state(m, home) == "healthy")
    seen = await asyncio.gather(*[http.worker_of(prompt(200 + i)) for i in range(40)])
    assert home in seen
    assert ejections(await at_rest(stack), "refused") >= 1


async def test_hanging_before_the_headers_costs_a_stream_the_timeout_only(stack: Stack, http: Client) -> None:
    text = prompt(2)
    home = await http.worker_of(text)
    before = await scrape(stack)
    await emulate(http, home, fail="hang", times=0)
    try:
        answer = await http.ask(text, stream=True, max_tokens=5)
        assert answer.status == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.worker != home
        hung = await metrics_when(stack, lambda m: ejections(m, "silent") > ejections(before, "silent"))
        assert hung.total("extproc_ejections_total", cause="refused") == ejections(before, "refused")
    finally:
        await disarm(http, home)
    await metrics_when(stack, lambda m: state(m, home) == "healthy")
    await at_rest(stack)


async def test_a_long_stream_and_a_long_answer_outlive_the_timeout(http: Client) -> None:
    """1.0 s is for the headers; these take about 2 s."""
    for stream in (True, False):
        answer = await http.ask(prompt(3), stream=stream, max_tokens=1200)
        assert answer.status == 200
        assert '"error"' not in answer.text


async def test_stopped_and_continued(stack: Stack, http: Client) -> None:
    text = prompt(4)
    home = await http.worker_of(text)
    pid = stack.workers[addresses(stack).index(home)].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*[http.ask(text, stream=True) for _ in range(5)])
        assert [answer.status for answer in answers] == [200] * 5
        await metrics_when(stack, lambda m: state(m, home) != "healthy")
        assert home not in {await http.worker_of(prompt(300 + i), stream=True) for i in range(10)}
    finally:
        os.kill(pid, signal.SIGCONT)
    await metrics_when(stack, lambda m: state(m, home) == "healthy")
    await at_rest(stack)


async def test_only_503s_are_avoided(stack: Stack, http: Client) -> None:
    text = prompt(5)
    home = await http.worker_of(text)
    before = await scrape(stack)
    await emulate(http, home, fail=503, times=0)
    try:
        for i in range(12):
            assert await http.worker_of(text if i < 4 else prompt(400 + i)) != home
        await metrics_when(stack, lambda m: ejections(m, "unreached") > ejections(before, "unreached"))
    finally:
        await disarm(http, home)
    await metrics_when(stack, lambda m: state(m, home) == "healthy")


async def test_terminated_it_ends_its_streams_and_gets_no_new_prompts(stack: Stack, http: Client) -> None:
    text = prompt(6)
    home = await http.worker_of(text)
    process = stack.workers[addresses(stack).index(home)]
    async with http.open(text, stream=True, max_tokens=1500) as response:
        await response.content.readany()
        process.terminate()
        await metrics_when(stack, lambda m: state(m, home) != "healthy")
        assert home not in {await http.worker_of(prompt(500 + i)) for i in range(10)}
        assert (await scrape(stack)).in_flight().get(home) == 1
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await asyncio.to_thread(process.stop)
    process.start()
    await asyncio.to_thread(process.wait_ready)
    await metrics_when(stack, lambda m: state(m, home) == "healthy")
    await at_rest(stack)


@pytest.mark.parametrize("lie", [{"fail": "freeze"}, {"fail": "lag", "seconds": 10}, {"fail": "zero"}])
async def test_gauges_that_lie_draw_no_load(stack: Stack, http: Client, lie: dict[str, object]) -> None:
    """The load is told by the router's own account."""
    liar = addresses(stack)[0]
    await emulate(http, liar, **lie)
    names = random.Random(str(lie))
    load: Counter[str] = Counter()

    async def stream() -> None:
        for _ in range(6):
            answer = await http.ask(prompt(names.randrange(10_000, 10**9)), stream=True, max_tokens=100)
            assert answer.status == 200

    async def sample() -> None:
        while True:
            await asyncio.sleep(0.05)
            load.update((await scrape(stack)).in_flight())

    sampling = asyncio.create_task(sample())
    try:
        await asyncio.gather(*[stream() for _ in range(32)])
    finally:
        sampling.cancel()
        await disarm(http, liar)
    mean = load.total() / WORKERS
    assert mean > 0
    assert max(load.values()) < 1.5 * mean, load
    await at_rest(stack)
