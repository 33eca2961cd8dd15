"""What the gateway has just sent where: prefixes that a node will hold in a moment, before the index says so.

Without an index these entries are all that routing knows of caches, so they live longer then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from biphase.request import BlockHash

_MAX_BLOCKS = 200_000
# Entries are dropped by whole tables, each of them filled for half a lifetime.
_NUM_TABLES = 3
# Of a chain so many blocks are written, and one in so many after them.
_DENSE_BLOCKS, _STRIDE = 64, 8
_LENGTH = itemgetter(0)


class SpeculativeHolders:
    """Chains of block hashes -> nodes expected to hold them. An entry lives for one lifetime and at most a half more,
    and shorter when there are too many.

    Args:
        max_blocks: kept; of a long chain fewer than it has.

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

    def add(self, hashes: Sequence[BlockHash], *holders: str) -> None:
        """`hashes`: a chain from its root on."""
        self._turn()
        self._tables[0].add(frozenset(holders), hashes)
        if len(self._tables[0].numbers) > self._table_blocks:
            self._push()

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """`hashes`: a chain from its root on."""
        self._turn()
        lengths: dict[str, int] = {}
        # Shorter ones first: of what several tables say of a holder the longest stays.
        for length, holders in sorted((run for table in self._tables for run in table.runs_of(hashes)), key=_LENGTH):
            lengths.update(dict.fromkeys(holders, length))
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
    it too: a chain falls into few runs, whose ends are found by bisection and which are written at once. Of a long
    chain only its first blocks, every eighth after them and its last are written: who shares a part of it is then
    expected to hold up to seven blocks less of it than it will.
    """

    def __init__(self) -> None:
        self.numbers: dict[BlockHash, int] = {}
        self._sets: list[frozenset[str]] = [frozenset()]
        self._number_of: dict[frozenset[str], int] = {frozenset(): 0}

    def add(self, holders: frozenset[str], hashes: Sequence[BlockHash]) -> None:
        written = _written(hashes)
        if hashes and (len(written) == 0 or written[-1] is not hashes[-1]):
            self._put(holders, hashes[-1:], self.numbers.get(hashes[-1], 0))
        for start, stop, number in list(self._runs(written)):
            self._put(holders, written[start:stop], number)

    def runs_of(self, hashes: Sequence[BlockHash]) -> list[tuple[int, frozenset[str]]]:
        """(leading blocks, who holds so many): in any order, and of a holder the longest counts."""
        runs: list[tuple[int, frozenset[str]]] = []
        if not hashes or hashes[0] not in self.numbers:
            return runs
        for _, stop, number in self._runs(_written(hashes)):
            if not number:
                break
            held = _place(stop - 1) + 1
            runs.append((held, self._sets[number]))
            # A chain that was given may have ended before the next block that is written.
            for place in range(held, min(_place(stop), len(hashes))):
                if found := self.numbers.get(hashes[place]):
                    runs.append((place + 1, self._sets[found]))
        return runs

    def _put(self, holders: frozenset[str], hashes: Sequence[BlockHash], number: int) -> None:
        known = self._sets[number]
        if not holders <= known:
            self.numbers.update(dict.fromkeys(hashes, self._number(known | holders)))

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


def _written(hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
    """Blocks of a chain that are written, but for its last."""
    if len(hashes) <= _DENSE_BLOCKS:
        return hashes
    return [*hashes[:_DENSE_BLOCKS], *hashes[_DENSE_BLOCKS + _STRIDE - 1 :: _STRIDE]]


def _place(number: int) -> int:
    """Place in its chain of the block that is written as that number, counted from 0."""
    past = number - _DENSE_BLOCKS
    return number if past < 0 else _DENSE_BLOCKS + past * _STRIDE + _STRIDE - 1
