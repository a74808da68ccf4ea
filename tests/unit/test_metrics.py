"""The metrics' families: what they count, how they are printed, what they forget; and docs/metrics.md."""

from __future__ import annotations

import gzip
from itertools import takewhile
from math import inf
from pathlib import Path

import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from extproc.engine.exposition import decode
from extproc.engine.report import EngineReport, first_tokens_by_bound, grown
from extproc.engine.state import EngineState, Target
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig
from extproc.fleet.settings import RouteOverrides
from extproc.observe import events
from extproc.observe.engines import EngineObserver
from extproc.observe.families import Counter, Family, Gauge, Histogram, Summary, register
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.observe.page import page
from extproc.router import Router, Routing

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.fixture(autouse=True)
def _quiet():
    """Decision records are of no use here."""
    with structlog.testing.capture_logs():
        yield


def all_families() -> list[Family]:
    return [*Metrics().families, *EngineObserver(CollectorRegistry()).families]


def show(families: list[Family], accept: str = "") -> str:
    registry = CollectorRegistry()
    register(registry, families)
    return page(registry, accept, "")[0].decode()


# --- the table and the names -------------------------------------------------------------------------


def test_documentation_shows_exactly_the_families():
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index("| metric | type | unit | labels | merge | meaning |")
    shown = list(takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    assert shown == [family.row for family in all_families()]


def test_names_say_unit_and_kind():
    names = [family.full_name for family in all_families()]
    assert len(set(names)) == len(names)
    for family in all_families():
        assert family.full_name.startswith("extproc_")
        assert not {"ms", "us", "kb", "mb", "percent", "milliseconds"} & set(family.full_name.split("_"))
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_info_total"))
        assert family.text.endswith(".")
        if family.kind in ("histogram", "summary"):
            assert family.unit
        if family.kind == "histogram":
            assert "worker" not in family.labels  # buckets for each worker of a fleet are too many


# --- families ----------------------------------------------------------------------------------------


def test_a_counter_shows_what_it_starts_with_and_what_it_counted():
    counter = Counter("c", "Text.", ("pool", "reason"), starts=lambda: [("a", "x"), ("a", "y")])
    counter.add(("a", "y"))
    counter.add(("b", "z"), 2.5)
    expected = {("a", "x"): 0.0, ("a", "y"): 1.0, ("b", "z"): 2.5}
    assert {labels: value for _, labels, value in counter.rows()} == expected
    assert "c_total 0.0" in show([Counter("c", "Text.")])


@given(st.lists(st.floats(0, 100) | st.sampled_from([0.1, 1.0, 10.0])))
def test_a_histogram_counts_each_value_where_prometheus_does(values):
    histogram = Histogram("h", "Text.", (), (0.1, 1.0, 10.0))
    for value in values:
        histogram.observe((), value)
    rows = {suffix + "".join(labels): value for suffix, labels, value in histogram.rows()}
    if values:
        for bound in (0.1, 1.0, 10.0):
            assert rows[f"_bucket{bound}"] == sum(value <= bound for value in values)
        assert rows["_bucket+Inf"] == rows["_count"] == len(values)
        assert rows["_sum"] == pytest.approx(sum(values))
    else:
        assert rows == {}


def test_a_histogram_of_differences_has_no_sum():
    histogram = Histogram("h", "Text.", (), (-1.0, 0.0, 1.0))
    histogram.observe((), -3.0)
    rows = {suffix + "".join(labels): value for suffix, labels, value in histogram.rows()}
    assert rows == {"_bucket-1.0": 1, "_bucket0.0": 1, "_bucket1.0": 1, "_bucket+Inf": 1}


def test_others_buckets_go_to_the_next_larger_of_ours():
    histogram = Histogram("h", "Text.", (), (0.1, 1.0))
    histogram.take_over((), {0.05: 1, 0.1: 2, 0.5: 4, 1.0: 8, 5.0: 16, inf: 32}, 99.0)
    rows = {suffix + "".join(labels): value for suffix, labels, value in histogram.rows()}
    assert rows == {"_bucket0.1": 3, "_bucket1.0": 15, "_bucket+Inf": 63, "_count": 63, "_sum": 99}


@pytest.mark.parametrize("accept", ["", "text/plain;version=1.0.0", OPENMETRICS, PROMETHEUS_3])
def test_the_page_says_what_the_library_would(accept):
    """Ours is written in another way, and must be the same to whoever reads it."""
    strange = 'a "quoted"\\\nname'
    families: list[Family] = [
        Counter("extproc_c", 'Text with "quotes", \\ and\nlines.', ("pool",), starts=lambda: [(strange,)]),
        Gauge("extproc_g", "Text.", (), "max", lambda: [((), True)]),
        Gauge("extproc_age_seconds", "Text.", ("pool", "worker"), "min", lambda: [(("é", "[::1]:80"), inf)]),
        Histogram("extproc_h_seconds", "Text.", ("pool",), (-0.5, 1e-05, 2e7), starts=lambda: [("a",)]),
        Summary("extproc_s_seconds", "Text.", ("pool",), starts=lambda: [("a",)]),
    ]
    registry = CollectorRegistry()
    register(registry, families)
    body, headers = page(registry, accept, "")
    openmetrics = headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics == ("openmetrics" in accept)
    parse = parse_openmetrics if openmetrics else parse_text
    theirs = (generate_openmetrics if openmetrics else generate_latest)(registry).decode()
    assert list(parse(body.decode())) == list(parse(theirs))
    if openmetrics:
        assert body.endswith(b"# EOF\n")


def test_a_zipped_page_is_the_same_page():
    registry = Metrics().registry
    names = ["extproc_internal_errors_total", "extproc_open_streams"]
    chosen = registry.restricted_registry(names)
    plain, _ = page(chosen, "", "deflate")
    zipped, headers = page(chosen, "", "deflate, gzip")
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(zipped) == plain
    assert {family.samples[0].name for family in parse_text(plain.decode())} == set(names)


# --- what a router counts ----------------------------------------------------------------------------


def config(workers: int, pools: tuple[str, ...] = ("chat",)) -> RouterConfig:
    endpoints = tuple(EndpointConfig(f"10.0.0.{i}", 8000, "c", 100) for i in range(workers))
    return RouterConfig({name: PoolConfig(name, endpoints) for name in pools})


class Rig:
    """A router with its metrics and, where readings are told, its engines'."""

    def __init__(self, first: RouterConfig) -> None:
        self.observer = Observer()
        self.router = Router(first, self.observer)
        self.engines = EngineObserver(self.observer.registry)
        self.observer.add(self.engines)
        self.targets: dict[tuple[str, str], Target] = {}
        self.observer.watch(lambda: self.router.pools)
        self.engines.watch(lambda: list(self.targets.values()))
        self._follow()

    def _follow(self) -> None:
        wanted = {(n, w.address): (p, w) for n, p in self.router.pools.items() for w in p.workers}
        self.targets = {key: self.targets.get(key) or Target(*wanted[key]) for key in wanted}

    def apply(self, new: RouterConfig) -> None:
        self.router.apply(new)
        self._follow()
        self.observer.tell(events.Reloaded("envoy.yaml", ()))

    def ask(self, text: str, now: float, *, pool: str = "chat", stream: bool = False) -> Routing:
        body = f'{{"prompt": "{text * 400}", "stream": {str(stream).lower()}}}'.encode()
        routed = self.router.route(RequestFacts(path="/v1/completions"), RouteOverrides(pool), body, now)
        assert isinstance(routed, Routing)
        return routed

    def serve(self, text: str, now: float, **options: bool) -> Routing:
        routed = self.ask(text, now, **options)
        self.router.responded(routed, routed.decision.worker.address, 1, 200, now + 0.5)
        self.router.ended(routed, now + 1.0)
        return routed

    def read(self, worker: str, report: EngineReport) -> None:
        target = self.targets["chat", worker]
        target.state = EngineState(report, 1.0, target.state.report, 0.5)
        self.engines.told(target)

    def value(self, name: str, **labels: str) -> float | None:
        return self.observer.registry.get_sample_value(name, labels)

    def sum(self, name: str) -> float:
        metrics = self.observer.registry.restricted_registry([name]).collect()
        return sum(sample.value for metric in metrics for sample in metric.samples)


def test_a_request_shows_in_every_family_that_it_concerns():
    rig = Rig(config(2))
    worker = rig.serve("Hello there. ", 1.0).decision.worker.address
    again = rig.serve("Hello there. ", 3.0, stream=True)
    assert again.decision.worker.address == worker
    tokens = again.decision.prompt_tokens
    assert rig.value("extproc_decisions_total", pool="chat", reason="affinity") == 1
    assert rig.value("extproc_picks_total", pool="chat", worker=worker) == 2
    assert rig.value("extproc_prompt_tokens_total", pool="chat", worker=worker) == 2 * tokens
    assert (
        rig.value("extproc_cached_tokens_total", pool="chat", worker=worker) == again.decision.cached_tokens
    )
    assert rig.sum("extproc_picks_total") == 2
    assert rig.value("extproc_predicted_ttft_seconds_count", pool="chat") == 2
    assert rig.value("extproc_request_body_bytes_count", pool="chat") == 2
    for stage in ("read", "hash", "decide"):
        assert rig.value("extproc_stage_seconds_count", stage=stage) == 2
    for streamed in ("true", "false"):
        assert rig.value("extproc_request_duration_seconds_sum", pool="chat", streamed=streamed) == 1.0
    assert rig.value("extproc_ended_total", pool="chat", status="2xx") == 2
    assert rig.value("extproc_shed_total", pool="chat", reason="load") == 0
    assert rig.value("extproc_unreadable_total", pool="chat", reason="bad_json") == 0


def test_tries_beyond_the_first_and_picks_that_were_not_used():
    rig = Rig(config(3))
    routed = rig.ask("Hello. ", 1.0)
    first, *_, third = [worker.address for worker in routed.decision.order]
    rig.router.responded(routed, third, 3, 200, 1.5)
    rig.router.ended(routed, 2.0)
    assert rig.value("extproc_retries_total", pool="chat") == 2
    assert rig.value("extproc_moved_total", pool="chat", worker=first) == 1
    assert rig.value("extproc_moved_total", pool="chat", worker=third) == 0


def test_the_state_file_and_the_configuration():
    rig = Rig(config(1))
    refused = True
    rig.observer.metrics.watch_config(lambda: refused)
    assert rig.value("extproc_config_last_reload_successful") == 0
    refused = False
    assert rig.value("extproc_config_last_reload_successful") == 1
    rig.observer.tell(events.StateNotSaved())
    assert rig.value("extproc_state_last_save_timestamp_seconds") == 0
    rig.observer.tell(events.StateSaved())
    for result in ("ok", "failed"):
        assert rig.value("extproc_state_saves_total", result=result) == 1
    assert rig.value("extproc_state_last_save_timestamp_seconds") > 1e9


def test_what_is_gone_leaves_nothing_behind():
    """Addresses churn; the page, and memory, must not grow with it."""
    rig = Rig(config(3, ("chat", "embed")))
    first = rig.observer.registry
    for round_number in range(5):
        endpoints = tuple(EndpointConfig(f"10.1.{round_number}.{i}", 8000, "c", 100) for i in range(3))
        late = rig.ask("Late. ", 1.0)
        rig.apply(RouterConfig({"chat": PoolConfig("chat", endpoints)}))
        rig.router.responded(late, late.decision.worker.address, 1, 200, 2.0)  # its worker is gone already
        rig.router.ended(late, 2.5)
        for worker in rig.router.pools["chat"].workers:
            rig.serve(f"Hello {worker.address}. ", 3.0)
            rig.read(
                worker.address, EngineReport("vllm", prefix_query_tokens=0.0, first_tokens=0.0, ttft_s=0.0)
            )
            rig.read(
                worker.address, EngineReport("vllm", prefix_query_tokens=9.0, first_tokens=1.0, ttft_s=1.0)
            )
    rig.apply(rig.router.config)
    body, _ = page(first, "", "")
    assert b"10.0.0." not in body
    assert b"10.1.3." not in body
    assert b"embed" not in body
    for family in (*rig.observer.metrics.families, *rig.engines.families):
        for values in (getattr(family, name, {}) for name in ("_values", "_cells", "_sums")):
            assert not [labels for labels in values if "embed" in labels or "10.1.3." in "".join(labels)]
    assert len(rig.engines._predicted_s) == 3


# --- what engines tell -------------------------------------------------------------------------------


def buckets(*counts: float) -> tuple[tuple[float, float], ...]:
    return tuple(zip((0.05, 0.1, 2.0, inf), counts, strict=True))


def test_engine_counters_go_on_over_a_restart():
    rig = Rig(config(1))
    (target,) = rig.targets.values()
    address = target.worker.address
    labels = {"pool": "chat", "worker": address}
    name = "extproc_engine_prefix_query_tokens_total"
    assert rig.value(name, **labels) == 0
    rig.read(address, EngineReport("vllm", prefix_query_tokens=1e6))  # what it did before we came
    assert rig.value(name, **labels) == 0
    rig.read(address, EngineReport("vllm", prefix_query_tokens=1e6 + 500))
    assert rig.value(name, **labels) == 500
    target.state = EngineState()  # as the scraper does for a new life
    rig.read(address, EngineReport("vllm", prefix_query_tokens=70.0))
    assert rig.value(name, **labels) == 500
    rig.read(address, EngineReport("vllm", prefix_query_tokens=100.0))
    assert rig.value(name, **labels) == 530
    rig.read(address, EngineReport("vllm"))  # not told this time
    rig.read(address, EngineReport("vllm", prefix_query_tokens=200.0))
    assert rig.value(name, **labels) == 530


def test_first_tokens_are_counted_in_the_pools_buckets():
    rig = Rig(config(2))
    one, two = (worker.address for worker in rig.router.pools["chat"].workers)
    for worker in (one, two):
        rig.read(worker, EngineReport("vllm", ttft_s=5.0, first_tokens=7.0, ttft_buckets=buckets(1, 2, 3, 7)))
    rig.read(one, EngineReport("vllm", ttft_s=6.0, first_tokens=10.0, ttft_buckets=buckets(2, 4, 5, 10)))
    rig.read(two, EngineReport("vllm", ttft_s=105.0, first_tokens=8.0, ttft_buckets=buckets(1, 2, 3, 8)))
    name = "extproc_engine_ttft_seconds"
    counts = {bound: rig.value(f"{name}_bucket", pool="chat", le=bound) for bound in ("0.04", "0.06", "0.1")}
    assert counts == {"0.04": 0, "0.06": 1, "0.1": 2}  # ours below 0.05, at 0.05's next larger, at 0.1
    assert rig.value(f"{name}_bucket", pool="chat", le="2.5") == 2
    assert rig.value(f"{name}_count", pool="chat") == 4
    assert rig.value(f"{name}_sum", pool="chat") == 101
    assert rig.value("extproc_engine_worker_ttft_seconds_sum", pool="chat", worker=two) == 100
    assert rig.value("extproc_engine_worker_ttft_seconds_count", pool="chat", worker=one) == 3


@pytest.mark.parametrize(
    "later",
    [None, buckets(2, 1, 4, 8), ((0.05, 9.0), (inf, 9.0))],
    ids=["missing", "one went back", "other bounds"],
)
def test_buckets_that_do_not_fit_are_left_out(later):
    before = EngineReport("vllm", ttft_buckets=buckets(1, 2, 3, 7))
    assert first_tokens_by_bound(before, EngineReport("vllm", ttft_buckets=later)) is None


def test_growth_is_unknown_rather_than_negative():
    before, after = EngineReport(preemptions=5.0), EngineReport(preemptions=4.0)
    assert grown(before, after, "preemptions") is None
    assert grown(after, before, "preemptions") == 1
    assert grown(before, EngineReport(), "preemptions") is None


def test_buckets_of_a_page_with_two_engines():
    page_text = b"".join(
        b'vllm:time_to_first_token_seconds_bucket{engine="%d",le="%s",model_name="m"} %d\n'
        % (rank, le, count)
        for rank in (0, 1)
        for le, count in ((b"0.5", 1), (b"1.0", 3), (b"+Inf", 4))
    )
    assert decode(page_text).ttft_buckets == ((0.5, 2.0), (1.0, 6.0), (inf, 8.0))
    assert decode(page_text.replace(b"} 3", b"} NaN")).ttft_buckets is None
    assert decode(page_text.replace(b"+Inf", b"2.0")).ttft_buckets is None
    flood = b"".join(b'sglang:time_to_first_token_seconds_bucket{le="%d"} 1\n' % i for i in range(10_000))
    assert decode(flood + page_text).ttft_buckets is None


def test_the_error_compares_the_same_requests():
    rig = Rig(config(1))
    (address,) = (worker.address for worker in rig.router.pools["chat"].workers)
    rig.read(address, EngineReport("vllm", prefills=100.0, queue_s=10.0, prefill_s=20.0))
    predicted_s = [rig.serve(f"Prompt {i}. ", 100.0 * i).decision.predicted_ttft_s for i in range(8)]
    told_s = sum(predicted_s) + 8 * 0.3
    rig.read(
        address, EngineReport("vllm", prefills=108.0, queue_s=10.0 + told_s / 2, prefill_s=20.0 + told_s / 2)
    )
    le = {
        bound: rig.value("extproc_ttft_error_seconds_bucket", pool="chat", le=bound)
        for bound in ("0.2", "0.5")
    }
    assert le == {"0.2": 0, "0.5": 1}
    # Twice as many requests as ours: others use it, and nothing is said.
    rig.serve("One more. ", 5000.0)
    rig.read(address, EngineReport("vllm", prefills=140.0, queue_s=99.0, prefill_s=99.0))
    assert rig.value("extproc_ttft_error_seconds_bucket", pool="chat", le="+Inf") == 1


# --- a large fleet -----------------------------------------------------------------------------------


def test_a_large_fleet_keeps_every_family_small():
    rig = Rig(config(128))
    for number in range(300):
        rig.serve(f"Prompt {number}. ", float(number), stream=number % 2 == 0)
    for worker in rig.router.pools["chat"].workers:
        for count in (1.0, 2.0):
            values = dict.fromkeys(EngineReport.__dataclass_fields__, count)
            rig.read(
                worker.address,
                EngineReport(**values | {"engine": "vllm", "ttft_buckets": buckets(*[count] * 4)}),
            )
    body, _ = page(rig.observer.registry, PROMETHEUS_3, "")
    families = list(parse_openmetrics(body.decode()))
    largest = max(families, key=lambda family: len(family.samples))
    assert len(largest.samples) <= 1000, largest.name
    assert len(body) < 400_000
