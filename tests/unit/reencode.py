"""Random JSON spellings of the same request, for property tests."""

from __future__ import annotations

import json
import random
from typing import Any


class Unordered(dict[str, Any]):
    """An object whose key order the engine can't see; in a plain dict the order is part of the prompt."""


def encode(value: Any, rng: random.Random, *, duplicates: bool = True) -> bytes:
    """Return ``value`` as JSON with random white space, escapes, duplicate keys and (if free) key order."""
    return _encode(value, rng, duplicates).encode()


def _space(rng: random.Random) -> str:
    return "".join(rng.choices(" \t\r\n", k=rng.choice((0, 0, 1, 3))))


def _string(text: str, rng: random.Random) -> str:
    return '"' + "".join(_char(char, rng) for char in text) + '"'


def _char(char: str, rng: random.Random) -> str:
    if rng.random() < 0.7:
        return json.dumps(char, ensure_ascii=False)[1:-1]
    if char == "/":
        return "\\/"
    data = char.encode("utf-16-be")
    units = (int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2))
    return "".join(rng.choice(("\\u%04x", "\\u%04X")) % unit for unit in units)


def _encode(value: Any, rng: random.Random, duplicates: bool) -> str:
    if isinstance(value, dict):
        items = list(value.items())
        if isinstance(value, Unordered):
            rng.shuffle(items)
        members = [(key, _encode(item, rng, duplicates)) for key, item in items]
        if duplicates and isinstance(value, Unordered) and members and rng.random() < 0.2:
            # The last one wins; the one before has the same type, or a typed decoder may rightly object.
            members.insert(0, rng.choice(members))
        body = (_space(rng) + ",").join(
            f"{_space(rng)}{_string(key, rng)}{_space(rng)}:{_space(rng)}{text}" for key, text in members
        )
        return "{" + body + _space(rng) + "}"
    if isinstance(value, list):
        body = (_space(rng) + ",").join(_space(rng) + _encode(item, rng, duplicates) for item in value)
        return "[" + body + _space(rng) + "]"
    if isinstance(value, str):
        return _string(value, rng)
    return json.dumps(value)
