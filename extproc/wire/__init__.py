"""Envoy's ext_proc v3 messages, as far as we speak them.

Everything named ``*_pb2`` in this package is generated from ``proto/extproc/wire/`` by ``make proto`` and
isn't edited by hand. The names, numbers and types are Envoy's own, so the bytes are too; only the Python
import path differs. Import the messages from here: nothing else needs to know which file declares one.
"""

from __future__ import annotations

from typing import Final

from extproc.wire.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
from extproc.wire.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    GrpcStatus,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
    StreamedBodyResponse,
    StreamedImmediateResponse,
    TrailersResponse,
)
from extproc.wire.http_status_pb2 import HttpStatus, StatusCode
from extproc.wire.processing_mode_pb2 import ProcessingMode

#: gRPC service and method that Envoy's filter calls.
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"
#: The path of that call, as it stands in HTTP/2's ``:path``.
PROCESS_PATH: Final = f"/{SERVICE}/{METHOD}"

__all__ = [
    "METHOD",
    "PROCESS_PATH",
    "SERVICE",
    "BodyMutation",
    "BodyResponse",
    "CommonResponse",
    "GrpcStatus",
    "HeaderMap",
    "HeaderMutation",
    "HeaderValue",
    "HeaderValueOption",
    "HeadersResponse",
    "HttpBody",
    "HttpHeaders",
    "HttpStatus",
    "HttpTrailers",
    "ImmediateResponse",
    "Metadata",
    "ProcessingMode",
    "ProcessingRequest",
    "ProcessingResponse",
    "ProtocolConfiguration",
    "StatusCode",
    "StreamedBodyResponse",
    "StreamedImmediateResponse",
    "TrailersResponse",
]
