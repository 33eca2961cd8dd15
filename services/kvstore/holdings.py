"""What a region holds, in memory or on disk, as the index hears of it.

Owns the rule that a block is held while it is in either place: published when it comes into the first, retracted when
it leaves the last. All callbacks run under the pool's lock, so that the two places are seen together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from biphase.cache.block_pool import BlockPool
from biphase.index.publisher import IndexPublisher
from biphase.request import BlockHash
from services.kvstore.disk import DiskTier

# Makes a publisher, given what is held; None: without an index.
MakePublisher = Callable[[Callable[[], Sequence[BlockHash]]], IndexPublisher | None]


class Holdings:
    """Listens to one pool and, once `disk` is set, to its disk tier."""

    def __init__(self, pool: BlockPool, publisher: MakePublisher) -> None:
        self._pool = pool
        self.disk: DiskTier | None = None
        self.publisher = publisher(self.hashes)
        if self.publisher is not None:
            pool.add_listener(stored=self._on_stored, removed=self._on_removed)

    def hashes(self) -> list[BlockHash]:
        with self._pool.lock:
            in_memory = self._pool.committed_hashes()
            if self.disk is None:
                return in_memory
            return list({*in_memory, *self.disk.hashes()})

    def _on_stored(self, blocks: list[tuple[BlockHash, int]]) -> None:
        assert self.publisher is not None
        self.publisher.on_stored([block for block in blocks if not self._is_on_disk(block[0])])

    def _on_removed(self, hashes: list[BlockHash]) -> None:
        assert self.publisher is not None
        self.publisher.on_removed([block_hash for block_hash in hashes if not self._is_on_disk(block_hash)])

    def on_disk(self, block_hash: BlockHash) -> None:
        """Called by the disk tier."""
        if self.publisher is not None and self._pool.lookup(block_hash) is None:
            self.publisher.on_stored([(block_hash, -1)])

    def off_disk(self, block_hash: BlockHash) -> None:
        """Called by the disk tier."""
        if self.publisher is not None and self._pool.lookup(block_hash) is None:
            self.publisher.on_removed([block_hash])

    def _is_on_disk(self, block_hash: BlockHash) -> bool:
        return self.disk is not None and block_hash in self.disk
