"""Offers of computed blocks to the block store, so that other nodes find them, and this one after a restart.

Never in anyone's way: a bounded queue that forgets under pressure, and counts what it forgot.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from biphase.cache.block_pool import BlockPool
from biphase.index.placement import Run, place
from biphase.index.registry import NodeRecord
from biphase.request import BlockHash
from biphase.rpc.client import ChannelPool
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2
from biphase.telemetry.events import event_logger
from biphase.transfer.leases import LeaseTable

log = event_logger(__name__)

_OFFER_CALL_SECONDS = 10.0
_MAX_QUEUED_CHAINS = 256


@dataclass(slots=True)
class OfferCounts:
    num_offered_blocks: int = 0
    num_stored_blocks: int = 0
    num_refused_blocks: int = 0
    num_dropped_chains: int = 0
    num_failed_calls: int = 0


@dataclass(slots=True)
class BlockOffers:
    """One per worker, on its event loop. `put` is quick; `run` does the work.

    Args:
        stores: the block stores there are now.
        is_stored: whether a store holds this block already, as far as the index knows.
    """

    endpoint: common_pb2.TransferEndpoint
    pool: BlockPool
    leases: LeaseTable
    channels: ChannelPool
    stores: Callable[[], Sequence[NodeRecord]]
    is_stored: Callable[[BlockHash], bool]
    counts: OfferCounts = field(default_factory=OfferCounts)
    _queue: deque[tuple[tuple[BlockHash, ...], str]] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, block_hashes: Sequence[BlockHash], cache_salt: str) -> None:
        """Queues a chain of full blocks that stand in this worker's cache now."""
        if not block_hashes or not self.stores():
            return
        if len(self._queue) >= _MAX_QUEUED_CHAINS:
            self._queue.popleft()
            self.counts.num_dropped_chains += 1
        self._queue.append((tuple(block_hashes), cache_salt))
        self._wake.set()

    async def run(self) -> None:
        """Offers what is queued, chain by chain, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                hashes, cache_salt = self._queue.popleft()
                stores = {record.node_id: record for record in self.stores()}
                for run in place(hashes, list(stores)) if stores else ():
                    await self._offer(stores[run.store], hashes, run, cache_salt)

    async def _offer(self, store: NodeRecord, hashes: tuple[BlockHash, ...], run: Run, cache_salt: str) -> None:
        start = run.start
        while start < run.stop and self.is_stored(hashes[start]):
            start += 1
        if start == run.stop:
            return
        # What was evicted meanwhile, and what follows it, is not offered.
        held = self.pool.lease_chain(hashes[start : run.stop])
        if not held:
            return
        lease = self.leases.open(store.node_id, store.incarnation, [block_id for block_id, _ in held], adopt=True)
        stub = blocks_pb2_grpc.BlockHolderStub(self.channels.get(store.address))
        try:
            answer: blocks_pb2.OfferResponse = await stub.Offer(
                blocks_pb2.OfferRequest(
                    endpoint=self.endpoint,
                    lease_id=lease.lease_id,
                    tenant=hashlib.sha256(cache_salt.encode()).hexdigest() if cache_salt else "",
                    blocks=[
                        common_pb2.BlockHandle(
                            index=start + offset,
                            block_id=block_id,
                            generation=generation,
                            block_hash=hashes[start + offset],
                        )
                        for offset, (block_id, generation) in enumerate(held)
                    ],
                ),
                timeout=_OFFER_CALL_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            self.counts.num_failed_calls += 1
            log.warning("offer_failed", store=store.node_id, status=error.code().name, num_blocks=len(held))
            return
        finally:
            self.leases.release([lease.lease_id])
        self.counts.num_offered_blocks += len(held)
        self.counts.num_stored_blocks += answer.num_stored
        self.counts.num_refused_blocks += answer.num_refused
        log.debug("offered", store=store.node_id, num_blocks=len(held), num_stored=answer.num_stored)
