"""``/metrics`` of the emulated worker: vLLM's names, labels and types.

Gauges and counters are read from the engine core at the scrape; histograms are fed as requests pass. Times
are wall seconds: to whoever looks at it from outside, a worker with a speedup is a faster GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.emulator.driver import Driver, Generation

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = (*(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),)
_STEP_BUCKETS = (1, 8, *(2**power for power in range(4, 15)))
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_LABELS = ("engine", "model_name")


class EngineMetrics(Collector):
    """Everything that a scrape of one worker shows."""

    def __init__(self, driver: Driver, model: str):
        self._driver = driver
        self._labels = ("0", model)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)  # tells when the process started, among others

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets)
            return metric.labels(*self._labels)

        ttft, e2e = (
            "Histogram of time to first token in seconds.",
            "Histogram of e2e request latency in seconds.",
        )
        prompt, generation = "Number of prefill tokens processed.", "Number of generation tokens processed."
        self._ttft = histogram("time_to_first_token_seconds", ttft, _TTFT_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", e2e, _REQUEST_BUCKETS)
        self._queue = histogram(
            "request_queue_time_seconds",
            "Histogram of time spent in WAITING phase for request.",
            _REQUEST_BUCKETS,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "Histogram of time spent in PREFILL phase for request.",
            _REQUEST_BUCKETS,
        )
        self._decode = histogram(
            "request_decode_time_seconds",
            "Histogram of time spent in DECODE phase for request.",
            _REQUEST_BUCKETS,
        )
        self._inference = histogram(
            "request_inference_time_seconds",
            "Histogram of time spent in RUNNING phase for request.",
            _REQUEST_BUCKETS,
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            _TOKEN_BUCKETS,
        )
        self._prompt = histogram("request_prompt_tokens", prompt, _TOKEN_BUCKETS)
        self._generation = histogram("request_generation_tokens", generation, _TOKEN_BUCKETS)
        steps = histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _STEP_BUCKETS
        )
        driver.on_step = steps.observe
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            ("engine", "finished_reason", "model_name"),
            registry=self.registry,
        )
        self._finished = {reason: success.labels("0", reason, model) for reason in _FINISH_REASONS}
        rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejected = rejections.labels(model, "max_num_queued_reqs")

    def first_token(self, generation: Generation) -> None:
        """A generation got its first token."""
        self._ttft.observe(self._wall_s(generation.arrival_s, generation.first_token_s))

    def finished(self, generation: Generation, reason: str) -> None:
        """A generation ended; ``reason`` is one of vLLM's."""
        self._finished[reason].inc()
        if reason in ("stop", "length"):
            now, request = self._driver.now(), generation.request
            self._e2e.observe(self._wall_s(generation.arrival_s, now))
            self._queue.observe(self._wall_s(generation.queued_s, generation.admitted_s))
            self._prefill.observe(self._wall_s(generation.admitted_s, generation.first_token_s))
            self._decode.observe(self._wall_s(generation.first_token_s, now))
            self._inference.observe(self._wall_s(generation.admitted_s, now))
            self._computed.observe(request.prompt_tokens - generation.cached_tokens)
            self._prompt.observe(request.prompt_tokens)
            self._generation.observe(generation.tokens)

    def _wall_s(self, start_s: float, end_s: float) -> float:
        return (end_s - start_s) / self._driver.speedup

    def rejected(self) -> None:
        """A request was turned away because the queue is full."""
        self._rejected.inc()

    def text(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters of the engine core."""
        engine = self._driver.engine
        gauges: tuple[tuple[str, str, float], ...] = (
            ("num_requests_running", "Number of requests in model execution batches.", engine.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv_usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            labels=(*_LABELS, "reason"),
        )
        reasons.add_metric((*self._labels, "capacity"), engine.waiting)
        reasons.add_metric((*self._labels, "deferred"), 0)
        yield reasons
        queries, hits = engine.prefix_queries, engine.prefix_hits
        counters = (
            ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", queries),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", hits),
            ("num_preemptions", "Cumulative number of preemption from the engine.", engine.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", engine.prompt_tokens),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", hits),
            ("generation_tokens", "Number of generation tokens processed.", engine.generation_tokens),
        )
        for name, text, value in counters:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield self._cache_config()
        late = CounterMetricFamily(
            "emulator:late_seconds", "Wall seconds that the emulation lost because the process got no CPU."
        )
        late.add_metric((), self._driver.late_s)
        yield late

    def _cache_config(self) -> Metric:
        config = self._driver.engine.config
        labels = {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "kv_cache_size_tokens": str(config.cache_tokens),
            "num_gpu_blocks": str(config.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256",
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(labels)
        )
        info.add_metric(tuple(labels.values()), 1.0)
        return info
