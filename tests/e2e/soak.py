"""Mixed requests in large numbers, or for a long time, while Envoy and the router die and come back.

``make soak REQUESTS=10000 RUNS=5`` sends so many at 200 in flight, kills Envoy and the router twice each in
every run, and demands that every count is exactly 0 afterwards. ``make soak SECONDS=3600`` goes by time and
lets the router live, to see whether its memory grows and whether one worker's share creeps up. A short run
can't tell a slow growth from chance: look at what stands behind ±, which is twice the standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from statistics import median

import aiohttp
from mixed import KINDS, extend
from traffic import Client, Metrics, at_rest, client, metrics_when, prompt, scrape, until

from extproc.demo.process import Process
from extproc.demo.stack import Stack, StackConfig

WORKERS = 4
PROMPTS = 211
PROMPT_CHARS = 1200

#: Clients send less while Envoy or the router is away, so that most requests meet both.
RETREAT_S = 2.0

#: Memory is read so often, and a sample has the median: a single reading is off by megabytes either way.
READING_S = 5.0

#: This part of a timed run doesn't count: pools of buffers, interned strings and tables fill up.
WARM_UP_SHARE = 0.3

#: What an hour may add to the memory after that.
MAX_GROWTH_AN_HOUR = 0.02


@dataclass
class Tally:
    """What became of the requests. ``disturbed``: those during which Envoy or the router was away."""

    kinds: Counter[str] = field(default_factory=Counter)
    disturbed: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kinds.total() + self.disturbed + self.unexpected.total()


class Soak:
    """One set-up under mixed traffic."""

    def __init__(self, http: Client, concurrent: int) -> None:
        self.http = http
        self.stack = http.stack
        self.tally = Tally()
        self.sent = 0
        self._concurrent = concurrent
        self._disturbances = 0  # begun and ended ones; odd: one is under way
        self._going = True

    async def run(self, requests: int | None) -> None:
        """So many requests; None: until `stop`."""
        numbers = itertools.count() if requests is None else iter(range(requests))
        await asyncio.gather(*[self._client(numbers) for _ in range(self._concurrent)])
        for url in self.stack.worker_urls:  # some may still be armed
            async with self.http.session.delete(url + "/emulate"):
                pass

    def stop(self) -> None:
        self._going = False

    async def _client(self, numbers: itertools.count[int]) -> None:
        while self._going and (number := next(numbers, None)) is not None:
            if self._disturbances % 2:
                await asyncio.sleep(RETREAT_S)
            self.sent += 1
            await self._one(number)

    async def _one(self, number: int) -> None:
        kind = KINDS[number % len(KINDS)]
        before = self._disturbances
        try:
            done = await kind(self.http, prompt(random.randrange(PROMPTS), PROMPT_CHARS))
        except (aiohttp.ClientError, OSError, TimeoutError, AssertionError) as error:
            if self._disturbances != before or before % 2:
                self.tally.disturbed += 1
            else:
                self.tally.unexpected[f"{kind.__name__}: {type(error).__name__} {str(error)[:120]}"] += 1
        else:
            self.tally.kinds[done] += 1

    async def kill(self, process: Process) -> None:
        """SIGKILL, and a new start."""
        self._disturbances += 1
        process.kill()
        await asyncio.sleep(0.3)
        process.start()  # in this thread: Linux ends a child with the thread that started it
        await asyncio.to_thread(process.wait_ready)
        # Envoy and the router find each other again.
        decided = (await scrape(self.stack)).total("extproc_decisions_total")
        await metrics_when(self.stack, lambda m: m.total("extproc_decisions_total") > decided + 20)
        self._disturbances += 1

    async def expect_zero(self) -> Metrics:
        """Every count is exactly zero, and every decision has ended."""
        await at_rest(self.stack)
        metrics = await metrics_when(
            self.stack, lambda m: m.total("extproc_pending_prefill_tokens") == 0, timeout_s=60
        )
        decided = metrics.total("extproc_decisions_total")
        ended = metrics.total("extproc_ended_total")
        assert decided == ended, f"{decided - ended:.0f} decisions have no end"
        assert metrics.in_flight() == {}
        assert metrics.total("extproc_internal_errors_total") == 0
        return metrics


def set_up() -> Stack:
    arguments = ("--speedup", "50", "--stream-interval", "20")
    return Stack(StackConfig(workers=WORKERS, worker_arguments=arguments, edit=extend))


async def count_out(requests: int, concurrent: int) -> None:
    """One run by number."""
    with set_up() as stack:
        async with client(stack) as http:
            soak = Soak(http, concurrent)
            begun = time.monotonic()
            running = asyncio.create_task(soak.run(requests))
            victims = itertools.cycle((stack.envoy, stack.router))
            for step, process in zip(range(1, 5), victims, strict=False):
                due = step * requests // 5
                await until(lambda due=due: soak.sent >= due, timeout_s=600)
                await soak.kill(process)
            await running
            took_s = time.monotonic() - begun
            metrics = await soak.expect_zero()
    report(soak.tally)
    assert soak.tally.total == requests
    print(
        f"{requests:,} requests in {took_s:.0f} s; in flight 0, pending prefill tokens 0,"
        f" {metrics.total('extproc_decisions_total'):,.0f} decisions of the last router, all ended",
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """``at_s`` since the start; ``busiest``: a worker's largest share of the requests since the last one."""

    at_s: float
    rss_bytes: float
    requests: int
    in_flight: float
    busiest: float


async def last_out(seconds: float, concurrent: int) -> bool:
    """One run by time; False if the memory surely grows by more than it may."""
    every_s = max(READING_S, seconds / 60)
    samples: list[Sample] = []
    with set_up() as stack:
        async with client(stack) as http:
            soak = Soak(http, concurrent)
            begun = time.monotonic()
            running = asyncio.create_task(soak.run(None))
            served = await _served(stack)
            killed_s = begun
            while (now := time.monotonic()) < begun + seconds:
                readings = await _read_memory(stack, min(now + every_s, begun + seconds))
                if time.monotonic() - killed_s > seconds / 8:
                    await soak.kill(stack.envoy)
                    killed_s = time.monotonic()
                metrics, before = await scrape(stack), served
                served = await _served(stack)
                since = served - before
                samples.append(
                    Sample(
                        time.monotonic() - begun,
                        median(readings),
                        soak.tally.total,
                        metrics.total("extproc_inflight_requests"),
                        max(since.values(), default=0) / max(since.total(), 1),
                    )
                )
                show(samples[-1])
            soak.stop()
            await running
            await soak.expect_zero()
    report(soak.tally)
    print("all counts 0 at the end")
    warm = [sample for sample in samples if sample.at_s >= WARM_UP_SHARE * seconds]
    flat = [growth(part) for part in (warm, [s for s in warm if s.at_s >= seconds / 2])]
    return all(flat)


async def _read_memory(stack: Stack, until_s: float) -> list[float]:
    """The router's resident bytes, every `READING_S`, until then; at least once."""
    readings = []
    while not readings or time.monotonic() < until_s:
        await asyncio.sleep(min(READING_S, max(0.0, until_s - time.monotonic())))
        readings.append((await scrape(stack)).total("process_resident_memory_bytes"))
    return readings


def growth(samples: list[Sample]) -> bool:
    """Print how memory and the busiest worker's share change; whether memory may grow no more than it may."""
    at_s = [sample.at_s for sample in samples]
    rss = Line(at_s, [sample.rss_bytes for sample in samples])
    share = Line(at_s, [sample.busiest for sample in samples])
    requests = max(1, samples[-1].requests - samples[0].requests)
    grown_bytes = rss.slope * (at_s[-1] - at_s[0])
    print(
        f"from {at_s[0]:,.0f} s on: memory {rss.mean / 2**20:.1f} MiB,"
        f" {rss.slope * 3600 / rss.mean:+.2%} ± {2 * rss.error * 3600 / rss.mean:.2%} an hour,"
        f" {grown_bytes / requests:+.1f} bytes a request;"
        f" busiest worker's share {share.mean:.3f},"
        f" {share.slope * 3600:+.4f} ± {2 * share.error * 3600:.4f} an hour",
        flush=True,
    )
    return (rss.slope - 2 * rss.error) * 3600 / rss.mean < MAX_GROWTH_AN_HOUR


async def _served(stack: Stack) -> Counter[str]:
    """Requests that each worker has finished, as it counts them."""
    served: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        for url in stack.worker_urls:
            async with session.get(url + "/metrics") as response:
                served[url] = int(Metrics(await response.text()).total("vllm:request_success_total"))
    return served


class Line:
    """Least squares: ``mean``, ``slope``, and ``error``, the slope's standard error."""

    def __init__(self, x: list[float], y: list[float]) -> None:
        mean_x, self.mean = sum(x) / len(x), sum(y) / len(y)
        spread = sum((a - mean_x) ** 2 for a in x)
        self.slope, self.error = 0.0, inf
        if len(x) > 2:
            self.slope = sum((a - mean_x) * (b - self.mean) for a, b in zip(x, y, strict=True)) / spread
            off = [b - self.mean - self.slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
            self.error = (sum(each**2 for each in off) / (len(x) - 2) / spread) ** 0.5


def show(sample: Sample) -> None:
    print(
        f"{sample.at_s:>7.0f} s {sample.rss_bytes / 2**20:>8.2f} MiB {sample.requests:>9,} requests"
        f" {sample.in_flight:>5.0f} in flight, busiest worker {sample.busiest:.3f}",
        flush=True,
    )


def report(tally: Tally) -> None:
    for kind, count in sorted(tally.kinds.items()):
        print(f"{count:>8,} {kind}")
    print(f"{tally.disturbed:>8,} while Envoy or the router was away")
    for what, count in tally.unexpected.most_common():
        print(f"{count:>8,} UNEXPECTED {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=10_000, help="requests in a run (default %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=1, help="default %(default)s")
    parser.add_argument("--seconds", type=float, help="go by time instead")
    parser.add_argument("--concurrent", type=int, default=200, help="requests at once (default %(default)s)")
    args = parser.parse_args()
    for _ in range(args.runs):
        if args.seconds:
            if not asyncio.run(last_out(args.seconds, args.concurrent)):
                print(f"memory grows by more than {MAX_GROWTH_AN_HOUR:.0%} an hour")
                return 1
        else:
            asyncio.run(count_out(args.requests, args.concurrent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
