"""The emulated worker's HTTP face against a real vLLM's: the same questions, the same shape of answers."""

from __future__ import annotations

import json
import re
import sys
import time
from http.client import HTTPConnection

import pytest
import real_vllm

from extproc.demo.process import Process, answers, free_ports

NUM_BLOCKS = 130
MAX_TOKENS = (NUM_BLOCKS - 1) * real_vllm.BLOCK_TOKENS
LONG = [700] * 200_000


@pytest.fixture(scope="module")
def real(lab, tmp_path_factory):
    with real_vllm.serve(lab, free_ports(1), NUM_BLOCKS, tmp_path_factory.mktemp("vllm")) as (server,):
        yield server


@pytest.fixture(scope="module")
def emulated(real, tmp_path_factory):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "extproc.cli", "worker", "--port", str(port)]
    command += ["--model", real_vllm.MODEL_NAME, "--block-size", str(real_vllm.BLOCK_TOKENS)]
    command += ["--kv-cache-tokens", str(real.cache_tokens), "--max-model-len", str(real.cache_tokens)]
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    process = Process("worker", command, log, lambda: answers(f"http://{real_vllm.HOST}:{port}/health"))
    process.start()
    process.wait_ready()
    yield f"{real_vllm.HOST}:{port}"
    process.stop()


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
COMPLETION = {"prompt": [500, 501, 502], "max_tokens": 4, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

ANSWERS = {
    "completion": ("POST", "/v1/completions", COMPLETION),
    "completion of text": ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
    "completions": ("POST", "/v1/completions", COMPLETION | {"prompt": [[500, 501], [600]], "n": 2}),
    "chat": ("POST", "/v1/chat/completions", CHAT | {"ignore_eos": True}),
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "tokenize": ("POST", "/tokenize", {"prompt": "Hello"}),
}

ERRORS = {
    "bad JSON": ("POST", "/v1/completions", b'{"prompt": "x", '),
    "empty body": ("POST", "/v1/completions", b""),
    "no object": ("POST", "/v1/completions", b"[]"),
    "no prompt": ("POST", "/v1/completions", {"max_tokens": 4}),
    "no messages": ("POST", "/v1/chat/completions", {"max_tokens": 4}),
    "unknown model": ("POST", "/v1/completions", COMPLETION | {"model": "nobody"}),
    "unknown model in a chat": ("POST", "/v1/chat/completions", CHAT | {"model": "nobody"}),
    "too long": ("POST", "/v1/completions", COMPLETION | {"prompt": LONG}),
    "too long a text": ("POST", "/v1/completions", COMPLETION | {"prompt": "An apple a day. " * 5000}),
    "no room to generate": ("POST", "/v1/completions", COMPLETION | {"prompt": LONG[:MAX_TOKENS]}),
    "too much to generate": ("POST", "/v1/completions", COMPLETION | {"max_tokens": MAX_TOKENS + 1}),
    "too much to generate in a chat": ("POST", "/v1/chat/completions", CHAT | {"max_tokens": MAX_TOKENS + 1}),
    "no output": ("POST", "/v1/completions", COMPLETION | {"max_tokens": 0}),
    "unknown path": ("GET", "/v1/nothing", None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_have_vllms_shape(real, emulated, name):
    method, path, body = ANSWERS[name]
    expected, got = (real_vllm.ask(at, method, path, body) for at in (real.address, emulated))
    assert got[0] == expected[0] == 200
    assert got[1].get("content-type") == expected[1].get("content-type")
    if expected[2]:
        assert shape(json.loads(got[2])) == shape(json.loads(expected[2]))
    else:
        assert not got[2]


def test_an_answer_ends_where_the_room_does(real, emulated):
    body = COMPLETION | {"prompt": LONG[: MAX_TOKENS - 5], "max_tokens": 100}
    replies = [real_vllm.ask(at, "POST", "/v1/completions", body) for at in (real.address, emulated)]
    expected, got = (json.loads(reply) for _, _, reply in replies)
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 5
    assert got["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_vllms(real, emulated, name):
    method, path, body = ERRORS[name]
    expected, got = (real_vllm.ask(at, method, path, body) for at in (real.address, emulated))
    assert got[0] == expected[0] >= 400
    assert json.loads(got[2]) == json.loads(expected[2])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_have_vllms_events(real, emulated, path):
    body = (COMPLETION if path == "/v1/completions" else CHAT | {"ignore_eos": True}) | STREAM
    expected, got = (real_vllm.ask(at, "POST", path, body) for at in (real.address, emulated))
    assert got[0] == expected[0] == 200
    assert got[1]["content-type"] == expected[1]["content-type"]
    # How many tokens a chunk carries is chance, so equal neighbours count once.
    assert distinct(got[2]) == distinct(expected[2])


def test_headers_of_a_stream_come_long_before_its_first_token(real, emulated, show):
    # As long a prompt as there is; the emulated engine needs a third of a second for it.
    body = {"prompt": list(range(300, 1000)) * 5, "max_tokens": 2, "stream": True}
    for name, address in (("vLLM", real.address), ("emulated", emulated)):
        headers_s, first_s = first_byte(address, body)
        show(f"{name}: headers after {headers_s * 1e3:.0f} ms, first event after {first_s * 1e3:.0f} ms")
        assert headers_s < first_s / 2


def test_metrics_have_vllms_names_types_and_labels(real, emulated):
    pages = [real_vllm.ask(at, "GET", "/metrics") for at in (real.address, emulated)]
    expected, got = (series(page.decode()) for _, _, page in pages)
    assert len(got) > 20
    for name, (kind, labels) in got.items():
        # Labels of the info are the engine's configuration; ours are some of them.
        known, theirs = expected[name]
        assert (name, kind) == (name, known)
        assert labels <= theirs if name == "vllm:cache_config_info" else labels == theirs, name


def shape(value: object) -> object:
    """A JSON value with types in place of what it tells; lists by their first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def distinct(stream: bytes) -> list[object]:
    """The shapes of a stream's events, without repetitions."""
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
    shapes = [shape(json.loads(event)) if event != b"[DONE]" else "[DONE]" for event in events]
    return [event for before, event in zip([None, *shapes], shapes, strict=False) if event != before]


def first_byte(address: str, body: object) -> tuple[float, float]:
    """Seconds until a stream's headers and until its first byte."""
    connection = HTTPConnection(address, timeout=real_vllm.REQUEST_TIMEOUT_S)
    started_s = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    headers_s = time.monotonic() - started_s
    response.read(1)
    first_s = time.monotonic() - started_s
    response.read()
    connection.close()
    return headers_s, first_s


def series(page: str) -> dict[str, tuple[str, set[str]]]:
    """vLLM's metrics: name to type and label names."""
    kinds = dict(re.findall(r"^# TYPE (vllm:\S+) (\S+)$", page, re.MULTILINE))
    found: dict[str, tuple[str, set[str]]] = {}
    for name, labels in re.findall(r"^(vllm:[a-z0-9_]+)\{(.*)\} ", page, re.MULTILINE):
        base = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
        found.setdefault(base, (kinds[base], set()))[1].update(re.findall(r'(\w+)="', labels))
    return found
