"""A request's way through the linter."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from extproc.lint.differences import Comparison, Difference, Sort, compare
from extproc.lint.findings import Family, Finding, Findings, Loss
from extproc.lint.judgement import judge
from extproc.lint.kinds import whole_words
from extproc.lint.log import BadLine, Entry
from extproc.lint.memory import Memory, Remembered
from extproc.lint.text import Place, cut, data_of, legible, place_of
from extproc.prefix import chain
from extproc.prompt import Prompt, Unreadable, read_prompt
from extproc.routing.cache import CachePicture

#: Bad lines that are named; all are counted.
_NAMED_BAD_LINES = 20

#: A request belongs to a family if this share of its head is the family's.
_FAMILY_SHARE = 0.5

#: A shorter head (tools and system prompt) says little; then the first message counts, too.
_TELLING_HEAD_BYTES = 1024

#: Less, down to this, may be a template around passages that are new each time, or only the words that all
#: prompts of a company share. It is a template if the family's own requests share little more than that, or,
#: as long as it has one only, if that one shared little with another.
_LOOSE_SHARE = 0.3
_SLACK_SHARE = 0.2

#: Families told apart at a time; the least recently seen are forgotten first.
_MAX_FAMILIES = 100_000

#: Differences that may make up one passage.
_MAX_PARTS = 300

_TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Options:
    """``block_tokens``: the engine's. ``cache_tokens``: what all caches hold together.

    ``memory_bytes``: for remembered prompts. ``show_chars``: text to keep on each side of a difference.
    """

    block_tokens: int = 16
    chars_per_token: float = 4.0
    content_format: str = "string"
    cache_tokens: int = 100_000_000
    memory_bytes: int = 512 * 1024 * 1024
    show_chars: int = 0


@dataclass(slots=True)
class Totals:
    """What was read. ``hit_tokens``: in the cache when their request came, by the picture."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    bad_lines: int = 0
    named_bad_lines: list[BadLine] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    untimed: int = 0

    @property
    def span_s(self) -> float | None:
        """From the first request to the last; None if any has no time."""
        if self.untimed or self.first_s is None or self.last_s is None:
            return None
        return self.last_s - self.first_s


class Linter:
    """Takes requests in the order of the log, and says at the end what was found."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._picture = CachePicture(options.block_tokens)
        self._slot = self._picture.add_worker(options.cache_tokens)
        self._memory = Memory(options.memory_bytes)
        self._findings = Findings()
        self._families: OrderedDict[int, Family] = OrderedDict()
        self._families_seen = 0
        self.totals = Totals()

    @property
    def remembered(self) -> int:
        """Prompts in memory."""
        return len(self._memory)

    @property
    def forgotten(self) -> int:
        """Prompts that had to make room."""
        return self._memory.forgotten

    @property
    def families(self) -> int:
        """Templates told apart."""
        return self._families_seen

    def report(self, *, min_tokens: int, min_share: float) -> list[Finding]:
        """What was found so far; see `Findings.report`."""
        return self._findings.report(min_tokens=min_tokens, min_share=min_share)

    def read(self, lines: Iterable[Entry | BadLine]) -> None:
        """Look at all lines of a log."""
        for line in lines:
            if isinstance(line, BadLine):
                self._bad(line)
                continue
            prompt = read_prompt(
                line.path, "application/json", "", line.body, content_format=self._options.content_format
            )
            if isinstance(prompt, Unreadable):
                self._bad(BadLine(line.file, line.line, f"no prompt: {prompt.value}"))
            else:
                self._time(line.time_s)
                self._see(prompt, f"{line.file}:{line.line}", line.tenant)

    def _bad(self, line: BadLine) -> None:
        self.totals.bad_lines += 1
        if len(self.totals.named_bad_lines) < _NAMED_BAD_LINES:
            self.totals.named_bad_lines.append(line)

    def _time(self, time_s: float | None) -> None:
        totals = self.totals
        if time_s is None:
            totals.untimed += 1
            return
        totals.first_s = time_s if totals.first_s is None else min(totals.first_s, time_s)
        totals.last_s = time_s if totals.last_s is None else max(totals.last_s, time_s)

    def _see(self, prompt: Prompt, where: str, tenant: str) -> None:
        options = self._options
        is_ids = prompt.token_ids is not None
        bytes_per_token = _TOKEN_ID_BYTES if is_ids else options.chars_per_token
        block_bytes = max(1, int(options.block_tokens * bytes_per_token))
        data = data_of(prompt)
        prefix = chain(
            prompt,
            block_tokens=options.block_tokens,
            chars_per_token=options.chars_per_token,
            prefix_tokens=options.block_tokens,
        )
        hit_bytes = self._picture.lookup(prefix.hashes).get(self._slot, 0) * block_bytes
        self._picture.touch(self._slot, prefix.hashes, 0.0)
        self.totals.requests += 1
        self.totals.tokens += prefix.tokens
        self.totals.hit_tokens += hit_bytes // block_bytes * options.block_tokens

        memory = self._memory
        chunks = memory.intern(cut(prompt))
        norms = memory.norms(chunks)
        lengths = memory.lengths(chunks)
        offsets = [0, *accumulate(lengths)]
        opening_bytes = len(data) if is_ids else prompt.opening_bytes
        scope = _scope(prompt.scope)
        unseen = bisect_right(offsets, hit_bytes) - 1
        head_bytes = prompt.head_bytes if prompt.head_bytes >= _TELLING_HEAD_BYTES else opening_bytes
        head = bisect_left(offsets, head_bytes)
        family = self._family(
            xxh3_64_intdigest(data[:head_bytes]), *memory.family(norms[:head], lengths[:head])
        )
        family.requests += 1
        family.tokens += prefix.tokens
        if family.sites:
            hashes = map(memory.norm_hash, norms)
            self._findings.passed(family, zip(hashes, offsets, strict=False))
        known, shared_bytes = memory.nearest(norms[unseen:], lengths[unseen:], scope, 2 * block_bytes)
        if known is not None and shared_bytes >= block_bytes:
            request = _Request(
                prompt, is_ids, bytes_per_token, block_bytes, opening_bytes, hit_bytes, where, tenant
            )
            comparison = compare(memory, data, chunks, scope, known, block_bytes)
            self._findings.add(family, self._losses(request, comparison, known, family, norms, prefix.tokens))
        memory.add(Remembered(chunks, scope, opening_bytes, family.number, where), norms)

    def _family(self, own: int, nearest: int, share: float) -> Family:
        """A request's family: the nearest, or one of its ``own``."""
        family = self._families.get(nearest)
        if family is not None:
            alone = family.requests == 1
            least = (0.0 if family.is_loose else 1.0) if alone else family.least_share - _SLACK_SHARE
            if share >= min(_FAMILY_SHARE, max(_LOOSE_SHARE, least)):
                family.least_share = min(family.least_share, share)
                self._families.move_to_end(nearest)
                return family
        family = self._families.get(own)
        if family is None:
            family = self._families[own] = Family(own, is_loose=share >= _LOOSE_SHARE)
            self._families_seen += 1
            if len(self._families) > _MAX_FAMILIES:
                self._families.popitem(last=False)
        return family

    def _losses(
        self,
        request: _Request,
        comparison: Comparison,
        known: Remembered,
        family: Family,
        norms: list[int],
        prompt_tokens: int,
    ) -> list[Loss]:
        """What the request lost at each difference, in order.

        What stands behind a difference that can't be mended is out of reach, whatever else is mended.
        """
        losses: list[Loss] = []
        head_bytes = request.prompt.head_bytes
        passage: Difference | None = None
        for difference in comparison.differences:
            if passage is not None:
                difference.others = [passage, *passage.others, *difference.others]
                difference.start, passage = passage.start, None
            landing = norms[difference.landing] if difference.landing >= 0 else -1
            having = difference.having + 1
            verdict = judge(
                comparison,
                difference,
                opening_bytes=request.opening_bytes,
                head_bytes=head_bytes,
                block_bytes=request.block_bytes,
                bytes_per_token=request.bytes_per_token,
                is_ids=request.is_ids,
                having_share=having / family.requests,
            )
            if verdict is None:
                break
            if not verdict.kinds:
                if len(difference.others) > _MAX_PARTS:
                    break  # hundreds of places: these are two texts, not one with a passage in it
                passage = difference
                continue
            lost = _bytes_lost(difference, verdict.equal_end, request.hit_bytes)
            tokens = lost // request.block_bytes * self._options.block_tokens
            identity = 0 if landing < 0 else self._memory.norm_hash(landing)
            in_turns = verdict.in_history and difference.start >= head_bytes
            scoped = _SCOPED.get(difference.sort)
            value = comparison.data[slice(*whole_words(comparison.data, difference.start, difference.end))]
            if scoped:
                value = _scope(request.prompt.scope)[2 if difference.sort is Sort.SALT else 1]
            losses.append(
                Loss(
                    kinds=verdict.kinds,
                    in_history=verdict.in_history,
                    place=Place(-1, "", scoped, 0, 0)
                    if scoped
                    else place_of(
                        comparison.data, difference.start, request.bytes_per_token, is_ids=request.is_ids
                    ),
                    tokens=tokens,
                    behind_tokens=tokens,
                    landing=0 if verdict.in_history else identity,
                    landing_at=comparison.offsets[difference.landing],
                    having=having,
                    # In history what stays away is the same nothing each time; what comes next isn't.
                    value=xxh3_64_intdigest(value, identity if in_turns else 0),
                    where=request.where,
                    other=known.where,
                    tenant=request.tenant,
                    prompt_tokens=prompt_tokens,
                    example=None if request.is_ids else self._example(comparison, difference),
                )
            )
        behind = 0
        for loss in reversed(losses):
            behind += loss.tokens
            loss.behind_tokens = behind
        return [loss for loss in losses if loss.behind_tokens]

    def _example(self, comparison: Comparison, difference: Difference) -> tuple[str, str] | None:
        chars = self._options.show_chars
        if not chars:
            return None
        data, start, end = comparison.data, difference.start, difference.end
        before, behind = data[max(0, start - 4 * chars) : start], data[end : end + 4 * chars]
        old = difference.old if not difference.others and difference.sort is not Sort.ORDER else None
        return (
            _excerpt(before, data[start:end], behind, chars),
            "" if old is None else _excerpt(before, old, behind, chars),
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """What is known of the request that is being looked at."""

    prompt: Prompt
    is_ids: bool
    bytes_per_token: float
    block_bytes: int
    opening_bytes: int
    hit_bytes: int
    where: str
    tenant: str


_SCOPED = {Sort.SALT: "cache_salt", Sort.MODEL: "model"}


def _scope(scope: bytes) -> tuple[bytes, bytes, bytes]:
    """A prompt's scope in parts that can differ by themselves: (kind and shifts, model, cache_salt)."""
    kind, model, salt, *shifts = scope.split(b"\xff")
    return b"\xff".join([kind, *shifts]), model, salt


def _bytes_lost(difference: Difference, equal_end: int, hit_bytes: int) -> int:
    """Equal text behind the difference that wasn't in the cache by another way; with it what has moved."""
    behind = max(0, equal_end - max(difference.end, hit_bytes))
    within = max(0, difference.end - max(difference.start, hit_bytes))
    return behind + min(difference.moved_bytes, within)


def _excerpt(before: bytes, value: bytes, behind: bytes, chars: int) -> str:
    """Some text around a value, the value in brackets."""
    left, middle, right = map(legible, (before, value, behind))
    if len(middle) > 2 * chars:
        middle = f"{middle[:chars]} … {middle[-chars:]}"
    return f"{left[-chars:]}[[{middle}]]{right[:chars]}"
