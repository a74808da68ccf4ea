"""``extproc traffic``: agents' traffic for a stack that runs already, to see affinity at work.

So many clients in a closed loop, each request by one of a few agents with long prompts of their own. It goes
wherever ``--url`` says: the Compose set-up, an Envoy of yours, a single vLLM. A line every few seconds tells
what the clients saw. How requests were decided is told where Envoy's route asks the router for its debug
header, and what was cached where the engine tells it (vLLM: ``--enable-prompt-tokens-details``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

import aiohttp
import msgspec
import uvloop

from extproc.demo.loadgen import Result, ask
from extproc.demo.personas import Persona, make_persona, make_turn

_REASON = re.compile(r"reason=([a-z_]+)")
_PATIENCE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to, how much, how long."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8080", help="Envoy, or one engine (default: %(default)s)")
    add("--streams", type=int, default=8, help="clients in a closed loop (default: %(default)s)")
    add("--agents", type=int, default=12, help="distinct long prompts (default: %(default)s)")
    add("--prompt-tokens", type=int, default=6_000, help="of each, about (default: %(default)s)")
    add("--pause-s", type=float, default=0.5, help="of each client after an answer (default: %(default)s)")
    add("--model", help="default: the first that the engine names")
    add("--requests", type=int, help="end after so many")
    add("--seconds", type=float, help="end after so long; by default at Ctrl-C")
    add("--wait-s", type=float, default=60.0, help="for the stack to answer first (default: %(default)s)")
    add("--every-s", type=float, default=5.0, help="a line of figures (default: %(default)s)")
    add("--seed", type=int, default=1, help="of prompts and draws (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """0: some requests, and none failed. 1: some failed. 2: nothing answers there."""
    for name in ("streams", "agents", "prompt_tokens"):
        if getattr(args, name) < 1:
            print(
                f"extproc traffic: --{name.replace('_', '-')}: {getattr(args, name)} is less than 1",
                file=sys.stderr,
            )
            return 2
    if not args.url.startswith(("http://", "https://")):
        args.url = f"http://{args.url}"
    args.url = args.url.rstrip("/").removesuffix("/v1")
    return uvloop.run(_traffic(args))


async def _traffic(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        try:
            model = args.model or await _model(session, args.url, args.wait_s, stop)
        except (aiohttp.ClientError, OSError, TimeoutError, LookupError, msgspec.DecodeError) as error:
            print(f"extproc traffic: {args.url}/v1/models: {error or type(error).__name__}", file=sys.stderr)
            print(
                "Is --url the address of your Envoy, is it up, and are there workers behind it?",
                file=sys.stderr,
            )
            return 2
        if stop.is_set():
            return 130
        span = (max(1, args.prompt_tokens * 3 // 4), args.prompt_tokens * 5 // 4)
        agents = [make_persona(index, args.seed, model, span) for index in range(args.agents)]
        print(
            f"{args.streams} clients, {args.agents} agents with prompts of about"
            f" {args.prompt_tokens:,} tokens, model {model}, to {args.url}",
            flush=True,
        )
        load = _Load(session, args, agents)
        telling = asyncio.create_task(load.tell())
        loading = asyncio.create_task(load.run())
        stopping = asyncio.create_task(_wait(stop))
        await asyncio.wait([loading, stopping], timeout=args.seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (loading, telling, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    print(f"in all: {figures(load.results, time.monotonic() - load.begun_s)}", flush=True)
    failed = [result for result in load.results if result.error]
    if failed:
        print(f"the first failure: {failed[0].error}", file=sys.stderr)
    return 1 if failed or not load.results else 0


class _Load:
    """The clients and what they saw."""

    def __init__(
        self, session: aiohttp.ClientSession, args: argparse.Namespace, agents: Sequence[Persona]
    ) -> None:
        self.results: list[Result] = []
        self.begun_s = time.monotonic()
        self._session = session
        self._args = args
        self._agents = agents
        self._random = Random(f"{args.seed} traffic")
        self._sent = 0

    async def run(self) -> None:
        """All clients."""
        await asyncio.gather(*[self._client(number) for number in range(self._args.streams)])

    async def _client(self, number: int) -> None:
        """One client, until there have been enough requests."""
        await asyncio.sleep(self._args.pause_s * number / self._args.streams)
        while self._args.requests is None or self._sent < self._args.requests:
            agent = self._random.randrange(len(self._agents))
            result = Result(self._sent, agent, time.monotonic())
            self._sent += 1
            await ask(
                self._session, self._args.url, self._agents[agent].body(make_turn(self._random)), result
            )
            self.results.append(result)
            await asyncio.sleep(max(self._args.pause_s, 1.0 if result.error else 0.0))

    async def tell(self) -> None:
        """A line every few seconds."""
        told = 0
        while True:
            await asyncio.sleep(self._args.every_s)
            print(figures(self.results[told:], self._args.every_s), flush=True)
            told = len(self.results)


def figures(results: Sequence[Result], seconds: float) -> str:
    """What clients saw, on one line."""
    good = [result for result in results if not result.error]
    parts = [f"{len(results)} requests ({len(results) / max(seconds, 1e-9):.1f}/s)"]
    if len(good) < len(results):
        parts.append(f"{len(results) - len(good)} FAILED")
    tokens = sum(result.prompt_tokens for result in good)
    if tokens and any(result.cached_tokens for result in good):
        parts.append(f"cached {sum(result.cached_tokens for result in good) / tokens:.0%}")
    waits = sorted(result.ttft_s for result in good if result.ttft_s)
    if waits:
        p50, p99 = waits[len(waits) // 2], waits[min(len(waits) - 1, int(len(waits) * 0.99))]
        parts.append(f"TTFT p50 {p50 * 1000:,.0f} ms p99 {p99 * 1000:,.0f} ms")
    reasons = Counter(match[1] for result in good if (match := _REASON.search(result.decision)))
    if reasons:
        parts.append(" ".join(f"{reason} {count}" for reason, count in reasons.most_common()))
    return ", ".join(parts)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _model(session: aiohttp.ClientSession, url: str, wait_s: float, stop: asyncio.Event) -> str:
    """The first model that is served there; waits for the stack to come up."""
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(10)) as response:
                if response.status == 200:
                    models = msgspec.json.decode(await response.read())["data"]
                    return str(models[0]["id"])
                problem: Exception = LookupError(f"answers with status {response.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = error
        if time.monotonic() > deadline:
            raise problem
        if not told:
            told = True
            print(f"waiting for {url}, up to {wait_s:g} s ...", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _PATIENCE_S)
        if stop.is_set():
            return ""
