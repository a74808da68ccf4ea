"""The metrics page: our own families written row by row, everything else by `prometheus_client`."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from math import inf

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from extproc.observe.families import Labels, Table

#: Enough to make a tenth of it; better levels take longer than sending what they save.
GZIP_LEVEL = 1

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
_OPENMETRICS_HELP_ESCAPES = _ESCAPES


def page(registry: Collector, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    """The page and its headers, as these request headers want it: text 0.0.4 or 1.0.0, or OpenMetrics."""
    encode, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    lines: list[str] = []
    others: list[Metric] = []
    texts: dict[Labels, dict[Labels, str]] = {}
    for metric in registry.collect():
        if isinstance(metric, Table):
            _write(lines, metric, texts.setdefault(metric.labels, {}), openmetrics)
        else:
            others.append(metric)
    body = "".join(lines).encode() + encode(_Given(others))
    headers = {"content-type": content_type}
    if "gzip" in accept_encoding:
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return body, headers


def _write(lines: list[str], table: Table, texts: dict[Labels, str], openmetrics: bool) -> None:
    """``texts``: label texts made so far of these labels; all families of workers have the same."""
    name, kind, text = table.name, table.type, table.documentation
    family = f"{name}_total" if kind == "counter" and not openmetrics else name
    text = text.translate(_OPENMETRICS_HELP_ESCAPES if openmetrics else _HELP_ESCAPES)
    lines.append(f"# HELP {family} {text}\n# TYPE {family} {kind}\n")
    for suffix, values, value in table.rows:
        labels = texts.get(values)
        if labels is None:
            labels = texts[values] = _labels(table.labels, values)
        lines.append(f"{name}{suffix}{labels} {'+Inf' if value == inf else repr(value)}\n")


def _labels(names: Labels, values: Labels) -> str:
    pairs = zip((*names, "le"), values, strict=False)
    text = ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs])
    return f"{{{text}}}" if text else ""


class _Given(Collector):
    """What was collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
