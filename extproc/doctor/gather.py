"""Asks the fleet: every worker, the router, Envoy. Bounded in time and in number; failures are facts.

A worker is asked for four pages at the same time, so that one that hangs costs one timeout. Certificates are
not checked: nothing secret is sent, and what comes back is not acted upon.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import aiohttp
import msgspec

from extproc.doctor import pages
from extproc.doctor.fleet import EnvoyFacts, Fleet, RouterFacts, WorkerFacts
from extproc.doctor.setup import Source, read_setup
from extproc.engine.exposition import NotMetricsError, decode
from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig
from extproc.fleet.dns import Resolver
from extproc.live.client import base_url
from extproc.live.status import STATUS_PATH, Status

#: Workers that are asked at the same time.
MAX_AT_ONCE = 64

#: The largest page that is read.
MAX_PAGE_BYTES = 8 * 1024 * 1024

#: Metrics that may stand still are looked at again after this long.
SECOND_LOOK_S = 1.0

#: Counters and gauges of Envoy that a check wants.
_STATS = r"^(cluster|http)\..*(overflow|too_large|\.ext_proc\..*)$"


class AskError(Exception):
    """No answer; the text says why, in few words, the same for the same cause."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whom to ask.

    ``server``, ``envoy_admin``: URLs, "" for none. ``own_addresses``: of this machine, to see whether ports
    that are asked at loopback answer there, too.
    """

    workers: bool = True
    server: str = ""
    envoy_admin: str = ""
    timeout_s: float = 5.0
    own_addresses: tuple[str, ...] = ()


async def gather(source: Source, wanted: Wanted) -> Fleet:
    """The fleet's facts."""
    config = source.config
    unresolved: dict[str, str] = {}
    if wanted.workers:
        config, unresolved = await _resolve(config, wanted.timeout_s)
    async with Asker(wanted.timeout_s) as asker:
        workers, router, envoy = await asyncio.gather(
            _workers(asker, config) if wanted.workers else _nobody(),
            _router(asker, wanted),
            _envoy(asker, wanted),
        )
        if router is not None and not router.error:
            workers = await _second_look(asker, config, workers, router)
    setup = read_setup(replace(source, config=config))
    return Fleet(setup, workers, unresolved, router, envoy)


class Asker:
    """GETs pages. A context manager."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Asker:
        unchecked = ssl.create_default_context()
        unchecked.check_hostname = False
        unchecked.verify_mode = ssl.CERT_NONE
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=unchecked, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, url: str) -> tuple[int, bytes]:
        """Status and body. Raises AskError."""
        assert self._session is not None
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                body = await response.content.read(MAX_PAGE_BYTES + 1)
                while chunk := await response.content.read(MAX_PAGE_BYTES + 1 - len(body)):
                    body += chunk
                    if len(body) > MAX_PAGE_BYTES:
                        raise AskError(f"more than {MAX_PAGE_BYTES} bytes")
                return response.status, body
        except TimeoutError:
            raise AskError(f"no answer within {self._timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise AskError(_reason(error.os_error)) from None
        except aiohttp.InvalidURL:
            raise AskError(f"{url} is no URL") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AskError(f"no HTTP answer ({type(error).__name__})") from None

    async def page(self, url: str) -> bytes:
        """The body of a 200. Raises AskError."""
        status, body = await self.get(url)
        if status != 200:
            raise AskError(f"answers {status}")
        return body


def _reason(error: OSError) -> str:
    """In words without addresses."""
    if error.errno is None or isinstance(error, ssl.SSLError):
        return type(error).__name__
    return os.strerror(error.errno).lower()


async def _resolve(config: RouterConfig, timeout_s: float) -> tuple[RouterConfig, dict[str, str]]:
    """The configuration with its DNS names resolved, and those that couldn't be."""
    resolved = config
    failed: dict[str, str] = {}

    def take(found: RouterConfig) -> None:
        nonlocal resolved
        resolved = found

    await Resolver(take, failed.__setitem__, timeout_s=timeout_s).use(config)
    return resolved, failed


async def _nobody() -> tuple[WorkerFacts, ...]:
    return ()


async def _workers(asker: Asker, config: RouterConfig) -> tuple[WorkerFacts, ...]:
    bound = asyncio.Semaphore(MAX_AT_ONCE)

    async def ask(pool: PoolConfig, endpoint: EndpointConfig) -> WorkerFacts:
        async with bound:
            return await _worker(asker, pool, endpoint.address)

    asked = (ask(pool, endpoint) for pool in config.pools.values() for endpoint in pool.endpoints)
    return tuple(await asyncio.gather(*asked))


async def _worker(asker: Asker, pool: PoolConfig, address: str) -> WorkerFacts:
    facts = WorkerFacts(pool.name, address)
    base = f"http://{address}"
    settings = pool.settings
    facts, page, version, models = await asyncio.gather(
        _ask_health(asker, facts, base + _rooted(settings.health_path)),
        _quietly(asker, base + _rooted(settings.metrics_path)),
        _quietly(asker, base + "/version"),
        _quietly(asker, base + "/v1/models"),
    )
    if facts.health is None and page[0] is None and await _speaks_tls(asker, address):
        return replace(facts, tls=True)
    facts = _read_metrics(facts, *page)
    names, longest = pages.models(models[0] or b"")
    facts = replace(facts, version=pages.version(version[0] or b""), models=names, max_model_len=longest)
    if facts.report is None or facts.report.engine != "sglang":
        return facts
    info, _ = await _quietly(asker, base + "/get_server_info")
    told, chunked, radix = pages.server_info(info or b"")
    return replace(facts, version=facts.version or told, chunked_prefill_tokens=chunked, radix_cache=radix)


def _rooted(path: str) -> str:
    return path if path.startswith("/") else "/" + path


async def _ask_health(asker: Asker, facts: WorkerFacts, url: str) -> WorkerFacts:
    try:
        status, _ = await asker.get(url)
    except AskError as error:
        return replace(facts, health_error=str(error))
    return replace(facts, health=status)


async def _quietly(asker: Asker, url: str) -> tuple[bytes | None, str]:
    """The page, or None and why there is none."""
    try:
        return await asker.page(url), ""
    except AskError as error:
        return None, str(error)


async def _speaks_tls(asker: Asker, address: str) -> bool:
    try:
        await asker.get(f"https://{address}/health")
    except AskError:
        return False
    return True


def _read_metrics(facts: WorkerFacts, page: bytes | None, error: str) -> WorkerFacts:
    if page is None:
        return replace(facts, metrics_error=error)
    try:
        report = decode(page)
        info, prompt_over, step_over = pages.engine_extras(page.decode(errors="replace"))
    except (NotMetricsError, ValueError):
        return replace(facts, metrics_error="no metrics page")
    if report.engine is None:
        return replace(facts, metrics_error="no series of vLLM or SGLang")
    return replace(facts, report=report, cache_info=info, prompt_over=prompt_over, step_over=step_over)


# --- the router and Envoy ------------------------------------------------------------------------


async def _router(asker: Asker, wanted: Wanted) -> RouterFacts | None:
    if not wanted.server:
        return None
    url = base_url(wanted.server)
    facts = RouterFacts(url + "/metrics")
    try:
        page = await asker.page(facts.url)
        found = pages.samples(page.decode(errors="replace"))
    except AskError as error:
        return replace(facts, error=f"can't be read: {error}")
    except ValueError:
        return replace(facts, error="is no metrics page")
    if "extproc_build_info" not in found:
        return replace(facts, error="is no router's metrics page")
    started = found.get("process_start_time_seconds")
    return replace(
        facts,
        samples=found,
        age_s=time.time() - started[0][1] if started else None,
        status=await _status(asker, url),
        exposed=await _exposed(asker, url, "/metrics", wanted.own_addresses),
    )


async def _status(asker: Asker, url: str) -> Status | None:
    try:
        return msgspec.json.decode(await asker.page(url + STATUS_PATH), type=Status)
    except (AskError, msgspec.MsgspecError):  # on another machine, or of another version
        return None


async def _envoy(asker: Asker, wanted: Wanted) -> EnvoyFacts | None:
    if not wanted.envoy_admin:
        return None
    url = base_url(wanted.envoy_admin)
    facts = EnvoyFacts(url)
    try:
        version = pages.envoy_version(await asker.page(url + "/server_info"))
        stats = await asker.page(f"{url}/stats?usedonly&filter={_STATS}")
    except AskError as error:
        return replace(facts, error=f"can't be asked: {error}")
    if version is None:
        return replace(facts, error="is no admin interface of Envoy")
    return replace(
        facts,
        version=version,
        stats=pages.envoy_stats(stats.decode(errors="replace")),
        exposed=await _exposed(asker, url, "/server_info", wanted.own_addresses),
    )


async def _exposed(asker: Asker, url: str, path: str, addresses: Iterable[str]) -> str:
    """The first of these addresses at which the port of a loopback URL answers, too."""
    parts = urlsplit(url)
    try:
        loopback = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return ""
    for address in addresses if loopback and parts.port else ():
        other = f"[{address}]" if ":" in address else address
        try:
            await asker.page(f"{parts.scheme}://{other}:{parts.port}{path}")
        except AskError:
            continue
        return f"{other}:{parts.port}"
    return ""


def own_addresses() -> tuple[str, ...]:
    """IPv4 addresses of this machine beside loopback, as far as they are easily had. Sends nothing."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; UDP only chooses an address
            found.append(str(probe.getsockname()[0]))
        except OSError:
            pass
    return tuple(address for address in found if not ipaddress.ip_address(address).is_loopback)


# --- metrics that stand still --------------------------------------------------------------------


async def _second_look(
    asker: Asker, config: RouterConfig, workers: tuple[WorkerFacts, ...], router: RouterFacts
) -> tuple[WorkerFacts, ...]:
    """The workers, with ``frozen`` set for those whose page shows nothing of what the router has there."""
    suspects = [worker for worker in workers if _idle(worker) and _in_flight(router, worker)]
    if not suspects:
        return workers
    await asyncio.sleep(SECOND_LOOK_S)
    again = await asyncio.gather(*(_look(asker, config.pools[worker.pool], worker) for worker in suspects))
    later = await _router(asker, Wanted(server=router.url))
    if later is None or later.error:
        return workers
    frozen = {
        (before.pool, before.address)
        for before, after in zip(suspects, again, strict=True)
        if _idle(after) and _in_flight(later, after) and _same_counters(before, after)
    }
    return tuple(replace(w, frozen=True) if (w.pool, w.address) in frozen else w for w in workers)


async def _look(asker: Asker, pool: PoolConfig, worker: WorkerFacts) -> WorkerFacts:
    page, error = await _quietly(asker, f"http://{worker.address}{_rooted(pool.settings.metrics_path)}")
    return _read_metrics(WorkerFacts(worker.pool, worker.address), page, error)


def _idle(worker: WorkerFacts) -> bool:
    report = worker.report
    return report is not None and report.running == 0 and report.waiting == 0


def _in_flight(router: RouterFacts, worker: WorkerFacts) -> float:
    return router.total("extproc_inflight_requests", pool=worker.pool, worker=worker.address)


def _same_counters(before: WorkerFacts, after: WorkerFacts) -> bool:
    return (
        before.report is not None
        and after.report is not None
        and before.report.prompt_tokens == after.report.prompt_tokens
        and before.report.generation_tokens == after.report.generation_tokens
    )
