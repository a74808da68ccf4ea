"""Real Envoy, router and workers under traffic: `top` shows affinity, and what `/metrics` counts."""

from __future__ import annotations

import contextlib
import io
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.cli import main
from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig
from extproc.live.serving import FRESH_S
from extproc.live.status import WINDOW_S, Status

pytestmark = pytest.mark.e2e

AGENTS, ROUNDS = 4, 6
MARKER = "zanzibar-4711"


def _settings(bootstrap: envoy_setup.Json) -> None:
    for cluster in envoy_setup.pool_clusters(bootstrap):
        settings = cluster["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA]
        settings |= {"scrape_interval_s": 0.2, "tenant_header": "x-tenant"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(StackConfig(workers=2, worker_arguments=("--speedup", "50"), edit=_settings)) as running:
        yield running


def traffic(stack: Stack) -> None:
    """A few agents, each with a long prompt of its own, in turn."""
    for number in range(ROUNDS):
        for agent in range(AGENTS):
            messages = [
                {"role": "system", "content": f"You are agent {agent} of {MARKER}. " * 400},
                {"role": "user", "content": f"Question {number}?"},
            ]
            request = urllib.request.Request(
                stack.url + "/v1/chat/completions",
                json.dumps({"messages": messages, "max_tokens": 2}).encode(),
                {"content-type": "application/json", "x-tenant": f"{MARKER}-{agent % 2}"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.status == 200
                response.read()


def top(stack: Stack, *arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["top", "--once", "--server", stack.metrics_url, *arguments]) == 0
    return out.getvalue()


def wait_for_engines(stack: Stack) -> None:
    """Until the router has read every engine's page."""
    deadline = time.monotonic() + 60
    while any(worker.signal_age_s is None for worker in live(stack).pools[0].workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def live(stack: Stack) -> Status:
    return msgspec.json.decode(top(stack, "--json"), type=Status)


def counters(stack: Stack, name: str, label: str = "") -> Counter[str]:
    with urllib.request.urlopen(stack.metrics_url, timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    found: Counter[str] = Counter()
    for sample in samples:
        found[sample.labels.get(label, "")] += int(sample.value)
    return found


def test_top_shows_affinity_and_agrees_with_the_metrics(stack: Stack) -> None:
    requests = AGENTS * ROUNDS
    for _ in range(6):
        wait_for_engines(stack)
        traffic(stack)
        time.sleep(2 * FRESH_S)  # a status is told again for so long
        status, report = live(stack), top(stack)
        all_seen = len(status.decisions) == requests
        if all_seen and status.now_s - status.decisions[-1].at_s < WINDOW_S - 2.0:
            break
        # So slow that the first decisions have left the window, or that Envoy didn't wait for the router:
        # once more, from the beginning.
        stack.router.restart()
        stack.reset_caches()
    else:
        pytest.fail(f"{len(status.decisions)} of {requests} decisions in a window of ten seconds")
    [pool] = status.pools

    # What the metrics count.
    reasons = counters(stack, "extproc_decisions_total", "reason")
    assert {reason: count for reason, count in reasons.items() if count} == {
        "cold": AGENTS,
        "affinity": requests - AGENTS,
    }
    assert {reason: round(rate * status.window_s) for reason, rate in pool.reasons.items()} == +reasons
    prompt_tokens = counters(stack, "extproc_prompt_tokens_total").total()
    cached_tokens = counters(stack, "extproc_cached_tokens_total").total()
    assert pool.hit_ratio == pytest.approx(cached_tokens / prompt_tokens, abs=1e-3)
    assert sum(decision.prompt_tokens for decision in status.decisions) == prompt_tokens
    assert sum(decision.cached_tokens for decision in status.decisions) == cached_tokens
    assert round(sum(worker.requests_per_s for worker in pool.workers) * status.window_s) == requests
    held = counters(stack, "extproc_cache_picture_tokens", "worker")
    assert {w.address: w.cache_used_tokens for w in pool.workers} == pytest.approx(held, rel=0.05)
    assert {w.cache_tokens for w in pool.workers} == {190_000}

    # Affinity, in the figures and for people.
    assert len(pool.prefixes) == AGENTS
    for prefix in pool.prefixes:
        assert len(prefix.spread) == 1
        assert prefix.hit_ratio is not None
        assert prefix.hit_ratio > 0.7
    assert {decision.status for decision in status.decisions} == {200}
    assert all(decision.served == decision.worker for decision in status.decisions)
    assert {tenant.share for tenant in pool.tenants} == {0.5}
    assert status.alarms == []
    lines = [line.split() for line in report.splitlines()]
    spread = {line[0]: line[6:] for line in lines if line and line[0] in {p.prefix for p in pool.prefixes}}
    assert spread == {prefix.prefix: ["1", *prefix.spread] for prefix in pool.prefixes}
    assert "affinity 83%" in report
    assert f"hit {pool.hit_ratio:.0%}" in report

    assert "zanzibar" not in report + msgspec.json.encode(status).decode()
