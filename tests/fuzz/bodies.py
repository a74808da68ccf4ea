"""Request bodies as clients send them, and as nobody should."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")

_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}

VALID: tuple[dict[str, Any], ...] = (
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are terse. " * 60},
            {"role": "user", "content": "What is a prefix?"},
        ],
        "max_tokens": 9,
        "stream": True,
    },
    {
        "model": "m",
        "tools": [_TOOL],
        "chat_template_kwargs": {"thinking": False},
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Look. " * 80}, {"type": "text", "text": "é"}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "seen"},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
            },
        ],
        "continue_final_message": True,
    },
    {"model": "m", "prompt": "Once upon a time " * 100, "max_tokens": 5},
    {"model": "m", "prompt": list(range(700)), "cache_salt": "s"},
    {"model": "m", "prompt": [list(range(20))], "truncate_prompt_tokens": 10},
    {
        "model": "m",
        "system": [{"type": "text", "text": "Be kind. " * 50, "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "look", "description": "", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Hello " * 50},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
        ],
        "max_tokens": 7,
    },
    {
        "model": "m",
        "instructions": "Be brief. " * 40,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello " * 40}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    },
    {"model": "m", "input": "Hello " * 200, "reasoning": {"effort": "low"}},
)

#: The path of each.
_PATH_OF = (PATHS[0], PATHS[0], PATHS[1], PATHS[1], PATHS[1], PATHS[2], PATHS[3], PATHS[3])

_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**63,
    2**31,
    1e300,
    0.5,
    "",
    "text",
    "\x00\ufffe\U0010ffff",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    [{"type": "text"}],
    [{"role": "user"}],
    [[1, 2], "x"],
)

_ODD_BYTES = (
    b"null",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\ud800",
    b"\\udc00\\ud800",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"1e999",
    b"-0",
    b"NaN",
    b"123456789012345678901234567890",
    b"\x00",
    b" " * 300,
    b"[" * 300,
    b'{"a":' * 300,
)


def draw(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: valid, valid JSON of a wrong shape, broken JSON, or noise."""
    number = rng.randrange(len(VALID))
    path = _PATH_OF[number] if rng.random() < 0.9 else rng.choice((*PATHS, "", "/v1/models", "/%00"))
    kind = rng.random()
    if kind < 0.02:
        return path, rng.randbytes(rng.randint(0, 200))
    body = VALID[number]
    if kind < 0.6:
        body = copy.deepcopy(body)
        for _ in range(rng.randint(1, 3)):
            _change(rng, body)
    data = msgspec.json.encode(body)
    return path, data if kind < 0.5 or kind > 0.8 else _damage(rng, data)


def _change(rng: random.Random, tree: Any) -> None:
    """Replace, remove, repeat or add one value somewhere in the tree."""
    while True:
        if isinstance(tree, dict) and tree:
            key = rng.choice(list(tree))
        elif isinstance(tree, list) and tree:
            key = rng.randrange(len(tree))
        else:
            return
        if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.6:
            tree = tree[key]
            continue
        break
    what = rng.random()
    if what < 0.5:
        tree[key] = copy.deepcopy(rng.choice(_ODD_VALUES))
    elif what < 0.7:
        del tree[key]
    elif isinstance(tree, list):
        tree.insert(key, copy.deepcopy(tree[key]))
    else:
        tree[rng.choice(("messages", "prompt", "input", "tools", "content", "role", "system", "x"))] = (
            copy.deepcopy(rng.choice(_ODD_VALUES))
        )


def _damage(rng: random.Random, data: bytes) -> bytes:
    """Cut, double, flip or plant bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.randint(0, 40))
        match rng.randrange(5):
            case 0:
                del out[at:end]
            case 1:
                out[at:at] = out[at:end]
            case 2:
                out[at:at] = rng.choice(_ODD_BYTES)
            case 3:
                out[at:end] = rng.randbytes(end - at)
            case _:
                del out[at:]
    return bytes(out)
