"""vLLM's reply bodies: whole completions and the chunks of a stream, as captured from vLLM 0.32.

A `Reply` writes the replies to one call. The generated text is ASCII words (`tokens.generate`), so the
chunk of a stream is cut from a template without a JSON encoder.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from extproc.emulator.api_requests import Call, Limits

FINGERPRINT = "vllm-0.32.0-emulated"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call, summed over its prompts and answers.

    ``cached_tokens`` is None where the engine does not report it, ``created_tokens`` (prompt tokens newly put
    into the cache) None for completions, which don't have it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    created_tokens: int | None

    def fields(self) -> dict[str, Any]:
        """The counts that every ``usage`` object starts with."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


class Reply:
    """Bodies and chunks for one call; ``request_id`` without the API's prefix."""

    def __init__(self, call: Call, request_id: str | None):
        self._call = call
        self._chat = call.kind == "chat"
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self.id = prefix + (request_id or call.request_id or uuid.uuid4().hex[:16])
        self._object = "text_completion"
        if self._chat:
            self._object = "chat.completion.chunk" if call.stream else "chat.completion"
        head = msgspec.json.encode(self._head())[:-1]
        self._head_bytes = b"data: " + head + b',"choices":[{"index":'

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self._object,
            "created": int(time.time()),
            "model": self._call.model,
        }

    def opening(self, index: int) -> bytes:
        """The chunk that comes just before a chat answer's first token; nothing for completions."""
        if not self._chat:
            return b""
        return (
            self._head_bytes
            + b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],' % index
            + b'"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def chunk(self, index: int, text: bytes, finish_reason: str | None) -> bytes:
        """A chunk with new text; the last one carries the reason."""
        middle = b'"delta":{"content":"%s"}' % text if self._chat else b'"text":"%s"' % text
        reason = b'"%s"' % finish_reason.encode() if finish_reason else b"null"
        tail = b'"logprobs":null,"finish_reason":%s' % reason
        if self._chat:
            tail += b',"stop_reason":null' if finish_reason else b""
            tail += b',"token_ids":null}]}\n\n'
        else:
            tail += b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
        return self._head_bytes + b"%d,%s,%s" % (index, middle, tail)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk without choices that ``stream_options.include_usage`` asks for."""
        fields = usage.fields()
        if usage.cached_tokens is not None:
            details = {"cached_tokens": usage.cached_tokens}
            if usage.created_tokens is not None:
                details["created_cache_tokens"] = usage.created_tokens
            fields["prompt_tokens_details"] = details
        body = self._head() | {"choices": [], "usage": fields, "system_fingerprint": FINGERPRINT}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def whole(self, texts: Sequence[str], usage: Usage) -> bytes:
        """The body of a reply that isn't streamed; one text an answer."""
        fields = usage.fields()
        fields["prompt_tokens_details"] = None
        if usage.cached_tokens is not None:
            fields["prompt_tokens_details"] = {
                "cached_tokens": usage.cached_tokens,
                "created_cache_tokens": usage.created_tokens,
                "multimodal_tokens": None,
            }
        fields["completion_tokens_details"] = None
        body = self._head() | {
            "choices": [self._choice(index, text) for index, text in enumerate(texts)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": fields,
        }
        if self._chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        body |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        return msgspec.json.encode(body)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            choice: dict[str, Any] = {"index": index, "message": message}
        else:
            choice = {"index": index, "text": text}
        choice |= {"logprobs": None, "finish_reason": self._call.finish_reason, "stop_reason": None}
        choice["token_ids"] = None
        if not self._chat:
            choice |= {"prompt_logprobs": None, "prompt_token_ids": None}
        return choice | {"routed_experts": None}


def stream_error(message: str) -> bytes:
    """What an open stream still gets when the engine dies: an error event, then the usual end."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n" + DONE


def models_body(limits: Limits, created: int) -> bytes:
    """The body of ``/v1/models``."""
    permission = {
        "id": "modelperm-" + uuid.uuid4().hex[:16],
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    models = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": limits.model_names[0],
            "parent": limits.model_names[0] if position else None,
            "max_model_len": limits.max_model_len if not position else None,
            "permission": [permission],
        }
        for position, name in enumerate(limits.model_names)
    ]
    return msgspec.json.encode({"object": "list", "data": models})
