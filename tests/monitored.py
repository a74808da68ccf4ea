"""The expressions of monitoring/: what alerts, recording rules and panels ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[1] / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana" / "dashboards" / "extproc.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?(\[[^\]]*\])?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
#: Of PromQL, as far as it is used.
_WORDS = {
    *("abs", "absent", "avg", "avg_over_time", "count", "histogram_quantile", "increase", "max", "min"),
    *("rate", "sqrt", "sum", "time", "and", "by", "on", "or", "unless", "without"),
}


@dataclass(frozen=True)
class Expression:
    """``where``: for messages. ``kind``: alert, record or panel; ``unit`` is a panel's."""

    where: str
    kind: str
    text: str
    unit: str = ""


def expressions() -> Iterator[Expression]:
    """All of them; panels' variables stand for everything, their intervals for ``10s``."""
    for rule in RULES:
        kind = "alert" if "alert" in rule else "record"
        yield Expression(rule[kind], kind, rule["expr"])
    for panel in PANELS:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "10s")
            text = text.replace("$pool", ".*").replace("$worker", ".*")
            yield Expression(f"{panel['title']} {target['refId']}", "panel", text, unit)


@dataclass(frozen=True)
class Selector:
    """``matchers``: label to the value or pattern that is asked for."""

    name: str
    matchers: dict[str, str]
    text: str


def selectors(expression: str) -> list[Selector]:
    """The series that an expression reads."""
    found = []
    for name, braces, _ in _SELECTOR.findall(_GROUPING.sub(" ", expression)):
        if name not in _WORDS:
            matchers = dict(re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', braces))
            found.append(Selector(name, matchers, name + braces))
    return found


def grouped_by(expression: str) -> set[str]:
    """The labels that an expression groups or joins by."""
    return {label.strip() for labels in _GROUPING.findall(expression) for label in labels.split(",")} - {""}
