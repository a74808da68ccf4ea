"""``extproc lint``: which prompts break their own caching."""

from __future__ import annotations

import argparse
import math
import sys

import msgspec

from extproc.fleet.config import PoolSettings
from extproc.lint import server
from extproc.lint.costs import rate_of
from extproc.lint.linter import Linter, Options
from extproc.lint.log import LogError, read_logs
from extproc.lint.report import as_json, show

_SETTINGS = PoolSettings()
_OPTIONS = Options()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="JSON lines of request bodies, bare or in `body`, in the order of time; .gz too; - is stdin",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="instead of a log: the --metrics address of a running router, for what its hashes show",
    )
    cost = parser.add_argument_group("costs")
    cost.add_argument(
        "--prefill-tokens-per-s",
        type=_positive,
        default=_SETTINGS.prefill_tokens_per_s,
        metavar="N",
        help="a worker's prefill speed (default %(default)g)",
    )
    cost.add_argument(
        "--requests-per-day",
        type=_positive,
        metavar="N",
        help="what the log stands for; default: by its timestamps, or per 1,000 requests without any",
    )
    cost.add_argument(
        "--cache-tokens",
        type=_count,
        default=_OPTIONS.cache_tokens,
        metavar="N",
        help="KV cache of the whole fleet; the default (100 million) is as good as endless",
    )
    cost.add_argument(
        "--min-tokens",
        type=_count,
        default=2000,
        metavar="N",
        help="leave out what loses fewer tokens in this log (default %(default)s)",
    )
    cost.add_argument(
        "--min-share",
        type=_share,
        default=0.03,
        metavar="X",
        help="leave out what loses a smaller share of its requests' tokens (default %(default)s)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--block-tokens",
        type=_count,
        default=_OPTIONS.block_tokens,
        metavar="N",
        help="tokens of a KV block (default %(default)s, vLLM's)",
    )
    engine.add_argument(
        "--chars-per-token",
        type=_positive,
        default=_SETTINGS.chars_per_token,
        metavar="X",
        help="bytes of text for a token (default %(default)g)",
    )
    engine.add_argument(
        "--content-format",
        choices=("string", "openai"),
        default=_SETTINGS.content_format,
        help="vLLM's --chat-template-content-format (default %(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything, as JSON")
    output.add_argument(
        "--show-text",
        type=_count,
        default=0,
        metavar="N",
        help="show N characters of the prompts around each fault; default: no text of a prompt at all",
    )
    output.add_argument(
        "--memory-mb",
        type=_count,
        default=_OPTIONS.memory_bytes >> 20,
        metavar="N",
        help="memory for the prompts to compare with (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found. 0: nothing, 1: faults, 2: there is nothing to look at."""
    if bool(args.server) == bool(args.files):
        print("extproc lint: give FILE (- is standard input) or --server URL", file=sys.stderr)
        return 2
    if args.server:
        return server.run(args.server, as_json=args.json)
    linter = Linter(
        Options(
            block_tokens=args.block_tokens,
            chars_per_token=args.chars_per_token,
            content_format=args.content_format,
            cache_tokens=args.cache_tokens,
            memory_bytes=args.memory_mb << 20,
            show_chars=args.show_text,
        )
    )
    try:
        linter.read(read_logs(args.files))
    except LogError as error:
        print(f"extproc lint: {error}", file=sys.stderr)
        return 2
    totals = linter.totals
    if not totals.requests:
        for bad in totals.named_bad_lines:
            print(f"{bad.file}:{bad.line}: {bad.why}", file=sys.stderr)
        print(
            f"extproc lint: no usable request in {', '.join(args.files)} ({totals.bad_lines:,} bad lines);"
            " a log has one JSON object a line, a request's body or one with it in `body`",
            file=sys.stderr,
        )
        return 2
    findings = linter.report(min_tokens=args.min_tokens, min_share=args.min_share)
    rate = rate_of(
        totals,
        requests_per_day=args.requests_per_day,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(linter, findings, rate))).decode())
    else:
        print(show(linter, findings, rate))
    return 1 if any(not finding.hint for finding in findings) else 0


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} isn't above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} isn't a share from 0 to 1")
    return value


def _count(text: str) -> int:
    value = _number(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} isn't a whole number of at least 1")
    return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number")
    return value
