"""Where a prompt and its nearest earlier one differ, and how much equal text follows each difference.

Differences come in three sorts: a *gap* in the alignment; a *spelling*, where normal forms agree and bytes
don't; an *order*, gaps that hold the same chunks in another order. Those with less than a block of equal text
between them count as one, since no cache could use what is between; and so do those of white space or key
order in one part of a prompt, since nobody mends them one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, zip_longest
from statistics import median_low

from extproc.lint.alignment import Run, align
from extproc.lint.memory import Memory, Remembered
from extproc.lint.text import without_white_space

#: Share of the text between the first and the last moved chunk that must have moved, to call it an order.
_MOVED_SHARE = 0.85

#: Shorter chunks (commas between tools, headers) say nothing about an order.
_TELLING_BYTES = 8

#: Chunks that are asked how many prompts have them.
_WITNESSES = 40


class Sort(Enum):
    """What a difference is, before anyone looks at the text."""

    GAP = "gap"
    ORDER = "order"
    SPELLING = "spelling"
    MODEL = "model"
    SALT = "salt"


@dataclass(slots=True)
class Difference:
    """One difference. All positions are bytes of the new prompt.

    Attributes:
        sort: what it is.
        start, end: what differs.
        new, old: the bytes there, in each prompt; of a joined difference, of its first part.
        is_json: it is in tools or other JSON.
        spelled: white space or key order only.
        moved_bytes: how much of the span is the same in another order.
        equal_end: up to here the prompts agree again.
        landing: index of the first chunk that lies wholly in that text, -1 if none does.
        having: how many earlier prompts have that text, or what has moved.
        others: differences that are part of this one.

    """

    sort: Sort
    start: int
    end: int
    new: bytes
    old: bytes
    is_json: bool = False
    spelled: bool = False
    moved_bytes: int = 0
    equal_end: int = 0
    landing: int = -1
    having: int = 0
    others: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class Comparison:
    """Two prompts side by side.

    ``data``, ``old``: their bytes. ``offsets``: where each chunk of the new prompt starts, and its end.
    ``differences``: in order. ``matched_end``, ``old_matched_end``: the end of the last run, in each.
    """

    data: bytes
    old: bytes
    offsets: list[int]
    differences: list[Difference]
    matched_end: int
    old_matched_end: int


def compare(
    memory: Memory,
    data: bytes,
    chunks: Sequence[int],
    scope: tuple[bytes, bytes, bytes],
    known: Remembered,
    block_bytes: int,
) -> Comparison:
    """Lay a new prompt beside a remembered one."""
    new_norms, old_norms = memory.norms(chunks), memory.norms(known.chunks)
    offsets = [0, *accumulate(memory.lengths(chunks))]
    old_offsets = [0, *accumulate(memory.lengths(known.chunks))]
    old = memory.text(known.chunks)
    runs = align(new_norms, old_norms)
    last = runs[-1] if runs else Run(0, 0, 0)
    matched_end, old_matched_end = offsets[last.new + last.length], old_offsets[last.old + last.length]
    ended = [*runs, Run(len(chunks), len(known.chunks), 0)]
    found = _gaps(data, old, offsets, old_offsets, ended)
    _orders(memory, chunks, known.chunks, offsets, ended, found)
    _spellings(memory, chunks, known.chunks, offsets, runs, found)
    differences = sorted((d for d in found if d is not None), key=lambda d: d.start)
    for position, sort in ((2, Sort.SALT), (1, Sort.MODEL)):
        if scope[position] != known.scope[position]:
            differences.insert(0, Difference(sort, 0, 0, scope[position], known.scope[position]))
    differences = _joined(data, differences, matched_end, block_bytes)
    for difference in differences:
        difference.landing = _landing(offsets, difference)
        if difference.sort is Sort.ORDER:
            start, end = difference.start, difference.end
        else:
            start, end = difference.end, difference.equal_end
        difference.having = _having(memory, chunks, offsets, start, end)
    return Comparison(data, old, offsets, differences, matched_end, old_matched_end)


def _gaps(
    data: bytes, old: bytes, offsets: list[int], old_offsets: list[int], runs: list[Run]
) -> list[Difference | None]:
    """A difference for the gap before each run, None where there is none; cut down to the bytes."""
    found: list[Difference | None] = []
    at = old_at = 0
    for run in runs:
        start, end = offsets[at], offsets[run.new]
        old_start, old_end = old_offsets[old_at], old_offsets[run.old]
        at, old_at = run.new + run.length, run.old + run.length
        if start == end and old_start == old_end:
            found.append(None)
            continue
        same = _common_head(data[start:end], old[old_start:old_end])
        start, old_start = start + same, old_start + same
        same = _common_tail(data[start:end], old[old_start:old_end])
        end, other = end - same, old[old_start : old_end - same]
        spelled = without_white_space(data[start:end]) == without_white_space(other)
        found.append(Difference(Sort.GAP, start, end, data[start:end], other, spelled=spelled))
    return found


class _Gaps:
    """What each gap of an alignment holds on either side: the normal forms of telling chunks."""

    def __init__(
        self, memory: Memory, chunks: Sequence[int], old_chunks: Sequence[int], runs: list[Run]
    ) -> None:
        self.size: dict[int, int] = {}
        self.is_json: dict[int, bool] = {}
        self.come: list[list[int]] = []
        self.gone: list[list[int]] = []
        at = old_at = 0
        for run in runs:
            self.come.append(self._telling(memory, chunks[at : run.new]))
            self.gone.append(self._telling(memory, old_chunks[old_at : run.old]))
            at, old_at = run.new + run.length, run.old + run.length

    def _telling(self, memory: Memory, chunks: Sequence[int]) -> list[int]:
        telling: list[int] = []
        for number, length, norm in zip(chunks, memory.lengths(chunks), memory.norms(chunks), strict=True):
            if length >= _TELLING_BYTES:
                telling.append(norm)
                self.size[norm], self.is_json[norm] = length, memory.is_json(number)
        return telling

    def bytes_of(self, counts: Counter[int]) -> int:
        return sum(self.size[norm] * count for norm, count in counts.items())


def _orders(
    memory: Memory,
    chunks: Sequence[int],
    old_chunks: Sequence[int],
    offsets: list[int],
    runs: list[Run],
    found: list[Difference | None],
) -> None:
    """Join gaps that hold the same chunks in another order. A last run of nothing ends ``runs``."""
    gaps = _Gaps(memory, chunks, old_chunks, runs)
    moved = set().union(*gaps.come) & set().union(*gaps.gone)
    for json in (True, False):  # tools apart from text: each has its own fix
        if some := {norm for norm in moved if gaps.is_json[norm] == json}:
            _join_order(gaps, some, memory.norms(chunks), offsets, runs, found, json)


def _join_order(
    gaps: _Gaps,
    moved: set[int],
    norms: Sequence[int],
    offsets: list[int],
    runs: list[Run],
    found: list[Difference | None],
    is_json: bool,
) -> None:
    come = [Counter(n for n in gap if gaps.is_json[n] == is_json) for gap in gaps.come]
    gone = [Counter(n for n in gap if gaps.is_json[n] == is_json) for gap in gaps.gone]
    touched = [i for i in range(len(runs)) if not (come[i].keys() | gone[i].keys()).isdisjoint(moved)]
    first, last = touched[0], touched[-1]
    end = offsets[runs[last].new]
    if last == len(runs) - 1:  # behind the last moved chunk the prompts may go apart for good
        start = runs[last - 1].new + runs[last - 1].length if last else 0
        here = [i for i in range(start, runs[last].new) if norms[i] in moved]
        end = offsets[here[-1] + 1 if here else start]
        for side in (come, gone):
            side[last] = Counter({norm: n for norm, n in side[last].items() if norm in moved})
    all_come, all_gone = (_sum(side[first : last + 1]) for side in (come, gone))
    moved_bytes = gaps.bytes_of(all_come & all_gone)
    if moved_bytes < _MOVED_SHARE * max(gaps.bytes_of(all_come), gaps.bytes_of(all_gone)):
        return
    between = sum(offsets[run.new + run.length] - offsets[run.new] for run in runs[first:last])
    start_gap = found[first]
    assert start_gap is not None
    found[first : last + 1] = [None] * (last + 1 - first)
    span = end - start_gap.start
    found[first] = Difference(
        Sort.ORDER, start_gap.start, end, b"", b"", is_json, moved_bytes=min(span, moved_bytes + between)
    )


def _sum(counters: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _spellings(
    memory: Memory,
    chunks: Sequence[int],
    old_chunks: Sequence[int],
    offsets: list[int],
    runs: list[Run],
    found: list[Difference | None],
) -> None:
    """Add the first difference in spelling of each run: all behind it is lost to it."""
    inside = [(d.start, d.end) for d in found if d is not None and d.sort is Sort.ORDER]
    for run in runs:
        if chunks[run.new : run.new + run.length] == old_chunks[run.old : run.old + run.length]:
            continue
        for k in range(run.length):
            number, other = chunks[run.new + k], old_chunks[run.old + k]
            if number == other:
                continue
            start = offsets[run.new + k]
            if any(low <= start < high for low, high in inside):
                continue
            new, old = memory.chunk(number), memory.chunk(other)
            head = _common_head(new, old)
            tail = _common_tail(new[head:], old[head:])
            found.append(
                Difference(
                    Sort.SPELLING,
                    start + head,
                    start + len(new) - tail,
                    new[head : len(new) - tail],
                    old[head : len(old) - tail],
                    memory.is_json(number),
                    spelled=True,
                )
            )
            break


def _joined(
    data: bytes, differences: list[Difference], matched_end: int, block_bytes: int
) -> list[Difference]:
    """Those that no whole block separates, as one; sets ``equal_end``."""
    joined: list[Difference] = []
    for difference, following in zip_longest(differences, differences[1:]):
        limit = max(matched_end, difference.end)
        difference.equal_end = limit if following is None else max(difference.end, following.start)
        last = joined[-1] if joined else None
        if last is None or last.sort in (Sort.MODEL, Sort.SALT):
            joined.append(difference)
            continue
        between = last.equal_end - last.end
        alike = (
            last.spelled
            and difference.spelled
            and last.is_json == difference.is_json
            and b"\xff" not in data[last.end : difference.start]
        )
        if not alike and between >= block_bytes:
            joined.append(difference)
            continue
        if alike:  # the text between is equal and lost, too
            last.moved_bytes += between
        last.others.append(difference)
        last.end, last.equal_end = difference.end, difference.equal_end
        last.moved_bytes += difference.moved_bytes
        last.spelled = last.spelled and difference.spelled
    return joined


def _landing(offsets: list[int], difference: Difference) -> int:
    index = bisect_left(offsets, difference.end)
    while index + 1 < len(offsets) and offsets[index + 1] <= difference.equal_end:
        if offsets[index + 1] - offsets[index] >= _TELLING_BYTES:
            return index
        index += 1
    return -1


def _having(memory: Memory, chunks: Sequence[int], offsets: list[int], start: int, end: int) -> int:
    """In how many earlier prompts a piece of text stands: the median of its first chunks."""
    first = bisect_left(offsets, start)
    last = min(bisect_right(offsets, end) - 1, first + _WITNESSES)
    pieces = [n for n in chunks[first:last] if len(memory.chunk(n)) >= _TELLING_BYTES]
    return median_low(memory.prompts_with(norm) for norm in memory.norms(pieces)) if pieces else 0


def _common_head(a: bytes, b: bytes) -> int:
    """How many bytes two strings share at their start."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_tail(a: bytes, b: bytes) -> int:
    return _common_head(a[::-1], b[::-1])
