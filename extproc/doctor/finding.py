"""What a check says: how bad, where, what was found, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from extproc.envoyconf.document import Node


class Severity(StrEnum):
    """From worst to mildest.

    ERROR: requests fail, aren't steered, or can be steered by clients. WARNING: they will under load, after a
    failure, or for some prompts; or what the fleet tells is wrong. NOTE: a cost, or a guess worth a look.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a file, a worker of a pool, or a URL.

    ``line`` counts from 1; ``path`` leads to the node, also to one that is missing.
    """

    file: str = ""
    line: int | None = None
    path: str = ""
    pool: str = ""
    worker: str = ""
    url: str = ""

    def __str__(self) -> str:
        if self.file:
            where = self.file if self.line is None else f"{self.file}:{self.line}"
            return f"{where}  {self.path}" if self.path else where
        return f"worker {self.worker} of pool {self.pool}" if self.worker else self.url


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong, in one or more places.

    ``found`` says what is there, ``value`` is it as data (None: nothing). ``why`` is one sentence. ``fix`` is
    the line to write or the flag to set. ``check`` is filled in by whoever runs the check.
    """

    severity: Severity
    places: tuple[Place, ...]
    found: str
    why: str
    fix: str
    value: Any = None
    check: str = ""


def at(*nodes: Node) -> tuple[Place, ...]:
    """The places of nodes."""
    return tuple(
        Place(file=node.document.file, line=node.document.line(node.path), path=node.way) for node in nodes
    )


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, else in the order of the checks; the same word on several places is said once."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.severity, finding.found, finding.why, finding.fix)
        held = merged.get(key)
        if held is None:
            merged[key] = finding
        else:
            merged[key] = replace(held, places=tuple(dict.fromkeys((*held.places, *finding.places))))
    return sorted(merged.values(), key=lambda finding: _RANK[finding.severity])
