"""Options that every API has."""

from __future__ import annotations

from typing import Any

#: Above any context length; keeps later arithmetic within machine integers.
_MAX_OUTPUT_TOKENS = 2**31 - 1


def output_limit(value: Any) -> int | None:
    """Return a limit of output tokens, None if it is absent or not a limit (which the engine will say)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    return min(value, _MAX_OUTPUT_TOKENS)
