"""The doctor asks real servers: emulated workers that are wrongly started, and servers that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.cli import main
from extproc.demo import envoy_setup
from extproc.demo.process import free_ports
from extproc.doctor.check import run
from extproc.doctor.checks import CHECKS
from extproc.doctor.finding import Finding
from extproc.doctor.fleet import Fleet
from extproc.doctor.gather import MAX_AT_ONCE, Wanted, gather
from extproc.doctor.manifests import read
from extproc.emulator.engine import CostModel, EngineConfig
from extproc.emulator.worker_http import Worker, WorkerConfig
from extproc.envoyconf import load
from extproc.facts import RequestFacts
from extproc.fleet.settings import RouteOverrides
from extproc.observe.exporter import Exporter
from extproc.observe.observer import Observer
from extproc.router import Router, Routing

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
EXTPROC = "static_resources.clusters[0].metadata.filter_metadata.extproc"
AT_ONCE = CostModel(step_s=1e-6, prefill_s=0, decode_s=0, request_s=0, tokenize_s=0)


def write(folder: Path, addresses: list[str], **settings: Any) -> Path:
    """Our own YAML with these workers."""
    bootstrap = envoy_setup.readdress(
        envoy_setup.load(envoy_setup.shipped()),
        listener_port=1,
        admin_port=2,
        router_ports=[3],
        workers=[(host, int(port)) for host, port in (address.split(":") for address in addresses)],
    )
    envoy_setup.pool_clusters(bootstrap)[0]["metadata"]["filter_metadata"]["extproc"] |= settings
    file = folder / "envoy.yaml"
    file.write_text(envoy_setup.dump(bootstrap))
    return file


@asynccontextmanager
async def workers(*configs: dict[str, Any]) -> AsyncIterator[list[Worker]]:
    """Emulated workers; fields of `EngineConfig` and of `WorkerConfig` for each."""
    async with AsyncExitStack() as stack:
        started = []
        for fields in configs:
            engine = {name: fields[name] for name in fields if name in EngineConfig.__dataclass_fields__}
            others = {name: fields[name] for name in fields if name not in engine}
            worker = Worker(WorkerConfig(EngineConfig(cost=AT_ONCE, **engine), speedup=50.0, **others))
            await worker.start()
            stack.push_async_callback(worker.stop)
            started.append(worker)
        yield started


async def ask(worker: Worker, tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": "abc " * tokens}], "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{worker.address}{PATH}", json=body) as response,
    ):
        assert response.status == 200, await response.text()


async def examine(file: Path, **wanted: Any) -> tuple[Fleet, tuple[Finding, ...]]:
    fleet = await gather(read(file), Wanted(**wanted))
    return fleet, run(CHECKS, fleet).findings


def found_at(finding: Finding) -> list[str]:
    return [place.worker or place.path or place.url for place in finding.places]


#: How each of three workers is started, whether it is asked for a long prompt, and what is found where.
STARTED: dict[str, tuple[list[dict[str, Any]], int, str, list[int]]] = {
    "prefix caching off": ([{"enable_prefix_caching": False}, {}, {}], 0, "prefix-caching", [0]),
    "another model": ([{}, {"model_names": ("other",)}, {}], 0, "alike", [1]),
    "another version": ([{}, {}, {"version": "0.29.1"}], 0, "alike", [2]),
    "another block size": ([{}, {"block_size": 32}, {}], 0, "alike", [1]),
    "another length": ([{}, {"max_model_len": 4096}, {}], 0, "alike", [1]),
    "prompts in one step": ([{"max_num_batched_tokens": 65536}, {}, {}], 12_000, "large-steps", [0]),
    "a tiny cache": ([{"num_gpu_blocks": 1200}] * 3, 12_000, "cache-size", [0]),
}


@pytest.mark.parametrize("case", STARTED.values(), ids=STARTED)
async def test_a_worker_that_is_wrongly_started(
    case: tuple[list[dict[str, Any]], int, str, list[int]], tmp_path: Path
) -> None:
    configs, prompt_tokens, check, odd = case
    async with workers(*configs) as started:
        file = write(tmp_path, [worker.address for worker in started])
        if prompt_tokens:
            await ask(started[0], prompt_tokens)
        _, (found,) = await examine(file)
    assert found.check == check
    assert found_at(found) == [started[index].address for index in odd]


async def test_workers_that_are_well_after_some_requests(tmp_path: Path) -> None:
    async with workers({}, {}, {}) as started:
        for worker in started:
            await ask(worker, 12_000)
        fleet, found = await examine(write(tmp_path, [worker.address for worker in started]))
    assert found == ()
    assert [worker.prompt_over for worker in fleet.workers] == [10_000] * 3
    assert {worker.step_over for worker in fleet.workers} == {1024}
    assert {worker.max_model_len for worker in fleet.workers} == {131_072}


async def test_block_tokens_that_do_not_fit_the_engine(tmp_path: Path) -> None:
    async with workers({"block_size": 48}, {"block_size": 48}) as started:
        addresses = [worker.address for worker in started]
        _, (found,) = await examine(write(tmp_path, addresses))
        assert (found.check, found_at(found)) == ("block-tokens", [f"{EXTPROC}.block_tokens"])
        _, nothing = await examine(write(tmp_path, addresses, block_tokens=240))
        assert nothing == ()


async def test_a_cache_that_is_not_what_the_yaml_says(tmp_path: Path) -> None:
    async with workers({}, {}) as started:
        file = write(tmp_path, [worker.address for worker in started], cache_tokens=1_000_000)
        _, (found,) = await examine(file)
    assert (found.check, found_at(found)) == ("cache-tokens", [f"{EXTPROC}.cache_tokens"])
    line = file.read_text().splitlines()[(found.places[0].line or 0) - 1]
    assert line.strip() == "cache_tokens: 1000000"


async def test_prompts_that_do_not_pass_envoy(tmp_path: Path) -> None:
    """The workers have seen larger prompts than Envoy lets pass."""
    async with workers({}, {}) as started:
        file = write(tmp_path, [worker.address for worker in started])
        bootstrap = yaml.safe_load(file.read_text())
        bootstrap["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 32_768
        for route in envoy_setup.routes(bootstrap):
            route.pop("request_body_buffer_limit", None)
        file.write_text(envoy_setup.dump(bootstrap))
        await ask(started[0], 12_000)
        _, (found,) = await examine(file)
    assert (found.check, found.severity) == ("body-limit", "error")
    assert found_at(found) == ["static_resources.listeners[0].per_connection_buffer_limit_bytes"]


# --- workers that don't answer as they should ----------------------------------------------------


async def test_a_worker_that_is_gone(tmp_path: Path) -> None:
    (free,) = free_ports(1)
    async with workers({}) as started:
        _, (found,) = await examine(write(tmp_path, [started[0].address, f"{HOST}:{free}"]))
    assert (found.check, found_at(found)) == ("unreachable", [f"{HOST}:{free}"])
    assert found.found == "can't be reached: connection refused"


async def test_a_worker_whose_engine_is_dead(tmp_path: Path) -> None:
    async with workers({}, {}) as started:
        started[1].driver.kill("dead")
        _, (found,) = await examine(write(tmp_path, [worker.address for worker in started]))
    assert (found.check, found.value, found_at(found)) == ("health", 503, [started[1].address])


@asynccontextmanager
async def server(
    pages: dict[str, tuple[int, Any]], host: str = HOST, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """An HTTP server with these pages, bytes or functions that make them; 404 for any other."""

    async def answer(request: web.Request) -> web.Response:
        status, body = pages.get(request.path, (404, b"not here"))
        return web.Response(status=status, body=body() if callable(body) else body)

    application = web.Application()
    application.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, 0, ssl_context=tls).start()
    yield f"{HOST}:{runner.addresses[0][1]}"
    await runner.cleanup()


SGLANG = b"""
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0"} 0.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",pp_rank="0"} 0.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0",pp_rank="0"} 300000.0
sglang:page_size{model_name="m",tp_rank="0",pp_rank="0"} 1.0
sglang:prompt_tokens_total{model_name="m"} 1000.0
"""
IDLE = b"""
vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:prompt_tokens_total{engine="0"} %d
"""
INFO = {"version": "0.5.6", "chunked_prefill_size": 2048, "disable_radix_cache": False}


def sglang(**info: Any) -> dict[str, tuple[int, bytes]]:
    return {
        "/health": (200, b""),
        "/metrics": (200, SGLANG),
        "/v1/models": (200, b'{"data": [{"id": "m", "max_model_len": 32768}]}'),
        "/get_server_info": (200, json.dumps(INFO | info).encode()),
    }


async def test_sglang(tmp_path: Path) -> None:
    async with server(sglang()) as well:
        fleet, found = await examine(write(tmp_path, [well]))
        assert found == ()
        assert (fleet.workers[0].version, fleet.workers[0].models) == ("0.5.6", ("m",))
        async with server(sglang(disable_radix_cache=True, version="0.5.6")) as odd:
            _, (found,) = await examine(write(tmp_path, [well, odd]))
            assert (found.check, found_at(found)) == ("prefix-caching", [odd])


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ((404, b""), "answers 404"),
        ((200, b"<html>login</html>"), "no series of vLLM or SGLang"),
        (
            (200, b'vllm:cache_config_info{block_size="16} 1\nvllm:num_requests_running{} 1\n'),
            "no metrics page",
        ),
        ((200, b"\xff\xfe" * 50_000), "no metrics page"),
        ((302, b""), "answers 302"),
        ((200, b"x" * (9 * 1024 * 1024)), "more than 8388608 bytes"),
    ],
    ids=["404", "HTML", "half a label", "binary", "redirect", "endless"],
)
async def test_metrics_that_can_not_be_read(page: tuple[int, bytes], reason: str, tmp_path: Path) -> None:
    async with server({"/health": (200, b""), "/metrics": page}) as odd:
        _, (found,) = await examine(write(tmp_path, [odd]))
    assert (found.check, found.value, found_at(found)) == ("metrics", reason, [odd])


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[int, dict[str, int]]]:
    """Accepts connections at every loopback address and says nothing; counts those that are open at once."""
    open_now = {"now": 0, "most": 0}

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now["now"] += 1
        open_now["most"] = max(open_now["most"], open_now["now"])
        while await reader.read(4096):
            pass
        open_now["now"] -= 1
        writer.close()

    listener = await asyncio.start_server(hold, "0.0.0.0", 0, backlog=1024)
    yield listener.sockets[0].getsockname()[1], open_now
    listener.close()


async def test_128_workers_that_hang_are_given_up_in_time_and_not_all_at_once(tmp_path: Path) -> None:
    async with silent() as (port, counted):
        file = write(tmp_path, [f"127.0.1.{number}:{port}" for number in range(1, 129)])
        _, (found,) = await examine(file, timeout_s=0.3)
    assert (found.check, len(found.places)) == ("unreachable", 128)
    assert found.value == "no answer within 0.3 s"
    assert counted["most"] <= 4 * MAX_AT_ONCE


async def test_128_workers_that_are_well(tmp_path: Path) -> None:
    async with server(sglang(), "0.0.0.0") as address:
        port = address.split(":")[1]
        file = write(tmp_path, [f"127.0.1.{number}:{port}" for number in range(1, 129)])
        fleet, found = await examine(file, timeout_s=30.0)
    assert found == ()
    assert len(fleet.workers) == 128


async def test_names_that_do_not_resolve_and_a_pool_without_workers(tmp_path: Path) -> None:
    async with workers({}) as (worker,):
        file = write(tmp_path, [worker.address, "no-such-host.invalid:8000"])
        bootstrap = yaml.safe_load(file.read_text())
        for cluster in bootstrap["static_resources"]["clusters"]:
            cluster["type"] = "STRICT_DNS"
        file.write_text(envoy_setup.dump(bootstrap))
        fleet, (found,) = await examine(file)
        where = "static_resources.clusters[0].load_assignment.endpoints[0].lb_endpoints[1]"
        assert (found.check, found.value) == ("names", "no-such-host.invalid")
        assert found_at(found) == [f"{where}.endpoint.address.socket_address.address"]
        assert [w.address for w in fleet.workers] == [worker.address]
    file = write(tmp_path, [])
    fleet, (found,) = await examine(file)
    assert (found.check, found_at(found)) == ("yaml", ["static_resources.clusters[0]"])
    assert fleet.workers == ()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=worker", "-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    return context


async def test_workers_that_speak_https_only(tls: ssl.SSLContext, tmp_path: Path) -> None:
    async with server(sglang(), tls=tls) as odd, server(sglang()) as well:
        _, (found,) = await examine(write(tmp_path, [odd, well]))
    assert (found.check, found_at(found)) == ("tls", [odd])


# --- the router and Envoy ------------------------------------------------------------------------


@asynccontextmanager
async def router(file: Path, address: str = f"{HOST}:0") -> AsyncIterator[tuple[Router, str]]:
    observer = Observer()
    running = Router(load(file), observer)
    observer.watch(lambda: running.pools)
    exporter = Exporter(observer.registry, running)
    listen = await exporter.start(address)
    yield running, f"http://{HOST}:{listen.rpartition(':')[2]}"
    await exporter.stop()


def send(running: Router) -> Routing:
    """A request that the router counts from now on."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello " * 500}]}).encode()
    routing = running.route(RequestFacts(path=PATH), RouteOverrides(), body, time.monotonic())
    assert isinstance(routing, Routing)
    return routing


async def test_metrics_that_stand_still_under_load(tmp_path: Path) -> None:
    async with workers({}, {}) as started:
        file = write(tmp_path, [worker.address for worker in started])
        async with router(file) as (running, url):
            _, nothing = await examine(file, server=url)
            assert nothing == ()
            picked = send(running).decision.worker.address
            _, (found,) = await examine(file, server=url)
            assert (found.check, found_at(found)) == ("frozen-metrics", [picked])


async def test_metrics_that_move_are_not_frozen(tmp_path: Path) -> None:
    """Neither look sees a request, but the counters tell of one in between."""
    served: dict[str, tuple[int, Any]] = {"/health": (200, b"")}
    async with server(served) as address:
        file = write(tmp_path, [address])
        async with router(file) as (running, url):
            send(running)
            for counted, checks in (lambda look: 1000, ["frozen-metrics"]), (lambda look: 1000 + look, []):
                looks = itertools.count()

                def page(counted: Callable[[int], int] = counted, looks: Any = looks) -> bytes:
                    return IDLE % counted(next(looks))

                served["/metrics"] = (200, page)
                _, found = await examine(file, server=url)
                assert [f.check for f in found] == checks
                assert next(looks) == 2


async def test_a_router_with_other_workers(tmp_path: Path) -> None:
    async with workers({}, {}) as started:
        (tmp_path / "other").mkdir()
        theirs = write(tmp_path / "other", [started[0].address])
        async with router(theirs) as (_, url):
            file = write(tmp_path, [worker.address for worker in started])
            _, (found,) = await examine(file, server=f"{url}/metrics")
    assert (found.check, found_at(found)) == ("router-workers", [f"{url}/metrics"])
    assert found.value == {"missing": [["workers", started[1].address]], "more": []}


@pytest.mark.parametrize("listen", [HOST, "0.0.0.0"])
async def test_a_metrics_port_that_others_can_reach(listen: str, tmp_path: Path) -> None:
    """127.0.0.2 stands for the machine's own address: who listens at 127.0.0.1 only doesn't answer there."""
    file = write(tmp_path, ["10.0.0.1:8000"])
    async with router(file, f"{listen}:0") as (_, url):
        _, found = await examine(file, workers=False, server=url, own_addresses=("127.0.0.2",))
    assert [f.check for f in found] == ([] if listen == HOST else ["router-exposed"])


async def test_servers_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    (free,) = free_ports(1)
    file = write(tmp_path, ["10.0.0.1:8000"])
    page = {"/metrics": (200, SGLANG), "/server_info": (200, b"{}"), "/stats": (200, b"")}
    async with server(page) as other:
        for url, reasons in (
            (
                f"http://{HOST}:{free}",
                ["can't be read: connection refused", "can't be asked: connection refused"],
            ),
            (other, ["is no router's metrics page", "is no admin interface of Envoy"]),
            ("http://[bad", ["can't be read: http://[bad/metrics is no URL"]),
        ):
            _, found = await examine(file, workers=False, server=url, envoy_admin=url)
            assert [f.check for f in found] == ["router", "envoy"]
            assert [f.found for f in found][: len(reasons)] == reasons


# --- the command ---------------------------------------------------------------------------------


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    return code, *capsys.readouterr()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, ["10.0.0.1:8000", "10.0.0.2:8000"])
    code, out, err = doctor(capsys, "--envoy-config", str(file), "--no-workers")
    assert (code, err) == (0, "")
    assert out.startswith("nothing wrong with a fleet of 2 workers, ")
    file.write_text(file.read_text().replace("failure_mode_allow: true", "failure_mode_allow: false"))
    code, out, err = doctor(capsys, "--envoy-config", str(file), "--no-workers", "--json")
    assert (code, err) == (1, "")
    (found,) = json.loads(out)["findings"]
    assert (found["check"], found["value"]) == ("failure-mode", False)
    assert found["places"][0]["path"].endswith(".typed_config.failure_mode_allow")
    assert "failure_mode_allow" in file.read_text().splitlines()[found["places"][0]["line"] - 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("static_resources: {clusters: [", "is not YAML"),
        ("services: {a: 1}", "has no clusters, listeners or routes; give the Envoy bootstrap"),
        (
            "static_resources: {clusters: [{name: w, metadata: {filter_metadata: {extproc: {max_inflght:"
            " 3}}}}]}",
            "static_resources.clusters[0].metadata.filter_metadata.extproc.max_inflght: 3 unknown key",
        ),
        (None, "can't be read: No such file"),
    ],
    ids=["broken", "something else", "unknown key", "missing"],
)
def test_a_file_that_can_not_be_used(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "envoy.yaml"
    if text is not None:
        file.write_text(text)
    code, out, err = doctor(capsys, "--envoy-config", str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"extproc doctor: {file}")
    assert says in err
