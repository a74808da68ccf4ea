"""Pseudo tokens: four bytes of text each, so that a prompt costs microseconds to tokenise and hash.

A token sequence is one `bytes` object, ``TOKEN_BYTES`` per token. That keeps the three things that a prefix
cache can tell apart in a real engine:

- *Text.* Every message's content is tokenised on its own from its start and its last token padded with bytes
  that UTF-8 never holds. Text that is sent back later (the assistant's turn of a conversation) therefore
  makes the same tokens that the engine generated, and hits their blocks.
- *Special tokens* stand between messages and begin with a byte that UTF-8 never holds: no text fakes them.
- *Token ids* are four bytes as well, so that `to_ids` and token-id prompts are each other's inverse.

Block hashes are chained as in vLLM (``hash(parent, tokens of the block)``, full blocks only), with xxh3
seeded by the parent. What separates caches (LoRA or model name, ``cache_salt``) seeds the first block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from random import Random

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
_CHUNK_BLOCKS = 64
#: Padding of a text's last token, by length modulo TOKEN_BYTES.
_PAD = (b"", b"\xff\xff\xff", b"\xff\xff", b"\xff")

BEGIN = b"\xfe\x00\x00\x01"
MESSAGE_START = b"\xfe\x00\x00\x02"
MESSAGE_END = b"\xfe\x00\x00\x03"
TOOLS = b"\xfe\x00\x00\x04"
PART = b"\xfe\x00\x00\x05"

# Three letters and a space: one token a word.
_WORDS = (
    "the and for you all any can had her was one our out day get has him his how man new now old see two "
    "way who boy did its let put say she too use air arm art ask bad bag bar bed big bit box bus buy car "
    "cat cup cut dog dry ear eat end eye far few fit fly fun gas got guy hit hot ice job key kid law lay "
    "leg lie low map men mix net not off oil own pay per pot ran red rob row run sea set sit six sky son "
    "sun tax tea ten "
)
_BOOK_TOKENS = 8192
_BOOK = "".join(
    Random(4).choices([_WORDS[i : i + 4] for i in range(0, len(_WORDS), 4)], k=_BOOK_TOKENS)
).encode()


def encode(text: str) -> bytes:
    """Tokens of one piece of text; lone surrogates, which JSON can carry, are kept."""
    data = text.encode("utf-8", "surrogatepass")
    return data + _PAD[len(data) % TOKEN_BYTES]


def from_ids(token_ids: Iterable[int]) -> bytes:
    """Tokens from ids. Raises OverflowError or TypeError when one is not an unsigned 32-bit integer."""
    return array("I", token_ids).tobytes()


def to_ids(tokens: bytes) -> list[int]:
    """Inverse of `from_ids`."""
    return array("I", tokens).tolist()


def count(tokens: bytes) -> int:
    """Number of tokens."""
    return len(tokens) // TOKEN_BYTES


def scope_seed(*parts: str) -> int:
    """Seed of the first block, from whatever two different caches do not share; 0 for nothing at all."""
    if not any(parts):
        return 0
    return xxh3_64_intdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def chain(tokens: bytes, block_size: int, seed: int = 0) -> list[int]:
    """Chained hashes of the full blocks of ``tokens``; ``block_size`` in tokens, a rest is left out."""
    block_bytes = block_size * TOKEN_BYTES
    chunk_bytes = _CHUNK_BLOCKS * block_bytes
    full_bytes = len(tokens) // block_bytes * block_bytes
    hashes: list[int] = []
    parent = seed
    for start in range(0, full_bytes, chunk_bytes):
        hashes += _chunk_hashes(tokens[start : min(start + chunk_bytes, full_bytes)], block_bytes, parent)
        parent = hashes[-1]
    return hashes


@lru_cache(maxsize=2048)
def _chunk_hashes(chunk: bytes, block_bytes: int, parent: int) -> tuple[int, ...]:
    # Long prompts come again and again: remembering runs of blocks saves most of a request's cost.
    hashes = []
    for start in range(0, len(chunk), block_bytes):
        parent = xxh3_64_intdigest(chunk[start : start + block_bytes], parent)
        hashes.append(parent)
    return tuple(hashes)


def generate(prompt: bytes, length: int, variant: int = 0) -> bytes:
    """What the emulated model answers: ``length`` tokens of ASCII words, the same for the same prompt.

    ``variant`` distinguishes the several answers (``n``) to one prompt.
    """
    start = xxh3_64_intdigest(prompt, variant) % _BOOK_TOKENS * TOKEN_BYTES
    end = start + length * TOKEN_BYTES
    repeats = -(-end // len(_BOOK))
    return (_BOOK * repeats)[start:end]
