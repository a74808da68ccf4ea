"""Single keys from a terminal, as they are pressed, and the terminal back as it was."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

#: What arrows, function keys and keys with Alt send (ECMA-48, section 5.4; SS3; an escape before the key).
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])?")


class Keyboard:
    """Standard input, if it is a terminal; else nobody ever presses a key."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keys come at once and aren't shown, meanwhile."""
        if self._fd is None:
            yield
            return
        before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        try:
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def pressed(self, wait_s: float, *others: int) -> str:
        """The keys pressed within that time; "" for none. One of ``others`` that can be read ends it, too."""
        fds = [*others] if self._fd is None else [self._fd, *others]
        ready, _, _ = select.select(fds, [], [], wait_s)
        if self._fd is None or self._fd not in ready:
            return ""
        typed = os.read(self._fd, 64)
        if not typed:  # the terminal is gone
            self._fd = None
        return _SEQUENCE.sub("", typed.decode(errors="replace"))
