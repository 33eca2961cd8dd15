"""One namespace's blocks: memory, disk, who may read them, and what the index hears of them.

Owns the way of a block through the store: offered, read from the worker, held, leased, evicted, fetched back from disk.
Every step holds a pool reference on the block it touches. Owns no RPC (servicer.py) and no choice among namespaces
(store.py).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.cache.block_pool import BlockPool
from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.index.events import HASH_BYTES
from biphase.index.publisher import IndexPublisher
from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import Handle, ReadRequest
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import Lease, LeaseTable
from biphase.transfer.reader import BlockReader
from biphase.transfer.server import BlockServer
from services.kvstore.disk import DiskTier
from services.kvstore.residency import COMMON_TENANT, Refusal, Residency
from services.kvstore.settings import KvstoreSettings

log = event_logger(__name__)

_PROMOTED_BYTES = 64 * 2**20
# Of a chain, so many hashes count as asked for: enough to know the prefix by.
_NOTED_HASHES = 512
# A lease waits so long for blocks that are on their way in already.
_ARRIVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an offer, in blocks."""

    num_stored: int = 0
    num_known: int = 0
    num_refused: int = 0


@dataclass(slots=True)
class RegionCounts:
    num_lease_hashes: int = 0
    num_lease_hits: int = 0
    num_stored: int = 0
    num_known: int = 0
    num_unverified: int = 0
    num_promoted: int = 0
    num_bytes_taken: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the store is; the same for all regions."""

    node_id: str
    incarnation: str


class Region:
    """Everything of one namespace. For one event loop; `start`, then `close`.

    Args:
        capacity_bytes: of memory.
        disk_folder: None: no disk tier.
        disk_capacity_bytes: of the disk tier.
        publisher: given what is held here; None: without an index.
        executor: for reads from disk.

    Raises:
        MemoryError: the system would not give that much.
        ConfigError: the data plane cannot listen.
    """

    def __init__(
        self,
        layout: KVLayout,
        identity: Identity,
        settings: KvstoreSettings,
        *,
        capacity_bytes: int,
        disk_folder: Path | None,
        disk_capacity_bytes: int,
        publisher: Callable[[Callable[[], Sequence[BlockHash]]], IndexPublisher | None],
        executor: Executor,
    ) -> None:
        self.layout = layout
        # Whether this life of the store has used it, or it only came from disk.
        self.used = False
        self.last_used = time.monotonic()
        self.counts = RegionCounts()
        self._settings = settings
        self._executor = executor
        num_blocks = max(1, capacity_bytes // layout.block_bytes)
        self.memory = BlockMemory(num_blocks, layout.block_bytes)
        self._generations = SharedGenerations(num_blocks)
        self.pool = BlockPool(num_blocks, generations=self._generations.table)
        self.residency = Residency(self.pool, settings.tenant_quota)
        self.leases = LeaseTable(self.pool, settings.lease_seconds)
        self.server = BlockServer(
            self.memory, self.pool, layout, identity.node_id, identity.incarnation, self.leases, settings.host,
            generations=self._generations, transports=settings.transports,
        )  # fmt: skip
        self.endpoint = self.server.endpoint.to_proto()
        self.reader = BlockReader(
            self.memory, layout, identity.node_id, identity.incarnation, transports=settings.transports
        )
        # Blocks on their way in, from a worker or from disk. Resolved when they are held, or are not to come.
        self._arriving: dict[BlockHash, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.publisher = publisher(self.held)
        self.pool.add_listener(stored=self._on_stored, removed=self._on_removed)
        self.disk: DiskTier | None = None
        if disk_folder is not None:
            self.disk = DiskTier(disk_folder, layout, disk_capacity_bytes, self, self.pool.lock)
        self._max_promoted = settings.max_promoted_blocks or max(1, _PROMOTED_BYTES // layout.block_bytes)
        self._max_promoted = min(self._max_promoted, max(1, num_blocks // 2))

    def start(self) -> None:
        """Begins to publish."""
        if self.publisher is not None:
            self._spawn(self.publisher.run())

    # ---- what the index hears: a block is held while it is in memory or on disk

    def held(self) -> list[BlockHash]:
        with self.pool.lock:
            in_memory = self.pool.committed_hashes()
            if self.disk is None:
                return in_memory
            return list({*in_memory, *self.disk.hashes()})

    def _on_stored(self, blocks: list[tuple[BlockHash, int]]) -> None:
        if self.publisher is not None:
            self.publisher.on_stored([block for block in blocks if self.disk is None or block[0] not in self.disk])

    def _on_removed(self, hashes: list[BlockHash]) -> None:
        if self.publisher is not None:
            self.publisher.on_removed([h for h in hashes if self.disk is None or h not in self.disk])

    def on_disk(self, block_hash: BlockHash) -> None:
        if self.publisher is not None and self.pool.lookup(block_hash) is None:
            self.publisher.on_stored([(block_hash, -1)])

    def off_disk(self, block_hash: BlockHash) -> None:
        if self.publisher is not None and self.pool.lookup(block_hash) is None:
            self.publisher.on_removed([block_hash])

    # ---- leases

    async def lease(
        self, hashes: Sequence[BlockHash], reader_node_id: str, reader_incarnation: str
    ) -> tuple[Lease | None, list[tuple[int, int]]]:
        """Pins the longest prefix of `hashes` that is held, fetched from disk where need be.

        Returns:
            The lease (None when nothing is held), and (block id, generation) of each block.
        """
        self._use()
        self.residency.note(hashes[:_NOTED_HASHES])
        self.counts.num_lease_hashes += len(hashes)
        fetched = await self._bring_in(hashes)
        try:
            with self.pool.lock:
                found = self.pool.lease_chain(hashes)
                if found:
                    self.residency.touch([block_id for block_id, _ in found])
        finally:
            self.pool.release(fetched)
        self.counts.num_lease_hits += len(found)
        if not found:
            return None, []
        blocks = [block_id for block_id, _ in found]
        return self.leases.open(reader_node_id, reader_incarnation, blocks, adopt=True), found

    async def _bring_in(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Fetches what the leading part of a chain lacks in memory, a bounded number of blocks.

        Returns:
            Blocks brought in, each with a reference that the caller gives back.
        """
        missing: list[BlockHash] = []
        arriving: list[asyncio.Future[None]] = []
        with self.pool.lock:
            for block_hash in hashes:
                if self.pool.lookup(block_hash) is not None:
                    continue
                if (on_its_way := self._arriving.get(block_hash)) is not None:
                    arriving.append(on_its_way)
                elif self.disk is not None and block_hash in self.disk and len(missing) < self._max_promoted:
                    missing.append(block_hash)
                else:
                    break
        fetched = await self._promote(missing) if missing else []
        if arriving:
            await asyncio.wait(arriving, timeout=_ARRIVAL_SECONDS)
        return fetched

    async def _promote(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Disk to memory. Returns the blocks that arrived, with a reference each."""
        disk = self.disk
        assert disk is not None
        places: list[tuple[int, BlockHash]] = []
        with self.pool.lock:
            for block_hash in hashes:
                place = self.residency.place(block_hash, disk.tenant_of(block_hash) or COMMON_TENANT, wanted=True)
                if isinstance(place, Refusal):
                    break
                places.append((place, block_hash))
                self._arriving[block_hash] = asyncio.get_running_loop().create_future()
        # Shielded: the blocks must be settled whatever becomes of the call that wanted them.
        return await asyncio.shield(asyncio.ensure_future(self._fill(disk, places)))

    async def _fill(self, disk: DiskTier, places: Sequence[tuple[int, BlockHash]]) -> list[int]:
        loop = asyncio.get_running_loop()
        reads = [
            loop.run_in_executor(self._executor, disk.read, block_hash, self.memory.block(place))
            for place, block_hash in places
        ]
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        arrived = [place for (place, _), good in zip(places, outcomes, strict=True) if good is True]
        with self.pool.lock:
            self.pool.acquire(arrived)
            self.residency.settle(
                [(place, h if good is True else None) for (place, h), good in zip(places, outcomes, strict=True)]
            )
        self._arrived(block_hash for _, block_hash in places)
        self.counts.num_promoted += len(arrived)
        return arrived

    # ---- offers

    async def take(self, endpoint: Endpoint, lease_id: str, handles: Sequence[Handle], tenant: str) -> Taken:
        """Reads from a worker what is worth having of what it offers. Ends even when the offering call does not."""
        self._use()
        requests: list[ReadRequest] = []
        places: list[tuple[int, BlockHash]] = []
        num_known = 0
        with self.pool.lock:
            for handle in handles:
                block_hash = BlockHash(handle.block_hash)
                if len(block_hash) != HASH_BYTES:
                    continue
                self.residency.note([block_hash])
                block_id = self.pool.lookup(block_hash)
                if block_id is not None or block_hash in self._arriving:
                    num_known += 1
                    if block_id is not None:
                        self.residency.touch([block_id])
                    continue
                place = self.residency.place(block_hash, tenant)
                if isinstance(place, Refusal):
                    continue
                requests.append(ReadRequest(len(places), handle.block_id, handle.generation, place))
                places.append((place, block_hash))
                self._arriving[block_hash] = asyncio.get_running_loop().create_future()
        num_stored = 0
        if places:
            # Shielded: the blocks stay reserved until no byte can land in them any more.
            read = self._read(endpoint, lease_id, requests, places, tenant)
            num_stored = await asyncio.shield(asyncio.ensure_future(read))
        self.counts.num_known += num_known
        return Taken(num_stored, num_known, len(handles) - num_known - num_stored)

    async def _read(
        self,
        endpoint: Endpoint,
        lease_id: str,
        requests: Sequence[ReadRequest],
        places: Sequence[tuple[int, BlockHash]],
        tenant: str,
    ) -> int:
        result = await asyncio.wrap_future(
            self.reader.read(endpoint, lease_id, requests, self._settings.transfer_timeout_seconds)
        )
        verified = set(result.verified)
        with self.pool.lock:
            self._write_to_disk([places[index] for index in sorted(verified)], tenant)
            self.residency.settle(
                [(place, h if index in verified else None) for index, (place, h) in enumerate(places)]
            )
        self._arrived(block_hash for _, block_hash in places)
        self.counts.num_stored += len(verified)
        self.counts.num_unverified += len(places) - len(verified)
        self.counts.num_bytes_taken += result.num_bytes
        log.debug(
            "offer_read",
            worker=endpoint.node_id,
            num_blocks=len(verified),
            seconds=result.seconds,
            transport=result.transport,
            error="" if result.error is None else result.error.message,
        )
        return len(verified)

    def _write_to_disk(self, blocks: Sequence[tuple[int, BlockHash]], tenant: str) -> None:
        """Has the blocks of one chain written, as many from its start on as there is room for in the queue.

        The last one first: each counts as used when it is written, and a prefix shall outlive what follows it.
        """
        if self.disk is None:
            return
        for block_id, block_hash in reversed(blocks[: self.disk.reserve(len(blocks))]):
            self.pool.acquire([block_id])
            done = functools.partial(self.pool.release, [block_id])
            self.disk.put(block_hash, tenant, self.memory.block(block_id), done)

    # ---- odds and ends

    def sweep(self) -> None:
        """Ends expired leases; about once a second."""
        self.leases.sweep()

    async def close(self, disk_timeout_seconds: float) -> None:
        """Takes the region out of the index, ends reads and threads, gives the memory back."""
        if self.publisher is not None:
            await self.publisher.close()
        await cancel(self._tasks)
        await asyncio.to_thread(self._close_threads, disk_timeout_seconds)
        while self._arriving:
            await asyncio.wait(list(self._arriving.values()))
        self.memory.close()
        self._generations.close()

    def _close_threads(self, disk_timeout_seconds: float) -> None:
        self.reader.close()
        self.server.close()
        if self.disk is not None:
            self.disk.close(disk_timeout_seconds)

    def _arrived(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            future = self._arriving.pop(block_hash)
            if not future.done():
                future.set_result(None)

    def _use(self) -> None:
        self.used = True
        self.last_used = time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels and waits. Once more where it has no effect within the longest wait for Redis."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=3.0)
