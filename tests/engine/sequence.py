"""Prompts that share, extend, cut and repeat each other, as a prefix cache likes and hates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

#: Token ids that every model has; the first ones are often special.
VOCABULARY = range(300, 1000)
#: Around a block, so that outputs fill blocks, just don't, and begin new ones.
OUTPUT_TOKENS = (1, 1, 2, 8, 31, 32, 33, 70)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is sent: token ids, how many to generate, and what else is in the cache's key."""

    prompt: tuple[int, ...]
    output_tokens: int
    salt: str = ""


@dataclass(slots=True)
class Sequence:
    """A drawn sequence, of sequences of at most ``max_tokens`` tokens, prompt and output together.

    Iterate, and `answered` each before the next is drawn: later prompts go on from earlier outputs.
    """

    seed: int
    requests: int
    max_tokens: int
    block_tokens: int
    _turns: list[tuple[Asked, tuple[int, ...]]] = field(default_factory=list)

    def answered(self, asked: Asked, output: tuple[int, ...]) -> None:
        """The engine's answer to what was drawn last."""
        self._turns.append((asked, output))

    def __iter__(self) -> Iterator[Asked]:
        rng = Random(self.seed)
        heads = [self._text(rng, length) for length in (self.block_tokens * 4, self.max_tokens // 3, 40)]
        for _ in range(self.requests):
            output_tokens = rng.choice(OUTPUT_TOKENS)
            prompt, salt = self._prompt(rng, heads)
            room = self.max_tokens - output_tokens
            yield Asked(prompt[:room], output_tokens, salt)

    def _prompt(self, rng: Random, heads: list[tuple[int, ...]]) -> tuple[tuple[int, ...], str]:
        kind = rng.choices(
            ("fresh", "head", "again", "turn", "cut", "whole blocks", "salt", "longest"),
            (10, 25, 10, 30, 10, 8, 5, 2),
        )[0]
        short = rng.randint(1, self.max_tokens // 8)
        if kind == "fresh" or (not self._turns and kind not in ("head", "longest")):
            return self._text(rng, rng.randint(1, self.max_tokens // 2)), ""
        if kind == "head":
            return rng.choice(heads) + self._text(rng, short), ""
        if kind == "longest":  # as much as there is room for
            return self._text(rng, self.max_tokens), ""
        # Rather a recent one: an old one was mostly evicted.
        asked, output = self._turns[-min(len(self._turns), 1 + int(rng.expovariate(1 / 6)))]
        if kind == "again":
            return asked.prompt, asked.salt
        if kind == "turn":
            return asked.prompt + output + self._text(rng, short), asked.salt
        if kind == "salt":
            return asked.prompt, rng.choice(("a", "b"))
        cut = asked.prompt[: rng.randint(1, len(asked.prompt))]
        if kind == "whole blocks":
            blocks = max(1, len(cut) // self.block_tokens)
            return (cut + self._text(rng, self.block_tokens))[: blocks * self.block_tokens], asked.salt
        return cut + self._text(rng, rng.choice((0, 5, short))), asked.salt

    def _text(self, rng: Random, length: int) -> tuple[int, ...]:
        return tuple(rng.choices(VOCABULARY, k=length))
