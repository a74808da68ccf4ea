"""What a difference is, by what stands there, and what to do about it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import accumulate

from extproc.lint.text import without_white_space
from extproc.prompt import canonical as c

#: Bytes on each side of a difference that help to tell what it is.
_CONTEXT_BYTES = 48


class Kind(StrEnum):
    """The kinds; the values are for programs."""

    TIME = "time"
    REQUEST_ID = "request-id"
    SESSION_ID = "session-id"
    ID = "id"  #: either; which one shows only over many requests
    USER = "user"
    NUMBER = "number"
    WORDS = "words"
    MEDIA = "media"
    TOKENS = "tokens"
    WHITE_SPACE = "white-space"
    KEY_ORDER = "key-order"
    TOOL_ORDER = "tool-order"
    TOOLS = "tools"
    ORDER = "order"
    BLOCK = "block"
    HISTORY = "history"
    WINDOW = "window"
    SALT = "cache-salt"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Advice:
    """``title``: what it is, for a headline. ``fix``: what to do."""

    title: str
    fix: str


ADVICE: dict[Kind, Advice] = {
    Kind.TIME: Advice(
        "A date or time",
        "Move it to the last message, or to the prompt's end; if it must stay, round it to the day.",
    ),
    Kind.REQUEST_ID: Advice(
        "An id that is new with each request",
        "Models have no use for it: send it as a header or in `metadata`, or put it at the prompt's end.",
    ),
    Kind.SESSION_ID: Advice(
        "A session or trace id",
        "Send it as a header or in `metadata`; if the model needs it, put it at the first message's end.",
    ),
    Kind.ID: Advice("An id", "Send it as a header or in `metadata`, or put it at the prompt's end."),
    Kind.USER: Advice(
        "A user's name or address",
        "Put what is about the user behind what all share: at the system prompt's end, or in a message.",
    ),
    Kind.NUMBER: Advice(
        "A number or counter",
        "Leave it out, or put it behind what stays the same.",
    ),
    Kind.WORDS: Advice(
        "A few words that differ",
        "Put what differs behind what stays the same: first the shared instructions, then this case.",
    ),
    Kind.MEDIA: Advice(
        "An image or other medium",
        "The same one under a signed URL: give it a `uuid` or a stable URL. Else put instructions first.",
    ),
    Kind.TOKENS: Advice(
        "A few tokens that differ",
        "Put what differs behind what stays the same. (Of prompts that are token ids no more can be said.)",
    ),
    Kind.WHITE_SPACE: Advice(
        "White space",
        "Render the prompt one way: same line ends, same indentation, no stray blanks.",
    ),
    Kind.KEY_ORDER: Advice(
        "The order of keys in JSON",
        "Serialise schemas with sorted keys (`sort_keys=True`), or once at start-up.",
    ),
    Kind.TOOL_ORDER: Advice(
        "The order of the tools",
        "Sort the tools by name before sending; don't take them from a set or a concurrent listing.",
    ),
    Kind.TOOLS: Advice(
        "The set of tools",
        "Send the same tools each time (`tool_choice` restricts them), or put those that come and go last.",
    ),
    Kind.ORDER: Advice(
        "The order of the same pieces (examples, documents)",
        "Put them in one order, for example sorted by their ids, or behind what stays the same.",
    ),
    Kind.BLOCK: Advice(
        "A passage that changes (documents, memory), before text that stays",
        "Put the part that stays first, and what was retrieved or chosen for this request behind it.",
    ),
    Kind.HISTORY: Advice(
        "Earlier turns of a conversation rewritten",
        "Only append to a conversation: send earlier turns as they were. Compact rarely, then much at once.",
    ),
    Kind.WINDOW: Advice(
        "The oldest turns of a conversation dropped with each turn",
        "A sliding window gives up the whole cache at every step: drop many turns at once, and rarely.",
    ),
    Kind.SALT: Advice(
        "A cache_salt that changes",
        "Use one salt for all requests that may share a cache, such as one for each tenant; none if all may.",
    ),
    Kind.MODEL: Advice(
        "The same prompts for different models",
        "Nothing to mend in the prompt. Where names are aliases or adapters, one for each prompt saves it.",
    ),
}

_TIME = re.compile(
    rb"""
      \d{4}[-/.]\d\d?[-/.]\d\d?(?:[T\s_]+\d\d?:?\d\d(?::?\d\d(?:[.,]\d+)?)?)?(?:\s?Z|\s?[+-]\d\d:?\d\d)?
    | \d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b)?(?:\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?
    | \d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}
    | (?:\d{1,2}(?:st|nd|rd|th)?\s+)?\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?
      |aug(?:ust)?      |sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?
      (?:\s+\d{1,2}(?:st|nd|rd|th)?)?(?:,?\s+\d{4})?
    | \b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b
    | (?<!\d)(?:1[4-9]|20)\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?!\d)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_MAIL = re.compile(rb"[\w.+%-]+@[\w-]+(?:\.[\w-]+)*")
_UUID = re.compile(rb"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ID = re.compile(
    rb"""
      (?<![\w-])[A-Za-z]{1,12}[-_](?=[\w-]*\d)[\w-]{4,}
    | (?<![\w])(?=[\w]*\d)(?=[\w]*[A-Za-z])\w{8,}
    | (?<!\d)\d{9,}(?!\d)
    | (?<![\w])[A-Za-z0-9+/_-]{20,}={0,2}
    """,
    re.VERBOSE,
)
_NUMBER = re.compile(rb"[-+#]?\d[\d.,:/-]*%?")
_ABOUT_USER = re.compile(
    rb"""
    (?i: \b(?:user|customer|client|member|employee|account|person|patient|student|owner|caller|contact|guest)
         (?:[ _-]?name)?(?:\s+(?:is|named|called))?
       | \b(?:first|last|full|display)?[ _-]?name(?:\s+is)?
       | \b(?:assisting|helping|serving|dear|hello|hi|behalf\s+of|in\s+as|talking\s+to|speaking\s+(?:to|with))
    )\W*(?:[A-Z]\S*\s+){0,2}$
    """,
    re.VERBOSE,
)
_ABOUT_ID = re.compile(
    rb"\b(?:request|trace|session|thread|conversation|correlation|run|span|\w*id)\W*$", re.I
)

_PATTERNS: tuple[tuple[Kind, re.Pattern[bytes]], ...] = (
    (Kind.USER, _MAIL),
    (Kind.ID, _UUID),
    (Kind.TIME, _TIME),
    (Kind.ID, _ID),
    (Kind.NUMBER, _NUMBER),
)
_WORD = re.compile(rb"[\w\x80-\xfe]+")
_PIECE = re.compile(rb"[\w\x80-\xfe]+|\s+|[^\w\s]")

#: Longer differences are taken as one.
_MAX_PIECES = 400


def value_kinds(data: bytes, start: int, new: bytes, old: bytes) -> set[Kind]:
    """The kinds of a small difference, word by word: a time and a name may differ in one line.

    ``new`` stands at ``start`` of ``data``, ``old`` in its place in the other prompt.
    """
    pieces, others = _PIECE.findall(new), _PIECE.findall(old)
    if max(len(pieces), len(others)) > _MAX_PIECES:
        return {value_kind(data, start, start + len(new))}
    ends = [0, *accumulate(map(len, pieces))]
    kinds: set[Kind] = set()
    for tag, i, i_end, j, j_end in SequenceMatcher(None, pieces, others, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        here, there = b"".join(pieces[i:i_end]), b"".join(others[j:j_end])
        at = start + ends[i]
        if tag == "replace" and _margins(here) != _margins(there):
            kinds.add(Kind.WHITE_SPACE)
        if same_without_white_space(here, there):
            kinds.add(Kind.WHITE_SPACE)
        elif _WORD.search(here):
            kinds.add(value_kind(data, at, at + len(here)))
        elif _WORD.search(there):  # only the other prompt has something here
            low = max(0, at - _CONTEXT_BYTES)
            around = data[low:at] + there + data[at + len(here) : at + len(here) + _CONTEXT_BYTES]
            kinds.add(value_kind(around, at - low, at - low + len(there)))
    return kinds or {Kind.WORDS}


def _margins(text: bytes) -> tuple[int, int]:
    return len(text) - len(text.lstrip()), len(text) - len(text.rstrip())


def value_kind(data: bytes, start: int, end: int) -> Kind:
    """The kind of a small difference, by the text that it lies in.

    A pattern that matches around the difference counts if it covers most of what differs: of two times only
    the minutes may differ, of two ids a few digits.
    """
    field_start = data.rfind(b"\xff", 0, start + 1)
    if field_start >= 0 and data[field_start : field_start + 2] == c.MEDIA:
        return Kind.MEDIA
    if field_start >= 0 and data[field_start : field_start + 2] == c.CALL_ID:
        return Kind.ID
    low = max(start - _CONTEXT_BYTES, field_start + 2 if field_start >= 0 else 0)
    field_end = data.find(b"\xff", start + 1)
    high = min(end + _CONTEXT_BYTES, len(data) if field_end < 0 else max(field_end, end))
    window, start, end = data[low:high], start - low, end - low
    start, end = whole_words(window, start, end)
    needed = sum(len(word) for word in _WORD.findall(window, start, end))
    before = window[:start]
    for kind, pattern in _PATTERNS:
        covered = sum(
            len(word)
            for match in pattern.finditer(window)
            for word in _WORD.findall(window, max(start, match.start()), min(end, match.end()))
        )
        if needed and covered >= 0.6 * needed:
            if kind is Kind.NUMBER and _ABOUT_ID.search(before):
                return Kind.ID
            return kind
    if needed and _ABOUT_USER.search(before):
        return Kind.USER
    return Kind.WORDS


def whole_words(text: bytes, start: int, end: int) -> tuple[int, int]:
    """Widen a range to whole words: what differs between Anna and Anton is a name."""
    while start > 0 and _is_word(text[start - 1]) and (start == end or _is_word(text[start])):
        start -= 1
    while end < len(text) and _is_word(text[end]) and end > start and _is_word(text[end - 1]):
        end += 1
    return start, end


def _is_word(byte: int) -> bool:
    return 0x80 <= byte < 0xFF or (chr(byte).isalnum() and byte < 0x80) or byte in b"_"


def same_without_white_space(a: bytes, b: bytes) -> bool:
    """Whether two texts differ in white space only."""
    return without_white_space(a) == without_white_space(b)


def same_pieces(a: bytes, b: bytes) -> bool:
    """Whether two texts hold the same words in another order, as a set rendered twice does."""
    words = Counter(_WORD.findall(a))
    return len(words) > 1 and words == Counter(_WORD.findall(b))
