"""The free list and the reference counts of KV blocks.

Every block is in exactly one of three regions:

    | used: reference count > 0     | cached: count 0, content findable | blank: count 0, no content |
    | requests, leases, posted I/O  | least recently used first         | last freed, first taken    |

Owns who may take a block, which free block goes next, and the generation that tells a reader whether a block still is
what its handle said. Does not own the memory (cache/memory.py), nor which request has which block (manager.py).

A reference is a reference: whoever reads or writes a block's memory holds one, so that a block with I/O on it is never
handed out again, whatever became of its request. Everything happens under one lock, as the engine's, the gRPC and the
transfer threads all come here.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from biphase.cache.prefix_index import PrefixIndex
from biphase.request import BlockHash

StoredListener = Callable[[list[tuple[BlockHash, int]]], None]
RemovedListener = Callable[[list[BlockHash]], None]
FreedListener = Callable[[], None]


class BlockPool:
    """Blocks 0 ... num_blocks - 1.

    Args:
        num_blocks: at least 1.
        enable_caching: False: nothing is ever findable; every freed block is blank.
        generations: one count per block, where peers on the same host can see it (memory.SharedGenerations).
    """

    def __init__(
        self, num_blocks: int, enable_caching: bool = True, *, generations: array[int] | memoryview[int] | None = None
    ) -> None:
        assert num_blocks >= 1, "a pool without blocks"
        self.lock = threading.RLock()
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        # Counts how often each block's memory was given to new content.
        self.generations: array[int] | memoryview[int] = (
            array("Q", bytes(8 * num_blocks)) if generations is None else generations
        )
        self._ref_counts = [0] * num_blocks
        # A stack: what was freed last is warm in the processor's caches. Starts so that block 0 goes first.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex()
        self._stored: list[StoredListener] = []
        self._removed: list[RemovedListener] = []
        self._freed: list[FreedListener] = []

    # ---- counts

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: blank and cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a findable prefix."""
        return len(self._cached)

    @property
    def num_hashes(self) -> int:
        """Different block contents that can be found here, in used and in cached blocks."""
        return len(self._index)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def hash_of(self, block_id: int) -> BlockHash | None:
        """Content of a committed block; None when it has none that can be found."""
        return self._index.hash_of(block_id)

    # ---- listeners

    def add_listener(
        self,
        *,
        stored: StoredListener | None = None,
        removed: RemovedListener | None = None,
        freed: FreedListener | None = None,
    ) -> None:
        """Registers callbacks. They run under the lock and must be quick and must not raise.

        Args:
            stored: gets (hash, block id) of contents that can now be found and could not before.
            removed: gets hashes of which the last copy goes, before its block is given to anyone.
            freed: called when blocks became free.
        """
        with self.lock:
            if stored is not None:
                self._stored.append(stored)
            if removed is not None:
                self._removed.append(removed)
            if freed is not None:
                self._freed.append(freed)

    # ---- references

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes free blocks, blank ones first, then the least recently used cached ones, whose content is forgotten.

        Returns:
            Block ids, each with one reference and a new generation; None, and nothing taken, when there are too few.
        """
        with self.lock:
            if num_blocks > len(self._blank) + len(self._cached):
                return None
            taken: list[int] = []
            removed: list[BlockHash] = []
            for _ in range(num_blocks):
                if self._blank:
                    block_id = self._blank.pop()
                else:
                    block_id, _ = self._cached.popitem(last=False)
                    block_hash = self._index.remove(block_id)
                    assert block_hash is not None, f"free block {block_id} was kept beside another copy"
                    removed.append(block_hash)
                self._ref_counts[block_id] = 1
                self.generations[block_id] += 1
                taken.append(block_id)
            self._notify_removed(removed)
            return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block. A block must be in use or cached: blank ones have no content to refer to."""
        with self.lock:
            for block_id in block_ids:
                if self._ref_counts[block_id] == 0:
                    assert block_id in self._cached, f"block {block_id} is blank: only allocate() gives it out"
                    del self._cached[block_id]
                self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops a reference from each block; those at 0 become free.

        Args:
            block_ids: in chain order. The last is freed first and so evicted first: a prefix outlives what follows it.
        """
        with self.lock:
            freed = False
            for block_id in reversed(block_ids):
                count = self._ref_counts[block_id] - 1
                assert count >= 0, f"block {block_id} released more often than acquired"
                self._ref_counts[block_id] = count
                if count == 0:
                    self._retire(block_id)
                    freed = True
            if freed:
                for listener in self._freed:
                    listener()

    def _retire(self, block_id: int) -> None:
        if self._index.hash_of(block_id) is None:
            self._blank.append(block_id)
        elif self._index.has_other_copy(block_id):
            self._index.remove(block_id)
            self._blank.append(block_id)
        else:
            self._cached[block_id] = None

    # ---- content

    def commit(self, block_id: int, block_hash: BlockHash) -> None:
        """Makes one full block findable: `commit_chain` of one."""
        self.commit_chain([block_id], [block_hash])

    def commit_chain(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Makes full blocks findable. From now on they are never written again.

        Args:
            block_ids: the caller holds a reference to each.
            hashes: chain hash of each. Naming a block again under the hash it has is allowed.
        """
        if not self.enable_caching:
            return
        with self.lock:
            stored: list[tuple[BlockHash, int]] = []
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                assert self._ref_counts[block_id] > 0, f"block {block_id} committed by nobody"
                if self._index.hash_of(block_id) == block_hash:
                    continue
                older = self._index.get(block_hash)
                if self._index.add(block_id, block_hash):
                    stored.append((block_hash, block_id))
                elif older is not None and self._ref_counts[older] == 0:
                    # A free block is worth keeping only as the last copy.
                    self._index.remove(older)
                    del self._cached[older]
                    self._blank.append(older)
            if stored:
                for listener in self._stored:
                    listener(stored)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """A block that holds this content now. It may be gone as soon as the lock is: see `lease_chain`."""
        with self.lock:
            return self._index.get(block_hash)

    def find_chain(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest held prefix of `hashes`, without a reference (hold the lock to act on it)."""
        with self.lock:
            return self._index.longest_prefix(hashes)

    def lease_chain(self, hashes: Iterable[BlockHash]) -> list[tuple[int, int]]:
        """Finds the longest held prefix of `hashes` and acquires it.

        Returns:
            (block id, generation) of each block found, in order.
        """
        with self.lock:
            found = self._index.longest_prefix(hashes)
            self.acquire(found)
            return [(block_id, self.generations[block_id]) for block_id in found]

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody uses; acquiring them leaves so many fewer to allocate."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def committed_hashes(self) -> list[BlockHash]:
        """All contents that can be found here: a snapshot for the index. Take it under `lock` with its sequence."""
        with self.lock:
            return self._index.hashes()

    def oldest_cached(self, limit: int) -> list[tuple[int, BlockHash]]:
        """(block id, hash) of the cached blocks that `allocate` would take first, in that order, `limit` at most."""
        with self.lock:
            oldest = list(islice(self._cached, limit))
            return [(block_id, h) for block_id in oldest if (h := self._index.hash_of(block_id)) is not None]

    def acquire_held(self, hashes: Iterable[BlockHash]) -> list[tuple[BlockHash, int, int]]:
        """Acquires a block of each of these contents that is held, whatever became of the others.

        Returns:
            (hash, block id, generation) of each block found, in order.
        """
        with self.lock:
            found = [(h, block_id) for h in hashes if (block_id := self._index.get(h)) is not None]
            self.acquire([block_id for _, block_id in found])
            return [(h, block_id, self.generations[block_id]) for h, block_id in found]

    def make_oldest(self, block_ids: Sequence[int]) -> None:
        """Has those of the blocks that are cached evicted before all others, the last one first."""
        with self.lock:
            for block_id in block_ids:
                if block_id in self._cached:
                    self._cached.move_to_end(block_id, last=False)

    def forget(self, block_id: int) -> None:
        """Takes one cached block's content away, whatever its age: it is blank now, and the next to be allocated."""
        with self.lock:
            del self._cached[block_id]
            block_hash = self._index.remove(block_id)
            self._blank.append(block_id)
            assert block_hash is not None, f"free block {block_id} was kept beside another copy"
            self._notify_removed([block_hash])

    def drop_cached(self) -> int:
        """Forgets the content of all free blocks. Returns how many there were."""
        with self.lock:
            dropped = list(self._cached)
            removed = [h for h in map(self._index.remove, dropped) if h is not None]
            self._cached.clear()
            self._blank.extend(reversed(dropped))
            self._notify_removed(removed)
            return len(dropped)

    def _notify_removed(self, removed: list[BlockHash]) -> None:
        if removed:
            for listener in self._removed:
                listener(removed)

    # ---- checks

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one region and that the index names only blocks that may be named."""
        with self.lock:
            used = [b for b, count in enumerate(self._ref_counts) if count > 0]
            everything = sorted([*used, *self._blank, *self._cached])
            assert everything == list(range(self.num_blocks)), "a block is lost or in two regions"
            assert all(count >= 0 for count in self._ref_counts)
            self._index.check_integrity()
            for block_id in self._blank:
                assert self._index.hash_of(block_id) is None, f"blank block {block_id} can be found"
            for block_id in self._cached:
                assert self._index.hash_of(block_id) is not None, f"cached block {block_id} cannot be found"
                assert not self._index.has_other_copy(block_id), f"free block {block_id} has another copy"
            assert self.enable_caching or len(self._index) == 0, "caching is off, yet something can be found"
