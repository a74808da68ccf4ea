"""``/v1/chat/completions``, and the common end of every API that renders a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.prompt import canonical as c
from extproc.prompt.content import Content, is_text, write_content
from extproc.prompt.model import Prompt, Unreadable
from extproc.prompt.options import output_limit
from extproc.prompt.tools import ToolsReader


class Function(msgspec.Struct, omit_defaults=True):
    """A tool's function: the fields that vLLM's model has, in its order; it drops all others."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(msgspec.Struct, omit_defaults=True):
    """A tool as a chat template sees it."""

    function: Function
    defer_loading: bool | None = None


class CalledFunction(msgspec.Struct):
    """What the assistant called: arguments are JSON text (OpenAI) or an object."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct):
    """One call of a tool by the assistant; ``custom`` (free-form tools) is a thing that vLLM passes over."""

    id: str | None = None
    function: CalledFunction | None = None
    custom: Any = None


class Message(msgspec.Struct):
    """One message; only what vLLM hands to the template."""

    role: str
    content: Content = None
    name: Any = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: list[Any] | None = None
    task: Any = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """The fields of a chat request that reach the prompt, whatever API it came by."""

    messages: list[Message]
    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    stream: Any = None


_decoder = msgspec.json.Decoder(ChatRequest)
_tools_decoder = msgspec.json.Decoder(list[Tool] | None)
_arguments_decoder = msgspec.json.Decoder()
_read_tools = ToolsReader(_tools_decoder.decode)


def read(body: bytes, content_format: str) -> Prompt | Unreadable:
    """Read an OpenAI chat request."""
    request = _decoder.decode(body)
    return write(request, _read_tools(request.tools), content_format)


def write(
    request: ChatRequest, tools: bytes, content_format: str, previous_response: str | None = None
) -> Prompt | Unreadable:
    """Write a chat's canonical text.

    Args:
        request: the chat; its ``tools`` are not looked at.
        tools: the tools in canonical JSON, b"" if there are none.
        content_format: see `extproc.prompt.read_prompt`.
        previous_response: name of a response (`/v1/responses`) whose conversation precedes the messages.

    Returns:
        The prompt, or NO_PROMPT if there are no messages.

    """
    if not request.messages:
        return Unreadable.NO_PROMPT
    text = c.CanonicalText()
    if tools:
        text.put_bytes(c.TOOLS, tools)
    _write_head(text, request)
    if previous_response:
        text.put(c.PREVIOUS_RESPONSE, previous_response)
    joined = content_format != "openai"
    # What changes the encoding of media is part of their identity, and of nothing else.
    media_options = (request.mm_processor_kwargs, request.media_io_kwargs)
    head = text.position
    opening = 0
    for message in request.messages:
        _write_message(text, message, joined, media_options)
        if not opening:
            if message.role in ("system", "developer"):
                head = text.position
            else:
                opening = text.position
    if request.add_generation_prompt is False:
        text.put(c.NO_GENERATION_PROMPT)
    if request.continue_final_message:
        text.put(c.CONTINUE_FINAL)
    max_tokens = request.max_completion_tokens
    return Prompt(
        scope=c.scope(
            "chat",
            request.model,
            request.cache_salt,
            (request.truncate_prompt_tokens, request.truncation_side, request.add_special_tokens or None),
        ),
        text=text.build(),
        token_ids=None,
        head_bytes=text.bytes_before(head),
        opening_bytes=text.bytes_before(opening or text.position),
        max_tokens=output_limit(request.max_tokens if max_tokens is None else max_tokens),
        stream=request.stream is True,
    )


def _write_head(text: c.CanonicalText, request: ChatRequest) -> None:
    if request.chat_template:
        text.put(c.CHAT_TEMPLATE, request.chat_template)
    if request.chat_template_kwargs:
        # They become the template's variables, so their own order can't be seen.
        for item in sorted(request.chat_template_kwargs.items()):
            text.put_json(c.TEMPLATE_ARGUMENT, item)
    if request.reasoning_effort:
        text.put(c.REASONING_EFFORT, request.reasoning_effort)
    if request.documents:
        text.put_json(c.DOCUMENTS, request.documents)


def _write_message(
    text: c.CanonicalText, message: Message, joined: bool, media_options: Sequence[object]
) -> None:
    role = message.role
    text.put(c.ROLE, role)
    if isinstance(message.name, str):
        text.put(c.NAME, message.name)
    if isinstance(message.task, str):
        text.put(c.TASK, message.task)
    if role == "tool":
        if message.tool_call_id is not None:
            text.put(c.CALL_ID, message.tool_call_id)
    elif role == "developer":
        if message.tools:
            text.put_json(c.TOOLS, message.tools)
    elif role == "assistant":
        # `reasoning_content` is the older name of the same field.
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning is not None:
            text.put(c.REASONING, reasoning)
    content = message.content
    # Results of tools are strings for the template in any format, unless they hold something else than text.
    write_content(text, content, joined or (role == "tool" and is_text(content)), media_options)
    if role == "assistant" and message.tool_calls:
        for call in message.tool_calls:
            _write_call(text, call)


def _write_call(text: c.CanonicalText, call: ToolCall) -> None:
    if call.function is None:
        text.put_json(c.CALL, call.custom)
    else:
        text.put(c.CALL, call.function.name or "")
        _write_arguments(text, call.function.arguments)
    if call.id is not None:
        text.put(c.CALL_ID, call.id)


def _write_arguments(text: c.CanonicalText, arguments: Any) -> None:
    """Write a call's arguments as vLLM hands them to templates: parsed; nothing at all is an empty object."""
    if isinstance(arguments, str):
        if not arguments.strip():
            arguments = {}
        else:
            try:
                arguments = _arguments_decoder.decode(arguments)
            except (msgspec.DecodeError, RecursionError):
                # Not JSON as msgspec has it. vLLM renders {} or refuses; the text stands for itself here.
                text.put(c.ARGUMENTS, arguments)
                return
    elif not isinstance(arguments, dict | list):
        arguments = {}
    text.put_json(c.ARGUMENTS, arguments)
