"""The state file: what the router learned of the caches, kept over a restart (``extproc serve --state``).

Written every half minute and at the end, by a rename, so that there is always a whole file. A file that
can't be used is a warning and an empty start, never a reason not to serve.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from extproc.observe import events
from extproc.router import Router
from extproc.routing.snapshot import SnapshotError, restore, save

SAVE_INTERVAL_S = 30.0


class StateFile:
    """One router's state on disk."""

    def __init__(
        self, path: Path, router: Router, tell: Callable[[events.Event], None] = lambda event: None
    ) -> None:
        self._path = path
        self._router = router
        self._tell = tell
        self._log = structlog.get_logger("extproc")

    def restore(self) -> None:
        """Take over what an earlier process saved, as far as it fits today's fleet."""
        try:
            data = self._path.read_bytes()
            blocks = restore(data, self._router.pools, time.monotonic(), time.time())
        except FileNotFoundError:
            self._log.info("no state file yet", state=str(self._path))
        except (OSError, SnapshotError) as error:
            self._log.warning("state file ignored, starting empty", state=str(self._path), why=str(error))
        else:
            self._log.info("state restored", state=str(self._path), blocks=blocks)

    async def keep(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            data = self._data()
            self._told(await asyncio.to_thread(self._write, data))

    def save(self) -> None:
        """Save now."""
        self._told(self._write(self._data()))

    def _told(self, saved: bool) -> None:
        self._tell(events.StateSaved() if saved else events.StateNotSaved())

    def _data(self) -> bytes:
        return save(self._router.pools, time.monotonic(), time.time())

    def _write(self, data: bytes) -> bool:
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            self._log.warning("state not saved", state=str(self._path), why=str(error))
            new.unlink(missing_ok=True)
            return False
        return True
