"""The emulated worker's reading of requests and its reply shapes, against replies of a real vLLM 0.32."""

from __future__ import annotations

import json

import msgspec
import pytest

from extproc.emulator import tokens
from extproc.emulator.api_replies import Reply, Usage, stream_error
from extproc.emulator.api_requests import ApiError, Limits, parse_call, render_chat

LIMITS = Limits(model_names=("tiny", "adapter"), max_model_len=1000, default_output_tokens=32)
JSON = "application/json"
USER = {"role": "user", "content": "What is due today?"}


def call(kind="chat", content_type=JSON, **fields):
    return parse_call(kind, json.dumps(fields).encode(), content_type, LIMITS)


def error_of(kind, body, content_type=JSON):
    with pytest.raises(ApiError) as caught:
        parse_call(kind, body, content_type, LIMITS)
    return caught.value.status, json.loads(caught.value.body())["error"]


def prompt(raw: str) -> bytes:
    return parse_call("chat", raw.encode(), JSON, LIMITS).prompts[0]


# -- what is the same prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        '{"model": "tiny", "messages": [{"role": "user", "content": "Grüße"}]}',
        '{"messages":[{"content":"Gr\\u00fc\\u00dfe","role":"user"}]  , "model":"tiny"}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Grüße"}]}], "temperature": 1}',
        '{"messages": [{"role": "user", "content": "Grüße", "name": "x"}], "max_tokens": 5, "stream": true}',
    ],
)
def test_spellings_of_one_prompt(raw):
    assert prompt(raw) == prompt('{"messages": [{"role": "user", "content": "Grüße"}]}')


def test_order_of_a_tool_s_own_keys_is_the_engine_s():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": 1, "b": 2}}}
    turned = {
        "function": {"parameters": {"a": 1, "b": 2}, "description": "d", "name": "f"},
        "type": "function",
    }
    other = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"b": 2, "a": 1}},
    }
    rendered = [render_chat({"messages": [USER], "tools": [t]}) for t in (tool, turned, other)]
    assert rendered[0] == rendered[1] != rendered[2]


def test_different_prompts_differ():
    variants = [
        {"messages": [USER]},
        {"messages": [USER | {"role": "system"}]},
        {"messages": [USER, USER]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER], "add_generation_prompt": False},
        {"messages": [USER | {"content": "What is due today?\n"}]},
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    ]
    assert len({render_chat(fields) for fields in variants}) == len(variants)


def test_tools_come_before_messages():
    tool = {"type": "function", "function": {"name": "lookup"}}
    rendered = render_chat({"messages": [USER], "tools": [tool]})
    assert rendered.index(b"lookup") < rendered.index(b"What")


def test_an_answer_sent_back_continues_the_generated_sequence():
    first = call(messages=[USER], max_tokens=50)
    answer = tokens.generate(first.prompts[0], 50)
    following = [USER, {"role": "assistant", "content": answer.decode()}, {"role": "user", "content": "And?"}]
    assert call(messages=following).prompts[0].startswith(first.prompts[0] + answer)


def test_model_and_salt_separate_caches():
    seeds = {
        call(messages=[USER]).seed,
        call(messages=[USER], model="adapter").seed,
        call(messages=[USER], cache_salt="s").seed,
    }
    assert len(seeds) == 3
    assert call(messages=[USER], model="tiny").seed in seeds


def test_completion_prompts():
    assert call("completion", prompt=[1, 2, 3]).prompts == (tokens.from_ids([1, 2, 3]),)
    assert len(call("completion", prompt=["a", "b"]).prompts) == 2
    assert len(call("completion", prompt=[[1], [2, 3]]).prompts) == 2
    text = call("completion", prompt="some text").prompts[0]
    assert call("completion", prompt=tokens.to_ids(text)).prompts[0] == text


# -- lengths ------------------------------------------------------------------------------------------------


def test_output_lengths():
    assert call(messages=[USER], max_tokens=7).output_tokens == 7
    unlimited = call(messages=[USER])
    assert (unlimited.output_tokens, unlimited.finish_reason) == (32, "stop")
    assert call("completion", prompt="x").output_tokens == 16
    assert call("completion", prompt=[7] * 995, max_tokens=100).output_tokens == 5


# -- errors -------------------------------------------------------------------------------------------------


def test_bad_json_like_vllm():
    status, error = error_of("completion", b'{"model": "tiny",x}')
    assert status == 400
    assert error == {
        "message": "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.17', 'msg': "
        "'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': "
        "'Expecting property name enclosed in double quotes'}}",
        "type": "Bad Request",
        "param": "body.17",
        "code": 400,
    }


def test_unknown_model_like_vllm():
    status, error = error_of("chat", b'{"model": "nosuch", "messages": []}')
    assert status == 404
    assert error == {
        "message": "The model `nosuch` does not exist. Valid aliases: tiny, adapter.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_too_long_like_vllm():
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 4000}]}).encode()
    status, error = error_of("chat", body)
    assert status == 400
    assert error == {
        "message": "This model's maximum context length is 1000 tokens. However, your prompt contains at "
        "least 1001 input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        "length of the input prompt. (parameter=input_tokens, value=1001)",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [7] * 1000}, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
        ({"prompt": [7], "max_tokens": 1001}, "max_tokens=1001 cannot be greater than max_model_len=1000."),
        ({"prompt": [7] * 2000}, "your prompt contains 2000 input tokens"),
        ({"prompt": [7] * 1001}, "your prompt contains at least 1001 input tokens"),
        ({"prompt": "x" * 9000}, "your prompt contains at least 1001 input tokens"),
        ({"prompt": []}, "Either prompt or prompt_embeds must be provided"),
    ],
)
def test_lengths_that_vllm_refuses(fields, message):
    status, error = error_of("completion", json.dumps(fields).encode())
    assert status == 400
    assert message in error["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", b""),
        ("chat", b"[]"),
        ("chat", b"{}"),
        ("chat", b"\xff\xfe"),
        ("chat", b"\x1f\x8b\x08\x00"),
        ("chat", b"[" * 100_000),
        ("chat", b'{"messages": "x"}'),
        ("chat", b'{"messages": [1]}'),
        ("chat", b'{"messages": [{"role": "user", "content": 5}]}'),
        ("chat", b'{"messages": [], "max_tokens": 0}'),
        ("chat", b'{"messages": [], "max_tokens": "7"}'),
        ("chat", b'{"messages": [], "max_tokens": 2000}'),
        ("chat", b'{"messages": [], "n": -1}'),
        ("completion", b"{}"),
        ("completion", b'{"prompt": []}'),
        ("completion", b'{"prompt": [1, "a"]}'),
        ("completion", b'{"prompt": [-1]}'),
        ("completion", b'{"prompt": {"a": 1}}'),
    ],
)
def test_invalid_bodies_are_400(kind, body):
    status, error = error_of(kind, body)
    assert status == error["code"] == 400
    assert error["message"]


def test_other_content_types_are_400():
    status, _ = error_of("chat", b'{"messages": []}', "text/plain")
    assert status == 400
    assert parse_call("chat", b'{"messages": []}', "application/json; charset=utf-8", LIMITS)


def test_lone_surrogates_are_text():
    assert prompt('{"messages": [{"role": "user", "content": "\\ud800"}]}')


# -- replies ------------------------------------------------------------------------------------------------

CHAT = (
    '{"id":"chatcmpl-r1","object":"chat.completion","created":0,"model":"tiny","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"the ","refusal":null,"annotations":null,"audio":null,'
    '"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    '"routed_experts":null}],"service_tier":null,"system_fingerprint":"","usage":{"prompt_tokens":308,'
    '"total_tokens":309,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0,'
    '"created_cache_tokens":288,"multimodal_tokens":null},"completion_tokens_details":null},'
    '"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,'
    '"ec_transfer_params":null,"metrics":null}'
)
COMPLETION = (
    '{"id":"cmpl-r1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,'
    '"text":"the ","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    '"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"",'
    '"usage":{"prompt_tokens":308,"total_tokens":309,"completion_tokens":1,"prompt_tokens_details":'
    '{"cached_tokens":0,"created_cache_tokens":288,"multimodal_tokens":null},"completion_tokens_details":null},'
    '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
CHAT_STREAM = [
    '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,'
    '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,'
    '"prompt_text":null}',
    '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,'
    '"delta":{"content":"the "},"logprobs":null,"finish_reason":null,"token_ids":null}]}',
    '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,'
    '"delta":{"content":"the "},"logprobs":null,"finish_reason":"length","stop_reason":null,'
    '"token_ids":null}]}',
    '{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[],"usage":'
    '{"prompt_tokens":308,"total_tokens":309,"completion_tokens":1,"prompt_tokens_details":'
    '{"cached_tokens":0,"created_cache_tokens":288}},"system_fingerprint":""}',
]
COMPLETION_STREAM = [
    '{"id":"cmpl-r1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,'
    '"text":"the ","logprobs":null,"finish_reason":null,"stop_reason":null,'
    '"prompt_token_ids":null,"token_ids":null}]}',
]
USAGE = Usage(prompt_tokens=308, completion_tokens=1, cached_tokens=0, created_tokens=288)


def comparable(payload: bytes | str) -> str:
    """JSON text, order of keys included, without what differs between two replies."""
    fields = json.loads(payload)
    fields["created"] = 0
    if "system_fingerprint" in fields:
        fields["system_fingerprint"] = ""
    return json.dumps(fields)


@pytest.mark.parametrize(("kind", "expected"), [("chat", CHAT), ("completion", COMPLETION)])
def test_whole_replies_like_vllm(kind, expected):
    reply = Reply(call(kind, messages=[USER], prompt="x", max_tokens=1), "r1")
    assert comparable(reply.whole(["the "], USAGE)) == comparable(expected)


def test_chat_chunks_like_vllm():
    reply = Reply(call(messages=[USER], max_tokens=1, stream=True), "r1")
    chunks = [reply.opening(0), reply.chunk(0, b"the ", None), reply.chunk(0, b"the ", "length")]
    chunks.append(reply.usage_chunk(USAGE))
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    assert [comparable(chunk[6:]) for chunk in chunks] == [comparable(text) for text in CHAT_STREAM]


def test_completion_chunks_like_vllm():
    reply = Reply(call("completion", prompt="x", max_tokens=1, stream=True), "r1")
    assert reply.opening(0) == b""
    assert [comparable(reply.chunk(0, b"the ", None)[6:])] == [comparable(text) for text in COMPLETION_STREAM]


def test_ids_survive_any_request_id():
    reply = Reply(call(messages=[USER], stream=True), 'quote " and \\')
    assert msgspec.json.decode(reply.chunk(0, b"the ", None)[6:])["id"] == 'chatcmpl-quote " and \\'


def test_details_only_where_reported():
    reply = Reply(call(messages=[USER], stream=True), None)
    bare = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=None, created_tokens=None)
    assert "prompt_tokens_details" not in json.loads(reply.usage_chunk(bare)[6:])["usage"]
    assert json.loads(reply.whole(["x"], bare))["usage"]["prompt_tokens_details"] is None


def test_a_dead_engine_ends_streams_like_vllm():
    error, done, rest = stream_error("gone").split(b"\n\n")
    assert json.loads(error[6:])["error"]["code"] == 500
    assert done == b"data: [DONE]"
    assert rest == b""
