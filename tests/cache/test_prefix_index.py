"""The two maps of the prefix index, with copies."""

from __future__ import annotations

import pytest

from biphase.cache.prefix_index import PrefixIndex
from biphase.request import BlockHash

A, B, C = (BlockHash(bytes([n]) * 32) for n in range(3))


def test_finds_what_was_added() -> None:
    index = PrefixIndex()
    assert index.get(A) is None
    assert index.add(7, A)
    assert index.get(A) == 7
    assert index.hash_of(7) == A
    assert index.hash_of(8) is None
    assert len(index) == 1
    index.check_integrity()


def test_longest_prefix_stops_at_the_first_gap() -> None:
    index = PrefixIndex()
    index.add(4, A)
    index.add(9, C)
    assert index.longest_prefix([A, B, C]) == [4]
    assert index.longest_prefix([B, C]) == []
    index.add(2, B)
    assert index.longest_prefix([A, B, C]) == [4, 2, 9]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 3), (2, 3, 1)])
def test_a_hash_goes_with_its_last_copy(order: tuple[int, int, int]) -> None:
    index = PrefixIndex()
    assert [index.add(block_id, A) for block_id in (1, 2, 3)] == [True, False, False]
    assert index.has_other_copy(1) and index.has_other_copy(3)
    assert len(index) == 1
    left = [1, 2, 3]
    for block_id in order:
        left.remove(block_id)
        assert index.remove(block_id) == (None if left else A)
        assert index.get(A) == (left[0] if left else None)
        index.check_integrity()
    assert len(index) == 0


def test_a_block_holds_one_content() -> None:
    index = PrefixIndex()
    index.add(1, A)
    with pytest.raises(AssertionError):
        index.add(1, B)
