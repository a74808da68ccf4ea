"""CPU that a request costs, by the size of its body: reading the prompt and hashing it.

The yardstick is a router in Python that takes no trouble: `json.loads` the body, `json.dumps` its tools and
messages as a key, hash that block by block (SHA-256, as vLLM itself does by default).
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.prefix import chain
from extproc.prompt import Prompt, read_prompt

BODY_SIZES = (2 * 1024, 128 * 1024, 1024 * 1024, 16 * 1024 * 1024)

_PATH = "/v1/chat/completions"
_BLOCK_TOKENS = 256
_CHARS_PER_TOKEN = 4.0
_PREFIX_TOKENS = 4096
_ROUNDS = 5
_TOOL_NAME = "tool_00000000"


@dataclass(frozen=True, slots=True)
class PromptCost:
    """CPU microseconds for one body of ``body_bytes``.

    ``read_us``: bytes to `Prompt`, its tools seen before. ``first_read_us``: with tools never seen before.
    ``chain_us``: `Prompt` to `PrefixChain`. ``plain_us``: the yardstick.
    """

    body_bytes: int
    read_us: float
    first_read_us: float
    chain_us: float
    plain_us: float

    @property
    def ratio(self) -> float:
        """Share of the yardstick's CPU that reading and hashing take."""
        return (self.read_us + self.chain_us) / self.plain_us


def bench_prompt(sizes: Sequence[int] = BODY_SIZES) -> list[PromptCost]:
    """Measure each size; about five seconds in all.

    The bodies are agents' chats: a third each of tools, system prompt and turns.
    """
    return [_measure(_chat_body(size)) for size in sizes]


def report(costs: Sequence[PromptCost]) -> str:
    """Return the costs as a table."""
    lines = [f"{'body':>10} {'read µs':>10} {'new tools':>10} {'hash µs':>10} {'plain µs':>10} {'ratio':>7}"]
    lines += (
        f"{cost.body_bytes:>10,} {cost.read_us:>10,.1f} {cost.first_read_us:>10,.1f} {cost.chain_us:>10,.1f} "
        f"{cost.plain_us:>10,.1f} {cost.ratio:>7.3f}"
        for cost in costs
    )
    return "\n".join(lines)


def _measure(body: bytes) -> PromptCost:
    repeats = max(2, min(400, 4 * 1024 * 1024 // len(body)))
    prompt = _read(body)
    strangers = iter(
        [body.replace(_TOOL_NAME.encode(), b"tool_%08d" % i, 1) for i in range(_ROUNDS * min(repeats, 40))]
    )
    return PromptCost(
        body_bytes=len(body),
        read_us=_cpu_us(lambda: _read(body), repeats),
        first_read_us=_cpu_us(lambda: _read(next(strangers)), min(repeats, 40)),
        chain_us=_cpu_us(lambda: _chain(prompt), repeats),
        plain_us=_cpu_us(lambda: _plain(body), repeats),
    )


def _cpu_us(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of a call: the best of some rounds, since others can only add to it."""
    rounds = []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        for _ in range(repeats):
            call()
        rounds.append(time.thread_time() - start)
    return min(rounds) / repeats * 1e6


def _read(body: bytes) -> Prompt:
    prompt = read_prompt(_PATH, "application/json", "", body)
    assert isinstance(prompt, Prompt)
    return prompt


def _chain(prompt: Prompt) -> object:
    return chain(
        prompt,
        block_tokens=_BLOCK_TOKENS,
        chars_per_token=_CHARS_PER_TOKEN,
        prefix_tokens=_PREFIX_TOKENS,
    )


def _plain(body: bytes) -> list[bytes]:
    request = json.loads(body)
    text = json.dumps([request["model"], request["tools"], request["messages"]], sort_keys=True).encode()
    block_bytes = int(_BLOCK_TOKENS * _CHARS_PER_TOKEN)
    hashes: list[bytes] = [b""]
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        hashes.append(hashlib.sha256(hashes[-1] + text[start : start + block_bytes]).digest())
    return hashes


def _chat_body(size: int) -> bytes:
    """Return a chat of roughly ``size`` bytes."""
    rng = random.Random(size)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(2_000)]

    def prose(length: int) -> str:
        text = " ".join(rng.choices(words, k=length // 5 + 1))[:length]
        return text.replace(" e", "\ne").replace(" t", ' "t')

    tools = []
    for i in range(max(1, size // 3 // 900)):
        properties = {
            word: {"type": "string", "description": prose(60)}
            for word in dict.fromkeys(rng.choices(words, k=5))
        }
        function = {
            "name": f"tool_{i}" if i else _TOOL_NAME,
            "description": prose(200),
            "parameters": {"type": "object", "properties": properties, "required": list(properties)[:2]},
        }
        tools.append({"type": "function", "function": function})
    messages = [{"role": "system", "content": prose(size // 3)}]
    for _ in range(max(1, size // 3 // 1_000)):
        messages.append({"role": "user", "content": prose(300)})
        messages.append({"role": "assistant", "content": prose(600)})
    request = {
        "model": "agent-70b",
        "tools": tools,
        "messages": messages,
        "max_tokens": 120,
        "stream": True,
        "temperature": 0.2,
    }
    return json.dumps(request, ensure_ascii=False).encode()
