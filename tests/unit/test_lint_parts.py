"""The parts of `extproc lint`: logs, chunks, alignments, kinds, memory."""

from __future__ import annotations

import gzip
import json
from array import array
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lint_traffic import CLEAN, FAULTS, make_apps, make_log

from extproc.lint.alignment import align
from extproc.lint.costs import rate_of
from extproc.lint.differences import Sort, compare
from extproc.lint.kinds import ADVICE, Kind, value_kinds
from extproc.lint.linter import Linter, Options, Totals
from extproc.lint.log import BadLine, Entry, LogError, read_logs
from extproc.lint.memory import Memory, Remembered
from extproc.lint.report import as_json, show
from extproc.lint.text import cut, data_of, normal_form, place_of
from extproc.prompt import Prompt, read_prompt
from extproc.routing.demand import digest

CHAT = "/v1/chat/completions"
SCOPE = (b"chat", b"", b"")


def prompt_of(body: dict[str, Any], path: str = CHAT) -> Prompt:
    prompt = read_prompt(path, "", "", json.dumps(body).encode())
    assert isinstance(prompt, Prompt)
    return prompt


def chat(*contents: str, **more: Any) -> Prompt:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": c} for role, c in zip(roles, contents, strict=False)]
    return prompt_of({"messages": messages} | more)


# --- logs --------------------------------------------------------------------------------------------

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("line", "path", "time_s", "tenant"),
    [
        (BODY, CHAT, None, ""),
        ({"body": BODY, "timestamp": 12.5, "output_tokens": 3}, CHAT, 12.5, ""),
        (
            {"request": BODY, "timestamp": 1_700_000_000_123, "tenant": "acme"},
            CHAT,
            1_700_000_000.123,
            "acme",
        ),
        ({"body": json.dumps(BODY), "timestamp": "2026-01-01T00:00:00Z"}, CHAT, 1_767_225_600.0, ""),
        ({"custom_id": "1", "url": "/v1/chat/completions", "body": BODY}, CHAT, None, ""),
        ({"request": {"url": "/v1/responses", "body": {"input": "Hi"}}}, "/v1/responses", None, ""),
        (BODY | {"system": "S"}, "/v1/messages", None, ""),
        (BODY | {"tools": [{"name": "t", "input_schema": {}}]}, "/v1/messages", None, ""),
        ({"prompt": "Hi"}, "/v1/completions", None, ""),
        ({"input": "Hi"}, "/v1/responses", None, ""),
    ],
)
def test_lines(line: dict[str, Any], path: str, time_s: float | None, tenant: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("\n" + json.dumps(line) + "\n", encoding="utf-8-sig")
    (entry,) = read_logs([str(file)])
    assert isinstance(entry, Entry)
    assert (entry.line, entry.path, entry.tenant) == (2, path, digest(tenant))
    assert entry.time_s == pytest.approx(time_s)
    assert isinstance(read_prompt(entry.path, "", "", entry.body), Prompt)


def test_key_order_survives_reading(tmp_path: Path) -> None:
    tool = '{"type":"function","function":{"name":"f","parameters":{"z":{},"a":{}}}}'
    body = f'{{"messages":[{{"role":"user","content":"Hi"}}],"tools":[{tool}]}}'
    file = tmp_path / "log.jsonl"
    file.write_text(f'{{"body":{body}}}\n{json.dumps({"body": body})}\n')
    assert [entry.body for entry in read_logs([str(file)]) if isinstance(entry, Entry)] == [body.encode()] * 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", "not JSON"),
        ('"text"', "not an object"),
        ("[{}]", "one a line"),
        ('{"body": 3}', "not an object"),
        ('{"body": "not json"}', "not JSON"),
        ('{"timestamp": 1, "hash_ids": [1, 2]}', "only hash_ids"),
        ('{"a":' * 100_000, "not JSON"),
        ('{"a": "\\ud800"}', "not JSON"),
    ],
)
def test_bad_lines_are_named(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(f"{json.dumps(BODY)}\n{line}\n{json.dumps(BODY)}\n")
    first, bad, last = read_logs([str(file)])
    assert isinstance(first, Entry)
    assert isinstance(last, Entry)
    assert isinstance(bad, BadLine)
    assert (bad.file, bad.line) == (str(file), 2)
    assert why in bad.why


def test_gzip_whole_and_cut_off(tmp_path: Path) -> None:
    data = gzip.compress(b"\n".join(json.dumps(BODY | {"n": i}).encode() for i in range(5000)))
    for name, size in (("whole", len(data)), ("cut", len(data) // 2)):
        (tmp_path / name).write_bytes(data[:size])
    assert sum(isinstance(e, Entry) for e in read_logs([str(tmp_path / "whole")])) == 5000
    *_, last = read_logs([str(tmp_path / "cut")])
    assert isinstance(last, BadLine)
    assert last.why.startswith("gzip:")


def test_a_line_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.lint.log.MAX_LINE_BYTES", 100)
    file = tmp_path / "log.jsonl"
    file.write_text(f"{'x' * 1000}\n{json.dumps(BODY)}\n{'x' * 99}\n{'x' * 100}")
    kinds = [(type(e).__name__, e.line) for e in read_logs([str(file)])]
    assert kinds == [("BadLine", 1), ("Entry", 2), ("BadLine", 3), ("BadLine", 4)]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"nowhere.*No such file"):
        list(read_logs([str(tmp_path / "nowhere")]))


# --- chunks ------------------------------------------------------------------------------------------

TEXT = st.text(alphabet='ab ,.;\n\r\t{}"1é。', max_size=300)


@given(TEXT, TEXT)
def test_chunks_are_the_whole_prompt(system: str, user: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": user}}]
    for prompt in (chat(system, user, tools=tools), prompt_of({"prompt": system or "x"}, "/v1/completions")):
        assert b"".join(chunk for chunk, _ in cut(prompt)) == data_of(prompt)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_chunks_of_token_ids(ids: list[int]) -> None:
    prompt = prompt_of({"prompt": ids}, "/v1/completions")
    chunks = list(cut(prompt))
    assert b"".join(chunk for chunk, _ in chunks) == array("I", ids).tobytes()
    assert len({normal_form(*chunk) for chunk in chunks}) == len(
        set(chunks)
    )  # nothing of an id is white space


@given(st.lists(st.sampled_from(["one", "two.", "three,", "(four)", "five"]), min_size=1), st.randoms())
def test_white_space_moves_no_cut(words: list[str], random: Any) -> None:
    """Blanks and line ends in other lengths give the same normal forms."""
    ends = [random.choice([" ", "\n"]) for _ in words]
    texts = []
    for _ in range(2):
        spaces = {" ": " " * random.randint(1, 3), "\n": random.choice(["\n", "\r\n", " \n", "\n\n  "])}
        texts.append("".join(word + spaces[end] for word, end in zip(words, ends, strict=True)) + "x")
    first, second = ([normal_form(*chunk) for chunk in cut(chat(text))] for text in texts)
    assert first == second


def test_places() -> None:
    prompt = chat("Grüße, Welt", "Who?", tools=[{"type": "function", "function": {"name": "find"}}])
    data = prompt.text

    def at(text: str) -> tuple[int, str, str, int]:
        place = place_of(data, data.index(text.encode()), 4.0, is_ids=False)
        return place.message, place.role, place.part, place.char

    assert at("Welt") == (0, "system", "text", 7)
    assert at("Who") == (1, "user", "text", 0)
    assert at("find")[:3] == (-1, "", "tools")


# --- alignments --------------------------------------------------------------------------------------

NUMBERS = st.lists(st.integers(0, 12), max_size=40)


@given(NUMBERS, NUMBERS)
def test_runs_agree_and_are_in_order(new: list[int], old: list[int]) -> None:
    runs = align(new, old)
    for run in runs:
        assert run.length > 0
        assert new[run.new : run.new + run.length] == old[run.old : run.old + run.length]
    for run, following in pairwise(runs):
        assert run.new + run.length <= following.new
        assert run.old + run.length <= following.old
    if new == old:
        assert sum(run.length for run in runs) == len(new)


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=60), st.randoms())
def test_what_was_cut_out_or_put_in_is_found(whole: list[int], random: Any) -> None:
    """Of distinct chunks, with some removed and some put in, all that is left agrees."""
    kept = [chunk for chunk in whole if random.random() < 0.7]
    mixed: list[Any] = []
    for chunk in kept:
        mixed += ["new"] * random.randint(0, 1) + [chunk]
    assert sum(run.length for run in align(mixed, whole)) == len(kept)


@pytest.mark.parametrize(
    ("new", "old", "sort", "here"),
    [
        (["At 12:04. " + "Be kind. " * 9], ["At 12:03. " + "Be kind. " * 9], Sort.GAP, "4"),
        (["Be kind.  Be brief. " * 9], ["Be kind. Be brief. " * 9], Sort.SPELLING, " "),
        (
            ["Bring one.\nTake two.\nGo on."],
            ["Take two.\nBring one.\nGo on."],
            Sort.ORDER,
            "Bring one.\nTake two.\n",
        ),
    ],
)
def test_sorts(new: list[str], old: list[str], sort: Sort, here: str) -> None:
    memory = Memory(10**9)
    old_prompt, prompt = chat(*old), chat(*new)
    known = Remembered(memory.intern(cut(old_prompt)), SCOPE, 0, 1, "log:1")
    memory.add(known, memory.norms(known.chunks))
    compared = compare(memory, prompt.text, memory.intern(cut(prompt)), SCOPE, known, 8)
    (difference,) = compared.differences
    assert difference.sort is sort
    assert prompt.text[difference.start : difference.end].decode() == here
    assert difference.equal_end == len(prompt.text)


# --- kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "new", "old", "kinds"),
    [
        ("Now: ", "2026-05-01 12:03:22", "2026-05-01 12:03:29", {Kind.TIME}),
        ("Now: ", "Friday, May 1, 2026, 10:15 AM", "Thursday, April 30, 2026, 9:20 PM", {Kind.TIME}),
        ("Now: ", "1780000000", "1780001234", {Kind.TIME}),
        ("Now: ", "1. Mai um 10:15", "2. Mai um 11:20", {Kind.NUMBER, Kind.TIME}),
        ("Id ", "8f3a2b1c-1234-4abc-9def-0123456789ab", "0a4b1b1c-9234-4abc-1def-f123456789cd", {Kind.ID}),
        ("trace=", "4bf92f3577b34da6", "00f067aa0ba902b7", {Kind.ID}),
        ("", "req_8Fk2P", "req_1Bc7Q", {Kind.ID}),
        ("Request ", "4711", "4712", {Kind.ID}),
        ("User: ", "Anna Adler", "Boris Brandt", {Kind.USER}),
        ("The customer is ", "Zoë Müller", "Jörg Maier", {Kind.USER}),
        ("You are a helpful assistant of ", "Acme", "Globex", {Kind.WORDS}),
        ("Ask ", "anna@example.com", "bob.b@example.org", {Kind.USER}),
        ("Visitor number ", "481", "482", {Kind.NUMBER}),
        ("It is a ", "sunny", "rainy", {Kind.WORDS}),
        ("We march to the ", "market", "mayor", {Kind.WORDS}),
        ("", "At 10:15 for Anna", "At 11:20 for Boris", {Kind.TIME, Kind.WORDS}),
        ("Be kind.", " ", "\n\n", {Kind.WHITE_SPACE}),
        ("", "", "2026-05-01", {Kind.TIME}),
        ("—", "—", "–", {Kind.WORDS}),
    ],
)
def test_kinds_of_values(before: str, new: str, old: str, kinds: set[Kind]) -> None:
    start = b"\xffX" + before.encode()
    assert value_kinds(start + new.encode() + b". You help.", len(start), new.encode(), old.encode()) == kinds


def test_each_kind_has_advice() -> None:
    assert set(ADVICE) == set(Kind)


# --- memory ------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), max_size=60))
def test_memory_gives_back_what_it_takes(prompts: list[list[int]]) -> None:
    """However prompts share chunks: when all but the last are forgotten, only its chunks are left."""
    memory = Memory(1)
    for numbers in prompts:
        prompt = prompt_of({"prompt": "".join(f"chunk {n}.\n" for n in numbers)}, "/v1/completions")
        chunks = memory.intern(cut(prompt))
        assert memory.text(chunks) == prompt.text
        memory.add(Remembered(chunks, SCOPE, 0, 1, ""), memory.norms(chunks))
        assert len(memory) == 1
        assert len(memory._numbers) == len(set(chunks))
        assert len(memory._norms) == len(set(memory.norms(chunks)))


# --- whatever comes ----------------------------------------------------------------------------------


def test_mangled_logs(tmp_path: Path) -> None:
    """Bytes changed, cut out and put in, keys renamed: lines are read or named, and nothing is raised."""
    random = Random(1)
    lines = make_log(1, lambda r: make_apps(r, sorted(FAULTS), sorted(CLEAN)), 400).lines
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"\n".join(mangled(line.encode(), random).replace(b"\n", b"") for line in lines))
    linter = Linter(Options(show_chars=20, memory_bytes=1_000_000))
    linter.read(read_logs([str(file)]))
    assert linter.totals.bad_lines > 50
    assert linter.totals.requests > 100
    findings = linter.report(min_tokens=1, min_share=0.0)
    rate = rate_of(linter.totals, requests_per_day=None, prefill_tokens_per_s=10_000.0)
    assert max(map(len, show(linter, findings, rate).splitlines())) <= 100
    json.dumps(as_json(linter, findings, rate))


def mangled(line: bytes, random: Random) -> bytes:
    at, size = random.randrange(len(line)), random.randrange(200)
    keys = [b'"content"', b'"role"', b'"tools"', b'"messages"', b'"type"', b'"prompt"', b'"documents"']
    match random.randrange(5):
        case 0:
            return line[:at] + bytes([random.randrange(256)]) + line[at + 1 :]
        case 1:
            return line[:at] + line[at + size :]
        case 2:
            return line[:at] + line[at // 2 : at // 2 + size] + line[at:]
        case 3:
            return line.replace(random.choice(keys), random.choice(keys), 1)
        case _:
            return line


# --- costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("totals", "per_day", "tokens", "unit"),
    [
        (Totals(requests=100, first_s=0.0, last_s=8640.0), None, 10_000.0, "day"),
        (Totals(requests=100, first_s=0.0, last_s=8640.0), 500.0, 5_000.0, "day"),
        (Totals(requests=100, first_s=0.0, last_s=30.0), None, 10_000.0, "1,000 requests"),
        (Totals(requests=100, first_s=0.0, last_s=8640.0, untimed=1), None, 10_000.0, "1,000 requests"),
        (Totals(requests=100, untimed=100), 100.0, 1_000.0, "day"),
    ],
)
def test_costs(totals: Totals, per_day: float | None, tokens: float, unit: str) -> None:
    rate = rate_of(totals, requests_per_day=per_day, prefill_tokens_per_s=5_000.0)
    assert (rate.tokens(1_000), rate.unit) == (pytest.approx(tokens), unit)
    assert rate.ms(1_000) == pytest.approx(tokens / 5)
