"""Envoy's own word on the files in envoy/: it accepts them, reads YAML as we do, and retries as they say."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.demo.process import Process, answers, free_ports
from extproc.demo.stack import Stack, StackConfig, find_envoy
from extproc.envoyconf.document import read

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parents[2] / "envoy"

#: Plain scalars that YAML libraries disagree on.
SCALARS = (
    *("010", "08", "-010", "0x1F", "-0x1", "+5", "-7", "1_0", "0o17", "0b1", "5000000000", "-5000000000"),
    *("1.5", ".5", "1e3", ".inf", ".nan", "12:30", "12:30:45", "2024-01-01", "10.0.0.1"),
    *("yes", "No", "on", "OFF", "y", "N", "true", "TRUE", "tRUE", "~", "null", "Null", "NULL", "nULL", ""),
    *('"5"', "'010'", '"yes"', '""', "!!str 5", "=", "<<"),
)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_envoy_accepts(name: str) -> None:
    command = [find_envoy(), "--mode", "validate", "--log-level", "error", "-c", str(FOLDER / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_envoy_reads_scalars_as_we_do(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    scalars = "".join(f"          k{i}: {scalar}\n" for i, scalar in enumerate(SCALARS))
    file = tmp_path / "envoy.yaml"
    file.write_text(f"""
!ignore anchors: &shared {{connect_timeout: 1s}}
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}
static_resources:
  clusters:
  - name: scalars
    metadata:
      filter_metadata:
        extproc:
{scalars}
          !ignore nothing: 1
          shared: *shared
---
second: document
""")
    url = f"http://127.0.0.1:{port}/"
    command = [find_envoy(), "-c", str(file), "--disable-hot-restart", "--log-level", "error"]
    envoy = Process("envoy", command, tmp_path / "log", lambda: answers(url + "ready"))
    envoy.start()
    try:
        envoy.wait_ready()
        dump = json.loads(get(url + "config_dump?resource=static_clusters")[1])
    finally:
        envoy.terminate()
        envoy.stop()
    (cluster,) = [c["cluster"] for c in dump["configs"]]
    ours = read(str(file)).node.get("static_resources", "clusters")
    assert ours is not None
    assert extproc_object(cluster) == {
        # A Struct holds doubles, so Envoy keeps larger integers as strings.
        key: str(value) if isinstance(value, int) and abs(value) >= 2**31 else value
        for key, value in extproc_object(ours.value[0]).items()
    }


def extproc_object(cluster: Any) -> Any:
    return cluster["metadata"]["filter_metadata"]["extproc"]


@pytest.fixture(scope="module", params=["envoy.yaml", "cluster-per-worker.yaml"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    config = StackConfig(workers=4, envoy_yaml=request.param, worker_arguments=("--speedup", "50"))
    with Stack(config) as running:
        yield running


def get(url: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(stack: Stack, prompt: str) -> int:
    body = {"model": "emulated", "prompt": prompt, "max_tokens": 1}
    return get(stack.url + "/v1/completions", body)[0]


def disarm(worker_url: str) -> None:
    request = urllib.request.Request(worker_url + "/emulate", method="DELETE")
    urllib.request.urlopen(request, timeout=30).close()


def retries(stack: Stack) -> int:
    stats = json.loads(
        get(stack.admin_url + r"/stats?format=json&filter=^cluster\..*\.upstream_rq_retry$")[1]
    )
    return sum(stat["value"] for stat in stats["stats"])


@pytest.mark.parametrize("broken", [[0], [3], [0, 1], [1, 2, 3]])
def test_a_pick_that_fails_moves_on_to_a_live_worker(stack: Stack, broken: list[int]) -> None:
    """The first of ``broken`` answers 503, the others refuse connections; prompts spread over all workers."""
    for index in broken:
        fault = {"fail": 503, "times": 0} if index == broken[0] else {"fail": "refuse"}
        assert get(stack.worker_urls[index] + "/emulate", fault)[0] < 300
    before = retries(stack)
    try:
        assert [generate(stack, f"prompt {number} " * 40) for number in range(16)] == [200] * 16
        assert retries(stack) > before
    finally:
        for index in broken:
            if index == broken[0]:
                disarm(stack.worker_urls[index])
            else:
                stack.workers[index].stop()
                stack.workers[index].start()
                stack.workers[index].wait_ready()


def test_a_reset_before_the_response_moves_on_to_a_live_worker(stack: Stack) -> None:
    before = retries(stack)
    for url in stack.worker_urls[:3]:
        assert get(url + "/emulate", {"fail": "reset", "times": 1})[0] == 200
    try:
        assert [generate(stack, f"reset {number} " * 40) for number in range(16)] == [200] * 16
        assert retries(stack) > before
    finally:
        for url in stack.worker_urls[:3]:
            disarm(url)


def test_what_is_not_for_clients_is_not_found(stack: Stack) -> None:
    assert get(stack.url + "/v1/models")[0] == 200
    assert get(stack.url + "/health")[0] == 200
    for path in ("/metrics", "/reset_prefix_cache", "/emulate", "/v1"):
        assert get(stack.url + path)[0] == 404
