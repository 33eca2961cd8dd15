"""Offers of computed blocks to the block stores, so that other nodes find them, and this one after a restart.

When a request has ended its chain is offered at once; under pressure only the part that was asked for before, and of
the rest each block when its eviction is near. Never in anyone's way: a bounded queue that forgets, and counts what it
forgot; blocks are held only while a store reads them, few of those that are free, and let go when they are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from biphase.cache.block_pool import BlockPool
from biphase.index.placement import Run, place, rank
from biphase.index.registry import NodeRecord
from biphase.request import BlockHash, NodeId
from biphase.rpc.client import ChannelPool
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2
from biphase.telemetry import context
from biphase.telemetry.events import event_logger
from biphase.transfer.leases import LeaseTable
from biphase.worker.evictions import DueBlocks, EvictionWatch

log = event_logger(__name__)

_OFFER_CALL_SECONDS = 10.0
_MAX_QUEUED_CHAINS = 256
# With so many chains queued, what was asked for only once is left for its eviction.
_BUSY_CHAINS = 16
# How often it is looked for blocks whose eviction is near.
_LOOK_SECONDS = 0.2
# Of the free blocks, the share that an offer holds; and so many at most.
_HELD_SHARE = 4
_MAX_HELD_BLOCKS = 64
# Somebody who waits for a place may be waiting for blocks that a slow store keeps us from giving up.
_PATIENCE_SECONDS = 0.05
# A store whose call failed, or took longer than there was time, is left alone so long.
_FAILED_STORE_PAUSE_SECONDS = 2.0

# (hash, block id, generation), and its place in its chain.
_Held = tuple[int, tuple[BlockHash, int, int]]


@dataclass(slots=True)
class OfferCounts:
    num_offered_blocks: int = 0
    num_stored_blocks: int = 0
    num_refused_blocks: int = 0
    # Of those offered, how many because they were about to be evicted.
    num_evicted_blocks_offered: int = 0
    # Not queued, since too much was: offered when their eviction is near.
    num_postponed_blocks: int = 0
    # Forgotten in the queue.
    num_dropped_chains: int = 0
    # Let go before a store had read them, as blocks were short.
    num_given_up_blocks: int = 0
    num_failed_calls: int = 0


class BlockOffers:
    """One per worker, on its event loop. `put` is quick; `run` does the work.

    Args:
        stores: the block stores there are now.
        is_stored: whether a store holds this block already, as far as the index knows.
        waits: whether requests wait for a place here.
    """

    def __init__(
        self,
        *,
        endpoint: common_pb2.TransferEndpoint,
        pool: BlockPool,
        leases: LeaseTable,
        channels: ChannelPool,
        stores: Callable[[], Sequence[NodeRecord]],
        is_stored: Callable[[BlockHash], bool],
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._leases = leases
        self._channels = channels
        self._stores = stores
        self._is_stored = is_stored
        self._waits = waits
        self.counts = OfferCounts()
        self.evictions = EvictionWatch(pool, self._owner, is_stored)
        # Chain, tenant, and the request that it is of: the store's log and span are to name it.
        self._queue: deque[tuple[tuple[BlockHash, ...], str, tuple[str, str]]] = deque()
        self._wake = asyncio.Event()
        # Stores by name, as of the last look, and their lives.
        self._present: dict[NodeId, NodeRecord] = {}
        self._paused: dict[NodeId, float] = {}
        # Of stores that were given up: so many blocks at once, until that goes well. Else with requests always waiting
        # the same blocks would be begun and given up for ever.
        self._limits: dict[NodeId, int] = {}

    def put(self, block_hashes: Sequence[BlockHash], cache_salt: str, num_seen_blocks: int = 0) -> None:
        """Offers a chain of full blocks that stand in this worker's cache now.

        Args:
            num_seen_blocks: leading blocks that were found, here or elsewhere, when the request began.
        """
        if not block_hashes:
            return
        tenant = hashlib.sha256(cache_salt.encode()).hexdigest() if cache_salt else ""
        self.evictions.note(block_hashes, tenant)
        if not self._stores():
            return
        hashes = tuple(block_hashes)
        if len(self._queue) >= _BUSY_CHAINS:
            self.counts.num_postponed_blocks += len(hashes) - num_seen_blocks
            hashes = hashes[:num_seen_blocks]
            if not hashes:
                return
        if len(self._queue) >= _MAX_QUEUED_CHAINS:
            self._queue.popleft()
            self.counts.num_dropped_chains += 1
        self._queue.append((hashes, tenant, (context.request_id.get(), context.traceparent.get())))
        self._wake.set()

    async def run(self) -> None:
        """Offers what is queued, chain by chain, and what is about to be evicted, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            while self._queue:
                hashes, tenant, request = self._queue.popleft()
                _work_for(*request)
                if self._look_for_stores():
                    for run in place(hashes, list(self._present)):
                        await self._offer_run(hashes, run, tenant)
                _work_for("", "")
                # A queue that never empties must not keep blocks from being offered before they go.
                await self._offer_due()
            while self._look_for_stores() and await self._offer_due():
                pass
            self.evictions.forget_evicted()

    # ---- at once

    async def _offer_run(self, hashes: tuple[BlockHash, ...], run: Run, tenant: str) -> None:
        """What does not go now, as the store or blocks are short, is offered when its eviction is near."""
        start = run.start
        while start < run.stop and self._is_stored(hashes[start]):
            start += 1
        while start < run.stop and run.store in self._present and not self._is_paused(run.store):
            limit = min(self._limits.get(run.store, _MAX_HELD_BLOCKS), self._pool.num_free // _HELD_SHARE)
            # What was evicted meanwhile, and what follows it, is not offered.
            leased = self._pool.lease_chain(hashes[start : min(run.stop, start + limit)])
            if not leased:
                return
            held = [
                (place, (hashes[place], block_id, generation))
                for place, (block_id, generation) in enumerate(leased, start=start)
            ]
            try:
                if not await self._offer(run.store, tenant, held, before_eviction=False):
                    return
            finally:
                # The parts of a chain come back one after the other; its end is to go first all the same.
                with self._pool.lock:
                    self._pool.release([block_id for block_id, _ in self._pool.lease_chain(hashes[: run.stop])])
            start += len(held)

    # ---- before eviction

    async def _offer_due(self) -> bool:
        """Offers some of the blocks that go next. False: there are none, or it has to wait."""
        if not self._present:
            return False
        limits: dict[str, int] = dict(self._limits.items())
        limits.update((store, 0) for store in self._present if self._is_paused(store))
        due = self.evictions.due(max(1, min(_MAX_HELD_BLOCKS, self._pool.num_free // _HELD_SHARE)), limits)
        return due is not None and await self._offer_before_eviction(due)

    async def _offer_before_eviction(self, due: DueBlocks) -> bool:
        places = {block_hash: index for index, block_hash in due.blocks}
        # One that is in use again meanwhile will be old again.
        held = [(places[found[0]], found) for found in self._pool.acquire_held(list(places))]
        if not held:
            return False
        try:
            done = await self._offer(NodeId(due.store), due.tenant, held, before_eviction=True)
        finally:
            # They were the next to go, and are it again: the offer was no use of theirs.
            self._pool.make_oldest([block_id for _, (_, block_id, _) in held])
        if done:
            self.counts.num_evicted_blocks_offered += len(held)
        return done

    # ---- either way

    async def _offer(self, store: NodeId, tenant: str, held: Sequence[_Held], *, before_eviction: bool) -> bool:
        """Offers blocks that the caller acquired, and gives them back when the store has read them.

        Returns:
            False: it has not, as it failed or somebody waits for a place.
        """
        record = self._present[store]
        lease = self._leases.open(
            record.node_id, record.incarnation, [block_id for _, (_, block_id, _) in held], adopt=True
        )
        stub = blocks_pb2_grpc.BlockHolderStub(self._channels.get(record.address))
        request = blocks_pb2.OfferRequest(
            endpoint=self._endpoint,
            lease_id=lease.lease_id,
            tenant=tenant,
            blocks=[
                common_pb2.BlockHandle(index=index, block_id=block_id, generation=generation, block_hash=block_hash)
                for index, (block_hash, block_id, generation) in held
            ],
        )
        call = asyncio.ensure_future(_answer(stub, request))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=_PATIENCE_SECONDS)
                if not call.done() and self._waits():
                    call.cancel()
                    self._paused[store] = time.monotonic() + _FAILED_STORE_PAUSE_SECONDS
                    self._limits[store] = max(1, len(held) // 2)
                    self.counts.num_given_up_blocks += len(held)
                    return False
            answer = await call
        except grpc.aio.AioRpcError as error:
            self.counts.num_failed_calls += 1
            self._paused[store] = time.monotonic() + _FAILED_STORE_PAUSE_SECONDS
            log.warning("offer_failed", store=store, status=error.code().name, num_blocks=len(held))
            return False
        finally:
            call.cancel()
            self._leases.release([lease.lease_id])
        if (limit := self._limits.pop(store, None)) is not None and 2 * limit < _MAX_HELD_BLOCKS:
            self._limits[store] = 2 * limit
        self.evictions.offered([block_hash for _, (block_hash, _, _) in held])
        self.counts.num_offered_blocks += len(held)
        self.counts.num_stored_blocks += answer.num_stored
        self.counts.num_refused_blocks += answer.num_refused
        log.debug(
            "offered",
            store=store,
            num_blocks=len(held),
            num_stored=answer.num_stored,
            before_eviction=before_eviction,
        )
        return True

    def _look_for_stores(self) -> bool:
        """Whether there is any."""
        present = {record.node_id: record for record in self._stores()}
        lives = {(record.node_id, record.incarnation) for record in present.values()}
        if lives != {(record.node_id, record.incarnation) for record in self._present.values()}:
            # What one of them has refused or lost may be another's to take.
            self.evictions.forget_offers()
            self._limits.clear()
        self._present = present
        return bool(present)

    def _is_paused(self, store: NodeId) -> bool:
        return self._paused.get(store, 0.0) > time.monotonic()

    def _owner(self, run: BlockHash) -> str:
        return rank(run, list(self._present))[0]


def _work_for(request_id: str, traceparent: str) -> None:
    context.request_id.set(request_id)
    context.traceparent.set(traceparent)


async def _answer(stub: blocks_pb2_grpc.BlockHolderStub, request: blocks_pb2.OfferRequest) -> blocks_pb2.OfferResponse:
    answer: blocks_pb2.OfferResponse = await stub.Offer(request, timeout=_OFFER_CALL_SECONDS)
    return answer
