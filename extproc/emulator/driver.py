"""Runs the engine core in real time, so many times faster as asked.

The engine's clock shows *model seconds*: wall seconds since the start times ``speedup``. A step that takes
25 ms of model time is slept for ``25 ms / speedup``. Timers are late by up to a millisecond, so the end of a
step is planned from the planned end of the step before, not from when the process woke: lateness doesn't add
up. Only when the process falls far behind (no CPU to be had) is the plan given up; `late_s` keeps account.

A `Generation` is one answer in the making. The driver wakes its reader only when there is something to send:
the first token, ``interval`` further ones, the end, or the engine's death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from extproc.emulator.engine import Engine, EngineConfig, EngineRequest, Output

#: Wall seconds behind plan at which the time is written off.
_MAX_LAG_S = 0.25


class EngineFullError(Exception):
    """The waiting queue is at ``max_queued``."""


class EngineDeadError(Exception):
    """The engine died (an emulated crash); the message is for the client."""


@dataclass(slots=True, eq=False)
class Generation:
    """One answer in the making; times are model seconds.

    ``wake``: set when there is news; the generations of one call share it. ``arrival_s``: when the request
    came, ``queued_s``: when the engine got it, ``admitted_s``: when it was first scheduled.
    """

    request: EngineRequest
    wake: asyncio.Event
    interval: int
    arrival_s: float
    queued_s: float
    admitted_s: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = 0.0
    finished: bool = False
    wake_at_tokens: int = 1


class Driver:
    """An engine that runs by itself. ``generations``: those under way, by request id."""

    def __init__(self, config: EngineConfig, speedup: float):
        self.engine = Engine(config)
        self.speedup = speedup
        self.generations: dict[str, Generation] = {}
        self.dead: str | None = None
        #: Steps take so many times as long (an emulated fault).
        self.slowness = 1.0
        #: Told of each step, how many tokens it computes.
        self.on_step: Callable[[int], None] = lambda tokens: None
        #: Wall seconds written off because the process got no CPU.
        self.late_s = 0.0
        self._start_s = time.monotonic()
        self._queued: list[Generation] = []
        self._work = asyncio.Event()

    def now(self) -> float:
        """The engine's clock, in model seconds."""
        return (time.monotonic() - self._start_s) * self.speedup

    async def sleep(self, model_s: float) -> None:
        """Sleep so many model seconds."""
        await asyncio.sleep(model_s / self.speedup)

    def check(self) -> None:
        """Raise EngineFullError or EngineDeadError when a request would be turned away now."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.engine.full:
            raise EngineFullError

    def submit(
        self, request: EngineRequest, wake: asyncio.Event, interval: int, arrival_s: float
    ) -> Generation:
        """Queue a request. Raises EngineFullError or EngineDeadError, and ValueError for one too large."""
        self.check()
        now = self.now()
        self.engine.add(request, now)
        generation = Generation(request, wake, interval, arrival_s, now)
        self.generations[request.request_id] = generation
        self._queued.append(generation)
        self._work.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Forget a generation, whatever its state."""
        if self.generations.pop(generation.request.request_id, None) is not None:
            self.engine.abort(generation.request.request_id, self.now())

    def kill(self, message: str) -> None:
        """Let the engine die: generations under way end without their last token, new ones are refused."""
        self.dead = message
        for generation in list(self.generations.values()):
            self.abort(generation)
            generation.wake.set()

    async def run(self) -> None:
        """Step for ever."""
        planned_s = 0.0
        while True:
            duration_s = self.engine.begin_step(self.now())
            if duration_s is None:
                self._work.clear()
                await self._work.wait()
                planned_s = time.monotonic()
                continue
            self._note_admitted()
            self.on_step(self.engine.step_tokens)
            planned_s += duration_s * self.slowness / self.speedup
            delay_s = planned_s - time.monotonic()
            if delay_s < -_MAX_LAG_S:
                self.late_s -= delay_s
                planned_s -= delay_s
            # Also with nothing to sleep: others need the loop.
            await asyncio.sleep(max(delay_s, 0.0))
            self._deliver(self.engine.finish_step(self.now()))

    def _note_admitted(self) -> None:
        if self._queued:
            now, queued = self.now(), self._queued
            self._queued = []
            for generation in queued:
                if self.engine.prefill_left(generation.request.request_id) is None:
                    self._queued.append(generation)
                else:
                    generation.admitted_s = now

    def _deliver(self, outputs: list[Output]) -> None:
        now = self.now()
        for output in outputs:
            generation = self.generations.get(output.request_id)
            if generation is None:
                continue
            generation.tokens += output.new_tokens
            if output.first:
                generation.first_token_s = now
                generation.cached_tokens = output.cached_tokens
            if output.finished:
                generation.finished = True
                del self.generations[output.request_id]
            if generation.finished or generation.tokens >= generation.wake_at_tokens:
                generation.wake_at_tokens = generation.tokens + generation.interval
                generation.wake.set()
