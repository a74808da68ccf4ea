"""The same requests to a real engine, to the emulated one, and to the router's picture of an engine.

A `Recording` of a real engine is kept as a file: the prompts are drawn anew from its seed, so the file has
no more than what the engine generated and how much it had cached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from real_vllm import BLOCK_TOKENS, MAX_NUM_BATCHED_TOKENS, Server
from sequence import Asked, Sequence

from extproc.emulator import tokens
from extproc.emulator.engine import Engine, EngineConfig, EngineRequest
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings
from extproc.prefix import chain
from extproc.prompt import Prompt, read_prompt
from extproc.routing.pool import Pool


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, what the real engine generated, and how many tokens of the prompt it had cached."""

    asked: Asked
    output: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Recording:
    """What a real engine did, from an empty cache on.

    ``vllm``: its version. ``queries``, ``hits``: its own counters, in tokens.
    """

    vllm: str
    num_blocks: int
    seed: int
    turns: tuple[Turn, ...]
    queries: float
    hits: float

    @property
    def cache_tokens(self) -> int:
        return (self.num_blocks - 1) * BLOCK_TOKENS

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.asked.prompt) for turn in self.turns)

    @property
    def cached_tokens(self) -> int:
        return sum(turn.cached_tokens for turn in self.turns)

    def write(self, path: Path) -> None:
        """Keep it; a line for each request."""
        names = ("vllm", "num_blocks", "seed", "queries", "hits")
        head = json.dumps({name: getattr(self, name) for name in names})
        turns = [json.dumps([turn.cached_tokens, *turn.output]) for turn in self.turns]
        path.write_text("\n".join([head, *turns, ""]))

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Inverse of `write`."""
        head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        sequence = _sequence(head["num_blocks"], head["seed"], len(lines))
        turns = []
        for asked, (cached_tokens, *output) in zip(sequence, lines, strict=True):
            turns.append(Turn(asked, tuple(output), cached_tokens))
            sequence.answered(asked, tuple(output))
        return cls(turns=tuple(turns), **head)


def _sequence(num_blocks: int, seed: int, requests: int) -> Sequence:
    return Sequence(seed, requests, (num_blocks - 1) * BLOCK_TOKENS, BLOCK_TOKENS)


def record(server: Server, seed: int, requests: int) -> Recording:
    """Send a sequence, one request at a time."""
    server.reset()
    queries, hits = server.counter("prefix_cache_queries_total"), server.counter("prefix_cache_hits_total")
    sequence = _sequence(server.num_blocks, seed, requests)
    turns = []
    for asked in sequence:
        salt = {"cache_salt": asked.salt} if asked.salt else {}
        reply = server.complete(prompt=asked.prompt, max_tokens=asked.output_tokens, **salt)
        output = tuple(reply["choices"][0]["token_ids"])
        assert len(output) == asked.output_tokens
        turns.append(Turn(asked, output, reply["usage"]["prompt_tokens_details"]["cached_tokens"]))
        sequence.answered(asked, output)
    _, _, version = server.ask("GET", "/version")
    return Recording(
        vllm=json.loads(version)["version"],
        num_blocks=server.num_blocks,
        seed=seed,
        turns=tuple(turns),
        queries=server.counter("prefix_cache_queries_total") - queries,
        hits=server.counter("prefix_cache_hits_total") - hits,
    )


class Emulated:
    """The emulated engine core, told the real one's outputs."""

    def __init__(self, num_blocks: int) -> None:
        config = EngineConfig(
            block_size=BLOCK_TOKENS, num_gpu_blocks=num_blocks, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
        )
        self.engine = Engine(config)
        self._now = 0.0

    def serve(self, turn: Turn) -> int:
        """Serve one request to its end; its cached tokens."""
        sequence = tokens.from_ids(turn.asked.prompt + turn.output)
        hashes = tokens.chain(sequence, BLOCK_TOKENS, tokens.scope_seed("", turn.asked.salt))
        request = EngineRequest("only", len(turn.asked.prompt), len(turn.output), hashes)
        self.engine.add(request, self._now)
        cached = -1
        while (duration_s := self.engine.begin_step(self._now)) is not None:
            self._now += duration_s
            for output in self.engine.finish_step(self._now):
                cached = output.cached_tokens
        return cached


class Pictured:
    """The router's picture of one worker, fed as the server feeds it.

    ``knows_output``: told how many tokens were generated (the server guesses it from the stream's length).
    """

    def __init__(self, cache_tokens: int, block_tokens: int, *, knows_output: bool = True) -> None:
        settings = PoolSettings(block_tokens=block_tokens, cache_tokens=cache_tokens)
        worker = EndpointConfig(host="10.0.0.1", port=8000, cluster="workers", max_inflight=120)
        self.pool = Pool(PoolConfig("workers", (worker,), settings))
        self._knows_output = knows_output
        self._now = 0.0

    def serve(self, turn: Turn) -> int:
        """The decision and the end of one request; how many tokens it thought to be cached."""
        body: dict[str, object] = {"prompt": turn.asked.prompt, "max_tokens": turn.asked.output_tokens}
        if turn.asked.salt:
            body["cache_salt"] = turn.asked.salt
        prompt = read_prompt("/v1/completions", "application/json", "", json.dumps(body).encode())
        assert isinstance(prompt, Prompt)
        settings = self.pool.settings
        prefix = chain(
            prompt,
            block_tokens=settings.block_tokens,
            chars_per_token=settings.chars_per_token,
            prefix_tokens=settings.prefix_tokens,
        )
        self._now += 1.0
        decision = self.pool.decide(prefix, self._now)
        assert decision is not None
        ticket = self.pool.begin(decision, prefix, self._now)
        self._now += 1.0
        self.pool.end(ticket, self._now, float(len(turn.output)) if self._knows_output else 0.0)
        return decision.cached_tokens
