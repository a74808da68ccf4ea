"""The page that a router serves on a port of its own, with ``--page``: what it does now, and the last hour.

``GET /`` is ``page.html`` as it lies beside this module; ``GET /status`` and ``GET /history``
(`extproc.live.status`) are what it shows. There is nothing else, and nothing changes anything.

The page tells of load, and of tenants by their digests, so by default it is for this machine only. It loads
nothing from elsewhere, and the browser is told so: the policy below names the hashes of the one script and
the one style sheet, and forbids all ways in which text could become markup (trusted types).
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from extproc.errors import ListenError
from extproc.observe.local import is_meant_for_here

#: Where the page is if ``--page`` names no address.
DEFAULT_ADDRESS = "127.0.0.1:9091"

_PAGE = Path(__file__).with_name("page.html")

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """A running listener. Open it in the router's event loop, close it there."""

    def __init__(self, data: Iterable[web.RouteDef]) -> None:
        """``data``: the paths that the page reads."""
        html = _PAGE.read_bytes()
        headers = {**_HEADERS, "Content-Security-Policy": content_security_policy(html)}

        async def page(request: web.Request) -> web.Response:
            return web.Response(body=html, content_type="text/html", charset="utf-8")

        async def dress(request: web.Request, response: web.StreamResponse) -> None:
            response.headers.update(headers)
            response.headers["Server"] = "extproc"

        self._loopback = True
        application = web.Application(middlewares=[self._guard])
        application.add_routes([web.get("/", page), *data])
        application.on_response_prepare.append(dress)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, address: str) -> str:
        """Serve on ``host:port`` (port 0: any); returns the address. ListenError names what is wrong."""
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536) or not host:
            raise ListenError(f"--page {address}: use host:port, for example {DEFAULT_ADDRESS}")
        self._loopback = _is_loopback(host)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ListenError(f"can't serve the page on {address}: {error}") from error
        if not self._loopback:
            structlog.get_logger("extproc").warning(
                "the page is open to other machines: it tells of load, prompts' hashes and tenants' digests",
                page=address,
            )
        return f"{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port."""
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # A web page whose name was pointed at 127.0.0.1 (DNS rebinding) sends its own name as Host.
        if self._loopback and not is_meant_for_here(request.host):
            raise web.HTTPForbidden(text="this page answers to http://127.0.0.1 or localhost only\n")
        return await handler(request)


def content_security_policy(html: bytes) -> str:
    """What a browser may do with the page: run its one script, use its one style sheet, read its own port."""
    script, style = (_hash(html, tag) for tag in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(html: bytes, tag: bytes) -> str:
    (content,) = re.findall(rb"<%b[^>]*>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
