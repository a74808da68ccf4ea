"""vLLM V1's KV block pool: reference counts, a queue of free blocks, and a map from hash to block.

Theory, as in vLLM's ``block_pool.py`` and ``kv_cache_utils.py``:

- A block holds the KV cache of ``block_size`` tokens. Block 0 is a placeholder that is never handed out, so
  a pool of N blocks has N - 1 to give.
- A *full* block has a hash, chained over its parent's. Blocks are cached (findable by hash) the moment they
  are scheduled to be filled.
- A free block keeps its hash and its content until somebody takes it: the free queue is the LRU list. New
  blocks are taken at its head; what is released goes to its tail, the last block of a sequence first, so that
  heads of prompts outlive their tails. Released blocks without a hash can never be hit: they go to the head.
- A hit takes a free block out of the queue ("touch") and counts a reference.
- Two sequences that fill equal blocks at the same time both keep theirs: blocks aren't de-duplicated, and a
  lookup finds the one cached first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 1 … ``num_blocks`` - 1 of one engine. Block ids are small integers; hashes are any integers."""

    __slots__ = ("_copies", "_free", "_hash", "_refs", "cached", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` counts the placeholder, as vLLM's ``num_gpu_blocks`` does; at least 2."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is a placeholder), not {num_blocks}")
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._hash: list[int | None] = [None] * num_blocks
        #: hash → the block that a lookup finds.
        self.cached: dict[int, int] = {}
        # hash → further blocks with the same content, oldest first.
        self._copies: dict[int, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody references, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody references, 0 … 1 (``vllm:kv_cache_usage_perc``)."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def match(self, chain: Sequence[int], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of ``chain``, at most ``limit`` of them."""
        get = self.cached.get
        found: list[int] = []
        append = found.append
        for block_hash in chain[:limit] if limit < len(chain) else chain:
            block = get(block_hash)
            if block is None:
                break
            append(block)
        return found

    def match_length(self, chain: Sequence[int], limit: int) -> int:
        """How many blocks `match` would find."""
        cached = self.cached
        count = 0
        for block_hash in chain[:limit] if limit < len(chain) else chain:
            if block_hash not in cached:
                break
            count += 1
        return count

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are in the free queue now."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def touch(self, blocks: Iterable[int]) -> None:
        """Reference blocks that were hit."""
        refs, free = self._refs, self._free
        for block in blocks:
            if not refs[block]:
                del free[block]
            refs[block] += 1

    def take(self, count: int) -> list[int]:
        """``count`` fresh blocks, from the head of the free queue; what they cached is evicted.

        The caller has made sure that `free_blocks` suffices.
        """
        pop, hashes, refs = self._free.popitem, self._hash, self._refs
        taken = []
        for _ in range(count):
            block = pop(last=False)[0]
            if hashes[block] is not None:
                self._evict(block)
            refs[block] = 1
            taken.append(block)
        return taken

    def cache(self, block: int, block_hash: int) -> None:
        """Make a block findable: it is full, or will be at the end of this step."""
        self._hash[block] = block_hash
        if self.cached.setdefault(block_hash, block) != block:
            self._copies.setdefault(block_hash, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given in the sequence's order."""
        refs, hashes, free = self._refs, self._hash, self._free
        unhashed = []
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                free[block] = None
                if hashes[block] is None:
                    unhashed.append(block)
        for block in reversed(unhashed):
            free.move_to_end(block, last=False)

    def clear(self) -> None:
        """Forget every hash (``reset_prefix_cache``); blocks in use stay in use."""
        self.cached.clear()
        self._copies.clear()
        self._hash = [None] * self.num_blocks

    def _evict(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None
        self._hash[block] = None
        copies = self._copies.get(block_hash)
        if copies is None:
            del self.cached[block_hash]
            return
        if self.cached[block_hash] == block:
            self.cached[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[block_hash]
