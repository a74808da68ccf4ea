"""The server over real gRPC, and `extproc serve` as a real process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from counted import total
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.errors import ListenError
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.server import Server
from extproc.wire import (
    PROCESS_PATH,
    SERVICE,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

BODY = json.dumps({"prompt": "Once upon a time " * 100}).encode()
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def headers() -> ProcessingRequest:
    fields = {":path": "/v1/completions", "content-type": "application/json"}
    return ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in fields.items()])
        ),
        protocol_config=ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED),
    )


def body(data: bytes = BODY) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=True))


def response_headers() -> ProcessingRequest:
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key=":status", value="200")]))
    )


class Running:
    """A server in this process, and a client of it."""

    def __init__(self, policy: str, keepalive_s: float) -> None:
        endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "pool", 120) for i in range(4))
        pools = {"pool": PoolConfig("pool", endpoints, PoolSettings(policy=policy))}
        self.observer = Observer()
        self.router = Router(RouterConfig(pools=pools), self.observer)
        self.server = Server(self.router, self.observer, keepalive_s=keepalive_s)
        self.address = ""
        self.channel: grpc.aio.Channel = None

    def stream(self, metadata: list[tuple[str, str]] | None = None) -> Any:
        return self.channel.stream_stream(
            PROCESS_PATH,
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=ProcessingResponse.FromString,
        )(metadata=metadata)

    async def ask(self, call: Any, *messages: ProcessingRequest) -> ProcessingResponse:
        reply = None
        for message in messages:
            await call.write(message)
            reply = await call.read()
            assert reply.WhichOneof("response") == message.WhichOneof("request")
        return reply

    async def health(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(self.channel).Check(request)).status

    def count(self, name: str, **labels: str) -> float:
        return total(self.observer.registry, name, **labels)

    @property
    def in_flight(self) -> int:
        pool = self.router.pools["pool"]
        assert pool.tickets == sum(w.in_flight for w in pool.workers)
        return pool.tickets


@asynccontextmanager
async def running(policy: str = "predicted", keepalive_s: float = 10.0) -> AsyncIterator[Running]:
    it = Running(policy, keepalive_s)
    it.address = await it.server.start("127.0.0.1:0")
    it.channel = grpc.aio.insecure_channel(it.address, options=[("grpc.max_send_message_length", -1)])
    try:
        yield it
    finally:
        await it.channel.close()
        await it.server.drain(0.0)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


def picked(reply: ProcessingResponse) -> str:
    metadata = reply.dynamic_metadata.fields["envoy.lb"].struct_value
    return metadata.fields["x-gateway-destination-endpoint"].string_value


# --- streams -----------------------------------------------------------------------------------------


async def test_a_requests_life() -> None:
    async with running() as it:
        call = it.stream()
        reply = await it.ask(call, headers(), body())
        assert len(picked(reply).split(",")) == 4
        assert it.in_flight == 1
        await it.ask(call, response_headers())
        assert it.in_flight == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert it.in_flight == 0
        assert it.count("extproc_ended_total", pool="pool", status="2xx") == 1


async def test_streams_do_not_mix() -> None:
    async with running() as it:
        calls = [it.stream() for _ in range(20)]
        bodies = [json.dumps({"prompt": f"{i} " * 2000}).encode() for i in range(len(calls))]
        for call in calls:
            await it.ask(call, headers())
        first = [picked(await it.ask(call, body(b))) for call, b in zip(calls, bodies, strict=True)]
        assert it.in_flight == 20
        for call in calls:
            call.cancel()
        await until(lambda: it.in_flight == 0)
        for before, b in zip(first, bodies, strict=True):
            call = it.stream()
            again = picked(await it.ask(call, headers(), body(b)))
            assert again.split(",")[0] == before.split(",")[0]
            call.cancel()


async def test_a_large_body_is_taken() -> None:
    large = json.dumps({"prompt": "large " * 3_000_000}).encode()
    assert len(large) > 16 * 1024 * 1024
    async with running() as it:
        assert it.router.config.max_body_bytes < len(large)
        reply = await it.ask(it.stream(), headers(), body(large[: 8 * 1024 * 1024 + 1]), response_headers())
        assert reply.HasField("response_headers")
        assert await it.ask(it.stream(), headers(), body(large))
        assert it.count("extproc_internal_errors_total") == 0
        assert it.count("extproc_unreadable_total", pool="pool", reason="incomplete") == 1


@pytest.mark.parametrize("leave", ["cancel", "half-close", "lost connection"])
@pytest.mark.parametrize("messages", [1, 2, 3])
async def test_however_a_client_leaves_nothing_stays_in_flight(leave: str, messages: int) -> None:
    async with running() as it:
        call = it.stream()
        await it.ask(call, *[headers(), body(), response_headers()][:messages])
        assert it.in_flight == (messages > 1)
        if leave == "cancel":
            call.cancel()
        elif leave == "half-close":
            await call.done_writing()
        else:
            await it.channel.close()
        await until(lambda: it.in_flight == 0)
        assert it.count("extproc_internal_errors_total") == 0


async def test_pings_are_welcome() -> None:
    """Envoy sends them while nothing else is to be said; gRPC's default is to hang up at the third."""
    async with running() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.address.rpartition(":")[2]))
        ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0")
        kinds: list[int] = []
        async with asyncio.timeout(30):
            for acknowledged in range(1, 11):
                writer.write(ping)
                while kinds.count(6) < acknowledged and 7 not in kinds:
                    head = await reader.readexactly(9)
                    await reader.readexactly(int.from_bytes(head[:3], "big"))
                    kinds.append(head[3])
        assert 7 not in kinds  # GOAWAY
        writer.close()


async def test_a_client_that_is_gone_without_a_word_is_noticed() -> None:
    async with running(keepalive_s=1.0) as it:
        tests = str(Path(__file__).parents[1])  # as pytest has it
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, it.address, env=os.environ | {"PYTHONPATH": tests}
        )
        try:
            await until(lambda: it.in_flight == 1, timeout_s=30.0)
            child.send_signal(signal.SIGSTOP)
            await until(lambda: it.in_flight == 0, timeout_s=60.0)
        finally:
            child.kill()
            await child.wait()


async def test_garbage_on_the_wire_ends_its_stream_only() -> None:
    async with running() as it:
        healthy, broken = it.stream(), it.stream()
        await it.ask(healthy, headers())
        await it.ask(broken, headers(), body())
        await broken.write(b"\xff\xff\xff not a message")
        assert await broken.read() is grpc.aio.EOF
        assert await broken.code() is grpc.StatusCode.OK
        assert picked(await it.ask(healthy, body()))
        assert it.in_flight == 1
        assert it.count("extproc_internal_errors_total") == 1


async def test_a_fault_of_ours_ends_the_stream_with_ok_and_is_counted() -> None:
    # No YAML gets this far with such a policy, so it stands for a fault in the code.
    async with running(policy="no such policy") as it:
        call = it.stream()
        await it.ask(call, headers())
        await call.write(body())
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert it.count("extproc_internal_errors_total") == 1
        assert it.in_flight == 0


async def test_route_settings_come_as_metadata() -> None:
    async with running() as it:
        call = it.stream([("x-extproc-policy", "round-robin"), ("x-extproc-debug", "true"), ("other", "1")])
        reply = await it.ask(call, headers(), body(), response_headers())
        (header,) = reply.response_headers.response.header_mutation.set_headers
        assert header.header.key == "x-extproc-decision"
        assert b"reason=round-robin" in header.header.raw_value
        bad = it.stream([("x-extproc-policy", "best"), ("x-extproc-polcy", "predicted")])
        assert picked(await it.ask(bad, headers(), body()))


# --- the end -----------------------------------------------------------------------------------------


async def test_draining_lets_running_streams_end_and_turns_new_ones_away() -> None:
    async with running() as it:
        assert await it.health() == await it.health(SERVICE) == SERVING
        old = it.stream()
        await it.ask(old, headers())
        watch = health_pb2_grpc.HealthStub(it.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        drain = asyncio.create_task(it.server.drain(60.0))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        assert await it.health(SERVICE) == NOT_SERVING
        new = it.stream()
        assert await new.read() is grpc.aio.EOF
        assert await new.code() is grpc.StatusCode.OK
        reply = await it.ask(old, body(), response_headers())
        assert reply.HasField("response_headers")
        assert not drain.done()
        await old.done_writing()
        assert await old.read() is grpc.aio.EOF
        assert await old.code() is grpc.StatusCode.OK
        await drain
        assert it.in_flight == 0


async def test_at_the_drains_deadline_streams_are_closed_with_ok() -> None:
    async with running() as it:
        calls = [it.stream() for _ in range(5)]
        for call in calls:
            await it.ask(call, headers(), body())
        await it.server.drain(0.05)
        for call in calls:
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        assert it.in_flight == 0


async def test_an_idle_server_drains_at_once() -> None:
    async with running() as it:
        await asyncio.wait_for(it.server.drain(3600.0), 30.0)


@pytest.mark.parametrize(
    "listen",
    ["nonsense", ":", ":0x1", "127.0.0.1:99999", "127.0.0.1:http", "192.0.2.1:5000", "unix:/no/such/dir/s"],
)
async def test_unusable_addresses(listen: str) -> None:
    with pytest.raises(ListenError, match=re.escape(listen)):
        await Server(Router(RouterConfig(pools={}), Observer()), Observer()).start(listen)


async def test_unix_socket(tmp_path: Path) -> None:
    server = Server(Router(RouterConfig(pools={}), Observer()), Observer())
    address = await server.start(f"unix:{tmp_path}/s")
    assert address == f"unix:{tmp_path}/s"
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == SERVING
    await server.drain(0.0)


# --- the process -------------------------------------------------------------------------------------


def bootstrap(workers: int, **pool: Any) -> str:
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 8001 + i}}}}
        for i in range(workers)
    ]
    cluster = {
        "name": "workers",
        "metadata": {"filter_metadata": {"extproc": pool}},
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    return yaml.safe_dump({"static_resources": {"clusters": [cluster]}})


def extproc(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "extproc.cli", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(extproc(*arguments), capture_output=True, text=True, timeout=60)


class Serve:
    """`extproc serve` with its log."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.config = config
        command = extproc("serve", "--envoy-config", str(config), "--listen", "127.0.0.1:0", *arguments)
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.listen = self.wait_for("serving")["listen"]

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            if line.startswith("{") and (entry := json.loads(line))["event"] == event:
                return dict(entry)
        raise AssertionError(f"the process ended ({self.child.wait()}) without the event {event!r}")

    def stop(self) -> int:
        self.child.terminate()
        return self.child.wait(30)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "envoy.yaml"
    path.write_text(bootstrap(4))
    return path


@pytest.fixture
def start(config: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def begin(*arguments: str) -> Serve:
        started.append(Serve(config, *arguments))
        return started[-1]

    yield begin
    for serve in started:
        serve.child.kill()
        serve.child.wait()
        assert serve.child.stderr is not None
        serve.child.stderr.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def test_serve_refuses_a_bad_configuration(config: Path) -> None:
    config.write_text(bootstrap(4, max_inflght=3))
    result = run("serve", "--envoy-config", str(config), "--listen", "127.0.0.1:0")
    assert result.returncode == 2
    assert result.stdout == ""
    for part in (str(config), "max_inflght", "did you mean max_inflight?"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_refuses_a_missing_file(tmp_path: Path) -> None:
    result = run("serve", "--envoy-config", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "none.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_refuses_a_port_in_use(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen = run("serve", "--envoy-config", str(config), "--listen", address)
        metrics = run("serve", "--envoy-config", str(config), "--listen", "127.0.0.1:0", "--metrics", address)
    for result in (listen, metrics):
        assert result.returncode == 2
        assert address in result.stderr
        assert "Traceback" not in result.stderr


def test_two_servers_never_share_a_port(start: Callable[..., Serve], config: Path) -> None:
    result = run("serve", "--envoy-config", str(config), "--listen", start().listen)
    assert result.returncode == 2


@pytest.mark.parametrize("address", ["9090", "127.0.0.1:", "127.0.0.1:99999", "nowhere.invalid:9090"])
def test_serve_refuses_a_bad_metrics_address(config: Path, address: str) -> None:
    result = run("serve", "--envoy-config", str(config), "--listen", "127.0.0.1:0", "--metrics", address)
    assert result.returncode == 2
    assert address in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_by_signal(start: Callable[..., Serve], signum: signal.Signals) -> None:
    serve = start()
    serve.child.send_signal(signum)
    assert serve.wait_for("draining")["in_flight"] == 0
    serve.wait_for("stopped")
    assert serve.child.wait(30) == 0


async def test_serve_drains_running_streams(start: Callable[..., Serve]) -> None:
    serve = start("--drain-s", "60")
    async with grpc.aio.insecure_channel(serve.listen) as channel:
        call = channel.stream_stream(
            PROCESS_PATH,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        for message in (headers(), body()):
            await call.write(message)
            assert await call.read() is not grpc.aio.EOF
        serve.child.terminate()
        assert (await asyncio.to_thread(serve.wait_for, "draining"))["in_flight"] == 1
        result = await asyncio.to_thread(run, "health", "--target", serve.listen)
        assert (result.returncode, result.stdout) == (1, f"{serve.listen}: NOT_SERVING\n")
        await call.write(response_headers())
        assert (await call.read()).HasField("response_headers")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    assert await asyncio.to_thread(serve.child.wait, 30) == 0


def test_serve_follows_its_configuration(start: Callable[..., Serve], config: Path) -> None:
    port = free_port()
    serve = start("--metrics", f"127.0.0.1:{port}")
    gauge = 'extproc_inflight_requests{pool="workers",worker="127.0.0.1:%d"} 0.0'
    assert gauge % 8004 in scrape(port)

    config.write_text(bootstrap(2))
    serve.wait_for("configuration in force")
    metrics = scrape(port)
    assert gauge % 8002 in metrics
    assert gauge % 8003 not in metrics

    config.write_text(bootstrap(3, policy="best"))
    problems = "\n".join(serve.wait_for("new configuration refused, the old one stays in force")["problems"])
    for part in (str(config), "policy", "best", "predicted"):
        assert part in problems
    metrics = scrape(port)
    assert gauge % 8003 not in metrics
    assert 'extproc_config_reloads_total{result="refused"} 1.0' in metrics

    config.write_text(bootstrap(5))
    serve.wait_for("configuration in force")
    metrics = scrape(port)
    assert gauge % 8005 in metrics
    assert 'extproc_config_reloads_total{result="ok"} 3.0' in metrics
    assert serve.stop() == 0


def test_health_command(start: Callable[..., Serve]) -> None:
    serve = start()
    result = run("health", "--target", serve.listen)
    assert (result.returncode, result.stdout) == (0, f"{serve.listen}: SERVING\n")
    nobody = f"127.0.0.1:{free_port()}"
    result = run("health", "--target", nobody, "--timeout-s", "1")
    assert result.returncode == 1
    assert f"{nobody}: UNAVAILABLE" in result.stderr


async def hold(address: str) -> None:
    """A client in a process of its own: a request that is never over."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            PROCESS_PATH,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        for message in (headers(), body()):
            await call.write(message)
            await call.read()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1]))
