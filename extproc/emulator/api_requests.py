"""The OpenAI request bodies as vLLM reads them: bytes in, a `Call` or an `ApiError` out.

The chat template is ChatML-like: tools, then the messages in order, then the head of the assistant's turn.
It is written here anew, not shared with the router's reader of prompts, so that a test which drives both
compares two independent opinions on what the same prompt is.

Status codes, messages and the ``{"error": {message, type, param, code}}`` shape are those of vLLM 0.32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from extproc.emulator import tokens

Kind = Literal["chat", "completion"]


class ApiError(Exception):
    """A reply other than 200, as vLLM would give it."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model accepts; lengths in tokens."""

    model_names: tuple[str, ...]
    max_model_len: int
    default_output_tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request: one or more prompts, each answered ``n`` times with ``output_tokens`` tokens."""

    kind: Kind
    model: str
    prompts: tuple[bytes, ...]
    n: int
    output_tokens: int
    finish_reason: Literal["length", "stop"]
    stream: bool
    include_usage: bool
    cache_salt: str
    request_id: str | None

    @property
    def seed(self) -> int:
        """Seed of the first block's hash: LoRA adapters and salts never share blocks."""
        return tokens.scope_seed(self.model, self.cache_salt)


def parse_call(kind: Kind, body: bytes, content_type: str, limits: Limits) -> Call:
    """Read a body of ``/v1/chat/completions`` or ``/v1/completions``. Raises ApiError."""
    fields = decode_object(body, content_type)
    model = _model(fields, limits)
    if kind == "chat":
        prompts: tuple[bytes, ...] = (render_chat(fields),)
        asked = fields.get("max_completion_tokens")
        asked = fields.get("max_tokens") if asked is None else asked
    else:
        prompts = tuple(_completion_prompts(fields))
        # The completions API has always stopped at 16 tokens unless told otherwise.
        asked = fields.get("max_tokens", 16)
    longest = max(map(tokens.count, prompts))
    wanted = limits.default_output_tokens if asked is None else _integer("max_tokens", asked)
    if wanted > limits.max_model_len and asked is not None:
        message = f"max_tokens={wanted} cannot be greater than max_model_len={limits.max_model_len}."
        raise _bad_value("max_tokens", wanted, f"{message} Please request fewer output tokens.")
    if longest > limits.max_model_len:
        # The tokenizer stops behind the limit, so it doesn't know how long a longer text is.
        known = kind == "completion" and not _is_text(fields["prompt"])
        raise _too_long(longest if known else limits.max_model_len + 1, limits)
    # What there is no room for is not generated; no room at all is an error.
    output_tokens = _positive("max_tokens", min(wanted, limits.max_model_len - longest))
    options = fields.get("stream_options")
    return Call(
        kind=kind,
        model=model,
        prompts=prompts,
        n=_positive("n", _integer("n", fields.get("n") or 1)),
        output_tokens=output_tokens,
        finish_reason="stop" if asked is None else "length",
        stream=fields.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        cache_salt=_text(fields.get("cache_salt")),
        request_id=_text(fields.get("request_id")) or None,
    )


def decode_object(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError with FastAPI's words when it is none."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, message, "Bad Request")
    if not body:
        raise _missing("body", None)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        decoded = _decode_leniently(body)
    if not isinstance(decoded, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _invalid("model_attributes_type", "body", message, decoded)
    return decoded


def _decode_leniently(body: bytes) -> Any:
    # Python's own decoder has the last word, as in FastAPI: it takes NaN, and words errors as users see them.
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        place = f"body.{error.pos}"
        message = (
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': '{place}', 'msg': 'JSON decode error', "
            f"'input': '<dict of 0 items>', 'ctx': {{'error': '{error.msg}'}}}}"
        )
        raise ApiError(400, message, "Bad Request", place) from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None


def render_chat(fields: dict[str, Any]) -> bytes:
    """Tokens of a chat: tools and template arguments, messages, the head of the answer. Raises ApiError."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise _missing("body.messages", fields)
    out = [tokens.BEGIN]
    if tools := fields.get("tools"):
        out += (tokens.TOOLS, tokens.encode(_json(_normal_tools(tools))))
    for name in ("documents", "chat_template_kwargs"):
        if value := fields.get(name):
            out += (tokens.TOOLS, tokens.encode(name), tokens.encode(_json(value)))
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _missing(f"body.messages.{index}.role", message)
        out += (tokens.MESSAGE_START, tokens.encode(message["role"]))
        _render_content(out, message.get("content"), index)
        if calls := message.get("tool_calls"):
            out += (tokens.PART, tokens.encode(_json(calls)))
        out.append(tokens.MESSAGE_END)
    if fields.get("add_generation_prompt", True):
        out += (tokens.MESSAGE_START, tokens.encode("assistant"))
    return b"".join(out)


def _render_content(out: list[bytes], content: Any, index: int) -> None:
    if isinstance(content, str):
        out.append(tokens.encode(content))
    elif isinstance(content, list):
        # As a template of the "string" content format sees it: text parts joined by newlines.
        texts = []
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif isinstance(part, str):
                texts.append(part)
            else:
                out += (tokens.PART, tokens.encode(_json(part)))
        out.append(tokens.encode("\n".join(texts)))
    elif content is not None:
        place = f"body.messages.{index}.content"
        raise _invalid("string_type", place, "Input should be a valid string", content)


def _normal_tools(tools: Any) -> Any:
    # The engine's request model orders the keys that it knows; what is inside `parameters` stays as sent.
    if not isinstance(tools, list):
        return tools
    return [_ordered(tool, ("type", "function")) for tool in tools]


def _ordered(value: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(value, dict):
        return value
    ordered = {name: value[name] for name in names if name in value}
    ordered.update(value)
    if "function" in ordered:
        ordered["function"] = _ordered(ordered["function"], ("name", "description", "parameters"))
    return ordered


def _completion_prompts(fields: dict[str, Any]) -> list[bytes]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return [_completion_text(prompt)]
    if not isinstance(prompt, list) or not prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise ApiError(400, message, param="prompt")
    if _is_text(prompt):
        return [_completion_text(item) for item in prompt]
    lists = prompt if isinstance(prompt[0], list) else [prompt]
    try:
        return [tokens.from_ids(ids) for ids in lists]
    except (TypeError, OverflowError):
        message = "Input should be a string, a list of strings, or token ids"
        raise _invalid("prompt_type", "body.prompt", message, prompt) from None


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or all(isinstance(item, str) for item in prompt)


def _completion_text(prompt: str) -> bytes:
    return tokens.BEGIN + tokens.encode(prompt)


def _model(fields: dict[str, Any], limits: Limits) -> str:
    # A missing model is accepted and means the served one.
    model = fields.get("model") or limits.model_names[0]
    if model not in limits.model_names:
        aliases = ", ".join(limits.model_names)
        message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
        raise ApiError(404, message, "NotFoundError", "model")
    return str(model)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    return value


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise _bad_value(name, value, f"{name} must be at least 1, got {value}.")
    return value


def _too_long(prompt_tokens: int, limits: Limits) -> ApiError:
    at_least = "at least " if prompt_tokens == limits.max_model_len + 1 else ""
    message = (
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt "
        f"contains {at_least}{prompt_tokens} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt."
    )
    return _bad_value("input_tokens", prompt_tokens, message)


def _bad_value(name: str, value: int, message: str) -> ApiError:
    return ApiError(400, f"{message} (parameter={name}, value={value})", param=name)


def _missing(place: str, inside: object) -> ApiError:
    return _invalid("missing", place, "Field required", inside)


def _invalid(kind: str, place: str, message: str, value: object) -> ApiError:
    """What FastAPI finds; lists and objects are told by their size alone."""
    told = f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, list | dict) else str(value)
    error = {"type": kind, "loc": place, "msg": message, "input": told}
    return ApiError(400, f"1 validation error:\n  {error}", "Bad Request", place)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError, RecursionError):
        return json.dumps(value, separators=(",", ":"))
