"""The table under a view: block hash -> set of holders, in few bytes a block.

Of a hash the table keeps 60 bits: two of a million blocks share them with probability 5e-7, and the price is one lease
that finds nothing. It maps them to numbers of sets of holders (holder_sets.py): plain ints, so that the garbage
collector never walks a million entries. A holder that is gone only stays behind in sets until `sweep` has been through,
in small steps, so that losing a node with a million blocks stalls nobody. Owns no events and no names (view.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence, Set

from biphase.index.events import HASH_BYTES
from biphase.index.holder_sets import NOBODY, Change, Holders, HolderSets, Slot
from biphase.request import BlockHash

_NUM_SHARDS = 64
_WORDS_PER_HASH = HASH_BYTES // 8


class BlockTable:
    """For one thread. Keys are those of `keys_of`."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._sets = HolderSets()
        # Shards that may name holders that are gone.
        self._dirty: set[int] = set()

    @property
    def num_entries(self) -> int:
        """Different block contents, those of holders that are gone and not yet swept included."""
        return sum(map(len, self._shards))

    def number_of(self, block_hash: BlockHash) -> int:
        """Number of the set of holders; equal numbers mean equal sets."""
        key = int.from_bytes(block_hash[:8], sys.byteorder) >> 4
        return self._shards[key % _NUM_SHARDS].get(key, NOBODY)

    def numbers_of(self, hashes: Sequence[BlockHash]) -> list[int]:
        shards = self._shards
        return [shards[key % _NUM_SHARDS].get(key, NOBODY) for key in keys_of(b"".join(hashes))]

    def holders(self, number: int) -> Holders:
        """Whom a number stands for, those that are gone included."""
        return self._sets[number]

    def store(self, slot: Slot, keys: Sequence[int]) -> int:
        """Adds a holder to blocks. Returns to how many that were not its own already."""
        return self._change(self._sets.with_slot(slot), keys)

    def remove(self, slot: Slot, keys: Sequence[int]) -> int:
        """Takes a holder away from blocks. Returns from how many that were its own."""
        return self._change(self._sets.without_slot(slot), keys)

    def _change(self, change: Change, keys: Sequence[int]) -> int:
        """Changes the holders of blocks. Returns of how many they are others now."""
        count = 0
        for key in keys:
            shard = self._shards[key % _NUM_SHARDS]
            before = shard.get(key, NOBODY)
            after = change[before]
            if after != before:
                _put(shard, key, after)
                count += 1
        return count

    def mark_dirty(self) -> None:
        """Some holder is gone: `sweep` has work."""
        self._dirty = set(range(_NUM_SHARDS))

    def sweep(self, kept: Set[Slot], max_shards: int) -> int:
        """Removes all holders but `kept` from some shards. Returns how many shards are still to do."""
        if not self._dirty:
            return 0
        for _ in range(min(max_shards, len(self._dirty))):
            shard = self._shards[self._dirty.pop()]
            reduced = self._sets.among(kept)
            changes = {key: after for key, number in shard.items() if (after := reduced[number]) != number}
            for key, number in changes.items():
                _put(shard, key, number)
        if not self._dirty:
            self._sets.drop_others(kept)
        return len(self._dirty)

    def check_integrity(self, live: Set[Slot], loading: Set[Slot]) -> dict[Slot, int]:
        """Asserts that the table agrees with itself. Returns how many blocks each live holder has."""
        counts = dict.fromkeys(live, 0)
        for number, shard in enumerate(self._shards):
            for key, set_number in shard.items():
                holders = self._sets[set_number]
                assert key % _NUM_SHARDS == number, "an entry is in the wrong shard"
                assert holders, "an entry without a holder"
                self._sets.check_integrity(set_number)
                for slot in holders:
                    if slot in counts:
                        counts[slot] += 1
                    else:
                        assert slot in loading or number in self._dirty, "an entry of a void holder would stay"
        return counts


def keys_of(packed: bytes) -> array[int]:
    """60 bits of each packed hash: as much as a Python int of 32 bytes holds."""
    words = array("Q", packed)[::_WORDS_PER_HASH]
    return array("Q", [word >> 4 for word in words])


def _put(shard: dict[int, int], key: int, number: int) -> None:
    if number == NOBODY:
        del shard[key]
    else:
        shard[key] = number
