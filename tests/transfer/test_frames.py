"""What follows a batch on the wire says which of its blocks are not what they should be."""

from collections.abc import Sequence

import xxhash

from biphase.transfer import frames
from biphase.transfer.spans import seal

BLOCKS = [memoryview(bytes([number]) * 600) for number in range(4)]


def trailer(payloads: Sequence[memoryview], block_ids: Sequence[int]) -> bytes:
    sums = frames.pack_words([xxhash.xxh3_64_intdigest(payload) for payload in payloads])
    return sums + seal(sums, frames.pack_words(block_ids))


def test_a_trailer_names_the_block_that_changed() -> None:
    sent = trailer(BLOCKS, [7, 8, 9, 10])
    assert len(sent) == frames.trailer_bytes(4)
    assert frames.wrong_blocks(sent, sent) == []
    came = [BLOCKS[0], memoryview(b"\x55" * 600), *BLOCKS[2:]]
    assert frames.wrong_blocks(trailer(came, [7, 8, 9, 10]), sent) == [1]


def test_right_blocks_in_the_wrong_place_are_all_wrong() -> None:
    """Another batch in this one's place, whole and with a trailer of its own."""
    other = trailer(BLOCKS, [11, 12, 13, 14])
    assert frames.wrong_blocks(trailer(BLOCKS, [7, 8, 9, 10]), other) == [0, 1, 2, 3]
    swapped = trailer([BLOCKS[1], BLOCKS[0]], [7, 8])
    assert frames.wrong_blocks(swapped, trailer(BLOCKS[:2], [7, 8])) == [0, 1]
