"""How long prompts really are: tokens of the engine to one of the router's estimate.

The router counts bytes of text and takes so many for a token (``chars_per_token``); languages, code and
tokenizers differ by 30 % and more. Where only prompts are compared with each other that doesn't matter; where
they are compared with the size of a cache it does. Engines tell how many requests ended and how many prompt
tokens those had in sum, so the quotient of the two means, over many requests, is the scale.

`extproc.routing.tally` compares the counts.
"""

from __future__ import annotations

from extproc.routing.tally import MIN_REQUESTS, Interval

#: Requests that count as much as everything before them.
MEMORY_REQUESTS = 200.0

#: Bounds on the scale: beyond them something else is wrong.
LOWEST, HIGHEST = 0.25, 4.0


class Scale:
    """A pool's scale. 1 until the engines have told enough."""

    __slots__ = ("_estimated", "_requests", "_true")

    def __init__(self) -> None:
        self._requests = 0.0
        self._true = 0.0
        self._estimated = 0.0

    @property
    def value(self) -> float:
        """True tokens to an estimated one, from `LOWEST` to `HIGHEST`."""
        if self._requests < MIN_REQUESTS or self._estimated <= 0.0:
            return 1.0
        return min(max(self._true / self._estimated, LOWEST), HIGHEST)

    def learn(self, lengths: Interval) -> None:
        """Prompts' lengths of more requests; earlier ones count less and less."""
        requests = lengths.requests
        kept = MEMORY_REQUESTS / (MEMORY_REQUESTS + requests)
        self._requests = self._requests * kept + requests
        self._true = self._true * kept + lengths.told_mean * requests
        self._estimated = self._estimated * kept + lengths.own_mean * requests
