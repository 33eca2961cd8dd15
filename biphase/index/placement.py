"""Which block store a block belongs to, when there are several: rendezvous hashing.

Every node works it out alike from the list of stores, without asking anyone. When a store comes or goes, only its own
share moves. Blocks of one chain are placed in runs, all blocks of a run with the run's first one: a chain placed block
by block would break at its first lost block when any one store is lost, and every lease of it would ask every store.

After "A Name-Based Mapping Scheme for Rendezvous" (Thaler, Ravishankar, 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from biphase.request import BlockHash, NodeId

# Long enough that a prompt needs few stores, short enough that a popular system prompt does not sit on one.
RUN_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [start, stop) of a chain belong to `store`."""

    store: NodeId
    start: int
    stop: int


def rank(block_hash: BlockHash, stores: Sequence[NodeId]) -> list[NodeId]:
    """All stores, the owner of the block first, then those that would own it if the ones before were gone."""
    weights = [(blake2b(block_hash, key=store.encode()[:64], digest_size=8).digest(), store) for store in stores]
    return [store for _, store in sorted(weights, reverse=True)]


def place(hashes: Sequence[BlockHash], stores: Sequence[NodeId], run_blocks: int = RUN_BLOCKS) -> list[Run]:
    """Divides a chain among the stores.

    Args:
        hashes: the chain from its first block on.
        stores: at least one.

    Returns:
        Runs in chain order that cover the chain; neighbouring ones of the same store are one.
    """
    runs: list[Run] = []
    for start in range(0, len(hashes), run_blocks):
        owner = rank(hashes[start], stores)[0]
        stop = min(start + run_blocks, len(hashes))
        if runs and runs[-1].store == owner:
            runs[-1] = Run(owner, runs[-1].start, stop)
        else:
            runs.append(Run(owner, start, stop))
    return runs
