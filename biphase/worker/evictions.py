"""Which of a worker's blocks will soon be evicted, and which of those no block store has been offered.

Owns what a block's hash does not tell and an offer has to: whose it is, and which store's, by the run of its chain that
it belongs to. Owns no offer (offers.py). A block that is evicted all the same, since many were needed at once, is lost
to the others and counted: nothing here holds a block, and no allocation waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from biphase.cache.block_pool import BlockPool
from biphase.index.placement import RUN_BLOCKS
from biphase.request import BlockHash

_NO_LIMITS: Mapping[str, int] = MappingProxyType({})
# The oldest cached blocks, which `allocate` takes next: this share of the pool, within bounds.
_WINDOW_SHARE = 8
_MIN_WINDOW, _MAX_WINDOW = 16, 512


@dataclass(slots=True)
class _Block:
    # First block of the run it is placed with.
    run: BlockHash
    # Place in its chain.
    index: int
    tenant: str
    was_offered: bool = False


@dataclass(frozen=True, slots=True)
class DueBlocks:
    """Blocks of one store and one tenant that nobody was offered, in the order of their chains."""

    store: str
    tenant: str
    # (place in its chain, hash)
    blocks: tuple[tuple[int, BlockHash], ...]


class EvictionWatch:
    """For one thread; listens to the pool from any.

    Args:
        owner: the store that blocks of a run belong to, by the run's first block.
        is_stored: whether any store is known to hold a block.
    """

    def __init__(
        self, pool: BlockPool, owner: Callable[[BlockHash], str], is_stored: Callable[[BlockHash], bool]
    ) -> None:
        self._pool = pool
        self._owner = owner
        self._is_stored = is_stored
        self._window = min(_MAX_WINDOW, max(_MIN_WINDOW, pool.num_blocks // _WINDOW_SHARE))
        self._blocks: dict[BlockHash, _Block] = {}
        self._evicted: deque[list[BlockHash]] = deque()
        # Evicted before any store was offered them.
        self.num_lost_blocks = 0
        pool.add_listener(removed=self._evicted.append)

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, hashes: Sequence[BlockHash], tenant: str) -> None:
        """Learns of a chain, from its first block on, as far as it stands in the cache."""
        self.forget_evicted()
        for index in range(len(self._pool.find_chain(hashes))):
            if hashes[index] not in self._blocks:
                run = hashes[index - index % RUN_BLOCKS]
                self._blocks[hashes[index]] = _Block(run, index, tenant)

    def offered(self, hashes: Sequence[BlockHash]) -> None:
        """A store has these, or would not have them: not to be offered again."""
        for block_hash in hashes:
            if (block := self._blocks.get(block_hash)) is not None:
                block.was_offered = True

    def forget_offers(self) -> None:
        """There are other stores now."""
        for block in self._blocks.values():
            block.was_offered = False

    def due(self, limit: int, limits: Mapping[str, int] = _NO_LIMITS) -> DueBlocks | None:
        """What to offer now: the oldest block that ought to be, and others for the same store and of the same tenant.

        None as long as blank blocks are left for a while.

        Args:
            limit: at most so many blocks.
            limits: of single stores, where less; those with 0 are left alone.
        """
        self.forget_evicted()
        if self._pool.num_free - self._pool.num_cached >= self._window:
            return None
        store, tenant = "", ""
        found: list[tuple[BlockHash, int, BlockHash]] = []
        for _, block_hash in self._pool.oldest_cached(self._window):
            block = self._blocks.get(block_hash)
            if block is None or block.was_offered:
                continue
            if self._is_stored(block_hash):
                block.was_offered = True
                continue
            owner = self._owner(block.run)
            if limits.get(owner, limit) <= 0:
                continue
            if not found:
                store, tenant = owner, block.tenant
                limit = min(limit, limits.get(owner, limit))
            if (owner, block.tenant) == (store, tenant):
                found.append((block.run, block.index, block_hash))
            if len(found) == limit:
                break
        if not found:
            return None
        # The end of a chain is the oldest part of it; offers name it from its beginning on.
        return DueBlocks(store, tenant, tuple((index, block_hash) for _, index, block_hash in sorted(found)))

    def forget_evicted(self) -> None:
        """Takes in what the pool has evicted. Everything else here does so too; to be called when nothing else is."""
        while self._evicted:
            for block_hash in self._evicted.popleft():
                block = self._blocks.pop(block_hash, None)
                if block is not None and not block.was_offered and not self._is_stored(block_hash):
                    self.num_lost_blocks += 1
