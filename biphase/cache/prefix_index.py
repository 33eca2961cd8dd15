"""Which block of this worker holds which content: chain hash <-> block ids.

Owns the two maps and nothing else: no reference counts, no order of eviction, no lock (block_pool has them). One hash
may stand in several blocks, since two requests may compute the same prefix at the same time and a block table is never
rewritten. A hash is held as long as one copy is left.
"""

from __future__ import annotations

from collections.abc import Iterable

from biphase.request import BlockHash


class PrefixIndex:
    def __init__(self) -> None:
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        # Further copies, oldest first. Nearly always empty.
        self._more: dict[BlockHash, list[int]] = {}

    def __len__(self) -> int:
        """Hashes held, copies not counted."""
        return len(self._block_of)

    def get(self, block_hash: BlockHash) -> int | None:
        """A block that holds this content; the oldest copy."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._hash_of.get(block_id)

    def hashes(self) -> list[BlockHash]:
        return list(self._block_of)

    def has_other_copy(self, block_id: int) -> bool:
        return self._hash_of[block_id] in self._more

    def longest_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Block ids of the leading hashes that are held, up to the first that is not."""
        found: list[int] = []
        get = self._block_of.get
        for block_hash in hashes:
            block_id = get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def add(self, block_id: int, block_hash: BlockHash) -> bool:
        """Records that the block holds the content. True when no other block did."""
        assert block_id not in self._hash_of, f"block {block_id} is in the index already"
        self._hash_of[block_id] = block_hash
        if block_hash in self._block_of:
            self._more.setdefault(block_hash, []).append(block_id)
            return False
        self._block_of[block_hash] = block_id
        return True

    def remove(self, block_id: int) -> BlockHash | None:
        """Forgets what the block holds. Returns the hash when this was its last copy, else None."""
        block_hash = self._hash_of.pop(block_id)
        copies = self._more.get(block_hash)
        if copies is None:
            del self._block_of[block_hash]
            return block_hash
        if self._block_of[block_hash] == block_id:
            self._block_of[block_hash] = copies.pop(0)
        else:
            copies.remove(block_id)
        if not copies:
            del self._more[block_hash]
        return None

    def check_integrity(self) -> None:
        """Asserts that the maps agree."""
        by_hash = [(h, b) for h, b in self._block_of.items()]
        by_hash += [(h, b) for h, copies in self._more.items() for b in copies]
        assert len(by_hash) == len(self._hash_of), "a block or a hash is in one map only"
        for block_hash, block_id in by_hash:
            assert self._hash_of[block_id] == block_hash, f"block {block_id} is indexed under another hash"
        assert all(self._more.values()), "an empty list of copies"
