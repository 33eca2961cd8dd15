"""Blocks cut another way: of another size, or another part of the heads, over every transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.errors import LayoutMismatchError, StaleHandleError
from biphase.transfer.channels import ReadRequest
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import LeaseTable
from biphase.transfer.reader import BlockReader
from biphase.transfer.reslice import Reslice, Segment, holders_for
from biphase.transfer.server import BlockServer
from tests.transfer.fakes import FakePool
from tests.transfer.test_nixl import needs_nixl

LAYERS, HEADS, DIM = 3, 4, 8
NUM_TOKENS = 90
TRANSPORTS = ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)]


def layout(block_size: int, first_head: int = 0, num_heads: int = HEADS, dtype: str = "bfloat16") -> KVLayout:
    token_bytes = DIM + 1 if dtype.startswith("fp8") else DIM * 2
    return KVLayout(
        namespace=b"%d/%d/%d" % (block_size, first_head, num_heads),
        kv_dtype=dtype,
        block_size_tokens=block_size,
        num_layers=LAYERS,
        num_kv_heads=num_heads,
        head_dim=DIM,
        block_bytes=LAYERS * 2 * num_heads * block_size * token_bytes,
        first_kv_head=first_head,
        family=b"f" * 32,
    )


def truth(token_bytes: int) -> npt.NDArray[np.uint8]:
    """The KV of NUM_TOKENS tokens: uint8 [LAYERS, 2, HEADS, NUM_TOKENS, token_bytes]."""
    shape = (LAYERS, 2, HEADS, NUM_TOKENS, token_bytes)
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def cut(kv: npt.NDArray[np.uint8], of: KVLayout, index: int) -> bytes:
    """Block number `index` of the tokens in that layout; what is past their end is 0xEE."""
    size = of.block_size_tokens
    block = np.full((LAYERS, 2, of.num_kv_heads, size, kv.shape[-1]), 0xEE, np.uint8)
    tokens = kv[:, :, of.first_kv_head : of.first_kv_head + of.num_kv_heads, index * size : (index + 1) * size]
    block[:, :, :, : tokens.shape[3]] = tokens
    if not of.kv_dtype.startswith("fp8"):
        return block.tobytes()
    # All codes of a run, then all its exponents.
    runs = [*block.reshape(-1, size, kv.shape[-1])]
    return b"".join(run[:, :DIM].tobytes() + run[:, DIM:].tobytes() for run in runs)


@dataclass
class Shard:
    """A holder of all the tokens' blocks, in a shuffled order."""

    layout: KVLayout
    pool: FakePool
    server: BlockServer
    lease_id: str
    block_ids: list[int]


class Bench:
    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.stack = ExitStack()

    def holder(self, of: KVLayout, name: str = "prefill-0") -> Shard:
        num_blocks = -(-NUM_TOKENS // of.block_size_tokens)
        memory = BlockMemory(num_blocks + 2, of.block_bytes)
        self.stack.callback(memory.close)
        generations = SharedGenerations(num_blocks + 2)
        self.stack.callback(generations.close)
        pool = FakePool(num_blocks + 2, generations.table)
        block_ids = [int(n) for n in np.random.default_rng(1).permutation(num_blocks + 2)[:num_blocks]]
        kv = truth(DIM + 1 if of.kv_dtype.startswith("fp8") else DIM * 2)
        for index, block_id in enumerate(block_ids):
            memory.block(block_id)[:] = cut(kv, of, index)
        leases = LeaseTable(pool)
        server = BlockServer(
            memory, pool, of, name, "life", leases, generations=generations, transports=(self.transport,)
        )
        self.stack.callback(server.close)
        return Shard(of, pool, server, leases.open("decode-0", "life", block_ids).lease_id, block_ids)

    def reader(self, of: KVLayout) -> tuple[BlockMemory, BlockReader, list[int]]:
        num_blocks = -(-NUM_TOKENS // of.block_size_tokens)
        memory = BlockMemory(num_blocks + 1, of.block_bytes)
        self.stack.callback(memory.close)
        memory.view[:] = b"\xee" * memory.num_bytes
        reader = BlockReader(memory, of, "decode-0", "life", transports=(self.transport,), allow_fallback=False)
        self.stack.callback(reader.close)
        return memory, reader, list(range(num_blocks, 0, -1))


@pytest.fixture(params=TRANSPORTS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    with bench.stack:
        yield bench


def requests(shard: Shard, reader: KVLayout, dest: Sequence[int], first_token: int = 0) -> list[ReadRequest]:
    plan = Reslice(reader, shard.layout)
    first = first_token // shard.layout.block_size_tokens
    return [
        ReadRequest(index, block_id, 0, -1, segments=plan.segments(index, dest, first_token, NUM_TOKENS))
        for index, block_id in enumerate(shard.block_ids)
        if index >= first
    ]


def read(reader: BlockReader, shard: Shard, blocks: list[ReadRequest]) -> None:
    result = reader.read(shard.server.endpoint, shard.lease_id, blocks, 10.0).result()
    assert result.error is None, result.error
    assert sorted(result.verified) == sorted(block.index for block in blocks)
    assert result.num_bytes == len(blocks) * shard.layout.block_bytes


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (layout(16), layout(32)),
        (layout(32), layout(16)),
        (layout(8), layout(64)),
        (layout(48), layout(16)),
        (layout(16, 2, 2), layout(16)),
        (layout(16, 1, 2), layout(32)),
        (layout(16, dtype="fp8_e4m3"), layout(32, dtype="fp8_e4m3")),
        (layout(32, 2, 1, dtype="fp8_e4m3"), layout(16, dtype="fp8_e4m3")),
    ],
    ids=lambda of: f"{of.block_size_tokens}-{of.first_kv_head}+{of.num_kv_heads}-{of.kv_dtype[:4]}",
)
def test_every_token_and_head_lands_where_it_belongs(bench: Bench, ours: KVLayout, theirs: KVLayout) -> None:
    shard = bench.holder(theirs)
    memory, reader, dest = bench.reader(ours)
    read(reader, shard, requests(shard, ours, dest))
    kv = truth(DIM + 1 if ours.kv_dtype.startswith("fp8") else DIM * 2)
    for index, block_id in enumerate(dest):
        assert bytes(memory.block(block_id)) == cut(kv, ours, index), f"block {index}"
    assert bytes(memory.block(0)) == b"\xee" * ours.block_bytes


def test_two_halves_of_the_heads_make_a_whole(bench: Bench) -> None:
    ours = layout(16)
    halves = [bench.holder(layout(32, 2, 2), "high"), bench.holder(layout(16, 0, 2), "low")]
    memory, reader, dest = bench.reader(ours)
    order = holders_for(ours, [half.layout for half in halves])
    assert order == [1, 0]
    for place in order:
        read(reader, halves[place], requests(halves[place], ours, dest))
    for index, block_id in enumerate(dest):
        assert bytes(memory.block(block_id)) == cut(truth(DIM * 2), ours, index)


def test_tokens_that_are_here_already_are_not_written(bench: Bench) -> None:
    ours = layout(16)
    shard = bench.holder(layout(64))
    memory, reader, dest = bench.reader(ours)
    read(reader, shard, requests(shard, ours, dest, first_token=48))
    for index, block_id in enumerate(dest):
        expected = b"\xee" * ours.block_bytes if index < 3 else cut(truth(DIM * 2), ours, index)
        assert bytes(memory.block(block_id)) == expected


def test_a_stale_block_is_not_copied_on(bench: Bench) -> None:
    ours = layout(16)
    shard = bench.holder(layout(32))
    memory, reader, dest = bench.reader(ours)
    shard.pool.reuse(shard.block_ids[1])
    blocks = requests(shard, ours, dest)
    result = reader.read(shard.server.endpoint, shard.lease_id, blocks, 10.0).result()
    assert isinstance(result.error, StaleHandleError)
    assert (sorted(result.verified), result.stale) == ([0, 2], (1,))
    for index in (2, 3):
        assert bytes(memory.block(dest[index])) == b"\xee" * ours.block_bytes


def test_a_holder_refuses_what_does_not_fit_by_name(bench: Bench) -> None:
    shard = bench.holder(layout(32))
    for ours, field in (
        (layout(24), "block_size_tokens"),
        (replace(layout(16), family=b"g" * 32), "family"),
        (replace(layout(16), family=b""), "block_size_tokens"),
        (layout(16, HEADS, 1), "num_kv_heads"),
        (replace(layout(16), kv_dtype="float16"), "kv_dtype"),
    ):
        memory = BlockMemory(1, ours.block_bytes)
        reader = BlockReader(memory, ours, "decode-0", "life", transports=(bench.transport,), allow_fallback=False)
        # The reader sees it by itself, and so does the holder when the reader takes it for something else.
        for believed in (shard.layout, ours):
            endpoint = replace(shard.server.endpoint, layout=believed)
            result = reader.read(endpoint, shard.lease_id, [ReadRequest(0, 0, 0, 0)], 5.0).result()
            assert isinstance(result.error, LayoutMismatchError), result.error
            assert believed is ours or field in result.error.message
        reader.close()
        memory.close()


def test_segments() -> None:
    plan = Reslice(layout(16), layout(32))
    assert plan.segments(1, [5, 6, 7, 8], 0, 60) == [Segment(0, 7, 0, 16), Segment(16, 8, 0, 12)]
    assert plan.segments(1, [5, 6, 7, 8], 48, 60) == [Segment(16, 8, 0, 12)]
    assert plan.segments(1, [5, 6, 7, 8], 0, 32) == []
    plan = Reslice(layout(32), layout(16))
    assert plan.segments(1, [5, 6], 0, 60) == [Segment(0, 5, 16, 16)]
    assert plan.segments(3, [5, 6], 0, 60) == [Segment(0, 6, 16, 12)]


def test_heads() -> None:
    assert Reslice(layout(16, 1, 2), layout(16)).covers_all_heads
    part = Reslice(layout(16), layout(16, 1, 2))
    assert not part.covers_all_heads
    with pytest.raises(LayoutMismatchError, match="num_kv_heads are 4 from 0 on here and 2 from 1 on there"):
        part.require_all_heads()
    assert holders_for(layout(16, 1, 3), [layout(16, 0, 2), layout(16, 2, 2), layout(16, 1, 2)]) == [2, 1]
    with pytest.raises(LayoutMismatchError, match="nobody has kv head 2"):
        holders_for(layout(16), [layout(16, 0, 2), layout(16, 3, 1)])
