"""Failures on demand, for drills and tests: what a broken worker does to its clients.

``POST /emulate`` with one JSON object arms a fault for the next requests, ``GET`` shows what is armed,
``DELETE`` disarms it. A request that carries the same object in an ``x-emulate`` header breaks just itself.

======== =====================================================================================
fail     what happens
======== =====================================================================================
503, …   an error reply of that status, 400 to 599
reset    the connection is reset: before the headers, or after ``after_tokens`` tokens
hang     no reply, ever; with ``after_tokens`` a stream that falls silent
delay    the request waits ``seconds`` (wall time) first, then goes on as usual
refuse   the port is closed for ``seconds`` (for ever without), running requests are reset
crash    the engine dies: ``/health`` says 503, open streams get an error event and ``[DONE]``
slow     engine steps take ``factor`` times as long (10), for ``seconds`` (until disarmed without)
freeze   ``/metrics`` stays as it is now
lag      ``/metrics`` is ``seconds`` old
zero     ``/metrics`` says that nothing runs or waits
======== =====================================================================================

``times``: how many requests (1; 0: until disarmed). From ``refuse`` on, faults happen at once, whatever the
requests do; the last four end when disarmed.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

HEADER = "x-emulate"
_PAGE_KINDS = ("freeze", "lag", "zero")
_KINDS = ("reset", "hang", "delay", "refuse", "crash", "slow", *_PAGE_KINDS)
_FIELDS = {"fail", "after_tokens", "seconds", "times", "factor"}
_LOAD_GAUGES = re.compile(
    rb"^(vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}]*\}) \S+$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail; ``status`` is set when ``kind`` is "status"."""

    kind: str
    status: int = 0
    after_tokens: int = 0
    seconds: float = 0.0
    times: int = 1
    factor: float = 10.0


def parse_fault(body: bytes | str) -> Fault:
    """Read a fault. Raises ValueError with what is wrong and what would do."""
    try:
        fields: Any = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict) or not fields.keys() <= _FIELDS:
        raise ValueError(f"want one object with the fields {', '.join(sorted(_FIELDS))}")
    fail = str(fields.get("fail"))
    kind, status = fail, 0
    if fail.isdecimal():
        kind, status = "status", int(fail)
    if not (kind in _KINDS or (kind == "status" and 400 <= status <= 599)):
        raise ValueError(f"fail is {fail!r}; want a status from 400 to 599 or one of {', '.join(_KINDS)}")
    for name in ("after_tokens", "seconds", "times", "factor"):
        value = fields.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(f"{name} is {value!r}; want a number from 0")
    return Fault(
        kind=kind,
        status=status,
        after_tokens=int(fields.get("after_tokens", 0)),
        seconds=float(fields.get("seconds", 0.0)),
        times=int(fields.get("times", 1)),
        factor=float(fields.get("factor", 10.0)),
    )


class Faults:
    """The fault that is armed, and for how many more requests; and what is wrong with ``/metrics``."""

    def __init__(self) -> None:
        self._armed: Fault | None = None
        self._left = 0
        self._page: Fault | None = None
        self._pages: deque[tuple[float, bytes]] = deque()

    def arm(self, fault: Fault | None) -> None:
        """Replace what is armed; None disarms all."""
        if fault is None or fault.kind in _PAGE_KINDS:
            self._page = fault
            self._pages.clear()
        if fault is not None and fault.kind in _PAGE_KINDS:
            return
        self._armed = fault
        self._left = fault.times if fault else 0

    def state(self) -> dict[str, Any]:
        """What is armed, for ``GET /emulate``."""
        if self._armed is None:
            return {"fail": None}
        fail = self._armed.status if self._armed.kind == "status" else self._armed.kind
        return {"fail": fail, "left": self._left or None}

    def take(self, header: str | None) -> Fault | None:
        """The fault for a request that arrives now. Raises ValueError for a header that can't be read."""
        if header is not None:
            return parse_fault(header)
        fault = self._armed
        if fault is not None and self._left:
            self._left -= 1
            if not self._left:
                self._armed = None
        return fault

    def page(self, truth: bytes, now: float) -> bytes:
        """What ``/metrics`` shows instead of ``truth``. A lag is exact to the time between two readings."""
        fault = self._page
        if fault is None:
            return truth
        if fault.kind == "zero":
            return _LOAD_GAUGES.sub(rb"\1 0.0", truth)
        if fault.kind == "lag" or not self._pages:
            self._pages.append((now, truth))
        while fault.kind == "lag" and len(self._pages) > 1 and self._pages[1][0] <= now - fault.seconds:
            self._pages.popleft()
        return self._pages[0][1]
