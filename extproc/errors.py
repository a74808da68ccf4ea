"""Errors that a user can cause, and that commands turn into a line and an exit code."""

from __future__ import annotations


class ListenError(Exception):
    """An address can't be listened on; the text names it and the reason."""


class TracingError(Exception):
    """Tracing was asked for and can't be done; the text names the option or variable and what to do."""
