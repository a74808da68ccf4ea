"""The prompts seen so far, within a bound, and which of them is nearest to a new one.

Prompts are kept as numbers of chunks; a chunk's bytes are kept once, however many prompts hold it. So a log
in which a few templates return costs little, and only one of unique prompts reaches the bound. Then the least
recently used prompts are forgotten, with the chunks that nobody else holds.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from extproc.lint.text import Chunk, Form, normal_form

#: What a chunk takes besides its bytes: objects and table entries, measured.
_CHUNK_BYTES = 430
_PROMPT_BYTES = 1000

#: Prompts that are compared in full with a new one.
_CANDIDATES = 4


@dataclass(slots=True)
class Remembered:
    """A prompt. ``chunks``: numbers in the memory's table. ``opening_bytes``: see `extproc.prompt.Prompt`."""

    chunks: array[int]
    scope: tuple[bytes, bytes, bytes]  # kind and shifts, model, cache_salt
    opening_bytes: int
    family: int
    where: str
    norms: frozenset[int] = field(default_factory=frozenset)


class Memory:
    """Remembers prompts. Normal forms have numbers of their own (``norm``), reused when forgotten."""

    def __init__(self, limit_bytes: int) -> None:
        self._room_bytes = limit_bytes
        self._numbers: dict[bytes, int] = {}
        self._bytes: list[bytes] = []
        self._norm_of: list[int] = []
        self._json: list[bool] = []
        self._uses: list[int] = []
        self._free: list[int] = []
        self._norms: dict[int, int] = {}  # hash of a normal form -> its number
        self._norm_hash: list[int] = []
        self._norm_uses: list[int] = []  # chunks that have it
        self._prompts_with: list[int] = []
        self._last: list[int] = []  # serial of the last prompt that has it
        self._family: list[int] = []  # that prompt's
        self._free_norms: list[int] = []
        self._prompts: OrderedDict[int, Remembered] = OrderedDict()
        self._serial = 0
        self._latest: OrderedDict[tuple[int, tuple[bytes, bytes, bytes]], int] = OrderedDict()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._prompts)

    # --- chunks ----------------------------------------------------------------------------------

    def intern(self, chunks: Iterable[Chunk]) -> array[int]:
        """Numbers for chunks. They are only held once a prompt that has them is added."""
        numbers = array("I")
        known = self._numbers
        for chunk, form in chunks:
            number = known.get(chunk)
            numbers.append(self._new(chunk, form) if number is None else number)
        return numbers

    def _new(self, chunk: bytes, form: Form) -> int:
        key = xxh3_64_intdigest(normal_form(chunk, form))
        is_json = form is Form.JSON
        norm = self._norms.get(key)
        if norm is None:
            if self._free_norms:
                norm = self._free_norms.pop()
                self._norm_hash[norm] = key
            else:
                norm = len(self._norm_hash)
                for column in (self._norm_uses, self._prompts_with, self._last, self._family):
                    column.append(0)
                self._norm_hash.append(key)
            self._norms[key] = norm
        self._norm_uses[norm] += 1
        if self._free:
            number = self._free.pop()
            self._bytes[number], self._norm_of[number], self._json[number] = chunk, norm, is_json
        else:
            number = len(self._bytes)
            self._bytes.append(chunk)
            self._norm_of.append(norm)
            self._json.append(is_json)
            self._uses.append(0)
        self._numbers[chunk] = number
        self._room_bytes -= len(chunk) + _CHUNK_BYTES
        return number

    def norms(self, chunks: Sequence[int]) -> list[int]:
        """The normal forms of chunks."""
        norm_of = self._norm_of
        return [norm_of[number] for number in chunks]

    def text(self, chunks: Iterable[int]) -> bytes:
        """The bytes of chunks."""
        return b"".join([self._bytes[number] for number in chunks])

    def lengths(self, chunks: Iterable[int]) -> list[int]:
        """Bytes of each chunk."""
        return [len(self._bytes[number]) for number in chunks]

    def chunk(self, number: int) -> bytes:
        """A chunk's bytes."""
        return self._bytes[number]

    def is_json(self, number: int) -> bool:
        """Whether a chunk is a JSON value of its own, such as a tool."""
        return self._json[number]

    def prompts_with(self, norm: int) -> int:
        """How many prompts had such a chunk, this one not counted."""
        return self._prompts_with[norm]

    def norm_hash(self, norm: int) -> int:
        """A normal form's identity, the same in every run."""
        return self._norm_hash[norm]

    # --- prompts ---------------------------------------------------------------------------------

    def family(self, norms: Sequence[int], lengths: Sequence[int]) -> tuple[int, float]:
        """The family that most of a head belongs to, and its share in what isn't others'.

        0, 0.0: none. What is known from another family may well be this one's, too: the words that all of a
        company's prompts share.
        """
        votes: dict[int, int] = {}
        for norm, length in zip(norms, lengths, strict=True):
            if self._last[norm]:
                family = self._family[norm]
                votes[family] = votes.get(family, 0) + length
        if not votes:
            return 0, 0.0
        best = max(votes, key=lambda family: (votes[family], family))
        return best, votes[best] / (sum(lengths) - sum(votes.values()) + votes[best])

    def nearest(
        self,
        norms: Sequence[int],
        lengths: Sequence[int],
        scope: tuple[bytes, bytes, bytes],
        slack_bytes: int,
    ) -> tuple[Remembered | None, int]:
        """The remembered prompt that shares most with a part of a new one, and the bytes that both have.

        Prompts of another sort (text against chat, or truncated) have nothing in common.

        Args:
            norms: the part's normal forms.
            lengths: bytes of each.
            scope: the new prompt's.
            slack_bytes: how much more a prompt of another scope has to share.

        """
        votes: dict[int, int] = {}
        for norm, length in zip(norms, lengths, strict=True):
            if serial := self._last[norm]:
                votes[serial] = votes.get(serial, 0) + length
        serials = sorted(votes, key=lambda s: (votes[s], s), reverse=True)[:_CANDIDATES]
        prompts = self._prompts
        found = {s: prompts[s] for s in serials if s in prompts and prompts[s].scope[0] == scope[0]}
        for known in list(found.values()):
            if known.scope != scope and (s := self._latest.get((known.family, scope), 0)) in prompts:
                found[s] = prompts[s]
        best: Remembered | None = None
        best_key, best_serial, best_shared = (0, 0), 0, 0
        for serial, known in found.items():
            shared = sum([n for norm, n in zip(norms, lengths, strict=True) if norm in known.norms])
            key = (shared - (slack_bytes if known.scope != scope else 0), serial)
            if best is None or key > best_key:
                best, best_key, best_serial, best_shared = known, key, serial, shared
        if best is not None:
            prompts.move_to_end(best_serial)
        return best, best_shared

    def add(self, prompt: Remembered, norms: Sequence[int]) -> None:
        """Remember a prompt; forget others if need be."""
        self._serial += 1
        serial = self._serial
        prompt.norms = frozenset(norms)
        for norm in prompt.norms:
            self._last[norm] = serial
            self._family[norm] = prompt.family
            self._prompts_with[norm] += 1
        for number in prompt.chunks:
            self._uses[number] += 1
        self._prompts[serial] = prompt
        self._room_bytes -= self._cost(prompt)
        self._latest[prompt.family, prompt.scope] = serial
        self._latest.move_to_end((prompt.family, prompt.scope))
        while self._room_bytes < 0 and len(self._prompts) > 1:
            self._forget(self._prompts.popitem(last=False)[1])
        while len(self._latest) > 2 * len(self._prompts) + 100:
            self._latest.popitem(last=False)

    def _cost(self, prompt: Remembered) -> int:
        # The set of numbers: 64 bytes an entry with room to grow and the integers.
        return _PROMPT_BYTES + 4 * len(prompt.chunks) + 64 * len(prompt.norms)

    def _forget(self, prompt: Remembered) -> None:
        self.forgotten += 1
        self._room_bytes += self._cost(prompt)
        for number in prompt.chunks:
            self._uses[number] -= 1
            if self._uses[number]:
                continue
            chunk = self._bytes[number]
            del self._numbers[chunk]
            self._room_bytes += len(chunk) + _CHUNK_BYTES
            self._bytes[number] = b""
            self._free.append(number)
            norm = self._norm_of[number]
            self._norm_uses[norm] -= 1
            if not self._norm_uses[norm]:
                del self._norms[self._norm_hash[norm]]
                self._last[norm] = self._prompts_with[norm] = 0
                self._free_norms.append(norm)
