"""A refusal as the HTTP answer that clients of LLM APIs understand.

The body is OpenAI's error object, with Anthropic's ``"type": "error"`` beside it. Both makers' client
libraries retry a 429 and a 503 by themselves, after ``retry-after-ms`` or else ``retry-after``; they take no
more than 60 s from it. ``retry-after`` is in whole seconds by RFC 9110, so it is rounded up.
"""

from __future__ import annotations

import json
from math import ceil

from extproc.routing.admission import Shed
from extproc.wire import HeaderMutation, HeaderValue, HeaderValueOption, HttpStatus, ImmediateResponse

_TYPES = {429: ("rate_limit_error", "rate_limit_exceeded"), 503: ("overloaded_error", "no_worker")}


def immediate(shed: Shed) -> ImmediateResponse:
    """The whole answer; Envoy sends it without asking a worker."""
    kind, code = _TYPES[shed.status]
    error = {"message": shed.message, "type": kind, "param": None, "code": code}
    headers = {"content-type": "application/json", "x-extproc-shed": shed.reason}
    if shed.retry_after_s is not None:
        headers["retry-after"] = str(max(1, ceil(shed.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, ceil(shed.retry_after_s * 1000)))
    return ImmediateResponse(
        status=HttpStatus(code=shed.status),  # type: ignore[arg-type]  # an open enum: any status will do
        headers=HeaderMutation(
            set_headers=[
                HeaderValueOption(
                    header=HeaderValue(key=name, raw_value=value.encode()),
                    append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
                )
                for name, value in headers.items()
            ]
        ),
        body=json.dumps({"type": "error", "error": error}).encode(),
        details=f"extproc_shed_{shed.reason}",
    )
