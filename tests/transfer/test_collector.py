"""The bookkeeping of a hand-off: nothing counts that was not expected, verified and committed."""

import random
from dataclasses import dataclass

import pytest

from biphase.cache.hashing import commit_hash, extend_block_hashes, root_hash
from biphase.errors import CorruptBlockError
from biphase.request import BlockHash
from biphase.transfer.channels import ReadRequest
from biphase.transfer.collector import BlockCollector

BLOCK_SIZE = 4


@dataclass(frozen=True)
class FakeHandle:
    index: int
    block_id: int
    generation: int
    block_hash: bytes


class Prompt:
    """A prompt of `num_tokens` with its hashes, as holder and reader both compute them."""

    def __init__(self, num_tokens: int, first_token: int = 0) -> None:
        self.num_tokens = num_tokens
        tokens = list(range(first_token, first_token + num_tokens))
        root = root_hash(b"namespace", "")
        self.hashes: list[BlockHash] = []
        extend_block_hashes(self.hashes, root, tokens, BLOCK_SIZE)
        self.commit = commit_hash(self.hashes, root, tokens, BLOCK_SIZE)

    def handles(self, *indexes: int, generation: int = 7) -> list[FakeHandle]:
        return [
            FakeHandle(index, 100 + index, generation, self.hashes[index] if index < len(self.hashes) else b"")
            for index in indexes
        ]

    def collector(self, first_index: int = 0) -> BlockCollector:
        dest = list(range(50, 50 + -(-self.num_tokens // BLOCK_SIZE)))
        return BlockCollector(self.hashes, self.commit, self.num_tokens, BLOCK_SIZE, dest, first_index)


def test_a_whole_hand_off() -> None:
    prompt = Prompt(10)
    collector = prompt.collector()
    assert collector.announce(prompt.handles(0, 1)) == [ReadRequest(0, 100, 7, 50), ReadRequest(1, 101, 7, 51)]
    collector.verified([1])
    assert collector.num_contiguous_tokens == 0
    collector.verified([0])
    assert collector.num_contiguous_tokens == 8
    assert [request.index for request in collector.announce(prompt.handles(1, 2))] == [2]
    collector.commit(10, prompt.commit)
    assert not collector.is_complete and collector.num_reading == 1
    collector.verified([2])
    assert collector.is_complete and collector.num_contiguous_tokens == 10 and collector.num_full_tokens == 8


def test_blocks_held_already_are_not_read_and_count() -> None:
    prompt = Prompt(12)
    collector = prompt.collector(first_index=2)
    assert collector.num_contiguous_tokens == 8
    assert [request.index for request in collector.announce(prompt.handles(0, 1, 2))] == [2]
    collector.verified([2])
    collector.commit(12, prompt.commit)
    assert collector.is_complete


def test_the_same_announcement_again_is_read_once() -> None:
    prompt = Prompt(8)
    collector = prompt.collector()
    assert len(collector.announce([*prompt.handles(0), *prompt.handles(0)])) == 1
    assert collector.announce(prompt.handles(0)) == []


@pytest.mark.parametrize(
    "handle",
    [
        FakeHandle(0, 1, 1, b"x" * 32),
        FakeHandle(0, 1, 1, b""),
        FakeHandle(2, 1, 1, b"x" * 32),
        FakeHandle(3, 1, 1, b""),
    ],
    ids=["another hash", "no hash", "hash on the partial block", "beyond the end"],
)
def test_a_block_that_is_not_the_expected_one_is_corrupt(handle: FakeHandle) -> None:
    prompt = Prompt(10)
    collector = prompt.collector()
    with pytest.raises(CorruptBlockError):
        collector.announce([*prompt.handles(1), handle])
    assert collector.num_reading == 0, "no part of a bad announcement counts"


def test_a_block_of_another_index_is_corrupt() -> None:
    prompt = Prompt(8)
    (one,) = prompt.handles(1)
    with pytest.raises(CorruptBlockError, match="block 0"):
        prompt.collector().announce([FakeHandle(0, one.block_id, one.generation, one.block_hash)])


def test_two_places_for_one_block_are_corrupt() -> None:
    prompt = Prompt(8)
    collector = prompt.collector()
    collector.announce(prompt.handles(0))
    with pytest.raises(CorruptBlockError, match="twice"):
        collector.announce(prompt.handles(0, generation=8))


def test_a_commit_of_other_tokens_is_corrupt() -> None:
    prompt, other = Prompt(10), Prompt(10, first_token=1)
    collector = prompt.collector()
    collector.announce(prompt.handles(0, 1, 2))
    collector.verified([0, 1, 2])
    for num_tokens, chain_hash in ((9, prompt.commit), (10, other.commit), (10, b"")):
        with pytest.raises(CorruptBlockError):
            collector.commit(num_tokens, chain_hash)
        assert not collector.is_complete


def test_a_commit_with_blocks_never_announced_fails_at_once() -> None:
    prompt = Prompt(12)
    collector = prompt.collector()
    collector.announce(prompt.handles(0, 2))
    with pytest.raises(CorruptBlockError, match="1 blocks, first 1"):
        collector.commit(12, prompt.commit)


def test_what_is_verified_survives_another_prefill_worker() -> None:
    prompt = Prompt(14)
    collector = prompt.collector()
    collector.announce(prompt.handles(0, 1, 2))
    collector.verified([0, 2])
    collector.restart()
    assert collector.num_full_tokens == 4
    requests = collector.announce(prompt.handles(1, 2, 3, generation=1))
    assert [(request.index, request.generation) for request in requests] == [(1, 1), (3, 1)]
    collector.verified([1, 3])
    collector.commit(14, prompt.commit)
    assert collector.is_complete


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_announcements_and_arrivals_completes(seed: int) -> None:
    rng = random.Random(seed)
    prompt = Prompt(rng.randrange(1, 60))
    collector = prompt.collector(rng.randrange(prompt.num_tokens // BLOCK_SIZE + 1))
    indexes = list(range(-(-prompt.num_tokens // BLOCK_SIZE)))
    rng.shuffle(indexes)
    reading: list[int] = []
    while indexes or reading:
        if indexes and (not reading or rng.random() < 0.5):
            reading += [request.index for request in collector.announce(prompt.handles(indexes.pop()))]
        elif reading:
            collector.verified([reading.pop(rng.randrange(len(reading)))])
        assert not collector.is_complete
    collector.commit(prompt.num_tokens, prompt.commit)
    assert collector.is_complete and collector.num_contiguous_tokens == prompt.num_tokens


def test_whole_blocks_outlive_their_holder_and_the_partial_one_does_not() -> None:
    """Nobody but the COMMIT of the holder that sent it says what is in a partial block."""
    prompt = Prompt(10)
    collector = prompt.collector()
    collector.announce(prompt.handles(0, 1, 2))
    collector.verified([0, 1, 2])
    assert collector.num_contiguous_tokens == 10
    collector.restart()
    assert collector.num_contiguous_tokens == 8
    assert [request.index for request in collector.announce(prompt.handles(2, generation=9))] == [2]
    collector.commit(10, prompt.commit)
    assert not collector.is_complete
    collector.verified([2])
    assert collector.is_complete


@pytest.mark.parametrize("lie", ["count", "chain", "missing", "hash"])
def test_nothing_stays_of_a_holder_that_contradicted(lie: str) -> None:
    prompt, other = Prompt(14), Prompt(14, first_token=100)
    collector = prompt.collector()
    collector.announce(prompt.handles(0))
    collector.verified([0])
    collector.restart()
    assert collector.num_full_tokens == 4
    collector.announce(prompt.handles(1, 2))
    collector.verified([1, 2])
    with pytest.raises(CorruptBlockError):
        if lie == "count":
            collector.commit(13, prompt.commit)
        elif lie == "chain":
            collector.commit(14, other.commit)
        elif lie == "missing":
            collector.commit(14, prompt.commit)
        else:
            collector.announce(other.handles(2))
    collector.restart()
    assert collector.num_full_tokens == collector.num_contiguous_tokens == 4, "the first holder's block stays"
