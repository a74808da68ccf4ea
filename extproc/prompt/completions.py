"""``/v1/completions``: a prompt as text or token ids, or a list of such prompts.

The engine runs a list as separate sequences. Only its first prompt is read: the whole request goes to one
worker, the prompts of a batch mostly share their beginning, and one of them has to decide.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from extproc.prompt.canonical import scope
from extproc.prompt.model import Prompt, Unreadable
from extproc.prompt.options import output_limit


class CompletionRequest(msgspec.Struct, kw_only=True):
    """The fields that reach the prompt."""

    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    max_tokens: Any = None
    stream: Any = None


_decoder = msgspec.json.Decoder(CompletionRequest)


def read(body: bytes, content_format: str) -> Prompt | Unreadable:
    """Read a completion request; its text has no messages, so ``content_format`` doesn't matter."""
    request = _decoder.decode(body)
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if not prompt:
        return Unreadable.NO_PROMPT
    text = b""
    token_ids: array[int] | None = None
    shifts: list[object] = [request.truncate_prompt_tokens, request.truncation_side]
    if isinstance(prompt, str):
        text = prompt.encode()
        shifts.append(False if request.add_special_tokens is False else None)
    else:
        try:
            token_ids = array("I", prompt)
        except (TypeError, OverflowError):  # ids and strings mixed, negative, or beyond 32 bits
            return Unreadable.NO_PROMPT
    return Prompt(
        scope=scope("text" if token_ids is None else "ids", request.model, request.cache_salt, shifts),
        text=text,
        token_ids=token_ids,
        head_bytes=0,
        opening_bytes=len(text),
        max_tokens=output_limit(request.max_tokens),
        stream=request.stream is True,
    )
