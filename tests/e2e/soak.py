"""Mixed requests in large numbers, or for a long time, while Envoy and the router die and come back.

``make soak REQUESTS=10000 RUNS=5`` sends so many at 200 in flight, kills Envoy and the router twice each in
every run, and demands that every count is exactly 0 afterwards. ``make soak SECONDS=3600`` goes by time and
lets the router live, to see whether its memory grows and whether one worker's share creeps up.
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

#: This part of a timed run doesn't count: pools of buffers, interned strings and the picture fill up.
WARM_UP_SHARE = 0.3


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
    """``at_s`` since the start; ``busiest``: largest share of the requests since the last sample."""

    at_s: float
    rss_bytes: float
    requests: int
    in_flight: float
    busiest: float


async def last_out(seconds: float, concurrent: int) -> None:
    """One run by time."""
    every_s = max(5.0, seconds / 60)
    samples: list[Sample] = []
    with set_up() as stack:
        async with client(stack) as http:
            soak = Soak(http, concurrent)
            begun = time.monotonic()
            running = asyncio.create_task(soak.run(None))
            served = await _served(stack)
            killed_s = begun
            while (now := time.monotonic()) < begun + seconds:
                await asyncio.sleep(min(every_s, begun + seconds - now))
                if time.monotonic() - killed_s > seconds / 8:
                    await soak.kill(stack.envoy)
                    killed_s = time.monotonic()
                metrics, before = await scrape(stack), served
                served = await _served(stack)
                since = served - before
                samples.append(
                    Sample(
                        time.monotonic() - begun,
                        metrics.total("process_resident_memory_bytes"),
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
    warm = [s for s in samples if s.at_s >= WARM_UP_SHARE * seconds]
    rss_per_s = slope([s.at_s for s in warm], [s.rss_bytes for s in warm])
    share_per_s = slope([s.at_s for s in warm], [s.busiest for s in warm])
    mean_rss = sum(s.rss_bytes for s in warm) / len(warm)
    print(
        f"after warm-up ({warm[0].at_s:.0f} s): memory {mean_rss / 2**20:.1f} MiB,"
        f" {rss_per_s * 3600 / mean_rss:+.2%} an hour ({rss_per_s * 3600 / 2**20:+.2f} MiB);"
        f" busiest worker's share {sum(s.busiest for s in warm) / len(warm):.3f},"
        f" {share_per_s * 3600:+.3f} an hour; all counts 0 at the end",
        flush=True,
    )


async def _served(stack: Stack) -> Counter[str]:
    """Requests that each worker has finished, as it counts them."""
    served: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        for url in stack.worker_urls:
            async with session.get(url + "/metrics") as response:
                served[url] = int(Metrics(await response.text()).total("vllm:request_success_total"))
    return served


def slope(x: list[float], y: list[float]) -> float:
    """Least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


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
            asyncio.run(last_out(args.seconds, args.concurrent))
        else:
            asyncio.run(count_out(args.requests, args.concurrent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
