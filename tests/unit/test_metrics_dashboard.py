"""The Grafana dashboard and the alerts as files: whole, and in step with what is exported."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from monitored import DASHBOARD, MONITORING, PANELS, RULES, expressions, grouped_by, selectors
from prometheus_client import CollectorRegistry

from extproc.observe.engines import EngineObserver
from extproc.observe.metrics import Metrics
from extproc.routing.health import State

#: Prometheus' own, and the labels that it gives to what it scrapes.
FROM_PROMETHEUS = {"up", "scrape_duration_seconds"}
FROM_SCRAPING = {"job", "instance"}


def exported() -> dict[str, set[str]]:
    """Every series' name to its labels."""
    names: dict[str, set[str]] = {name: set() for name in FROM_PROMETHEUS}
    names |= {"process_cpu_seconds_total": set(), "process_resident_memory_bytes": set()}
    for family in (*Metrics().families, *EngineObserver(CollectorRegistry()).families):
        labels = set(family.labels)
        match family.kind:
            case "histogram":
                names |= {f"{family.name}_bucket": labels | {"le"}}
                if family.name != "extproc_ttft_error_seconds":  # of differences: buckets alone
                    names |= {f"{family.name}_sum": labels, f"{family.name}_count": labels}
            case "summary":
                names |= {f"{family.name}_sum": labels, f"{family.name}_count": labels}
            case _:
                names |= {family.full_name: labels}
    for rule in RULES:
        if "record" in rule:
            names[rule["record"]] = {"pool"}
    return names


def test_every_name_and_label_that_is_asked_for_is_exported() -> None:
    names = exported()
    for expression in expressions():
        asked = selectors(expression.text)
        assert asked, expression
        available = set(FROM_SCRAPING)
        for selector in asked:
            assert selector.name in names, f"{expression.where}: nobody exports {selector.name}"
            labels = names[selector.name] | FROM_SCRAPING
            assert set(selector.matchers) <= labels, f"{expression.where}: {selector.text}"
            available |= labels
            for state in selector.matchers.get("state", "").split("|"):
                assert state in {"", *State}
        assert grouped_by(expression.text) <= available, expression.where


def test_every_family_is_to_be_seen_somewhere() -> None:
    asked = {selector.name for expression in expressions() for selector in selectors(expression.text)}
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    families = {
        family.full_name for family in (*Metrics().families, *EngineObserver(CollectorRegistry()).families)
    }
    # For who reads the page itself; the panels show rates, and whether the newest configuration is in force.
    assert families - bases - asked == {
        "extproc_engine_hit_ratio",
        "extproc_config_reloads_total",
        "extproc_state_saves_total",
        "extproc_state_last_save_timestamp_seconds",
    }


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("dashboard", MONITORING / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_its_source_writes() -> None:
    module = generator()
    assert module.FILE.read_text() == module.text(), "python monitoring/dashboard.py"


def test_grafana_finds_what_it_needs() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert DASHBOARD["uid"] == "extproc"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "pool", "worker"]  # each may use those before it
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] in ("timeseries", "stat", "heatmap")
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= {"pool", "worker", "__rate_interval"}
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= grouped_by(target["expr"]) | FROM_SCRAPING | {"version", "python"}, target
    titles = [panel["title"] for panel in panels]
    assert titles.count("Busiest over mean") == 2  # a number, and its history
    assert len(set(titles)) == len(titles) - 1


def test_every_panel_says_what_is_good_and_what_to_do() -> None:
    for panel in PANELS:
        text = panel["description"]
        assert len(text) >= 20, panel["title"]
        assert text.endswith("."), panel["title"]


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, two in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= two["x"]
            or two["x"] + two["w"] <= one["x"]
            or one["y"] + one["h"] <= two["y"]
            or two["y"] + two["h"] <= one["y"]
        )
        assert apart, (one, two)


def provisioned(kind: str) -> Any:
    (file,) = (MONITORING / "grafana" / "provisioning" / kind).iterdir()
    return yaml.safe_load(file.read_text())


def test_provisioning_points_at_what_compose_mounts() -> None:
    compose = yaml.safe_load((MONITORING.parent / "docker-compose.yml").read_text())
    services = compose["services"]
    (source,) = provisioned("datasources")["datasources"]
    assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)
    assert source["url"] == "http://prometheus:9090"
    (provider,) = provisioned("dashboards")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    assert mounts["./monitoring/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == provider["options"]["path"] + "/extproc.json"
    mounts |= dict(mount.split(":")[:2] for mount in services["prometheus"]["volumes"])
    assert (
        Path(mounts["./monitoring/prometheus.yml"]).parent == Path(mounts["./monitoring/alerts.yml"]).parent
    )
    for mount in mounts:
        assert (MONITORING.parent / mount).exists(), mount


def test_compose_profile_observe_is_apart_and_for_this_machine_only() -> None:
    compose = yaml.safe_load((MONITORING.parent / "docker-compose.yml").read_text())
    for name in ("prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"] == ["observe"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert all(mount.endswith(":ro") for mount in service["volumes"] if mount.startswith("./"))
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), "pinned"
        assert "healthcheck" in service
    environment = compose["services"]["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "extproc"
    assert set(job["dns_sd_configs"][0]["names"]) <= set(compose["services"])
