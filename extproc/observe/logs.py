"""structlog, as one JSON object a line on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Hashable

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str = "info") -> None:
    """Set up logging for the whole process. Events below ``level`` cost next to nothing."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class Seldom:
    """Lets one event of a kind through in ``interval_s``, and counts what it held back."""

    def __init__(self, interval_s: float = 60.0, kinds: int = 1000) -> None:
        self._interval_s = interval_s
        self._kinds = kinds
        self._last: dict[Hashable, tuple[float, int]] = {}

    def __call__(self, kind: Hashable) -> int:
        """How many events of this kind to report now: 0, or this one plus those held back."""
        now = time.monotonic()
        since, held = self._last.get(kind, (-self._interval_s, 0))
        if now - since < self._interval_s:
            self._last[kind] = (since, held + 1)
            return 0
        if len(self._last) >= self._kinds:
            self._last.clear()
        self._last[kind] = (now, 0)
        return held + 1
