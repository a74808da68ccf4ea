"""Values of Envoy's fields as they stand in YAML: durations, flags, counts."""

from __future__ import annotations

import re

from extproc.envoyconf.document import Node

_DURATION = re.compile(r"^(-?\d+(?:\.\d*)?|\.\d+)s$")


def seconds(node: Node) -> float | None:
    """A protobuf Duration (``"0.25s"``); None where it is unset or none."""
    match = _DURATION.match(node.value) if isinstance(node.value, str) else None
    return float(match.group(1)) if match else None


def flag(node: Node) -> bool:
    """A boolean; unset is false."""
    return node.value is True or node.value == "true"


def count(node: Node) -> int | None:
    """An unsigned integer, also as text; None where it is unset or none."""
    value = node.value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def enum(node: Node, names: tuple[str, ...]) -> str:
    """The name of an enum's value, which may stand as a number; the first name where it is unset."""
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    return value if isinstance(value, str) else names[0]


def texts(node: Node) -> list[str]:
    """The strings of a list; none where there is no list."""
    return [item.value for item in node.items() if isinstance(item.value, str)]


def told(node: Node, default: str = "") -> str:
    """A value for people: ``is 100``, or that it is unset and what holds then."""
    if node.value is None:
        return f"is unset, so {default}" if default else "is unset"
    value = node.value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"is {text if len(text) <= 80 else text[:77] + '...'}"
