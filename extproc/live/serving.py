"""``GET /status`` and ``GET /history``: the live picture as JSON, for `extproc top`, the page, and others.

``/history?pool=NAME`` tells of one pool only, ``?since=S`` (Unix seconds) of what ended later than that.
However many look on, the router makes a status at most every `FRESH_S`. The history of a large fleet is
megabytes of JSON; it is made worker by worker, so that no request waits for all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import isfinite

import msgspec
from aiohttp import web

from extproc.live.live import Live
from extproc.live.status import HISTORY_PATH, HISTORY_STEP_S, STATUS_PATH
from extproc.observe.local import Handler, local_only

#: A status is told again for so long.
FRESH_S = 0.2


def routes(live: Live, guard: Callable[[Handler], Handler] = local_only) -> list[web.RouteDef]:
    """The two paths, to be served anywhere. ``guard``: decides who may ask."""
    told_s, told = float("-inf"), b""

    async def status(request: web.Request) -> web.StreamResponse:
        nonlocal told_s, told
        now = time.monotonic()
        if now - told_s >= FRESH_S:
            told_s, told = now, msgspec.json.encode(live.status(now))
        return _answer(told)

    async def history(request: web.Request) -> web.StreamResponse:
        return _answer(await _history(live, request.query.get("pool"), _since_s(request)))

    return [web.get(STATUS_PATH, guard(status)), web.get(HISTORY_PATH, guard(history))]


def _since_s(request: web.Request) -> float | None:
    text = request.query.get("since")
    if text is None:
        return None
    try:
        since_s = float(text)
    except ValueError:
        since_s = float("nan")
    if not isfinite(since_s):
        raise web.HTTPBadRequest(text="since: use Unix seconds, such as one of ends_s\n")
    return since_s


async def _history(live: Live, pool: str | None, since_s: float | None) -> bytes:
    """`History` as JSON, made with pauses."""
    while True:
        steps = live.steps
        ends_s, parts = live.history_parts(time.monotonic(), pool, since_s)
        pools: dict[str, dict[str, object]] = {}
        for name, worker, series, busiest in parts:
            raw = msgspec.Raw(msgspec.json.encode(series))
            if worker is None:
                workers: dict[str, msgspec.Raw] = {}
                pools[name] = {"pool": raw, "busiest": busiest, "workers": workers}
            else:
                workers[worker] = raw
            await asyncio.sleep(0)
        if live.steps == steps:  # else a step has ended, and the rest would have one point more
            return msgspec.json.encode({"step_s": HISTORY_STEP_S, "ends_s": ends_s, "pools": pools})


def _answer(told: bytes) -> web.Response:
    return web.Response(body=told, content_type="application/json", headers={"cache-control": "no-store"})
