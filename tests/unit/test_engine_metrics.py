"""Pages of vLLM and SGLang, whole and broken: what is read of them, and that unknown is never zero."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from extproc.engine.exposition import MAX_LINE_BYTES, Decoder, NotMetricsError, decode
from extproc.engine.report import EngineReport, hit_ratio, restarted
from extproc.engine.scraper import LONGEST_RETRY_S, delay_s

#: The lines of a vLLM 0.32 page that count, among neighbours that don't.
VLLM = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79610280462e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="mid"} 4.0
vllm:num_requests_waiting{engine="0",model_name="mid"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="mid",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="mid"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="mid"} 1.158096e+06
vllm:prefix_cache_queries_created{engine="0",model_name="mid"} 1.7961028435561357e+09
vllm:prefix_cache_hits_total{engine="0",model_name="mid"} 793280.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="mid"} 7.0
vllm:num_preemptions_total{engine="0",model_name="mid"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="mid"} 1.155096e+06
vllm:prompt_tokens_by_source_total{engine="0",model_name="mid",source="local_compute"} 361816.0
vllm:generation_tokens_total{engine="0",model_name="mid"} 4808.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="mid"} 300.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="mid"} 385.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="mid"} 60.5
vllm:request_queue_time_seconds_sum{engine="0",model_name="mid"} 0.5
vllm:request_prefill_time_seconds_bucket{engine="0",le="+Inf",model_name="mid"} 382.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="mid"} 382.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="mid"} 51.25
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="mid"} 352816.0
vllm:cache_config_info{_block_size_resolved="True",block_size="32",effective_attention_block_size="64",\
engine="0",gpu_memory_utilization="0.92",hash_block_size="None",kv_cache_size_tokens="15999",\
mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="500",num_gpu_blocks_override="400"} 1.0
"""
VLLM_REPORT = EngineReport(
    engine="vllm",
    ranks=1,
    running=4.0,
    waiting=2.0,
    kv_usage=0.75,
    cache_tokens=15_999,
    block_tokens=32,
    prefix_query_tokens=1_158_096.0,
    prefix_hit_tokens=793_280.0,
    prompt_tokens=1_155_096.0,
    generation_tokens=4808.0,
    preemptions=1.0,
    queue_s=0.5,
    prefill_s=51.25,
    prefills=382.0,
    prefilled_tokens=352_816.0,
    ttft_s=60.5,
    first_tokens=385.0,
    started_s=1_796_102_804.62,
)
SGLANG = b"""\
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="5",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="1",priority="",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="0"} 4.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 1.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.0
sglang:token_usage{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.2
sglang:token_usage{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.4
sglang:cache_hit_rate{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.5
sglang:cache_hit_rate{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.7
sglang:max_total_num_tokens{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 100000.0
sglang:max_total_num_tokens{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="0"} 100000.0
sglang:page_size{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 64.0
sglang:page_size{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="0"} 64.0
sglang:num_retracted_requests_total{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 2.0
sglang:prompt_tokens_total{model_name="m"} 8.0e+06
sglang:generation_tokens_total{model_name="m"} 7.5e+06
sglang:cached_tokens_total{cache_source="device",model_name="m"} 5.0e+06
sglang:cached_tokens_total{cache_source="host",model_name="m"} 1.0e+06
sglang:time_to_first_token_seconds_sum{model_name="m"} 12.5
sglang:time_to_first_token_seconds_count{model_name="m"} 50.0
"""


def test_a_page_of_vllm():
    assert decode(VLLM) == VLLM_REPORT


def test_a_page_of_sglang_counts_each_scheduler_once():
    assert decode(SGLANG) == EngineReport(
        engine="sglang",
        ranks=2,
        running=7.0,
        waiting=1.0,
        kv_usage=pytest.approx(0.3),
        hit_ratio=pytest.approx(0.6),
        cache_tokens=200_000,
        block_tokens=64,
        prefix_query_tokens=8e6,
        prefix_hit_tokens=6e6,
        prompt_tokens=8e6,
        generation_tokens=7.5e6,
        preemptions=2.0,
        ttft_s=12.5,
        first_tokens=50.0,
    )


@given(st.sampled_from([VLLM, SGLANG]), st.lists(st.integers(0, len(VLLM)), max_size=20))
def test_where_the_page_is_cut_makes_no_difference(page, cuts):
    decoder = Decoder()
    edges = [0, *sorted(cuts), len(page)]
    for start, end in itertools.pairwise(edges):
        decoder.feed(page[start:end])
    assert decoder.report() == decode(page)


@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from(VLLM.split(b"\n")) | st.binary(max_size=40)).map(b"\n".join)
)
def test_no_page_raises(page):
    for value in asdict(decode(page)).values():
        assert value is None or isinstance(value, str) or (math.isfinite(value) and value >= 0)


def test_a_page_without_an_end_is_no_page():
    decoder = Decoder()
    for _ in range(MAX_LINE_BYTES // 1024):
        decoder.feed(b"x" * 1024)
    with pytest.raises(NotMetricsError, match=str(MAX_LINE_BYTES)):
        decoder.feed(b"x")


@pytest.mark.parametrize("page", [b"", b"\n", b"<html>not found</html>", b"http_requests_total 3\n"])
def test_another_page_tells_nothing(page):
    assert decode(page) == EngineReport()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "four", "", "0x4"])
def test_an_unusable_value_is_unknown_and_spoils_only_its_own(value):
    page = VLLM.replace(b'running{engine="0",model_name="mid"} 4.0', b'running{engine="0"} ' + value.encode())
    assert decode(page) == replace(VLLM_REPORT, running=None)


def test_a_missing_series_is_unknown_not_zero():
    for line in VLLM.splitlines(keepends=True):
        for field, value in asdict(decode(VLLM.replace(line, b""))).items():
            assert value is None or value == getattr(VLLM_REPORT, field), (line, field)


def test_timestamps_and_carriage_returns_are_no_part_of_a_value():
    line = b'vllm:num_requests_running{engine="0"} 3 1700000000000\r\n'
    assert decode(line).running == 3.0
    assert decode(b"vllm:num_requests_running 5\n").running == 5.0


def test_data_parallel_engines_are_summed_and_one_unknown_makes_the_sum_unknown():
    second = (
        VLLM.replace(b'engine="0"', b'engine="1"').replace(b"_perc{", b"_perc{").replace(b"} 0.75", b"} 0.25")
    )
    both = decode(VLLM + second.replace(b"process_start", b"other_start"))
    assert both.ranks == 2
    assert both.running == 8.0
    assert both.kv_usage == 0.5
    assert both.cache_tokens == 2 * 15_999
    assert both.block_tokens == 32
    assert both.prompt_tokens == 2 * 1_155_096.0
    assert both.started_s == VLLM_REPORT.started_s
    spoilt = decode(VLLM + second.replace(b'ning{engine="1",model_name="mid"} 4.0', b'ning{engine="1"} NaN'))
    assert spoilt.running is None
    assert spoilt.waiting == 4.0


def test_names_of_older_versions():
    old = (
        VLLM.replace(b"vllm:kv_cache_usage", b"vllm:gpu_cache_usage")
        .replace(b"vllm:prefix_cache", b"vllm:gpu_prefix_cache")
        .replace(b'kv_cache_size_tokens="15999",', b"")
    )
    assert decode(old) == replace(VLLM_REPORT, cache_tokens=499 * 32)  # one block of 500 is a placeholder
    config = b"".join(
        b'sglang:cache_config_info{dp_rank="%d",num_pages="50",page_size="64"} 1.0\n' % i for i in (0, 1)
    )
    assert decode(config).cache_tokens == 2 * 50 * 64
    # Both there: one of them counts.
    assert decode(SGLANG + config).cache_tokens == 200_000


@pytest.mark.parametrize("blocks", ["None", "0", "1e300", "-5", ""])
def test_a_cache_of_no_credible_size_is_unknown(blocks):
    labels = f'block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="{blocks}"'
    line = f"vllm:cache_config_info{{{labels}}} 1.0"
    report = decode(line.encode())
    assert report.cache_tokens is None
    assert report.block_tokens == 16


names = st.text(min_size=1, max_size=20)


@given(names, st.lists(st.floats(0, 1e12), min_size=1, max_size=4))
def test_agrees_with_the_client_library_whatever_the_labels_hold(model, values):
    registry = CollectorRegistry()
    gauge = Gauge("vllm:num_requests_running", "", ["engine", "model_name"], registry=registry)
    counter = Counter("vllm:prompt_tokens", "", ["engine", "model_name"], registry=registry)
    for index, value in enumerate(values):
        gauge.labels(str(index), model).set(value)
        counter.labels(str(index), model).inc(value)
    report = decode(generate_latest(registry))
    assert report.running == pytest.approx(sum(values))
    assert report.prompt_tokens == pytest.approx(sum(values))
    assert report.ranks == len(values)


def test_a_label_value_that_looks_like_a_label():
    registry = CollectorRegistry()
    labels = {"model_name": 'x",priority="9",dp_rank="1', "dp_rank": "0", "priority": ""}
    Gauge("sglang:num_running_reqs", "", list(labels), registry=registry).labels(**labels).set(3)
    Gauge("sglang:num_queue_reqs", "", ["model_name"], registry=registry).labels("a} 7").set(2)
    report = decode(generate_latest(registry))
    assert (report.running, report.waiting) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"running": 0.0, "waiting": 0.0, "kv_usage": 0.0}, False),
        ({"prompt_tokens": 1_155_097.0}, False),
        ({"prompt_tokens": 12.0}, True),
        ({"first_tokens": 0.0}, True),
        ({"started_s": 1_796_102_804.63}, False),
        ({"started_s": 1_796_102_900.0}, True),
        ({"started_s": None}, False),
        ({"prompt_tokens": None, "first_tokens": None}, False),
        ({"cache_tokens": 20_000}, True),
        ({"cache_tokens": None}, False),
    ],
)
def test_a_restart_shows_in_the_start_the_size_or_a_counter(change, expected):
    assert restarted(VLLM_REPORT, replace(VLLM_REPORT, **change)) is expected


def test_hit_ratio_is_of_the_last_interval():
    later = replace(VLLM_REPORT, prefix_query_tokens=1_158_196.0, prefix_hit_tokens=793_305.0)
    assert hit_ratio(VLLM_REPORT, later) == 0.25
    assert hit_ratio(VLLM_REPORT, VLLM_REPORT) is None  # nothing was looked up
    assert hit_ratio(None, VLLM_REPORT) == pytest.approx(793_280 / 1_158_096)
    again = EngineReport(prefix_query_tokens=100.0, prefix_hit_tokens=40.0)
    assert hit_ratio(VLLM_REPORT, again) == 0.4
    assert hit_ratio(None, EngineReport(hit_ratio=0.3)) == 0.3
    assert hit_ratio(None, EngineReport()) is None


@given(st.floats(0.05, 3600.0))
def test_back_off_starts_soon_and_grows_to_a_bound(interval_s):
    delays = [delay_s(interval_s, failures) for failures in range(1, 2000)]
    assert delay_s(interval_s, 0) == interval_s
    assert delays[0] <= min(1.0, interval_s)
    assert delays == sorted(delays)
    assert delays[-1] == max(LONGEST_RETRY_S, interval_s)
