"""Runs of memory by address: their sums are XXH3-64 on every instruction set, and none reaches outside its memory."""

from __future__ import annotations

import os
import random
import socket

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from biphase.cache.memory import BlockMemory
from biphase.transfer import spans
from biphase.transfer.frames import pack_words, unpack_words
from biphase.transfer.spans import SUM_BYTES, BlockSpans, Scratch, Spans, SpanSocket
from kernels.cpu.checksum import MIN_BYTES, checksums
from kernels.cpu.library import Isa, LibraryUnavailableError, available_isas


def compiled() -> list[Isa]:
    try:
        checksums()
    except LibraryUnavailableError:
        return []
    return available_isas()


SUMMINGS = [spans._sum_each, *(checksums(isa) for isa in compiled())]


def filled(num_blocks: int, block_bytes: int) -> BlockMemory:
    memory = BlockMemory(num_blocks, block_bytes)
    memory.view[:] = os.urandom(memory.num_bytes)
    return memory


def sums_of(sum_all: spans.Summing, memory: BlockMemory, block_ids: list[int]) -> list[int]:
    """And the seal."""
    num_words = len(block_ids) + 1
    scratch = Scratch(SUM_BYTES * (num_words + 2))
    scratch.view[:] = b"\xaa" * len(scratch.view)
    runs, ids = Spans.all_of(BlockSpans(memory).of(block_ids)), np.array(block_ids, np.uint64)
    sum_all(runs.address, runs.count, ids.ctypes.data, scratch.address + SUM_BYTES)
    # Nothing beside them was written.
    assert bytes(scratch.view[:SUM_BYTES]) == bytes(scratch.view[-SUM_BYTES:]) == b"\xaa" * SUM_BYTES
    return unpack_words(bytes(scratch.view[SUM_BYTES:-SUM_BYTES]))


@pytest.mark.parametrize("sum_all", SUMMINGS)
@pytest.mark.parametrize("block_bytes", [MIN_BYTES, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2049, 6144, 65536])
def test_sums_are_xxh3(sum_all: spans.Summing, block_bytes: int) -> None:
    memory = filled(5, block_bytes)
    for block_ids in ([3], [3, 0, 4, 4], [0, 1, 2, 3, 4] * 51):
        found = sums_of(sum_all, memory, block_ids)
        assert found[:-1] == [xxhash.xxh3_64_intdigest(memory.block(block_id)) for block_id in block_ids]
        assert pack_words(found[-1:]) == spans.seal(pack_words(found[:-1]), pack_words(block_ids))


def test_short_blocks_are_summed_too() -> None:
    memory = filled(2, 64)
    found = sums_of(spans.summing(64), memory, [1, 0])
    assert found[:-1] == [xxhash.xxh3_64_intdigest(memory.block(block)) for block in (1, 0)]


@pytest.mark.parametrize("block_ids", [[-1], [0, -1], [4], [1, 4], np.array([2**64 - 1], np.uint64)])
def test_no_block_outside_the_memory(block_ids: npt.ArrayLike) -> None:
    with pytest.raises(IndexError):
        BlockSpans(BlockMemory(4, 256)).of(block_ids)


@pytest.mark.parametrize("piece", [0, 1, 100, 255, 256, 257, 1000, 1024])
def test_what_is_left_after_a_part(piece: int) -> None:
    memory = filled(6, 256)
    runs = Spans.all_of(BlockSpans(memory).of([5, 1, 3, 2]))
    whole = b"".join(memory.block(block) for block in (5, 1, 3, 2))
    assert b"".join(runs.rest(piece).views()) == whole[piece:]
    assert b"".join(runs.part(1, 3).views()) == whole[256:768]


def test_through_a_socket_into_other_places() -> None:
    here, there = socket.socketpair()
    memory, dest = filled(64, 4096), BlockMemory(64, 4096)
    order = list(range(64))
    random.Random(1).shuffle(order)
    source, target = Spans.all_of(BlockSpans(memory).of(order[:16])), Spans.all_of(BlockSpans(dest).of(range(16)))
    with here, there:
        for sock in (here, there):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        near, far = SpanSocket(here), SpanSocket(there)
        assert near.send(source) == 16 * 4096
        assert far.receive(target) == 16 * 4096
        assert [bytes(dest.block(place)) for place in range(16)] == [bytes(memory.block(block)) for block in order[:16]]
        here.setblocking(False)
        with pytest.raises(BlockingIOError):
            near.receive(target)
        there.close()
        assert near.receive(target) == 0
        with pytest.raises(BrokenPipeError):
            near.send(source)
        with pytest.raises(OSError, match="Bad file descriptor"):
            far.receive(target)
