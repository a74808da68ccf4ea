"""What the pages that were fetched tell, beyond what `extproc.engine.exposition` reads of an engine's."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from extproc.doctor.fleet import Sample

#: Series of an engine's page that are read here.
_CACHE_INFO = "vllm:cache_config_info"
_PROMPTS = ("vllm:request_prompt_tokens_bucket", "sglang:prompt_tokens_histogram_bucket")
_STEPS = ("vllm:iteration_tokens_total_bucket",)

_VERSION = re.compile(r"/(\d+)\.(\d+)\.\d+[^/]*/")


def samples(page: str, *names: str) -> dict[str, list[Sample]]:
    """The series of these names, or all of them. Raises ValueError for what is no Prometheus text."""
    if names:
        page = "".join(line + "\n" for line in page.splitlines() if line.startswith(names))
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    return found


def engine_extras(page: str) -> tuple[dict[str, str], int, int]:
    """Labels of vLLM's ``cache_config_info``; two bounds, in tokens, by the histograms (0: unknown).

    The largest prompt had more tokens than the first, the largest step more than the second.
    """
    found = samples(page, _CACHE_INFO, *_PROMPTS, *_STEPS)
    info = found.get(_CACHE_INFO)
    return info[0][0] if info else {}, over(found, _PROMPTS), over(found, _STEPS)


def over(found: dict[str, list[Sample]], names: tuple[str, ...]) -> int:
    """The lower edge of the highest bucket that isn't empty; histograms of several ranks count as one."""
    counts: dict[float, float] = {}
    for name in names:
        for labels, value in found.get(name, ()):
            edge = float(labels.get("le", "nan"))
            counts[edge] = counts.get(edge, 0.0) + value
    lower, below, highest = 0.0, 0.0, 0.0
    for edge in sorted(edge for edge in counts if not math.isnan(edge)):
        if counts[edge] > below:
            highest = lower
        lower, below = edge, max(below, counts[edge])
    return int(highest)


def version(body: bytes) -> str | None:
    """Of ``/version``."""
    told = _object(body).get("version")
    return told if isinstance(told, str) else None


def models(body: bytes) -> tuple[tuple[str, ...], int | None]:
    """Names, sorted, and the longest sequence in tokens, of ``/v1/models``."""
    listed = _object(body).get("data")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    names = sorted(entry["id"] for entry in entries if isinstance(entry.get("id"), str))
    lengths = [entry["max_model_len"] for entry in entries if isinstance(entry.get("max_model_len"), int)]
    return tuple(names), max(lengths, default=None)


def server_info(body: bytes) -> tuple[str | None, int | None, bool | None]:
    """Version, ``chunked_prefill_size``, whether there is a radix cache: SGLang's ``/get_server_info``."""
    told = _object(body)
    size, off, name = (told.get(key) for key in ("chunked_prefill_size", "disable_radix_cache", "version"))
    return (
        name if isinstance(name, str) else None,
        size if isinstance(size, int) else None,
        not off if isinstance(off, bool) else None,
    )


def envoy_version(body: bytes) -> tuple[int, int] | None:
    """(major, minor), of Envoy's ``/server_info``: ``hash/1.40.0/Clean/RELEASE/BoringSSL``."""
    told = _object(body).get("version")
    match = _VERSION.search(told) if isinstance(told, str) else None
    return (int(match.group(1)), int(match.group(2))) if match else None


def envoy_stats(page: str) -> dict[str, int]:
    """Counters and gauges of Envoy's ``/stats``."""
    found = {}
    for line in page.splitlines():
        name, colon, value = line.rpartition(": ")
        if colon and value.isascii() and value.isdigit():
            found[name] = int(value)
    return found


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return told if isinstance(told, dict) else {}
