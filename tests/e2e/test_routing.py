"""Where requests go, through real Envoy with the recommended set-up."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from traffic import (
    COMPLETIONS,
    Client,
    add_pool,
    add_route,
    addresses,
    ask_with_trailers,
    at_rest,
    client,
    endpoints,
    metrics_when,
    port_of,
    prompt,
    scrape,
    whole,
)

from extproc.demo import envoy_setup
from extproc.demo.stack import Stack, StackConfig

pytestmark = pytest.mark.e2e


#: The workers run this much faster than real ones, and the router is told their speed: between two requests
#: that follow each other the fleet is idle, by its account, too.
SPEEDUP = 100


def extend(bootstrap: envoy_setup.Json) -> None:
    pool = envoy_setup.pool_clusters(bootstrap)[0]["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA]
    pool |= {"prefill_tokens_per_s": 10_000 * SPEEDUP, "decode_ms": 20 / SPEEDUP}
    add_pool(bootstrap, "small", workers=2, max_inflight=2, policy="prefix-hash")
    add_route(bootstrap, "prefix-hash", x_extproc_policy="prefix-hash")
    add_route(bootstrap, "round-robin", x_extproc_policy="round-robin")
    add_route(bootstrap, "debug", x_extproc_debug="true")
    add_route(bootstrap, "small", cluster="small")
    add_route(bootstrap, "named-pool", x_extproc_pool="small")
    add_route(bootstrap, "unknown-pool", x_extproc_pool="nobody")
    add_route(bootstrap, "typing-error", x_extproc_policy="prefix-hsh")
    headers = {"request_header_mode": "SEND", "response_header_mode": "SEND", "response_trailer_mode": "SEND"}
    for name, mode in {
        "partial": {"request_body_mode": "BUFFERED_PARTIAL"},
        "streamed": {"request_body_mode": "STREAMED"},
        "duplex": {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"},
        "no-body": {"request_body_mode": "NONE"},
        "silent": {"request_body_mode": "BUFFERED", "response_trailer_mode": "SKIP"},
    }.items():
        add_route(bootstrap, name, processing_mode=headers | mode)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(StackConfig(workers=8, worker_arguments=("--speedup", str(SPEEDUP)), edit=extend)) as started:
        yield started


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[Client]:
    async with client(stack) as opened:
        yield opened
    await at_rest(stack)


# --- affinity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "first"),
    [(COMPLETIONS, 1000), ("/prefix-hash" + COMPLETIONS, 2000)],
    ids=["predicted", "prefix-hash"],
)
async def test_affinity_is_exact(stack: Stack, http: Client, path: str, first: int) -> None:
    prompts = [prompt(first + index) for index in range(50)]
    requests = prompts * 20
    random.Random(first).shuffle(requests)
    homes: dict[str, set[str]] = {text: set() for text in prompts}
    for text in requests:
        homes[text].add(await http.worker_of(text, path=path))
    assert [len(workers) for workers in homes.values()] == [1] * 50
    home = {text: workers.pop() for text, workers in homes.items()}
    assert len(set(home.values())) >= 6, "prompts are spread over the fleet"

    gone = Counter(home.values()).most_common(1)[0][0]
    before = copy.deepcopy(stack.bootstrap)
    pool = envoy_setup.pool_clusters(stack.bootstrap)[0]
    endpoints(pool)[:] = [e for e in endpoints(pool) if f"127.0.0.1:{port_of(e)}" != gone]
    stack.write_bootstrap()
    try:
        await metrics_when(stack, lambda m: gone not in m.workers())
        for text in prompts:
            now = {await http.worker_of(text, path=path) for _ in range(3)}
            assert len(now) == 1
            assert gone not in now
            assert home[text] in (gone, *now)
    finally:
        stack.bootstrap = before
        stack.write_bootstrap()
        await metrics_when(stack, lambda m: gone in m.workers())


async def test_conversations_stay_with_their_agent(http: Client) -> None:
    """Several users of one agent share its system prompt, and each conversation grows."""
    system = {"role": "system", "content": prompt(1)}
    workers = set()
    for user in range(5):
        messages = [system]
        for turn in range(3):
            messages.append({"role": "user", "content": f"user {user}, question {turn}"})
            body = {"messages": messages, "max_tokens": 4}
            async with http.session.post(http.stack.url + "/v1/chat/completions", json=body) as response:
                workers.add((await whole(response)).worker)
                messages.append((await response.json())["choices"][0]["message"])
    assert len(workers) == 1


async def test_a_simultaneous_burst_of_one_prompt_stays_together(http: Client) -> None:
    workers = await asyncio.gather(
        *[http.worker_of(prompt(2), path="/prefix-hash" + COMPLETIONS) for _ in range(4)]
    )
    assert len(set(workers)) == 1


# --- routes ------------------------------------------------------------------------------------------


async def test_a_routes_policy(http: Client) -> None:
    workers = [await http.worker_of(prompt(3), path="/round-robin" + COMPLETIONS) for _ in range(16)]
    assert Counter(Counter(workers).values()) == {2: 8}


async def test_debug_header_tells_the_decision(stack: Stack, http: Client) -> None:
    first, second = [await http.ask(prompt(4), path="/debug" + COMPLETIONS) for _ in range(2)]
    assert f"worker={first.worker}, picked={first.worker}, reason=cold" in first.headers["x-extproc-decision"]
    fields = dict(part.split("=") for part in second.headers["x-extproc-decision"].split(", "))
    assert fields["worker"] == first.worker
    assert fields["reason"] == "affinity"
    assert float(fields["cached"]) > 0.5
    assert "x-extproc-decision" not in (await http.ask(prompt(4))).headers


@pytest.mark.parametrize("route", ["small", "named-pool"])
async def test_a_routes_pool(stack: Stack, http: Client, route: str) -> None:
    workers = {
        await http.worker_of(prompt(100 + index), path=f"/{route}{COMPLETIONS}") for index in range(12)
    }
    assert workers == set(addresses(stack)[:2])


async def test_an_unknown_pool_is_left_to_envoy(stack: Stack, http: Client) -> None:
    before = await scrape(stack)
    workers = {await http.worker_of(prompt(5), path="/unknown-pool" + COMPLETIONS) for _ in range(30)}
    assert len(workers) > 1
    after = await scrape(stack)
    name = "extproc_unrouted_total"
    assert after.total(name, reason="no_pool") - before.total(name, reason="no_pool") == 30


async def test_a_route_setting_with_a_typing_error_has_no_effect(http: Client) -> None:
    assert len({await http.worker_of(prompt(6), path="/typing-error" + COMPLETIONS) for _ in range(5)}) == 1


@pytest.mark.parametrize("route", ["partial", "streamed", "duplex", "silent"])
@pytest.mark.parametrize("chars", [4000, 400_000])
async def test_other_processing_modes_steer(stack: Stack, http: Client, route: str, chars: int) -> None:
    text = prompt(7 + chars, chars)
    path = f"/{route}{COMPLETIONS}"
    home = await http.worker_of(text)
    before = await at_rest(stack)
    assert {await http.worker_of(text, path=path) for _ in range(3)} == {home}
    await at_rest(stack)
    silent = {"fail": "hang", "after_tokens": 1}
    async with http.open(text, path=path, stream=True, max_tokens=9, emulate=silent) as response:
        await response.content.readany()
        # In flight for as long as it streams, which the router asks for where the YAML doesn't.
        assert (await scrape(stack)).in_flight() == {home: 1}
        response.close()
    after = await at_rest(stack)
    for name, more in (
        ("decisions", 4),
        ("ended", 4),
        ("moved", 0),
        ("internal_errors", 0),
        ("unreadable", 0),
    ):
        assert after.total(f"extproc_{name}_total") - before.total(f"extproc_{name}_total") == more, name


async def test_a_body_that_trailers_follow_steers(stack: Stack, http: Client) -> None:
    body = json.dumps({"prompt": prompt(12), "max_tokens": 2}).encode()
    await http.ask(prompt(12))
    before = await at_rest(stack)
    for _ in range(3):
        await ask_with_trailers(stack, body)
    after = await at_rest(stack)
    for name, labels, more in (
        ("decisions", {"reason": "affinity"}, 3),
        ("ended", {"status": "2xx"}, 3),
        ("unreadable", {}, 0),
        ("moved", {}, 0),
    ):
        name = f"extproc_{name}_total"
        assert after.total(name, **labels) - before.total(name, **labels) == more, name


async def test_without_a_body_requests_go_by_load(stack: Stack, http: Client) -> None:
    workers = {await http.worker_of(prompt(8), path="/no-body" + COMPLETIONS) for _ in range(30)}
    assert len(workers) > 4


# --- bodies that are not for us to judge -------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "headers", "data", "status"),
    [
        ("bad_json", {"content-type": "application/json"}, b'{"prompt": "x', 400),
        ("content_type", {"content-type": "text/plain"}, b'{"prompt": "x"}', 400),
        (
            "encoded",
            {"content-type": "application/json", "content-encoding": "gzip"},
            gzip.compress(b"{}"),
            400,
        ),
        ("no_prompt", {"content-type": "application/json"}, b'{"model": "emulated"}', 400),
        ("empty_body", {"content-type": "application/json"}, b"", 400),
    ],
)
async def test_the_engine_is_the_judge(
    stack: Stack, http: Client, reason: str, headers: dict[str, str], data: bytes, status: int
) -> None:
    before = await scrape(stack)
    async with http.session.post(stack.url + COMPLETIONS, data=data, headers=headers) as response:
        answer = await whole(response)
    assert answer.status == status
    assert answer.worker in addresses(stack)
    assert "error" in json.loads(answer.text)
    after = await scrape(stack)
    name = "extproc_unreadable_total"
    assert after.total(name, reason=reason) - before.total(name, reason=reason) == 1
    assert after.total("extproc_decisions_total") - before.total("extproc_decisions_total") == 1


async def test_get_goes_to_an_engine_by_load(stack: Stack, http: Client) -> None:
    before = await at_rest(stack)
    async with http.session.get(stack.url + COMPLETIONS) as response:
        answer = await whole(response)
    assert answer.status == 404
    assert json.loads(answer.text) == {"detail": "Not Found"}, "the engine's own word"
    after = await at_rest(stack)
    for name in ("extproc_decisions_total", "extproc_unreadable_total"):
        assert after.total(name) - before.total(name) == 1


async def test_bodies_of_8_mib_are_routed_by_prompt(stack: Stack, http: Client) -> None:
    before = await at_rest(stack)
    padding = "x" * (8 * 1024 * 1024)
    body = {"user": padding, "prompt": prompt(9), "max_tokens": 2}
    workers = set()
    for _ in range(3):
        async with http.session.post(stack.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
            workers.add((await whole(response)).worker)
    assert workers == {await http.worker_of(prompt(9))}
    # A prompt of that size is more than the engine takes, which is for the engine to say.
    answer = await http.ask(padding)
    assert (answer.status, answer.worker in addresses(stack)) == (400, True)
    after = await at_rest(stack)
    assert after.total("extproc_unreadable_total") == before.total("extproc_unreadable_total")
    assert after.total("extproc_decisions_total") - before.total("extproc_decisions_total") == 5
    tokens = after.total("extproc_prompt_tokens_total") - before.total("extproc_prompt_tokens_total")
    assert tokens > 2_000_000


async def test_a_body_of_17_mib_is_refused_by_envoy(stack: Stack, http: Client) -> None:
    answer = await http.ask("x" * (17 * 1024 * 1024))
    assert answer.status == 413
    assert answer.worker == ""


# --- load --------------------------------------------------------------------------------------------


async def test_limits_are_kept_and_overflow_is_counted(stack: Stack, http: Client) -> None:
    path = "/small" + COMPLETIONS
    two = addresses(stack)[:2]
    silent = {"fail": "hang", "after_tokens": 1}
    before = await at_rest(stack)
    async with AsyncExitStack() as held:
        for held_so_far in range(7):
            metrics = await metrics_when(
                stack, lambda m, n=held_so_far: sum(m.in_flight("small").values()) == n
            )
            if held_so_far == 4:
                assert metrics.in_flight("small") == dict.fromkeys(two, 2)
            if held_so_far >= 4:
                name = "extproc_overflow_total"
                assert metrics.total(name, pool="small") - before.total(name, pool="small") == held_so_far - 4
            # One prompt, so that without the limit all would go to one worker.
            response = await held.enter_async_context(
                http.open(prompt(10), path=path, stream=True, max_tokens=50, emulate=silent)
            )
            assert response.status == 200
        after = await metrics_when(stack, lambda m: sum(m.in_flight("small").values()) == 7)
        assert sorted(after.in_flight("small").values()) == [3, 4]
        for reason, count in (("overflow", 3), ("limit", 2)):
            labels = {"pool": "small", "reason": reason}
            name = "extproc_decisions_total"
            assert after.total(name, **labels) - before.total(name, **labels) == count


async def test_the_count_follows_a_request_that_was_retried_elsewhere(stack: Stack, http: Client) -> None:
    path = "/prefix-hash" + COMPLETIONS
    home = await http.worker_of(prompt(11), path=path)
    before = await at_rest(stack)
    async with http.session.post(f"http://{home}/emulate", json={"fail": 503}) as armed:
        assert armed.status == 200
    silent = {"fail": "hang", "after_tokens": 1}
    async with http.open(prompt(11), path=path, stream=True, max_tokens=50, emulate=silent) as response:
        # Its own header comes before what is armed, so it is the next one that meets the 503.
        assert (response.status, response.headers["x-emulated-worker"]) == (200, home)
        async with http.open(prompt(11), path=path, stream=True, max_tokens=200_000 // 100) as retried:
            assert retried.status == 200
            other = retried.headers["x-emulated-worker"]
            assert other != home
            metrics = await metrics_when(stack, lambda m: sum(m.in_flight().values()) == 2)
            assert metrics.in_flight() == {home: 1, other: 1}
            assert metrics.total("extproc_moved_total") - before.total("extproc_moved_total") == 1
            retried.close()
        response.close()
