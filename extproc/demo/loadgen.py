"""Closed-loop streams: each sends its next request when its last one has ended. One asyncio process.

TTFT is what a user sees: from sending the request to the first chunk with content, not to the headers, which
come at once. Times are wall seconds; divide by nothing, multiply by the workers' speedup for model seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import msgspec

from extproc.demo.personas import Persona, Workload, make_turn
from extproc.emulator.worker_http import WORKER_HEADER
from extproc.exchange import DEBUG_HEADER

_TIMEOUT_S = 300.0
_HEADERS = {"content-type": "application/json"}
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(slots=True)
class Result:
    """One request; wall seconds, ``start_s`` and ``end_s`` on the monotonic clock.

    ``error``: why it failed, "" if it didn't. ``worker``: who answered. ``decision``: the debug header.
    ``headers_s``: until the response's headers.
    """

    index: int
    persona: int
    start_s: float
    end_s: float = 0.0
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    worker: str = ""
    decision: str = ""
    error: str = ""
    headers_s: float = 0.0


async def run(
    url: str,
    workload: Workload,
    personas: Sequence[Persona],
    *,
    requests: int,
    seed: int,
    done: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Send ``requests`` chat completions to ``url`` (without a path); results in the order of their start.

    ``done`` is called after each. Failures are results, not exceptions.
    """
    results: list[Result] = []
    turns = Random(f"{seed} turns")
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def stream(number: int, draws: Any) -> None:
            while len(results) < requests:
                persona = next(draws)
                result = Result(len(results), persona, time.monotonic())
                results.append(result)
                await ask(session, url, personas[persona].body(make_turn(turns)), result)
                done(result)

        streams = enumerate(workload.draws(seed))
        await asyncio.gather(*(stream(number, draws) for number, draws in streams))
    return results


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, result: Result) -> None:
    """Send one streaming chat completion and fill in what came of it."""
    result.start_s = time.monotonic()
    try:
        async with session.post(url + "/v1/chat/completions", data=body, headers=_HEADERS) as response:
            result.headers_s = time.monotonic() - result.start_s
            result.worker = response.headers.get(WORKER_HEADER, "")
            result.decision = response.headers.get(DEBUG_HEADER, "")
            if response.status != 200:
                result.error = f"status {response.status}: {(await response.read())[:200]!r}"
            else:
                await _read_stream(response, result)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.end_s = time.monotonic()


async def _read_stream(response: aiohttp.ClientResponse, result: Result) -> None:
    finished = False
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if not event.startswith(_DATA):
                continue
            payload = event[len(_DATA) :]
            if payload == _DONE:
                finished = True
            elif b'"error"' in payload:
                result.error = f"error event: {payload[:200]!r}"
            elif not result.ttft_s and b'"content":"' in payload and b'"content":""' not in payload:
                result.ttft_s = time.monotonic() - result.start_s
            elif b'"usage":{' in payload:
                usage = msgspec.json.decode(payload)["usage"]
                result.prompt_tokens = usage["prompt_tokens"]
                result.completion_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}  # vLLM tells it only if asked to
                result.cached_tokens = details.get("cached_tokens") or 0
    if not finished and not result.error:
        result.error = "the stream ended without [DONE]"
