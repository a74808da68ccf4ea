"""Child processes with a log file, a readiness check and an end that is certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
#: Below the range from which systems take ports for outgoing connections, which could hit a chosen one.
_PORTS = range(15_000, 30_000)


class ProcessError(RuntimeError):
    """A child did not start, or ended too early; the message has the end of its log."""


class Process:
    """One child, started and restarted by the same command. It ends with its parent, whatever ends that."""

    def __init__(self, name: str, command: Sequence[str], log: Path, ready: Callable[[], bool]) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self._ready = ready
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, None before the first start."""
        return self._child.pid if self._child else None

    @property
    def running(self) -> bool:
        """Whether it was started and hasn't ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start without waiting until it is ready. The log is appended to."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the parent, which ends its children in order.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def wait_ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait for the readiness check. Raises ProcessError when it ends before, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if not self.running:
                code = self._child.returncode if self._child else None
                raise ProcessError(f"{self.name} ended with exit code {code}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} was not ready after {timeout_s:.0f} s\n{self.log_tail()}")
            time.sleep(0.05)

    def terminate(self) -> None:
        """Send SIGTERM, without waiting."""
        if self._child is not None and self.running:
            self._child.terminate()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> int | None:
        """SIGTERM, then SIGKILL after a while; its exit code, None if it was never started."""
        self.terminate()
        if self._child is None:
            return None
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._child.returncode

    def restart(self) -> None:
        """Stop, start, wait until ready."""
        self.stop()
        self.start()
        self.wait_ready()

    def cpu_s(self) -> float:
        """CPU seconds used so far, user and system; 0 where the system doesn't tell."""
        with contextlib.suppress(OSError, ValueError):
            # After the command's name in parentheses: fields 14 and 15 of proc(5), in clock ticks.
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The end of its log, for messages."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        tail = text.splitlines()[-lines:] or ["(empty)"]
        return f"  end of {self.log}:\n" + "\n".join("  | " + line for line in tail)


def machine_cpu() -> tuple[float, float]:
    """CPU time of the whole machine since its start: busy, and in all; (0, 0) where it isn't told."""
    with contextlib.suppress(OSError, ValueError):
        ticks = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
        return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))
    return 0.0, 0.0


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many ports that nobody listens on just now."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ProcessError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}")


def answers(url: str) -> bool:
    """Whether a GET gives 200 within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:  # noqa: S310 - http, ours
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def accepts(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _die_with_parent() -> None:
    # Linux only; elsewhere `prctl` is missing and a killed parent leaves its children behind.
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
