"""``extproc bench``: choose a benchmark and print its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from extproc.bench import live, prompt, routing, scrape, tables, tracing

BENCHES: Mapping[str, tuple[Callable[[], str], str]] = {
    "prompt": (
        lambda: prompt.report(prompt.bench_prompt()),
        "reading a body and hashing its prompt, by size",
    ),
    "decide": (lambda: routing.report_decide(routing.bench_decide()), "a decision for a 1,000-block chain"),
    "cache": (lambda: routing.report_cache(routing.bench_cache()), "memory of the cache picture, by traffic"),
    "tables": (
        lambda: tables.report(tables.bench_tables()),
        "memory of everything else, filled to its bound",
    ),
    "scrape": (
        lambda: f"{scrape.report_page(scrape.bench_page())}\n{scrape.report_scrape(scrape.bench_scrape())}",
        "reading the metrics of 128 workers while 10,000 requests run",
    ),
    "live": (lambda: live.report(live.bench_live()), "what the live picture adds, with 128 workers"),
    "tracing": (tracing.report, "what tracing adds to a request"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which benchmarks; all without a name."""
    summary = "; ".join(f"{name}: {text}" for name, (_, text) in BENCHES.items())
    parser.add_argument("names", nargs="*", type=_name, metavar="BENCH", help=summary)


def _name(text: str) -> str:
    if text not in BENCHES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(BENCHES)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Print each table as it is ready."""
    for name in args.names or BENCHES:
        bench, summary = BENCHES[name]
        print(f"{name}: {summary}\n{bench()}\n", flush=True)
    return 0
