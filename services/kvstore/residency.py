"""Which blocks stand in memory: who gets in, and who has to go for it.

Owns the store's policy on top of BlockPool's bookkeeping: least recently used goes first, but a block seen once does
not push out one seen often, and a tenant at its quota pushes out only its own. Everything happens under the pool's
lock. Owns no bytes and no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from biphase.cache.block_pool import BlockPool
from biphase.request import BlockHash
from services.kvstore.frequency import FrequencySketch

# Whose blocks are whose: the digest of a cache_salt. Blocks without a salt are everybody's.
COMMON_TENANT = ""
# Blocks looked at for one to evict. Those asked for more often than the newcomer get a second round.
_NUM_CANDIDATES = 16


class Refusal(StrEnum):
    """Why a block is not taken."""

    # Every block is leased or being moved.
    FULL = "full"
    # What it would push out is asked for more often.
    FREQUENCY = "frequency"
    QUOTA = "quota"


@dataclass(slots=True)
class ResidencyCounts:
    num_evicted: int = 0
    num_refused_full: int = 0
    num_refused_frequency: int = 0
    num_refused_quota: int = 0


class Residency:
    """The policy of one pool.

    Args:
        tenant_quota: share of the pool that one tenant's blocks may take; the common tenant has no quota.
    """

    def __init__(self, pool: BlockPool, tenant_quota: float = 1.0) -> None:
        self.pool = pool
        self.counts = ResidencyCounts()
        self._frequency = FrequencySketch(pool.num_blocks)
        self._max_tenant_blocks = max(1, int(pool.num_blocks * tenant_quota))
        self._tenant_of: dict[int, str] = {}
        # Per tenant, least recently used first.
        self._blocks_of: dict[str, OrderedDict[int, None]] = {}

    def note(self, hashes: Iterable[BlockHash]) -> None:
        """Counts that these blocks were asked for, or offered, once more."""
        with self.pool.lock:
            self._frequency.add(hashes)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Makes blocks the most recently used ones. For blocks that are held."""
        with self.pool.lock:
            self.pool.acquire(block_ids)
            self.pool.release(block_ids)
            for block_id in block_ids:
                tenant = self._tenant_of.get(block_id)
                if tenant is not None:
                    self._blocks_of[tenant].move_to_end(block_id)

    def place(self, block_hash: BlockHash, tenant: str, *, wanted: bool = False) -> int | Refusal:
        """Finds a place for a block that is not held, and evicts another for it if need be.

        Args:
            wanted: somebody waits for this block: it gets in if there is any way.

        Returns:
            A block id with one reference, to be filled and then given to `settle`.
        """
        with self.pool.lock:
            victim = self._victim(block_hash, tenant, wanted)
            if isinstance(victim, Refusal):
                self._count(victim)
                return victim
            if victim is not None:
                self.pool.forget(victim)
                self._disown(victim)
                self.counts.num_evicted += 1
            taken = self.pool.allocate(1)
            assert taken is not None, "a place was made and is gone"
            if tenant != COMMON_TENANT:
                self._tenant_of[taken[0]] = tenant
                self._blocks_of.setdefault(tenant, OrderedDict())[taken[0]] = None
            return taken[0]

    def settle(self, blocks: Sequence[tuple[int, BlockHash | None]]) -> None:
        """Ends what `place` began, for the blocks of one chain in order.

        Args:
            blocks: (block id, hash of what it holds now, or None when nothing came).
        """
        with self.pool.lock:
            for block_id, block_hash in blocks:
                if block_hash is None:
                    self._disown(block_id)
                else:
                    self.pool.commit(block_id, block_hash)
            self.pool.release([block_id for block_id, _ in blocks])

    def clear(self) -> bool:
        """Forgets every block that nobody holds. Whether none are left."""
        with self.pool.lock:
            for block_id, _ in self.pool.oldest_cached(self.pool.num_blocks):
                self._disown(block_id)
            self.pool.drop_cached()
            return not self.pool.num_used

    def num_blocks_of(self, tenant: str) -> int:
        return len(self._blocks_of.get(tenant, ()))

    @property
    def num_tenants(self) -> int:
        """Tenants with a salt that have blocks here."""
        return len(self._blocks_of)

    def _victim(self, block_hash: BlockHash, tenant: str, wanted: bool) -> int | Refusal | None:
        """The block to evict; None when there is a blank one."""
        pool = self.pool
        if tenant != COMMON_TENANT and self.num_blocks_of(tenant) >= self._max_tenant_blocks:
            own = next((b for b in self._blocks_of[tenant] if self._is_evictable(b)), None)
            return Refusal.QUOTA if own is None else own
        if pool.num_free > pool.num_cached:
            return None
        oldest = pool.oldest_cached(_NUM_CANDIDATES)
        if not oldest:
            return Refusal.FULL
        frequency = self._frequency.estimate(block_hash)
        for block_id, held in oldest:
            # Equally rare: the newer one stays, so that the store follows what happens now.
            if self._frequency.estimate(held) <= frequency:
                return block_id
            pool.acquire([block_id])
            pool.release([block_id])
        return oldest[0][0] if wanted else Refusal.FREQUENCY

    def _is_evictable(self, block_id: int) -> bool:
        return self.pool.ref_count(block_id) == 0

    def _disown(self, block_id: int) -> None:
        tenant = self._tenant_of.pop(block_id, None)
        if tenant is not None:
            del self._blocks_of[tenant][block_id]
            if not self._blocks_of[tenant]:
                del self._blocks_of[tenant]

    def _count(self, refusal: Refusal) -> None:
        if refusal is Refusal.FULL:
            self.counts.num_refused_full += 1
        elif refusal is Refusal.FREQUENCY:
            self.counts.num_refused_frequency += 1
        else:
            self.counts.num_refused_quota += 1

    def check_integrity(self) -> None:
        """Asserts that pool and tenants agree."""
        with self.pool.lock:
            self.pool.check_integrity()
            owned = {block_id: tenant for tenant, blocks in self._blocks_of.items() for block_id in blocks}
            assert owned == self._tenant_of, "tenants' blocks are counted wrong"
            assert all(self._blocks_of.values()), "a tenant without blocks"
            for block_id in owned:
                held = self.pool.hash_of(block_id) is not None or self.pool.ref_count(block_id) > 0
                assert held, f"blank block {block_id} has a tenant"
            for tenant in self._blocks_of:
                assert self.num_blocks_of(tenant) <= self._max_tenant_blocks, f"{tenant} is over its quota"
