"""``extproc traffic`` against a running stack, and against none."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e


def traffic(*arguments):
    command = [sys.executable, "-m", "extproc.cli", "traffic", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def with_debug(bootstrap):
    """Ask for the header that tells each decision."""
    (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    (route,) = [route for route in host["routes"] if route["name"] == "generate"]
    route["typed_per_filter_config"] = {
        "envoy.filters.http.ext_proc": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_initial_metadata": [{"key": "x-extproc-debug", "value": "true"}]},
        }
    }


def test_affinity_shows():
    with Stack(StackConfig(workers=3, worker_arguments=("--speedup", "20"), edit=with_debug)) as stack:
        small = ["--agents", "4", "--streams", "4", "--pause-s", "0", "--requests", "60"]
        done = traffic("--url", stack.url, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("in all: 60 requests")
    assert "FAILED" not in last
    assert int(re.search(r"affinity (\d+)", last)[1]) > 40
    assert int(re.search(r"cached (\d+)%", last)[1]) > 70


def test_nothing_answers():
    done = traffic("--url", "http://127.0.0.1:1", "--wait-s", "0")
    assert done.returncode == 2
    assert "http://127.0.0.1:1/v1/models" in done.stderr
