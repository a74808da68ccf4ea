"""Requests that end in every way a request can end, each with what its client must see."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp
from traffic import COMPLETIONS, Client, add_route, addresses, endpoints, reset_over_http2, whole

from extproc.demo import envoy_setup
from extproc.demo.process import free_ports
from extproc.routing.demand import SLO_HEADER

#: Sends one request; returns what kind it was.
Kind = Callable[[Client, str], Awaitable[str]]


def extend(bootstrap: envoy_setup.Json) -> None:
    """A further worker, where nothing listens, and routes."""
    pool = envoy_setup.pool_clusters(bootstrap)[0]
    (port,) = free_ports(1)
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    endpoints(pool).append({"endpoint": {"address": address}})
    add_route(bootstrap, "impatient", timeout="0.2s")
    add_route(bootstrap, "prefix-hash", x_extproc_policy="prefix-hash")


async def complete(http: Client, text: str) -> str:
    """Any worker can serve it, so it must succeed."""
    answer = await http.ask(text, stream=random.random() < 0.5, max_tokens=20)
    assert answer.status == 200, answer
    assert answer.worker in addresses(http.stack)
    return "complete"


async def complete_past_a_503(http: Client, text: str) -> str:
    # Of two workers, so that the three of Envoy's retries always find a live one, the dead one included.
    url = random.choice(http.stack.worker_urls[:2])
    async with http.session.post(url + "/emulate", json={"fail": 503}) as armed:
        assert armed.status == 200
    await complete(http, text)
    return "503"


async def abort_before_headers(http: Client, text: str) -> str:
    with suppress(TimeoutError):
        async with asyncio.timeout(random.uniform(0.0, 0.3)):
            await http.ask(text, emulate={"fail": "delay", "seconds": 30})
    return "abort before headers"


async def abort_in_the_upload(http: Client, text: str) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", http.stack.listener_port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b'content-length: 9999\r\n\r\n{"prompt": "')
    await writer.drain()
    await asyncio.sleep(random.uniform(0.0, 0.1))
    writer.transport.abort()
    return "abort in the upload"


async def abort_in_the_stream(http: Client, text: str) -> str:
    emulate = {"fail": "hang", "after_tokens": random.randint(1, 10)}
    async with http.open(text, stream=True, max_tokens=50, emulate=emulate) as response:
        assert response.status == 200
        await response.content.readany()
        response.close()
    return "abort in the stream"


async def reset_before_headers(http: Client, text: str) -> str:
    answer = await http.ask(text, emulate={"fail": "reset"})
    assert (answer.status, answer.worker) == (503, "")
    return "reset before headers"


async def reset_in_the_stream(http: Client, text: str) -> str:
    emulate = {"fail": "reset", "after_tokens": random.randint(20, 40)}
    try:
        answer = await http.ask(text, stream=True, max_tokens=50, emulate=emulate)
    except aiohttp.ClientPayloadError:
        pass
    else:  # a reset overtakes what Envoy hasn't read yet, the headers at worst
        assert answer.status in (502, 503)
    return "reset in the stream"


async def time_out(http: Client, text: str) -> str:
    answer = await http.ask(text, path="/impatient" + COMPLETIONS, emulate={"fail": "hang"})
    assert answer.status == 504
    return "timeout"


async def ask_nonsense(http: Client, text: str) -> str:
    async with http.session.post(http.stack.url + COMPLETIONS, data=text) as response:
        answer = await whole(response)
    assert answer.status == 400
    assert answer.worker in addresses(http.stack)
    return "nonsense"


async def abort_at_the_headers(http: Client, text: str) -> str:
    async with http.open(text, stream=True, max_tokens=50) as response:
        assert response.status == 200
        response.close()
    return "abort at the headers"


async def abort_in_the_head(http: Client, text: str) -> str:
    """The router never hears of it."""
    _, writer = await asyncio.open_connection("127.0.0.1", http.stack.listener_port)
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nhost:".encode())
    await writer.drain()
    writer.transport.abort()
    return "abort in the head"


async def reset_a_stream(http: Client, text: str) -> str:
    body = json.dumps({"prompt": text, "max_tokens": 50, "stream": True}).encode()
    await reset_over_http2(http.stack, body, random.uniform(0.0, 0.3))
    return "HTTP/2 reset"


async def be_refused(http: Client, text: str) -> str:
    """No worker has the first token within a microsecond."""
    answer = await http.ask(text, headers={SLO_HEADER: "0.001"})
    assert (answer.status, answer.worker) == (429, ""), answer
    return "refused"


KINDS: tuple[Kind, ...] = (
    complete,
    complete,
    complete_past_a_503,
    abort_in_the_head,
    abort_in_the_upload,
    abort_before_headers,
    abort_at_the_headers,
    abort_in_the_stream,
    reset_a_stream,
    reset_before_headers,
    reset_in_the_stream,
    time_out,
    ask_nonsense,
    be_refused,
)
