"""The emulated worker over real HTTP: order of headers and tokens, caching, aborts, errors, faults, drain.

Nothing here measures time. Where a request has to be caught in a certain state the engine is so slow that it
stays there until the test is done with it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.demo.process import free_ports
from extproc.emulator.engine import CostModel, EngineConfig
from extproc.emulator.worker_http import WORKER_HEADER, Worker, WorkerConfig

FAST = 200.0
#: A step takes minutes, once a request has reached the engine.
STUCK = 1e-4
AT_ONCE = CostModel(request_s=0, tokenize_s=0)
CHAT = "/v1/chat/completions"
LONG = "Please compare these two invoices and tell me what differs between them, line by line. " * 20


@asynccontextmanager
async def serving(speedup=FAST, engine=None, **options):
    worker = Worker(WorkerConfig(engine=engine or EngineConfig(cost=AT_ONCE), speedup=speedup, **options))
    await worker.start()
    try:
        async with aiohttp.ClientSession(f"http://{worker.address}") as client:
            yield worker, client
    finally:
        await worker.stop()


def chat(content="Hello", **fields):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 20, **fields}


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.005)


async def post(client, body, path=CHAT, **options):
    async with client.post(path, json=body, **options) as response:
        return response.status, await response.json()


async def events(response):
    payloads = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def cached(client, body):
    return (await post(client, body))[1]["usage"]["prompt_tokens_details"]["cached_tokens"]


# -- replies ------------------------------------------------------------------------------------------------


async def test_a_stream_s_headers_come_before_its_first_token():
    async with (
        serving(STUCK) as (worker, client),
        client.post(CHAT, json=chat(LONG, stream=True)) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert [generation.tokens for generation in worker.driver.generations.values()] == [0]


async def test_a_stream():
    async with serving() as (_, client):
        body = chat(stream=True, max_tokens=5, stream_options={"include_usage": True})
        async with client.post(CHAT, json=body) as response:
            opening, *chunks, usage, done = await events(response)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(chunks) == 5
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert usage["usage"]["completion_tokens"] == 5
    assert done == "[DONE]"


async def test_streamed_and_whole_answers_are_the_same():
    async with serving(stream_interval=7) as (_, client):
        async with client.post(CHAT, json=chat(LONG, stream=True)) as response:
            chunks = (await events(response))[1:-1]
        _, whole = await post(client, chat(LONG))
    assert len(chunks) == 4  # the first token, seven, seven, the rest
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 20


async def test_several_prompts_and_answers():
    async with serving() as (_, client):
        body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4}
        _, whole = await post(client, body, "/v1/completions")
        async with client.post("/v1/completions", json=body | {"stream": True}) as response:
            chunks = [event for event in await events(response) if event != "[DONE]"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) == 4
    assert whole["usage"]["completion_tokens"] == 16
    streamed = dict.fromkeys(range(4), "")
    for chunk in chunks:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [choice["text"] for choice in whole["choices"]]


async def test_request_id_becomes_the_reply_s_id():
    async with serving(request_id_headers=True) as (worker, client):
        headers = {"x-request-id": "r-7"}
        async with client.post(CHAT, json=chat(), headers=headers) as response:
            assert (await response.json())["id"] == "chatcmpl-r-7"
            assert response.headers["x-request-id"] == "r-7"
            assert response.headers[WORKER_HEADER] == worker.address


async def test_load_report_for_those_who_ask():
    async with serving() as (_, client):
        for style, start in (
            ("TEXT", "TEXT named_metrics.num_requests_waiting=0.0"),
            ("JSON", 'JSON {"named'),
        ):
            headers = {"endpoint-load-metrics-format": style}
            async with client.post(CHAT, json=chat(), headers=headers) as response:
                assert response.headers["endpoint-load-metrics"].startswith(start)
        async with client.post(CHAT, json=chat()) as response:
            assert "endpoint-load-metrics" not in response.headers


# -- cache --------------------------------------------------------------------------------------------------


async def test_a_repeated_prompt_is_cached_but_for_its_last_block():
    async with serving() as (_, client):
        assert await cached(client, chat(LONG)) == 0
        _, reply = await post(client, chat(LONG))
        prompt_tokens = reply["usage"]["prompt_tokens"]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 16 * 16


async def test_a_conversation_hits_what_was_generated():
    async with serving() as (_, client):
        _, first = await post(client, chat(LONG, max_tokens=200))
        answer = first["choices"][0]["message"]
        messages = chat(LONG)["messages"] + [{"role": "assistant", "content": answer["content"]}]
        messages.append({"role": "user", "content": "And?"})
        total = first["usage"]["total_tokens"]
        # The last generated token's key and value were never computed.
        assert await cached(client, {"messages": messages, "max_tokens": 5}) == (total - 1) // 16 * 16


async def test_token_ids_of_tokenize_hit_the_text_s_blocks():
    async with serving() as (_, client):
        _, tokenized = await post(client, chat(LONG), "/tokenize")
        assert tokenized["count"] == len(tokenized["tokens"])
        await post(client, chat(LONG))
        _, reply = await post(client, {"prompt": tokenized["tokens"], "max_tokens": 1}, "/v1/completions")
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokenized["count"] - 1) // 16 * 16


async def test_salts_and_adapters_share_nothing():
    async with serving(model_names=("base", "adapter")) as (_, client):
        await post(client, chat(LONG))
        assert await cached(client, chat(LONG, cache_salt="a")) == 0
        assert await cached(client, chat(LONG, model="adapter")) == 0
        assert await cached(client, chat(LONG, model="base")) > 0


async def test_reset_prefix_cache():
    async with serving() as (_, client):
        await post(client, chat(LONG))
        assert (await post(client, None, "/reset_prefix_cache"))[1] == {"success": True}
        assert await cached(client, chat(LONG)) == 0


async def test_no_reset_while_blocks_are_in_use():
    async with serving(STUCK) as (worker, client), client.post(CHAT, json=chat(LONG, stream=True)):
        await until(lambda: worker.driver.engine.running == 1)
        assert (await post(client, None, "/reset_prefix_cache"))[1] == {"success": False}


# -- the client goes away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_frees_the_sequence(stream):
    async with serving(STUCK) as (worker, client):
        engine = worker.driver.engine
        request = asyncio.create_task(client.post(CHAT, json=chat(LONG, stream=stream)))
        await until(lambda: engine.running == 1)
        assert engine.kv_usage > 0
        if stream:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: engine.running == 0)
        assert engine.kv_usage == 0
        assert not worker.driver.generations
        text = worker.metrics.text().decode()
        assert (
            'vllm:request_success_total{engine="0",finished_reason="abort",model_name="emulated"} 1.0' in text
        )


async def test_an_abort_in_the_stream_frees_the_sequence():
    async with serving(5.0) as (worker, client):
        async with client.post(CHAT, json=chat(LONG, stream=True, max_tokens=50_000)) as response:
            await response.content.readuntil(b'"delta":{"content"')
            assert worker.driver.engine.running == 1
            response.close()
        await until(lambda: worker.driver.engine.running == 0)


async def test_an_abort_in_the_queue_frees_the_place():
    engine = EngineConfig(max_num_seqs=1, cost=AT_ONCE)
    async with serving(STUCK, engine) as (worker, client), client.post(CHAT, json=chat(stream=True)):
        async with client.post(CHAT, json=chat(stream=True)) as second:
            await until(lambda: worker.driver.engine.waiting == 1)
            second.close()
        await until(lambda: worker.driver.engine.waiting == 0)
        assert worker.driver.engine.running == 1


# -- errors -------------------------------------------------------------------------------------------------


BUSY = {
    "error": {
        "message": "The engine is currently busy and cannot accept new requests. Please try again later "
        "or on a different instance.",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
}


async def test_a_full_queue_is_503():
    engine = EngineConfig(max_num_seqs=1, max_queued=1, cost=AT_ONCE)
    async with serving(STUCK, engine) as (worker, client), client.post(CHAT, json=chat(stream=True)):
        await until(lambda: worker.driver.engine.running == 1)
        async with client.post(CHAT, json=chat(stream=True)):
            await until(lambda: worker.driver.engine.waiting == 1)
            async with client.post(CHAT, json=chat()) as response:
                assert response.status == 503
                assert "retry-after" not in response.headers
                assert await response.json() == BUSY


async def test_statuses():
    async with serving() as (_, client):
        assert (await post(client, chat(model="other")))[0] == 404
        assert (await post(client, {}))[0] == 400
        assert (await post(client, {}, "/v1/nothing"))[0] == 404
        async with client.post(CHAT, data=b"{", headers={"content-type": "application/json"}) as response:
            assert response.status == 400
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        packed = gzip.compress(json.dumps(chat()).encode())
        async with client.post(CHAT, data=packed, headers=headers) as response:
            assert response.status == 400
        for path in ("/health", "/ping", "/version", "/v1/models"):
            async with client.get(path) as response:
                assert response.status == 200


# -- metrics ------------------------------------------------------------------------------------------------

SAMPLES = {
    "vllm:num_requests_running": {"engine", "model_name"},
    "vllm:num_requests_waiting": {"engine", "model_name"},
    "vllm:kv_cache_usage_perc": {"engine", "model_name"},
    "vllm:prefix_cache_queries_total": {"engine", "model_name"},
    "vllm:prefix_cache_hits_total": {"engine", "model_name"},
    "vllm:num_preemptions_total": {"engine", "model_name"},
    "vllm:prompt_tokens_total": {"engine", "model_name"},
    "vllm:generation_tokens_total": {"engine", "model_name"},
    "vllm:time_to_first_token_seconds_sum": {"engine", "model_name"},
    "vllm:e2e_request_latency_seconds_count": {"engine", "model_name"},
    "vllm:request_queue_time_seconds_count": {"engine", "model_name"},
    "vllm:request_prefill_time_seconds_sum": {"engine", "model_name"},
    "vllm:request_prefill_kv_computed_tokens_sum": {"engine", "model_name"},
    "vllm:iteration_tokens_total_sum": {"engine", "model_name"},
    "vllm:request_success_total": {"engine", "model_name", "finished_reason"},
}


async def test_metrics_have_vllm_s_names_and_labels():
    async with serving(model_names=("tiny",)) as (_, client):
        await post(client, chat(LONG))
        _, reply = await post(client, chat(LONG))
        async with client.get("/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
    samples = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    for name, labels in SAMPLES.items():
        assert {frozenset(sample.labels) for sample in samples[name]} == {frozenset(labels)}, name
        assert samples[name][0].labels["model_name"] == "tiny"
    usage = reply["usage"]
    value = {name: found[0].value for name, found in samples.items()}
    assert value["vllm:prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert value["vllm:prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert value["vllm:generation_tokens_total"] == 40
    assert value["vllm:num_requests_running"] == value["vllm:kv_cache_usage_perc"] == 0
    assert value["vllm:time_to_first_token_seconds_count"] == 2
    computed = 2 * usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert value["vllm:request_prefill_kv_computed_tokens_sum"] == computed
    # Each step computes the prompts' tokens, and one for each token after a sequence's first.
    assert value["vllm:iteration_tokens_total_sum"] == computed + 2 * 19
    phases = ("queue_time", "prefill_time", "decode_time")
    assert sum(value[f"vllm:request_{phase}_seconds_sum"] for phase in phases) == pytest.approx(
        value["vllm:request_queue_time_seconds_sum"] + value["vllm:request_inference_time_seconds_sum"]
    )
    assert value["process_start_time_seconds"] > 0
    config = samples["vllm:cache_config_info"][0].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "11876")
    assert config["enable_prefix_caching"] == "True"


async def test_without_prefix_caching_nothing_is_found_and_the_page_says_so():
    off = EngineConfig(enable_prefix_caching=False, cost=AT_ONCE)
    async with serving(engine=off, version="0.31.1") as (_, client):
        assert [await cached(client, chat(LONG)) for _ in range(2)] == [0, 0]
        async with client.get("/metrics") as response:
            page = await response.text()
        async with client.get("/version") as response:
            assert await response.json() == {"version": "0.31.1"}
    assert 'enable_prefix_caching="False"' in page
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="emulated"} 0.0' in page


# -- faults -------------------------------------------------------------------------------------------------


async def test_a_status_for_some_requests():
    async with serving() as (_, client):
        assert (await post(client, {"fail": "503", "times": 2}, "/emulate"))[1] == {"fail": 503, "left": 2}
        assert [(await post(client, chat()))[0] for _ in range(3)] == [503, 503, 200]


async def test_until_disarmed():
    async with serving() as (_, client):
        await post(client, {"fail": "500", "times": 0}, "/emulate")
        assert [(await post(client, chat()))[0] for _ in range(3)] == [500, 500, 500]
        async with client.delete("/emulate") as response:
            assert await response.json() == {"fail": None}
        assert (await post(client, chat()))[0] == 200


async def test_a_request_can_break_itself():
    async with serving() as (_, client):
        assert (await post(client, chat(), headers={"x-emulate": '{"fail": "429"}'}))[0] == 429
        assert (await post(client, chat(), headers={"x-emulate": '{"fail": "fire"}'}))[0] == 400
        assert (await post(client, chat()))[0] == 200


async def test_a_reset_before_the_headers():
    async with serving() as (worker, client):
        with pytest.raises((aiohttp.ClientConnectionError, ConnectionError)):
            await post(client, chat(), headers={"x-emulate": '{"fail": "reset"}'})
        assert worker.driver.engine.running == 0


async def test_a_reset_in_the_stream():
    async with serving(20.0) as (worker, client):
        headers = {"x-emulate": '{"fail": "reset", "after_tokens": 3}'}
        async with client.post(CHAT, json=chat(LONG, stream=True), headers=headers) as response:
            await response.content.readuntil(b'"delta":{"content"')
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
                await response.read()
        await until(lambda: worker.driver.engine.running == 0)


async def test_silence_ends_when_the_client_gives_up():
    async with serving() as (worker, client):
        headers = {"x-emulate": '{"fail": "hang", "after_tokens": 2}'}
        async with client.post(CHAT, json=chat(stream=True), headers=headers) as response:
            await response.content.readuntil(b'"delta":{"content"')
            await until(lambda: worker.driver.engine.running == 0)
            assert not worker._idle.is_set()
            response.close()
        await until(worker._idle.is_set)


async def test_a_closed_port_opens_again():
    async with serving() as (worker, client):
        address = worker.address
        await post(client, {"fail": "refuse", "seconds": 0.5}, "/emulate")
        await until(lambda: worker._site is None)
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(client, chat())
        await until(lambda: worker._site is not None)
        assert (await post(client, chat()))[0] == 200
        assert worker.address == address


async def test_a_crash_ends_streams_and_health():
    async with serving(STUCK) as (worker, client):
        async with client.post(CHAT, json=chat(LONG, stream=True)) as response:
            await post(client, {"fail": "crash"}, "/emulate")
            error, done = await events(response)
            assert error["error"]["code"] == 500
            assert done == "[DONE]"
        async with client.get("/health") as response:
            assert response.status == 503
        assert (await post(client, chat()))[0] == 500
        await until(worker.stopped.is_set)


async def test_a_slow_engine_and_its_recovery():
    async with serving() as (worker, client):
        await post(client, {"fail": "slow", "factor": 7}, "/emulate")
        await until(lambda: worker.driver.slowness == 7)
        async with client.delete("/emulate"):
            assert worker.driver.slowness == 1
        await post(client, {"fail": "slow", "factor": 7, "seconds": 0.05}, "/emulate")
        await until(lambda: worker.driver.slowness == 7)
        await until(lambda: worker.driver.slowness == 1)


async def load_gauges(client):
    async with client.get("/metrics") as response:
        return re.findall(r"^vllm:num_requests_running\{.*?\} (\S+)", await response.text(), re.MULTILINE)


async def test_a_metrics_page_that_lies():
    async with serving(STUCK) as (_, client):
        await post(client, {"fail": "freeze"}, "/emulate")
        assert await load_gauges(client) == ["0.0"]
        async with client.post(CHAT, json=chat(LONG, stream=True)):
            assert await load_gauges(client) == ["0.0"]
            await post(client, {"fail": "zero"}, "/emulate")
            assert await load_gauges(client) == ["0.0"]
            async with client.delete("/emulate"):
                assert await load_gauges(client) == ["1.0"]
            await post(client, {"fail": "lag", "seconds": 0.1}, "/emulate")
            assert await load_gauges(client) == ["1.0"]
        await asyncio.sleep(0.2)
        await load_gauges(client)
        await asyncio.sleep(0.2)
        assert await load_gauges(client) == ["0.0"]


@pytest.mark.parametrize(
    "body",
    ["", "[]", '{"fail": "fire"}', '{"fail": "200"}', '{"fail": "reset", "after": 3}', '{"times": -1}'],
)
async def test_unknown_faults_are_refused(body):
    async with serving() as (_, client), client.post("/emulate", data=body) as response:
        assert response.status == 400


# -- the process --------------------------------------------------------------------------------------------


@asynccontextmanager
async def process(*arguments):
    command = [sys.executable, "-m", "extproc.cli", "worker", *arguments]
    child = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_sigterm_lets_streams_end():
    async with process("--port", "0", "--speedup", "5") as child:
        line = await child.stdout.readline()
        url = line.split()[4].decode().rstrip(",")
        body = chat(LONG, stream=True, max_tokens=100)
        async with aiohttp.ClientSession(url) as client, client.post(CHAT, json=body) as response:
            await response.content.readuntil(b'"delta":{"content"')
            child.send_signal(signal.SIGTERM)
            assert (await response.text()).endswith("data: [DONE]\n\n")
        assert await child.wait() == 0


async def test_a_taken_port_is_a_clear_error():
    async with serving() as (worker, _):
        port = worker.address.rpartition(":")[2]
        async with process("--port", port) as child:
            _, errors = await child.communicate()
            assert child.returncode == 1
            assert f"--port {port}" in errors.decode()


def test_free_ports_are_distinct():
    assert len(set(free_ports(20))) == 20
