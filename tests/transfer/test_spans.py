"""Runs of memory by address: their sums are XXH3-64 on every instruction set, and none reaches outside its memory."""

from __future__ import annotations

import os
import random
import socket
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from biphase.cache.memory import BlockMemory
from biphase.transfer import spans
from biphase.transfer.frames import unpack_words
from biphase.transfer.spans import SUM_BYTES, BlockSpans, Scratch
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


@pytest.mark.parametrize("sum_all", SUMMINGS)
@pytest.mark.parametrize("block_bytes", [MIN_BYTES, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2049, 6144, 65536])
def test_sums_are_xxh3(sum_all: spans.Summing, block_bytes: int) -> None:
    memory = filled(5, block_bytes)
    block_ids = [3, 0, 4, 4]
    scratch = Scratch(SUM_BYTES * 6)
    scratch.view[:] = b"\xaa" * len(scratch.view)
    sum_all(BlockSpans(memory).of(block_ids), 4, scratch.address + SUM_BYTES)
    expected = [xxhash.xxh3_64_intdigest(memory.block(block_id)) for block_id in block_ids]
    assert unpack_words(bytes(scratch.view[SUM_BYTES : 5 * SUM_BYTES])) == expected
    # Nothing beside them was written.
    assert bytes(scratch.view[:SUM_BYTES]) == bytes(scratch.view[5 * SUM_BYTES :]) == b"\xaa" * SUM_BYTES


def test_short_blocks_are_summed_too() -> None:
    memory = filled(2, 64)
    scratch = Scratch(2 * SUM_BYTES)
    spans.summing(64)(BlockSpans(memory).of([1, 0]), 2, scratch.address)
    assert unpack_words(bytes(scratch.view)) == [xxhash.xxh3_64_intdigest(memory.block(block)) for block in (1, 0)]


@pytest.mark.parametrize("block_ids", [[-1], [0, -1], [4], [1, 4], np.array([2**64 - 1], np.uint64)])
def test_no_block_outside_the_memory(block_ids: npt.ArrayLike) -> None:
    with pytest.raises(IndexError):
        BlockSpans(BlockMemory(4, 256)).of(block_ids)


@pytest.mark.parametrize("piece", [1, 100, 255, 256, 257, 1000])
def test_what_is_left_after_a_part(piece: int) -> None:
    memory = filled(6, 256)
    packed = BlockSpans(memory).of([5, 1, 3, 2])
    whole = b"".join(memory.block(block) for block in (5, 1, 3, 2))
    rest = spans.rest_of(packed, piece)
    assert b"".join(spans.views_of(rest)) == whole[piece:]
    assert spans.rest_of(packed, len(whole)) == b""


def test_through_a_socket_into_other_places() -> None:
    here, there = socket.socketpair()
    memory, dest = filled(64, 4096), BlockMemory(64, 4096)
    order = list(range(64))
    random.Random(1).shuffle(order)
    with here, there:
        for sock in (here, there):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sent = spans.SpanSocket(here).send(BlockSpans(memory).of(order[:16]))
        assert sent == 16 * 4096
        assert spans.SpanSocket(there).receive(BlockSpans(dest).of(list(range(16)))) == sent
        assert [bytes(dest.block(place)) for place in range(16)] == [bytes(memory.block(block)) for block in order[:16]]
        here.setblocking(False)
        receive = partial(spans.SpanSocket(here).receive, BlockSpans(dest).of([0]))
        with pytest.raises(BlockingIOError):
            receive()
        there.close()
        assert receive() == 0
        with pytest.raises(BrokenPipeError):
            spans.SpanSocket(here).send(BlockSpans(memory).of([0]))
