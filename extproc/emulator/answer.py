"""What one call asks of the engine: a generation for each choice, and their progress."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from extproc.emulator import tokens
from extproc.emulator.api_replies import Usage
from extproc.emulator.api_requests import Call
from extproc.emulator.driver import Driver, EngineDeadError, Generation
from extproc.emulator.engine import EngineRequest
from extproc.emulator.engine_metrics import EngineMetrics


class Answer:
    """The generations of one call: every prompt answered ``n`` times, in the order of the choices."""

    def __init__(
        self, call: Call, driver: Driver, metrics: EngineMetrics, arrival_s: float, interval: int
    ) -> None:
        self.call = call
        self._driver = driver
        self._metrics = metrics
        self._block_size = driver.engine.config.block_size
        self._arrival_s = arrival_s
        self._interval = interval
        self._wake = asyncio.Event()
        self._generations: list[Generation] = []
        self._outputs: list[bytes] = []
        self._open: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether all have their last token."""
        return all(generation.finished for generation in self._generations)

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return sum(generation.tokens for generation in self._generations)

    def submit(self, ids: itertools.count[int]) -> None:
        """Queue all. Raises EngineFullError or EngineDeadError; `close` is due then, too."""
        call = self.call
        for prompt in call.prompts:
            for variant in range(call.n):
                output = tokens.generate(prompt, call.output_tokens, variant)
                request = EngineRequest(
                    request_id=str(next(ids)),
                    prompt_tokens=tokens.count(prompt),
                    output_tokens=call.output_tokens,
                    chain=tokens.chain(prompt + output, self._block_size, call.seed),
                )
                generation = self._driver.submit(request, self._wake, self._interval, self._arrival_s)
                self._open.add(len(self._generations))
                self._generations.append(generation)
                self._outputs.append(output)

    async def progress(self) -> AsyncIterator[list[tuple[int, int, int, bool]]]:
        """News as (index, tokens before, now, finished) until all have finished. Raises EngineDeadError."""
        sent = [0] * len(self._generations)
        while self._open:
            await self._wake.wait()
            self._wake.clear()
            if self._driver.dead is not None:
                raise EngineDeadError(self._driver.dead)
            news = []
            for index in sorted(self._open):
                generation, old = self._generations[index], sent[index]
                if generation.tokens == old:
                    continue
                if not old:
                    self._metrics.first_token(generation)
                sent[index] = generation.tokens
                news.append((index, old, generation.tokens, generation.finished))
                if generation.finished:
                    self._open.discard(index)
                    self._metrics.finished(generation, self.call.finish_reason)
            if news:
                yield news

    def close(self) -> None:
        """Abort what isn't finished."""
        for index in self._open:
            generation = self._generations[index]
            self._driver.abort(generation)
            if not generation.finished:
                self._metrics.finished(generation, "error" if self._driver.dead is not None else "abort")
        self._open.clear()

    def text(self, index: int, old: int, new: int) -> bytes:
        """Output text of one choice, from token ``old`` up to ``new``."""
        return self._outputs[index][old * tokens.TOKEN_BYTES : new * tokens.TOKEN_BYTES]

    def texts(self) -> list[str]:
        """All output texts."""
        return [output.decode() for output in self._outputs]

    def usage(self, details: bool) -> Usage:
        """Token counts, cached ones with ``details``; a prompt counts once however many its answers."""
        firsts = self._generations[:: self.call.n]
        prompt_tokens = sum(generation.request.prompt_tokens for generation in firsts)
        cached = sum(generation.cached_tokens for generation in firsts)
        full = sum(g.request.prompt_tokens // self._block_size * self._block_size for g in firsts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.tokens,
            cached_tokens=cached if details else None,
            created_tokens=max(0, full - cached) if self.call.kind == "chat" else None,
        )
