"""A store in this process behind its real gRPC port, and workers with real memory and data plane to offer and read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from biphase.cache.block_pool import BlockPool
from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.index.embedded import EmbeddedValkey
from biphase.request import BlockHash
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2, node_pb2, node_pb2_grpc
from biphase.settings import parse_flags
from biphase.transfer.channels import ReadRequest
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import LeaseTable
from biphase.transfer.reader import BlockReader
from biphase.transfer.server import BlockServer
from services.kvstore.process import StoreProcess
from services.kvstore.settings import KVSTORE_FLAGS, KvstoreSettings

BLOCK_BYTES = 64 * 1024
MIB_BLOCKS = 2**20 // BLOCK_BYTES


def layout(namespace: bytes = b"\x01" * 32, **changes: Any) -> KVLayout:
    fields = {
        "namespace": namespace, "kv_dtype": "float32", "block_size_tokens": 16, "num_layers": 8, "num_kv_heads": 2,
        "head_dim": 32, "block_bytes": BLOCK_BYTES,
    }  # fmt: skip
    return KVLayout(**{**fields, **changes})


def h(number: int | str) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


def chain(name: str, length: int) -> list[BlockHash]:
    return [h(f"{name}-{index}") for index in range(length)]


def content(block_hash: bytes) -> bytes:
    """What a block of this hash holds, here: any node can tell right from wrong."""
    return random.Random(block_hash).randbytes(BLOCK_BYTES)


class StandInWorker:
    """Computes blocks by magic, offers and reads as a worker does."""

    def __init__(self, node_id: str, kind: KVLayout | None = None, num_blocks: int = 256) -> None:
        self.node_id = node_id
        self.layout = kind or layout()
        self.memory = BlockMemory(num_blocks, self.layout.block_bytes)
        self.generations = SharedGenerations(num_blocks)
        self.pool = BlockPool(num_blocks, generations=self.generations.table)
        self.leases = LeaseTable(self.pool)
        self.server = BlockServer(
            self.memory, self.pool, self.layout, node_id, "one", self.leases, generations=self.generations
        )
        self.reader = BlockReader(self.memory, self.layout, node_id, "one")

    def compute(self, hashes: Sequence[BlockHash]) -> None:
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for block_id, block_hash in zip(blocks, hashes, strict=True):
            self.memory.block(block_id)[:] = content(block_hash)[: self.layout.block_bytes]
        self.pool.commit_chain(blocks, hashes)
        self.pool.release(blocks)

    async def offer(self, store: StoreClient, hashes: Sequence[BlockHash], tenant: str = "") -> tuple[int, int, int]:
        """Computes what is not here yet, and offers it. Returns (stored, known, refused)."""
        missing = [block_hash for block_hash in hashes if self.pool.lookup(block_hash) is None]
        self.compute(missing)
        held = self.pool.lease_chain(hashes)
        lease = self.leases.open("store", "any", [block_id for block_id, _ in held], adopt=True)
        try:
            answer = await store.blocks.Offer(
                blocks_pb2.OfferRequest(
                    endpoint=self.server.endpoint.to_proto(),
                    lease_id=lease.lease_id,
                    tenant=tenant,
                    blocks=[
                        common_pb2.BlockHandle(index=i, block_id=b, generation=g, block_hash=hashes[i])
                        for i, (b, g) in enumerate(held)
                    ],
                ),
                timeout=20,
            )
        finally:
            self.leases.release([lease.lease_id])
        return answer.num_stored, answer.num_known, answer.num_refused

    async def fetch(self, store: StoreClient, hashes: Sequence[BlockHash]) -> int:
        """Leases, reads and checks a chain. Returns how many blocks came."""
        answer = await store.lease(hashes, self.layout, self.node_id)
        if not answer.blocks:
            return 0
        places = self.pool.allocate(len(answer.blocks))
        assert places is not None
        result = await asyncio.wrap_future(
            self.reader.read(
                answer.endpoint,
                answer.lease_id,
                [ReadRequest.from_handle(handle, place) for handle, place in zip(answer.blocks, places, strict=True)],
                10.0,
            )
        )
        for handle, place in zip(answer.blocks, places, strict=True):
            if handle.index in result.verified:
                expected = content(handle.block_hash)[: self.layout.block_bytes]
                assert bytes(self.memory.block(place)) == expected, "a wrong block was verified"
        self.pool.release(places)
        await store.blocks.Release(blocks_pb2.ReleaseRequest(lease_ids=[answer.lease_id]))
        return len(result.verified)

    def close(self) -> None:
        self.reader.close()
        self.server.close()


class StoreClient:
    """Stubs for one store."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.blocks = blocks_pb2_grpc.BlockHolderStub(self.channel)
        self.node = node_pb2_grpc.NodeStub(self.channel)

    async def lease(
        self, hashes: Sequence[bytes], kind: KVLayout | None = None, reader: str = "reader"
    ) -> blocks_pb2.LeaseResponse:
        return await self.blocks.Lease(
            blocks_pb2.LeaseRequest(
                block_hashes=hashes,
                layout=(kind or layout()).to_proto(),
                reader_node_id=reader,
                reader_incarnation="one",
            ),
            timeout=20,
        )

    async def held(self, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks of a chain that the store would lease."""
        answer = await self.lease(hashes)
        await self.blocks.Release(blocks_pb2.ReleaseRequest(lease_ids=[answer.lease_id]))
        return len(answer.blocks)

    async def status(self) -> node_pb2.NodeStatus:
        return await self.node.GetStatus(node_pb2.GetStatusRequest(), timeout=20)

    async def counters(self) -> dict[str, int]:
        return dict((await self.status()).counters)


class RunningStore(StoreClient):
    """A StoreProcess in this event loop."""

    def __init__(self, process: StoreProcess) -> None:
        super().__init__(process._rpc.address)
        self.process = process
        self._running = asyncio.create_task(process.run_until_stopped())

    async def stop(self, drain_seconds: float = 5.0) -> None:
        if not self._running.done():
            self.process.request_stop(drain_seconds)
        for region in self.process.store.regions:
            region.residency.check_integrity()
            region.leases.check_integrity()
        await self._running
        await self.channel.close()


StartStore = Callable[..., Any]


@pytest.fixture
async def start_store() -> AsyncIterator[StartStore]:
    """`await start_store("--capacity", "2MiB")` gives a RunningStore; stopped at the end."""
    stores: list[RunningStore] = []

    async def start(*flags: str) -> RunningStore:
        settings = parse_flags("kvstore", "", KVSTORE_FLAGS, KvstoreSettings, flags, environ={})
        settings.check()
        process = StoreProcess(settings)
        await process.start()
        stores.append(RunningStore(process))
        return stores[-1]

    yield start
    for store in stores:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await store.stop()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., StandInWorker]]:
    workers: list[StandInWorker] = []

    def make(node_id: str = "worker", *arguments: Any, **options: Any) -> StandInWorker:
        workers.append(StandInWorker(node_id, *arguments, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def store_valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


def block_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/??/*") if path.suffix == "")
