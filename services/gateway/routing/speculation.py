"""What the gateway has just sent where: prefixes that a node will hold in a moment, before the index says so.

Without an index these entries are all that routing knows of caches, so they live longer then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from biphase.request import BlockHash

_MAX_BLOCKS = 200_000
# Entries are dropped by whole tables, each of them filled for half a lifetime.
_NUM_TABLES = 3


class SpeculativeHolders:
    """Chains of block hashes -> nodes expected to hold them. An entry lives for one lifetime and at most a half more,
    and shorter when there are too many.

    Holders go by their incarnation, so that what a restarted node held before is never expected of it.
    """

    def __init__(
        self,
        *,
        lifetime_seconds: float,
        max_blocks: int = _MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table_seconds = lifetime_seconds / (_NUM_TABLES - 1)
        self._table_blocks = max(1, max_blocks // _NUM_TABLES)
        self._clock = clock
        self._tables = [_Table()]
        self._next_table = clock() + self._table_seconds

    def add(self, holder: str, hashes: Sequence[BlockHash]) -> None:
        """`hashes`: a chain from its root on."""
        self._turn()
        self._tables[0].add(holder, hashes)
        if len(self._tables[0].numbers) > self._table_blocks:
            self._push()

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """`hashes`: a chain from its root on."""
        self._turn()
        lengths: dict[str, int] = {}
        for table in self._tables:
            for holder, length in table.num_leading_blocks(hashes).items():
                if length > lengths.get(holder, 0):
                    lengths[holder] = length
        return lengths

    def _turn(self) -> None:
        late = self._clock() - self._next_table
        if late >= 0:
            turns = 1 + int(late / self._table_seconds)
            for _ in range(min(_NUM_TABLES, turns)):
                self._push()
            self._next_table += turns * self._table_seconds

    def _push(self) -> None:
        self._tables = [_Table(), *self._tables[: _NUM_TABLES - 1]]


class _Table:
    """Who was given which chains, all of them from their roots on.

    So along any chain the sets of holders only shrink, and where two of its blocks have the same set, all between have
    it too: a chain falls into few runs, whose ends are found by bisection and which are written at once.
    """

    def __init__(self) -> None:
        self.numbers: dict[BlockHash, int] = {}
        self._sets: list[frozenset[str]] = [frozenset()]
        self._number_of: dict[frozenset[str], int] = {frozenset(): 0}

    def add(self, holder: str, hashes: Sequence[BlockHash]) -> None:
        for start, stop, number in list(self._runs(hashes)):
            holders = self._sets[number]
            if holder not in holders:
                self.numbers.update(dict.fromkeys(hashes[start:stop], self._number(holders | {holder})))

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        lengths: dict[str, int] = {}
        for _, stop, number in self._runs(hashes):
            if not number:
                break
            lengths.update(dict.fromkeys(self._sets[number], stop))
        return lengths

    def _runs(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int, int]]:
        """(start, stop, number of the set of holders) of each run of equal sets."""
        get = self.numbers.get
        start, total = 0, len(hashes)
        while start < total:
            number = get(hashes[start], 0)
            # The run goes on at `same`, and has ended at `other`.
            same, other = start, total
            if get(hashes[total - 1], 0) == number:
                same = total - 1
            while other - same > 1:
                middle = (same + other) // 2
                if get(hashes[middle], 0) == number:
                    same = middle
                else:
                    other = middle
            yield start, other, number
            start = other

    def _number(self, holders: frozenset[str]) -> int:
        number = self._number_of.get(holders)
        if number is None:
            number = self._number_of[holders] = len(self._sets)
            self._sets.append(holders)
        return number
