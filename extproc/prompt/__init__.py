"""Request bodies → the canonical text of the prompt that the engine will render.

Affinity stands on one promise: two bodies that the engine renders to the same prompt give the same canonical
text, two that it renders differently don't, and what two prompts share at their start they share at the start
of their canonical texts. So the text holds what the engine renders, in that order, and nothing else:

1. what goes to the head of a rendered chat: tools, chat template and its arguments, documents;
2. the messages, each as role, name, reasoning, content, tool calls;
3. what changes the very end only (``continue_final_message`` and the like).

Sampling options, `stop`, `user`, key order and white space are left out, because vLLM leaves them out.
The rules follow vLLM (`vllm/entrypoints/chat_utils.py`, `openai/*/protocol.py`, `anthropic/serving.py`,
`openai/responses/utils.py`) where its behaviour has changed over time, the newest one.

Templates differ in where they put tools (before or behind the system prompt). For a cache that is the same
thing unless the same tools are combined with many system prompts.

Each API shape is one module with one reader, `read(body, content_format) -> Prompt | Unreadable`:

=========================  ===========================================================
`extproc.prompt.chat`       ``/v1/chat/completions``; the other chat shapes end here too
`extproc.prompt.completions` ``/v1/completions``: text and token ids
`extproc.prompt.messages`   ``/v1/messages`` (Anthropic)
`extproc.prompt.responses`  ``/v1/responses``
=========================  ===========================================================

The engine is the judge of what is valid: whatever can't be read here is `Unreadable`, a reason to route by
load alone, never an error for the client. Reading never raises, and its time is linear in the body's size:
msgspec decodes only the fields that matter, in C, with a bounded depth.
"""

from __future__ import annotations

import msgspec

from extproc.prompt import chat, completions, messages, responses
from extproc.prompt.content import TooManyPartsError
from extproc.prompt.model import Prompt, Unreadable

__all__ = ["Prompt", "Unreadable", "read_prompt"]

#: Last part of the path → reader. A gateway may mount the API under any prefix, so only the end counts;
#: "/chat/completions" has to be tried before "/completions".
_READERS = (
    ("/chat/completions", chat.read),
    ("/completions", completions.read),
    ("/messages", messages.read),
    ("/responses", responses.read),
)

# A hostile body of 16 MiB can hold millions of empty arrays, messages or content parts, seconds of work. So
# beyond a size that is quickly read whatever it holds, brackets are counted first. Those in text count too;
# code has one in forty bytes, so there is room for five megabytes of it, more than any context window.
_QUICK_BODY_BYTES = 1024 * 1024
_MAX_BRACKETS = 2**17

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_prompt(
    path: str, content_type: str, content_encoding: str, body: bytes, *, content_format: str = "string"
) -> Prompt | Unreadable:
    """Read the prompt of a request; never raises.

    Args:
        path: ``:path`` as the client sent it; a prefix and a query string are fine.
        content_type: the header's value, "" if absent. vLLM demands ``application/json``; an absent type is
            read as JSON all the same, since other engines accept that and a refusal costs nothing.
        content_encoding: the header's value, "" if absent. vLLM decodes none.
        body: the whole body.
        content_format: vLLM's ``--chat-template-content-format`` as it was resolved for the model: in
            "string" the text parts of a message are joined by newlines, in "openai" the template sees them
            apart.

    Returns:
        The prompt, or why there is none to route by.

    """
    path = path.partition("?")[0]
    read = next((reader for suffix, reader in _READERS if path.endswith(suffix)), None)
    if read is None:
        return Unreadable.UNKNOWN_PATH
    if content_encoding.strip().lower() not in ("", "identity"):
        return Unreadable.ENCODED
    if content_type.partition(";")[0].strip().lower() not in ("", "application/json"):
        return Unreadable.CONTENT_TYPE
    # Python's json, with which vLLM reads, skips a byte order mark.
    body = body.removeprefix(_BYTE_ORDER_MARK)
    if not body:
        return Unreadable.EMPTY_BODY
    if len(body) > _QUICK_BODY_BYTES and body.count(b"{") + body.count(b"[") > _MAX_BRACKETS:
        return Unreadable.TOO_COMPLEX
    try:
        return read(body, content_format)
    except msgspec.ValidationError:  # JSON, but not of the shape that this API takes
        return Unreadable.NO_PROMPT
    except msgspec.DecodeError:
        return Unreadable.BAD_JSON
    except RecursionError:
        return Unreadable.TOO_DEEP
    except TooManyPartsError:
        return Unreadable.TOO_COMPLEX
