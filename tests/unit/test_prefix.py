"""Chained hashes and keys: same prompt ⇔ same hashes, over random spellings and random conversations."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reencode import Unordered, encode

from extproc.prefix import PrefixChain, chain
from extproc.prompt import Prompt, read_prompt

CHAT = "/v1/chat/completions"

# Few and treacherous characters: near collisions are what a framing has to survive.
TEXTS = st.text(st.sampled_from('aM\u00ffX"\\\n /é😀\x00'), max_size=6)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
SCHEMAS = st.dictionaries(TEXTS, st.integers(0, 2) | st.sampled_from([1.0, None, 2**60, "a"]), max_size=3)


CONTENT_FORMATS = st.sampled_from(["string", "openai"])


def text_part(text: str) -> Unordered:
    return Unordered(type="text", text=text)


PARTS = TEXTS.map(text_part) | st.sampled_from("ab").map(
    lambda url: Unordered(type="image_url", image_url=Unordered(url=url))
)


@st.composite
def messages(draw: st.DrawFn) -> Unordered:
    role = draw(ROLES)
    message = Unordered(role=role, content=draw(st.none() | TEXTS | st.lists(PARTS, max_size=3)))
    if draw(st.booleans()):
        message["name"] = draw(TEXTS)
    if role == "tool":
        message["tool_call_id"] = draw(TEXTS)
    if role == "assistant" and draw(st.booleans()):
        message["tool_calls"] = [
            Unordered(
                id=draw(TEXTS),
                type="function",
                function=Unordered(name=draw(TEXTS), arguments=json.dumps(draw(SCHEMAS))),
            )
            for _ in range(draw(st.integers(1, 2)))
        ]
    return message


@st.composite
def tools(draw: st.DrawFn) -> Unordered:
    function = Unordered(name=draw(TEXTS), parameters=draw(SCHEMAS))
    if draw(st.booleans()):
        function["description"] = draw(TEXTS)
    return Unordered(type="function", function=function)


CHATS = st.builds(
    lambda model, messages, tools: Unordered(model=model, messages=messages, tools=tools),
    st.sampled_from(["m", "lora"]),
    st.lists(messages(), min_size=1, max_size=4),
    st.lists(tools(), max_size=2),
)


def read(request: Any, path: str = CHAT, content_format: str = "string") -> Prompt:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    prompt = read_prompt(path, "application/json", "", body, content_format=content_format)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def fine(prompt: Prompt) -> PrefixChain:
    """A chain of one-byte blocks: equal chains mean equal texts."""
    return chain(prompt, block_tokens=1, chars_per_token=1.0, prefix_tokens=1_000_000)


def identity(request: Any, content_format: str) -> tuple[bytes, tuple[int, ...]]:
    prompt = read(request, CHAT, content_format)
    return prompt.scope, fine(prompt).hashes


def spell(request: Unordered, rng: random.Random) -> bytes:
    """Write the request in another way that the engine renders to the same prompt."""
    request = Unordered(request)
    respelled = []
    for message in request["messages"]:
        message = Unordered(message)
        if isinstance(message["content"], str) and rng.random() < 0.5:
            message["content"] = [text_part(message["content"])]
        elif message["content"] is None and rng.random() < 0.5:
            del message["content"]
        if rng.random() < 0.3:
            message["annotations"] = None
        respelled.append(message)
    request["messages"] = respelled
    if rng.random() < 0.5:
        request |= {"temperature": rng.random(), "max_tokens": rng.randint(1, 99), "user": "u"}
    if not request["tools"] and rng.random() < 0.5:
        del request["tools"]
    return encode(request, rng)


def rendered(request: Unordered, content_format: str) -> str:
    """What the engine's template gets to see, found in another way than by `extproc.prompt`."""
    seen = []
    for message in request["messages"]:
        content = [] if message["content"] is None else message["content"]
        if isinstance(content, str):
            content = [text_part(content)]
        texts = [part["text"] for part in content if part["type"] == "text"]
        media = [part["image_url"]["url"] for part in content if part["type"] != "text"]
        if content_format == "string":
            content = [media, "\n".join(texts)]
        elif message["role"] == "tool" and not media:
            content = "\n".join(texts)
        seen.append({**message, "content": content})
    return json.dumps([request["model"], request["tools"], seen], sort_keys=False)


@given(CHATS, CONTENT_FORMATS, st.randoms(use_true_random=False), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_same_prompt_same_hashes(
    request: Unordered, content_format: str, a: random.Random, b: random.Random
) -> None:
    assert identity(spell(request, a), content_format) == identity(spell(request, b), content_format)


def check_both_ways(a: Unordered, b: Unordered, content_format: str) -> None:
    alike = rendered(a, content_format) == rendered(b, content_format)
    assert (identity(a, content_format) == identity(b, content_format)) == alike


@given(CHATS, CHATS, CONTENT_FORMATS)
@settings(max_examples=200)
def test_other_prompt_other_hashes(a: Unordered, b: Unordered, content_format: str) -> None:
    check_both_ways(a, b, content_format)


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[Unordered, Unordered]:
    """A chat and the same with one thing changed."""
    a = draw(CHATS)
    b = Unordered(a, messages=[Unordered(message) for message in a["messages"]])
    index = draw(st.integers(0, len(b["messages"]) - 1))
    message = b["messages"][index]
    change = draw(st.sampled_from(["content", "role", "name", "split", "merge", "call", "model", "tool"]))
    if change == "content":
        message["content"] = draw(st.lists(PARTS, max_size=3) | TEXTS)
    elif change == "role":
        message["role"] = message["role"] + "x"
    elif change == "name":
        message["name"] = message.get("name", "") + "a"
    elif change == "split":
        b["messages"].insert(index, Unordered(role=message["role"], content=""))
    elif change == "merge":  # put the next message's framing into this one's text
        if index + 1 < len(b["messages"]) and isinstance(message["content"], str):
            other = b["messages"].pop(index + 1)
            mark = draw(st.sampled_from(["", "\u00ff"]))
            message["content"] += f"{mark}M{other['role']}{mark}X{other['content']}"
    elif change == "call":
        if calls := message.get("tool_calls"):
            call = Unordered(calls[0])
            if draw(st.booleans()):
                call["id"] += "a"
            else:
                call["function"] = Unordered(call["function"], arguments=json.dumps(draw(SCHEMAS)))
            message["tool_calls"] = [call, *calls[1:]]
    elif change == "model":
        b["model"] += "x"
    else:
        b["tools"] = [*a["tools"], Unordered(type="function", function=Unordered(name="new"))]
    return a, b


@given(near_misses(), CONTENT_FORMATS)
@settings(max_examples=300)
def test_near_misses_differ(pair: tuple[Unordered, Unordered], content_format: str) -> None:
    a, b = pair
    if "x" not in b["messages"][0]["role"]:  # an unknown role drops what belongs to the known one
        check_both_ways(a, b, content_format)
    if a["model"] != b["model"]:
        assert not set(identity(a, content_format)[1]) & set(identity(b, content_format)[1])


@given(CHATS, st.lists(messages(), max_size=3), TEXTS, st.integers(1, 9), CONTENT_FORMATS)
def test_a_growing_conversation_keeps_its_hashes(
    request: Unordered, more: list[Unordered], suffix: str, block_tokens: int, content_format: str
) -> None:
    last = Unordered(role="user", content="x")
    short = Unordered(request, messages=[*request["messages"], last])
    long = Unordered(request, messages=[*request["messages"], Unordered(last, content="x" + suffix), *more])
    options: dict[str, Any] = {"block_tokens": block_tokens, "chars_per_token": 2.5, "prefix_tokens": 40}
    before, after = (chain(read(r, CHAT, content_format), **options) for r in (short, long))
    assert after.hashes[: len(before.hashes)] == before.hashes
    assert len(before.hashes) == len(read(short, CHAT, content_format).text) // int(block_tokens * 2.5)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 8), st.randoms())
def test_token_ids(ids: list[int], block_tokens: int, rng: random.Random) -> None:
    options: dict[str, Any] = {"block_tokens": block_tokens, "chars_per_token": 4.0, "prefix_tokens": 16}
    body = encode(Unordered(prompt=ids), rng)
    result = chain(read(body, "/v1/completions"), **options)
    assert result.tokens == len(ids)
    assert len(result.hashes) == len(ids) // block_tokens
    changed = [*ids]
    changed[-1] ^= 1
    other = chain(read({"prompt": changed}, "/v1/completions"), **options)
    whole = (len(ids) - 1) // block_tokens
    assert result.hashes[:whole] == other.hashes[:whole]
    assert not set(result.hashes[whole:]) & set(other.hashes)


# --- the key ------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"block_tokens": 16, "chars_per_token": 4.0, "prefix_tokens": 256}
BLOCK_BYTES = 64


def key(*messages: tuple[str, str]) -> int:
    prompt = read({"messages": [{"role": role, "content": content} for role, content in messages]})
    return chain(prompt, **OPTIONS).key


@given(st.integers(BLOCK_BYTES, 3_000), st.text(max_size=300), st.text(max_size=300))
def test_what_the_user_says_does_not_move_a_prompt_with_a_system_prompt(size: int, a: str, b: str) -> None:
    system = ("system", "s" * size)
    assert key(system, ("user", a)) == key(system, ("user", b))
    assert key(system, ("user", a)) == key(system, ("user", a), ("assistant", b), ("user", a))


@given(st.integers(BLOCK_BYTES, 900))
def test_the_key_covers_the_system_prompt_to_its_end(size: int) -> None:
    keys = {key(("system", "s" * size + last), ("user", "x")) for last in ("", "a", "b")}
    assert len(keys) == 3


def test_the_key_ends_at_prefix_tokens() -> None:
    long = "s" * (256 * 4)
    assert key(("system", long + "a"), ("user", "x")) == key(("system", long + "b"), ("user", "x"))


@given(st.text(max_size=20), st.text(max_size=2_000), st.lists(st.text(max_size=100), max_size=4))
def test_a_conversation_without_much_of_a_system_prompt_stays_in_its_place(
    system: str, opening: str, turns: list[str]
) -> None:
    head = [("system", system[:8]), ("user", opening)]
    assert key(*head) == key(*head, *(("assistant", turn) for turn in turns))


def test_short_conversations_are_told_apart() -> None:
    assert len({key(("system", "be brief"), ("user", text)) for text in ("a", "b", "ab", "")}) == 4


@given(st.integers(0, 180), st.integers(0, 180))
def test_questions_about_one_document_share_its_key(a_size: int, b_size: int) -> None:
    a, b = "a" * a_size, "b" * b_size
    document = "d" * (5 * BLOCK_BYTES)  # whatever is asked, four blocks are the key
    assert key(("user", document + a)) == key(("user", document + b))
    assert key(("user", document + a)) != key(("user", "e" + document[1:] + b))


def test_other_scopes_have_other_keys() -> None:
    requests = [{}, {"model": "a"}, {"model": "b"}, {"model": "a", "cache_salt": "s"}]
    chains = [chain(read({"prompt": "x" * 500} | r, "/v1/completions"), **OPTIONS) for r in requests]
    assert len({c.key for c in chains}) == 4
    assert len({c.hashes[0] for c in chains}) == 4


@pytest.mark.parametrize(("size", "tokens"), [(1, 1), (400, 100), (401, 100), (403, 101)])
def test_tokens_are_estimated(size: int, tokens: int) -> None:
    assert chain(read({"prompt": "x" * size}, "/v1/completions"), **OPTIONS).tokens == tokens


# --- replicas of different versions must agree --------------------------------------------------


def test_golden_values() -> None:
    """If this fails, routers of two versions side by side split every cache: say so in the changelog."""
    system = "You are an agent. " * 20
    request = {
        "model": "m",
        "cache_salt": "salt",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [1.5]}}}],
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://i"}}, "é"]},
            {
                "role": "assistant",
                "reasoning": "r",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        "continue_final_message": True,
        "truncate_prompt_tokens": 9,
    }
    prompt = read(request)
    assert prompt.scope == b"chat\xffm\xffsalt\xff[9,null,null]"
    assert prompt.text == (
        b'\xffT[{"function":{"name":"f","parameters":{"b":1,"a":[1.5]}}}]'
        b"\xffMsystem\xffX" + system.encode() + b"\xffMuser\xffP77954e107e6c288e3c400a4b3a6a954e\xffX\xc3\xa9"
        b'\xffMassistant\xffRr\xffFf\xffA{"x":1}\xffIc'
        b"\xffMtool\xffIc\xffXdone\xffZ"
    )
    result = chain(prompt, block_tokens=32, chars_per_token=4.0, prefix_tokens=64)
    assert result == PrefixChain(
        hashes=(0x329932A3B0C8CBBD, 0x98D9D1763AE4878C, 0x769648AB08055D51, 0x41289CBFE4D871BD),
        block_tokens=32,
        tokens=130,
        key=0x98D9D1763AE4878C,
    )
    ids = Prompt(b"ids\xffm\xff", b"", array("I", range(10)), 0, 0, None, False)
    assert chain(ids, block_tokens=4, chars_per_token=4.0, prefix_tokens=8) == PrefixChain(
        hashes=(0x57A7E18F05A54B33, 0xA7CEE05B632C6FB4), block_tokens=4, tokens=10, key=0xA7CEE05B632C6FB4
    )
