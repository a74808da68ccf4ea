"""What affinity does for three real engines: real Envoy and the router against Envoy's own round robin."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import pytest
import real_vllm
from prometheus_client.parser import text_string_to_metric_families
from sequence import VOCABULARY

from extproc.demo.process import free_ports
from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 3
PROMPTS = 12
PROMPT_TOKENS = 3072
QUESTION_TOKENS = 24
REQUESTS = 120
OUTPUT_TOKENS = 8
STREAMS = 2
#: Holds five of the prompts: twelve thrash one worker, four each fit.
NUM_BLOCKS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """``hits``: share of prompt tokens that the engines had cached, by their own counters."""

    name: str
    hits: float
    ttft_s: list[float]
    wall_s: float

    @property
    def p50_s(self) -> float:
        return statistics.median(self.ttft_s)

    def __str__(self) -> str:
        p90_s = statistics.quantiles(self.ttft_s, n=10)[-1]
        mean_s = statistics.mean(self.ttft_s)
        return (
            f"{self.name:12} hits {self.hits:6.1%}  TTFT p50 {self.p50_s * 1e3:5.0f} ms  "
            f"p90 {p90_s * 1e3:5.0f} ms  mean {mean_s * 1e3:5.0f} ms  {REQUESTS / self.wall_s:4.1f} req/s"
        )


@pytest.fixture(scope="module")
def servers(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    with real_vllm.serve(lab, free_ports(WORKERS), NUM_BLOCKS, folder) as servers:
        yield servers


@pytest.fixture(scope="module")
def stack(servers):
    ports = tuple(server.port for server in servers)
    with Stack(StackConfig(worker_ports=ports, round_robin=True)) as stack:
        yield stack


async def test_the_router_reads_real_engines(servers, stack):
    sizes: dict[str, float] = {}
    deadline_s = time.monotonic() + 60
    while len(sizes) < WORKERS:
        assert time.monotonic() < deadline_s, sizes
        sizes = {s.labels["worker"]: s.value for s in await scrape(stack, "extproc_engine_cache_tokens")}
        await asyncio.sleep(0.1)
    assert set(sizes) == {server.address for server in servers}
    # vLLM's own figure counts the placeholder, and may lack a token by rounding.
    for size in sizes.values():
        assert servers[0].cache_tokens <= size <= NUM_BLOCKS * real_vllm.BLOCK_TOKENS


async def test_affinity_is_real(servers, stack, show):
    round_robin = await measure("round robin", stack.round_robin_url, servers)
    routed = await measure("router", stack.url, servers)
    # Each prompt is computed once, and what follows it always.
    possible = (1 - PROMPTS / REQUESTS) * PROMPT_TOKENS / (PROMPT_TOKENS + QUESTION_TOKENS)
    show(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, {WORKERS} engines; hits possible: {possible:.1%}")
    show(str(round_robin))
    show(str(routed))
    (cached,), (asked,) = [
        await scrape(stack, f"extproc_{name}_tokens_total") for name in ("cached", "prompt")
    ]
    show(f"the router believed {cached.value / asked.value:.1%}")
    assert cached.value / asked.value == pytest.approx(routed.hits, abs=0.02)
    assert routed.hits >= 0.88
    assert routed.p50_s < round_robin.p50_s / 2


async def measure(name: str, url: str, servers: list[real_vllm.Server], seed: int = 7) -> Outcome:
    """The same requests to either way in, from empty caches on."""
    rng = Random(seed)
    prompts = [rng.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(PROMPTS)]
    # Each prompt at least once, else fewer first misses than PROMPTS are the ceiling.
    order = [*range(PROMPTS), *(rng.randrange(PROMPTS) for _ in range(REQUESTS - PROMPTS))]
    rng.shuffle(order)
    bodies = [body(prompts[index] + rng.choices(VOCABULARY, k=QUESTION_TOKENS)) for index in order]
    for server in servers:
        server.reset()
        server.complete(prompt=[VOCABULARY[0]] * 64, max_tokens=2)  # the first request after a pause is slow
    before = [counters(server) for server in servers]
    waiting = iter(bodies)
    ttft_s: list[float] = []

    async def stream(session: aiohttp.ClientSession) -> None:
        ttft_s.extend([await ask(session, url, request) for request in waiting])

    started_s = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        await asyncio.gather(*(stream(session) for _ in range(STREAMS)))
    wall_s = time.monotonic() - started_s
    grown = [
        (new[0] - old[0], new[1] - old[1])
        for new, old in zip([counters(server) for server in servers], before, strict=True)
    ]
    assert sum(queries for queries, _ in grown) == REQUESTS * (PROMPT_TOKENS + QUESTION_TOKENS)
    return Outcome(name, sum(hits for _, hits in grown) / sum(q for q, _ in grown), ttft_s, wall_s)


async def scrape(stack: Stack, name: str) -> list[Any]:
    """The router's own samples of one name."""
    async with aiohttp.ClientSession() as session, session.get(stack.metrics_url) as response:
        families = text_string_to_metric_families(await response.text())
    return [sample for family in families for sample in family.samples if sample.name == name]


def counters(server: real_vllm.Server) -> tuple[float, float]:
    return server.counter("prefix_cache_queries_total"), server.counter("prefix_cache_hits_total")


def body(prompt: list[int]) -> dict[str, Any]:
    fields = {"model": real_vllm.MODEL_NAME, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
    return fields | {"temperature": 0, "ignore_eos": True, "stream": True}


async def ask(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> float:
    """Seconds until the first event, not the headers, which come at once."""
    started_s = time.monotonic()
    first_s = 0.0
    last = b""
    async with session.post(url + "/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                first_s = first_s or time.monotonic() - started_s
                assert b'"error"' not in line, line
                last = line
    assert last.strip() == b"data: [DONE]", last
    return first_s
