"""What a running router can tell of broken prefixes: forks in its pictures of the caches, no text."""

from __future__ import annotations

import sys
import textwrap
import urllib.error
import urllib.request

import msgspec

from extproc.observe.exporter import FORKS_PATH
from extproc.routing.forks import Forks

TIMEOUT_S = 30.0

_CAVEAT = (
    "The router keeps hashes only. Many prompts that part at one depth, are never seen again and are of about"
    " the same length are most likely one template with something that changes early. Whether the rest is"
    " really the same text, whose prompts they are, and what stands there, only a log can tell:"
    " extproc lint FILE."
)


class ServerError(Exception):
    """The router can't be asked; the text says why."""


def ask(server: str) -> dict[str, Forks]:
    """The forks of each pool of a running router. Raises ServerError."""
    if not server.startswith(("http://", "https://")):
        server = f"http://{server}"
    url = f"{server.rstrip('/')}{FORKS_PATH}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 - http, see above
            return msgspec.json.decode(response.read(), type=dict[str, Forks])
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace").strip()
        raise ServerError(f"{server}: {error.code}: {text}") from error
    except (OSError, ValueError) as error:
        raise ServerError(f"{server}: {error}; is this the router's --metrics address?") from error


def run(server: str, *, as_json: bool) -> int:
    """Print a router's forks. 0: none, 1: some, 2: it can't be asked."""
    try:
        pools = ask(server)
    except ServerError as error:
        print(f"extproc lint: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(pools)).decode())
    else:
        print(show(pools))
    return 1 if any(pool.forks for pool in pools.values()) else 0


def show(pools: dict[str, Forks]) -> str:
    """The forks for people, within 100 columns."""
    lines: list[str] = []
    for name, pool in sorted(pools.items()):
        lines.append(f"pool {name}: {pool.nodes:,} runs of blocks, {pool.block_tokens} tokens a block")
        if pool.partial:
            lines.append("  stopped there; deeper forks are missing")
        if not pool.forks:
            lines.append("  no fork that looks self-inflicted")
        for fork in pool.forks:
            depth = (
                f"token {fork.depth_tokens:,}"
                if fork.depth_tokens
                else f"the first {pool.block_tokens} tokens"
            )
            lines += [
                f"  at {depth}: {fork.branches:,} branches, {fork.single:,} of one prompt each,",
                f"    {fork.alike:,} of these about {fork.tail_tokens:,} tokens long:"
                f" up to {fork.lost_tokens:,} tokens that caching could save",
            ]
    if any(pool.forks for pool in pools.values()):
        lines += ["", *textwrap.wrap(_CAVEAT, 100)]
    return "\n".join(lines)
