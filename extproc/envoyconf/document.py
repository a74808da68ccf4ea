"""YAML and JSON files as plain data, read the way Envoy reads them, with the way back to the line.

Envoy parses YAML with yaml-cpp and turns it into JSON for protobuf. So a plain scalar is a boolean, an
integer (decimal, ``0x`` or leading-zero octal) or else a string, decimals included; there are no dates, no
base-60 numbers and no underscores as in YAML 1.1. A mapping key tagged ``!ignore`` is left out with its
value; that is where files keep their anchors. Fields have two names, snake_case and lowerCamelCase.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from extproc.envoyconf.problems import ConfigError, Problem

Steps = tuple[str | int, ...]

_BOOL = re.compile(
    r"^(?:(y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON)|n|N|no|No|NO|false|False|FALSE|off|Off|OFF)$"
)
_INT = re.compile(r"^[-+]?(?:0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,21}|[1-9][0-9]{0,18})$")
_NULL = ("", "~", "null", "Null", "NULL")
_IDENTIFIER = re.compile(r"^[A-Za-z_@][\w@-]*$")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Composes nodes only; scalars are resolved here, by Envoy's rules."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content. ``root`` is the YAML node tree, for line numbers; None for JSON.

    A document may be a text inside of another one: ``inside`` tells where, ``lines_before`` how far down.
    """

    file: str
    data: Any
    root: yaml.Node | None = field(default=None, repr=False)
    inside: str = ""
    lines_before: int = 0

    @property
    def node(self) -> Node:
        """The cursor at the top of the document."""
        return Node(self, (), self.data)

    def line(self, path: Steps) -> int | None:
        """Line (from 1) of the last part of ``path`` that can be found; None for JSON."""
        if self.root is None:
            return None
        node, line = self.root, 1
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            line, node = found
        return line + self.lines_before


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a document: its value and the way to it."""

    document: Document
    path: Steps
    value: Any

    def get(self, *names: str) -> Node | None:
        """The node down this way of snake_case names (camelCase is found too); None if absent or null."""
        value, path = self.value, list(self.path)
        for name in names:
            if not isinstance(value, dict):
                return None
            key = name if name in value else camel(name)
            value = value.get(key)
            if value is None:
                return None
            path.append(key)
        return Node(self.document, tuple(path), value)

    def items(self, *names: str) -> Iterator[Node]:
        """The elements of the list down this way; nothing if there is no list."""
        node = self.get(*names)
        if node is not None and isinstance(node.value, list):
            for index, value in enumerate(node.value):
                yield Node(self.document, (*node.path, index), value)

    def field(self, *names: str) -> Node:
        """The node down this way; where there is none, the place where it would be, with the value None."""
        node = self
        for name in names:
            node = node.get(name) or Node(self.document, (*node.path, name), None)
        return node

    def mappings(self) -> Iterator[Node]:
        """Every mapping at or under this node, in document order; what anchors share is visited once."""
        seen: set[int] = set()
        stack = [self]
        while stack:
            node = stack.pop()
            value: Any = node.value
            if not isinstance(value, dict | list) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                yield node
                stack.extend(node.child(key) for key in reversed(value))
            else:
                stack.extend(node.child(index) for index in reversed(range(len(value))))

    def child(self, key: str | int) -> Node:
        """The element under exactly this key or index, which must exist."""
        return Node(self.document, (*self.path, key), self.value[key])

    def text(self, *names: str) -> str:
        """The string down this way; empty if there is none."""
        node = self.get(*names) if names else self
        return node.value if node is not None and isinstance(node.value, str) else ""

    @property
    def way(self) -> str:
        """The way to it as text."""
        shown = show_path(self.path)
        return f"{self.document.inside}: {shown}" if self.document.inside else shown

    def problem(self, message: str, fix: str = "", *, value: Any = None) -> Problem:
        """A problem at this place."""
        return Problem(self.document.file, self.way, value, message, fix, self.document.line(self.path))

    def unpack(self) -> tuple[str, Node]:
        """Type name (empty if it has none) and body of an ``Any``, also of a TypedStruct in it."""
        name = type_name(self.text("@type"))
        if name in ("xds.type.v3.TypedStruct", "udpa.type.v1.TypedStruct"):
            body = self.get("value") or Node(self.document, self.path, {})
            return type_name(self.text("type_url")), body
        return name, self


def type_name(url: str) -> str:
    """``envoy.a.v3.T`` of ``type.googleapis.com/envoy.a.v3.T``."""
    return url.rpartition("/")[2]


@functools.cache
def camel(name: str) -> str:
    """The proto3 JSON name of a field: ``loadAssignment`` of ``load_assignment``."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def show_path(path: Steps) -> str:
    """``a.b[2]["c.d"]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _IDENTIFIER.match(step):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step)}]"
    return text


def read(file: str) -> Document:
    """Read a ``.json`` file as JSON and any other as YAML. Raises ConfigError, never anything else."""
    return _read(file, first_only=True)[0]


def read_all(file: str) -> list[Document]:
    """All documents of a YAML file, at least one. Raises ConfigError."""
    return _read(file, first_only=False)


def _read(file: str, *, first_only: bool) -> list[Document]:
    try:
        content = Path(file).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise _refuse(
            file, f"can't be read: {error.strerror or error}", "check the path and its rights"
        ) from None
    except UnicodeDecodeError as error:
        raise _refuse(file, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    if not text.strip():
        raise _refuse(file, "is empty", "put an Envoy bootstrap or a list of xDS resources into it")
    try:
        return (
            [_read_json(file, text)]
            if file.endswith(".json")
            else _read_yaml(file, text, first_only=first_only)
        )
    except RecursionError:
        raise _refuse(file, "is nested too deeply") from None


def _read_json(file: str, text: str) -> Document:
    try:
        return Document(file, json.loads(text))
    except json.JSONDecodeError as error:
        raise _refuse(file, f"is not JSON: {error.msg}", line=error.lineno) from None
    except ValueError as error:
        raise _refuse(file, f"is not JSON: {error}") from None


def read_inside(node: Node) -> list[Document]:
    """The documents of a YAML text that stands in another document. Raises ConfigError."""
    documents = _read_yaml(node.document.file, node.value, first_only=False)
    line = node.document.line(node.path)  # of the key; a block's text begins on the next one
    return [replace(d, inside=node.way, lines_before=line or 0) for d in documents]


def _read_yaml(file: str, text: str, *, first_only: bool) -> list[Document]:
    documents = []
    try:
        loader = _Loader(text)
        try:
            while loader.check_node():
                root = loader.get_node()
                documents.append(Document(file, _Constructor(file).plain(root), root))
                if first_only:  # as Envoy does
                    break
        finally:
            loader.dispose()
        return documents or [Document(file, None)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise _refuse(file, f"is not YAML: {what}", line=None if mark is None else mark.line + 1) from None
    except ValueError as error:  # a character that YAML doesn't allow
        raise _refuse(file, f"is not YAML: {error}") from None


def _refuse(file: str, message: str, fix: str = "", line: int | None = None) -> ConfigError:
    return ConfigError([Problem(file, "", None, message, fix, line)], (file,))


class _Constructor:
    """YAML nodes to dicts, lists, strings, booleans, integers and None; what anchors share stays shared."""

    def __init__(self, file: str):
        self.file = file
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def plain(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if id(node) in self._done:
            return self._done[id(node)]
        if id(node) in self._open:
            raise _refuse(self.file, "has an anchor that contains itself", line=node.start_mark.line + 1)
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self.plain(item) for item in node.value]
        else:
            value = self._mapping(node)
        self._open.discard(id(node))
        self._done[id(node)] = value
        return value

    def _mapping(self, node: yaml.Node) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refuse(self.file, "has a key that is not a scalar", line=key.start_mark.line + 1)
            if key.tag == "!ignore":
                continue
            if _is_merge(key):
                plain = self.plain(value)
                # Of several mappings the first has the last word.
                for source in reversed(plain if isinstance(plain, list) else [plain]):
                    if isinstance(source, dict):
                        merged |= source
            else:
                own[key.value] = self.plain(value)
        return merged | own


def _is_merge(key: yaml.ScalarNode) -> bool:
    return key.value == "<<" and not key.style


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style:  # quoted or block
        return text
    if text in _NULL:
        return None
    if match := _BOOL.match(text):
        return match.group(1) is not None
    if _INT.match(text):
        sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text.lstrip("+"))
        octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "xX"
        return sign * int(digits, 8 if octal else 0)
    return text


def _child(node: yaml.Node, step: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        item = node.value[step]
        return item.start_mark.line + 1, item
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value == step and key.tag != "!ignore":
                return key.start_mark.line + 1, value
    return None
