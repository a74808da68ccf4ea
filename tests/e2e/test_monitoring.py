"""A real Prometheus reads a real router under traffic: every expression of monitoring/ finds something."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitored import MONITORING, Expression, expressions, selectors
from needed import program
from traffic import client, prompt

from extproc.demo import envoy_setup
from extproc.demo.process import Process, answers, free_ports
from extproc.demo.stack import HOST, Stack, StackConfig

pytestmark = pytest.mark.e2e

#: More than anything here takes, on any machine.
PATIENCE_S = 90.0


def quick_readings(bootstrap: envoy_setup.Json) -> None:
    for pool in envoy_setup.pool_clusters(bootstrap):
        pool["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA]["scrape_interval_s"] = 0.5


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    program("prometheus", package="prometheus")
    with Stack(StackConfig(workers=2, edit=quick_readings)) as running:
        yield running


class Prometheus:
    """With the very files that ship, other targets and a shorter interval."""

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (job,) = config["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [target]}]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_bytes((MONITORING / "alerts.yml").read_bytes())
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        command = [program("prometheus", package="prometheus"), f"--config.file={file}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={HOST}:{port}"]
        log = folder / "prometheus.log"
        self.process = Process("prometheus", command, log, lambda: answers(self.url + "/-/ready"))

    def get(self, path: str, **query: str) -> Any:
        """Data of an answer of its API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """An expression's present values."""
        data = self.get("query", query=expression)
        assert data["resultType"] == "vector", expression
        return [float(sample["value"][1]) for sample in data["result"]]

    def lacks(self, expression: Expression) -> bool:
        """Whether it has nothing to show yet: no series, or no number."""
        if expression.kind == "alert":  # silent is what it should be; what it looks at must be there
            return not all(self.values(selector.text) for selector in selectors(expression.text))
        return not any(math.isfinite(value) for value in self.values(expression.text))


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    it = Prometheus(tmp_path_factory.mktemp("prometheus"), f"{HOST}:{stack.metrics_port}")
    it.process.start()
    try:
        it.process.wait_ready(PATIENCE_S)
        yield it
    finally:
        it.process.stop()


@asynccontextmanager
async def requests(stack: Stack) -> AsyncIterator[None]:
    """Six prompts again and again, half of them as streams, as long as one is in here."""

    async def stream(number: int) -> None:
        while True:
            answer = await asks.ask(prompt(number, 2000), stream=number % 2 == 0)
            assert answer.status == 200

    async with client(stack) as asks:
        tasks = [asyncio.create_task(stream(number)) for number in range(6)]
        try:
            yield
            for task in tasks:
                assert not task.done() or task.exception() is None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_every_expression_finds_something_sane(stack: Stack, prometheus: Prometheus) -> None:
    lacking = list(expressions())
    everything = len(lacking)
    deadline_s = time.monotonic() + PATIENCE_S
    async with requests(stack):
        while lacking := [one for one in lacking if await asyncio.to_thread(prometheus.lacks, one)]:
            assert time.monotonic() < deadline_s, lacking
            await asyncio.sleep(0.5)
        shown = [
            (one, await asyncio.to_thread(prometheus.values, one.text))
            for one in expressions()
            if one.kind == "panel"
        ]
    assert everything > 70
    for one, values in shown:
        numbers = [value for value in values if not math.isnan(value)]  # of a worker that had nothing to do
        assert all(math.isfinite(value) for value in numbers), one
        if not one.where.startswith("Seen minus predicted"):
            assert all(value >= 0 for value in numbers), one
        if one.unit == "percentunit":
            assert all(value <= 1.5 for value in numbers), one
    by_title = {one.where: values for one, values in shown}
    assert max(by_title["Cached, as engines say A"]) > 0.5
    assert max(by_title["Cached, as estimated A"]) > 0.5
    assert sum(by_title["Workers by state A"]) == 2
    assert by_title["Versions A"] == [1.0]


async def test_rules_are_evaluated_and_nothing_fires(stack: Stack, prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    for rule in rules:
        assert rule["health"] == "ok", rule
        assert rule.get("state") != "firing", rule


def test_prometheus_finds_no_fault_with_the_page(stack: Stack) -> None:
    with urllib.request.urlopen(stack.metrics_url, timeout=30) as response:
        page = response.read()
    command = [program("promtool", package="prometheus"), "check", "metrics"]
    result = subprocess.run(command, input=page, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.decode()) == (0, "")
