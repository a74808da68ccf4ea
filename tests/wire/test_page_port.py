"""The page's port: what it answers, to whom, and what it lets a browser do."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
import structlog.testing
from aiohttp import web

from extproc.errors import ListenError
from extproc.live.page import Page


async def told(request: web.Request) -> web.Response:
    return web.json_response({"told": request.path})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    page = Page([web.get("/status", told), web.get("/history", told)])
    yield f"http://{await page.start('127.0.0.1:0')}"
    await page.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_browser_may_run_the_one_script_and_nothing_else(url, http):
    async with http.get(url) as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        html = await response.text()
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    # Not even by name: no address of another host, no attribute that would be code.
    assert set(re.findall(r"https?://[^/'\"\s]+", html)) <= {"http://www.w3.org"}
    assert not re.search(r"<[a-z][^>]*\s(on[a-z]+|style|src)=", html)


@pytest.mark.parametrize("path", ["/", "/status", "/history", "/nothing"])
async def test_every_answer_has_the_headers(url, http, path):
    async with http.get(url + path) as response:
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "access-control-allow-origin" not in response.headers
        assert "Python" not in response.headers["server"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/status", "/history"])
async def test_nothing_can_be_changed(url, http, method, path):
    async with http.request(method, url + path) as response:
        assert response.status == 405


@pytest.mark.parametrize("path", ["/metrics", "/explain", "/page.html", "/../page.py", "/status/x"])
async def test_there_is_nothing_else(url, http, path):
    async with http.get(url + path) as response:
        assert response.status == 404


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1:1", "[::1]:9091", "LOCALHOST:1"])
async def test_here_it_answers(url, http, host):
    async with http.get(url + "/status", headers={"host": host}) as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/", "/status", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:9091", "localhost.evil.example", ""])
async def test_a_name_that_was_pointed_here_gets_nothing(url, http, host, path):
    async with http.get(url + path, headers={"host": host}) as response:
        assert response.status == 403
        assert "told" not in await response.text()


async def test_loopback_is_silent_and_anything_else_warns_once(http):
    for address, warnings in {"127.0.0.1:0": 0, "localhost:0": 0, "0.0.0.0:0": 1}.items():
        page = Page([web.get("/status", told)])
        with structlog.testing.capture_logs() as logs:
            listening = await page.start(address)
        assert [log["log_level"] for log in logs] == ["warning"] * warnings
        port = listening.rpartition(":")[2]
        headers = {"host": "router.inference.svc:9091"}
        async with http.get(f"http://127.0.0.1:{port}/status", headers=headers) as response:
            assert response.status == (200 if warnings else 403)
            assert warnings == 0 or msgspec.json.decode(await response.read()) == {"told": "/status"}
        await page.stop()


@pytest.mark.parametrize(
    "address", ["9091", ":9091", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x"]
)
async def test_an_address_that_is_none_is_named(address):
    with pytest.raises(ListenError, match=r"--page .*: use host:port, for example 127\.0\.0\.1:9091"):
        await Page([]).start(address)


async def test_a_port_that_is_taken_is_named(url):
    address = url.removeprefix("http://")
    with pytest.raises(ListenError, match=f"can't serve the page on {address}"):
        await Page([]).start(address)
