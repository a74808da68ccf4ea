"""The metrics page: our own families written row by row, everything else by `prometheus_client`."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from extproc.observe.families import Labels, Table

#: Enough to make a tenth of it; better levels take longer than sending what they save.
GZIP_LEVEL = 1

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def page(registry: Collector, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    """The page and its headers, as these request headers want it: text 0.0.4 or 1.0.0, or OpenMetrics."""
    encode, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    lines: list[str] = []
    others: list[Metric] = []
    for metric in registry.collect():
        if isinstance(metric, Table):
            _write(lines, metric, openmetrics)
        else:
            others.append(metric)
    body = "".join(lines).encode() + encode(_Given(others))
    headers = {"content-type": content_type}
    if "gzip" in accept_encoding:
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return body, headers


def _write(lines: list[str], table: Table, openmetrics: bool) -> None:
    name, kind, names = table.name, table.type, table.labels
    family = f"{name}_total" if kind == "counter" and not openmetrics else name
    text = table.documentation.translate(_ESCAPES if openmetrics else _HELP_ESCAPES)
    lines.append(f"# HELP {family} {text}\n# TYPE {family} {kind}\n")
    for suffix, values, value in table.rows:
        lines.append(f"{name}{suffix}{_labels(names, values)} {'+Inf' if value == inf else repr(value)}\n")


@lru_cache(maxsize=8192)
def _labels(names: Labels, values: Labels) -> str:
    """Mostly the same from scrape to scrape, and the same for all families of workers."""
    pairs = zip((*names, "le"), values, strict=False)
    text = ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs])
    return f"{{{text}}}" if text else ""


class _Given(Collector):
    """What was collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
