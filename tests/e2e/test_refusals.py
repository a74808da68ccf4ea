"""Refusals through real Envoy: what clients see, that nothing stays counted, what Envoy shows of timeouts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from traffic import COMPLETIONS, Answer, add_route, at_rest, client, prompt

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e


def extend(bootstrap: envoy_setup.Json) -> None:
    """Bounds, tenants, a pool without workers, and whom Envoy believes."""
    pool = envoy_setup.pool_clusters(bootstrap)[0]
    settings = pool["metadata"]["filter_metadata"]["extproc"]
    settings |= {"shed_after_ms": 60_000, "tenant_header": "authorization", "contention_ms": 1_000}
    empty = json.loads(json.dumps(pool)) | {"name": "empty"}
    empty["metadata"] = {"filter_metadata": {"extproc": {"reject_if_empty": True}}}
    empty["load_assignment"] = {"cluster_name": "empty", "endpoints": [{"lb_endpoints": []}]}
    bootstrap["static_resources"]["clusters"].append(empty)
    add_route(bootstrap, "nobody", x_extproc_pool="empty")
    for listener in bootstrap["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["internal_address_config"] = {
            "cidr_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]
        }


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(StackConfig(workers=2, worker_arguments=("--speedup", "20"), edit=extend)) as started:
        yield started


def refusal(answer: Answer) -> dict[str, object]:
    """The error of an answer that Envoy gave by itself."""
    assert answer.worker == ""
    assert answer.headers["content-type"] == "application/json"
    error = json.loads(answer.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


async def test_a_request_that_can_not_meet_its_bound_gets_429(stack):
    async with client(stack) as c:
        before = await at_rest(stack)
        answer = await c.ask(prompt(1), headers={"x-extproc-ttft-slo-ms": "1"})
        assert answer.status == 429
        error = refusal(answer)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
        assert answer.headers["x-extproc-shed"] == "slo"
        assert (await c.ask(prompt(1), headers={"x-extproc-ttft-slo-ms": "60000"})).status == 200
        after = await at_rest(stack)
    assert after.total("extproc_shed_total", reason="slo") - before.total("extproc_shed_total") == 1
    assert after.total("extproc_decisions_total") - before.total("extproc_decisions_total") == 1


async def test_refused_requests_never_reach_a_worker_and_leave_no_count(stack):
    async with client(stack) as c:
        before = await at_rest(stack)
        answers = [
            await c.ask(prompt(i), headers={"x-extproc-ttft-slo-ms": "0.001", "authorization": "Bearer k"})
            for i in range(20)
        ]
        after = await at_rest(stack)
    assert [answer.status for answer in answers] == [429] * 20
    assert after.total("extproc_decisions_total") == before.total("extproc_decisions_total")
    assert after.total("extproc_prompt_tokens_total") == before.total("extproc_prompt_tokens_total")


async def test_a_pool_without_workers_says_so(stack):
    async with client(stack) as c:
        answer = await c.ask(prompt(2), path="/nobody" + COMPLETIONS)
    assert answer.status == 503
    assert refusal(answer)["code"] == "no_worker"
    assert "empty" in str(refusal(answer)["message"])
    assert "retry-after" not in answer.headers


async def test_the_api_key_is_never_told(stack):
    key = "Bearer sk-0123456789abcdef"
    async with client(stack) as c:
        for _ in range(3):
            await c.ask(prompt(3), headers={"authorization": key, "x-extproc-ttft-slo-ms": "0.001"})
        await at_rest(stack)
    logs = "".join(path.read_text(errors="replace") for path in stack.folder.glob("router*.log"))
    assert "requests are refused" in logs
    assert "sk-0123456789abcdef" not in logs


@pytest.mark.parametrize("header", ["x-envoy-expected-rq-timeout-ms", "x-envoy-upstream-rq-timeout-ms"])
async def test_an_inner_hop_s_timeout_is_a_bound_and_a_stranger_s_is_not(stack, header):
    """Envoy removes these headers unless ``internal_address_config`` has the sender, an Envoy in front."""
    async with client(stack) as c:
        inside = await c.ask(prompt(4), headers={header: "1", "x-forwarded-for": "10.0.0.1"})
        outside = await c.ask(prompt(4), headers={header: "1", "x-forwarded-for": "8.8.8.8"})
    assert (inside.status, inside.headers.get("x-extproc-shed")) == (429, "timeout")
    assert outside.status == 200
