"""``/v1/messages`` (Anthropic): made a chat as vLLM does (`vllm/entrypoints/anthropic/serving.py`)."""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.prompt import chat
from extproc.prompt.model import Prompt, Unreadable
from extproc.prompt.tools import ToolsReader

#: Claude Code sends a block of this kind with a hash that differs from request to request; vLLM drops it.
_BILLING_HEADER = "x-anthropic-billing-header"

_ROLES = {"ctx": "user", "msg": "user"}


class Block(msgspec.Struct):
    """A content block; which fields count depends on its type."""

    type: str
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[Any] | None = None
    thinking: str | None = None


class Turn(msgspec.Struct):
    """A message."""

    role: str
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    """A tool definition."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    defer_loading: bool | None = None


class OutputConfig(msgspec.Struct):
    """Output options; only the effort reaches the prompt."""

    effort: str | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The fields that reach the prompt."""

    messages: list[Turn]
    system: str | list[Block] | None = None
    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    max_tokens: Any = None
    stream: Any = None


_decoder = msgspec.json.Decoder(MessagesRequest)
_tools_decoder = msgspec.json.Decoder(list[AnthropicTool] | None)


def read(body: bytes, content_format: str) -> Prompt | Unreadable:
    """Read an Anthropic messages request."""
    request = _decoder.decode(body)
    if not request.messages:
        return Unreadable.NO_PROMPT
    messages = _system(request)
    for turn in request.messages:
        if turn.role != "system":
            _convert_turn(turn, messages)
    return chat.write(
        chat.ChatRequest(
            messages=messages,
            model=request.model,
            cache_salt=request.cache_salt,
            chat_template_kwargs=request.chat_template_kwargs,
            reasoning_effort=request.output_config.effort if request.output_config else None,
            max_tokens=request.max_tokens,
            stream=request.stream,
        ),
        _read_tools(request.tools),
        content_format,
    )


def _system(request: MessagesRequest) -> list[chat.Message]:
    """Collect all system text, wherever it stands, in one message at the front."""
    contents = [request.system, *(turn.content for turn in request.messages if turn.role == "system")]
    texts: list[str] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += (
                block.text
                for block in content or ()
                if block.type == "text" and block.text and not block.text.startswith(_BILLING_HEADER)
            )
    system = "".join(texts)
    return [chat.Message(role="system", content=system)] if system else []


def _convert_tools(raw: bytes) -> list[chat.Tool]:
    tools: list[chat.Tool] = []
    for tool in _tools_decoder.decode(raw) or ():
        tool.input_schema.setdefault("type", "object")
        function = chat.Function(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            defer_loading=tool.defer_loading,
        )
        tools.append(chat.Tool(function=function))
    return tools


_read_tools = ToolsReader(_convert_tools)


def _convert_turn(turn: Turn, messages: list[chat.Message]) -> None:
    """Append a turn's messages; the results of tools become messages of their own, before the rest of it."""
    message = chat.Message(role=_ROLES.get(turn.role, turn.role))
    if isinstance(turn.content, str):
        message.content = turn.content
        messages.append(message)
        return
    parts: list[str | dict[str, Any]] = []
    calls: list[chat.ToolCall] = []
    reasoning: list[str] = []
    for block in turn.content:
        if block.type == "text" and block.text:
            parts.append(block.text)
        elif block.type == "image" and block.source:
            parts.append(_image(block.source))
        elif block.type == "thinking" and block.thinking is not None:
            reasoning.append(block.thinking)
        elif block.type == "tool_use":
            function = chat.CalledFunction(name=block.name, arguments=block.input or {})
            calls.append(chat.ToolCall(id=block.id, function=function))
        elif block.type == "tool_result":
            if message.role == "user":
                _convert_result(block, messages)
            else:
                parts.append(f"Tool result: {block.content or ''}")
    message.content = parts or None
    message.tool_calls = calls or None
    message.reasoning = "".join(reasoning) if reasoning else None
    if parts or message.role != "user":
        messages.append(message)


def _convert_result(block: Block, messages: list[chat.Message]) -> None:
    texts: list[str] = []
    images: list[str | dict[str, Any]] = []
    references: list[str | dict[str, Any]] = []
    if isinstance(block.content, str):
        texts.append(block.content)
    else:
        for item in block.content or ():
            if not isinstance(item, dict):
                continue
            kind = item.get("type")
            if kind == "text":
                texts.append(str(item.get("text", "")))
            elif kind == "image" and isinstance(item.get("source"), dict):
                images.append(_image(item["source"]))
            elif kind == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
                references.append({"type": "tool_reference", "name": name})
    call_id = block.tool_use_id or ""
    messages.append(chat.Message(role="tool", tool_call_id=call_id, content="\n".join(texts)))
    if images:
        messages.append(chat.Message(role="user", content=images))
    if references:
        messages.append(chat.Message(role="tool", tool_call_id=call_id, content=references))


def _image(source: dict[str, Any]) -> dict[str, Any]:
    """Convert an image, given by URL or as base64, to OpenAI's form (data go into a data URL)."""
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}
