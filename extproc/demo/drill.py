"""``extproc drill``: breaks one worker after another under load and counts who noticed.

Real Envoy, the router and emulated vLLM workers run as child processes; agents arrive by a Poisson process,
at a rate that keeps the workers busy for ``--load`` of their time. After a quiet phase, the yardstick, each
kind of fault strikes another worker, in turn, with time to recover in between::

    quiet | kill ... | stop ... | slow ... | 503 ... | refuse ... | hang ...

All requests are streams. What may fail are those that a killed worker was already sending, or one that
closed its port with all its connections. TTFT counts from the client's request to its first token, retries
included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import aiohttp
import uvloop
from rich.console import Console

from extproc.demo import envoy_setup
from extproc.demo.drill_causes import Strike
from extproc.demo.drill_plan import (
    DECODE_S,
    DOWN_S,
    FAULT_S,
    FAULT_SHARE,
    PREFILL_S,
    PREFILL_TOKENS_PER_S,
    PROMPT_TOKENS,
    SLOWNESS,
    STEP_S,
    STOP_S,
    alone_s,
    request_rate,
)
from extproc.demo.drill_report import Phase, Report, print_report, summarise, worker_events
from extproc.demo.drill_virtual import VirtualDrill
from extproc.demo.loadgen import Result, ask
from extproc.demo.personas import Persona, make_persona, make_turn
from extproc.demo.process import Process, ProcessError
from extproc.demo.stack import Stack, StackConfig

MODEL = "emulated"

_PLAIN_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to break a worker. ``cuts``: it ends the streams that the worker is sending."""

    name: str
    strike: Callable[[Drill, int, float], Awaitable[None]]
    cuts: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--seconds", type=float, default=300.0, help="of faults, all kinds together (default: %(default)s)")
    add("--quiet-s", type=float, default=60.0, help="of quiet before them (default: %(default)s)")
    add("--warm-up-s", type=float, default=30.0, help="before that, not measured (default: %(default)s)")
    add("--workers", type=int, default=8, help="emulated vLLM workers (default: %(default)s)")
    add("--load", type=float, default=0.7, help="share of the workers' capacity (default: %(default)s)")
    add("--personas", type=int, default=64, help="distinct long prompts (default: %(default)s)")
    add(
        "--cold-share",
        type=float,
        default=0.05,
        help="requests with a prompt that nobody has sent before (default: %(default)s)",
    )
    add("--faults", default=",".join(FAULTS), help="which, in which order (default: %(default)s)")
    add("--seed", type=int, default=1, help="of prompts and arrivals (default: %(default)s)")
    add(
        "--virtual",
        action="store_true",
        help="in virtual time, without processes: seconds, and the same each time",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add("--keep-logs", action="store_true", help="keep the folder with YAML and logs")


def run(args: argparse.Namespace) -> int:
    """0: no request failed but those that a killed worker was sending, and TTFT stayed within bounds."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    unknown = [name for name in args.faults.split(",") if name not in FAULTS]
    if unknown:
        print(
            f"extproc drill: --faults {unknown[0]}: unknown; choose from {', '.join(FAULTS)}", file=sys.stderr
        )
        return 2
    try:
        report = _virtual(args) if args.virtual else _real(args, console)
    except (ProcessError, OSError) as error:
        print(f"extproc drill: {error}", file=sys.stderr)
        return 1
    print_report(console, report)
    if args.json:
        settings = {
            "seconds": args.seconds,
            "quiet_s": args.quiet_s,
            "workers": args.workers,
            "load": args.load,
            "personas": args.personas,
            "cold_share": args.cold_share,
            "requests_per_s": request_rate(args.workers, args.load, args.cold_share),
            "seed": args.seed,
            "virtual": args.virtual,
        }
        args.json.write_text(json.dumps({"settings": settings} | asdict(report), indent=2) + "\n")
    return 0 if report.passed else 1


def _virtual(args: argparse.Namespace) -> Report:
    drill = VirtualDrill(args).run()
    quiet, chaos = drill.phases
    return summarise(drill.results, quiet, chaos, drill.strikes, drill.events, alone_s)


def _real(args: argparse.Namespace, console: Console) -> Report:
    costs = ("--step-s", str(STEP_S), "--prefill-s", str(PREFILL_S), "--decode-s", str(DECODE_S))
    config = StackConfig(
        workers=args.workers,
        worker_arguments=("--model", MODEL, "--stream-interval", "20", *costs),
        edit=_tell_speed,
        keep_logs=args.keep_logs,
    )
    with Stack(config) as stack:
        drill = Drill(stack, args, console)
        uvloop.run(drill.run())
        quiet, chaos = drill.phases
        events = worker_events(stack.router.log.read_text())
        report = summarise(drill.results, quiet, chaos, drill.strikes, events, alone_s)
    if args.keep_logs:
        console.print(f"Logs: {stack.folder}")
    return report


def _tell_speed(bootstrap: envoy_setup.Json) -> None:
    for cluster in envoy_setup.pool_clusters(bootstrap):
        cluster["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA] |= {
            "prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
        }


class Drill:
    """The load and the faults."""

    def __init__(self, stack: Stack, args: argparse.Namespace, console: Console) -> None:
        self.stack = stack
        self.rate = request_rate(args.workers, args.load, args.cold_share)
        self.results: list[Result] = []
        self.strikes: list[Strike] = []
        self.phases: list[Phase] = []
        self._args = args
        self._console = console
        self._session: aiohttp.ClientSession | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Warm up, be quiet, break things, and wait for the last request."""
        args = self._args
        personas = [make_persona(i, args.seed, MODEL, PROMPT_TOKENS) for i in range(args.personas)]
        self._console.print(
            f"{args.workers} workers, {self.rate:.1f} requests/s, {args.warm_up_s:.0f} s to warm up, "
            f"{args.quiet_s:.0f} s of quiet, {args.seconds:.0f} s of faults"
        )
        timeout = aiohttp.ClientTimeout(total=120.0)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout
        ) as self._session:
            load = asyncio.create_task(self._load(personas))
            try:
                await asyncio.sleep(args.warm_up_s)
                began_s = time.monotonic()
                await asyncio.sleep(args.quiet_s)
                self.phases.append(Phase(began_s, time.monotonic()))
                await self._break_all()
                self.phases.append(Phase(self.phases[0].end_s, time.monotonic()))
            finally:
                load.cancel()
            await asyncio.gather(*self._open)

    async def _load(self, personas: list[Persona]) -> None:
        draws = Random(f"{self._args.seed} arrivals")
        due_s = time.monotonic()
        while True:
            due_s += draws.expovariate(self.rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            index = draws.randrange(len(personas))
            persona = personas[index]
            if draws.random() < self._args.cold_share:
                index = len(personas) + len(self.results)
                persona = make_persona(index, self._args.seed, MODEL, PROMPT_TOKENS)
            result = Result(len(self.results), index, time.monotonic())
            self.results.append(result)
            assert self._session is not None
            body = persona.body(make_turn(draws))
            task = asyncio.create_task(ask(self._session, self.stack.url, body, result))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _break_all(self) -> None:
        names = self._args.faults.split(",")
        slot_s = self._args.seconds / len(names)
        for number, name in enumerate(names):
            slot_end_s = time.monotonic() + slot_s
            index = number % len(self.stack.workers)
            fault = FAULTS[name]
            self._console.print(f"{name}: worker {index}")
            address = self.stack.worker_urls[index].removeprefix("http://")
            strike = Strike(name, address, time.monotonic(), time.time(), cuts=fault.cuts)
            self.strikes.append(strike)
            await fault.strike(self, index, min(FAULT_S, FAULT_SHARE * slot_s))
            strike.ended_s, strike.ended_wall_s = time.monotonic(), time.time()
            await asyncio.sleep(max(0.0, slot_end_s - time.monotonic()))
            strike.slot_end_wall_s = time.time()

    # --- faults ----------------------------------------------------------------------------------

    async def kill(self, index: int, seconds: float) -> None:
        """SIGKILL; a new process soon after."""
        worker = self.stack.workers[index]
        await asyncio.to_thread(worker.kill)
        await asyncio.sleep(min(seconds, DOWN_S))
        worker.start()
        await asyncio.to_thread(worker.wait_ready)

    async def stop(self, index: int, seconds: float) -> None:
        """SIGSTOP, then SIGCONT."""
        _signal(self.stack.workers[index], signal.SIGSTOP)
        try:
            await asyncio.sleep(min(seconds, STOP_S))
        finally:
            _signal(self.stack.workers[index], signal.SIGCONT)

    async def emulate(self, index: int, seconds: float, fault: dict[str, object]) -> None:
        """A fault of the emulated worker's own."""
        assert self._session is not None
        url = self.stack.worker_urls[index] + "/emulate"
        async with self._session.post(url, json=fault) as armed:
            armed.raise_for_status()
        await asyncio.sleep(seconds)
        async with self._session.delete(url) as disarmed:
            disarmed.raise_for_status()

    async def refuse(self, index: int, seconds: float) -> None:
        """The port is closed, with all connections."""
        assert self._session is not None
        url = self.stack.worker_urls[index] + "/emulate"
        async with self._session.post(url, json={"fail": "refuse", "seconds": seconds}) as armed:
            armed.raise_for_status()
        await asyncio.sleep(seconds)


def _emulated(**fault: object) -> Callable[[Drill, int, float], Awaitable[None]]:
    return lambda drill, index, seconds: drill.emulate(index, seconds, fault)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", Drill.kill, cuts=True),
        Fault("stop", Drill.stop),
        Fault("slow", _emulated(fail="slow", factor=SLOWNESS)),
        Fault("503", _emulated(fail=503, times=0)),
        Fault("refuse", Drill.refuse, cuts=True),
        Fault("hang", _emulated(fail="hang", times=0)),
    )
}


def _signal(process: Process, number: signal.Signals) -> None:
    if process.pid is not None:
        os.kill(process.pid, number)
