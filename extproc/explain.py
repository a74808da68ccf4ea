"""``extproc explain``: what would become of a request, and why.

Asks a running router (``--server``, the address of its ``--metrics``), whose caches and load count, or a
fresh one made from a YAML (``--envoy-config``), which shows what the configuration does with nothing known.
Nothing is sent to any worker, and nothing of the prompt is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from extproc.envoyconf import ConfigError, load
from extproc.facts import RequestFacts
from extproc.fleet.config import RouterConfig
from extproc.fleet.dns import Resolver
from extproc.fleet.settings import RouteOverrides
from extproc.observe.exporter import DEFAULT_PATH, EXPLAIN_PATH, PATH_PARAMETER
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.routing.explanation import Explanation

TIMEOUT_S = 30.0


class ExplainError(Exception):
    """There is nothing to explain; the text says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A request, and who is asked."""
    parser.add_argument(
        "--body",
        required=True,
        type=Path,
        metavar="FILE",
        help="the request's JSON body; - is standard input",
    )
    parser.add_argument("--path", default=DEFAULT_PATH, help="the request's path (default %(default)s)")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="a header of the request that admission looks at; may be repeated",
    )
    parser.add_argument("--pool", help="the pool, where there are several")
    whom = parser.add_mutually_exclusive_group(required=True)
    whom.add_argument("--server", metavar="URL", help="a running router's --metrics, http://127.0.0.1:9090")
    whom.add_argument(
        "--envoy-config", type=Path, metavar="FILE", help="a router that has just started with this YAML"
    )
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the explanation. 2: the body, the YAML or the server is unusable."""
    try:
        body = _read(args.body)
        headers = dict([_header(text) for text in args.header])
        if args.server:
            explanation = ask(args.server, body, path=args.path, headers=headers, pool=args.pool)
        else:
            explanation = of_yaml(args.envoy_config, body, path=args.path, headers=headers, pool=args.pool)
    except (ExplainError, ConfigError) as error:
        print(f"extproc explain: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(explanation)).decode())
    else:
        print(show(explanation))
    return 0


def ask(server: str, body: bytes, *, path: str, headers: dict[str, str], pool: str | None) -> Explanation:
    """A running router's word. Raises ExplainError."""
    query = {PATH_PARAMETER: path} | ({"x-extproc-pool": pool} if pool else {})
    if not server.startswith(("http://", "https://")):
        server = f"http://{server}"
    request = urllib.request.Request(  # noqa: S310 - http, see above
        f"{server.rstrip('/')}{EXPLAIN_PATH}?{urlencode(query)}",
        data=body,
        headers={"content-type": "application/json"} | headers,
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 - http, see above
            return msgspec.json.decode(response.read(), type=Explanation)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip().removeprefix(f"{error.code}: ")
        hint = "; is this the router's --metrics address?" if said == "Not Found" else ""
        raise ExplainError(f"{server}: {error.code}: {said}{hint}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)  # of urllib's wrapping
        raise ExplainError(f"{server}: {why}; is this the router's --metrics address?") from error


def of_yaml(
    envoy_config: Path, body: bytes, *, path: str, headers: dict[str, str], pool: str | None
) -> Explanation:
    """What a router would do that has just started. Raises ExplainError, ConfigError."""
    config = asyncio.run(_resolved(load(envoy_config)))
    router = Router(config, Observer())
    lower = {name.lower(): value for name, value in headers.items()}
    facts = RequestFacts(
        path=path,
        content_type="application/json",
        headers={name: lower[name] for name in router.wanted_headers & lower.keys()},
    )
    explanation = router.explain(facts, RouteOverrides(pool=pool), body, time.monotonic())
    if explanation is None:
        raise ExplainError(f"which --pool? {envoy_config} has: {', '.join(sorted(config.pools)) or 'none'}")
    return explanation


async def _resolved(config: RouterConfig) -> RouterConfig:
    found = config

    def take(resolved: RouterConfig) -> None:
        nonlocal found
        found = resolved

    def warn(name: str, why: str) -> None:
        print(f"extproc explain: {name} can't be resolved: {why}", file=sys.stderr)

    await Resolver(take, warn).use(config)
    return found


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ExplainError(f"--body {path}: {error.strerror}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ExplainError(f"--header {text}: use NAME:VALUE")
    return name.strip(), value.strip()


_COLUMNS = (
    "pick",
    "worker",
    "state",
    "in flight",
    "cached",
    "uncached",
    "own ms",
    "others ms",
    "decode ms",
    "backlog ms",
    "evict ms",
    "total ms",
    "",
)


def show(explanation: Explanation) -> str:
    """The explanation for people."""
    lines = [f"pool {explanation.pool}, policy {explanation.policy}"]
    if explanation.unreadable:
        lines.append(f"no prompt could be read ({explanation.unreadable}): goes by load alone")
    else:
        lines.append(f"prompt: about {explanation.prompt_tokens:,} tokens")
    if explanation.refusal is not None:
        refusal = explanation.refusal
        after = "" if refusal.retry_after_s is None else f", Retry-After {refusal.retry_after_s:.1f} s"
        lines.append(f"REFUSED with {refusal.status} ({refusal.reason}{after}): {refusal.message}")
    if not explanation.picks:
        return "\n".join([*lines, "the pool has no worker"])
    lines += [
        f"pick: {explanation.picks[0]}, because: {_reason(explanation)}",
        f"fallbacks: {', '.join(explanation.picks[1:]) or 'none'}",
        f"predicted time to first token: {explanation.predicted_ttft_ms:,.1f} ms,"
        f" with {explanation.cached_tokens:,} tokens cached;"
        f" prefills take {explanation.utilisation:.0%} of the workers' time",
    ]
    if explanation.panic:
        lines.append("PANIC: so many workers are out that all count as healthy")
    if not explanation.by_cost:
        lines.append("the ranking doesn't go by these costs")
    rows = [
        [
            str(cost.place or "-"),
            cost.worker,
            cost.state,
            f"{cost.in_flight}/{cost.max_inflight}",
            f"{cost.cached_tokens:,}",
            f"{cost.uncached_tokens:,}",
            *[
                f"{ms:,.2f}"
                for ms in (
                    cost.own_ms,
                    cost.others_ms,
                    cost.decode_ms,
                    cost.backlog_ms,
                    cost.eviction_ms,
                    cost.total_ms,
                )
            ],
            f"passed over: {cost.passed_over}" if cost.passed_over else "",
        ]
        for cost in explanation.workers
    ]
    return "\n".join([*lines, "", *_table([list(_COLUMNS), *rows])])


_REASONS = {
    "affinity": "no worker holds more of the prompt",
    "load": "others hold more of the prompt, but waiting there would cost more",
    "cold": "no worker holds any of the prompt, and this one costs least",
    "spread": "this prompt's own crowd has paid for a copy",
    "overflow": "every worker is at its limit",
    "limit": "a better one is at its limit",
    "health": "a better one isn't well",
}


def _reason(explanation: Explanation) -> str:
    text = _REASONS.get(explanation.reason)
    return f"{explanation.reason} ({text})" if text else explanation.reason


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {1, 2, len(widths) - 1}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
