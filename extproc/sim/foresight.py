"""What would have become of a request: its time to first token on a copy of a worker.

Later arrivals are left out. They queue behind it, so they could only slow it down by what its worker decodes
meanwhile.
"""

from __future__ import annotations

from copy import deepcopy

from extproc.emulator.engine import EngineRequest
from extproc.sim.simulation import Fleet, Worker
from extproc.sim.workload import SimRequest

_GHOST = "ghost"


def ttft_s(worker: Worker, request: SimRequest, now: float, fleet: Fleet) -> float:
    """Seconds until ``request``, sent to ``worker`` now, has its first token; the worker isn't changed."""
    engine = deepcopy(worker.engine)
    arrivals = [
        (flight.arrived_s + fleet.cost.frontend_s(flight.request.prompt_tokens), str(index), flight.request)
        for index, flight in worker.coming.items()
    ]
    arrivals.append((now + fleet.cost.frontend_s(request.prompt_tokens), _GHOST, request))
    arrivals.sort(key=lambda arrival: arrival[0], reverse=True)

    def add_until(time: float) -> None:
        while arrivals and arrivals[-1][0] <= time:
            at, name, what = arrivals.pop()
            engine.add(EngineRequest(name, what.prompt_tokens, what.output_tokens, what.chain), at)

    clock, end = now, worker.end_s
    if engine.stepping and arrivals[-1][0] < end:
        end = engine.shorten(max(now, arrivals[-1][0]))
    while True:
        if engine.stepping:
            clock = end
            add_until(clock)
            if any(output.first and output.request_id == _GHOST for output in engine.finish_step(clock)):
                return clock - now
        add_until(clock)
        duration = engine.begin_step(clock)
        if duration is None:
            clock = arrivals[-1][0]
            add_until(clock)
            duration = engine.begin_step(clock)
            assert duration is not None
        end = clock + duration
