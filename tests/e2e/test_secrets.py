"""Markers are planted wherever a client can put text, then looked for in all that the product puts out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from collector import Collector

from extproc.demo import envoy_setup
from extproc.demo.process import free_ports
from extproc.demo.stack import Stack, StackConfig
from extproc.routing.demand import digest

pytestmark = pytest.mark.e2e

#: One for each place, so that a failure says which one leaks.
PLACES = (
    "system",
    "user",
    "tool",
    "schema",
    "history",
    "salt",
    "metadata",
    "key",
    "cookie",
    "tenant",
    "query",
)
MARKS = {place: f"zanzibar-{place}-4711" for place in PLACES}
TENANT = f"Bearer sk-{MARKS['tenant']}"


def configure(bootstrap: envoy_setup.Json) -> None:
    """Everything on that looks at clients' words."""
    for cluster in envoy_setup.pool_clusters(bootstrap):
        cluster["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA] |= {
            "tenant_header": "authorization",
            "tenant_weights": {TENANT: 2},
            "retry_budget": 0.1,
            "shed_after_ms": 2000,
            "client_priority": True,
        }


def chat(number: int) -> dict[str, object]:
    words = f"{MARKS['system']} Follow the rules. " * 900
    return {
        "model": "emulated",
        "max_tokens": 2,
        "cache_salt": MARKS["salt"],
        "metadata": {"x": MARKS["metadata"]},
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": MARKS["tool"],
                    "parameters": {"type": "object", "properties": {MARKS["schema"]: {}}},
                },
            }
        ],
        "messages": [
            {"role": "system", "content": f"It is 10:{number:02d}. {words}"},
            {"role": "user", "content": MARKS["history"]},
            {"role": "assistant", "content": MARKS["history"]},
            {"role": "user", "content": f"{MARKS['user']} {number}"},
        ],
    }


#: Bodies that can't be read, or only just.
ODD = (
    f'{{"messages": [{{"role": "user", "content": "{MARKS["user"]}'.encode(),
    json.dumps({"messages": MARKS["user"]}).encode(),
    json.dumps({"messages": [{"role": MARKS["user"], "content": {"a": MARKS["user"]}}]}).encode(),
    json.dumps({"prompt": MARKS["user"], MARKS["user"]: 1}).encode(),
    MARKS["user"].encode("utf-16"),
)


def send(stack: Stack, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> int:
    planted = {
        "content-type": "application/json",
        "authorization": TENANT,
        "x-api-key": MARKS["key"],
        "cookie": f"session={MARKS['cookie']}",
    }
    url = f"{stack.url}{path}?api_key={MARKS['query']}"
    request = urllib.request.Request(url, body, planted | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        return bytes(response.read())


def extproc(*arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "extproc.cli", *arguments],
        input=given,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_no_marker_comes_out(tmp_path, monkeypatch):
    page_port = free_ports(1)[0]
    state = tmp_path / "state"
    outputs: dict[str, bytes] = {}
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.http_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        arguments = ("--log-level", "debug", "--page", f"127.0.0.1:{page_port}", "--state", str(state))
        config = StackConfig(
            workers=2,
            worker_arguments=("--speedup", "20"),
            router_arguments=(*arguments, "--tracing"),
            edit=configure,
            keep_logs=True,
        )
        with Stack(config) as stack:
            bodies = [json.dumps(chat(number)).encode() for number in range(12)]
            statuses = [send(stack, body) for body in bodies]
            assert set(statuses) == {200}
            # Refused: what it asks for can't be had.
            refused = send(stack, json.dumps(chat(99)).encode(), **{"x-extproc-ttft-slo-ms": "0.001"})
            assert refused == 429
            for body in ODD:
                send(stack, body)
                send(stack, body, "/v1/completions")
            send(stack, b"", "/v1/other")
            send(stack, bodies[0], **{"content-encoding": "gzip"})
            # A worker dies, and its prompts move.
            stack.workers[0].kill()
            for number in range(20, 26):
                send(stack, json.dumps(chat(number)).encode())
            # A reload that is refused, with a key where it went wrong.
            (cluster,) = envoy_setup.pool_clusters(stack.bootstrap)
            settings = cluster["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA]
            settings["tenant_weights"] = {TENANT: "heavy"}
            stack.write_bootstrap()
            collector.wait_for(12)
            base = f"http://127.0.0.1:{stack.metrics_port}"
            page = f"http://127.0.0.1:{page_port}"
            deadline = time.monotonic() + 20
            while b'config_reloads_total{result="refused"} 1' not in get(f"{base}/metrics"):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            for name in ("metrics", "status", "history", "forks"):
                outputs[f"GET /{name}"] = get(f"{base}/{name}")
            for name in ("", "status", "history"):
                outputs[f"page /{name}"] = get(f"{page}/{name}")
            body_file = tmp_path / "body.json"
            body_file.write_bytes(bodies[0])
            log_file = tmp_path / "log.jsonl"
            log_file.write_bytes(b"\n".join([*bodies, *ODD]))
            tenant = ("--header", f"authorization:{TENANT}")
            yaml = str(stack.envoy_config)
            for name, command in {
                "explain": ("explain", "--body", str(body_file), "--server", base, *tenant),
                "explain --json": ("explain", "--body", str(body_file), "--server", base, "--json", *tenant),
                "explain, a bad YAML": ("explain", "--body", str(body_file), "--envoy-config", yaml),
                "top": ("top", "--once", "--server", base),
                "top --json": ("top", "--once", "--json", "--server", base),
                "lint": ("lint", str(log_file)),
                "lint --json": ("lint", "--json", str(log_file)),
                "lint --server": ("lint", "--server", base),
                "doctor": ("doctor", "--envoy-config", yaml, "--server", base),
                "serve, a bad YAML": ("serve", "--envoy-config", yaml, "--listen", "127.0.0.1:0"),
            }.items():
                outputs[name] = extproc(*command)
            settings["tenant_weights"] = {TENANT: 2}
            stack.write_bootstrap()
            outputs["doctor, a good YAML"] = extproc("doctor", "--envoy-config", yaml, "--server", base)
            folder = stack.folder
        outputs["log"] = (folder / "router.log").read_bytes()
        outputs["state file"] = state.read_bytes()
        outputs["traces"] = collector.raw
    for name, output in outputs.items():
        assert output, f"{name}: nothing was put out, so nothing was tested"
        found = [place for place, mark in MARKS.items() if mark.encode() in output]
        assert not found, f"{name} has the text of: {', '.join(found)}"
    # And it isn't because nothing was told.
    assert digest(TENANT).encode() in outputs["page /status"]
    assert outputs["log"].count(b'"event": "decided"') >= 12
    assert b"timestamp" in outputs["lint"].lower()


def test_the_markers_would_be_found():
    """What is asked for is shown: the same search finds text where a user wants it."""
    lines = b"\n".join(json.dumps(chat(number)).encode() for number in range(12))
    shown = extproc("lint", "--show-text", "80", "-", given=lines)
    assert MARKS["system"].encode() in shown
