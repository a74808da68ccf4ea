"""Reading prompts: what is equal, what differs, and what can't be read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from extproc.prompt import Prompt, Unreadable, read_prompt
from extproc.prompt.tools import ToolsReader

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def read(path: str, request: Any, content_format: str = "string") -> Prompt:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    prompt = read_prompt(path, "application/json", "", body, content_format=content_format)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def identity(prompt: Prompt) -> tuple[bytes, bytes, list[int] | None]:
    return prompt.scope, prompt.text, None if prompt.token_ids is None else list(prompt.token_ids)


def same(a: Any, b: Any, path: str = CHAT, content_format: str = "string") -> bool:
    return identity(read(path, a, content_format)) == identity(read(path, b, content_format))


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def assistant_call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}},
        ],
    }


# --- what doesn't reach the prompt ----------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.3, "top_p": 1, "seed": 7, "n": 2},
        {"max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
        {"stop": ["x"], "user": "u", "metadata": {"a": 1}, "priority": 3},
        {"tool_choice": "auto", "response_format": {"type": "json_object"}},
        {"tools": None, "documents": None, "chat_template": None, "chat_template_kwargs": None},
        {"tools": [], "documents": [], "chat_template_kwargs": {}},
        {"cache_salt": None, "truncate_prompt_tokens": None, "reasoning_effort": None},
        {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
        {"temperature": 1e400, "logit_bias": {"1": -100}},
    ],
)
def test_options_that_do_not_render_do_not_count(fields: dict[str, Any]) -> None:
    body = json.dumps(chat(USER, **fields)).replace("Infinity", "1e400").encode()
    assert identity(read(CHAT, body)) == identity(read(CHAT, chat(USER)))


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [WEATHER]},
        {"documents": [{"title": "t", "text": "x"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 100},
        {"truncate_prompt_tokens": 100, "truncation_side": "left"},
    ],
)
def test_fields_that_render_count(fields: dict[str, Any]) -> None:
    assert not same(chat(USER), chat(USER) | fields)


def test_model_and_salt_are_scope_not_text() -> None:
    a, b = read(CHAT, chat(USER)), read(CHAT, chat(USER, cache_salt="s") | {"model": "lora"})
    assert a.text == b.text
    assert a.scope != b.scope
    assert not same(chat(USER, cache_salt="b") | {"model": "a"}, chat(USER) | {"model": "ab"})


# --- messages -------------------------------------------------------------------------------------


def parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_a_string_is_one_text_part(content_format: str) -> None:
    assert same(chat(parts("a")), chat({"role": "user", "content": "a"}), CHAT, content_format)
    assert same(chat({"role": "user", "content": ["a"]}), chat(parts("a")), CHAT, content_format)


def test_text_parts_are_joined_by_newlines_in_string_format_only() -> None:
    joined = {"role": "user", "content": "a\nb"}
    assert same(chat(parts("a", "b")), chat(joined))
    assert not same(chat(parts("a", "b")), chat(joined), CHAT, "openai")
    assert not same(chat(parts("a", "b")), chat(parts("ab")))


def test_tool_messages_are_joined_in_both_formats() -> None:
    tool = {"role": "tool", "tool_call_id": "c"}
    as_parts = tool | {"content": parts("a", "b")["content"]}
    assert same(chat(as_parts), chat(tool | {"content": "a\nb"}), CHAT, "openai")
    reference = {"type": "tool_reference", "name": "f"}
    first, last = ([reference, *as_parts["content"]], [*as_parts["content"], reference])
    assert not same(chat(tool | {"content": first}), chat(tool | {"content": last}), CHAT, "openai")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"role": "system", "content": "x"}, {"role": "developer", "content": "x"}),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "n"}),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x "}),
        ({"role": "user", "content": "é"}, {"role": "user", "content": "e\u0301"}),
        (
            {"role": "tool", "content": "x", "tool_call_id": "1"},
            {"role": "tool", "content": "x", "tool_call_id": "2"},
        ),
        ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x", "reasoning": "r"}),
        (
            {"role": "developer", "content": "x"},
            {"role": "developer", "content": "x", "tools": [WEATHER]},
        ),
        ({"role": "assistant", "content": ""}, assistant_call("{}")),
        (assistant_call('{"a": 1, "b": 2}'), assistant_call('{"b": 2, "a": 1}')),
        (assistant_call('{"a": 1}'), assistant_call('{"a": 1.0}')),
        (assistant_call("[1"), assistant_call("[2")),
    ],
)
def test_messages_that_render_differently_differ(a: Any, b: Any) -> None:
    assert not same(chat(a), chat(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant"}),
        ({"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "reasoning": "r"},
        ),
        # Fields that vLLM takes from other roles only, or not at all.
        ({"role": "user", "content": "x", "tool_call_id": "1"}, {"role": "user", "content": "x"}),
        ({"role": "user", "content": "x", "refusal": None}, {"role": "user", "content": "x"}),
        (assistant_call('{"a": 1,  "b": [2]}'), assistant_call('{"a":1,"b":[2]}')),
        (assistant_call('{"a": "\\u00e9"}'), assistant_call('{"a": "é"}')),
        (assistant_call('{"a": 1}'), assistant_call({"a": 1})),
        (assistant_call(""), assistant_call("{}")),
        (assistant_call(None), assistant_call("{}")),
    ],
)
def test_messages_that_render_alike_are_equal(a: Any, b: Any) -> None:
    assert same(chat(a), chat(b))


def test_messages_are_told_apart_however_their_text_is_cut() -> None:
    user, assistant = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
    others = [
        chat({"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}),
        chat({"role": "user", "content": "abassistantc"}),
        chat({"role": "user", "content": "ab\u00ffMassistant\u00ffXc"}),
        chat({"role": "user", "content": "ab", "name": "assistant"}, {"role": "", "content": "c"}),
    ]
    others += [chat(parts(f"ab{mark}Massistant", "c")) for mark in ("", "\u00ff", "\ufffd")]
    for content_format in ("string", "openai"):
        assert not any(same(chat(user, assistant), other, CHAT, content_format) for other in others)


# --- tools ----------------------------------------------------------------------------------------


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_tool_fields_have_a_fixed_order_and_null_is_absent() -> None:
    a = function(description="d", parameters={"type": "object"}, strict=None)
    b = {"function": {"parameters": {"type": "object"}, "description": "d", "name": "f"}, "type": "function"}
    assert same(chat(USER, tools=[a]), chat(USER, tools=[b]))
    assert same(chat(USER, tools=[a | {"cache_control": {"type": "ephemeral"}}]), chat(USER, tools=[b])), (
        "vLLM drops fields that its model of a tool doesn't have"
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"default": 1}, {"default": 1.0}),
        ({"default": 9007199254740993}, {"default": 9007199254740992}),
        ({"default": 2**64}, {"default": 2**64 + 1}),
        ({"default": 10**400}, {"default": 10**400 + 1}),
        ({"default": 0.1}, {"default": 0.10000000000000002}),
        ({"default": "1"}, {"default": 1}),
        ({"default": None}, {}),
        ({"default": True}, {"default": 1}),
    ],
)
def test_parameters_keep_their_order_and_values(a: Any, b: Any) -> None:
    assert not same(chat(USER, tools=[function(parameters=a)]), chat(USER, tools=[function(parameters=b)]))


def test_spelling_of_parameters_does_not_count() -> None:
    body = '{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":%s}]}'
    a = body % '{"name":"f","parameters":{"x":"\\u0041\\/\\ud83d\\ude00","y":1.50,"z":1e2}}'
    b = body % '{ "name" : "f","parameters":{"x": "A/😀", "y": 1.5 , "z":100.0}}'
    assert same(a.encode(), b.encode())


def test_remembered_tools_are_the_same_and_have_their_limit() -> None:
    calls: list[bytes] = []

    def convert(raw: bytes) -> list[str]:
        calls.append(raw)
        return [raw.decode()]

    reader = ToolsReader(convert, room_bytes=100)
    a, b, big = (msgspec.Raw(text) for text in (b"a" * 10, b"b" * 10, b"c" * 80))
    assert reader(msgspec.Raw()) == b""
    assert reader(a) == reader(a) == b'["aaaaaaaaaa"]'
    assert reader(b) != reader(a)
    assert len(calls) == 2
    assert reader(big) == reader(big)
    assert len(calls) == 4, "too big to be remembered"
    assert reader(a) == b'["aaaaaaaaaa"]'
    assert len(calls) == 5, "the big one pushed it out"


def test_template_arguments_have_no_order_but_their_values_do() -> None:
    a = {"a": 1, "b": {"x": 1, "y": 2}}
    b = {"b": {"x": 1, "y": 2}, "a": 1}
    c = {"a": 1, "b": {"y": 2, "x": 1}}
    assert same(chat(USER, chat_template_kwargs=a), chat(USER, chat_template_kwargs=b))
    assert not same(chat(USER, chat_template_kwargs=a), chat(USER, chat_template_kwargs=c))


# --- media ----------------------------------------------------------------------------------------


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def media_chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return chat({"role": "user", "content": list(content)}, **fields)


TEXT = {"type": "text", "text": "what is this?"}


def test_media_are_told_apart_by_what_they_are() -> None:
    a = media_chat(image("data:image/png;base64,AAAA"), TEXT)
    assert not same(a, media_chat(image("data:image/png;base64,AAAB"), TEXT))
    assert not same(a, media_chat(TEXT))
    assert not same(
        a, media_chat({"type": "video_url", "video_url": {"url": "data:image/png;base64,AAAA"}}, TEXT)
    )
    assert not same(
        a, media_chat(image("data:image/png;base64,AAAA"), TEXT, mm_processor_kwargs={"crops": 4})
    )
    assert same(media_chat(TEXT), media_chat(TEXT, mm_processor_kwargs={"crops": 4}))


def test_a_media_uuid_is_its_identity() -> None:
    assert same(media_chat(image("a", uuid="u"), TEXT), media_chat(image("b", uuid="u"), TEXT))
    assert not same(media_chat(image("a", uuid="u"), TEXT), media_chat(image("a", uuid="v"), TEXT))


def test_order_of_media_and_text_counts_where_the_template_sees_it() -> None:
    a, b = media_chat(image("i"), TEXT), media_chat(TEXT, image("i"))
    assert same(a, b)  # placeholders go first
    assert not same(a, b, CHAT, "openai")


def test_media_data_do_not_blow_up_the_text() -> None:
    assert len(read(CHAT, media_chat(image("data:;base64," + "A" * 1_000_000))).text) < 100


# --- head and opening -----------------------------------------------------------------------------


def test_head_is_tools_and_leading_system_messages() -> None:
    system = {"role": "system", "content": "S" * 100}
    developer = {"role": "developer", "content": "D" * 100}
    prompt = read(CHAT, chat(system, developer, USER, system, tools=[WEATHER]))
    head = prompt.text[: prompt.head_bytes]
    assert b"weather" in head
    assert head.endswith(b"D" * 100)
    assert prompt.text[: prompt.opening_bytes].endswith(b"hi")
    assert head == read(CHAT, chat(system, developer, tools=[WEATHER])).text


def test_without_system_messages_the_head_is_the_tools() -> None:
    prompt = read(CHAT, chat(USER))
    assert prompt.head_bytes == 0
    assert prompt.opening_bytes == len(prompt.text)
    assert read(CHAT, chat(USER, tools=[WEATHER])).text[: -len(prompt.text)].endswith(b"}]")


# --- completions ----------------------------------------------------------------------------------


def test_completion_prompts() -> None:
    text = read(COMPLETIONS, {"prompt": "héllo"})
    assert text.text == "héllo".encode()
    assert text.token_ids is None
    assert same({"prompt": "a"}, {"prompt": ["a"]}, COMPLETIONS)
    assert same({"prompt": "a"}, {"prompt": ["a", "b"]}, COMPLETIONS)
    ids = read(COMPLETIONS, {"prompt": [1, 2, 4294967295]})
    assert list(ids.token_ids or ()) == [1, 2, 4294967295]
    assert ids.text == b""
    assert same({"prompt": [1, 2]}, {"prompt": [[1, 2], [3]]}, COMPLETIONS)
    assert not same({"prompt": [1, 2]}, {"prompt": [12]}, COMPLETIONS)
    assert read(COMPLETIONS, {"prompt": [1]}).scope != read(COMPLETIONS, {"prompt": "1"}).scope


def test_completion_options() -> None:
    assert same({"prompt": "a"}, {"prompt": "a", "add_special_tokens": True, "echo": True}, COMPLETIONS)
    assert not same({"prompt": "a"}, {"prompt": "a", "add_special_tokens": False}, COMPLETIONS)
    assert not same({"prompt": [1]}, {"prompt": [1], "truncate_prompt_tokens": 5}, COMPLETIONS)


# --- the other APIs are chats ---------------------------------------------------------------------


def test_anthropic_messages_are_read_as_the_chat_that_vllm_makes_of_them() -> None:
    request = {
        "model": "m",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abcde"},
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        "tools": [
            {
                "input_schema": {"properties": {"place": {"type": "string"}}},
                "name": "weather",
                "description": "Weather at a place",
            }
        ],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "sun"}],
                    },
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
    }
    parameters = {"properties": {"place": {"type": "string"}}, "type": "object"}
    expected = chat(
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning": "hm",
            "tool_calls": [{"id": "t1", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "user", "content": "thanks"},
        tools=[function(description="Weather at a place", parameters=parameters) | {}],
    )
    expected["tools"][0]["function"]["name"] = "weather"
    for content_format in ("string", "openai"):
        ours = read(MESSAGES, request, content_format)
        assert identity(ours) == identity(read(CHAT, expected, content_format))
    assert ours.max_tokens == 9


def test_anthropic_images_and_results_with_images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    request = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, result]}]}
    url = {"role": "user", "content": [image("data:image/png;base64,AAAA")]}
    expected = {"messages": [{"role": "tool", "tool_call_id": "t", "content": ""}, url, url]}
    assert identity(read(MESSAGES, request)) == identity(read(CHAT, expected))


def test_system_messages_of_anthropic_go_to_the_front() -> None:
    request = {"messages": [USER, {"role": "system", "content": "B"}], "system": "A"}
    assert identity(read(MESSAGES, request)) == identity(
        read(CHAT, {"messages": [{"role": "system", "content": "AB"}, USER]})
    )


def test_responses_are_read_as_the_chat_that_vllm_makes_of_them() -> None:
    request = {
        "model": "m",
        "instructions": "Be brief.",
        "tools": [{"type": "function", **WEATHER["function"]}],
        "reasoning": {"effort": "low"},
        "max_output_tokens": 7,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "let me see"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ],
    }
    expected = chat(
        {"role": "system", "content": "Be brief."},
        USER,
        assistant_call("{}") | {"content": "let me see", "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        tools=[WEATHER],
        reasoning_effort="low",
    )
    assert identity(read(RESPONSES, request)) == identity(read(CHAT, expected))
    assert read(RESPONSES, request).max_tokens == 7
    assert identity(read(RESPONSES, {"input": "hi"})) == identity(read(CHAT, {"messages": [USER]}))


def test_responses_continue_others_and_partial_messages() -> None:
    partial = {"type": "message", "role": "assistant", "content": "so", "status": "incomplete"}
    assert not same({"input": "hi"}, {"input": "hi", "previous_response_id": "r1"}, RESPONSES)
    assert identity(read(RESPONSES, {"input": [USER, partial]})) == identity(
        read(
            CHAT, {"messages": [USER, {"role": "assistant", "content": "so"}], "continue_final_message": True}
        )
    )
    assert not same({"input": "hi"}, {"input": "hi", "tools": [{"type": "web_search"}]}, RESPONSES)


# --- what goes along ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 10**30}, 2**31 - 1),
    ],
)
def test_max_tokens(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert read(CHAT, chat(USER, **fields)).max_tokens == max_tokens


def test_stream() -> None:
    assert read(CHAT, chat(USER, stream=True)).stream
    assert not read(CHAT, chat(USER)).stream
    assert not read(COMPLETIONS, {"prompt": "a", "stream": None}).stream


# --- paths and headers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [CHAT, "/serving/v1/chat/completions", CHAT + "?api-version=1", "/chat/completions"]
)
def test_paths_may_have_prefix_and_query(path: str) -> None:
    assert identity(read(path, chat(USER))) == identity(read(CHAT, chat(USER)))


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "Application/JSON; charset=utf-8", " application/json ;x"]
)
@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_content_types_and_encodings_that_are_read(content_type: str, encoding: str) -> None:
    assert isinstance(read_prompt(CHAT, content_type, encoding, json.dumps(chat(USER)).encode()), Prompt)


def test_a_byte_order_mark_is_skipped() -> None:
    assert same(b"\xef\xbb\xbf" + json.dumps(chat(USER)).encode(), chat(USER))


GOOD = json.dumps(chat(USER)).encode()


@pytest.mark.parametrize(
    ("path", "content_type", "encoding", "body", "reason"),
    [
        ("/v1/embeddings", "application/json", "", GOOD, Unreadable.UNKNOWN_PATH),
        ("/v1/chat/completions/render", "", "", GOOD, Unreadable.UNKNOWN_PATH),
        ("/health?x=/v1/chat/completions", "", "", GOOD, Unreadable.UNKNOWN_PATH),
        ("", "", "", GOOD, Unreadable.UNKNOWN_PATH),
        (CHAT, "application/json", "gzip", GOOD, Unreadable.ENCODED),
        (CHAT, "application/json", "identity, br", GOOD, Unreadable.ENCODED),
        (CHAT, "text/plain", "", GOOD, Unreadable.CONTENT_TYPE),
        (CHAT, "multipart/form-data; boundary=application/json", "", GOOD, Unreadable.CONTENT_TYPE),
        (CHAT, "", "", b"", Unreadable.EMPTY_BODY),
        (CHAT, "", "", b"\xef\xbb\xbf", Unreadable.EMPTY_BODY),
        (CHAT, "", "", GOOD[:-1], Unreadable.BAD_JSON),
        (CHAT, "", "", GOOD + b"x", Unreadable.BAD_JSON),
        (CHAT, "", "", b'{"messages": NaN}', Unreadable.BAD_JSON),
        (CHAT, "", "", GOOD.replace(b"hi", b"\xff"), Unreadable.BAD_JSON),
        (CHAT, "", "", GOOD.replace(b"hi", b"\xed\xa0\x80"), Unreadable.BAD_JSON),
        (CHAT, "", "", GOOD.replace(b"hi", b"\\ud800"), Unreadable.BAD_JSON),
        (CHAT, "", "", GOOD.replace(b"hi", b"\\ud800\\u0041"), Unreadable.BAD_JSON),
        (CHAT, "", "", GOOD.decode().encode("utf-16"), Unreadable.BAD_JSON),
        (CHAT, "", "", b"{}", Unreadable.NO_PROMPT),
        (CHAT, "", "", b"[]", Unreadable.NO_PROMPT),
        (CHAT, "", "", b"null", Unreadable.NO_PROMPT),
        (CHAT, "", "", b'{"messages": []}', Unreadable.NO_PROMPT),
        (CHAT, "", "", b'{"messages": "hi"}', Unreadable.NO_PROMPT),
        (CHAT, "", "", b'{"messages": [{"content": "no role"}]}', Unreadable.NO_PROMPT),
        (CHAT, "", "", b'{"messages": [{"role": "user", "content": 5}]}', Unreadable.NO_PROMPT),
        (
            RESPONSES,
            "",
            "",
            b'{"input": [{"type": "function_call_output", "output": [[1]]}]}',
            Unreadable.NO_PROMPT,
        ),
        (COMPLETIONS, "", "", b"{}", Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": ""}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": []}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": [[]]}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": [1, "a"]}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": [-1]}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": [4294967296]}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt": {"a": 1}}', Unreadable.NO_PROMPT),
        (COMPLETIONS, "", "", b'{"prompt_embeds": "AAAA"}', Unreadable.NO_PROMPT),
        (MESSAGES, "", "", b'{"messages": []}', Unreadable.NO_PROMPT),
        (RESPONSES, "", "", b'{"input": []}', Unreadable.NO_PROMPT),
        (RESPONSES, "", "", b'{"input": [{"type": "item_reference"}]}', Unreadable.NO_PROMPT),
    ],
)
def test_what_can_not_be_read(
    path: str, content_type: str, encoding: str, body: bytes, reason: Unreadable
) -> None:
    assert read_prompt(path, content_type, encoding, body) is reason
