"""Where the prompts in a cache picture part: forks that look like prompts breaking their own caching.

Prompts of one template share their beginning and part where the user speaks: the tails are short, or grow
with the conversation, or are asked for again. A time or an id early in the prompt looks different: at one
depth many branches leave, each is one prompt only, nothing ever grows from it, and as each is the rest of the
same template all are of about the same length. That is all that hashes can show. They can't tell whether the
tails hold the same text (documents of one length would look alike), whose prompts they are, or what stands at
the fork; and a fork within the first block shows at depth 0, among all prompts that have nothing in common.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from extproc.routing.cache import CachePicture

#: So many alike branches are needed to be suspicious.
LEAST_BRANCHES = 8

#: Shorter tails, in blocks, are what a user says, not a template.
LEAST_TAIL_BLOCKS = 2

#: Lengths within this factor are alike.
_ALIKE = 1.15

#: A walk stops after so many nodes: some 30 ms, in which the router decides nothing.
MAX_NODES = 50_000


class Fork(msgspec.Struct, frozen=True):
    """A place where prompts part.

    Attributes:
        depth_tokens: how much the branches share before.
        branches: ways on from here.
        single: those of them that are one prompt, from which nothing grew.
        alike: the most of these that are of about the same length.
        tail_tokens: that length, behind the fork.
        lost_tokens: tails of the alike ones, all but one: what caching would save if they are the same text.

    """

    depth_tokens: int
    branches: int
    single: int
    alike: int
    tail_tokens: int
    lost_tokens: int


class Forks(msgspec.Struct, frozen=True):
    """A pool's forks that look self-inflicted, the dearest first. ``partial``: the walk stopped early."""

    block_tokens: int
    nodes: int
    partial: bool
    forks: list[Fork]


def find_forks(picture: CachePicture, *, max_nodes: int = MAX_NODES) -> Forks:
    """Walk a picture, shallow nodes first; O(nodes). Changes nothing."""
    block = picture.block_tokens
    found: list[Fork] = []
    nodes = 0
    partial = False
    waiting = deque([(picture.root, 0)])
    while waiting and nodes < max_nodes:
        node, depth = waiting.popleft()
        children = list(islice((node.children or {}).values(), max_nodes - nodes))
        nodes += len(children)
        partial |= len(children) < len(node.children or ())
        tails = sorted(child.length for child in children if not child.children)
        waiting.extend((child, depth + child.length) for child in children if child.children)
        alike = _most_alike([tail for tail in tails if tail >= LEAST_TAIL_BLOCKS])
        if len(alike) >= LEAST_BRANCHES:
            lost = sum(alike) - alike[-1]
            middle = alike[len(alike) // 2]
            found.append(
                Fork(depth * block, len(children), len(tails), len(alike), middle * block, lost * block)
            )
    found.sort(key=lambda fork: fork.lost_tokens, reverse=True)
    return Forks(block, nodes, partial or bool(waiting), found)


def _most_alike(tails: list[int]) -> list[int]:
    """The largest group of sorted lengths that are all within a factor of each other."""
    best, low = (0, 0), 0
    for high in range(len(tails)):
        while tails[high] > tails[low] * _ALIKE:
            low += 1
        if high + 1 - low > best[1] - best[0]:
            best = (low, high + 1)
    return tails[slice(*best)]
