"""``extproc top``: a running router, live, in a terminal.

Reads ``GET /status`` from the address of the router's ``--metrics``, which answers this machine only.
``--once`` prints everything and ends. The live view keeps on over restarts of the router.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import msgspec
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from extproc.live import figures
from extproc.live.client import ServerError, base_url, fetch
from extproc.live.keys import Keyboard
from extproc.live.status import PoolStatus, Status
from extproc.live.tables import ended, flow
from extproc.live.top_view import SORTS, help_page, report, screen

DEFAULT_SERVER = "http://127.0.0.1:9090"

#: How soon a new size of the window shows.
_RESIZE_S = 0.25

#: What a terminal of the last century can't show, and what it can.
_ASCII = str.maketrans("█░–…→×", "#.-~>x")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which router, and how it is shown."""
    parser.add_argument(
        "--server",
        default=DEFAULT_SERVER,
        metavar="URL",
        help="the running router's --metrics (default %(default)s)",
    )
    parser.add_argument("--pool", metavar="NAME", help="the pool to show (default: the first; --once: all)")
    parser.add_argument(
        "--interval",
        type=_interval_s,
        default=1.0,
        metavar="S",
        help="between readings (default %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print everything and end")
    parser.add_argument(
        "--json", action="store_true", help="print what the router tells, a line for each reading"
    )


def run(args: argparse.Namespace) -> int:
    """Show it until told to end. 2: the router, or the pool, can't be had."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        status = fetch(args.server)
        _chosen(status, args.pool)
        with _ending_on_sigterm():
            if args.json:
                _print_json(args, status)
            elif args.once:
                _print(console, status, args.pool)
            elif console.is_terminal and not console.is_dumb_terminal:
                _Top(console, args, status).run()
            else:
                _print_on(console, args, status)
    except ServerError as error:
        print(f"extproc top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass  # that is how it ends
    return 0


def _interval_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text}: use seconds from 0.1 to 3600")
    return seconds


def _chosen(status: Status, name: str | None) -> list[PoolStatus]:
    """The pools of that name, or all. Raises ServerError."""
    pools = [pool for pool in status.pools if name in (None, pool.name)]
    if not pools and name is not None:
        known = ", ".join(pool.name for pool in status.pools) or "none"
        raise ServerError(f"--pool {name}: no such pool; there are: {known}")
    return pools


# --- printed -----------------------------------------------------------------------------------------


def _print(console: Console, status: Status, name: str | None) -> None:
    pools = _chosen(status, name)
    lines = report(status, pools, console.width if console.is_terminal else None)
    for line in lines if pools else [*lines, Text(f"{status.config} has no pool")]:
        console.print(_fit_for(console, line), soft_wrap=True)


def _print_on(console: Console, args: argparse.Namespace, first: Status) -> None:
    """One report after the other, where there is no screen to draw on."""
    for status in _readings(args, first):
        _print(console, status, args.pool)
        console.print()


def _print_json(args: argparse.Namespace, first: Status) -> None:
    for status in [first] if args.once else _readings(args, first):
        told = msgspec.json.encode(_only(status, args.pool))
        print((msgspec.json.format(told) if args.once else told).decode(), flush=True)


def _readings(args: argparse.Namespace, status: Status) -> Iterator[Status]:
    """The first, and all later ones that come; what goes wrong goes to standard error."""
    while True:
        yield status
        while True:
            time.sleep(args.interval)
            try:
                status = fetch(args.server)
                _chosen(status, args.pool)
                break
            except ServerError as error:
                print(f"extproc top: {error}", file=sys.stderr, flush=True)


def _only(status: Status, name: str | None) -> Status:
    if name is None:
        return status
    return replace(
        status,
        pools=[pool for pool in status.pools if pool.name == name],
        decisions=[decision for decision in status.decisions if decision.pool == name],
        alarms=[alarm for alarm in status.alarms if alarm.pool in ("", name)],
    )


# --- live --------------------------------------------------------------------------------------------


class _Poller(threading.Thread):
    """Reads on and on, so that keys are answered while the router isn't."""

    def __init__(self, server: str, interval_s: float, status: Status) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._interval_s = interval_s
        self._end = threading.Event()
        self.news, self._tell = os.pipe()
        self.status = status
        self.error: str | None = None
        self.read_s = time.monotonic()  # when the status came

    def run(self) -> None:
        while not self._end.wait(self._interval_s):
            try:
                self.status, self.error, self.read_s = fetch(self._server), None, time.monotonic()
            except ServerError as error:
                self.error = error.why
            os.write(self._tell, b".")

    def end(self) -> None:
        """No more; a reading under way ends with the process."""
        self._end.set()


class _Top:
    """The live view."""

    def __init__(self, console: Console, args: argparse.Namespace, status: Status) -> None:
        self._console = console
        self._server = base_url(args.server)
        self._poller = _Poller(args.server, args.interval, status)
        self._shown = status
        self._pool = args.pool
        self._sort = next(iter(SORTS))
        self._help = self._still = self._stopping = False
        self._keyboard = Keyboard()

    def run(self) -> None:
        """Until somebody presses q. Ctrl-Z gives the terminal back meanwhile."""
        self._poller.start()
        signal.signal(signal.SIGTSTP, lambda number, frame: setattr(self, "_stopping", True))
        try:
            while True:
                with (
                    self._keyboard.listening(),
                    Live(console=self._console, screen=True, auto_refresh=False) as live,
                ):
                    self._show(live)
                if not self._stopping:
                    return
                os.kill(os.getpid(), signal.SIGSTOP)
                self._stopping = False  # and here it goes on
        finally:
            self._poller.end()

    def _show(self, live: Live) -> None:
        size, stale = None, True
        while not self._stopping:
            if stale or size != self._console.size:
                size = self._console.size
                live.update(self._frame(size.width, size.height), refresh=True)
            keys = self._keyboard.pressed(_RESIZE_S, self._poller.news)
            if "q" in keys:
                return
            for key in keys:
                self._press(key)
            stale = self._heard() or bool(keys)

    def _heard(self) -> bool:
        """Whether the poller has news."""
        os.set_blocking(self._poller.news, False)
        heard = False
        with suppress(BlockingIOError):
            heard = bool(os.read(self._poller.news, 4096))
        if heard and not self._still:
            self._shown = self._poller.status
        return heard

    def _press(self, key: str) -> None:
        if self._help:
            self._help = False
        elif key in "h?":
            self._help = True
        elif key == " ":
            self._still = not self._still
        elif key == "s":
            self._sort = _after(self._sort, list(SORTS))
        elif key == "p" and self._shown.pools:
            names = [pool.name for pool in self._shown.pools]
            self._pool = _after(self._pool or names[0], names)

    def _frame(self, width: int, height: int) -> Group:
        status = self._shown
        first = status.pools[0] if status.pools else None
        pool = next((pool for pool in status.pools if pool.name == self._pool), first)
        if self._help:
            lines = help_page(width, height)
        elif pool is None:
            lines = [Text(f"{status.config} has no pool")]
        else:
            lines = screen(status, pool, width, height, self._sort)
        lines += [Text()] * (height - 1 - len(lines))
        return Group(*[_fit_for(self._console, line) for line in [*lines, self._foot(status, width)]])

    def _foot(self, status: Status, width: int) -> Text:
        if self._poller.error is not None:
            old = figures.age(time.monotonic() - self._poller.read_s)
            told = f"no answer for {old}: {self._poller.error}; {self._server}"
            return ended(Text(told, "bold red"), width)
        if self._help:
            return Text("any key: back")
        items: list[Text | str] = [
            "q quit",
            *(["p pool"] if len(status.pools) > 1 else []),
            f"s sort: {self._sort}",
            Text("held still", "bold yellow") if self._still else "space hold",
            "h help",
            self._server,
        ]
        return flow(items, width, 1)[0]


def _after(current: str, names: Sequence[str]) -> str:
    """The next in turn."""
    return names[(names.index(current) + 1) % len(names) if current in names else 0]


def _fit_for(console: Console, line: Text) -> Text:
    if console.encoding.startswith("utf"):
        return line
    copy = line.copy()
    copy.plain = copy.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return copy


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that the terminal is put back as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
