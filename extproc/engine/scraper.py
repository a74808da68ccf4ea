"""Follows the ``/metrics`` of every worker, off the hot path.

One task a worker: read, note, sleep. The first readings are spread over a second, later ones by jitter, so
that neither the router nor a shared node sees them all at once. A failing worker is asked again soon, then
less and less often; what it told before stays known, with its age, and counts as unknown once it is old.

What readings are used for, and nothing else:

- the size of the worker's KV cache, where the YAML doesn't give one, goes to the picture of it;
- a restart empties that picture;
- the lengths of the prompts that ended teach how long a token is (`extproc.routing.lengths`);
- the times of the requests that ended teach the worker's speed (`extproc.routing.speed`);
- the tokens that were generated show a worker that has become slow (`extproc.routing.pace`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Iterable
from dataclasses import replace

import aiohttp

from extproc.engine.exposition import Decoder, NotMetricsError
from extproc.engine.report import SAME_START_S, EngineReport, differ, restarted
from extproc.engine.state import EngineState, Target
from extproc.observe.engines import EngineObserver
from extproc.router import Router
from extproc.routing.load import Worker
from extproc.routing.pool import Pool

#: The largest page that is read; a data-parallel vLLM with 16 engines has about 1 MB.
MAX_PAGE_BYTES = 8 * 1024 * 1024

#: Decoded at a time, in about 0.3 ms. At most two of them are buffered, so others get their turns.
CHUNK_BYTES = 64 * 1024

#: First readings are spread over this long.
START_SPREAD_S = 1.0

#: After a failure: this long, then twice as long each time ...
FIRST_RETRY_S = 1.0

#: ... up to the larger of this and the pool's interval.
LONGEST_RETRY_S = 30.0

#: Sleeps vary by this share, either way.
JITTER = 0.1

_HEADERS = {"accept": "text/plain;version=0.0.4", "accept-encoding": "identity"}


class ScrapeError(Exception):
    """A reading that failed; ``reason`` is one of a fixed set of words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Scraper:
    """Keeps a `Target` for each worker of the router's pools while `run` runs."""

    def __init__(self, router: Router, observer: EngineObserver) -> None:
        self._router = router
        self._observer = observer
        self._session: aiohttp.ClientSession | None = None
        self._targets: dict[tuple[str, str], Target] = {}

    @property
    def targets(self) -> Iterable[Target]:
        """All workers that are followed now. Safe to read from another thread."""
        return list(self._targets.values())

    def state(self, pool: str, address: str) -> EngineState:
        """What is known of that worker's engine."""
        target = self._targets.get((pool, address))
        return target.state if target else EngineState()

    async def run(self) -> None:
        """Follow until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=1, keepalive_timeout=30.0)
        async with aiohttp.ClientSession(
            connector=connector, headers=_HEADERS, auto_decompress=False, read_bufsize=CHUNK_BYTES
        ) as session:
            self._session = session
            try:
                self.reconcile()
                await asyncio.Event().wait()
            finally:
                self._session = None
                tasks = [target.task for target in self.targets if target.task]
                for key in list(self._targets):
                    self._drop(key)
                await asyncio.gather(*tasks, return_exceptions=True)

    def reconcile(self) -> None:
        """Follow the router's pools; call it after each new configuration."""
        if self._session is None:
            return
        wanted: dict[tuple[str, str], tuple[Pool, Worker]] = {
            (name, worker.address): (pool, worker)
            for name, pool in self._router.pools.items()
            if pool.settings.scrape_interval_s > 0
            for worker in pool.workers
        }
        for key, target in list(self._targets.items()):
            if wanted.get(key) != (target.pool, target.worker):
                self._drop(key)
        sized = self._sized_by_yaml()
        for key, (pool, worker) in wanted.items():
            target = self._targets.get(key) or self._follow(key, Target(pool, worker))
            target.learns_size = key not in sized
            # The new configuration has put the size back to what the YAML says, or doesn't say.
            self._apply_size(target)

    def _sized_by_yaml(self) -> set[tuple[str, str]]:
        return {
            (name, endpoint.address)
            for name, pool in self._router.config.pools.items()
            for endpoint in pool.endpoints
            if endpoint.cache_tokens or pool.settings.cache_tokens
        }

    def _follow(self, key: tuple[str, str], target: Target) -> Target:
        self._targets[key] = target
        target.task = asyncio.create_task(self._keep_reading(target), name=f"scrape {key[1]}")
        return target

    def _drop(self, key: tuple[str, str]) -> None:
        target = self._targets.pop(key)
        if target.task is not None:
            target.task.cancel()

    # --- one worker ------------------------------------------------------------------------------

    async def _keep_reading(self, target: Target) -> None:
        # The interval and the timeout may change while the worker stays.
        await asyncio.sleep(random.uniform(0.0, START_SPREAD_S))
        while True:
            try:
                await self._read_once(target)
            except Exception as error:  # a fault of ours must not end the following
                self._observer.fault(target.pool.name, target.worker.address, error)
            wait_s = delay_s(target.pool.settings.scrape_interval_s, target.state.failures)
            await asyncio.sleep(wait_s * random.uniform(1.0 - JITTER, 1.0 + JITTER))

    async def _read_once(self, target: Target) -> None:
        pool, worker = target.pool, target.worker
        try:
            report = await self._in_time(self._fetch(worker.address, pool), pool.settings.scrape_timeout_s)
        except ScrapeError as error:
            target.state = replace(target.state, failures=target.state.failures + 1)
            self._observer.failed(pool.name, worker.address, error.reason, str(error))
        else:
            self._learn(target, report, time.monotonic())

    async def _in_time(self, reading: Awaitable[EngineReport], timeout_s: float) -> EngineReport:
        try:
            async with asyncio.timeout(timeout_s):
                return await reading
        except TimeoutError:
            raise ScrapeError("timeout", f"not all of it within {timeout_s:g} s") from None
        except NotMetricsError as error:
            raise ScrapeError("garbage", str(error)) from None
        except (aiohttp.ClientConnectionError, OSError) as error:
            raise ScrapeError("connection", str(error) or type(error).__name__) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise ScrapeError("garbage", str(error) or type(error).__name__) from None

    async def _fetch(self, address: str, pool: Pool) -> EngineReport:
        assert self._session is not None
        path = pool.settings.metrics_path
        url = f"http://{address}{path if path.startswith('/') else '/' + path}"
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise ScrapeError("status", f"{url} answers {response.status}")
            decoder, page_bytes = Decoder(), 0
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                page_bytes += len(chunk)
                if page_bytes > MAX_PAGE_BYTES:
                    raise ScrapeError("too_large", f"{url} has more than {MAX_PAGE_BYTES} bytes")
                decoder.feed(chunk)
        report = decoder.report()
        if report.engine is None:
            raise ScrapeError("garbage", f"{url} has no series of vLLM or SGLang")
        return report

    # --- what is done with it --------------------------------------------------------------------

    def _learn(self, target: Target, report: EngineReport, now: float) -> None:
        if self._targets.get((target.pool.name, target.worker.address)) is not target:
            return  # the worker left while it answered
        before = target.state
        if self._is_another(target, report):
            target.state = EngineState(report, now)
            target.pool.restarted(target.worker, now)
            self._observer.restarted(target.pool.name, target.worker.address)
        else:
            target.state = EngineState(report, now, before.report, before.at_s)
        self._observer.told(target)
        waited_s = (
            None if report.queue_s is None or report.prefill_s is None else report.queue_s + report.prefill_s
        )
        target.pool.timed(target.worker, report.prefills, waited_s)
        target.pool.measured(target.worker, report.ended_requests, report.ended_prompt_tokens)
        target.pool.decoded(target.worker, report.generation_tokens, now, kv_usage=report.kv_usage)
        if report.cache_tokens and (
            before.report is None or before.report.cache_tokens != report.cache_tokens
        ):
            self._apply_size(target)
            self._observer.cache_size(target)

    def _is_another(self, target: Target, report: EngineReport) -> bool:
        """Whether the engine started anew since the last reading, or since a restored picture was saved."""
        worker, before = target.worker, target.state.report
        known_start_s = worker.engine_started_s
        if report.started_s is not None:
            worker.engine_started_s = report.started_s
        if before is not None:
            return restarted(before, report)
        return differ(known_start_s, report.started_s, SAME_START_S)

    def _apply_size(self, target: Target) -> None:
        report = target.state.report
        if target.learns_size and report is not None and report.cache_tokens is not None:
            target.pool.resize_cache(target.worker, report.cache_tokens)


def delay_s(interval_s: float, failures: int) -> float:
    """Seconds until the next reading after so many failures in a row, before jitter."""
    if not failures:
        return interval_s
    longest_s = max(LONGEST_RETRY_S, interval_s)
    return min(longest_s, min(FIRST_RETRY_S, interval_s) * 2.0 ** min(failures - 1, 30))
