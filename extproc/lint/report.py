"""Findings for people, within 100 columns, and as JSON. Text of prompts only where it was asked for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from extproc.lint.costs import Rate
from extproc.lint.findings import Finding
from extproc.lint.kinds import ADVICE, Kind
from extproc.lint.linter import Linter
from extproc.lint.text import Place

_COLUMNS = 100
_LABEL = 10
_NAMED_TENANTS = 3

#: Roles that are shown; others are a client's own words.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def show(linter: Linter, findings: Sequence[Finding], rate: Rate) -> str:
    """Everything for a terminal."""
    totals = linter.totals
    lines = [
        f"{_many(totals.requests, 'request')}, {totals.tokens:,} prompt tokens,"
        f" {_share(totals.hit_tokens, totals.tokens)} of them cached when their request comes;"
        f" {_many(linter.families, 'template')}"
    ]
    if totals.bad_lines:
        lines.append(f"{_many(totals.bad_lines, 'line')} could not be used:")
        lines += [f"  {bad.file}:{bad.line}: {bad.why}" for bad in totals.named_bad_lines]
        if totals.bad_lines > len(totals.named_bad_lines):
            lines.append(f"  … and {totals.bad_lines - len(totals.named_bad_lines):,} more")
    if linter.forgotten:
        lines.append(
            f"compared with the last {linter.remembered:,} prompts only (--memory-mb);"
            " faults in slow traffic may be missed"
        )
    faults = [f for f in findings if not f.hint]
    lost = sum(f.tokens for f in faults)
    lines.append(
        f"{_many(len(faults), 'fault')}: {lost:,} tokens lost here, {_share(lost, totals.tokens)} of all"
        if faults
        else "no prompt breaks its own caching"
    )
    if findings:
        lines.append(
            f"costs per {rate.unit} ({rate.why}) at {rate.prefill_tokens_per_s:,.0f} prefill tokens/s"
        )
    for number, finding in enumerate(findings, 1):
        lines += ["", *_finding(number, finding, rate)]
    return "\n".join(wrapped for line in lines for wrapped in _wrap(line))


def as_json(linter: Linter, findings: Sequence[Finding], rate: Rate) -> dict[str, Any]:
    """Everything for programs; ``version`` changes when a field changes its meaning."""
    totals = linter.totals
    return {
        "version": 1,
        "requests": totals.requests,
        "prompt_tokens": totals.tokens,
        "cached_tokens": totals.hit_tokens,
        "templates": linter.families,
        "prompts_remembered": linter.remembered,
        "prompts_forgotten": linter.forgotten,
        "bad_lines": totals.bad_lines,
        "bad_lines_named": [
            {"file": bad.file, "line": bad.line, "why": bad.why} for bad in totals.named_bad_lines
        ],
        "per": rate.unit,
        "scaled_by": rate.why,
        "prefill_tokens_per_s": rate.prefill_tokens_per_s,
        "findings": [
            {
                "kind": finding.kind.value,
                "also": [kind.value for kind in finding.also],
                "severity": "hint" if finding.hint else "fault",
                "family": finding.family,
                "message": finding.place.message,
                "role": _role(finding.place),
                "part": finding.place.part,
                "char": finding.place.char,
                "token": finding.place.token,
                "in_history": finding.in_history,
                "requests": finding.requests,
                "requests_losing": finding.losing,
                "values": finding.values,
                "lost_tokens": finding.tokens,
                "behind_tokens": finding.behind_tokens,
                "share": round(finding.share, 4),
                "tokens_per_unit": round(rate.tokens(finding.tokens)),
                "ms_per_unit": round(rate.ms(finding.tokens)),
                "lines": list(finding.where),
                "tenants": list(finding.tenants),
                "fix": ADVICE[finding.kind].fix,
            }
            | ({"text": list(finding.example)} if finding.example else {})
            for finding in findings
        ],
    }


def _finding(number: int, finding: Finding, rate: Rate) -> list[str]:
    title = f"{'hint' if finding.hint else 'fault'} {number}: {ADVICE[finding.kind].title}"
    tokens, ms = rate.tokens(finding.tokens), rate.ms(finding.tokens)
    cost = f"{tokens:,.0f} tokens, {ms:,.0f} ms of prefill per {rate.unit}"
    if finding.behind_tokens > finding.tokens:
        more = rate.tokens(finding.behind_tokens - finding.tokens)
        cost += f"; {more:,.0f} more lie behind it, to be had once the faults behind it are mended too"
    rows = [
        ("where", _where(finding)),
        (
            "who",
            f"family {finding.family}: {finding.losing:,} of {finding.requests:,} requests lose by it,"
            f" {finding.share:.0%} of their tokens; {finding.values:,} different values{_tenants(finding)}",
        ),
        ("cost", cost),
        ("compare", " and ".join(finding.where)),
        ("fix", ADVICE[finding.kind].fix),
    ]
    if finding.also:
        beside = ", ".join(ADVICE[kind].title.lower() for kind in finding.also)
        rows.insert(1, ("beside it", beside))
    if finding.example:
        rows += [("text", repr(text)) for text in finding.example if text]
    return [title, *(f"  {label:<{_LABEL}}{text}" for label, text in rows)]


def _where(finding: Finding) -> str:
    place = finding.place
    if finding.kind in (Kind.SALT, Kind.MODEL):
        return f"the request's `{place.part}`"
    if place.message < 0:
        where = place.part
    elif finding.in_history and place.role not in ("system", "developer"):
        where = f"earlier turns, here message {place.message} ({_role(place)}), {place.part}"
    else:
        where = f"message {place.message} ({_role(place)}), {place.part}"
    unit = "id" if place.part == "token ids" else "character"
    return f"{where}, {unit} {place.char:,}; token {place.token:,} of the prompt"


def _role(place: Place) -> str:
    if place.message < 0:
        return ""
    return place.role if place.role in _ROLES else "other"


def _tenants(finding: Finding) -> str:
    tenants = finding.tenants
    if not tenants:
        return ""
    named = ", ".join(tenants[:_NAMED_TENANTS])
    more = len(tenants) - _NAMED_TENANTS
    return f"; tenants {named}{f' and {more:,} more' if more > 0 else ''}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _wrap(line: str) -> list[str]:
    if len(line) <= _COLUMNS:
        return [line]
    indent = " " * (2 + _LABEL) if line.startswith("  ") else "  "
    return textwrap.wrap(
        line, _COLUMNS, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False
    )
