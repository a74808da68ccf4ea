"""Errors in configuration: where, what value, what is wrong, how to fix it."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

#: Longer values are cut in messages.
_VALUE_CHARS = 80

_REPR = reprlib.Repr()
_REPR.maxlevel = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in one place. ``path`` is the way through the YAML; ``line`` counts from 1."""

    file: str
    path: str
    value: Any
    message: str
    fix: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        parts = [where]
        if self.path:
            parts.append(self.path)
        shown = "" if self.value is None else f"{_short(self.value)} "
        parts.append(f"{shown}{self.message}")
        text = ": ".join(parts)
        return f"{text}; {self.fix}" if self.fix else text


class ConfigError(Exception):
    """The configuration can't be used. ``problems`` holds all that was found, ``files`` what was read."""

    def __init__(self, problems: list[Problem], files: tuple[str, ...] = ()):
        super().__init__(problems)
        self.problems = problems
        self.files = files

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def _short(value: Any) -> str:
    # Not repr(): what YAML anchors share may be huge when written out.
    text = _REPR.repr(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 3]}..."
