"""Following the configuration files: every change that can be read takes effect, a broken one is only told.

Files are compared by content once a second. That sees a write in place, a rename over the file, and the swap
of a symlink above it (how Kubernetes updates a mounted ConfigMap), on every file system, network ones
included. A file that is being written is left alone until two looks in a row agree: half a YAML is often
a valid YAML with fewer workers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from extproc.envoyconf import ConfigError, load
from extproc.fleet.config import RouterConfig

#: File to the digest of its content; None if it can't be read.
_Seen = dict[str, bytes | None]


class Watcher:
    """Follows one configuration file and all the files that it points to.

    ``on_config`` gets each new configuration, ``on_error`` each new failure; both are plain calls on the
    event loop. A configuration equal to the one before is not told again.
    """

    def __init__(
        self,
        path: str | Path,
        on_config: Callable[[RouterConfig], None],
        on_error: Callable[[ConfigError], None],
        *,
        interval_s: float = 1.0,
        settle_s: float = 0.1,
    ):
        self._path = str(path)
        self._on_config = on_config
        self._on_error = on_error
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._config: RouterConfig | None = None
        self._seen: _Seen = {}
        #: Whether the files' latest content was refused.
        self.refused = False

    def start(self) -> RouterConfig:
        """Load for the first time and return the configuration; raises ConfigError. Blocks."""
        self._seen, outcome = _load(self._path, {})
        if isinstance(outcome, ConfigError):
            raise outcome
        self._config = outcome
        return outcome

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            seen = await asyncio.to_thread(_look, self._seen)
            if seen != self._seen:
                await self._reload(await self._settled(seen))

    async def _settled(self, seen: _Seen) -> _Seen:
        while True:
            await asyncio.sleep(self._settle_s)
            again = await asyncio.to_thread(_look, seen)
            if again == seen:
                return seen
            seen = again

    async def _reload(self, seen: _Seen) -> None:
        loaded, outcome = await asyncio.to_thread(_load, self._path, seen)
        if isinstance(outcome, ConfigError):
            # What was good before stays watched, too: the way back may be to put an old file in place.
            self._seen = seen | loaded
            self.refused = True
            self._on_error(outcome)
            return
        self._seen = loaded
        self.refused = False
        if outcome != self._config:
            self._config = outcome
            self._on_config(outcome)


def _load(path: str, seen: _Seen) -> tuple[_Seen, RouterConfig | ConfigError]:
    """Load, and the files that were read with what they held before.

    A file's digest is older than what was read of it, so no change can fall between the two.
    """
    while True:
        outcome: RouterConfig | ConfigError
        try:
            outcome = load(path)
        except ConfigError as error:
            outcome = error
        unseen = [file for file in outcome.files if file not in seen]
        if not unseen:
            return {file: seen[file] for file in outcome.files}, outcome
        seen = seen | _look(unseen)


def _look(files: Iterable[str]) -> _Seen:
    return {file: _digest(file) for file in files}


def _digest(file: str) -> bytes | None:
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).digest()
    except OSError:
        return None
