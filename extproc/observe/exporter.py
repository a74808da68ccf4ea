"""The router's second port, for people and for Prometheus.

``GET /metrics`` (and ``/``) is the registry, written in a thread, off the event loop. ``POST /explain`` takes
a request's body and says what would become of the request, as JSON (`extproc.routing.explanation`).
``GET /forks`` says where the prompts in each pool's picture part (`extproc.routing.forks`). Both change
nothing. As they tell what the caches hold, they answer this machine only (`extproc.observe.local`), as do the
paths that others bring along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from extproc.errors import ListenError
from extproc.facts import RequestFacts
from extproc.fleet.settings import ROUTE_PREFIX, route_overrides
from extproc.observe.local import local_only
from extproc.observe.page import page
from extproc.router import Router
from extproc.routing.forks import find_forks

EXPLAIN_PATH = "/explain"
FORKS_PATH = "/forks"

#: Query parameter of ``/explain``: the path that the request would have.
PATH_PARAMETER = "path"

DEFAULT_PATH = "/v1/chat/completions"


class Exporter:
    """A running listener. Open it in the router's event loop, close it there."""

    def __init__(
        self, registry: CollectorRegistry, router: Router, further: Iterable[web.RouteDef] = ()
    ) -> None:
        """``further``: paths that are served here, too; they guard themselves."""
        self._registry = registry
        self._router = router
        # Refuses a longer body by itself. 0 would be no limit.
        application = web.Application(client_max_size=max(1, router.config.max_body_bytes))
        application.add_routes(
            [
                web.get("/", self._metrics),
                web.get("/metrics", self._metrics),
                web.post(EXPLAIN_PATH, local_only(self._explain)),
                web.get(FORKS_PATH, local_only(self._forks)),
                *further,
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, address: str) -> str:
        """Serve on ``host:port`` (port 0: any); returns the address. ListenError names what is wrong."""
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536) or not host:
            raise ListenError(f"--metrics {address}: use host:port, for example 127.0.0.1:9090")
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ListenError(f"can't serve metrics on {address}: {error}") from error
        return f"{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port."""
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        registry: Collector = self._registry
        if names := request.query.getall("name[]", []):
            registry = self._registry.restricted_registry(names)
        accepted = (request.headers.get(name, "") for name in ("accept", "accept-encoding"))
        body, headers = await asyncio.to_thread(page, registry, *accepted)
        return web.Response(body=body, headers=headers)

    async def _explain(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers: Mapping[str, str] = {name.lower(): value for name, value in request.headers.items()}
        overrides, problems = route_overrides(
            (name, value) for name, value in request.query.items() if name.startswith(ROUTE_PREFIX)
        )
        if problems:
            raise web.HTTPBadRequest(text="".join(f"{problem}\n" for problem in problems))
        facts = RequestFacts(
            path=request.query.get(PATH_PARAMETER, DEFAULT_PATH),
            content_type="application/json",  # whatever curl calls it
            headers={name: headers[name] for name in self._router.wanted_headers & headers.keys()},
        )
        explanation = self._router.explain(facts, overrides, body, time.monotonic())
        if explanation is None:
            pools = ", ".join(sorted(self._router.pools)) or "none"
            raise web.HTTPNotFound(text=f"which pool? There are: {pools}\n")
        return web.json_response(body=msgspec.json.encode(explanation))

    async def _forks(self, request: web.Request) -> web.Response:
        forks = {name: find_forks(pool.picture) for name, pool in self._router.pools.items()}
        return web.json_response(body=msgspec.json.encode(forks))
