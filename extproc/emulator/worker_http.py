"""An emulated vLLM server: a real HTTP face on the engine core, no GPU, no model.

It schedules, caches and queues as vLLM V1 does (`extproc.emulator.engine`), answers with words that mean
nothing, and takes as long as the engine would, divided by ``speedup``. Faithful, because routers depend on
it:

- A streaming reply's headers go out at once, its first token when it is there; a whole reply's headers come
  with its body.
- A client that goes away, before the headers or in the stream, frees its sequence at once.
- ``usage`` tells cached tokens; ``/metrics`` has vLLM's names; error bodies are vLLM's.
- An assistant's turn that is sent back hits the blocks that were filled when it was generated.

Not vLLM's: the response header ``x-emulated-worker``, which names the worker, and ``/emulate``
(`extproc.emulator.faults`), which breaks it. ``stop``, sampling and grammar options are read over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import cast

import msgspec
from aiohttp import web

from extproc.emulator import tokens
from extproc.emulator.answer import Answer
from extproc.emulator.api_replies import DONE, Reply, models_body, stream_error
from extproc.emulator.api_requests import ApiError, Kind, Limits, decode_object, parse_call, render_chat
from extproc.emulator.driver import Driver, EngineDeadError, EngineFullError
from extproc.emulator.engine import EngineConfig
from extproc.emulator.engine_metrics import EngineMetrics
from extproc.emulator.faults import HEADER as FAULT_HEADER
from extproc.emulator.faults import Fault, Faults, parse_fault

WORKER_HEADER = "x-emulated-worker"
_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
    "instance."
)
_ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_CRASH_GRACE_S = 0.5
_MAX_BODY_BYTES = 256 * 1024 * 1024
_RESET = struct.pack("ii", 1, 0)  # linger 0 s: closing sends RST


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What ``extproc worker`` can be told; lengths in tokens, times in seconds."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    model_names: tuple[str, ...] = ("emulated",)
    speedup: float = 1.0
    stream_interval: int = 1
    default_output_tokens: int = 128
    prompt_tokens_details: bool = True
    request_id_headers: bool = False
    version: str = "0.32.0"
    shutdown_timeout_s: float = 20.0


class Worker:
    """One emulated server: ``await start()``, serve until `stopped` is set, ``await stop()``."""

    def __init__(self, config: WorkerConfig):
        engine = config.engine
        self.config = config
        self.limits = Limits(
            model_names=config.model_names,
            # A sequence that outgrows the cache could never be served.
            max_model_len=min(engine.max_model_len, engine.cache_tokens),
            default_output_tokens=config.default_output_tokens,
        )
        self.driver = Driver(engine, config.speedup)
        self.metrics = EngineMetrics(self.driver, config.model_names[0])
        self.faults = Faults()
        self.address = ""
        self.stopped = asyncio.Event()
        self._ids = itertools.count()
        self._created = int(time.time())
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        # Compressed bodies stay compressed, and so are bad JSON, as in vLLM.
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, auto_decompress=False, access_log=None
        )
        self._site: web.TCPSite | None = None

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen and run the engine. Raises OSError when the port is taken."""
        await self._runner.setup()
        await self._listen(self.config.port)
        self._spawn(self.driver.run())

    async def _listen(self, port: int) -> None:
        site = web.TCPSite(self._runner, self.config.host, port, reuse_address=True)
        await site.start()
        self._site = site
        host, bound = self._runner.addresses[0][:2]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    async def drain(self) -> None:
        """Take no new connections, let requests under way end; at most ``shutdown_timeout_s``."""
        self._draining = True
        await self._close_port()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.shutdown_timeout_s)

    async def stop(self) -> None:
        """Close everything."""
        self.stopped.set()
        for task in self._tasks:
            task.cancel()
        await self._runner.shutdown()
        self._reset_connections()
        await self._runner.cleanup()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_port(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None

    def _reset_connections(self) -> None:
        server = self._runner.server
        for connection in list(server.connections) if server else []:
            _reset(connection.transport)

    # -- routes -------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.post("/ping", self._health),
                web.get("/version", _constant({"version": self.config.version})),
                web.get("/metrics", self._scrape),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/emulate", self._fault_state),
                web.post("/emulate", self._arm_fault),
                web.delete("/emulate", self._disarm_fault),
                web.route("*", "/{anything:.*}", self._unknown),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._draining or self.driver.dead is not None else 200)

    async def _models(self, _: web.Request) -> web.Response:
        return _json(models_body(self.limits, self._created))

    async def _scrape(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.faults.page(self.metrics.text(), time.monotonic()),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            fields = decode_object(await request.read(), request.headers.get("content-type", ""))
            prompt = fields.get("prompt")
            sequence = (
                tokens.BEGIN + tokens.encode(prompt) if isinstance(prompt, str) else render_chat(fields)
            )
        except ApiError as error:
            return _json(error.body(), error.status)
        body = {
            "count": tokens.count(sequence),
            "max_model_len": self.limits.max_model_len,
            "tokens": tokens.to_ids(sequence),
            "token_strs": None,
        }
        return _json(msgspec.json.encode(body))

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        # As in vLLM: not while blocks are in use.
        idle = self.driver.engine.kv_usage == 0
        if idle:
            self.driver.engine.pool.clear()
        return _json(msgspec.json.encode({"success": idle}))

    async def _unknown(self, _: web.Request) -> web.Response:
        return _json(b'{"detail":"Not Found"}', 404)

    # -- faults -------------------------------------------------------------------------------------------

    async def _fault_state(self, _: web.Request) -> web.Response:
        return _json(msgspec.json.encode(self.faults.state()))

    async def _disarm_fault(self, _: web.Request) -> web.Response:
        self.faults.arm(None)
        self.driver.slowness = 1.0
        return _json(msgspec.json.encode(self.faults.state()))

    async def _arm_fault(self, request: web.Request) -> web.Response:
        try:
            fault = parse_fault(await request.read())
        except ValueError as error:
            return _json(ApiError(400, str(error)).body(), 400)
        if fault.kind == "refuse":
            self._spawn(self._refuse(fault.seconds))
        elif fault.kind == "crash":
            self._spawn(self._crash())
        elif fault.kind == "slow":
            self._spawn(self._slow(fault))
        else:
            self.faults.arm(fault)
        response = _json(msgspec.json.encode(self.faults.state()))
        if fault.kind == "refuse":
            response.force_close()
        return response

    async def _refuse(self, seconds: float) -> None:
        port = int(self.address.rpartition(":")[2])
        await asyncio.sleep(0.01)  # the reply to the order itself still has to go out
        await self._close_port()
        self._reset_connections()
        if seconds:
            await asyncio.sleep(seconds)
            await self._listen(port)

    async def _slow(self, fault: Fault) -> None:
        self.driver.slowness = fault.factor
        if fault.seconds:
            await asyncio.sleep(fault.seconds)
            self.driver.slowness = 1.0

    async def _crash(self) -> None:
        self.driver.kill(_ENGINE_DEAD)
        await asyncio.sleep(_CRASH_GRACE_S)
        await self._close_port()
        self.stopped.set()

    async def _strike(self, request: web.Request, fault: Fault) -> None:
        """Do to a request what the fault says; returns only when it may go on."""
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "status":
            raise ApiError(fault.status, _BUSY if fault.status == 503 else "Emulated failure", "Emulated")
        elif fault.kind in ("reset", "hang"):
            if fault.kind == "reset":
                _reset(request.transport)
            await asyncio.Event().wait()  # ends by cancellation, when the connection is gone

    # -- answers ------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "completion")

    async def _answer(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        self._active += 1
        self._idle.clear()
        try:
            return await self._try_to_answer(request, kind)
        except ApiError as error:
            return self._error(request, error)
        except EngineFullError:
            self.metrics.rejected()
            return self._error(request, ApiError(503, _BUSY, "Service Unavailable"))
        except EngineDeadError as error:
            return self._error(request, ApiError(500, str(error), "InternalServerError"))
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _try_to_answer(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        arrival_s = self.driver.now()
        body = await request.read()
        try:
            fault = self.faults.take(request.headers.get(FAULT_HEADER))
        except ValueError as error:
            raise ApiError(400, f"{FAULT_HEADER}: {error}", param=FAULT_HEADER) from None
        if fault is not None and not fault.after_tokens:
            await self._strike(request, fault)
            fault = None
        call = parse_call(kind, body, request.headers.get("content-type", ""), self.limits)
        self.driver.check()
        prompt_tokens = max(map(tokens.count, call.prompts))
        await self.driver.sleep(self.config.engine.cost.frontend_s(prompt_tokens))
        interval = 1 if fault else self.config.stream_interval
        answer = Answer(call, self.driver, self.metrics, arrival_s, interval)
        reply = Reply(call, request.headers.get("x-request-id"))
        try:
            answer.submit(self._ids)
            send = self._stream if call.stream else self._whole
            return await send(request, answer, reply, fault)
        finally:
            answer.close()

    async def _stream(
        self, request: web.Request, answer: Answer, reply: Reply, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers(request))
        response.headers["content-type"] = "text/event-stream; charset=utf-8"
        if self._draining:
            response.force_close()
        try:
            await response.prepare(request)
            async for news in answer.progress():
                chunks = []
                for index, old, new, finished in news:
                    if not old:
                        chunks.append(reply.opening(index))
                    reason = answer.call.finish_reason if finished else None
                    chunks.append(reply.chunk(index, answer.text(index, old, new), reason))
                if fault is not None and answer.tokens >= fault.after_tokens:
                    await response.write(b"".join(chunks))
                    answer.close()
                    await self._strike(request, fault)
                if answer.finished:
                    if answer.call.include_usage:
                        chunks.append(reply.usage_chunk(answer.usage(self.config.prompt_tokens_details)))
                    chunks.append(DONE)
                await response.write(b"".join(chunks))
        except EngineDeadError as dead:
            await response.write(stream_error(str(dead)))
        except ConnectionError:
            pass  # the client is gone; the sequence is freed by the caller
        return response

    async def _whole(
        self, request: web.Request, answer: Answer, reply: Reply, fault: Fault | None
    ) -> web.StreamResponse:
        async for _ in answer.progress():
            if fault is not None and answer.tokens >= fault.after_tokens:
                answer.close()
                await self._strike(request, fault)
        headers = self._headers(request)
        if load := self._orca(request):
            headers["endpoint-load-metrics"] = load
        response = _json(
            reply.whole(answer.texts(), answer.usage(self.config.prompt_tokens_details)), 200, headers
        )
        if self._draining:
            response.force_close()
        return response

    def _error(self, request: web.Request, error: ApiError) -> web.Response:
        return _json(error.body(), error.status, self._headers(request))

    def _headers(self, request: web.Request) -> dict[str, str]:
        headers = {"server": "uvicorn", WORKER_HEADER: self.address}
        if self.config.request_id_headers and (request_id := request.headers.get("x-request-id")):
            headers["x-request-id"] = request_id
        return headers

    def _orca(self, request: web.Request) -> str | None:
        """The ORCA load report, which vLLM sends with whole replies to those who ask."""
        engine = self.driver.engine
        waiting, usage = float(engine.waiting), engine.kv_usage
        wanted = request.headers.get("endpoint-load-metrics-format", "").upper()
        if wanted == "TEXT":
            return (
                f"TEXT named_metrics.num_requests_waiting={waiting}, "
                f"named_metrics.kv_cache_usage_perc={usage}"
            )
        if wanted == "JSON":
            metrics = {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
            return "JSON " + msgspec.json.encode({"named_metrics": metrics}).decode()
        return None


def _reset(transport: asyncio.BaseTransport | None) -> None:
    if transport is not None:
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        cast(asyncio.Transport, transport).abort()


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _constant(value: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    body = msgspec.json.encode(value)

    async def handler(_: web.Request) -> web.Response:
        return _json(body)

    return handler
