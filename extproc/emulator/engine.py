"""vLLM V1's scheduler over its block pool, pure and sans-IO, with a cost model in place of a GPU.

Theory, as in vLLM's ``scheduler.py`` and ``kv_cache_manager.py``. The engine works in steps. A step has a
budget of ``max_num_batched_tokens``: running sequences get theirs first, in the order of their admission (a
decoding one needs one token, a prefilling one takes what is left: chunked prefill), then waiting ones are
admitted first come, first served, up to ``max_num_seqs``. On admission the longest cached prefix is looked
up, full blocks only and never the whole prompt, because the last token has to be computed to get logits; a
sequence is admitted only if all its tokens so far fit. Blocks are allocated, and findable by their hash, when
they are scheduled. When a running sequence can't get a block, the one admitted last is preempted: it loses
its blocks, goes back to the head of the queue and computes anew what isn't cached by then. The key and value
of a sequence's last output token are never computed, so it isn't cached.

The caller owns the clock::

    engine.add(request, now)
    while (duration_s := engine.begin_step(now)) is not None:
        now += duration_s                        # or sleep
        for output in engine.finish_step(now): ...

Requests may be added and aborted at any time, in mid-step too. A simulator that need not see each token asks
for many steps at once: ``begin_step(now, max_steps=1000)`` takes as many as nothing can happen in, and
`shorten` ends them early when a request arrives.

The cost model is linear (see `CostModel`); its defaults are those of a mid-sized model on one fast GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from extproc.emulator.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class CostModel:
    """What things take, in seconds.

    ``step_s``: every step, whatever it does. ``prefill_s``: each prompt token computed. ``decode_s``: each
    sequence that decodes in the step. The GPU is busy for the sum of these.
    ``request_s`` and ``tokenize_s`` (per prompt token) delay a request before the engine sees it: HTTP, chat
    template, tokenizer. They run beside the GPU and beside each other.

    The defaults solve: a prompt of 30,000 cold tokens has its first token after 3.0 s (15 steps of 2,048
    tokens, alone on the engine); with all but the last 500 tokens cached, after 0.2 s; a step in which 20
    sequences decode takes 25 ms.
    """

    step_s: float = 0.010
    prefill_s: float = 9.02e-5
    decode_s: float = 0.75e-3
    request_s: float = 0.010
    tokenize_s: float = 4.5e-6

    def step_duration_s(self, prefill_tokens: int, decoding: int) -> float:
        """Duration of one step that computes so many prompt tokens and decodes so many sequences."""
        return self.step_s + prefill_tokens * self.prefill_s + decoding * self.decode_s

    def frontend_s(self, prompt_tokens: int) -> float:
        """From the arrival of a request until `Engine.add`."""
        return self.request_s + prompt_tokens * self.tokenize_s

    def faster(self, speed: float) -> CostModel:
        """The costs of a GPU that is ``speed`` times as fast; the frontend stays as it is."""
        return replace(
            self,
            step_s=self.step_s / speed,
            prefill_s=self.prefill_s / speed,
            decode_s=self.decode_s / speed,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's limits, named as vLLM's arguments are; tokens unless said otherwise.

    ``num_gpu_blocks`` counts blocks, one of which is a placeholder; the default holds 190,000 tokens.
    ``max_queued``: waiting requests beyond which the engine is full (None: no limit).
    ``enable_prefix_caching``: off, nothing is ever found in the cache, and no lookup is counted.
    """

    block_size: int = 16
    num_gpu_blocks: int = 11876
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131_072
    max_queued: int | None = None
    enable_prefix_caching: bool = True
    cost: CostModel = CostModel()

    @property
    def cache_tokens(self) -> int:
        """What the KV cache holds."""
        return (self.num_gpu_blocks - 1) * self.block_size


@dataclass(slots=True)
class EngineRequest:
    """A request whose output is known in advance.

    ``chain``: chained hashes of all full blocks of prompt and output together,
    ``(prompt_tokens + output_tokens) // block_size`` of them or more.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    chain: Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought for one request.

    ``new_tokens``: output tokens (0 while the prompt is being computed: such outputs aren't reported).
    ``first``: these are its first. ``finished``: these were its last.
    ``cached_tokens``: prompt tokens found in the cache when it was first admitted.
    """

    request_id: str
    new_tokens: int
    first: bool
    finished: bool
    cached_tokens: int


class _Sequence:
    """A request inside the engine. ``computed``: tokens whose KV is there; ``tokens``: prompt and output."""

    __slots__ = ("blocks", "cached_tokens", "computed", "hashed", "request", "scheduled", "tokens", "total")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.blocks: list[int] = []
        self.computed = 0
        self.hashed = 0  # leading blocks that have their hash
        self.tokens = request.prompt_tokens
        self.total = request.prompt_tokens + request.output_tokens
        self.scheduled = 0  # tokens of the step in progress
        self.cached_tokens = -1


class Engine:
    """One vLLM engine. Times are seconds on the caller's clock.

    Counters, all since the start: ``prefix_queries`` and ``prefix_hits`` (prompt tokens looked up and found;
    first admissions only), ``preemptions``, ``prompt_tokens`` (of prompts whose prefill is done),
    ``generation_tokens``, ``steps``, ``busy_s``.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.pool = BlockPool(self.config.num_gpu_blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sequences: dict[str, _Sequence] = {}
        self._step_count = 0  # steps in progress; 0: none
        self.step_s = 0.0  # duration of one of them
        self.step_tokens = 0  # tokens that one of them computes
        self._began_s = 0.0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.steps = 0
        self.busy_s = 0.0

    @property
    def running(self) -> int:
        """Admitted sequences (``vllm:num_requests_running``)."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences not admitted yet, or preempted (``vllm:num_requests_waiting``)."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use by running sequences, 0 … 1 (``vllm:kv_cache_usage_perc``)."""
        return self.pool.usage

    @property
    def stepping(self) -> bool:
        """Whether a step is in progress."""
        return self._step_count > 0

    def prefill_left(self, request_id: str) -> int | None:
        """Prompt tokens of a request that no step has been scheduled for; None while it waits.

        0 for requests that the engine doesn't have (any more).
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return 0
        if not sequence.blocks:
            return None
        left = sequence.request.prompt_tokens - sequence.computed - sequence.scheduled
        return left if left > 0 else 0

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens of a request that were cached when it was first admitted; 0 while it waits."""
        sequence = self._sequences.get(request_id)
        return 0 if sequence is None else max(0, sequence.cached_tokens)

    @property
    def full(self) -> bool:
        """Whether the queue is at ``max_queued``: the server answers 503 in place of `add`."""
        return self.config.max_queued is not None and len(self._waiting) >= self.config.max_queued

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request. Raises ValueError for one that no engine of this size could ever serve."""
        config = self.config
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(
                f"{request.request_id}: prompt_tokens and output_tokens must be at least 1, "
                f"not {request.prompt_tokens} and {request.output_tokens}"
            )
        if total > min(config.max_model_len, config.cache_tokens):
            raise ValueError(
                f"{request.request_id}: {total} tokens are more than max_model_len {config.max_model_len} "
                f"or the {config.cache_tokens} tokens of the KV cache"
            )
        if request.request_id in self._sequences:
            raise ValueError(f"{request.request_id}: already in the engine")
        if len(request.chain) < total // config.block_size:
            raise ValueError(
                f"{request.request_id}: a chain of {len(request.chain)} hashes for {total} tokens "
                f"in blocks of {config.block_size}"
            )
        sequence = _Sequence(request)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str, now: float) -> None:
        """Drop a request and free its blocks, also in mid-step; unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence in self._running:
            self._running.remove(sequence)
            self.pool.release(sequence.blocks)
        else:
            self._waiting.remove(sequence)

    def begin_step(self, now: float, max_steps: int = 1) -> float | None:
        """Schedule a step; its duration in seconds, or None if there is nothing to do.

        With ``max_steps`` above 1, and if nothing but decoding is going on, so many steps as can pass without
        a sequence ending or wanting a block are scheduled at once; the duration is their sum.
        """
        if self._step_count:
            raise RuntimeError("begin_step before the last step was finished")
        if not self._running and not self._waiting:
            return None
        prefill_tokens, decoding = self._schedule()
        count = 1
        if max_steps > 1 and not prefill_tokens:
            count = min(max_steps, self._uneventful_steps())
        self._step_count = count
        self.step_tokens = prefill_tokens + decoding
        self.step_s = self.config.cost.step_duration_s(prefill_tokens, decoding)
        self._began_s = now
        return self.step_s * count

    def shorten(self, now: float) -> float:
        """Give up the steps of the batch in progress that haven't begun by ``now``; when it will end then.

        Call it when a request was added, so that it waits for no more than the step in progress.
        """
        if not self._step_count:
            raise RuntimeError("shorten without a step in progress")
        begun = max(1, math.ceil((now - self._began_s) / self.step_s))
        self._step_count = min(self._step_count, begun)
        return self._began_s + self.step_s * self._step_count

    def finish_step(self, now: float) -> list[Output]:
        """End the steps in progress: what they brought, in the order of admission."""
        if not self._step_count:
            raise RuntimeError("finish_step without begin_step")
        count, self._step_count = self._step_count, 0
        self.steps += count
        self.busy_s += self.step_s * count
        outputs: list[Output] = []
        ended = False
        for sequence in self._running:
            if not sequence.scheduled:
                continue
            sequence.computed += sequence.scheduled + count - 1
            sequence.scheduled = 0
            if sequence.computed < sequence.tokens:
                continue  # its prompt isn't done
            request = sequence.request
            first = sequence.tokens == request.prompt_tokens
            if first:
                self.prompt_tokens += request.prompt_tokens
            sequence.tokens = sequence.computed + 1
            if count > 1:
                self._cache_full_blocks(sequence, sequence.computed)
            self.generation_tokens += count
            finished = sequence.tokens >= sequence.total
            outputs.append(Output(request.request_id, count, first, finished, sequence.cached_tokens))
            if finished:
                ended = True
                del self._sequences[request.request_id]
                self.pool.release(sequence.blocks)
        if ended:
            self._running = [s for s in self._running if s.tokens < s.total]
        return outputs

    def _schedule(self) -> tuple[int, int]:
        """Allot a step's token budget; prompt tokens and decoding sequences in it."""
        config, pool, running = self.config, self.pool, self._running
        block_size = config.block_size
        budget = config.max_num_batched_tokens
        prefill_tokens = decoding = 0
        preempted = False
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            new_tokens = min(sequence.tokens - sequence.computed, budget)
            end = sequence.computed + new_tokens
            wanted = -(-end // block_size) - len(sequence.blocks)
            if wanted > 0:
                while wanted > pool.free_blocks:
                    preempted = True
                    if self._preempt_last() is sequence:
                        break
                if index >= len(running):
                    break
                sequence.blocks += pool.take(wanted)
            if end // block_size > sequence.hashed:
                self._cache_full_blocks(sequence, end)
            if new_tokens == 1 and sequence.computed >= sequence.request.prompt_tokens:
                decoding += 1
            else:
                prefill_tokens += new_tokens
            sequence.scheduled = new_tokens
            budget -= new_tokens
            index += 1
        while self._waiting and budget and not preempted and len(running) < config.max_num_seqs:
            sequence = self._waiting[0]
            lookup = (sequence.tokens - 1) // block_size if config.enable_prefix_caching else 0
            hits = pool.match(sequence.request.chain, lookup)
            wanted = -(-sequence.tokens // block_size) - len(hits)
            if wanted + pool.idle(hits) > pool.free_blocks:
                break
            self._waiting.popleft()
            pool.touch(hits)
            sequence.computed = len(hits) * block_size
            sequence.hashed = len(hits)
            new_tokens = min(sequence.tokens - sequence.computed, budget)
            end = sequence.computed + new_tokens
            hits += pool.take(-(-end // block_size) - len(hits))
            sequence.blocks = hits
            self._cache_full_blocks(sequence, end)
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = sequence.computed
                self.prefix_queries += sequence.tokens if config.enable_prefix_caching else 0
                self.prefix_hits += sequence.computed
            prefill_tokens += new_tokens
            sequence.scheduled = new_tokens
            budget -= new_tokens
            running.append(sequence)
        return prefill_tokens, decoding

    def _uneventful_steps(self) -> int:
        """Steps, this one included, in which every running sequence decodes within the blocks it has."""
        block_size = self.config.block_size
        return min(
            min(s.total - s.tokens, len(s.blocks) * block_size - s.computed) if s.scheduled else 1
            for s in self._running
        )

    def _cache_full_blocks(self, sequence: _Sequence, end: int) -> None:
        full = end // self.config.block_size
        if full > sequence.hashed and self.config.enable_prefix_caching:
            cache, blocks, chain = self.pool.cache, sequence.blocks, sequence.request.chain
            for index in range(sequence.hashed, full):
                cache(blocks[index], chain[index])
            sequence.hashed = full

    def _preempt_last(self) -> _Sequence:
        sequence = self._running.pop()
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.hashed = 0
        self._waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence
