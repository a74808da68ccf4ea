"""Agent traffic with planted faults, and traffic that only looks like it, for the tests of `extproc lint`.

Everything is drawn anew from a seed: words, system prompts, tools, lengths, APIs, who is where. Traffic is
log lines in the order of time, each with the app that sent it; the apps know what was planted in them.
"""

from __future__ import annotations

import copy
import datetime
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_SMALL = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "and",
    "for",
    "with",
    "on",
    "by",
    "from",
    "as",
    "is",
    "are",
    "may",
    "if",
]
_NAMES = [
    "Anna",
    "Boris",
    "Chen",
    "Dalia",
    "Emil",
    "Fatima",
    "Goran",
    "Hiro",
    "Ines",
    "Jamal",
    "Kira",
    "Luca",
]
_SURNAMES = ["Adler", "Brandt", "Costa", "Dvorak", "Eriksen", "Fuchs", "Garcia", "Haas", "Ivanov", "Jonas"]


class Text:
    """Random prose with a vocabulary of its own."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._words = ["".join(random.choices(_SYLLABLES, k=random.randint(2, 4))) for _ in range(1500)]
        self._mixed = [*self._words, *(_SMALL * 40)[:548]]  # 2048: a word costs 11 bits

    def word(self) -> str:
        return self.random.choice(self._words)

    def sentence(self) -> str:
        bits = self.random.getrandbits(220)
        mixed = self._mixed
        words = [mixed[bits >> shift & 2047] for shift in range(0, 11 * (5 + (bits >> 200) % 12), 11)]
        if len(words) > 9:
            words[2 + (bits >> 204) % 5] += ","
        if bits >> 207 & 7 == 0:
            words[-1] = str(bits >> 190 & 1023)
        return " ".join(words).capitalize() + "......?!:."[bits >> 210 & 7]

    def prose(self, chars: int) -> str:
        """Paragraphs, bullets and headings, about so long."""
        r = self.random
        pieces: list[str] = []
        total = 0
        while total < chars:
            kind = r.random()
            if kind < 0.15:
                piece = f"## {self.word().title()} {self.word()}\n"
            elif kind < 0.5:
                piece = "\n".join(f"- {self.sentence()}" for _ in range(r.randint(2, 5))) + "\n"
            else:
                piece = " ".join(self.sentence() for _ in range(r.randint(1, 5))) + "\n\n"
            pieces.append(piece)
            total += len(piece)
        return "".join(pieces).rstrip() + "\n"

    def code(self, chars: int) -> str:
        lines: list[str] = []
        while sum(map(len, lines)) < chars:
            lines.append(f"    {self.word()} = {self.word()}({self.word()}, {self.random.randint(0, 99)})\n")
        return f"def {self.word()}({self.word()}):\n" + "".join(lines)

    def tool(self) -> dict[str, Any]:
        properties = {
            self.word(): {"type": self.random.choice(("string", "integer")), "description": self.sentence()}
            for _ in range(self.random.randint(2, 5))
        }
        return {
            "name": f"{self.word()}_{self.word()}",
            "description": " ".join(self.sentence() for _ in range(self.random.randint(1, 4))),
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:1],
                "additionalProperties": False,
            },
        }

    def name(self) -> str:
        return f"{self.random.choice(_NAMES)} {self.random.choice(_SURNAMES)}"

    def id(self) -> str:
        r = self.random
        return str(uuid.UUID(int=r.getrandbits(128)))


@dataclass
class Request:
    """A prompt before it has the form of an API. Messages are OpenAI's, contents strings or parts."""

    system: str
    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    model: str
    salt: str | None = None
    turn: int = 0
    conversation: int = 0
    time_s: float = 0.0


Change = Callable[["App", Request], None]


@dataclass
class App:
    """Sends requests of one template. ``fault``: what was planted, if any; ``where``: message and part."""

    name: str
    text: Text
    turns: tuple[int, int] = (1, 1)
    system_chars: int = 4000
    tools: int = 0
    anthropic: bool = False
    model: str = "m"
    fault: str = ""
    where: tuple[int, str] = (0, "text")
    change: Change | None = None
    user_chars: int = 200
    system: str = ""
    tool_list: list[dict[str, Any]] = field(default_factory=list)
    memo: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = self.text.random
        self.system = self.system or self.text.prose(self.system_chars)
        self.tool_list = self.tool_list or [self.text.tool() for _ in range(self.tools)]

    def text_head(self) -> str:
        """What stands before everything else."""
        return str(self.memo.setdefault("head", self.text.prose(300)))

    def user(self, turn: int) -> str:
        """A user's words; what belongs to the moment stands in them, at the end of the prompt."""
        r = self.random
        words = " ".join(self.text.sentence() for _ in range(max(1, r.randint(1, self.user_chars // 40))))
        if r.random() < 0.3:
            words += f"\n\nIt is {moment(r)}. I am {self.text.name()}."
        return words

    def answer(self) -> str:
        return " ".join(self.text.sentence() for _ in range(self.random.randint(2, 6)))

    def conversation(self, number: int) -> Iterator[Request]:
        """Requests of one conversation, each with all that was said before."""
        messages: list[dict[str, Any]] = []
        for turn in range(self.random.randint(*self.turns)):
            if turn:
                self.reply(messages)
            messages.append({"role": "user", "content": self.user(turn)})
            yield Request(self.system, self.tool_list, messages, self.model, turn=turn, conversation=number)

    def reply(self, messages: list[dict[str, Any]]) -> None:
        if self.tool_list and self.random.random() < 0.5:
            call = f"call_{self.random.getrandbits(64):x}"
            name = self.random.choice(self.tool_list)["name"]
            arguments = json.dumps({self.text.word(): self.text.word()})
            called = {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": self.answer(), "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": call, "content": self.text.code(600)})
            messages.append({"role": "assistant", "content": self.answer()})
        else:
            messages.append({"role": "assistant", "content": self.answer()})

    def body(self, request: Request, *, mended: bool = False) -> dict[str, Any]:
        """What is sent; ``mended``: what would be, had nothing been planted."""
        request = copy.copy(request)
        request.messages = [dict(message) for message in request.messages]
        request.tools = [dict(tool) for tool in request.tools]
        if mended and self.fault:
            if self.fault in ("order", "block"):
                self.change(self, request, mended=True)  # type: ignore[call-arg, misc]
        elif self.change is not None:
            self.change(self, request)
        r = self.random
        body: dict[str, Any] = {"model": request.model, "temperature": round(r.random(), 2)}
        if request.salt is not None:
            body["cache_salt"] = request.salt
        if self.anthropic:
            body |= {"max_tokens": r.randint(100, 2000), "messages": anthropic(request.messages)}
            if request.system:
                body["system"] = request.system
            if request.tools:
                body["tools"] = [
                    {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
                    for t in request.tools
                ]
        else:
            system = [{"role": "system", "content": request.system}] if request.system else []
            body["messages"] = system + request.messages
            if request.tools:
                body["tools"] = [{"type": "function", "function": tool} for tool in request.tools]
        return body


def anthropic(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            converted.append({"role": "user", "content": [block]})
        elif "tool_calls" in message:
            blocks: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}]
            blocks += [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in message["tool_calls"]
            ]
            converted.append({"role": "assistant", "content": blocks})
        else:
            converted.append(message)
    return converted


def moment(r: Random) -> str:
    at = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        seconds=r.randint(0, 86_400 * 300)
    )
    return at.strftime(
        r.choice(
            ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%A, %B %d, %Y %H:%M", "%d %b %Y, %I:%M %p", "%s")
        )
    )


# --- faults ------------------------------------------------------------------------------------------


def _opened(request: Request, line: str, app: App) -> None:
    """Put a line early in the system prompt: at the very start, or behind a first sentence."""
    first = app.memo.setdefault("first", app.random.choice(("", f"You are {app.text.word()}. ")))
    behind = app.memo.setdefault("behind", app.random.choice(("\n", " ", "\n\n")))
    request.system = f"{first}{line}{behind}{request.system}"


def _of(app: App, key: str, *choices: str) -> str:
    """One choice that an app keeps to."""
    return str(app.memo.setdefault(key, app.random.choice(choices)))


def time_early(app: App, request: Request) -> None:
    start = app.memo.setdefault("start", app.random.randint(0, 86_400 * 300))
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        seconds=start + request.time_s
    )
    form = _of(app, "form", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%fZ", "%A, %B %d, %Y, %I:%M:%S %p", "%s")
    _opened(
        request,
        _of(app, "w", "Current time: {}.", "Today is {}", "Now: {} (UTC)").format(at.strftime(form)),
        app,
    )


def request_id_early(app: App, request: Request) -> None:
    forms = ("uuid", "req_", "hex", "nonce=")
    form = _of(app, "form", *forms)
    r = app.random
    value = {
        "uuid": app.text.id(),
        "req_": f"req_{r.getrandbits(60):x}",
        "hex": f"{r.getrandbits(128):032x}",
        "nonce=": f"nonce={r.getrandbits(50):x}",
    }[form]
    _opened(request, _of(app, "w", "Request {}", "[{}]", "Request id: {}.").format(value), app)


def session_id_early(app: App, request: Request) -> None:
    key = f"session {request.conversation}"
    value = app.memo.setdefault(key, _of(app, "p", "sess-{}", "{}").format(app.text.id()))
    _opened(request, _of(app, "w", "Session: {}", "trace_id={}", "Conversation {}.").format(value), app)


def user_early(app: App, request: Request) -> None:
    users = app.memo.setdefault("users", [app.text.name() for _ in range(30)])
    name = users[request.conversation % len(users)]
    if _of(app, "mail", "y", "n") == "y":
        name = name.replace(" ", ".").lower() + "@example.com"
    _opened(
        request, _of(app, "w", "User: {}.", "You are assisting {}.", "The customer is {}.").format(name), app
    )


def number_early(app: App, request: Request) -> None:
    count = app.memo["count"] = app.memo.get("count", app.random.randint(10, 5000)) + 1
    _opened(
        request,
        _of(app, "w", "Good day! Visitor number {}.", "Turn {}.", "Call #{} of today.").format(count),
        app,
    )


def words_early(app: App, request: Request) -> None:
    words = app.memo.setdefault("words", [app.text.word().title() for _ in range(40)])
    word = words[request.conversation % len(words)]
    _opened(
        request, _of(app, "w", "You work for {}.", "Topic of this case: {}.", "{} desk").format(word), app
    )


def tools_shuffled(app: App, request: Request) -> None:
    app.random.shuffle(request.tools)


def keys_shuffled(app: App, request: Request) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(inner)) for key, inner in value.items()]
            app.random.shuffle(items)
            return dict(items)
        return value

    for tool in request.tools:
        tool["parameters"] = shuffled(tool["parameters"])


def white_space(app: App, request: Request) -> None:
    form = _of(app, "form", "crlf", "indent", "blank", "double")
    lines = request.system.split("\n")
    r = app.random
    if form == "crlf":
        ends = r.choice(("\n", "\r\n", " \n"))
        request.system = ends.join(lines) + " " * r.randint(0, 9)
        if r.random() < 0.7:
            request.system = " " * r.randint(0, 30) + request.system
    elif form == "indent":
        request.system = "\n".join(" " * r.randint(0, 8) + line for line in lines)
    elif form == "blank":
        request.system = "\n" * r.randint(0, 20) + request.system
    else:
        request.system = "\n".join(line.replace(" ", "  ", r.randint(0, 3)) for line in lines)


def window(app: App, request: Request) -> None:
    size = app.memo.setdefault("size", app.random.choice((10, 14)))
    while len(request.messages) > size:
        del request.messages[0]
        while request.messages and request.messages[0]["role"] != "user":
            del request.messages[0]


def rewritten(app: App, request: Request) -> None:
    """Only the newest two results and answers are kept as they were."""
    old = [m for m in request.messages[:-4] if m["role"] in ("tool", "assistant")]
    for message in old[-1:] if _of(app, "form", "last", "all") == "last" else old:
        message["content"] = "[shortened] " + str(message["content"])[: app.random.randint(10, 40)]


def salted(app: App, request: Request) -> None:
    request.salt = app.text.id()


def examples_shuffled(app: App, request: Request, *, mended: bool = False) -> None:
    examples = app.memo.setdefault("examples", [app.text.prose(500).strip() for _ in range(7)])
    chosen = examples if mended else app.random.sample(examples, len(examples))
    shown = "\n\n".join(f"<example>\n{example}\n</example>" for example in chosen)
    request.system = f"{app.text_head()}\n{shown}\n\n{request.system}"


def example_messages_shuffled(app: App, request: Request, *, mended: bool = False) -> None:
    pairs = app.memo.setdefault("pairs", [(app.text.prose(300), app.text.prose(300)) for _ in range(7)])
    shown = [
        {"role": role, "content": content}
        for pair in (pairs if mended else app.random.sample(pairs, len(pairs)))
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    request.messages = shown + request.messages


def documents_first(app: App, request: Request, *, mended: bool = False) -> None:
    documents = app.memo.setdefault("documents", [app.text.prose(900).strip() for _ in range(60)])
    shown = "\n\n".join(f"<doc>\n{d}\n</doc>" for d in app.random.sample(documents, 2))
    parts = [shown, request.system]
    request.system = "\n\n".join([app.text_head(), *(parts[::-1] if mended else parts)])


def models_mixed(app: App, request: Request) -> None:
    request.model = app.random.choice(("m-a", "m-b", "m-c"))


def time_last(app: App, request: Request) -> None:
    """At the end of the system prompt: no harm but to the conversation behind it."""
    request.system += f"\nIt is {moment(app.random)}."


def time_in_the_first_message(app: App, request: Request) -> None:
    first = request.messages[0]
    first["content"] = f"[{moment(app.random)}] {first['content']}"


def memory_in_system(app: App, request: Request) -> None:
    """What is remembered of the user, written anew for each turn."""
    request.system += f"\n## Memory\n{app.text.prose(900)}"


def some_tools(app: App, request: Request) -> None:
    request.tools = [tool for tool in request.tools if app.random.random() < 0.7]


def signed_image(app: App, request: Request) -> None:
    image(app, request)
    part = request.messages[0]["content"][0]
    medium = part["source"] if app.anthropic else part["image_url"]
    medium["url"] += f"?sig={app.random.getrandbits(90):x}"


def tokens_early(app: App, request: Request) -> None:
    ids = request.messages[0]["prompt"]
    request.messages[0]["prompt"] = [*ids[:40], *(app.random.randrange(9000) for _ in range(6)), *ids[40:]]


def question_in_the_middle(app: App, request: Request) -> None:
    tail = app.memo.setdefault("tail", app.text.prose(3000))
    request.messages[0]["content"] = f"{app.text.word()} {app.text.word()}?\n\n{tail}"


EARLY = (0, "text")
#: Fault -> how to plant it: the change, what the app needs, and where the linter has to see it.
FAULTS: dict[str, tuple[Change, dict[str, Any]]] = {
    "time": (time_early, {}),
    "request-id": (request_id_early, {}),
    "session-id": (session_id_early, {"turns": (2, 4)}),
    "user": (user_early, {"turns": (1, 2)}),
    "number": (number_early, {}),
    "words": (words_early, {"turns": (1, 2)}),
    "tool-order": (tools_shuffled, {"tools": 8, "where": (-1, "tools")}),
    "key-order": (keys_shuffled, {"tools": 6, "where": (-1, "tools")}),
    "white-space": (white_space, {}),
    "window": (window, {"turns": (9, 20), "user_chars": 800, "where": (None, "")}),
    "history": (rewritten, {"turns": (8, 14), "tools": 3, "where": (None, "")}),
    "cache-salt": (salted, {"where": (-1, "cache_salt")}),
    "order": (examples_shuffled, {}),
    "block": (documents_first, {}),
}
#: More of the same, in other places: the fault's name, and where.
VARIANTS: dict[str, tuple[str, Change, dict[str, Any]]] = {
    "time last": ("time", time_last, {"turns": (5, 9)}),
    "time in a message": ("time", time_in_the_first_message, {"turns": (5, 9), "where": (1, "text")}),
    "memory": ("block", memory_in_system, {"turns": (6, 12), "user_chars": 800}),
    "some tools": ("tools", some_tools, {"tools": 6, "where": (-1, "tools")}),
    "signed image": ("media", signed_image, {"turns": (6, 9), "user_chars": 800, "where": (1, "media")}),
    "question in the middle": ("words", question_in_the_middle, {"where": (1, "text")}),
}
HINTS: dict[str, tuple[Change, dict[str, Any]]] = {
    "model": (models_mixed, {"turns": (4, 8), "where": (-1, "model")}),
}


# --- traffic that looks like it ----------------------------------------------------------------------


def new_version(app: App, request: Request) -> None:
    """A deploy in the middle of the day, while conversations run."""
    version = "2.1" if request.time_s < 1800 else "2.2"
    request.system = f"Version {version}. {request.system}"
    if request.time_s >= 1800:
        request.system = request.system.replace("\n", f"\n{app.text_head()}\n", 1)


def two_variants(app: App, request: Request) -> None:
    """An experiment: half of the conversations have a line more."""
    if request.conversation % 2:
        request.system = f"Be {_of(app, 'w', 'brief', 'kind')}. {request.system}"


def own_salt(app: App, request: Request) -> None:
    request.salt = _of(app, "salt", app.text.id())


def documents_last(app: App, request: Request) -> None:
    documents = app.memo.setdefault("documents", [app.text.prose(800).strip() for _ in range(60)])
    shown = "\n\n".join(f"<doc>\n{d}\n</doc>" for d in app.random.sample(documents, 3))
    request.messages[-1]["content"] = f"{shown}\n\nQuestion: {request.messages[-1]['content']}"


def date_at_the_end(app: App, request: Request) -> None:
    request.system += f"\nToday is {_of(app, 'day', '2026-05-04', 'Monday, May 4, 2026')}."


def compacted_once(app: App, request: Request) -> None:
    if len(request.messages) > 18:
        summary = app.memo.setdefault(f"summary {request.conversation}", app.text.prose(600))
        request.messages = [{"role": "user", "content": summary}, *request.messages[13:]]


def image(app: App, request: Request) -> None:
    last = request.messages[0]
    url = f"https://example.com/{request.conversation}.png"
    if app.anthropic:
        source = {"type": "url", "url": url}
        last["content"] = [{"type": "image", "source": source}, {"type": "text", "text": last["content"]}]
    else:
        last["content"] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": last["content"]},
        ]


def billing_header(app: App, request: Request) -> None:
    app.memo["n"] = app.memo.get("n", 0) + 1


class Branching(App):
    """Users who go back to an earlier message and ask something else."""

    def conversation(self, number: int) -> Iterator[Request]:
        last: Request | None = None
        for request in super().conversation(number):
            yield request
            last = copy.deepcopy(request)
            if self.random.random() < 0.4:
                again = copy.deepcopy(last)
                again.messages[-1]["content"] = self.user(again.turn)
                yield again


class Swarm(App):
    """Agents with tasks of their own that begin with the same words and the same look at the same files."""

    def conversation(self, number: int) -> Iterator[Request]:
        files = self.memo.setdefault("files", [self.text.code(2000) for _ in range(4)])
        opening = self.memo.setdefault("opening", self.text.prose(150))
        tail = self.memo.setdefault("tail", f"{self.text.sentence()} {self.text.sentence()}")
        tasks = self.memo.setdefault("tasks", [self.user(0) for _ in range(12)])
        task = self.random.choice(tasks) if self.random.random() < 0.3 else self.user(0)
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task: {task}\n\n{tail}"}]
        for turn in range(self.random.randint(2, 6)):
            yield Request(self.system, self.tool_list, messages, self.model, turn=turn, conversation=number)
            call = "call_0" if turn == 0 else f"call_{self.random.getrandbits(64):x}"
            called = {
                "id": call,
                "type": "function",
                "function": {"name": self.tool_list[0]["name"], "arguments": '{"path": "/"}'},
            }
            said = opening if turn == 0 or self.random.random() < 0.3 else self.answer()
            file = files[0] if turn == 0 else self.random.choice(files)
            messages = [
                *messages,
                {"role": "assistant", "content": said, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": call, "content": file},
            ]


class Personas(App):
    """Many personas: a long head and a short ending that all share, and their own text between."""

    def conversation(self, number: int) -> Iterator[Request]:
        head = self.memo.setdefault("head", self.text.prose(2500))
        tail = self.memo.setdefault("tail", self.text.prose(350))
        own = self.memo.setdefault("own", [self.text.prose(2000) for _ in range(12)])
        for request in super().conversation(number):
            request.system = f"{head}{own[number % len(own)]}{tail}"
            yield request


class Repeating(App):
    """The same few prompts over and over."""

    def conversation(self, number: int) -> Iterator[Request]:
        kept = self.memo.setdefault("kept", [[{"role": "user", "content": self.user(0)}] for _ in range(3)])
        yield Request(self.system, self.tool_list, self.random.choice(kept), self.model, conversation=number)


class Completions(App):
    """Prompts as text or as token ids."""

    def conversation(self, number: int) -> Iterator[Request]:
        ids = self.memo.setdefault("ids", self.random.random() < 0.5)
        head: Any = self.memo.setdefault(
            "head", [self.random.randrange(100_000) for _ in range(2000)] if ids else self.system
        )
        tail: Any = [self.random.randrange(100_000) for _ in range(100)] if ids else self.user(0)
        yield Request("", [], [{"prompt": head + tail}], self.model, conversation=number)

    def body(self, request: Request, *, mended: bool = False) -> dict[str, Any]:
        return {"model": request.model, "max_tokens": 20, "prompt": request.messages[0]["prompt"]}


class Claude(App):
    """A command line agent: a system prompt in blocks, the first of which changes and isn't rendered."""

    def body(self, request: Request, *, mended: bool = False) -> dict[str, Any]:
        body = super().body(request, mended=mended)
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={self.random.getrandbits(20):05x};"
        body["system"] = [{"type": "text", "text": text} for text in (header, body["system"])]
        return body


CLEAN: dict[str, tuple[type[App], dict[str, Any]]] = {
    "chat": (App, {"turns": (1, 10)}),
    "branching": (Branching, {"turns": (2, 6)}),
    "swarm": (Swarm, {"tools": 5}),
    "personas": (Personas, {}),
    "repeating": (Repeating, {}),
    "short": (App, {"system_chars": 20, "user_chars": 80}),
    "no system": (App, {"turns": (2, 8), "system": " "}),
    "new version": (App, {"turns": (3, 9), "change": new_version}),
    "experiment": (App, {"turns": (1, 4), "change": two_variants}),
    "tenant's salt": (App, {"turns": (1, 4), "change": own_salt}),
    "retrieval": (App, {"change": documents_last, "system_chars": 3000}),
    "today": (App, {"turns": (1, 5), "change": date_at_the_end}),
    "compacted": (App, {"turns": (8, 20), "change": compacted_once}),
    "images": (App, {"turns": (1, 4), "change": image}),
    "completions": (Completions, {}),
    "claude": (Claude, {"turns": (2, 8), "tools": 6, "anthropic": True}),
}


# --- logs --------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """A log's lines, and the app of each (the first is line 1); ``mended``: without what was planted."""

    lines: list[str]
    apps: list[App]
    mended: list[str]


def make_apps(random: Random, faults: list[str], clean: list[str]) -> list[App]:
    """Apps with these faults and kinds of clean traffic; the same name may come twice."""
    apps: list[App] = []
    shared = Text(random).prose(random.choice((400, 1500)))  # the company's own words, at the head of some
    for number, name in enumerate([*faults, *clean]):
        text = Text(random)
        options: dict[str, Any] = {
            "anthropic": random.random() < 0.4,
            "tools": random.choice((0, 0, 3, 8)),
            "system_chars": random.randint(2000, 5000),
            "model": random.choice(("llama", "qwen")),
        }
        kind: type[App] = App
        if name in VARIANTS:
            fault, change, needs = VARIANTS[name]
            options |= {"fault": fault, "change": change} | needs
        elif number < len(faults):
            change, needs = (FAULTS | HINTS)[name]
            if name == "order" and random.random() < 0.4:
                change = example_messages_shuffled
                options["where"] = (None, "")
            options |= {"fault": name, "change": change} | needs
        else:
            kind, needs = CLEAN[name]
            options |= needs
        if random.random() < 0.4 and name not in ("short", "no system"):
            options["system"] = text.prose(options["system_chars"])
            if kind is not Personas:
                options["system"] = (
                    f"{options['system']}{shared}"
                    if random.random() < 0.5
                    else (f"{shared}{options['system']}")
                )
        apps.append(kind(f"{name} {number}", text, **options))
    return apps


def make_log(
    seed: int, apps: Callable[[Random], list[App]], requests: int, *, tenants: bool = True, mend: bool = False
) -> Traffic:
    """A log of about an hour, so many requests, shared evenly among the apps, in the order of time."""
    random = Random(f"{seed} lint")
    senders = apps(random)
    timed: list[tuple[float, str, App]] = []
    for app in senders:
        count = 0
        number = 0
        share = requests // len(senders)
        while count < share:
            number += 1
            at = random.uniform(0, 3300)
            pace = random.uniform(5, 60)
            events: list[tuple[float, Request]] = []
            for request in app.conversation(number):
                copied = copy.copy(request)
                copied.messages = list(request.messages)
                copied.time_s = at
                events.append((at, copied))
                at += random.expovariate(1 / pace)
            events = events[: share - count]
            count += len(events)
            timed += [(when, "", app, request) for when, request in events]  # type: ignore[misc]
    timed.sort(key=lambda entry: entry[0])
    lines: list[str] = []
    mended: list[str] = []
    for when, _, app, request in timed:  # type: ignore[misc]
        body = app.body(request)  # in the order of time, so that counters count
        form = random.random()
        if form < 0.5:
            line: dict[str, Any] = {"timestamp": 1_780_000_000 + when, "body": body}
        elif form < 0.8:
            line = {"timestamp": 1_780_000_000_000 + int(when * 1000), "request": body}
        else:
            line = {"timestamp": 1_780_000_000 + when, "body": json.dumps(body)}
        if tenants:
            line["tenant"] = app.name
        lines.append(json.dumps(line, ensure_ascii=random.random() < 0.5))
        if mend:
            mended.append(json.dumps(app.body(request, mended=True)))
    return Traffic(lines, [entry[2] for entry in timed], mended)
