"""Writes grafana/dashboards/extproc.json, the Grafana dashboard: ``python monitoring/dashboard.py``.

A panel is a few lines here and fifty in Grafana's JSON. ``--check`` says whether the file is up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "grafana" / "dashboards" / "extproc.json"

#: Grafana 11's; newer versions bring it up to their own by themselves.
SCHEMA_VERSION = 39

Json = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
P = '{pool=~"$pool"}'
W = '{pool=~"$pool",worker=~"$worker"}'
#: The router's own process, whatever the job is called.
ROUTER = "and on (instance) extproc_build_info"
COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """``text``: what is good, what is bad, what to do. ``queries``: expression to legend. ``width`` of 24.

    ``red``: from here on it is bad; with ``red_below`` the other way round.
    """

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    low: float | None = 0.0
    high: float | None = None
    red: float | None = None
    red_below: float | None = None


def rate(counter: str, selector: str = P, window: str = "$__rate_interval") -> str:
    """How fast it grows."""
    return f"rate({counter}{selector}[{window}])"


def per_pool(counter: str, selector: str = P, window: str = "$__rate_interval") -> str:
    """All routers together."""
    return f"sum by (pool) ({rate(counter, selector, window)})"


def per_pick(counter: str) -> str:
    """Its share of the decisions."""
    return f"{per_pool(counter)} / {per_pool('extproc_picks_total')}"


def more(counter: str, selector: str = P) -> str:
    """How much it grew of late: for what happens seldom."""
    return f"increase({counter}{selector}[$__rate_interval])"


def engines(counter: str, selector: str = W, window: str = "$__rate_interval") -> str:
    """All engines together, each once, however many routers read it."""
    return f"sum by (pool) (max by (pool, worker) ({rate(counter, selector, window)}))"


def quantile(share: float, histogram: str, selector: str = P, by: str = "pool", how: str = "sum") -> str:
    """From buckets; ``how`` several routers' become one."""
    buckets = f"{how} by (le, {by}) ({rate(histogram + '_bucket', selector)})"
    return f"histogram_quantile({share}, {buckets})"


ESTIMATED = f"{per_pool('extproc_cached_tokens_total', W)} / {per_pool('extproc_prompt_tokens_total', W)}"
FOUND, LOOKED_UP = "extproc_engine_prefix_hit_tokens_total", "extproc_engine_prefix_query_tokens_total"
TOLD = f"{engines(FOUND)} / {engines(LOOKED_UP)}"
PICKS = f"sum by (pool, worker) ({rate('extproc_picks_total', W)})"
BUSIEST = f"max by (pool) ({PICKS}) / avg by (pool) ({PICKS})"
MEAN_SEEN = (
    f"max by (pool) ({rate('extproc_engine_ttft_seconds_sum')})"
    f" / max by (pool) ({rate('extproc_engine_ttft_seconds_count')})"
)
OUT = (
    "sum by (pool) (max by (pool, worker, state)"
    ' (extproc_worker_state{pool=~"$pool",state=~"ejected|not_ready"}))'
)

ROWS: dict[str, list[Panel]] = {
    "Does affinity work?": [
        Panel(
            "Cached, as engines say",
            "Share of prompt tokens that the engines found in their caches. Good: as high as the prompts"
            " allow; agents with long system prompts reach 0.9. Low, and the estimate too: prompts don't"
            " repeat, or break their own prefix (`extproc lint`). Low, and the estimate high: see the panel"
            " below.",
            {TOLD: "{{pool}}"},
            "percentunit",
            "stat",
            4,
            5,
            high=1.0,
            red_below=0.25,
        ),
        Panel(
            "Cached, as estimated",
            "Share of prompt tokens that the router thought cached at the workers that it chose. Good:"
            " within a few points of what the engines say.",
            {ESTIMATED: "{{pool}}"},
            "percentunit",
            "stat",
            4,
            5,
            high=1.0,
            red_below=0.25,
        ),
        Panel(
            "First token, mean",
            "Mean time to the first token by the engines' word. What is good is yours to say; what matters"
            " is how it changes.",
            {MEAN_SEEN: "{{pool}}"},
            "s",
            "stat",
            4,
            5,
        ),
        Panel(
            "Requests",
            "Requests a second that a worker was chosen for.",
            {per_pool("extproc_decisions_total"): "{{pool}}"},
            "reqps",
            "stat",
            4,
            5,
        ),
        Panel(
            "Workers out",
            "Workers that get no new prompts: ejected, or not ready by their own word. Good: 0. Else see"
            " the row Health.",
            {OUT: "{{pool}}"},
            "short",
            "stat",
            4,
            5,
            red=1.0,
        ),
        Panel(
            "Busiest over mean",
            "The busiest worker's share of the requests over the mean share. Good: below 1.5; affinity"
            " always costs a little evenness. Above 2 for long: one hot prefix, see the row Load.",
            {BUSIEST: "{{pool}}"},
            "none",
            "stat",
            4,
            5,
            red=2.0,
        ),
        Panel(
            "Cached share of prompt tokens",
            "Good: both lines high and close to each other. Engines far below the estimate: caches are"
            " smaller than thought, prefix caching is off, other clients use the workers, or several routers"
            " do; `extproc doctor` tells which. Engines above the estimate: harmless.",
            {TOLD: "{{pool}} engines", ESTIMATED: "{{pool}} estimated"},
            "percentunit",
            width=8,
            high=1.0,
        ),
        Panel(
            "Decisions by reason",
            "Good: mostly affinity once caches are warm. Much cold: new prompts. Much load or limit: too"
            " little capacity. Much spread: hot prompts get further copies. health: a prompt's worker is"
            " out.",
            {f"sum by (reason) ({rate('extproc_decisions_total')})": "{{reason}}"},
            "reqps",
            width=8,
            stacked=True,
        ),
        Panel(
            "Cached share by worker",
            "By the engines' word. Good: alike. One far below the others: it started lately, its cache is"
            " smaller, or other clients use it.",
            {f"max by (worker) ({rate(FOUND, W)}) / max by (worker) ({rate(LOOKED_UP, W)})": "{{worker}}"},
            "percentunit",
            width=8,
            high=1.0,
        ),
    ],
    "Time to the first token": [
        Panel(
            "Predicted and seen",
            "Predicted at each decision; seen by the engines' own histograms, for all their requests. Good:"
            " close to each other. Seen far above: the workers are slower than believed (see the learned"
            " speed), or others use them.",
            {
                quantile(0.5, "extproc_predicted_ttft_seconds"): "{{pool}} predicted p50",
                quantile(0.99, "extproc_predicted_ttft_seconds"): "{{pool}} predicted p99",
                quantile(0.5, "extproc_engine_ttft_seconds", how="max"): "{{pool}} seen p50",
                quantile(0.99, "extproc_engine_ttft_seconds", how="max"): "{{pool}} seen p99",
            },
            "s",
            width=12,
        ),
        Panel(
            "Seen",
            "How many first tokens came how late. Good: one dark band. Two bands: hits and misses; the"
            " upper one is what affinity is there to remove.",
            {f"max by (le) ({more('extproc_engine_ttft_seconds_bucket')})": "{{le}}"},
            "s",
            "heatmap",
            12,
        ),
        Panel(
            "Seen minus predicted",
            "Of requests that ended between two readings of a worker: the engine's mean less the predicted"
            " mean. Good: within 0.1 s of zero. Far above: slower than believed. Far below: faster, or"
            " cached beyond the estimate.",
            {
                quantile(0.1, "extproc_ttft_error_seconds"): "{{pool}} p10",
                quantile(0.5, "extproc_ttft_error_seconds"): "{{pool}} p50",
                quantile(0.9, "extproc_ttft_error_seconds"): "{{pool}} p90",
            },
            "s",
            low=None,
        ),
        Panel(
            "Mean by worker",
            "By the worker's own word. Good: alike. One far above: it is slower, queues, or short of KV"
            " cache (preemptions).",
            {
                f"max by (worker) ({rate('extproc_engine_worker_ttft_seconds_sum', W)})"
                f" / max by (worker) ({rate('extproc_engine_worker_ttft_seconds_count', W)})": "{{worker}}"
            },
            "s",
        ),
        Panel(
            "Whole answers",
            "From the decision to the end of the answer. Streams end with their last token, so this is"
            " mostly decoding.",
            {
                quantile(0.5, "extproc_request_duration_seconds", by="streamed"): "streamed {{streamed}} p50",
                quantile(
                    0.99, "extproc_request_duration_seconds", by="streamed"
                ): "streamed {{streamed}} p99",
            },
            "s",
        ),
    ],
    "Load and balance": [
        Panel(
            "In flight",
            "Requests from their decision to their end, by worker; exact. Good: well below the limit"
            " (max_inflight). All at the limit: the fleet is full.",
            {
                f"sum by (worker) (extproc_inflight_requests{W})": "{{worker}}",
                f"min(extproc_max_inflight_requests{W})": "limit",
            },
        ),
        Panel(
            "Prefill that waits",
            "Uncached prompt tokens that wait at each worker, by the router's account. Good: mostly near 0."
            " Growing everywhere: too few workers for cold prompts. Growing at one: a hot prefix.",
            {f"sum by (worker) (extproc_pending_prefill_tokens{W})": "{{worker}}"},
        ),
        Panel(
            "Requests by worker",
            "Good: within a factor of 2. One far above: a hot prefix; see it in `extproc top`. It gets more"
            " copies sooner with a lower spread_ms.",
            {f"sum by (worker) ({rate('extproc_picks_total', W)})": "{{worker}}"},
            "reqps",
        ),
        Panel(
            "Time spent in prefill",
            "Share of the workers' time that prefills take, as predicted. Good: below 0.7. Near 1 queues"
            " grow without bound: add workers, or refuse early (shed_after_ms).",
            {f"sum by (pool) (extproc_prefill_utilisation_ratio{P})": "{{pool}}"},
            "percentunit",
            red=0.9,
        ),
        Panel(
            "Prefill speed, as learned",
            "Uncached tokens a second, by worker. Good: steady and alike on equal GPUs. One far below: a"
            " slow GPU, another client, or decode load.",
            {f"max by (worker) (extproc_worker_prefill_tokens_per_second{W})": "{{worker}}"},
        ),
        Panel(
            "Busiest over mean",
            "As above, over time.",
            {BUSIEST: "{{pool}}"},
            "none",
            red=2.0,
        ),
    ],
    "Health": [
        Panel(
            "Workers by state",
            "Good: all healthy. ejected: it fails, and is tried again after a while; not_ready: its health"
            " page says so; returning: it gets a growing share of the requests.",
            {
                "sum by (state) (max by (pool, worker, state)"
                ' (extproc_worker_state{pool=~"$pool",worker=~"$worker"}))': "{{state}}"
            },
            stacked=True,
        ),
        Panel(
            "Ejections by cause",
            "Good: none. refused: nobody listens; silent, unresponsive: it hangs; unreached: Envoy's retry"
            " found another, mostly overload; error: 5xx; slow: far fewer tokens than usual.",
            {f"sum by (cause) ({more('extproc_ejections_total')})": "{{cause}}"},
        ),
        Panel(
            "Answers by status",
            "Good: 2xx. 4xx is the clients'. 5xx: a worker, or Envoy for it. none: the client gave up"
            " before any headers.",
            {f"sum by (status) ({rate('extproc_ended_total')})": "{{status}}"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Picks not used, retries",
            "Share of picks that Envoy sent elsewhere, and tries beyond the first for each request. Good:"
            " 0. Much: workers fail, or Envoy doesn't know the addresses that are picked (`extproc doctor`).",
            {
                per_pick("extproc_moved_total"): "{{pool}} not used",
                per_pick("extproc_retries_total"): "{{pool}} retries",
            },
            "percentunit",
            red=0.05,
        ),
        Panel(
            "Panic",
            "1: so many workers are out that all count as healthy. Good: 0. Look for what they have in"
            " common: network, rollout, a prompt that breaks engines.",
            {f"max by (pool) (extproc_panic{P})": "{{pool}}"},
            red=1.0,
            high=1.0,
        ),
        Panel(
            "Engines started anew, readings that failed",
            "Good: 0. A restart empties a cache. Readings fail by connection, timeout, status, size or"
            " content.",
            {
                f"sum by (reason) ({more('extproc_engine_scrape_failures_total')})": "{{reason}}",
                f"sum(max by (pool) ({more('extproc_engine_restarts_total')}))": "restarts",
            },
        ),
    ],
    "Refused and unsteered": [
        Panel(
            "Refused by reason",
            "Early 429 and 503. Good: 0, or what you configured admission for. load: too late for"
            " shed_after_ms; slo, timeout: the client's own bound; tenant: over its share; retry,"
            " retry_budget: retry storms; no_worker: an empty pool.",
            {f"sum by (reason) ({rate('extproc_shed_total')})": "{{reason}}"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Decided while all were full",
            "Share of decisions made while every worker was at its limit. Good: 0. Add workers, or raise"
            " max_inflight if the engines do have room.",
            {per_pick("extproc_overflow_total"): "{{pool}}"},
            "percentunit",
            red=0.01,
        ),
        Panel(
            "Prompts that can't be read",
            "Routed by load alone. Good: 0. unknown_path: the filter sees requests that have no prompt;"
            " encoded: compressed bodies; incomplete: longer than Envoy's buffer; bad_json: the engine will"
            " refuse it, too.",
            {f"sum by (reason) ({rate('extproc_unreadable_total')})": "{{reason}}"},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Left to Envoy",
            "Requests that the router had no opinion on. Good: 0. no_pool: a route whose cluster is no"
            " pool; no_worker: an empty pool.",
            {f"sum by (reason) ({rate('extproc_unrouted_total', '')})": "{{reason}}"},
            "reqps",
            stacked=True,
        ),
    ],
    "Engines": [
        Panel(
            "Running and waiting",
            "By the engines' word, seconds old. Good: nobody waits for long. Running far above what is in"
            " flight: other clients.",
            {
                f"sum(max by (pool, worker) (extproc_engine_running_requests{W}))": "running",
                f"sum(max by (pool, worker) (extproc_engine_waiting_requests{W}))": "waiting",
            },
        ),
        Panel(
            "KV cache in use",
            "Share that running requests hold; what is merely cached doesn't count. Good: below 0.9. At 1"
            " the engine preempts.",
            {f"max by (worker) (extproc_engine_kv_usage_ratio{W})": "{{worker}}"},
            "percentunit",
            high=1.0,
            red=0.95,
        ),
        Panel(
            "Picture of the caches",
            "Tokens that the router thinks each worker holds, over what its cache can hold. Full is normal:"
            " a cache keeps what it can. It may go a little beyond 1, as estimated tokens aren't the"
            " engine's.",
            {
                f"max by (worker) (extproc_cache_picture_tokens{W})"
                f" / max by (worker) (extproc_engine_cache_tokens{W})": "{{worker}}"
            },
            "percentunit",
        ),
        Panel(
            "Preemptions",
            "Requests put back for want of KV cache, to be prefilled again. Good: 0. Else lower"
            " max_inflight, or give the engines more memory.",
            {f"max by (worker) ({rate('extproc_engine_preemptions_total', W)})": "{{worker}}"},
        ),
        Panel(
            "Tokens generated",
            "By the engines' word, tokens a second. Even under affinity it should be spread alike.",
            {f"max by (worker) ({rate('extproc_engine_generation_tokens_total', W)})": "{{worker}}"},
            stacked=True,
        ),
        Panel(
            "Age of what engines told",
            "Good: below the scrape interval (10 s) and a little. Growing: the worker's metrics can't be"
            " read; routing goes on, restarts and cache sizes aren't seen.",
            {f"min by (worker) (extproc_engine_signal_age_seconds{W})": "{{worker}}"},
            "s",
            red=120.0,
        ),
    ],
    "What the router costs": [
        Panel(
            "Time for one request",
            "Reading the body, hashing the prompt, deciding; wall time. Good: each below 1 ms. Long tails"
            " in all three: the process gets too little CPU.",
            {
                quantile(0.5, "extproc_stage_seconds", "", "stage"): "{{stage}} p50",
                quantile(0.99, "extproc_stage_seconds", "", "stage"): "{{stage}} p99",
            },
            "s",
        ),
        Panel(
            "CPU",
            "Cores in use; the router has one. Good: below 0.7. At 1 answers come late, and Envoy goes on"
            " without them.",
            {f"rate(process_cpu_seconds_total[$__rate_interval]) {ROUTER}": "{{instance}}"},
            "none",
            red=0.9,
        ),
        Panel(
            "Memory",
            "Resident. Good: flat once the caches' picture is full.",
            {f"process_resident_memory_bytes {ROUTER}": "{{instance}}"},
            "bytes",
        ),
        Panel(
            "Open streams",
            "One for each request that Envoy asked about. Good: equal to what is in flight. Far above:"
            " requests that aren't routed, or streams that never end.",
            {
                "sum(extproc_open_streams)": "streams",
                f"sum(extproc_inflight_requests{W})": "in flight",
            },
        ),
        Panel(
            "Request bodies",
            "Sizes. Envoy buffers whole bodies: the largest must fit its buffer limit, else prompts are"
            " incomplete.",
            {
                quantile(0.5, "extproc_request_body_bytes"): "{{pool}} p50",
                quantile(0.99, "extproc_request_body_bytes"): "{{pool}} p99",
            },
            "bytes",
        ),
        Panel(
            "Faults, refused configurations",
            "Good: 0. A refused configuration leaves the old one in force; the log says what is wrong."
            " Faults are ours: please report them.",
            {
                f"sum by (instance) ({more('extproc_internal_errors_total', '')})": "{{instance}} faults",
                "1 - min by (instance) (extproc_config_last_reload_successful)": "{{instance}} refused",
                f"sum by (instance) ({more('extproc_dns_failures_total', '')})": "{{instance}} DNS",
            },
            red=1.0,
        ),
        Panel(
            "Age of the configuration",
            "Since the configuration in force was taken; also changed DNS answers count. Short again and"
            " again: names that flap.",
            {"time() - extproc_config_last_reload_success_timestamp_seconds": "{{instance}}"},
            "s",
        ),
        Panel(
            "Scrape",
            "What reading this page took Prometheus. Good: below 50 ms with 128 workers.",
            {f"scrape_duration_seconds {ROUTER}": "{{instance}}"},
            "s",
        ),
        Panel(
            "Versions",
            "Routers by version. Good: one.",
            {"count by (version, python) (extproc_build_info)": "{{version}}, Python {{python}}"},
        ),
    ],
}


def dashboard() -> Json:
    """The whole."""
    return {
        "uid": "extproc",
        "title": "Prefix router",
        "description": "Does prefix affinity work, what does it cost, what breaks it.",
        "tags": ["extproc", "envoy", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[Json]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, query in (
        ("pool", "label_values(extproc_pool_workers, pool)"),
        ("worker", 'label_values(extproc_worker_state{pool=~"$pool"}, worker)'),
    ):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[Json]:
    number = y = 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        y += 1
        for line in _lines(panels):
            x = 0
            for panel in line:
                number += 1
                yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
                x += panel.width
            y += max(panel.height for panel in line)


def _lines(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Panels from left to right, as many as fit."""
    line: list[Panel] = []
    for panel in panels:
        if sum(each.width for each in line) + panel.width > COLUMNS:
            yield line
            line = []
        line.append(panel)
    yield line


def _panel(panel: Panel, number: int, place: Json) -> Json:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": expression,
            "legendFormat": legend,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            "range": True,
            "instant": False,
        }
        for index, (expression, legend) in enumerate(panel.queries.items())
    ]
    defaults: Json = {"unit": panel.unit, "thresholds": _thresholds(panel)}
    if panel.low is not None:
        defaults["min"] = panel.low
    if panel.high is not None:
        defaults["max"] = panel.high
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.red is not None else "off"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": targets,
    }


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.red is not None:
        steps.append({"color": "red", "value": panel.red})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return {"mode": "absolute", "steps": steps}


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    "heatmap": {
        "calculate": False,
        "yAxis": {"unit": "s"},
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
        "tooltip": {"mode": "single", "yHistogram": False},
        "legend": {"show": True},
    },
}


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    """Write, or check."""
    if sys.argv[1:] == ["--check"]:
        same = FILE.exists() and FILE.read_text() == text()
        if not same:
            print(f"{FILE} is out of date: python monitoring/dashboard.py", file=sys.stderr)
        return int(not same)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
