"""What workers offer the store and when: at once, or before it is evicted, and never in the way of an allocation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from biphase.index.placement import rank
from biphase.index.registry import NodeRecord
from biphase.request import BlockHash, NodeId
from biphase.rpc.client import ChannelPool
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc
from biphase.worker.evictions import EvictionWatch
from biphase.worker.offers import BlockOffers
from tests.services.kvstore.conftest import RunningStore, StandInWorker, StartStore, chain, eventually

MakeWorker = Callable[..., StandInWorker]
NUM_BLOCKS = 64


class Offering:
    """A worker's pool with the real BlockOffers over it."""

    def __init__(self, worker: StandInWorker) -> None:
        self.worker, self.pool = worker, worker.pool
        self.records: list[NodeRecord] = []
        # Hashes that the index says a store holds.
        self.stored: set[BlockHash] = set()
        self.is_waiting = False
        self.channels = ChannelPool()
        self.offers = BlockOffers(
            endpoint=worker.server.endpoint.to_proto(),
            pool=worker.pool,
            leases=worker.leases,
            channels=self.channels,
            stores=lambda: self.records,
            is_stored=self.stored.__contains__,
            waits=lambda: self.is_waiting,
        )
        self.task = asyncio.create_task(self.offers.run())

    def has_store(self, address: str, name: str = "store") -> None:
        self.records = [*self.records, NodeRecord(NodeId(name), "kvstore", "one", 1, address)]

    def ended(self, hashes: Sequence[BlockHash], cache_salt: str = "", num_seen_blocks: int = 0) -> None:
        """A request of this chain has ended."""
        self.worker.compute([block_hash for block_hash in hashes if self.pool.lookup(block_hash) is None])
        self.offers.put(hashes, cache_salt, num_seen_blocks)

    async def close(self) -> None:
        assert not self.task.done(), self.task
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.channels.close()
        self.pool.check_integrity()
        self.worker.leases.check_integrity()
        assert self.pool.num_used == 0


@pytest.fixture
async def offering(make_worker: MakeWorker) -> AsyncIterator[Offering]:
    offering = Offering(make_worker("worker", num_blocks=NUM_BLOCKS))
    yield offering
    await offering.close()


@pytest.fixture
async def big_store(start_store: StartStore) -> RunningStore:
    store: RunningStore = await start_store("--capacity", "64MiB")
    return store


async def held(store: RunningStore, hashes: Sequence[BlockHash]) -> set[BlockHash]:
    """Those of the blocks that the store would lease, each by itself."""
    return {block_hash for block_hash in hashes if await store.held([block_hash])}


async def test_a_chain_is_offered_when_its_request_ends(offering: Offering, big_store: RunningStore) -> None:
    offering.has_store(big_store.process._rpc.address)
    offering.ended(chain("a", 20))
    await eventually(lambda: offering.offers.counts.num_stored_blocks == 20)
    assert await big_store.held(chain("a", 20)) == 20


async def test_what_is_about_to_be_evicted_is_offered_first(offering: Offering, big_store: RunningStore) -> None:
    # No store yet, so nothing was offered when it ended.
    for name in "abc":
        offering.ended(chain(name, 16), cache_salt="tenant" if name == "b" else "")
    offering.has_store(big_store.process._rpc.address)
    await asyncio.sleep(0.5)
    assert offering.offers.counts.num_offered_blocks == 0, "16 blank blocks are left"
    oldest = [block_hash for _, block_hash in offering.pool.oldest_cached(16)]
    offering.worker.compute(chain("d", 8))
    await eventually(lambda: offering.offers.counts.num_evicted_blocks_offered == 16)
    assert await big_store.held(chain("a", 16)) == 16
    assert not await held(big_store, chain("b", 16))
    # Read, they are still the first to go.
    assert [block_hash for _, block_hash in offering.pool.oldest_cached(16)] == oldest
    offering.worker.compute(chain("e", 20))
    # 8 blank ones and 12 of those that the store has: as many are the next to go.
    await eventually(lambda: offering.offers.counts.num_evicted_blocks_offered == 28)
    assert await held(big_store, chain("b", 16)) == set(chain("b", 16)[4:])
    assert (await big_store.counters())["num_tenants"] == 1
    assert offering.offers.evictions.num_lost_blocks == 0


async def test_nothing_is_offered_twice(offering: Offering, big_store: RunningStore) -> None:
    offering.ended(chain("a", 30))
    offering.ended(chain("b", 30))
    offering.stored.update(chain("b", 30))
    offering.has_store(big_store.process._rpc.address)
    offering.worker.compute(chain("c", 30))
    await asyncio.sleep(1.0)
    counts = offering.offers.counts
    assert counts.num_offered_blocks <= 30
    assert not await held(big_store, chain("b", 30))
    before = counts.num_offered_blocks
    await asyncio.sleep(0.5)
    assert counts.num_offered_blocks == before


class SilentStore(blocks_pb2_grpc.BlockHolderServicer):
    """Takes offers in and says nothing, as a frozen process does."""

    def __init__(self) -> None:
        self.num_offered = 0

    async def Offer(self, request: blocks_pb2.OfferRequest, context: Any) -> blocks_pb2.OfferResponse:
        self.num_offered += len(request.blocks)
        await asyncio.sleep(30)
        return blocks_pb2.OfferResponse()


@contextlib.asynccontextmanager
async def serving(servicer: SilentStore) -> AsyncIterator[tuple[SilentStore, str]]:
    server = grpc.aio.server()
    blocks_pb2_grpc.add_BlockHolderServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def silent_store() -> AsyncIterator[tuple[SilentStore, str]]:
    async with serving(SilentStore()) as served:
        yield served


async def test_a_store_that_freezes_holds_a_quarter_until_somebody_waits(
    offering: Offering, silent_store: tuple[SilentStore, str]
) -> None:
    servicer, address = silent_store
    for name in "abcd":
        offering.ended(chain(name, 16))
    offering.has_store(address)
    await eventually(lambda: servicer.num_offered > 0)
    assert offering.pool.num_used == servicer.num_offered == 16
    # The rest is to be had at once, and nothing that is being offered is in it.
    under_offer = set(chain("a", 16))
    taken = offering.pool.allocate(48)
    assert taken is not None and under_offer <= set(offering.pool.committed_hashes())
    offering.is_waiting = True
    await eventually(lambda: offering.pool.num_used == 48, seconds=1.0)
    assert offering.offers.counts.num_given_up_blocks == 16
    offering.pool.release(taken)
    # What nobody read is not lost for as long as it stands here.
    assert under_offer <= set(offering.pool.committed_hashes())


async def test_a_store_that_freezes_holds_as_much_of_a_chain_that_has_just_ended(
    offering: Offering, silent_store: tuple[SilentStore, str]
) -> None:
    servicer, address = silent_store
    offering.has_store(address, "frozen")
    offering.ended(chain("a", 40))
    await eventually(lambda: servicer.num_offered > 0)
    assert offering.pool.num_used == servicer.num_offered == 16
    offering.is_waiting = True
    await eventually(lambda: offering.pool.num_used == 0, seconds=1.0)
    assert offering.offers.counts.num_given_up_blocks == 16
    # A chain comes back as it was, its end the first to go; and the store is asked nothing for a while.
    oldest = [block_hash for _, block_hash in offering.pool.oldest_cached(64)]
    assert oldest == chain("a", 40)[::-1]
    offering.ended(chain("b", 1))
    await asyncio.sleep(0.5)
    assert servicer.num_offered == 16 and offering.pool.num_used == 0


async def test_a_store_that_is_paused_keeps_nothing_from_the_others(
    offering: Offering, silent_store: tuple[SilentStore, str], big_store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("biphase.worker.offers._FAILED_STORE_PAUSE_SECONDS", 60.0)
    servicer, address = silent_store
    names = [NodeId("frozen"), NodeId("well")]
    of_frozen, of_well = (
        next(name for name in "abcdefgh" if rank(chain(name, 1)[0], names)[0] == store) for store in names
    )
    offering.ended(chain(of_frozen, 10))
    for name in (of_well, "more"):
        offering.ended(chain(name, 20))
    offering.stored.update(chain("more", 20))
    offering.has_store(address, "frozen")
    offering.has_store(big_store.process._rpc.address, "well")
    await eventually(lambda: servicer.num_offered > 0)
    assert not await held(big_store, chain(of_well, 20))
    # Given up, the frozen one is left alone; its blocks remain the oldest.
    offering.is_waiting = True
    await eventually(lambda: offering.offers.counts.num_given_up_blocks > 0)
    offering.is_waiting = False
    await eventually(lambda: offering.offers.counts.num_evicted_blocks_offered > 0)
    assert await held(big_store, chain(of_well, 20))
    assert servicer.num_offered == 10


class SlowStore(SilentStore):
    """Slower than anybody has patience for when many blocks are offered at once."""

    async def Offer(self, request: blocks_pb2.OfferRequest, context: Any) -> blocks_pb2.OfferResponse:
        if len(request.blocks) > 4:
            return await super().Offer(request, context)
        self.num_offered += len(request.blocks)
        return blocks_pb2.OfferResponse(num_stored=len(request.blocks))


async def test_what_takes_too_long_is_offered_in_smaller_parts(
    offering: Offering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("biphase.worker.offers._FAILED_STORE_PAUSE_SECONDS", 0.1)
    # Quick enough on a busy machine: only what never ends is given up.
    monkeypatch.setattr("biphase.worker.offers._PATIENCE_SECONDS", 0.5)
    async with serving(SlowStore()) as (_, address):
        for name in "abcd":
            offering.ended(chain(name, 16))
        # There always is somebody.
        offering.is_waiting = True
        offering.has_store(address)
        await eventually(lambda: offering.offers.counts.num_stored_blocks >= 8)
    assert offering.offers.counts.num_given_up_blocks >= 16 + 8


async def test_a_burst_takes_what_it_needs_and_the_loss_is_counted(offering: Offering, big_store: RunningStore) -> None:
    for name in "ab":
        offering.ended(chain(name, 16))
    offering.has_store(big_store.process._rpc.address)
    taken = offering.pool.allocate(NUM_BLOCKS)
    assert taken is not None
    await eventually(lambda: offering.offers.evictions.due(8) is None)
    assert offering.offers.evictions.num_lost_blocks == 32
    assert len(offering.offers.evictions) == 0
    offering.pool.release(taken)


async def test_under_pressure_what_was_seen_before_goes_first(offering: Offering, big_store: RunningStore) -> None:
    offering.has_store(big_store.process._rpc.address)
    # All within one turn of the loop: the queue grows.
    for number in range(16):
        offering.ended(chain(str(number), 1))
    offering.ended(chain("once", 5))
    offering.ended(chain("twice", 8), num_seen_blocks=6)
    assert offering.offers.counts.num_postponed_blocks == 5 + 2
    await eventually(lambda: offering.offers.counts.num_stored_blocks == 16 + 6)
    assert await big_store.held(chain("twice", 8)) == 6
    # When their eviction is near, the others' turn has come.
    offering.worker.compute(chain("more", 30))
    await eventually(lambda: offering.offers.counts.num_evicted_blocks_offered == 7)
    assert await big_store.held(chain("once", 5)) == 5
    assert await big_store.held(chain("twice", 8)) == 8


async def test_a_queue_that_is_full_forgets_the_oldest(offering: Offering) -> None:
    offering.has_store("127.0.0.1:1")
    offering.worker.compute(chain("a", 2))
    for _ in range(300):
        offering.offers.put(chain("a", 2), "", 2)
    assert offering.offers.counts.num_dropped_chains == 300 - 256


async def test_another_store_is_offered_what_the_last_one_had(
    offering: Offering, big_store: RunningStore, start_store: StartStore
) -> None:
    offering.has_store(big_store.process._rpc.address)
    offering.ended(chain("a", 30))
    await eventually(lambda: offering.offers.counts.num_stored_blocks == 30)
    second = await start_store("--capacity", "64MiB")
    offering.records = []
    offering.has_store(second.process._rpc.address, "second")
    offering.worker.compute(chain("b", 30))
    await eventually(lambda: offering.offers.counts.num_evicted_blocks_offered == 16)
    assert await held(second, chain("a", 30)) == set(chain("a", 30)[14:])


def test_a_watch_names_what_is_held_of_one_store_and_tenant(make_worker: MakeWorker) -> None:
    worker = make_worker("worker", num_blocks=200)
    stores = {}

    def owner(run: BlockHash) -> str:
        return stores.setdefault(run, "xy"[hashlib.sha256(run).digest()[0] % 2])

    watch = EvictionWatch(worker.pool, owner, lambda block_hash: False)
    salts = {}
    for name in "abcdefgh":
        hashes = chain(name, 25)
        worker.compute(hashes)
        watch.note(hashes, name.upper() if name in "ab" else "")
        salts |= dict.fromkeys(hashes, name.upper() if name in "ab" else "")
    assert len(watch) == 200
    seen: list[BlockHash] = []
    while (due := watch.due(10)) is not None:
        names = [block_hash for _, block_hash in due.blocks]
        assert len(names) <= 10 and not set(names) & set(seen)
        assert {salts[block_hash] for block_hash in names} == {due.tenant}
        assert due.store in "xy"
        watch.offered(names)
        seen += names
    # A window's worth: an eighth of the pool, from the oldest on.
    assert set(seen) == {block_hash for _, block_hash in worker.pool.oldest_cached(25)}
    watch.forget_offers()
    assert watch.due(10) is not None
