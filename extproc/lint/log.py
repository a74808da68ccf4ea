"""Request bodies from logs: JSON lines, bare or in an envelope, plain or gzip, from files or standard input.

A line is a request body as a client sent it, or an object that holds one in ``body`` or ``request`` (as an
object or as JSON text), with an optional ``path`` (or ``url``), ``timestamp`` and ``tenant``. So what
`extproc simulate --trace` reads is read here too. A line that can't be used is named and passed over.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, cast

import msgspec

from extproc.routing.demand import digest

#: A longer line is no request: Envoy buffers less.
MAX_LINE_BYTES = 64 * 1024 * 1024

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LATEST_S = 1e11  # as seconds, the year 5138: larger timestamps are in ms, us or ns


class LogError(Exception):
    """A file can't be read at all; the text names it and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request. ``tenant``: digest, "" for none. ``time_s``: Unix or any other epoch, None if unknown."""

    file: str
    line: int
    path: str
    body: bytes
    time_s: float | None
    tenant: str


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't be used, and why."""

    file: str
    line: int
    why: str


class _Line(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw()
    request: msgspec.Raw = msgspec.Raw()
    path: Any = None
    url: Any = None
    timestamp: Any = None
    tenant: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    hash_ids: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Line).decode
_decode_text = msgspec.json.Decoder(str).decode


def read_logs(files: Iterable[str]) -> Iterator[Entry | BadLine]:
    """All lines of all files, in order; ``-`` is standard input. Raises LogError."""
    for name in files:
        try:
            if name == "-":
                yield from _read(cast(io.BufferedReader, sys.stdin.buffer), "stdin")
            else:
                with open(name, "rb") as file:
                    yield from _read(file, name)
        except OSError as error:
            raise LogError(f"{name}: {error.strerror or error}") from error


def _read(file: io.BufferedReader, name: str) -> Iterator[Entry | BadLine]:
    lines: IO[bytes] = file
    if file.peek(2)[:2] == _GZIP_MAGIC:
        lines = cast(IO[bytes], gzip.GzipFile(fileobj=file))
    number = 0
    while True:
        number += 1
        try:
            line = lines.readline(MAX_LINE_BYTES)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := lines.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield BadLine(name, number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
                continue
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield BadLine(name, number, f"gzip: {error}; nothing behind it can be read")
            return
        if not line:
            return
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.strip():
            yield _parse(line, name, number)


def _parse(line: bytes, name: str, number: int) -> Entry | BadLine:
    try:
        entry = _decode(line)
        body = entry.body or entry.request
        if bytes(body).startswith(b"{"):
            inner = _decode(body)
            if inner.body and not inner.messages:  # {"request": {"url": …, "body": {…}}}
                entry.path, entry.url = inner.path or entry.path, inner.url or entry.url
                body, inner = inner.body, _decode(_text(inner.body))
        elif body:
            inner = _decode(_text(body))
        elif entry.hash_ids:
            return BadLine(name, number, "only hash_ids; lint needs the request's body")
        else:
            body, inner = msgspec.Raw(line), entry
    except msgspec.ValidationError:
        return BadLine(
            name, number, "not an object with a request's body; one a line (jq -c '.[]' splits a list)"
        )
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return BadLine(name, number, f"not JSON: {error}")
    path = entry.path or entry.url
    return Entry(
        name,
        number,
        path if isinstance(path, str) else _guess(inner),
        _text(body),
        _seconds(entry.timestamp),
        digest(str(entry.tenant)) if isinstance(entry.tenant, str | int) else "",
    )


def _text(body: msgspec.Raw) -> bytes:
    """A body as it was sent; logs often hold it as a string."""
    raw = bytes(body).strip()
    return _decode_text(raw).encode() if raw.startswith(b'"') else raw


def _guess(body: _Line) -> str:
    """The API by its shape, for logs that don't name the path."""
    if body.messages:
        anthropic = (
            body.system
            or b'"input_schema"' in bytes(body.tools)
            or any(mark in bytes(body.messages) for mark in (b'"tool_result"', b'"tool_use"'))
        )
        return "/v1/messages" if anthropic else "/v1/chat/completions"
    return "/v1/responses" if body.input else "/v1/completions"


def _seconds(value: Any) -> float | None:
    """A timestamp: seconds (or ms, us, ns), as a number or as text, or ISO 8601; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                return datetime.fromisoformat(value).timestamp()
            except (ValueError, OverflowError, OSError):
                return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e20:
        return None
    seconds = float(value)
    while seconds > _LATEST_S:
        seconds /= 1000
    return seconds
