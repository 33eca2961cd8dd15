"""How often a block was asked for lately, in a few bytes a block: a count-min sketch that ages.

After "TinyLFU: A Highly Efficient Cache Admission Policy" (Einziger, Friedman, Manes, 2017). Counts are upper bounds;
all are halved after every so many additions, so that what was popular yesterday makes room. The four rows need no hash
functions of their own: a block hash is SHA-256, and its four words are independent already.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from biphase.request import BlockHash

_WORDS = struct.Struct("<4Q")
_HIGHEST = 15
_HALVED = bytes(count >> 1 for count in range(256))
_ADDITIONS_PER_BLOCK = 10


class FrequencySketch:
    """Counts up to 15 for about `num_blocks` different blocks. For one thread, or under the caller's lock."""

    def __init__(self, num_blocks: int) -> None:
        width = 1024
        while width < 4 * num_blocks:
            width *= 2
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(4)]
        self._max_additions = _ADDITIONS_PER_BLOCK * max(num_blocks, 256)
        self._num_additions = 0

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """Counts one request for each block."""
        mask = self._mask
        first, second, third, fourth = self._rows
        for block_hash in hashes:
            a, b, c, d = _WORDS.unpack(block_hash)
            a, b, c, d = a & mask, b & mask, c & mask, d & mask
            count = min(first[a], second[b], third[c], fourth[d])
            if count == _HIGHEST:
                continue
            # Only the lowest counts grow ("conservative update"): the others are other blocks' already.
            for row, place in ((first, a), (second, b), (third, c), (fourth, d)):
                if row[place] == count:
                    row[place] = count + 1
            self._num_additions += 1
        if self._num_additions >= self._max_additions:
            self._age()

    def estimate(self, block_hash: BlockHash) -> int:
        """Requests counted for the block, 0 to 15; never less than there were since it last aged."""
        places = _WORDS.unpack(block_hash)
        return int(min(row[place & self._mask] for row, place in zip(self._rows, places, strict=True)))

    def _age(self) -> None:
        self._rows = [row.translate(_HALVED) for row in self._rows]
        self._num_additions //= 2
