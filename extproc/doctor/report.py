"""A verdict for people, and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from extproc.doctor.check import Verdict
from extproc.doctor.finding import Finding, Place, Severity
from extproc.doctor.fleet import Fleet

#: Places of one finding that are shown; JSON has all of them.
SHOWN_PLACES = 6

_WIDTH = 110
_INDENT = "         "


def show(verdict: Verdict, fleet: Fleet) -> str:
    """All findings, and what was looked at."""
    lines = [line for finding in verdict.findings for line in (*_show(finding), "")]
    counts = Counter(finding.severity for finding in verdict.findings)
    if counts:
        told = ", ".join(f"{counts[s]} {s}{'s' if counts[s] > 1 else ''}" for s in Severity if counts[s])
    else:
        told = "nothing wrong"
    lines.append(f"{told} with {_workers(fleet)}, {verdict.looked_at} settings checked")
    lines += [f"not looked at: {reason}" for reason in left_out(fleet)]
    return "\n".join(lines)


def left_out(fleet: Fleet) -> list[str]:
    """What couldn't be judged, and why."""
    setup, reasons = fleet.setup, []
    if not setup.listening:
        reasons.append("listeners and routes (the file has none)")
    elif not setup.asking and setup.filters:
        reasons.append(
            "routes (none in sight asks the router; they come over the network, or ext_proc is off)"
        )
    if not fleet.workers:
        reasons.append("workers (none was asked)")
    if fleet.router is None:
        reasons.append("the running router (--server)")
    if fleet.envoy is None:
        reasons.append("the running Envoy (--envoy-admin)")
    return reasons


def as_json(verdict: Verdict, fleet: Fleet) -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "findings": [
            {
                "check": finding.check,
                "severity": str(finding.severity),
                "places": [_place(place) for place in finding.places],
                "found": finding.found,
                "value": finding.value,
                "why": finding.why,
                "fix": finding.fix,
            }
            for finding in verdict.findings
        ],
        "workers": len(fleet.workers),
        "settings_checked": verdict.looked_at,
        "not_looked_at": left_out(fleet),
    }


def _workers(fleet: Fleet) -> str:
    if not fleet.workers:
        count = sum(len(pool.endpoints) for pool in fleet.setup.config.pools.values())
        return f"a fleet of {count} workers"
    return f"{len(fleet.workers)} worker{'s' if len(fleet.workers) > 1 else ''}"


def _place(place: Place) -> dict[str, Any]:
    fields = ("file", "line", "path", "pool", "worker", "url")
    return {name: value for name in fields if (value := getattr(place, name))}


def _show(finding: Finding) -> list[str]:
    places = [str(place) for place in finding.places[:SHOWN_PLACES]]
    if len(finding.places) > SHOWN_PLACES:
        places.append(f"and {len(finding.places) - SHOWN_PLACES} more")
    lines = [f"{finding.severity:<8} {places[0]}", *(_INDENT + place for place in places[1:])]
    for label, text in (("", finding.found), ("why: ", finding.why), ("fix: ", finding.fix)):
        lines += textwrap.wrap(
            label + _printable(text),
            _WIDTH,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT + " " * len(label),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _printable(text: str) -> str:
    """Without what a terminal would take for commands: some of it was said by servers."""
    return "".join(character if character.isprintable() else "?" for character in text)
