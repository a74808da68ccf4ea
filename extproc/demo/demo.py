"""``extproc demo``: round robin against prefix affinity, on real Envoy, on this machine.

Emulated vLLM workers (`extproc.emulator.worker_http`), the router and Envoy run as child processes; a swarm
of agents talks to them over HTTP, first by Envoy's round robin, then, from empty caches, by the router.
Time in the engines runs ``--speedup`` times faster. The client, Envoy and the router take real time, and
the table, which shows model time, multiplies their milliseconds too: that makes routing look slower than it
is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from extproc.demo import envoy_setup, loadgen
from extproc.demo.demo_report import Row, summarise, table
from extproc.demo.personas import MIXED, ONE_DOMAIN, TWO_TYPES, Persona, Workload, make_persona, swarm
from extproc.demo.process import ProcessError, machine_cpu
from extproc.demo.stack import Stack, StackConfig
from extproc.fleet.config import PoolSettings

ROUND_ROBIN = "round robin"
AFFINITY = "prefix affinity"
MODEL = "emulated"
#: Of each arm's requests, the first that are left out: caches are empty and all streams start at once.
WARMUP_SHARE = 1 / 3
#: Seconds between lines of progress where there is no terminal.
_PLAIN_PROGRESS_S = 10.0
_PLAIN_WIDTH = 120
_BUSY_WARNING_SHARE = 0.85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--streams", type=_at_least_one, default=100, help="closed-loop clients (default: %(default)s)")
    add("--personas", type=_at_least_one, default=40, help="distinct long prompts (default: %(default)s)")
    add("--workers", type=_at_least_one, default=8, help="emulated vLLM workers (default: %(default)s)")
    add("--requests", type=_at_least_one, default=6, help="requests a stream (default: %(default)s)")
    add("--speedup", type=float, default=4.0, help="engine time over real time (default: %(default)s)")
    add("--seed", type=int, default=1, help="of prompts and draws (default: %(default)s)")
    add(
        "--rows",
        choices=("swarm", "all"),
        default="all",
        help="the swarm alone, or one domain, two agent types and a mix as well (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add("--keep", action="store_true", help="leave everything running afterwards, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if everything started and no request failed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have started us with SIGINT ignored
        signal.signal(number, _interrupt)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    workloads = [swarm(args.streams, args.personas)]
    if args.rows == "all":
        workloads += [ONE_DOMAIN, TWO_TYPES, MIXED]
    config = StackConfig(
        workers=args.workers,
        round_robin=True,
        worker_arguments=("--model", MODEL, "--speedup", str(args.speedup), "--stream-interval", "20"),
        edit=lambda bootstrap: _tell_speed(bootstrap, args.speedup),
    )
    console.print(
        f"Starting Envoy, the router and {args.workers} emulated vLLM workers "
        f"(190,000 tokens of KV cache each, time runs {args.speedup:g}x) ..."
    )
    try:
        with Stack(config) as stack:
            rows = _measure(console, stack, workloads, args)
            console.print(table(rows, {w.name: w.title for w in workloads}, _caption(args)))
            _verdict(console, rows)
            if args.json:
                args.json.write_text(json.dumps(_as_json(args, rows), indent=2) + "\n")
            failed = sum(row.failures for row in rows)
            if failed:
                console.print(f"{failed} requests failed; the first: {next(filter(None, _errors(rows)))}")
            if args.keep:
                _keep(console, stack)
            else:
                console.print("Try next: extproc demo --keep, then send requests of your own with curl.")
    except (ProcessError, OSError) as error:
        print(f"extproc demo: {error}", file=sys.stderr)
        return 1
    return 1 if failed else 0


def _tell_speed(bootstrap: envoy_setup.Json, speedup: float) -> None:
    """Let the router know that the engines are so many times faster than its defaults say."""
    usual = PoolSettings()
    for cluster in envoy_setup.pool_clusters(bootstrap):
        cluster["metadata"]["filter_metadata"][envoy_setup.POOL_METADATA] |= {
            "prefill_tokens_per_s": usual.prefill_tokens_per_s * speedup,
            "decode_ms": usual.decode_ms / speedup,
        }


def _measure(
    console: Console, stack: Stack, workloads: Sequence[Workload], args: argparse.Namespace
) -> list[Row]:
    count = max(workload.personas for workload in workloads)
    personas = [make_persona(index, args.seed, MODEL) for index in range(count)]
    rows = []
    for row, workload in enumerate(workloads):
        if row:
            # It remembers what the caches held, and they are about to be emptied.
            stack.router.restart()
        for arm, url in ((ROUND_ROBIN, stack.round_robin_url), (AFFINITY, stack.url)):
            _reset(stack)
            rows.append(_run_arm(console, stack, workload, personas, arm, url, args))
    return rows


def _run_arm(
    console: Console,
    stack: Stack,
    workload: Workload,
    personas: Sequence[Persona],
    arm: str,
    url: str,
    args: argparse.Namespace,
) -> Row:
    requests = args.requests * workload.streams
    late_s, cpu_s, began_s = _late_s(stack), _cpu_s(stack), time.monotonic()
    busy_before, total_before = machine_cpu()
    with _Display(console, f"{workload.title}, {arm}", requests) as display:
        work = loadgen.run(
            url, workload, personas, requests=requests, seed=args.seed, done=lambda _: display.advance()
        )
        results = uvloop.run(work)
    wall_s = time.monotonic() - began_s
    busy, total = machine_cpu()
    return summarise(
        workload.name,
        arm,
        results,
        warmup=int(requests * WARMUP_SHARE),
        speedup=args.speedup,
        workers=args.workers,
        cpu_share=(_cpu_s(stack) - cpu_s) / (wall_s * (os.cpu_count() or 1)),
        machine_busy_share=(busy - busy_before) / ((total - total_before) or 1.0),
        late_s=_late_s(stack) - late_s,
    )


class _Display:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._count = 0
        self._began_s = self._printed_s = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> _Display:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._console.print(f"{self._title}: {self._count} requests in {self._elapsed_s():.0f} s")

    def advance(self) -> None:
        """One more request has ended."""
        self._count += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif time.monotonic() - self._printed_s >= _PLAIN_PROGRESS_S:
            self._printed_s = time.monotonic()
            self._console.print(
                f"{self._title}: {self._count} of {self._total} requests, {self._elapsed_s():.0f} s"
            )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


def _reset(stack: Stack) -> None:
    deadline = time.monotonic() + 10.0
    while not stack.reset_caches():
        if time.monotonic() > deadline:
            raise ProcessError("a worker is still busy 10 s after the last request ended")
        time.sleep(0.1)


def _cpu_s(stack: Stack) -> float:
    return time.process_time() + sum(process.cpu_s() for process in stack.processes)


def _late_s(stack: Stack) -> float:
    total = 0.0
    for url in stack.worker_urls:
        with urllib.request.urlopen(url + "/metrics", timeout=5.0) as response:  # noqa: S310 - http, ours
            found = re.search(rb"^emulator:late_seconds_total (\S+)", response.read(), re.MULTILINE)
            total += float(found[1]) if found else 0.0
    return total


def _caption(args: argparse.Namespace) -> str:
    return (
        "Both ways start with empty caches. The first third of each one's requests is warm-up and left out "
        "(failures count).\n"
        f"TTFT: time to first token, in model time (wall time x {args.speedup:g}). "
        "Cached: share of prompt tokens, as the engines report it.\n"
        "Busiest: requests of the busiest worker over the mean. Time: wall clock, warm-up included."
    )


def _verdict(console: Console, rows: Sequence[Row]) -> None:
    before, after = rows[0], rows[1]
    faster = before.ttft_p50_s / after.ttft_p50_s if after.ttft_p50_s else 0.0
    throughput = after.requests_per_s / before.requests_per_s if before.requests_per_s else 0.0
    console.print(
        f"Prefix affinity: {after.hit_rate:.1%} of prompt tokens from cache instead of "
        f"{before.hit_rate:.1%}, the median first token {faster:.0f} times sooner, {throughput:.1f} times "
        "the throughput."
    )
    busiest = max(rows, key=lambda row: row.machine_busy_share)
    if busiest.machine_busy_share > _BUSY_WARNING_SHARE or any(row.late_s > row.wall_s / 20 for row in rows):
        console.print(
            f"Note: the machine was up to {busiest.machine_busy_share:.0%} busy (this demo: "
            f"{busiest.cpu_share:.0%}), so times are longer than they would be. A lower --speedup helps."
        )


def _errors(rows: Sequence[Row]) -> list[str]:
    return [row.first_error for row in rows]


def _as_json(args: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    names = ("streams", "personas", "workers", "requests", "speedup", "seed")
    return {
        "settings": {name: getattr(args, name) for name in names} | {"warmup_share": WARMUP_SHARE},
        "rows": [row.fields() for row in rows],
    }


def _keep(console: Console, stack: Stack) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20})
    console.print(
        f"\nStill running, until Ctrl-C:\n"
        f"  through the router   {stack.url}\n"
        f"  by round robin       {stack.round_robin_url}\n"
        f"  router's metrics     {stack.metrics_url}\n"
        f"  Envoy's admin page   {stack.admin_url}\n"
        f"  Envoy's YAML, logs   {stack.folder}\n"
    )
    # Not wrapped, so that it can be copied.
    print(
        f"curl -i {stack.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", flush=True
    )
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print("\nStopping ...")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
