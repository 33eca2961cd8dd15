"""Block memory: shared, sealed, gone with its last user."""

import mmap
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest
import torch

from biphase.cache.memory import BlockMemory, SharedGenerations, SharedRegion
from biphase.cache.tensors import kv_block_bytes, kv_tensor


@pytest.fixture
def memory() -> Iterator[BlockMemory]:
    memory = BlockMemory(4, 4096)
    yield memory
    memory.close()


def test_blocks_are_adjacent_writable_runs(memory: BlockMemory) -> None:
    for block_id in range(4):
        memory.block(block_id)[:] = bytes([block_id + 1]) * 4096
    assert bytes(memory.view) == b"".join(bytes([n]) * 4096 for n in (1, 2, 3, 4))
    assert memory.num_bytes == 4 * 4096


@pytest.mark.parametrize("block_id", [-1, 4])
def test_a_block_outside_the_pool_is_an_error(memory: BlockMemory, block_id: int) -> None:
    with pytest.raises(IndexError, match="not one of 4"):
        memory.block(block_id)


@pytest.mark.parametrize("block_ids", [[], [3], [1, 0], [3, 3, 2]])
def test_several_blocks_at_once_are_the_same_blocks(memory: BlockMemory, block_ids: list[int]) -> None:
    memory.view[:] = bytes(range(256)) * 64
    memory.block(3)[0] = 99
    assert memory.blocks(block_ids) == [memory.block(block_id) for block_id in block_ids]


@pytest.mark.parametrize("block_ids", [[-1], [4], [0, -1], [0, 4]])
def test_several_blocks_of_which_one_does_not_exist_are_an_error(memory: BlockMemory, block_ids: list[int]) -> None:
    with pytest.raises(IndexError):
        memory.blocks(block_ids)


def test_an_empty_pool_is_an_error() -> None:
    with pytest.raises(ValueError):
        BlockMemory(0, 4096)


def test_more_memory_than_there_is_says_so() -> None:
    with pytest.raises(MemoryError):
        SharedRegion("test", 1 << 62)


def test_a_peer_sees_writes_through_the_descriptor_and_cannot_write_itself(memory: BlockMemory) -> None:
    fd = memory.open_read_only()
    try:
        peer = mmap.mmap(fd, memory.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        memory.block(2)[:5] = b"hello"
        assert peer[2 * 4096 : 2 * 4096 + 5] == b"hello"
        peer.close()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, memory.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def test_nobody_can_shrink_it_or_map_it_for_writing_again(memory: BlockMemory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, memory.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_populated_memory_is_resident() -> None:
    memory = BlockMemory(64, 65536, populate=True)
    assert os.fstat(memory.fd).st_blocks * 512 >= memory.num_bytes
    memory.close()


def test_touching_makes_it_resident_and_changes_nothing() -> None:
    memory = BlockMemory(5, 8 * 2**20)
    memory.block(4)[-3:] = b"end"
    assert memory.touch_all(lambda: True)
    assert os.fstat(memory.fd).st_blocks * 512 < memory.num_bytes
    assert memory.touch_all(lambda: False)
    assert os.fstat(memory.fd).st_blocks * 512 == memory.num_bytes
    assert bytes(memory.block(4)[-3:]) == b"end" and not any(memory.block(0)[:4096])
    memory.close()


def test_generations_behave_like_an_array() -> None:
    generations = SharedGenerations(3)
    plain = array("Q", [0, 0, 0])
    for table in (generations.table, plain):
        table[1] += 1
        table[2] = 2**64 - 1
        assert list(table) == [0, 1, 2**64 - 1] and len(table) == 3
    peer = mmap.mmap(generations.fd, 24, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    assert int.from_bytes(peer[8:16], "little") == 1
    peer.close()
    generations.close()
    generations.close()


def test_close_is_idempotent_and_waits_for_views() -> None:
    memory = BlockMemory(1, 64)
    view = memory.block(0)
    memory.close()
    memory.close()
    view[:3] = b"abc"
    assert bytes(view[:3]) == b"abc"


def test_the_tensor_is_the_memory() -> None:
    block_bytes = kv_block_bytes(2, 3, 16, 8, torch.bfloat16)
    assert block_bytes == 2 * 2 * 3 * 16 * 8 * 2
    memory = BlockMemory(5, block_bytes)
    cache = kv_tensor(memory, 2, 3, 16, 8, torch.bfloat16)
    assert cache.shape == (5, 2, 2, 3, 16, 8) and cache.is_contiguous()
    cache[3] = 1.5
    assert (
        bytes(memory.block(3))
        == torch.full((block_bytes // 2,), 1.5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    )
    memory.close()
    assert float(cache[3].sum()) == 1.5 * block_bytes / 2


def test_a_tensor_of_another_size_is_an_error() -> None:
    memory = BlockMemory(1, 100)
    with pytest.raises(ValueError, match="a block has 100 bytes"):
        kv_tensor(memory, 1, 1, 16, 8, torch.float32)
    memory.close()


def test_memory_and_transfer_need_no_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, biphase.cache.memory, biphase.transfer as t\n"
        "[importlib.import_module('biphase.transfer.' + m.name) for m in pkgutil.iter_modules(t.__path__)]\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
