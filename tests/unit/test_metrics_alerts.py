"""monitoring/alerts.yml by Prometheus' own tool: alerts fire when they should, and only then."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from needed import program

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "monitoring" / "alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
NAMES = {rule["alert"] for rule in RULES if "alert" in rule}

ONE, TWO = "10.0.0.1:8000", "10.0.0.2:8000"
STATES = ("healthy", "ejected", "not_ready", "returning")

Series = dict[str, str]


def states(worker: str, present: str) -> Series:
    name = 'extproc_worker_state{{pool="chat",worker="{}",state="{}"}}'
    return {name.format(worker, state): f"{int(state == present)}x30" for state in STATES}


def by_worker(name: str, one: str, two: str) -> Series:
    return {f'{name}{{pool="chat",worker="{worker}"}}': values for worker, values in ((ONE, one), (TWO, two))}


#: A minute a step: two workers, 60 requests a minute at each, 90 % cached, first tokens after 0.12 s.
HEALTHY: Series = {
    'up{job="extproc",instance="router:9090"}': "1x30",
    'extproc_pool_workers{pool="chat"}': "2x30",
    'extproc_panic{pool="chat"}': "0x30",
    **states(ONE, "healthy"),
    **states(TWO, "healthy"),
    **by_worker("extproc_picks_total", "0+60x30", "0+60x30"),
    **by_worker("extproc_moved_total", "0x30", "0x30"),
    **by_worker("extproc_prompt_tokens_total", "0+60000x30", "0+60000x30"),
    **by_worker("extproc_cached_tokens_total", "0+54000x30", "0+54000x30"),
    **by_worker("extproc_engine_prefix_query_tokens_total", "0+60000x30", "0+60000x30"),
    **by_worker("extproc_engine_prefix_hit_tokens_total", "0+53000x30", "0+53000x30"),
    **by_worker("extproc_engine_signal_age_seconds", "5x30", "9x30"),
    'extproc_overflow_total{pool="chat"}': "0x30",
    'extproc_shed_total{pool="chat",reason="load"}': "0x30",
    'extproc_predicted_ttft_seconds_sum{pool="chat"}': "0+12x30",
    'extproc_predicted_ttft_seconds_count{pool="chat"}': "0+120x30",
    'extproc_engine_ttft_seconds_sum{pool="chat"}': "0+14x30",
    'extproc_engine_ttft_seconds_count{pool="chat"}': "0+120x30",
    'extproc_config_last_reload_successful{instance="router:9090"}': "1x30",
    'extproc_internal_errors_total{instance="router:9090"}': "0x30",
}

GROWING = [name for name, values in HEALTHY.items() if "+" in values]

#: What differs from a healthy fleet, and the alerts that then fire within the hour (at minute 25).
SCENARIOS: dict[str, tuple[Series, set[str]]] = {
    "healthy": ({}, set()),
    "no traffic": (dict.fromkeys(GROWING, "1000x30"), set()),
    "nothing ever asked": (dict.fromkeys(GROWING, "0x30"), set()),
    "the router can't be read": ({'up{job="extproc",instance="router:9090"}': "0x30"}, {"RouterDown"}),
    "no router is known": ({'up{job="extproc",instance="router:9090"}': "_x30"}, {"RouterDown"}),
    "no worker": (
        {'extproc_pool_workers{pool="chat"}': "0x30"}
        | {name: "_x30" for name in HEALTHY if "worker=" in name},
        {"NoWorkers"},
    ),
    "all workers out, one after the other": (
        states(ONE, "ejected") | states(TWO, "not_ready"),
        {"NoWorkers", "WorkerEjected"},
    ),
    "panic": ({'extproc_panic{pool="chat"}': "1x30"}, {"Panic"}),
    "a worker that is tried now and then": (
        {
            f'extproc_worker_state{{pool="chat",worker="{ONE}",state="healthy"}}': "0x30",
            f'extproc_worker_state{{pool="chat",worker="{ONE}",state="ejected"}}': "1 1 1 0 " * 15,
            f'extproc_worker_state{{pool="chat",worker="{ONE}",state="returning"}}': "0 0 0 1 " * 15,
        },
        {"WorkerEjected"},
    ),
    "a worker was out for a minute": (
        {
            f'extproc_worker_state{{pool="chat",worker="{ONE}",state="healthy"}}': "1x22 0x1 1x20",
            f'extproc_worker_state{{pool="chat",worker="{ONE}",state="ejected"}}': "0x22 1x1 0x20",
        },
        set(),
    ),
    "full": ({'extproc_overflow_total{pool="chat"}': "0+12x30"}, {"Overflow"}),
    "full for a moment": ({'extproc_overflow_total{pool="chat"}': "0x10 3x40"}, set()),
    "prompts that never repeat": (
        by_worker("extproc_cached_tokens_total", "0+600x30", "0+600x30")
        | by_worker("extproc_engine_prefix_hit_tokens_total", "0+600x30", "0+500x30"),
        {"LowHitRate"},
    ),
    "engines that hold less than thought": (
        by_worker("extproc_engine_prefix_hit_tokens_total", "0+30000x30", "0+30000x30"),
        {"LowHitRate"},
    ),
    "a few prompts that never repeat": (
        by_worker("extproc_picks_total", "0+1x30", "0+1x30")
        | by_worker("extproc_engine_prefix_hit_tokens_total", "0x30", "0x30"),
        set(),
    ),
    "first tokens much later than predicted": (
        {'extproc_engine_ttft_seconds_sum{pool="chat"}': "0+120x30"},
        {"PredictionOff"},
    ),
    "first tokens much sooner than predicted": (
        {'extproc_predicted_ttft_seconds_sum{pool="chat"}': "0+120x30"},
        {"PredictionOff"},
    ),
    "four times of next to nothing": (
        {'extproc_engine_ttft_seconds_sum{pool="chat"}': "0+24x30"}
        | {'extproc_predicted_ttft_seconds_sum{pool="chat"}': "0+6x30"},
        set(),
    ),
    "engines that don't tell": (
        {name: "_x30" for name in HEALTHY if name.startswith("extproc_engine")},
        set(),
    ),
    "one worker gets nearly all": (
        by_worker("extproc_picks_total", "0+119x30", "0+1x30")
        | {f'extproc_picks_total{{pool="chat",worker="10.0.0.{i}:8000"}}': "0x30" for i in (3, 4)},
        {"Imbalance"},
    ),
    "one worker gets three of four requests in ten minutes": (
        by_worker("extproc_picks_total", "0x20 3x30", "0x20 1x30")
        | {f'extproc_picks_total{{pool="chat",worker="10.0.0.{i}:8000"}}': "0x30" for i in (3, 4)},
        set(),
    ),
    "a page that can't be read": (
        by_worker("extproc_engine_signal_age_seconds", "0+60x30", "5x30"),
        {"SignalsStale"},
    ),
    "a page that was never read": (
        by_worker("extproc_engine_signal_age_seconds", "Inf " * 60, "5x30"),
        {"SignalsStale"},
    ),
    "a page that can't be read, of a worker that is out": (
        by_worker("extproc_engine_signal_age_seconds", "Inf " * 60, "5x30") | states(ONE, "ejected"),
        {"WorkerEjected"},
    ),
    "picks that Envoy doesn't use": (
        by_worker("extproc_moved_total", "0+10x30", "0+10x30"),
        {"PicksMoved"},
    ),
    "refusals": ({'extproc_shed_total{pool="chat",reason="load"}': "0+12x30"}, {"Shedding"}),
    "a broken file": (
        {'extproc_config_last_reload_successful{instance="router:9090"}': "0x30"},
        {"ReloadRefused"},
    ),
    "a fault": ({'extproc_internal_errors_total{instance="router:9090"}': "0x23 1x30"}, {"InternalErrors"}),
    "a fault a while ago": ({'extproc_internal_errors_total{instance="router:9090"}': "0x5 1x50"}, set()),
    "a second router says the same": (
        {
            name.replace("{", '{instance="second",', 1): values
            for name, values in HEALTHY.items()
            if name.startswith("extproc_engine") or "_state" in name or "pool_workers" in name
        },
        set(),
    ),
}


def test_every_alert_has_its_scenario_and_none_fires_in_peace() -> None:
    assert set().union(*(expected for _, expected in SCENARIOS.values())) == NAMES


def test_every_alert_says_what_it_is_and_where_to_read_on() -> None:
    paragraphs = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    for rule in RULES:
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["alert"] in paragraphs
    # The live view alone has this one: no metric has a label for each prefix.
    assert set(paragraphs) == NAMES | {"PrefixScattered"}


def promtool(*arguments: str | Path) -> str:
    command = [program("promtool", package="prometheus"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_prometheus_accepts_its_files() -> None:
    promtool("check", "rules", ALERTS)
    promtool("check", "config", ROOT / "monitoring" / "prometheus.yml")


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """All scenarios in one run, as the tool's own tests."""
    tests: list[Any] = []
    for name, (changes, expected) in SCENARIOS.items():
        series = {name: values for name, values in (HEALTHY | changes).items() if values != "_x30"}
        fire = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(expected)]
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "25m",
                        "exp_samples": fire,
                    }
                ],
            }
        )
    file = tmp_path / "alerts_test.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", file)
