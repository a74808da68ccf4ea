"""What happened in the last seconds: counts that only grow, and what they were a while ago.

A decision adds to a few numbers, which is all that it pays. Once a second the numbers are noted; a window is
the difference between now and the oldest note. Times to the first token are counted in buckets whose bounds
grow by `BUCKET_RATIO`, so a percentile is off by half a bucket at most, 6 %.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import log
from operator import sub

from msgspec import Struct

from extproc.live.status import WINDOW_S, Ttft

#: Between notes, in seconds, and how many are kept.
TICK_S = 1.0
NOTES = 1 + round(WINDOW_S / TICK_S)

#: Bucket 0 is all below a millisecond, the last one all above two minutes.
BUCKET_RATIO = 1.12
BUCKETS = 105
FIRST_BOUND_S = 0.001
LAST_BOUND_S = FIRST_BOUND_S * BUCKET_RATIO ** (BUCKETS - 2)

_BUCKETS_PER_E = 1.0 / log(BUCKET_RATIO)


def bucket(seconds: float) -> int:
    """The bucket that a time belongs to; whatever is no time belongs to the last."""
    if seconds < FIRST_BOUND_S:
        return 0
    if seconds < LAST_BOUND_S:
        return 1 + int(log(seconds / FIRST_BOUND_S) * _BUCKETS_PER_E)
    return BUCKETS - 1


def ttft(counts: array[int]) -> Ttft | None:
    """The percentiles of what was counted; None if nothing was."""
    sums = list(accumulate(counts))
    total = sums[-1]
    if not total:
        return None
    return Ttft(_quantile_ms(sums, 0.5 * total), _quantile_ms(sums, 0.99 * total))


def _quantile_ms(sums: list[int], rank: float) -> float:
    index = bisect_left(sums, rank)
    if index == 0:
        return 0.0  # below what can be told apart
    return round(float(1000.0 * FIRST_BOUND_S * BUCKET_RATIO ** (index - 0.5)), 1)


class Counts(Struct, frozen=True):
    """Decisions of some time: how many, their prompts' tokens, and of those the ones thought to be cached.

    ``predicted_s``: their predicted times to the first token in sum, ``ttft`` in buckets. ``moved``: picks
    that Envoy didn't use. ``overflow``: made while every worker was at its limit. ``refused``: requests
    refused instead. ``again_tokens``: prompt tokens whose prefix key had been seen before; ``lost_tokens``:
    of those, the ones that nevertheless found nothing cached.
    """

    decisions: int
    prompt_tokens: int
    cached_tokens: int
    predicted_s: float
    moved: int
    overflow: int
    refused: int
    again_tokens: int
    lost_tokens: int
    ttft: array[int]

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that were thought to be cached; None without any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


_NONE = array("Q", [0]) * BUCKETS
NOTHING = Counts(0, 0, 0, 0.0, 0, 0, 0, 0, 0, _NONE)


class Account:
    """Counts since the start, of a pool or a worker, with what they were in the last seconds.

    Whoever counts adds to the fields, which are those of `Counts`. The notes of all accounts are taken
    together, so that the first is as old in each.
    """

    __slots__ = (
        "again_tokens",
        "cached_tokens",
        "decisions",
        "lost_tokens",
        "moved",
        "notes",
        "overflow",
        "predicted_s",
        "prompt_tokens",
        "refused",
        "step",
        "ttft",
    )

    def __init__(self) -> None:
        self.decisions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.predicted_s = 0.0
        self.moved = 0
        self.overflow = 0
        self.refused = 0
        self.again_tokens = 0
        self.lost_tokens = 0
        self.ttft = array("Q", _NONE)
        self.notes: deque[Counts] = deque([NOTHING] * NOTES, maxlen=NOTES)
        self.step = NOTHING  # at the end of the history's last step

    def counts(self) -> Counts:
        """Since the start."""
        last = self.notes[-1]
        if (last.decisions, last.moved, last.refused) == (self.decisions, self.moved, self.refused):
            return last  # an idle worker's notes are one
        return Counts(
            self.decisions,
            self.prompt_tokens,
            self.cached_tokens,
            self.predicted_s,
            self.moved,
            self.overflow,
            self.refused,
            self.again_tokens,
            self.lost_tokens,
            array("Q", self.ttft),
        )

    def note(self) -> None:
        """A tick has passed."""
        self.notes.append(self.counts())

    def window(self) -> Counts:
        """In the time since the oldest note."""
        return minus(self, self.notes[0])


def minus(now: Counts | Account, then: Counts) -> Counts:
    """What came since a note of the same account."""
    if (now.decisions, now.moved, now.refused) == (then.decisions, then.moved, then.refused):
        return NOTHING
    return Counts(
        now.decisions - then.decisions,
        now.prompt_tokens - then.prompt_tokens,
        now.cached_tokens - then.cached_tokens,
        now.predicted_s - then.predicted_s,
        now.moved - then.moved,
        now.overflow - then.overflow,
        now.refused - then.refused,
        now.again_tokens - then.again_tokens,
        now.lost_tokens - then.lost_tokens,
        array("Q", map(sub, now.ttft, then.ttft)),
    )
