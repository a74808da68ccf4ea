"""What two prompts share, in order: patience diff on normal forms.

Chunks that stand once in each of the two are the anchors; the longest sequence of anchors that is in order in
both is kept (patience sorting), and grown over what repeats. What is left between are the gaps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """``length`` chunks that agree, from index ``new`` of the one prompt and ``old`` of the other on."""

    new: int
    old: int
    length: int


def align(new: Sequence[int], old: Sequence[int]) -> list[Run]:
    """Runs in order, none touching the next in both prompts. O(n log n) in the number of chunks."""
    shortest = min(len(new), len(old))
    head = 0
    while head < shortest and new[head] == old[head]:
        head += 1
    tail = 0
    while tail < shortest - head and new[-1 - tail] == old[-1 - tail]:
        tail += 1
    runs = [Run(0, 0, head)] if head else []
    new_end, old_end = len(new) - tail, len(old) - tail
    for i, j in _anchors(new, old, head, new_end, old_end):
        last = runs[-1] if runs else Run(0, 0, 0)
        if i < last.new + last.length:
            continue  # the run before has grown over it
        while i > last.new + last.length and j > last.old + last.length and new[i - 1] == old[j - 1]:
            i, j = i - 1, j - 1
        count = 1
        while i + count < new_end and j + count < old_end and new[i + count] == old[j + count]:
            count += 1
        _append(runs, Run(i, j, count))
    if tail:
        _append(runs, Run(new_end, old_end, tail))
    return runs


def _append(runs: list[Run], run: Run) -> None:
    if runs:
        last = runs[-1]
        if run.old < last.old + last.length:
            return  # would step back
        if (last.new + last.length, last.old + last.length) == (run.new, run.old):
            runs[-1] = Run(last.new, last.old, last.length + run.length)
            return
    runs.append(run)


def _anchors(
    new: Sequence[int], old: Sequence[int], start: int, new_end: int, old_end: int
) -> list[tuple[int, int]]:
    times = Counter(old[start:old_end])
    place = {chunk: j for j, chunk in enumerate(old[start:old_end], start) if times[chunk] == 1}
    times = Counter(new[start:new_end])
    pairs = [
        (i, place[chunk])
        for i, chunk in enumerate(new[start:new_end], start)
        if times[chunk] == 1 and chunk in place
    ]
    # Longest increasing subsequence of the second numbers.
    tops: list[int] = []
    top_pairs: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        pile = bisect_left(tops, j)
        if pile == len(tops):
            tops.append(j)
            top_pairs.append(index)
        else:
            tops[pile], top_pairs[pile] = j, index
        before.append(top_pairs[pile - 1] if pile else -1)
    chain: list[tuple[int, int]] = []
    index = top_pairs[-1] if top_pairs else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]
