"""How long prompts really are: tokens of the engine to one of the router's estimate.

The router counts bytes of text and takes so many for a token (``chars_per_token``); languages, code and
tokenizers differ by 30 % and more. Where only prompts are compared with each other that doesn't matter; where
they are compared with the size of a cache it does. Engines tell how many requests ended and how many prompt
tokens those had in sum, so the quotient of the two means, over many requests, is the scale.

As in `extproc.routing.speed`, an interval whose count of requests isn't ours teaches nothing, because
somebody else's prompts are in it.
"""

from __future__ import annotations

from math import isfinite

#: The engine's and our count of requests may differ by this share, and by this many.
FOREIGN_SHARE = 0.1
FOREIGN_REQUESTS = 2

#: An interval with fewer requests is joined with the next one.
MIN_REQUESTS = 4

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

    def learn(self, requests: float, true_tokens: float, estimated_tokens: float) -> None:
        """So many more requests had so many tokens in sum; earlier ones count less and less."""
        kept = MEMORY_REQUESTS / (MEMORY_REQUESTS + requests)
        self._requests = self._requests * kept + requests
        self._true = self._true * kept + true_tokens
        self._estimated = self._estimated * kept + estimated_tokens


class Lengths:
    """One worker's side: what we estimated, what its engine counts."""

    __slots__ = ("_engine", "_own", "_own_before")

    def __init__(self) -> None:
        self._own = (0, 0)  # requests that ended, their estimated tokens in sum
        self._own_before = (0, 0)
        self._engine: tuple[float, float] | None = None  # the same as told, at the last reading that was used

    def ended(self, estimated_tokens: int) -> None:
        """A request ended there."""
        self._own = (self._own[0] + 1, self._own[1] + estimated_tokens)

    def told(self, requests: float | None, tokens: float | None) -> tuple[float, float, float] | None:
        """What the engine counts since its start; None: it doesn't say.

        Returns what `Scale.learn` takes, or None when there is nothing to learn.
        """
        before, own_before = self._engine, self._own_before
        if requests is None or tokens is None or not (isfinite(requests) and isfinite(tokens)):
            self._engine = None
            return None
        if before is not None and 0 <= requests - before[0] < MIN_REQUESTS and tokens >= before[1]:
            return None
        self._engine, self._own_before = (requests, tokens), self._own
        if before is None or requests < before[0] or tokens < before[1]:
            return None  # the first reading of this engine's life
        count, own = requests - before[0], self._own[0] - own_before[0]
        if not own or abs(count - own) > max(FOREIGN_REQUESTS, FOREIGN_SHARE * count):
            return None
        # Means, since the two counts may differ a little.
        return count, tokens - before[1], (self._own[1] - own_before[1]) * count / own
