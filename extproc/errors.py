"""Errors that a user can cause, and that commands turn into a line and an exit code."""

from __future__ import annotations


class ListenError(Exception):
    """An address can't be listened on; the text names it and the reason."""
