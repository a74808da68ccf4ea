"""A canonical prompt in chunks, and where in the prompt a byte stands.

Chunks are cut where the content says so (line ends, some punctuation, each tool), never by position, so the
same passage gives the same chunks wherever it stands. A chunk's *normal form* leaves out what changes the
tokens, but not what the text says: white space, and the order of keys in tools and arguments. Two prompts are
compared by normal forms; where those agree and the bytes don't, the difference is one of spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import msgspec

from extproc.prompt import Prompt
from extproc.prompt import canonical as c

_WHITE = b" \t\r\n\f\v"
_TOKEN_ID_BYTES = 4

#: A chunk ends behind these. Punctuation only behind about half of all letters, which makes chunks longer;
#: never behind digits, which would tear times and numbers. The last are 。！，；？
_CUT = re.compile(rb"\n\s*|[.,;:!?)\]}](?<=[a-h\"')\]}].)\s*|\xe3\x80\x82|\xef\xbc[\x81\x8c\x9b\x9f]")

#: Text without any of these (base64) is cut by length.
_MAX_CHUNK_BYTES = 1024

_LISTS = (c.TOOLS, c.DOCUMENTS)
_VALUES = (c.ARGUMENTS, c.TEMPLATE_ARGUMENT)
_TEXTS = (c.TEXT, c.REASONING, c.CHAT_TEMPLATE)

_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_sorted = msgspec.json.Encoder(order="deterministic").encode


def data_of(prompt: Prompt) -> bytes:
    """What is compared: the canonical text, or the ids as bytes."""
    return prompt.text if prompt.token_ids is None else prompt.token_ids.tobytes()


class Form(Enum):
    """What a chunk is, which says what its normal form is."""

    TEXT = 0
    JSON = 1
    IDS = 2


Chunk = tuple[bytes, Form]


def cut(prompt: Prompt) -> Iterator[Chunk]:
    """The chunks of `data_of`, in order, all of it."""
    if prompt.token_ids is not None:
        yield from _cut_ids(prompt)
        return
    first, *fields = prompt.text.split(b"\xff")
    yield from _cut_text(first)
    for field in fields:
        header, content = b"\xff" + field[:1], field[1:]
        if header in _TEXTS:
            yield header, Form.TEXT
            yield from _cut_text(content)
        elif header in _LISTS:
            yield header, Form.TEXT
            yield from _cut_list(content)
        elif header in _VALUES:
            yield header, Form.TEXT
            yield content, Form.JSON
        else:
            yield header + content, Form.TEXT


def _cut_text(text: bytes) -> Iterator[Chunk]:
    start = 0
    for match in _CUT.finditer(text):
        end = match.end()
        while end - start > _MAX_CHUNK_BYTES:
            yield text[start : start + _MAX_CHUNK_BYTES], Form.TEXT
            start += _MAX_CHUNK_BYTES
        yield text[start:end], Form.TEXT
        start = end
    while start < len(text):
        yield text[start : start + _MAX_CHUNK_BYTES], Form.TEXT
        start += _MAX_CHUNK_BYTES


def _cut_list(text: bytes) -> Iterator[Chunk]:
    """A chunk for each element, and one for each of the bytes between them."""
    try:
        elements = _decode_list(text)
    except msgspec.MsgspecError:
        yield text, Form.TEXT
        return
    glue = b"["
    for element in elements:
        yield glue, Form.TEXT
        yield bytes(element), Form.JSON
        glue = b","
    yield b"]" if elements else text, Form.TEXT


def _cut_ids(prompt: Prompt) -> Iterator[Chunk]:
    ids = prompt.token_ids
    assert ids is not None
    data = ids.tobytes()
    ends = [i + 1 for i, token in enumerate(ids) if token % 16 == 7]
    for start, end in pairwise([0, *ends, len(ids)]):
        if start < end:
            yield data[start * _TOKEN_ID_BYTES : end * _TOKEN_ID_BYTES], Form.IDS


def normal_form(chunk: bytes, form: Form) -> bytes:
    """What a chunk says, however it is spelled."""
    if form is Form.IDS:
        return b"\xfe" + chunk
    if form is Form.JSON:
        try:
            return b"\xff" + _sorted(_decode(chunk))
        except (msgspec.MsgspecError, RecursionError):
            pass
    return without_white_space(chunk)


def without_white_space(text: bytes) -> bytes:
    """The text without its white space."""
    return text.translate(None, _WHITE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands in a prompt.

    ``message``: its index among the rendered ones, -1 in the head or where there are none. ``role``: the
    message's. ``part``: what of it ("text", "tools", "call", …). ``char``: characters from the part's
    start. ``token``: estimated tokens from the prompt's.
    """

    message: int
    role: str
    part: str
    char: int
    token: int


_PARTS = {
    c.TOOLS: "tools",
    c.CHAT_TEMPLATE: "chat template",
    c.TEMPLATE_ARGUMENT: "template argument",
    c.REASONING_EFFORT: "reasoning effort",
    c.DOCUMENTS: "documents",
    c.PREVIOUS_RESPONSE: "previous response",
    c.ROLE: "message",
    c.NAME: "name",
    c.CALL_ID: "tool call id",
    c.REASONING: "reasoning",
    c.TEXT: "text",
    c.MEDIA: "media",
    c.REFERENCE: "reference",
    c.CALL: "tool call",
    c.ARGUMENTS: "arguments",
}


def place_of(data: bytes, at: int, bytes_per_token: float, *, is_ids: bool) -> Place:
    """Where byte ``at`` of a prompt stands."""
    token = int(at / bytes_per_token)
    if is_ids:
        return Place(-1, "", "token ids", at // _TOKEN_ID_BYTES, token)
    start = data.rfind(b"\xff", 0, at + 1)
    if start < 0:
        return Place(-1, "", "prompt", len(data[:at].decode(errors="ignore")), token)
    message = data.count(c.ROLE, 0, at + 2) - 1
    role = ""
    if message >= 0:
        opening = data.rfind(c.ROLE, 0, at + 2) + 2
        role = data[opening : _field_end(data, opening)].decode(errors="replace")
    char = len(data[start + 2 : max(at, start + 2)].decode(errors="ignore"))
    return Place(message, role, _PARTS.get(data[start : start + 2], "other"), char, token)


def _field_end(data: bytes, start: int) -> int:
    end = data.find(b"\xff", start)
    return len(data) if end < 0 else end


def legible(data: bytes) -> str:
    """Canonical text for people: the names of parts between angles."""
    return _HEADER.sub(lambda m: f"<{_PARTS.get(m[0], 'other')}>".encode(), data).decode(errors="ignore")


_HEADER = re.compile(rb"\xff[A-Z]")
