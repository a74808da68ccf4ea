"""For this machine only: a handler's guard, wherever its port listens.

What tells of caches and tenants is for whoever may log in here. That means a loopback peer, and a request
that was meant for this machine: a web page whose name was pointed at 127.0.0.1 (DNS rebinding) sends its own
name as ``Host``, a person an address or ``localhost``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from functools import wraps
from urllib.parse import urlsplit

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def local_only(handler: Handler) -> Handler:
    """The handler, which others than this machine get a 403 from."""

    @wraps(handler)
    async def guarded(request: web.Request) -> web.StreamResponse:
        if not is_local(request.remote):
            raise web.HTTPForbidden(text=f"{request.path} answers this machine only\n")
        if not is_meant_for_here(request.host):
            raise web.HTTPForbidden(text=f"{request.path} answers to http://127.0.0.1 or localhost only\n")
        return await handler(request)

    return guarded


def is_local(remote: str | None) -> bool:
    """Whether a peer's address is this machine's loopback."""
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_meant_for_here(host: str) -> bool:
    """Whether a ``Host`` header has an IP address or ``localhost``, not another name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name.rstrip(".").lower() == "localhost":
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
