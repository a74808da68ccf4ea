"""envoy/istio: the resources fit each other, and the gateway that they make of Istio's steers."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import istio_model
import pytest
import yaml

from extproc.demo.stack import Stack, StackConfig, find_envoy
from extproc.envoyconf import load

DOCUMENTS = istio_model.resources()
WORKERS_HOST = "vllm.inference.svc.cluster.local"
PODS = {"vllm": [("127.0.0.1", 1), ("127.0.0.1", 2)], "extproc": [("127.0.0.1", 3)]}


def router_yaml() -> str:
    text: str = istio_model.find("ConfigMap", "extproc", DOCUMENTS)["data"]["envoy.yaml"]
    return text


def validate(bootstrap: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "bootstrap.yaml"
    path.write_text(yaml.safe_dump(bootstrap, sort_keys=False))
    command = [find_envoy(), "--mode", "validate", "--log-level", "error", "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def gateway() -> Any:
    return istio_model.gateway(DOCUMENTS, PODS, port=4, admin_port=5)


def ext_proc_filter(bootstrap: Any) -> Any:
    (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    (found,) = [
        http_filter
        for http_filter in chain["filters"][0]["typed_config"]["http_filters"]
        if http_filter["name"] == "envoy.filters.http.ext_proc"
    ]
    return found


def retry_policy(bootstrap: Any, route_name: str) -> Any:
    (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    (route,) = [route for route in host["routes"] if route["name"] == route_name]
    return route["route"].get("retry_policy") or host["retry_policy"]


def test_the_kustomization_names_every_file() -> None:
    names = yaml.safe_load((istio_model.FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(names) | {"kustomization.yaml"} == {path.name for path in istio_model.FOLDER.iterdir()}


def test_envoy_accepts_the_patched_gateway(tmp_path: Path) -> None:
    result = validate(gateway(), tmp_path)
    assert result.returncode == 0, result.stderr


def test_without_its_destination_rule_the_workers_cluster_would_be_refused(tmp_path: Path) -> None:
    """Why traffic.yaml turns locality load balancing off, and says that it is required."""
    documents = istio_model.resources()
    rule = istio_model.find("DestinationRule", "vllm", documents)
    del rule["spec"]["trafficPolicy"]["loadBalancer"]
    result = validate(istio_model.gateway(documents, PODS, port=4, admin_port=5), tmp_path)
    assert result.returncode != 0
    assert "locality_weighted_lb_config" in result.stderr


def test_the_filter_and_the_policy_are_those_of_the_recommended_set_up() -> None:
    recommended = yaml.safe_load((istio_model.FOLDER.parent / "envoy.yaml").read_text())
    expected, ours = ext_proc_filter(recommended), ext_proc_filter(gateway())
    assert ours.pop("disabled") is True
    service = istio_model.find("Service", "extproc", DOCUMENTS)
    expected["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = istio_model.cluster_name(service)
    assert ours == expected
    policies = [
        cluster["load_balancing_policy"]
        for bootstrap in (recommended, gateway())
        for cluster in bootstrap["static_resources"]["clusters"]
        if "load_balancing_policy" in cluster
    ]
    assert policies == [policies[0]] * 2


def test_retries_are_those_of_the_recommended_set_up() -> None:
    recommended = yaml.safe_load((istio_model.FOLDER.parent / "envoy.yaml").read_text())
    expected, ours = retry_policy(recommended, "generate"), retry_policy(gateway(), "inference-generate")
    # An interval's upper bound is the one thing that a VirtualService can't say.
    del expected["retry_back_off"]["max_interval"]
    assert ours == expected


def test_the_routers_file_names_the_workers_service_as_istio_does(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(router_yaml())
    config = load(path)
    (pool,) = config.pools.values()
    assert pool.name == "vllm"
    assert [(worker.host, worker.port) for worker in pool.endpoints] == [(WORKERS_HOST, 8000)]
    assert config.clusters[istio_model.cluster_name(istio_model.find("Service", "vllm", DOCUMENTS))] == "vllm"
    assert config.steering.endpoint_metadata == (("envoy.lb", "x-gateway-destination-endpoint"),)
    assert not config.warnings
    result = validate(yaml.safe_load(router_yaml()), tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_deployment_serves_what_the_service_and_the_probes_ask_for() -> None:
    pod = istio_model.find("Deployment", "extproc", DOCUMENTS)["spec"]["template"]
    service = istio_model.find("Service", "extproc", DOCUMENTS)["spec"]
    (container,) = pod["spec"]["containers"]
    options = dict(argument.removeprefix("--").split("=") for argument in container["args"][1:])
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports[service["ports"][0]["targetPort"]] == service["ports"][0]["port"] == 50051
    assert options["listen"] == f"0.0.0.0:{ports['grpc']}"
    assert options["metrics"] == f"0.0.0.0:{ports['metrics']}"
    assert container["readinessProbe"]["grpc"]["port"] == container["livenessProbe"]["grpc"]["port"] == 50051
    (mount,) = container["volumeMounts"]
    (volume,) = pod["spec"]["volumes"]
    assert (mount["name"], volume["configMap"]["name"]) == (volume["name"], "extproc")
    assert options["envoy-config"] == f"{mount['mountPath']}/envoy.yaml"
    assert "subPath" not in mount


# --- The gateway, running -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The patched gateway, and a router that reads the ConfigMap's file; both with addresses for names."""
    router_file = tmp_path_factory.mktemp("istio") / "envoy.yaml"
    made = Stack(
        StackConfig(
            workers=3,
            worker_arguments=("--speedup", "20"),
            router_arguments=("--envoy-config", str(router_file)),
        )
    )
    workers = [("127.0.0.1", port) for port in made.worker_ports]
    pods = {"vllm": workers, "extproc": [("127.0.0.1", made.router_port)]}
    made.bootstrap = istio_model.gateway(
        debugged(istio_model.resources()), pods, port=made.listener_port, admin_port=made.admin_port
    )
    config = yaml.safe_load(router_yaml())
    (cluster,) = config["static_resources"]["clusters"]
    cluster["type"] = "STATIC"
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
        for host, port in workers
    ]
    router_file.write_text(yaml.safe_dump(config))
    with made:
        yield made


def debugged(documents: list[Any]) -> list[Any]:
    """The route's overrides as the comment in envoyfilter.yaml says, to see each pick."""
    for patch in istio_model.find("EnvoyFilter", "extproc", documents)["spec"]["configPatches"]:
        if patch["applyTo"] == "HTTP_ROUTE":
            (filter_config,) = patch["patch"]["value"]["typed_per_filter_config"].values()
            filter_config["overrides"] = {
                "grpc_initial_metadata": [{"key": "x-extproc-debug", "value": "true"}]
            }
    return documents


def ask(stack: Stack, prompt: str, **headers: str) -> tuple[int, str]:
    """One chat request through the gateway: status, and the decision that the response tells of."""
    body = {"model": "emulated", "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"{stack.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"} | headers,
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        response.read()
        return response.status, response.headers.get("x-extproc-decision", "")


def worker(decision: str) -> str:
    return decision.partition(",")[0].removeprefix("worker=")


@pytest.mark.e2e
def test_prompts_stay_on_their_workers(stack: Stack) -> None:
    prompts = [f"Agent {number}. " + "A rule to be followed. " * 400 for number in range(9)]
    homes = [worker(ask(stack, prompt)[1]) for prompt in prompts]
    assert len(set(homes)) > 1
    for _ in range(3):
        assert [worker(ask(stack, prompt)[1]) for prompt in prompts] == homes


@pytest.mark.e2e
def test_a_forged_header_does_not_steer(stack: Stack) -> None:
    prompt = "Not to be moved. " * 500
    home = worker(ask(stack, prompt)[1])
    for port in stack.worker_ports:
        forged = {"x-gateway-destination-endpoint": f"127.0.0.1:{port}"}
        assert worker(ask(stack, prompt, **forged)[1]) == home


@pytest.mark.e2e
def test_other_routes_do_not_ask_the_router(stack: Stack) -> None:
    def started() -> int:
        with urllib.request.urlopen(
            f"{stack.admin_url}/stats?filter=ext_proc.streams_started&format=json"
        ) as got:
            return sum(stat.get("value", 0) for stat in json.load(got)["stats"])

    before = started()
    with urllib.request.urlopen(f"{stack.url}/v1/models", timeout=20) as response:
        assert response.status == 200
    assert started() == before
    ask(stack, "One more.")
    assert started() == before + 1


@pytest.mark.e2e
def test_a_large_prompt_is_routed(stack: Stack) -> None:
    """2 MB: beyond Envoy's 1 MiB, within the route's own limit. The engine refuses it as too long."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(stack, "x" * 2_000_000)
    assert refused.value.code == 400
    assert worker(refused.value.headers["x-extproc-decision"])


@pytest.mark.e2e
def test_without_the_router_requests_are_answered(stack: Stack) -> None:
    stack.router.kill()
    try:
        assert ask(stack, "Anybody there?") == (200, "")
    finally:
        stack.router.start()
        stack.router.wait_ready()
