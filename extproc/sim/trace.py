"""Recorded traffic as a workload.

Two formats of JSON lines, told apart by their first line:

- *Mooncake*: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens), ``hash_ids`` (one per block of
  512 tokens; equal ids at the start of two requests are a shared prefix). Source: the traces published with
  the Mooncake paper (FAST'25).
- *OpenAI*: request bodies as clients send them, bare or as ``{"timestamp": seconds, "body": {…}}``, with an
  optional ``path`` (otherwise guessed from the body) and ``output_tokens``. They are read and hashed by the
  server's own code, so the simulation sees what the router would see.

Timestamps are divided by ``speedup``, which sets the load. Without timestamps, requests come by Poisson at
``rate`` a second, or in a closed loop of ``streams``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from extproc.prefix import chain
from extproc.prompt import Unreadable, read_prompt
from extproc.sim.workload import BLOCK_TOKENS, SimRequest, Text

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_OUTPUT_TOKENS = 200
CHARS_PER_TOKEN = 4.0


class TraceError(ValueError):
    """A trace that can't be used; the message names file, line, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line of a trace. ``time_s``: since the trace's start, None if it has no timestamps."""

    time_s: float | None
    request: SimRequest


def read_trace(path: Path, limit: int | None = None) -> list[Recorded]:
    """The requests of a file, in order of time. Raises TraceError, and OSError if it can't be read."""
    recorded: list[Recorded] = []
    random = Random(str(path.name))
    expand = _MooncakeBlocks()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(recorded) >= limit:
                break
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{where}: not JSON ({error}); a trace has one JSON object a line") from None
            if not isinstance(entry, dict):
                raise TraceError(f"{where}: a {type(entry).__name__}; a trace has one JSON object a line")
            if "hash_ids" in entry:
                recorded.append(_mooncake(entry, expand, random, where))
            else:
                recorded.append(_openai(entry, random, where))
    if not recorded:
        raise TraceError(f"{path}: no requests in it; a trace has one JSON object a line")
    timed = [r.time_s is not None for r in recorded]
    if any(timed) and not all(timed):
        number = timed.index(False) + 1
        raise TraceError(
            f"{path}, request {number}: no timestamp, others have one; give all of them one or none"
        )
    if all(timed):
        recorded.sort(key=lambda r: r.time_s or 0.0)
        first = recorded[0].time_s or 0.0
        recorded = [Recorded((r.time_s or 0.0) - first, r.request) for r in recorded]
    return recorded


class TraceWorkload:
    """A trace as a workload; endless: it starts again when it is through, with the same prompts.

    With timestamps: as recorded, ``speedup`` times as fast. Without: Poisson at ``rate``, or ``streams``.
    """

    def __init__(
        self,
        recorded: list[Recorded],
        *,
        seed: int = 0,
        speedup: float = 1.0,
        rate: float | None = None,
        streams: int = 60,
    ) -> None:
        self._recorded = recorded
        self._random = Random(f"{seed} trace")
        self._speedup = speedup
        self._timed = recorded[0].time_s is not None and rate is None
        self._rate = rate
        self._streams = streams
        self._requests = cycle(r.request for r in recorded)

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """All of it, or the first request of each stream."""
        if self._timed:
            offset = 0.0
            while True:
                now = offset
                for entry in self._recorded:
                    now = offset + (entry.time_s or 0.0) / self._speedup
                    yield now, _copy(entry.request)
                offset = now + 1.0
        if self._rate is not None:
            now = 0.0
            while True:
                now += self._random.expovariate(self._rate)
                yield now, _copy(next(self._requests))
        for stream in range(self._streams):
            yield 2.0 * stream / self._streams, _copy(next(self._requests))

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """In a closed loop the next line."""
        if self._timed or self._rate is not None:
            return None
        return now, _copy(next(self._requests))


def _copy(request: SimRequest) -> SimRequest:
    return SimRequest(
        request.prompt_tokens, request.output_tokens, request.chain, request.head_tokens, request.group
    )


class _MooncakeBlocks:
    """Two of our blocks for each of theirs: the second has the id's own hash, the first one beside it."""

    def __call__(self, ids: list[int]) -> tuple[int, ...]:
        # Their ids are chained already: equal ids mean equal prompts up to there.
        per_block = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
        return tuple([_spread(identity * per_block + part) for identity in ids for part in range(per_block)])


def _spread(number: int) -> int:
    """A 64-bit hash of a small integer (the finaliser of splitmix64)."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ number >> 31


def _mooncake(entry: dict[str, Any], expand: _MooncakeBlocks, random: Random, where: str) -> Recorded:
    tokens = _number(entry, "input_length", where, least=1)
    output = _number(entry, "output_length", where, least=0)
    ids = entry["hash_ids"]
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise TraceError(f"{where}: hash_ids {str(ids)[:60]!r} is not a list of integers, one per 512 tokens")
    prompt = Text(tokens, expand(ids)[: tokens // BLOCK_TOKENS])
    tokens = max(tokens, 1)
    chain_ = prompt.then(max(1, output), random).hashes
    # Their second block tells conversations apart; all share the first.
    group = f"prefix {ids[1] if len(ids) > 1 else ids[0] if ids else 'short'}"
    time = _number(entry, "timestamp", where, least=0) / 1000 if "timestamp" in entry else None
    return Recorded(time, SimRequest(tokens, max(1, output), chain_, 0, group))


def _openai(entry: dict[str, Any], random: Random, where: str) -> Recorded:
    body = entry.get("body", entry)
    if not isinstance(body, dict):
        raise TraceError(
            f"{where}: body is a {type(body).__name__}, not an object; put the request's JSON there"
        )
    path = entry.get("path") or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    prompt = read_prompt(str(path), "application/json", "", json.dumps(body, ensure_ascii=False).encode())
    if isinstance(prompt, Unreadable):
        raise TraceError(
            f"{where}: no prompt in it ({prompt.value}); expected hash_ids or an OpenAI request body"
        )
    prefix = chain(prompt, block_tokens=BLOCK_TOKENS, chars_per_token=CHARS_PER_TOKEN, prefix_tokens=4096)
    output = entry.get("output_tokens") or prompt.max_tokens or DEFAULT_OUTPUT_TOKENS
    text = Text(max(1, prefix.tokens), prefix.hashes)
    chain_ = text.then(int(output), random).hashes
    head = int(prompt.head_bytes / CHARS_PER_TOKEN)
    group = f"prefix {(prefix.hashes[min(len(prefix.hashes), 16) - 1] if prefix.hashes else prefix.key):016x}"
    time = float(_number(entry, "timestamp", where, least=0)) if "timestamp" in entry else None
    return Recorded(time, SimRequest(text.tokens, int(output), chain_, head, group))


def _number(entry: dict[str, Any], key: str, where: str, *, least: int) -> Any:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise TraceError(f"{where}: {key} is {value!r}; it must be a number of at least {least}")
    return value if key == "timestamp" else int(value)
