"""A few series out of a Prometheus text page, without parsing the page.

A scrape of vLLM is 53 KB, nearly all of it histogram buckets; we want some forty lines. So each line is
looked at as far as its metric's name, and only lines of a known name are read. `Decoder` takes the page in
chunks as they arrive: the event loop gets its turn between them, and the page is never held as a whole.

Engines behind one page: vLLM labels each series with ``engine``; SGLang with ``dp_rank``, besides tensor and
pipeline ranks, which repeat what one scheduler does and count once. A value that is no finite number from 0
makes its sum unknown, whatever the other ranks say: a sum that lacks one would look like less load.
"""

from __future__ import annotations

import math
from typing import Literal

from extproc.engine.report import EngineReport

#: No line that we want is longer; vLLM's cache_config_info has 1,100 bytes.
MAX_LINE_BYTES = 64 * 1024


#: A cache that claims to be larger is not believed: it sizes the router's picture of it.
MAX_CACHE_TOKENS = 10_000_000_000


#: A histogram with more buckets is cut off; vLLM's has 23.
MAX_BUCKETS = 200


class NotMetricsError(ValueError):
    """What came is no Prometheus text."""


#: Series to field of `EngineReport`. Where two names give one field, the first that is there counts.
_VLLM = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage",
    b"vllm:gpu_cache_usage_perc": "old_kv_usage",  # until 0.10
    b"vllm:prefix_cache_queries_total": "prefix_query_tokens",
    b"vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    b"vllm:gpu_prefix_cache_queries_total": "old_prefix_query_tokens",
    b"vllm:gpu_prefix_cache_hits_total": "old_prefix_hit_tokens",
    b"vllm:prompt_tokens_total": "prompt_tokens",
    b"vllm:generation_tokens_total": "generation_tokens",
    b"vllm:num_preemptions_total": "preemptions",
    b"vllm:request_queue_time_seconds_sum": "queue_s",
    b"vllm:request_prefill_time_seconds_sum": "prefill_s",
    b"vllm:request_prefill_time_seconds_count": "prefills",
    b"vllm:request_prefill_kv_computed_tokens_sum": "prefilled_tokens",
    b"vllm:request_prompt_tokens_count": "ended_requests",
    b"vllm:request_prompt_tokens_sum": "ended_prompt_tokens",
    b"vllm:time_to_first_token_seconds_sum": "ttft_s",
    b"vllm:time_to_first_token_seconds_count": "first_tokens",
}
#: SGLang's scheduler: a series for each rank.
_SGLANG_SCHEDULER = {
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_usage",
    b"sglang:cache_hit_rate": "hit_ratio",
    b"sglang:max_total_num_tokens": "cache_tokens",
    b"sglang:page_size": "block_tokens",
    b"sglang:num_retracted_requests_total": "preemptions",
}
#: SGLang's tokenizer manager: once a server, split by labels such as ``cache_source``.
_SGLANG_SERVER = {
    b"sglang:prompt_tokens_total": "prompt_tokens",
    b"sglang:cached_tokens_total": "prefix_hit_tokens",
    b"sglang:generation_tokens_total": "generation_tokens",
    b"sglang:time_to_first_token_seconds_sum": "ttft_s",
    b"sglang:time_to_first_token_seconds_count": "first_tokens",
}
_CACHE_INFO = {
    b"vllm:cache_config_info": (b"block_size", b"num_gpu_blocks"),
    b"sglang:cache_config_info": (b"page_size", b"num_pages"),  # before 0.5.11
}
_TTFT_BUCKETS = frozenset(
    {b"vllm:time_to_first_token_seconds_bucket", b"sglang:time_to_first_token_seconds_bucket"}
)
_STARTED = b"process_start_time_seconds"
_WANTED = frozenset({*_VLLM, *_SGLANG_SCHEDULER, *_SGLANG_SERVER, *_CACHE_INFO, *_TTFT_BUCKETS, _STARTED})
#: Averaged over the ranks, not summed.
_MEANS = frozenset({"kv_usage", "old_kv_usage", "hit_ratio", "block_tokens", "info_block_tokens"})


class Decoder:
    """Takes a page piece by piece; `report` tells what was in it."""

    def __init__(self) -> None:
        self._rest = b""
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._seen: set[tuple[bytes, bytes]] = set()  # (series, dp_rank)
        self._ttft: dict[float, float] = {}  # bound to count
        self._engine: Literal["vllm", "sglang"] | None = None

    def feed(self, chunk: bytes) -> None:
        """The next piece, cut anywhere. NotMetricsError for a line that no exposition has."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise NotMetricsError(f"a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            brace = line.find(b"{")
            name = line[:brace] if brace > 0 else line.partition(b" ")[0]
            if name in _WANTED:
                self._take(name, line)

    def report(self) -> EngineReport:
        """What the page told so far; a last line without its end counts as a line."""
        if self._rest:
            self.feed(b"\n")
        queries = self._value("prefix_query_tokens", "old_prefix_query_tokens")
        if self._engine == "sglang":
            queries = self._value("prompt_tokens")  # every prompt token is looked up
        return EngineReport(
            engine=self._engine,
            ranks=max(self._counts.get(name, 0) for name in ("running", "cache_tokens", "info_cache_tokens")),
            running=self._value("running"),
            waiting=self._value("waiting"),
            kv_usage=self._value("kv_usage", "old_kv_usage"),
            hit_ratio=self._value("hit_ratio"),
            cache_tokens=self._size("cache_tokens", "info_cache_tokens"),
            block_tokens=self._size("block_tokens", "info_block_tokens"),
            prefix_query_tokens=queries,
            prefix_hit_tokens=self._value("prefix_hit_tokens", "old_prefix_hit_tokens"),
            prompt_tokens=self._value("prompt_tokens"),
            generation_tokens=self._value("generation_tokens"),
            preemptions=self._value("preemptions"),
            queue_s=self._value("queue_s"),
            prefill_s=self._value("prefill_s"),
            prefills=self._value("prefills"),
            prefilled_tokens=self._value("prefilled_tokens"),
            ttft_s=self._value("ttft_s"),
            first_tokens=self._value("first_tokens"),
            ttft_buckets=self._ttft_buckets(),
            ended_requests=self._value("ended_requests"),
            ended_prompt_tokens=self._value("ended_prompt_tokens"),
            started_s=self._value("started_s"),
        )

    def _value(self, *names: str) -> float | None:
        for name in names:
            if name in self._sums:
                value = self._sums[name]
                if name in _MEANS:
                    value /= self._counts[name]
                return value if math.isfinite(value) else None
        return None

    def _size(self, *names: str) -> int | None:
        tokens = self._value(*names)
        return int(tokens) if tokens is not None and 1.0 <= tokens <= MAX_CACHE_TOKENS else None

    def _ttft_buckets(self) -> tuple[tuple[float, float], ...] | None:
        buckets = tuple(sorted(self._ttft.items()))
        if not buckets or buckets[-1][0] != math.inf or not all(math.isfinite(n) for _, n in buckets):
            return None
        return buckets

    def _add(self, field: str, value: float) -> None:
        self._sums[field] = self._sums.get(field, 0.0) + value
        self._counts[field] = self._counts.get(field, 0) + 1

    def _take(self, name: bytes, line: bytes) -> None:
        if name == _STARTED:
            self._add("started_s", _number(line))
            return
        if name in _TTFT_BUCKETS:
            self._take_bucket(line)
            return
        self._engine = "vllm" if name.startswith(b"vllm:") else "sglang"
        if name in _VLLM:
            self._add(_VLLM[name], _number(line))
        elif name in _SGLANG_SERVER:
            self._add(_SGLANG_SERVER[name], _number(line))
        elif name == b"vllm:cache_config_info":
            self._take_cache(name, line)
        elif not _label(line, b"priority"):  # a share of what stands under priority=""
            rank = _label(line, b"dp_rank")
            if (name, rank) in self._seen:
                return
            self._seen.add((name, rank))
            if name in _CACHE_INFO:
                self._take_cache(name, line)
            else:
                self._add(_SGLANG_SCHEDULER[name], _number(line))

    def _take_bucket(self, line: bytes) -> None:
        le = _label(line, b"le")
        bound = math.inf if le == b"+Inf" else _positive(le)
        if not math.isnan(bound) and (bound in self._ttft or len(self._ttft) < MAX_BUCKETS):
            self._ttft[bound] = self._ttft.get(bound, 0.0) + _number(line)

    def _take_cache(self, name: bytes, line: bytes) -> None:
        size_label, count_label = _CACHE_INFO[name]
        block, count = _positive(_label(line, size_label)), _positive(_label(line, count_label))
        self._add("info_block_tokens", block)
        if name == b"vllm:cache_config_info":
            count -= 1.0  # a placeholder
            # vLLM's own figure knows of layers that share blocks; the product doesn't.
            own = _positive(_label(line, b"kv_cache_size_tokens"))
            if not math.isnan(own):
                self._add("info_cache_tokens", own)
                return
        self._add("info_cache_tokens", count * block)


def decode(page: bytes) -> EngineReport:
    """What a whole page tells. NotMetricsError as from `Decoder.feed`."""
    decoder = Decoder()
    decoder.feed(page)
    return decoder.report()


def _number(line: bytes) -> float:
    """A sample's value; NaN for anything but a finite number from 0."""
    fields = line[line.rfind(b"}") + 1 :].split() if b"}" in line else line.split()[1:]
    return _positive(fields[0]) if fields else math.nan


def _positive(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0.0 <= value < math.inf else math.nan


def _label(line: bytes, name: bytes) -> bytes:
    """A label's value as it stands there, escapes and all; b"" when missing."""
    for before in (b"{", b","):
        start = line.find(before + name + b'="')
        if start >= 0:
            start += len(name) + 3
            return line[start : line.find(b'"', start)]
    return b""
