"""``/v1/responses``: made a chat as vLLM does (`vllm/entrypoints/openai/responses/utils.py`).

A request may continue an earlier one by ``previous_response_id``; the engine keeps that conversation, so here
its name has to stand for it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.prompt import chat
from extproc.prompt.content import Content
from extproc.prompt.model import Prompt, Unreadable
from extproc.prompt.tools import ToolsReader


class Reasoning(msgspec.Struct):
    """Reasoning options; only the effort reaches the prompt."""

    effort: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields that reach the prompt."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    reasoning: Reasoning | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    max_output_tokens: Any = None
    stream: Any = None


_decoder = msgspec.json.Decoder(ResponsesRequest)
_tools_decoder = msgspec.json.Decoder(list[dict[str, Any]] | None)


def read(body: bytes, content_format: str) -> Prompt | Unreadable:
    """Read an OpenAI responses request."""
    request = _decoder.decode(body)
    if not request.input:
        return Unreadable.NO_PROMPT
    messages: list[chat.Message] = []
    if request.instructions:
        messages.append(chat.Message(role="system", content=request.instructions))
    partial = False
    if isinstance(request.input, str):
        messages.append(chat.Message(role="user", content=request.input))
    else:
        for item in request.input:
            _convert_item(item, messages)
        last = request.input[-1]
        partial = last.get("type", "message") in ("message", "reasoning") and last.get("status") in (
            "in_progress",
            "incomplete",
        )
    return chat.write(
        chat.ChatRequest(
            messages=messages,
            model=request.model,
            cache_salt=request.cache_salt,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            reasoning_effort=request.reasoning.effort if request.reasoning else None,
            mm_processor_kwargs=request.mm_processor_kwargs,
            media_io_kwargs=request.media_io_kwargs,
            continue_final_message=partial,
            max_tokens=request.max_output_tokens,
            stream=request.stream,
        ),
        _read_tools(request.tools),
        content_format,
        request.previous_response_id,
    )


def _convert_tools(raw: bytes) -> list[Any]:
    """Nest functions, which are flat in this API; tools that the engine runs itself stay as they came."""
    return [
        chat.Tool(function=msgspec.convert(tool, chat.Function)) if tool.get("type") == "function" else tool
        for tool in _tools_decoder.decode(raw) or ()
    ]


_read_tools = ToolsReader(_convert_tools)


def _convert_item(item: dict[str, Any], messages: list[chat.Message]) -> None:
    """Append an item, or add it to the assistant's message before it, of which it may be a part."""
    kind = item.get("type")
    if kind == "function_call_output":
        output = item.get("output")
        message = chat.Message(role="tool", tool_call_id=_string(item.get("call_id")))
        message.content = msgspec.convert(output, Content) if isinstance(output, str | list) else None
        messages.append(message)
        return
    if kind not in ("function_call", "reasoning") and item.get("role") != "assistant":
        messages.append(msgspec.convert(item, chat.Message))
        return
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "function_call":
        function = chat.CalledFunction(name=_string(item.get("name")), arguments=item.get("arguments"))
        call = chat.ToolCall(id=_string(item.get("call_id")), function=function)
        if last is None:
            messages.append(chat.Message(role="assistant", tool_calls=[call]))
        elif last.tool_calls is None:
            last.tool_calls = [call]
        else:
            last.tool_calls.append(call)
    elif kind == "reasoning":
        reasoning = _reasoning(item)
        if last is None or last.reasoning is not None:
            messages.append(chat.Message(role="assistant", reasoning=reasoning))
        else:
            last.reasoning = reasoning
    else:
        message = msgspec.convert(item, chat.Message)
        if last is None or last.content is not None:
            messages.append(message)
        else:
            last.content = message.content


def _reasoning(item: dict[str, Any]) -> str:
    """Return the first part of a reasoning item's content, or else of its summary."""
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            first = parts[0].get("text") if isinstance(parts[0], dict) else parts[0]
            return _string(first) or ""
    return ""


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None
