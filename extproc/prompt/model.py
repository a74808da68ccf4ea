"""What reading a body results in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in canonical form.

    Attributes:
        scope: what no two different caches share: kind of prompt, model (or LoRA) name, ``cache_salt``, and
            what shifts every token (truncation, special tokens).
        text: the canonical prompt, in the order the engine renders it; see `extproc.prompt.canonical`.
            Empty for a prompt of token ids.
        token_ids: the ids (``array("I")``), if the prompt came as ids.
        head_bytes: how much of ``text`` is tools, template arguments and leading system or developer
            messages.
        opening_bytes: ``head_bytes`` and the first message behind it. It stays as it is while a conversation
            grows. All of ``text`` if there are no messages.
        max_tokens: upper bound of the output, if the client set one.
        stream: whether the client asked for a stream.

    """

    scope: bytes
    text: bytes
    token_ids: array[int] | None
    head_bytes: int
    opening_bytes: int
    max_tokens: int | None
    stream: bool

    @property
    def model(self) -> str:
        """The model's or adapter's name; "" for the engine's default."""
        return self.scope.split(b"\xff", 2)[1].decode()


class Unreadable(StrEnum):
    """Why there is no prompt to route by; the value is the label in metrics and logs."""

    UNKNOWN_PATH = "unknown_path"  #: not an API that takes prompts
    ENCODED = "encoded"  #: gzip or another content encoding
    CONTENT_TYPE = "content_type"  #: declared as something else than JSON
    EMPTY_BODY = "empty_body"
    INCOMPLETE = "incomplete"  #: longer than the buffer, or not all of it was shown to us
    BAD_JSON = "bad_json"  #: not JSON (RFC 8259), or not UTF-8
    TOO_DEEP = "too_deep"  #: nested deeper than the interpreter's recursion limit
    TOO_COMPLEX = "too_complex"  #: more objects and arrays than any real prompt has
    NO_PROMPT = "no_prompt"  #: JSON, but no prompt where this API has it, or an empty one
