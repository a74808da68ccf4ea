"""What goes wrong around a request, through real Envoy: workers, clients and the router itself failing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from mixed import KINDS, extend
from traffic import (
    COMPLETIONS,
    Answer,
    Client,
    addresses,
    at_rest,
    client,
    envoy_counter,
    metrics_when,
    prompt,
    scrape,
    until,
    whole,
)

from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e

WORKERS = 4
HASHED = "/prefix-hash" + COMPLETIONS


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    # Chunks of several tokens: the streams shall be long, not many packets.
    arguments = ("--speedup", "20", "--stream-interval", "20")
    with Stack(StackConfig(workers=WORKERS, worker_arguments=arguments, edit=extend)) as started:
        yield started


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Client]:
    # What one test did to the router and the workers shall not matter to the next.
    if not stack.router.running or not await all_healthy(stack):
        stack.router.restart()  # in this thread: Linux ends a child with the thread that started it
    async with client(stack) as opened:
        yield opened


async def all_healthy(stack: Stack) -> bool:
    metrics = await scrape(stack)
    states = [
        metrics.total("extproc_worker_state", worker=worker, state="healthy") for worker in addresses(stack)
    ]
    return states == [1] * WORKERS


# --- 600 requests ------------------------------------------------------------------------------------


async def test_every_count_ends_at_zero(stack: Stack, http: Client) -> None:
    busy = asyncio.Semaphore(24)

    async def one(index: int) -> str:
        async with busy:
            return await KINDS[index % len(KINDS)](http, prompt(index % 37))

    results = Counter(await asyncio.gather(*[one(index) for index in range(600)]))
    for url in stack.worker_urls:  # some may still be armed
        async with http.session.delete(url + "/emulate") as disarmed:
            assert disarmed.status == 200
    assert results.total() == 600
    assert len(results) == len(set(KINDS))
    metrics = await at_rest(stack)
    decided, ended = metrics.total("extproc_decisions_total"), metrics.total("extproc_ended_total")
    assert decided == ended
    assert decided >= 400
    assert metrics.total("extproc_internal_errors_total") == 0
    assert metrics.total("extproc_moved_total") > 0, "no pick was dead"
    async with asyncio.timeout(30):  # the engines, too, have let go of everything
        for url in stack.worker_urls:
            while "vllm:num_requests_running{" in (text := await _get(http, url + "/metrics")):
                running = [
                    line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
                ]
                if running[0].endswith(" 0.0"):
                    break
                await asyncio.sleep(0.05)


async def _get(http: Client, url: str) -> str:
    async with http.session.get(url) as response:
        return await response.text()


async def test_a_dead_pick_is_served_by_the_next(stack: Stack, http: Client) -> None:
    """Every prompt has a live worker, and it is the same one while the fleet is the same."""
    served: dict[str, set[str]] = {}
    for index in range(20):
        text = prompt(1000 + index)
        served[text] = {await http.worker_of(text, path=HASHED) for _ in range(3)}
    assert [len(workers) for workers in served.values()] == [1] * 20
    # Where prompts live is chance, as the ports are: a living worker may have none of the twenty.
    used = set().union(*served.values())
    assert used <= set(addresses(stack))
    assert len(used) > 1
    metrics = await at_rest(stack)
    (dead,) = metrics.workers() - set(addresses(stack))
    assert metrics.total("extproc_worker_state", worker=dead, state="healthy") == 0


# --- the router fails --------------------------------------------------------------------------------


class Load:
    """Closed-loop streams. ``failures``: what went wrong. ``streaming``: responses that are under way."""

    def __init__(self, http: Client) -> None:
        self.completed = 0
        self.streaming = 0
        self.failures: list[Any] = []
        self._http = http
        self._stopping = False

    async def run(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self._stopping:
            try:
                await self._one(prompt(2000 + chosen.randrange(20)))
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(error)

    async def _one(self, text: str) -> None:
        async with self._http.open(text, stream=True, max_tokens=300) as response:
            self.streaming += response.status == 200
            try:
                answer = await whole(response)
            finally:
                self.streaming -= response.status == 200
        if answer.status == 200 and answer.text.endswith("data: [DONE]\n\n"):
            self.completed += 1
        else:
            self.failures.append(answer)

    async def more(self, count: int) -> None:
        """Wait until so many more have completed, or one failed."""
        target = self.completed + count
        await until(lambda: self.completed >= target or bool(self.failures))

    async def until_streaming(self, count: int) -> None:
        """Wait until so many responses are under way."""
        await until(lambda: self.streaming >= count)

    def stop(self) -> None:
        self._stopping = True


@asynccontextmanager
async def load(http: Client, streams: int = 10) -> AsyncIterator[Load]:
    it = Load(http)
    tasks = [asyncio.create_task(it.run(index)) for index in range(streams)]
    try:
        yield it
    finally:
        it.stop()
        await asyncio.gather(*tasks)


async def test_killed_under_load_and_restarted(stack: Stack, http: Client) -> None:
    prompts = [prompt(3000 + index) for index in range(15)]
    home = {text: await http.worker_of(text, path=HASHED) for text in prompts}
    async with load(http) as running:
        await running.more(20)
        await running.until_streaming(5)
        stack.router.kill()
        await running.more(40)
        assert running.failures == []
        stack.router.start()
        await asyncio.to_thread(stack.router.wait_ready)
        await metrics_when(stack, lambda m: m.total("extproc_decisions_total") >= 20)
        await running.more(20)
    assert running.failures == []
    await at_rest(stack)
    for text in prompts:
        assert {await http.worker_of(text, path=HASHED) for _ in range(3)} == {home[text]}
        assert len({await http.worker_of(text) for _ in range(3)}) == 1
    await at_rest(stack)


async def test_terminated_under_load(stack: Stack, http: Client) -> None:
    async with load(http) as running:
        await running.more(20)
        await running.until_streaming(5)
        stack.router.terminate()
        await running.more(40)
        await until(lambda: not stack.router.running)
        await running.more(20)
    assert running.failures == []
    assert stack.router.stop() == 0


async def test_a_router_that_does_not_answer_delays_for_the_timeout_only(stack: Stack, http: Client) -> None:
    """It stays silent throughout, so what is answered was not waiting for it."""
    before = await envoy_counter(stack, "ext_proc.message_timeouts")
    delayed = {"fail": "delay", "seconds": 0.5}
    early = asyncio.create_task(http.ask(prompt(4000), stream=True, emulate=delayed))
    await metrics_when(stack, lambda m: sum(m.in_flight().values()) == 1)
    pid = stack.router.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        answers: list[Answer] = await asyncio.gather(*[http.ask(prompt(4001 + i)) for i in range(10)], early)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [answer.status for answer in answers] == [200] * 11
    assert await envoy_counter(stack, "ext_proc.message_timeouts") - before == 11
    await at_rest(stack)
    assert len({await http.worker_of(prompt(4100)) for _ in range(3)}) == 1


async def test_a_killed_envoy_leaves_no_count(stack: Stack, http: Client) -> None:
    async def hold(index: int) -> None:
        silent = {"fail": "hang", "after_tokens": 1}
        with suppress(aiohttp.ClientError):
            await http.ask(prompt(4500 + index), stream=True, max_tokens=9, emulate=silent)

    held = [asyncio.create_task(hold(index)) for index in range(8)]
    await metrics_when(stack, lambda m: sum(m.in_flight().values()) == 8)
    stack.envoy.kill()
    try:
        await asyncio.gather(*held)
        await at_rest(stack)
    finally:
        stack.envoy.start()
        await asyncio.to_thread(stack.envoy.wait_ready)
    assert len({await http.worker_of(prompt(4500), path=HASHED) for _ in range(3)}) == 1


async def test_without_a_router_all_workers_serve(stack: Stack, http: Client) -> None:
    await asyncio.to_thread(stack.router.stop)
    workers = {await http.worker_of(prompt(5000)) for _ in range(100)}
    assert workers == set(addresses(stack))
