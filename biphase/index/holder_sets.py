"""Numbers for sets of holders, so that a table of a million blocks holds plain ints and no sets.

Few different sets occur: whoever holds a block of a chain mostly holds its neighbours too. Owns the numbering and its
reuse. Owns no blocks (view.py).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NewType

Slot = NewType("Slot", int)  # one life of one holder, as numbered by the view; never used twice
Holders = frozenset[Slot]

NOBODY = 0  # number of the empty set


class HolderSets:
    """Number -> set and back."""

    def __init__(self) -> None:
        self._sets: list[Holders] = [frozenset()]
        self._numbers: dict[Holders, int] = {frozenset(): NOBODY}
        # Of sets that no entry can have any more.
        self._free: list[int] = []

    def __getitem__(self, number: int) -> Holders:
        return self._sets[number]

    def number(self, holders: Holders) -> int:
        """The number that stands for this set: one int object for all entries."""
        number = self._numbers.get(holders)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._sets[number] = holders
            else:
                number = len(self._sets)
                self._sets.append(holders)
            self._numbers[holders] = number
        return number

    def with_slot(self, slot: Slot) -> Change:
        """Number of a set -> number of the set and this holder."""
        own = {slot}
        return Change(lambda number: self.number(self._sets[number] | own))

    def without_slot(self, slot: Slot) -> Change:
        own = {slot}
        return Change(lambda number: self.number(self._sets[number] - own))

    def among(self, kept: Set[Slot]) -> Change:
        """Number of a set -> number of what is left of it."""
        return Change(lambda number: self.number(self._sets[number] & kept))

    def drop_others(self, kept: Set[Slot]) -> None:
        """Frees the numbers of sets with holders that are none of these. No entry may have such a number."""
        for holders, number in list(self._numbers.items()):
            if not holders <= kept:
                del self._numbers[holders]
                self._free.append(number)

    def check_integrity(self, number: int) -> None:
        """Asserts that the number is the one of its set."""
        assert self._numbers.get(self._sets[number]) == number, "a set of holders has two numbers"


class Change(dict[int, int]):
    """Number of a set -> number of the set after one change, worked out once per use."""

    def __init__(self, change: Callable[[int], int]) -> None:
        super().__init__()
        self._change = change

    def __missing__(self, before: int) -> int:
        after = self[before] = self._change(before)
        return after
