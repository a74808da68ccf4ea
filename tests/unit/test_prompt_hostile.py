"""Bodies that nobody sends in good faith: reading never raises, whatever comes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix import chain
from extproc.prompt import Prompt, Unreadable, read_prompt

CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"]
BODY_BYTES = 16 * 1024 * 1024

SEEDS = [
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "é"}, {"type": "image_url", "image_url": "u"}],
            },
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1e5}}}],
        "chat_template_kwargs": {"b": [1, None, True]},
        "max_tokens": 5,
    },
    {"model": "m", "prompt": ["a", [1, 2]], "cache_salt": "s"},
    {
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": [{"type": "tool_result"}]}],
    },
    {
        "input": [{"type": "reasoning", "summary": [{"text": "x"}]}, {"role": "user", "content": "x"}],
        "tools": [],
    },
]

_KEYS = """
    messages prompt input system tools model cache_salt role content type text image_url url uuid name
    function parameters arguments tool_calls tool_call_id reasoning id summary output call_id source data
    input_schema chat_template_kwargs documents instructions output_config effort max_tokens stream thinking
"""
_TYPES = "text image_url input_text tool_use tool_result message function_call reasoning image"
KEYS = st.sampled_from(_KEYS.split())
TYPES = st.sampled_from(_TYPES.split())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | TYPES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


def check(result: Prompt | Unreadable) -> None:
    if isinstance(result, Prompt):
        assert 0 <= result.head_bytes <= result.opening_bytes <= len(result.text) or result.token_ids
        chain(result, block_tokens=16, chars_per_token=4.0, prefix_tokens=64)
    else:
        assert isinstance(result, Unreadable)


@given(st.sampled_from(PATHS), st.binary(max_size=200))
def test_random_bytes(path: str, body: bytes) -> None:
    check(read_prompt(path, "application/json", "", body))


@given(st.text(), st.text(), st.text(), st.binary(max_size=20))
def test_random_headers(path: str, content_type: str, encoding: str, body: bytes) -> None:
    check(read_prompt(path, content_type, encoding, body))


@given(st.sampled_from(PATHS), st.dictionaries(KEYS, JSON, max_size=8), st.sampled_from(["string", "openai"]))
def test_random_json_in_every_field(path: str, request: dict[str, Any], content_format: str) -> None:
    check(read_prompt(path, "", "", json.dumps(request).encode(), content_format=content_format))


@given(st.sampled_from(PATHS), JSON, st.sampled_from(["string", "openai"]))
def test_random_messages(path: str, value: Any, content_format: str) -> None:
    message = {"role": "assistant", "type": "message", "content": [value, {"type": "text", "text": "x"}]}
    request = {
        "messages": [message],
        "input": [message],
        "prompt": [value],
        "tools": [value],
        "system": value,
    }
    check(read_prompt(path, "", "", json.dumps(request).encode(), content_format=content_format))


@given(st.sampled_from(PATHS), st.sampled_from(SEEDS), st.randoms(use_true_random=False))
def test_mutated_requests(path: str, seed: Any, rng: random.Random) -> None:
    body = bytearray(json.dumps(seed).encode())
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(body))
        kind = rng.randrange(4)
        if kind == 0:
            body[at] = rng.randrange(256)
        elif kind == 1:
            del body[at : at + rng.randint(1, 20)]
        elif kind == 2:
            body[at:at] = rng.choice(
                [b"null", b"[", b"{", b'"', b"\\ud800", b"1e999", b"-0", b"\xff", b"9" * 5000]
            )
        else:
            body[at:at] = body[rng.randrange(len(body)) :][:30]
        if not body:
            return
    check(read_prompt(path, "application/json", "", bytes(body)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"messages":[', b'[{"":'])
@pytest.mark.parametrize("field", [b"", b'{"x":', b'{"tools":', b'{"messages":[{"role":"user","content":['])
def test_depth(path: str, field: bytes, opening: bytes) -> None:
    for depth in (100, 990, 5_000, BODY_BYTES // len(opening) // 8):
        check(read_prompt(path, "", "", field + opening * depth))


def test_depth_is_a_reason() -> None:
    body = (
        b'{"messages":[{"role":"user"}],"tools":[{"function":{"name":"f","parameters":{"a":'
        + b"[" * 5_000
        + b"]" * 5_000
        + b"}}}]}"
    )
    assert read_prompt(CHAT, "", "", body) is Unreadable.TOO_DEEP


@pytest.mark.parametrize("digits", [20, 4_300, 4_301, 1_000_000])
def test_huge_numbers(digits: int) -> None:
    number = b"9" * digits
    for template in (
        b'{"max_tokens":%s,"messages":[{"role":"user","content":"x"}]}',
        b'{"seed":%s,"messages":[{"role":"user","content":"x"}]}',
        b'{"tools":[{"function":{"name":"f","parameters":{"a":%s}}}],"messages":[{"role":"user","content":"x"}]}',
        b'{"seed":1e%s,"messages":[{"role":"user","content":"x"}]}',
    ):
        check(read_prompt(CHAT, "", "", template % number))
    check(read_prompt("/v1/completions", "", "", b'{"prompt":[%s]}' % number))


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        (b"[],", Unreadable.TOO_COMPLEX),
        (b'{"role":""},', Unreadable.TOO_COMPLEX),
        (b'{"type":"image_url","image_url":""},', Unreadable.TOO_COMPLEX),
        (b'"",', Unreadable.TOO_COMPLEX),
        (b"0,", Unreadable.NO_PROMPT),
        (b"\x00", Unreadable.BAD_JSON),
        (b"\xff", Unreadable.BAD_JSON),
    ],
)
def test_sixteen_mebibytes_of_junk_are_refused(unit: bytes, reason: Unreadable) -> None:
    body = b'{"messages":[{"role":"user","content":[' + unit * (BODY_BYTES // len(unit)) + b'""]}]}'
    assert read_prompt(CHAT, "", "", body) is reason


def test_sixteen_mebibytes_of_prompt_are_read() -> None:
    text = "Das Wörterbuch: \n\t" * (BODY_BYTES // 22)
    body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    prompt = read_prompt(CHAT, "", "", body)
    assert isinstance(prompt, Prompt)
    assert prompt.text.endswith(text.encode())
    ids = read_prompt("/v1/completions", "", "", json.dumps({"prompt": [100_000] * 2_000_000}).encode())
    assert isinstance(ids, Prompt)
    assert chain(ids, block_tokens=256, chars_per_token=4.0, prefix_tokens=4096).tokens == 2_000_000
