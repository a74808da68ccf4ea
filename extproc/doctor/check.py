"""What a check is, and how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from extproc.doctor.finding import Finding, ranked
from extproc.doctor.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Check:
    """One rule. ``of`` picks what it looks at, ``judge`` says what is wrong with one of these; both are pure.

    ``about``: what it finds, for the table in docs/doctor.md.
    """

    name: str
    about: str
    of: Callable[[Fleet], Iterable[Any]]
    judge: Callable[[Any, Fleet], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, the worst first. ``looked_at``: how many things, each counted once for each check."""

    findings: tuple[Finding, ...]
    looked_at: int


def run(checks: Sequence[Check], fleet: Fleet) -> Verdict:
    """Apply every check to everything that it looks at."""
    findings: list[Finding] = []
    looked_at = 0
    for check in checks:
        for subject in check.of(fleet):
            looked_at += 1
            findings += [replace(found, check=check.name) for found in check.judge(subject, fleet)]
    return Verdict(tuple(ranked(findings)), looked_at)
