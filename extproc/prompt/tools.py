"""Tools: converted to canonical JSON once, since agents send the same ones with each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from extproc.prompt.canonical import ordered_json

#: Bytes of tools remembered for each API, both forms counted.
_REMEMBERED_BYTES = 32 * 1024 * 1024


class ToolsReader:
    """Turns an API's ``tools``, as they stand in the body, into canonical JSON.

    The least recently used are forgotten first. The key is the text itself, so no two tools can collide.
    """

    __slots__ = ("_convert", "_remembered", "_room_bytes")

    def __init__(
        self, convert: Callable[[bytes], Sequence[Any] | None], room_bytes: int = _REMEMBERED_BYTES
    ) -> None:
        """``convert`` parses tools and brings them to the form that chat templates see."""
        self._convert = convert
        self._remembered: OrderedDict[bytes, bytes] = OrderedDict()
        self._room_bytes = room_bytes

    def __call__(self, raw: msgspec.Raw) -> bytes:
        """Return the tools as canonical JSON, b"" if there are none.

        Raises:
            msgspec.DecodeError: not JSON; `msgspec.ValidationError` if not tools of this API.
            RecursionError: nested too deep.

        """
        key = bytes(raw)
        if not key:
            return b""
        known = self._remembered.get(key)
        if known is not None:
            self._remembered.move_to_end(key)
            return known
        tools = self._convert(key)
        canonical = ordered_json(tools) if tools else b""
        self._remembered[key] = canonical
        self._room_bytes -= len(key) + len(canonical)
        while self._room_bytes < 0:
            old = self._remembered.popitem(last=False)
            self._room_bytes += len(old[0]) + len(old[1])
        return canonical
