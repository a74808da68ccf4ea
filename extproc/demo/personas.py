"""Who sends the requests: agent personas with long prompts, and streams that draw among them.

A persona is what an agent framework sends each time: tools and a system prompt of many thousand tokens, equal
in all its requests, then a short turn that never comes again. Bodies are made in advance but for the turn, so
that the client costs little CPU. The text is pseudo-random words, four characters a token on average.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

OUTPUT_TOKENS = 120
PROMPT_TOKENS = (24_000, 32_000)
_TURN_TOKENS = (30, 120)
_CHARS_PER_TOKEN = 4
#: Of a persona's prompt, how much is tool definitions.
_TOOLS_SHARE = 0.2
_TOOLS = 8

_WORDS = (
    "account action agent answer api approve archive ask assign audit backup balance batch before bill "
    "branch budget build cache call cancel carefully case change check claim client code collect commit "
    "compare complete confirm connect contract convert copy create credit customer daily data date "
    "deadline default delete deliver deploy design detail direct disk document draft edit email empty "
    "enable engine error escalate estimate event every example exact export extract failure fetch field "
    "file filter final find first follow format forward from general group handle header history hold "
    "identify import include index inform input inspect invoice issue item join keep label language "
    "launch ledger legal level limit link list load locate log manage manual map market match merge "
    "message method metric missing model module monitor must name network never next node note notify "
    "number object offer only open option order output owner package page parse part patch path pay "
    "period permit phase plan policy port prefer price print process product profile project prompt "
    "protect provide public query queue quote range rate read reason record reduce refund region reject "
    "release remove repair reply report request reserve result retry return review risk role rule run "
    "sample schedule search secure select send server service session set share ship sign source stage "
    "start state status step stock stop store submit summary support switch system table tag target task "
    "team tenant test ticket time token tool total trace track train transfer travel type unit update "
    "upload urgent usage user validate value vendor verify version view wait warn week window with write"
)
_VOCABULARY = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Persona:
    """One agent; ``head`` and ``tail`` are the JSON body around the user's turn."""

    name: str
    head: bytes
    tail: bytes

    def body(self, turn: str) -> bytes:
        """A request's body; ``turn`` is ASCII without quotes or backslashes."""
        return b"".join((self.head, turn.encode("ascii"), self.tail))


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the demo: so many closed-loop streams, each request by a persona drawn from ``shares``.

    ``shares``: (number of personas, number of streams) groups; a stream draws evenly within its group.
    """

    name: str
    title: str
    shares: tuple[tuple[int, int], ...]

    @property
    def personas(self) -> int:
        """All personas in it."""
        return sum(personas for personas, _ in self.shares)

    @property
    def streams(self) -> int:
        """All streams in it."""
        return sum(streams for _, streams in self.shares)

    def draws(self, seed: int) -> list[Iterator[int]]:
        """For each stream, the personas of its requests, without end.

        Streams of a group draw from one sequence: whoever is next gets the next persona of it, so that two
        runs with the same seed send the same requests in the same order, however fast they are answered.
        """
        out: list[Iterator[int]] = []
        first = 0
        for group, (personas, streams) in enumerate(self.shares):
            members = range(first, first + personas)
            out += [_endless(members, Random(f"{seed} {self.name} {group}"))] * streams
            first += personas
        return out


def swarm(streams: int = 100, personas: int = 40) -> Workload:
    """Many personas, more than fit into all caches' shares under round robin."""
    return Workload("swarm", f"{streams} streams, {personas} personas", ((personas, streams),))


# Rows besides the swarm. The prompts of the first two fit into every cache: little is to be won, and nothing
# may be lost. The mix has one domain, two agent types, and twenty agents that share half of the streams.
ONE_DOMAIN = Workload("one-domain", "20 streams, one domain", ((1, 20),))
TWO_TYPES = Workload("two-types", "40 streams, two agent types", ((2, 40),))
MIXED = Workload("mixed", "60 streams, mixed", ((1, 15), (2, 15), (20, 30)))


def make_persona(
    index: int, seed: int, model: str, prompt_tokens: tuple[int, int] = PROMPT_TOKENS
) -> Persona:
    """Persona ``index`` of a seed: always the same, its prompt's length even over the given range."""
    random = Random(f"{seed} {index}")
    length = random.randint(*prompt_tokens)
    tool_tokens = int(length * _TOOLS_SHARE / _TOOLS)
    tools = [_tool(number, tool_tokens, random) for number in range(_TOOLS)]
    name = f"agent-{index:02d}"
    system = f"You are {name}, specialist for {words(4, random)}. " + words(
        length - _TOOLS * tool_tokens, random
    )
    before = json.dumps({"model": model, "messages": [{"role": "system", "content": system}]})[:-2]
    options = {
        "tools": tools,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    head = before + ', {"role": "user", "content": "'
    tail = '"}], ' + json.dumps(options)[1:]
    return Persona(name, head.encode("ascii"), tail.encode("ascii"))


def make_turn(random: Random) -> str:
    """A user's turn that nobody has sent before."""
    return f"Case {random.getrandbits(48):012x}: {words(random.randint(*_TURN_TOKENS), random)}"


def words(tokens: int, random: Random) -> str:
    """Words that make about so many tokens."""
    return " ".join(random.choices(_VOCABULARY, k=2 * tokens))[: tokens * _CHARS_PER_TOKEN]


def _tool(number: int, tokens: int, random: Random) -> dict[str, object]:
    function = {
        "name": f"{random.choice(_VOCABULARY)}_{random.choice(_VOCABULARY)}_{number}",
        "description": words(tokens, random),
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    }
    return {"type": "function", "function": function}


def _endless(members: range, random: Random) -> Iterator[int]:
    while True:
        yield random.choice(members)
