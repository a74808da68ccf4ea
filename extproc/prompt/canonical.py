r"""The framing of canonical text: fields behind separators that no text can contain.

    field := FF tag content          tag: one ASCII letter; content: UTF-8

The byte FF never occurs in UTF-8, so no content can imitate a separator, and nothing needs escaping or a
length in front. That keeps the prefix property: a longer last field, or more fields, leave all earlier bytes
as they were. Fields follow each other in a fixed order; a role opens a message.

Structured values (tools, arguments of tool calls) stand as compact JSON with their keys in the order they
came, because that is how templates render them (``tojson``); so 1 and 1.0 differ, ``A`` and ``\u0041`` don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

# At the head of a chat.
TOOLS = b"\xffT"
CHAT_TEMPLATE = b"\xffC"
TEMPLATE_ARGUMENT = b"\xffK"
REASONING_EFFORT = b"\xffE"
DOCUMENTS = b"\xffD"
PREVIOUS_RESPONSE = b"\xffV"
# A message.
ROLE = b"\xffM"
NAME = b"\xffN"
TASK = b"\xffO"
CALL_ID = b"\xffI"
REASONING = b"\xffR"
TEXT = b"\xffX"
MEDIA = b"\xffP"
REFERENCE = b"\xffL"
CALL = b"\xffF"
ARGUMENTS = b"\xffA"
# Behind the messages.
NO_GENERATION_PROMPT = b"\xffG"
CONTINUE_FINAL = b"\xffZ"

ordered_json = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="deterministic")


class CanonicalText:
    """Collects fields."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def put(self, tag: bytes, content: str = "") -> None:
        """Add a field of text."""
        self._pieces += (tag, content.encode())

    def put_json(self, tag: bytes, value: Any) -> None:
        """Add a structured field, its keys in the order they came."""
        self._pieces += (tag, ordered_json(value))

    def put_bytes(self, tag: bytes, content: bytes) -> None:
        """Add a field whose content is UTF-8 already."""
        self._pieces += (tag, content)

    @property
    def position(self) -> int:
        """Where the next field goes; of use for `bytes_before` only."""
        return len(self._pieces)

    def bytes_before(self, position: int) -> int:
        """Return how many bytes stand before a position."""
        return sum(map(len, self._pieces[:position]))

    def build(self) -> bytes:
        """Return all fields in the order they were put."""
        return b"".join(self._pieces)


def scope(kind: str, model: str | None, cache_salt: str | None, shifts: Sequence[object] = ()) -> bytes:
    """Return the scope of a prompt; see `Prompt.scope`.

    Args:
        kind: "chat", "text" or "ids": canonical forms that can't be compared.
        model: the model's or adapter's name; None and "" both mean the engine's default.
        cache_salt: vLLM's per-tenant salt.
        shifts: options that move every token, in a fixed order; those at their defaults are None.

    """
    fields = [kind.encode(), (model or "").encode(), (cache_salt or "").encode()]
    if any(shift is not None for shift in shifts):
        fields.append(ordered_json(shifts))
    return b"\xff".join(fields)


def digest(*values: Any) -> str:
    """Return the identity of a value that isn't rendered as text: 32 hex digits, key order ignored."""
    return xxhash.xxh3_128_hexdigest(_sorted.encode(values))
