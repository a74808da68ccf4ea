"""A prompt's canonical text → chained hashes of its blocks, and the key that places it.

**Chain.** The text is cut in blocks of ``block_tokens``, counted in bytes of canonical text
(``chars_per_token`` × ``block_tokens``; for prompts of token ids exactly).
``hash[i] = xxh3_64(block i, seed = hash[i-1])``, and the scope (model, salt …) seeds the first, as in vLLM's
prefix cache: equal ``hash[i]`` means equal blocks 0…i. A block that isn't full has no hash, since the engine
caches full blocks only.

**Key.** Prompts that will share a cache should have the same key, and as few others as possible. What they
share is the head (tools and system prompt), so the key covers the head, cut off at its exact end: whatever
the user says must not move the request elsewhere. At most ``prefix_tokens`` count.

A head of less than a block identifies nobody; then the opening (head and first message) does. It doesn't
change as the conversation grows, but two openings often share a long beginning and differ at their end (a
document and a question), so it is cut to a power of two of blocks, which differences in the last bytes rarely
move. An opening shorter than a block counts whole.

xxh3 isn't a cryptographic hash. Someone who makes two prompts collide gets the wrong worker's empty cache,
never another one's data.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from extproc.prompt import Prompt

_TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """The identity of a prompt's beginning, block by block.

    Attributes:
        hashes: chained 64-bit hashes; ``hashes[i]`` covers blocks 0…i; full blocks only.
        block_tokens: tokens in a block (estimated ones, unless the prompt came as ids).
        tokens: tokens of the whole prompt (estimated unless it came as ids).
        key: 64-bit hash that rendezvous hashing places.

    """

    hashes: tuple[int, ...]
    block_tokens: int
    tokens: int
    key: int


def chain(prompt: Prompt, *, block_tokens: int, chars_per_token: float, prefix_tokens: int) -> PrefixChain:
    """Hash a prompt.

    Args:
        prompt: the prompt, canonical.
        block_tokens: size of a block, in tokens.
        chars_per_token: bytes of canonical text per token. Bytes, not characters: scripts that need more
            bytes for a character also need more tokens for it, so the estimate holds better.
        prefix_tokens: how much of the prompt the key covers at most, in tokens.

    """
    if prompt.token_ids is None:
        data = memoryview(prompt.text)
        block_bytes = max(1, int(block_tokens * chars_per_token))
        tokens = max(1, round(len(data) / chars_per_token))
        head_bytes, opening_bytes = prompt.head_bytes, prompt.opening_bytes
    else:
        ids = prompt.token_ids
        if sys.byteorder == "big":  # hashes are the same on every machine
            ids = ids[:]
            ids.byteswap()
        data = memoryview(ids).cast("B")
        block_bytes = block_tokens * _TOKEN_ID_BYTES
        tokens = len(ids)
        head_bytes, opening_bytes = 0, len(data)

    root = parent = xxh3_64_intdigest(prompt.scope)
    hashes: list[int] = []
    for end in range(block_bytes, len(data) + 1, block_bytes):
        parent = xxh3_64_intdigest(data[end - block_bytes : end], parent)
        hashes.append(parent)

    prefix_bytes = max(1, prefix_tokens // block_tokens) * block_bytes
    key_bytes = _key_bytes(head_bytes, opening_bytes, block_bytes, prefix_bytes)
    whole, rest = divmod(key_bytes, block_bytes)
    key = hashes[whole - 1] if whole else root
    if rest:
        key = xxh3_64_intdigest(data[key_bytes - rest : key_bytes], key)
    return PrefixChain(tuple(hashes), block_tokens, tokens, key)


def _key_bytes(head_bytes: int, opening_bytes: int, block_bytes: int, prefix_bytes: int) -> int:
    """Return how many bytes of the prompt the key covers; see the top of this module."""
    if head_bytes >= block_bytes:
        return min(head_bytes, prefix_bytes)
    blocks = opening_bytes // block_bytes
    if blocks == 0:
        return opening_bytes
    return min(block_bytes << (blocks.bit_length() - 1), prefix_bytes)
