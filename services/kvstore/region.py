"""One namespace's blocks: memory, disk, and who may read them.

Owns the assembly of a region and the reader's side: leases, with what they lack in memory fetched from disk first.
How blocks come in from workers is intake.py's; which may stay is residency.py's; what the index hears is holdings.py's.
Every step holds a pool reference on the block it touches.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.cache.block_pool import BlockPool
from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.request import BlockHash
from biphase.rpc.server import reachable_host
from biphase.rpc.trust import OPEN, Trust
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import Handle
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import Lease, LeaseTable
from biphase.transfer.reader import BlockReader
from biphase.transfer.server import BlockServer
from services.kvstore.disk import DiskTier
from services.kvstore.holdings import Holdings, MakePublisher
from services.kvstore.intake import Arrivals, Intake, Taken
from services.kvstore.residency import COMMON_TENANT, Refusal, Residency
from services.kvstore.settings import KvstoreSettings

log = event_logger(__name__)

_PROMOTED_BYTES = 64 * 2**20
# Of a chain, so many hashes count as asked for: enough to know the prefix by.
_NOTED_HASHES = 512
# A lease waits so long for blocks that are on their way in already.
_ARRIVAL_SECONDS = 1.0


@dataclass(slots=True)
class LeaseCounts:
    num_lease_hashes: int = 0
    num_lease_hits: int = 0
    # Blocks brought from disk to memory, for a lease or ahead of one.
    num_promoted: int = 0
    num_read_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the store is; the same for all regions."""

    node_id: str
    incarnation: str
    # What it shows to peers, and asks of them.
    trust: Trust = OPEN


class Region:
    """Everything of one namespace. For one event loop; `start`, then `close`.

    Args:
        capacity_bytes: of memory.
        disk_folder: None: no disk tier.
        disk_capacity_bytes: of the disk tier.
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
        publisher: MakePublisher,
        executor: Executor,
    ) -> None:
        self.layout = layout
        # Whether this life of the store has used it, or it only came from disk.
        self.used = False
        self.last_used = time.monotonic()
        self.counts = LeaseCounts()
        self._executor = executor
        num_blocks = max(1, capacity_bytes // layout.block_bytes)
        self.memory = BlockMemory(num_blocks, layout.block_bytes)
        self._generations = SharedGenerations(num_blocks)
        self.pool = BlockPool(num_blocks, generations=self._generations.table)
        self.residency = Residency(self.pool, settings.tenant_quota)
        self.leases = LeaseTable(self.pool, settings.lease_seconds)
        self.server = BlockServer(
            self.memory, self.pool, layout, identity.node_id, identity.incarnation, self.leases, settings.host,
            advertise_host=reachable_host(settings.host), generations=self._generations, transports=settings.transports,
            trust=identity.trust,
        )  # fmt: skip
        self.endpoint = self.server.endpoint.to_proto()
        self.reader = BlockReader(
            self.memory, layout, identity.node_id, identity.incarnation, transports=settings.transports,
            trust=identity.trust,
        )  # fmt: skip
        self.holdings = Holdings(self.pool, publisher)
        self.disk: DiskTier | None = None
        if disk_folder is not None:
            self.disk = DiskTier(
                disk_folder, layout, disk_capacity_bytes, self.holdings, self.pool.lock, self._for_disk
            )
            self.holdings.disk = self.disk
        self.arrivals = Arrivals()
        self.intake = Intake(self.residency, self.reader, self.disk, self.arrivals, settings.transfer_timeout_seconds)
        most = settings.max_promoted_blocks or max(1, _PROMOTED_BYTES // layout.block_bytes)
        self._max_promoted = min(most, max(1, num_blocks // 2))
        self._closing = False
        self._touching = threading.Thread(target=self._touch_memory, name="touch-memory", daemon=True)
        self._publishing: set[asyncio.Task[None]] = set()
        self._reading_ahead: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to publish, and to take the memory's page faults before an offer has to."""
        self._touching.start()
        if self.holdings.publisher is not None:
            _spawn(self.holdings.publisher.run(), self._publishing)

    def reset(self) -> bool:
        """Forgets all blocks that nobody uses. Whether none are left."""
        if self.disk is not None:
            self.disk.clear()
        return self.residency.clear()

    def idle_since(self) -> float | None:
        """Monotonic time of the last use; None while somebody uses it, -inf when nobody ever did."""
        if self.leases.counts().num_leases or len(self.arrivals):
            return None
        return self.last_used if self.used else -float("inf")

    async def take(self, endpoint: Endpoint, lease_id: str, handles: Sequence[Handle], tenant: str) -> Taken:
        """Takes in what is worth having of a worker's offer."""
        self._use()
        return await self.intake.take(endpoint, lease_id, handles, tenant)

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
                self.residency.touch([block_id for block_id, _ in found])
        finally:
            self.pool.release(fetched)
        self.counts.num_lease_hits += len(found)
        if len(found) < len(hashes) and self.disk is not None and hashes[len(found)] in self.disk:
            # More than one lease may wait for; whoever comes next with this prefix finds the rest.
            _spawn(self._read_ahead(hashes[len(found) :]), self._reading_ahead)
        if not found:
            return None, []
        blocks = [block_id for block_id, _ in found]
        return self.leases.open(reader_node_id, reader_incarnation, blocks, adopt=True), found

    async def _read_ahead(self, hashes: Sequence[BlockHash]) -> None:
        fetched = await self._bring_in(hashes)
        self.counts.num_read_ahead += len(fetched)
        self.pool.release(fetched)

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
                if (on_its_way := self.arrivals.get(block_hash)) is not None:
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
                self.arrivals.expect(block_hash)
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
        self.arrivals.settle(block_hash for _, block_hash in places)
        self.counts.num_promoted += len(arrived)
        return arrived

    async def close(self, disk_timeout_seconds: float) -> None:
        """Takes the region out of the index, ends reads and threads, gives the memory back."""
        if self.holdings.publisher is not None:
            await self.holdings.publisher.close()
        await cancel(self._publishing)
        await asyncio.to_thread(self._close_threads, disk_timeout_seconds)
        await self.arrivals.wait()
        await cancel(self._reading_ahead)
        self.memory.close()
        self._generations.close()

    def _for_disk(self, block_hash: BlockHash) -> tuple[memoryview, Callable[[], None]] | None:
        block_id = self.pool.lookup(block_hash)
        if block_id is None:
            return None
        self.pool.acquire([block_id])
        return self.memory.block(block_id), functools.partial(self.pool.release, [block_id])

    def _touch_memory(self) -> None:
        began = time.monotonic()
        if not self.memory.touch_all(lambda: self._closing):
            log.warning("memory_not_touched", consequence="there may be less memory than --capacity")
        log.debug("memory_touched", num_bytes=self.memory.num_bytes, seconds=time.monotonic() - began)

    def _close_threads(self, disk_timeout_seconds: float) -> None:
        self._closing = True
        self._touching.join()
        self.reader.close()
        self.server.close()
        if self.disk is not None:
            self.disk.close(disk_timeout_seconds)

    def _use(self) -> None:
        self.used = True
        self.last_used = time.monotonic()


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels and waits. Once more where it has no effect within the longest wait for Redis."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=3.0)
