"""Asks every worker's health page, and has the pools look at their clocks.

One task a worker: ask, note, sleep; a worker that failed a request is asked at once. What an answer means is
`extproc.routing.health`'s business.
"""

from __future__ import annotations

import asyncio
import errno
import random
import time
from dataclasses import dataclass, field

import aiohttp

from extproc.observe.engines import EngineObserver
from extproc.router import Router
from extproc.routing.health import Probe, State
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

#: How often pools look for silence and for ejections that are over.
CHECK_INTERVAL_S = 0.25

#: A check that comes later than this says that we were stopped, not that the workers are silent.
LATE_S = 0.5

#: A worker that isn't healthy is asked at least so often.
UNWELL_INTERVAL_S = 1.0

#: Suspicions don't make it more frequent than this.
LEAST_INTERVAL_S = 0.05

#: Sleeps vary by this share, either way.
JITTER = 0.1


@dataclass(slots=True, eq=False)
class _Patient:
    pool: Pool
    worker: Worker
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Prober:
    """Watches the workers of the router's pools while `run` runs."""

    def __init__(self, router: Router, observer: EngineObserver) -> None:
        self._router = router
        self._observer = observer
        self._session: aiohttp.ClientSession | None = None
        self._patients: dict[tuple[str, str], _Patient] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        # A new connection each time: that is what a request may need, and it finds a closed port.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            self._router.on_suspect = self._suspect
            try:
                self.reconcile()
                await self._keep_checking()
            finally:
                self._session = None
                tasks = [patient.task for patient in self._patients.values() if patient.task]
                for key in list(self._patients):
                    self._drop(key)
                await asyncio.gather(*tasks, return_exceptions=True)

    def reconcile(self) -> None:
        """Follow the router's pools; call it after each new configuration."""
        if self._session is None:
            return
        wanted = {
            (name, worker.address): (pool, worker)
            for name, pool in self._router.pools.items()
            if pool.settings.health_interval_s > 0
            for worker in pool.workers
        }
        for key, patient in list(self._patients.items()):
            if wanted.get(key) != (patient.pool, patient.worker):
                self._drop(key)
        for key, (pool, worker) in wanted.items():
            if key not in self._patients:
                patient = self._patients[key] = _Patient(pool, worker)
                patient.task = asyncio.create_task(self._keep_asking(patient), name=f"probe {key[1]}")

    def _drop(self, key: tuple[str, str]) -> None:
        patient = self._patients.pop(key)
        if patient.task is not None:
            patient.task.cancel()

    def _suspect(self, pool: Pool, worker: Worker) -> None:
        patient = self._patients.get((pool.name, worker.address))
        if patient is not None:
            patient.hurry.set()

    async def _keep_checking(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s += CHECK_INTERVAL_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now = time.monotonic()
            if now - due_s > LATE_S:  # what came meanwhile hasn't been read yet
                due_s = now
                continue
            for pool in list(self._router.pools.values()):
                pool.check(now)

    # --- one worker ------------------------------------------------------------------------------

    async def _keep_asking(self, patient: _Patient) -> None:
        pool, worker, hurry = patient.pool, patient.worker, patient.hurry
        await self._sleep(hurry, random.uniform(0.0, pool.settings.health_interval_s))
        while True:
            hurry.clear()
            asked_s = time.monotonic()
            try:
                probe = await self._ask(pool, worker)
                pool.probed(worker, probe, asked_s, time.monotonic())
            except Exception as error:  # a fault of ours must not end the watch
                self._observer.fault(pool.name, worker.address, error)
            await asyncio.sleep(LEAST_INTERVAL_S)
            wait_s = pool.settings.health_interval_s
            if worker.health.state is not State.HEALTHY:
                wait_s = min(wait_s, UNWELL_INTERVAL_S)
            await self._sleep(hurry, wait_s * random.uniform(1.0 - JITTER, 1.0 + JITTER))

    async def _sleep(self, hurry: asyncio.Event, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await hurry.wait()
        except TimeoutError:
            pass

    async def _ask(self, pool: Pool, worker: Worker) -> Probe:
        assert self._session is not None
        path = pool.settings.health_path
        url = f"http://{worker.address}{path if path.startswith('/') else '/' + path}"
        timeout = aiohttp.ClientTimeout(total=pool.settings.health_timeout_s)
        try:
            async with self._session.get(url, allow_redirects=False, timeout=timeout) as response:
                if 200 <= response.status < 300:
                    return Probe.READY
                return Probe.NOT_READY if response.status == 503 else Probe.UNKNOWN
        except aiohttp.ClientConnectorError as error:
            return Probe.REFUSED if error.os_error.errno == errno.ECONNREFUSED else Probe.NO_ANSWER
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Probe.NO_ANSWER
