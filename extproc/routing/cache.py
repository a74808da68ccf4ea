"""A bounded picture of which prompt blocks each worker's KV cache holds.

The router can't see inside the engines, but it knows every prompt that it sent where, and it knows how
vLLM forgets: least recently used first, a sequence's tail before its head. Replaying that is enough to
predict hits (docs/policies.md has the figures).

Structure: a radix tree over chained block hashes, shared by all workers. A node is a *run* of blocks
that nothing has split yet, so a 1,000-block system prompt is one node, whoever holds it; because the
hashes are chained, two runs agree up to a position exactly if they agree *at* it, and comparing runs is
a binary search. Each node knows who holds all of it (a bit mask) and who holds only its first blocks.
Each worker has a least-recently-used order of the nodes that it holds, and a capacity in blocks.

Invariant: on one worker, a node is never older than the nodes below it (a touch goes tail first, head
last). So the oldest node is a leaf for that worker, eviction may cut it from its end, and what a worker
holds of a chain is always a prefix of it: a lookup walks down once and each worker drops out once.

Cost: a lookup is O(nodes on the path + workers that hold any of it), independent of the number of
blocks up to a logarithm. Memory: 8 bytes a block and about 400 bytes a node, whatever the number of
workers that hold it, plus about 170 bytes for each (node, worker); `extproc bench cache` measures it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Node:
    """A run of blocks: ``hashes[i]`` is the chained hash of the prompt up to and with that block."""

    __slots__ = ("children", "full", "hashes", "length", "parent", "partial")

    def __init__(self, hashes: array[int], length: int, parent: Node | None) -> None:
        self.hashes = hashes
        self.length = length  # blocks; more than len(hashes) only for anonymous nodes (output tokens)
        self.parent = parent
        self.children: dict[int, Node] | None = None
        self.full = 0  # bit mask of the slots that hold the whole run
        self.partial: dict[int, int] | None = None  # slot -> blocks held, fewer than length


class _Holdings:
    """One worker's part of the picture. Its order: least recently used first."""

    __slots__ = ("capacity_blocks", "lru", "output_tokens", "used_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.output_tokens = 0.0  # generated tokens that don't fill a block yet
        self.lru: OrderedDict[Node, float] = OrderedDict()  # node -> time of the last touch (s)


class CachePicture:
    """Which blocks each worker holds, as far as the router can tell.

    Workers are addressed by *slot*, a small integer that `add_worker` hands out and `remove_worker`
    takes back.
    """

    def __init__(self, block_tokens: int) -> None:
        """``block_tokens``: tokens in a block of the chains that will be looked up here."""
        self.block_tokens = block_tokens
        self.root = Node(array("Q"), 0, None)
        self._holdings: dict[int, _Holdings] = {}
        self._free_slots: list[int] = []

    # --- workers ---------------------------------------------------------------------------------

    def add_worker(self, capacity_tokens: int) -> int:
        """A new worker with an empty cache; returns its slot."""
        slot = self._free_slots.pop() if self._free_slots else len(self._holdings)
        self._holdings[slot] = _Holdings(self._blocks(capacity_tokens))
        return slot

    def remove_worker(self, slot: int) -> None:
        """The worker is gone: so is what it held, at once."""
        self.clear(slot)
        del self._holdings[slot]
        self._free_slots.append(slot)

    def clear(self, slot: int) -> None:
        """The worker restarted with an empty cache."""
        holdings = self._holdings[slot]
        for node in holdings.lru:
            self._forget(node, slot)
        holdings.lru.clear()
        holdings.used_blocks = 0
        holdings.output_tokens = 0.0

    def resize(self, slot: int, capacity_tokens: int) -> None:
        """The engine told the real size of its cache."""
        holdings = self._holdings[slot]
        holdings.capacity_blocks = self._blocks(capacity_tokens)
        self._evict(holdings, slot)

    def _blocks(self, capacity_tokens: int) -> int:
        return max(1, capacity_tokens // self.block_tokens)

    # --- asking ----------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many leading blocks of the chain each worker holds: {slot: blocks}, only those with any."""
        found: dict[int, int] = {}
        node, offset, total = self.root, 0, len(hashes)
        alive = -1  # every slot
        while offset < total and node.children is not None:
            child = node.children.get(hashes[offset])
            if child is None:
                break
            matched = _common(child.hashes, hashes, offset)
            if child.partial is not None:
                for slot, held in child.partial.items():
                    if alive >> slot & 1:
                        found[slot] = offset + min(held, matched)
            # Whoever held everything up to here, but nothing of this node, drops out here.
            dropped = 0 if alive < 0 else alive & ~child.full
            if dropped:
                for slot in _slots(dropped):
                    if slot not in found:
                        found[slot] = offset
            alive &= child.full
            offset += matched
            if matched < child.length or not alive:
                break
            node = child
        if alive > 0:
            for slot in _slots(alive):
                found[slot] = offset
        return found

    def free_blocks(self, slot: int) -> int:
        """Blocks that fit before anything must be evicted."""
        holdings = self._holdings[slot]
        return holdings.capacity_blocks - holdings.used_blocks

    def oldest_s(self, slot: int) -> float | None:
        """When the block that would be evicted first was last used; None when nothing is held."""
        lru = self._holdings[slot].lru
        return next(iter(lru.values())) if lru else None

    def used_blocks(self, slot: int) -> int:
        """Blocks that the worker is thought to hold."""
        return self._holdings[slot].used_blocks

    def capacity_blocks(self, slot: int) -> int:
        """Blocks that fit in all."""
        return self._holdings[slot].capacity_blocks

    def nodes(self) -> int:
        """Nodes in the tree, for metrics and benchmarks."""
        count, stack = 0, [self.root]
        while stack:
            node = stack.pop()
            if node.children:
                count += len(node.children)
                stack.extend(node.children.values())
        return count

    def holdings(self, slot: int) -> Iterator[tuple[Node, int, float]]:
        """What the worker holds, least recently used first: (node, blocks of it, last use in s)."""
        for node, used_s in self._holdings[slot].lru.items():
            yield node, self._held(node, slot), used_s

    # --- learning --------------------------------------------------------------------------------

    def touch(self, slot: int, hashes: Sequence[int], now: float) -> None:
        """The worker holds, or is about to hold, all of this chain, and used it at ``now`` (s)."""
        holdings = self._holdings[slot]
        path = self._path(hashes)
        bit = 1 << slot
        for node in reversed(path):  # tail first: the head must be the last to be evicted
            if not node.full & bit:
                held = node.partial.pop(slot, 0) if node.partial else 0
                if not node.partial:
                    node.partial = None
                node.full |= bit
                holdings.used_blocks += node.length - held
            holdings.lru[node] = now
            holdings.lru.move_to_end(node)
        self._evict(holdings, slot)

    def add_output(self, slot: int, tokens: float, now: float) -> None:
        """The worker generated ``tokens`` that it now caches; their content is unknown here."""
        holdings = self._holdings[slot]
        holdings.output_tokens += tokens
        blocks = int(holdings.output_tokens // self.block_tokens)
        if blocks:
            holdings.output_tokens -= blocks * self.block_tokens
            node = Node(array("Q"), blocks, None)
            node.full = 1 << slot
            holdings.lru[node] = now
            holdings.used_blocks += blocks
            self._evict(holdings, slot)

    # --- the tree --------------------------------------------------------------------------------

    def _path(self, hashes: Sequence[int]) -> list[Node]:
        """The nodes that spell exactly this chain, made or split as needed."""
        path: list[Node] = []
        node, offset, total = self.root, 0, len(hashes)
        while offset < total:
            if node.children is None:
                node.children = {}
            child = node.children.get(hashes[offset])
            if child is None:
                rest = array("Q", hashes[offset:])
                child = node.children[rest[0]] = Node(rest, len(rest), node)
            else:
                matched = _common(child.hashes, hashes, offset)
                if matched < child.length:
                    child = self._split(child, matched)
            path.append(child)
            offset += child.length
            node = child
        return path

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two; returns the new head.

        The old node stays the tail, so it keeps its place in every worker's order. The head becomes
        recent, and with it its ancestors, to keep the invariant: an error of one touch per split.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        head = Node(node.hashes[:at], at, parent)
        parent.children[head.hashes[0]] = head
        node.hashes = node.hashes[at:]
        node.length -= at
        node.parent = head
        head.children = {node.hashes[0]: node}
        head.full = node.full
        tail_partial: dict[int, int] = {}
        head_partial: dict[int, int] = {}
        for slot, held in (node.partial or {}).items():
            if held >= at:
                head.full |= 1 << slot
            else:
                head_partial[slot] = held
            if held > at:
                tail_partial[slot] = held - at
            else:
                del self._holdings[slot].lru[node]
        node.partial = tail_partial or None
        head.partial = head_partial or None
        for slot in (*_slots(head.full), *head_partial):
            lru = self._holdings[slot].lru
            recent = next(reversed(lru.values())) if lru else 0.0
            above: Node | None = head
            while above is not None and above is not self.root:
                lru[above] = recent
                lru.move_to_end(above)
                above = above.parent
        if not node.full and not node.partial:
            self._detach(node)
        return head

    def _evict(self, holdings: _Holdings, slot: int) -> None:
        while holdings.used_blocks > holdings.capacity_blocks and holdings.lru:
            node = next(iter(holdings.lru))
            bit = 1 << slot
            held = self._held(node, slot)
            over = holdings.used_blocks - holdings.capacity_blocks
            if over >= held:
                del holdings.lru[node]
                holdings.used_blocks -= held
                self._forget(node, slot)
                continue
            node.full &= ~bit
            if node.partial is None:
                node.partial = {}
            node.partial[slot] = held - over
            holdings.used_blocks -= over
            self._shrink(node)

    @staticmethod
    def _held(node: Node, slot: int) -> int:
        return node.length if node.full >> slot & 1 else (node.partial or {})[slot]

    def _forget(self, node: Node, slot: int) -> None:
        """The worker no longer holds any of the node."""
        node.full &= ~(1 << slot)
        if node.partial is not None:
            node.partial.pop(slot, None)
            if not node.partial:
                node.partial = None
        if not node.full:
            if node.partial is None:
                self._detach(node)
            else:
                self._shrink(node)

    def _shrink(self, node: Node) -> None:
        """Drop the end of a run that nobody holds any more."""
        if node.full or node.children or node.partial is None:
            return
        longest = max(node.partial.values())
        node.length = longest
        del node.hashes[longest:]
        for slot in [s for s, held in node.partial.items() if held == longest]:
            del node.partial[slot]
            node.full |= 1 << slot
        if not node.partial:
            node.partial = None

    def _detach(self, node: Node) -> None:
        parent = node.parent
        if parent is None or parent.children is None or not len(node.hashes):
            return
        if parent.children.get(node.hashes[0]) is node:
            del parent.children[node.hashes[0]]
            if not parent.children:
                parent.children = None
                if parent is not self.root:
                    self._shrink(parent)


def _common(run: array[int], hashes: Sequence[int], offset: int) -> int:
    """How many leading blocks of ``run`` stand in ``hashes`` from ``offset`` on (the first one does)."""
    limit = min(len(run), len(hashes) - offset)
    if run[limit - 1] == hashes[offset + limit - 1]:
        return limit
    low, high = 1, limit - 1  # equal at low - 1, different at high
    while low < high:
        middle = (low + high) // 2
        if run[middle] == hashes[offset + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _slots(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
