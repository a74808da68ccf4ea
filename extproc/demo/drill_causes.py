"""Why a request's first token came late, and what no router could have spared: the floor under a drill's p99.

A prompt whose worker is gone, or must be passed over, has to be computed anew somewhere, and a request waits
for that. So where more prompts are lost than a hundredth of the requests, the 99th percentile is the time of
a cold prefill, however well all others are treated. `floor` says what it would be if nothing else happened:
each lost prompt computed once, alone on an idle worker, and all others served as in the quiet phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from extproc.demo.demo_report import percentile
from extproc.demo.loadgen import Result

#: Headers that take longer than this came from a second try, or from a worker that was stopped.
WAITED_S = 0.5


@dataclass(slots=True)
class Strike:
    """A fault at a worker: monotonic seconds for the requests, wall seconds for the router's log.

    ``cuts``: it ends the streams that the worker is sending, and loses its cache.
    """

    fault: str
    worker: str
    began_s: float
    began_wall_s: float
    ended_s: float = 0.0
    ended_wall_s: float = 0.0
    slot_end_wall_s: float = 0.0
    cuts: bool = False


class Cause(StrEnum):
    """What made a request slow."""

    WAITED = "waited for headers"
    SLOW = "slow worker"
    NEW = "never seen"
    ANEW = "computed anew"
    BEHIND = "behind others"  #: a cached prompt; others were being computed there


def cause(result: Result, strike: Strike, seen: bool) -> Cause:
    """Of one slow request during a fault. ``seen``: its prompt had been sent before."""
    if result.headers_s > WAITED_S:
        return Cause.WAITED
    if strike.fault == "slow" and result.worker == strike.worker:
        return Cause.SLOW
    if 2 * result.cached_tokens < result.prompt_tokens:
        return Cause.ANEW if seen else Cause.NEW
    return Cause.BEHIND


def first_seen(results: Iterable[Result]) -> dict[int, float]:
    """When each prompt was sent first."""
    first: dict[int, float] = {}
    for result in results:
        first[result.persona] = min(result.start_s, first.get(result.persona, result.start_s))
    return first


def lost(results: Sequence[Result], strikes: Sequence[Strike], until_s: float) -> list[Result]:
    """For each fault, the first request of each prompt that its worker held, if it came too late to go there.

    That is while the fault lasts, or until the next one where the cache is gone.
    """
    out = []
    ordered = sorted(results, key=lambda r: r.start_s)
    for number, strike in enumerate(strikes):
        end_s = strikes[number + 1].began_s if number + 1 < len(strikes) else until_s
        if not strike.cuts:
            end_s = strike.ended_s
        home: dict[int, str] = {}
        for result in ordered:
            if result.start_s < strike.began_s:
                home[result.persona] = result.worker or home.get(result.persona, "")
            elif result.start_s < end_s and home.pop(result.persona, "") == strike.worker:
                out.append(result)
    return out


def floor(
    quiet: Sequence[float], lost_tokens: Sequence[int], count: int, alone_s: Callable[[int], float]
) -> float:
    """The least possible p99 of TTFT, in seconds, of ``count`` requests.

    ``quiet``: TTFTs of the quiet phase. ``lost_tokens``: lengths of the prompts that `lost` finds.
    ``alone_s``: how long one of so many tokens takes on an idle worker.
    """
    others = max(0, count - len(lost_tokens))
    ranked = sorted(quiet)
    same = [ranked[i * len(ranked) // others] for i in range(others)] if ranked else []
    return percentile(sorted([*same, *(alone_s(tokens) for tokens in lost_tokens)]), 99)
