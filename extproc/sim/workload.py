"""Traffic for the simulator: requests whose prompts share prefixes, in virtual time.

A prompt here has no words. It is a `Text`: a length and the chained hashes of its full blocks. Continuing a
text keeps the hashes and draws new ones for what is new, so two prompts share exactly the blocks that they
have a common ancestor for. Router and engine see the same blocks of ``BLOCK_TOKENS``, which keeps a 28k-token
prompt at 110 hashes; requests share them.

A workload is what arrives by itself (`Workload.arrivals`) and what follows the end of a request
(`Workload.follow`: the next request of a closed loop, the next turn of a conversation). Everything is drawn
from one seeded generator per concern, so a workload asks for the same requests whatever the router does.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random
from typing import Protocol

#: Tokens in a block, of the router's chains and of the simulated engines.
BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, or the start of one: ``tokens`` long, ``hashes`` of its full blocks."""

    tokens: int = 0
    hashes: tuple[int, ...] = ()

    def then(self, tokens: int, random: Random) -> Text:
        """A text that goes on with ``tokens`` more that nobody has seen before."""
        total = self.tokens + tokens
        new = total // BLOCK_TOKENS - len(self.hashes)
        fresh = tuple([random.getrandbits(64) for _ in range(new)])
        return Text(total, self.hashes + fresh)


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request. ``chain``: hashes of the full blocks of prompt and output.

    ``head_tokens``: tools and leading system messages. ``group``: what the report calls its shared prefix.
    ``source``: whatever the workload needs to know in `Workload.follow`.
    """

    prompt_tokens: int
    output_tokens: int
    chain: tuple[int, ...]
    head_tokens: int
    group: str
    source: object = None

    @property
    def prompt_chain(self) -> tuple[int, ...]:
        """Hashes of the prompt's full blocks: all that a router can see."""
        return self.chain[: self.prompt_tokens // BLOCK_TOKENS]


class Workload(Protocol):
    """A source of requests. Times are seconds since the start."""

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """What arrives whatever happens, in order of time; may be endless."""
        ...

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """What follows the end of ``request`` at ``now``, if anything does, and when."""
        ...


class Draw:
    """Draws indices 0 … n - 1 with given weights."""

    def __init__(self, weights: Sequence[float], random: Random) -> None:
        self._sums = list(accumulate(weights))
        self._random = random

    def __call__(self) -> int:
        """The next index."""
        return min(bisect(self._sums, self._random.random() * self._sums[-1]), len(self._sums) - 1)


def even(count: int) -> list[float]:
    """Weights of an even draw."""
    return [1.0] * count


def zipf(count: int, exponent: float = 1.0) -> list[float]:
    """Weights by Zipf's law: the k-th is drawn in proportion to 1 / k**exponent."""
    return [1.0 / (rank + 1) ** exponent for rank in range(count)]


def _request(
    prompt: Text, output_tokens: int, random: Random, head: int, group: str, src: object
) -> SimRequest:
    chain = prompt.then(output_tokens, random).hashes
    return SimRequest(prompt.tokens, output_tokens, chain, head, group, src)


class Swarm:
    """Streams of requests by agents of some personas: a long shared prompt, a short turn of their own.

    ``weights``: one per persona. ``rate``: requests a second in an open loop (Poisson); without it,
    ``streams`` clients send their next request when the last one has ended.
    """

    def __init__(
        self,
        seed: int,
        *,
        weights: Sequence[float],
        streams: int = 60,
        rate: float | None = None,
        persona_tokens: tuple[int, int] = (24_000, 32_000),
        shared_head_tokens: int = 0,
        turn_tokens: tuple[int, int] = (200, 800),
        output_tokens: int = 120,
        name: str = "persona",
    ) -> None:
        self._random = random = Random(f"{seed} {name}")
        self._pick = Draw(weights, Random(f"{seed} {name} pick"))
        head = Text().then(shared_head_tokens, random)
        self.personas = [
            head.then(random.randint(*persona_tokens) - shared_head_tokens, random) for _ in weights
        ]
        self._streams = streams
        self._rate = rate
        self._turn_tokens = turn_tokens
        self._output_tokens = output_tokens
        self._name = name

    def request(self, persona: int | None = None) -> SimRequest:
        """The next request, of a drawn or a given persona."""
        index = self._pick() if persona is None else persona
        text = self.personas[index]
        prompt = text.then(self._random.randint(*self._turn_tokens), self._random)
        group = f"{self._name} {index}"
        return _request(prompt, self._output_tokens, self._random, text.tokens, group, self)

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """Poisson arrivals, or the first request of each stream (they start within two seconds)."""
        if self._rate is not None:
            now = 0.0
            while True:
                now += self._random.expovariate(self._rate)
                yield now, self.request()
        for stream in range(self._streams):
            yield 2.0 * stream / self._streams, self.request()

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """A closed loop goes on at once."""
        return None if self._rate is not None else (now, self.request())


@dataclass(slots=True)
class _Session:
    text: Text
    turns_left: int
    name: str
    head_tokens: int


class Chat:
    """Conversations: each turn's prompt is all that was said before, the answers included, and a new message.

    ``sessions`` run at any time; when one is over, another begins in its place. Between an answer and the
    next message lies a think time, exponential with mean ``think_s``.
    """

    def __init__(
        self,
        seed: int,
        *,
        sessions: int = 160,
        apps: int = 8,
        system_tokens: tuple[int, int] = (600, 2_000),
        context_tokens: tuple[int, int] = (2_000, 8_000),
        message_tokens: tuple[int, int] = (50, 800),
        output_tokens: tuple[int, int] = (60, 400),
        turns: tuple[int, int] = (4, 16),
        think_s: float = 10.0,
        name: str = "session",
    ) -> None:
        self._random = random = Random(f"{seed} {name}")
        self._apps = [Text().then(random.randint(*system_tokens), random) for _ in range(apps)]
        self._sessions = sessions
        self._context_tokens = context_tokens
        self._message_tokens = message_tokens
        self._output_tokens = output_tokens
        self._turns = turns
        self._think_s = think_s
        self._serial = count()
        self._name = name

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """The first turn of each session, spread over the mean think time."""
        starts = sorted(self._random.uniform(0.0, self._think_s) for _ in range(self._sessions))
        for start in starts:
            yield start, self._turn(self._begin(started=True))

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """The session's next turn, or the first one of the session that takes its place."""
        session = request.source
        assert isinstance(session, _Session)
        if not session.turns_left:
            session = self._begin(started=False)
        return now + self._random.expovariate(1.0 / self._think_s), self._turn(session)

    def _begin(self, *, started: bool) -> _Session:
        random = self._random
        app = random.choice(self._apps)
        turns = random.randint(*self._turns)
        # At the start of the simulation the sessions are somewhere in their middle.
        left = random.randint(1, turns) if started else turns
        text = app.then(random.randint(*self._context_tokens), random)
        return _Session(text, left, f"{self._name} {next(self._serial)}", app.tokens)

    def _turn(self, session: _Session) -> SimRequest:
        random = self._random
        prompt = session.text.then(random.randint(*self._message_tokens), random)
        output_tokens = random.randint(*self._output_tokens)
        session.text = prompt.then(output_tokens, random)
        session.turns_left -= 1
        return SimRequest(
            prompt.tokens, output_tokens, session.text.hashes, session.head_tokens, session.name, session
        )


class Rag:
    """Questions about documents: instructions that all share, a document, a question. Poisson arrivals."""

    def __init__(
        self,
        seed: int,
        *,
        rate: float = 10.0,
        documents: int = 250,
        exponent: float = 0.9,
        head_tokens: int = 700,
        document_tokens: tuple[int, int] = (4_000, 14_000),
        question_tokens: tuple[int, int] = (30, 300),
        output_tokens: tuple[int, int] = (60, 240),
        name: str = "document",
    ) -> None:
        self._random = random = Random(f"{seed} {name}")
        self._pick = Draw(zipf(documents, exponent), Random(f"{seed} {name} pick"))
        self._head = head = Text().then(head_tokens, random)
        self._documents = [head.then(random.randint(*document_tokens), random) for _ in range(documents)]
        self._rate = rate
        self._question_tokens = question_tokens
        self._output_tokens = output_tokens
        self._name = name

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """Endless Poisson arrivals."""
        random = self._random
        now = 0.0
        while True:
            now += random.expovariate(self._rate)
            index = self._pick()
            prompt = self._documents[index].then(random.randint(*self._question_tokens), random)
            output_tokens = random.randint(*self._output_tokens)
            group = f"{self._name} {index}"
            yield now, _request(prompt, output_tokens, random, self._head.tokens, group, self)

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """An open loop: nothing."""
        return None


class Unique:
    """Prompts that share nothing with any other. Poisson arrivals."""

    def __init__(
        self,
        seed: int,
        *,
        rate: float,
        prompt_tokens: tuple[int, int] = (300, 6_000),
        output_tokens: tuple[int, int] = (100, 500),
        name: str = "unique",
    ) -> None:
        self._random = Random(f"{seed} {name}")
        self._rate = rate
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._name = name

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """Endless Poisson arrivals."""
        random = self._random
        now = 0.0
        while True:
            now += random.expovariate(self._rate)
            prompt = Text().then(random.randint(*self._prompt_tokens), random)
            yield now, _request(prompt, random.randint(*self._output_tokens), random, 0, self._name, self)

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """An open loop: nothing."""
        return None


class Burst:
    """A swarm in an open loop, and every ``every_s`` a burst: ``size`` requests within ``within_s``.

    A burst is of one persona (a batch job that starts its agents), another one each time.
    """

    def __init__(
        self, seed: int, *, swarm: Swarm, every_s: float = 15.0, size: int = 60, within_s: float = 1.0
    ) -> None:
        self._random = Random(f"{seed} burst")
        self._swarm = swarm
        self._every_s = every_s
        self._size = size
        self._within_s = within_s

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """Endless: the swarm's own, and the bursts among them."""
        return heapq.merge(self._swarm.arrivals(), self._bursts(), key=lambda arrival: arrival[0])

    def _bursts(self) -> Iterator[tuple[float, SimRequest]]:
        for number in count(1):
            persona = self._random.randrange(len(self._swarm.personas))
            start = number * self._every_s
            for time in sorted(self._random.uniform(0.0, self._within_s) for _ in range(self._size)):
                yield start + time, self._swarm.request(persona)

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """An open loop: nothing."""
        return None


class Mixed:
    """Several workloads on one fleet."""

    def __init__(self, parts: Sequence[Workload]) -> None:
        self._parts = parts
        self._owner: dict[SimRequest, Workload] = {}

    def arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        """All parts', merged."""
        for time, request, part in heapq.merge(*map(self._tagged, self._parts), key=lambda entry: entry[0]):
            self._owner[request] = part
            yield time, request

    @staticmethod
    def _tagged(part: Workload) -> Iterator[tuple[float, SimRequest, Workload]]:
        for time, request in part.arrivals():
            yield time, request, part

    def follow(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        """What follows in the part that the request came from."""
        part = self._owner.pop(request)
        following = part.follow(request, now)
        if following is not None:
            self._owner[following[1]] = part
        return following
