"""A pool's picture of its workers' caches as bytes, so that a restarted router doesn't start blind.

Only what was learned is kept: who holds which blocks, in which order they were used, which process of the
engine that was, and how fast it prefills. Accounts of requests in flight die with the router, as their
streams do. Times are stored as ages, so the two processes need no common clock but the wall's, and addresses
instead of slots, so the fleet may have changed meanwhile.

The tree is stored node by node, parents first: ``(index of the parent, hashes)``; each worker's holdings
as ``(node, age in s)``, least recently used first. Restoring replays them as touches in that order; blocks
of a node that a worker held only in part are replayed as the part.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping

import msgspec

from extproc.routing.cache import Node
from extproc.routing.pool import Pool

FORMAT = "extproc-state"
VERSION = 1


class SnapshotError(Exception):
    """The bytes are no usable snapshot; the text says why."""


class _Holding(msgspec.Struct, array_like=True):
    node: int
    blocks: int
    age_s: float


class _Worker(msgspec.Struct, array_like=True):
    holdings: list[_Holding]
    engine_started_s: float | None
    prefill_s_per_token: float | None = None  # as learned; None: not learned, or from before it was saved


class _Node(msgspec.Struct, array_like=True):
    parent: int  # -1: the root
    hashes: bytes  # 8 bytes a block, little-endian


class _Pool(msgspec.Struct):
    block_tokens: int
    nodes: list[_Node]
    workers: dict[str, _Worker]


class _Snapshot(msgspec.Struct):
    format: str
    version: int
    saved_unix_s: float
    pools: dict[str, _Pool]


def save(pools: Mapping[str, Pool], now: float, unix_s: float) -> bytes:
    """All pools' pictures. ``now``: the pools' clock; ``unix_s``: the wall's, at the same moment."""
    saved = {name: _save_pool(pool, now) for name, pool in pools.items()}
    return msgspec.msgpack.encode(_Snapshot(FORMAT, VERSION, unix_s, saved))


def restore(data: bytes, pools: Mapping[str, Pool], now: float, unix_s: float) -> int:
    """Bring the pictures back, for workers that are still there; returns the blocks restored.

    Pools that have another block size now are left empty. SnapshotError: nothing was changed.
    """
    try:
        snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise SnapshotError(f"not a state file: {error}") from error
    if snapshot.format != FORMAT or snapshot.version != VERSION:
        raise SnapshotError(
            f"format {snapshot.format!r} version {snapshot.version}, not {FORMAT!r} {VERSION}"
        )
    chains = {name: _chains(pool) for name, pool in snapshot.pools.items()}
    down_s = max(0.0, unix_s - snapshot.saved_unix_s)
    blocks = 0
    for name, saved in snapshot.pools.items():
        pool = pools.get(name)
        if pool is not None and pool.picture.block_tokens == saved.block_tokens:
            blocks += _restore_pool(saved, chains[name], pool, now - down_s)
    return blocks


def _save_pool(pool: Pool, now: float) -> _Pool:
    picture = pool.picture
    numbers: dict[Node, int] = {}
    nodes: list[_Node] = []

    def number(node: Node) -> int:
        if node in numbers:
            return numbers[node]
        path = [node]
        while (
            (parent := path[-1].parent) is not None and parent is not picture.root and parent not in numbers
        ):
            path.append(parent)
        for each in reversed(path):
            parent_number = -1 if each.parent is picture.root or each.parent is None else numbers[each.parent]
            numbers[each] = len(nodes)
            nodes.append(_Node(parent_number, _little_endian(each.hashes).tobytes()))
        return numbers[node]

    workers = {
        worker.address: _Worker(
            [
                _Holding(number(node), held, now - used_s)
                for node, held, used_s in picture.holdings(worker.slot)
                if len(node.hashes)  # output tokens have no hashes, and nobody can hit them
            ],
            worker.engine_started_s,
            worker.prefill_s_per_token if pool.settings.learn_speed else None,
        )
        for worker in pool.workers
    }
    return _Pool(picture.block_tokens, nodes, workers)


def _chains(saved: _Pool) -> list[array[int]]:
    """Each node's whole chain from the root; SnapshotError when the nodes make no tree."""
    chains: list[array[int]] = []
    for index, node in enumerate(saved.nodes):
        if not -1 <= node.parent < index or not node.hashes or len(node.hashes) % 8:
            raise SnapshotError(f"node {index} is damaged")
        run = array("Q")
        run.frombytes(node.hashes)
        chains.append((array("Q") if node.parent < 0 else chains[node.parent]) + _little_endian(run))
    for address, worker in saved.workers.items():
        for holding in worker.holdings:
            if not 0 <= holding.node < len(chains):
                raise SnapshotError(f"worker {address} holds a node that isn't there")
            if not 0 < holding.blocks <= len(saved.nodes[holding.node].hashes) // 8:
                raise SnapshotError(f"worker {address} holds more of a node than there is")
    return chains


def _restore_pool(saved: _Pool, chains: list[array[int]], pool: Pool, then: float) -> int:
    blocks = 0
    for worker in pool.workers:
        kept = saved.workers.get(worker.address)
        if kept is None:
            continue
        worker.engine_started_s = kept.engine_started_s
        if kept.prefill_s_per_token is not None and pool.settings.learn_speed:
            worker.learned(worker.speed.log_factor_at(kept.prefill_s_per_token))
        for holding in kept.holdings:
            chain = chains[holding.node]
            length = len(chain) - len(saved.nodes[holding.node].hashes) // 8 + holding.blocks
            pool.picture.touch(worker.slot, chain[:length], then - holding.age_s)
        pool.observe_cache(worker)
        blocks += pool.picture.used_blocks(worker.slot)
    return blocks


def _little_endian(hashes: array[int]) -> array[int]:
    if sys.byteorder == "big":
        hashes = hashes[:]
        hashes.byteswap()
    return hashes
