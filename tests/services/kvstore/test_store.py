"""The store as workers meet it: offers read, leases given, wrong kinds refused by name, pressure counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import pytest

from biphase.index.connection import connect
from biphase.index.embedded import EmbeddedValkey
from biphase.index.follower import IndexFollower
from biphase.index.registry import Registry
from biphase.index.view import IndexView
from biphase.rpc.v1 import blocks_pb2, common_pb2, node_pb2
from tests.services.kvstore.conftest import StandInWorker, StartStore, chain, eventually, layout

MakeWorker = Callable[..., StandInWorker]


async def test_an_offered_chain_is_read_and_found_by_another_worker(
    start_store: StartStore, make_worker: MakeWorker
) -> None:
    store = await start_store("--capacity", "8MiB")
    first, second = make_worker("first"), make_worker("second")
    hashes = chain("a", 20)
    assert await second.fetch(store, hashes) == 0
    assert await first.offer(store, hashes) == (20, 0, 0)
    assert await first.offer(store, hashes) == (0, 20, 0)
    assert await second.fetch(store, hashes) == 20
    assert await second.fetch(store, [*hashes, *chain("b", 3)]) == 20
    assert await second.fetch(store, chain("b", 3)) == 0
    status = await store.status()
    assert status.state == "ready"
    assert status.num_cached_blocks == 20
    assert status.num_leased_blocks == 0
    assert status.counters["num_stored"] == 20
    assert status.counters["num_known"] == 20
    assert status.counters["num_lease_hits"] == 40
    assert {peer.node_id for peer in status.peers} == {"first"}


async def test_handles_count_from_first_index(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store()
    hashes = chain("a", 6)
    await make_worker().offer(store, hashes)
    request = blocks_pb2.LeaseRequest(
        block_hashes=hashes[2:], layout=layout().to_proto(), reader_node_id="r", reader_incarnation="one", first_index=2
    )
    answer = await store.blocks.Lease(request)
    assert [handle.index for handle in answer.blocks] == [2, 3, 4, 5]
    assert answer.lease_seconds == 10.0
    assert (await store.blocks.Renew(blocks_pb2.RenewRequest(lease_ids=[answer.lease_id, "no"]))).expired == ["no"]
    assert (await store.status()).num_leased_blocks == 4
    await store.blocks.Release(blocks_pb2.ReleaseRequest(lease_ids=[answer.lease_id, "no"]))
    assert (await store.status()).num_leased_blocks == 0
    assert (await store.blocks.Renew(blocks_pb2.RenewRequest(lease_ids=[answer.lease_id]))).expired


async def test_leased_blocks_are_not_evicted(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store("--capacity", "1MiB")
    worker = make_worker()
    hashes = chain("a", 16)
    assert await worker.offer(store, hashes) == (16, 0, 0)
    lease = await store.lease(hashes)
    assert await worker.offer(store, chain("b", 4)) == (0, 0, 4)
    assert (await store.counters())["num_refused_full"] == 4
    await store.blocks.Release(blocks_pb2.ReleaseRequest(lease_ids=[lease.lease_id]))
    assert await store.held(hashes) == 16


async def test_leases_expire(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store("--lease-seconds", "0.3")
    hashes = chain("a", 4)
    await make_worker().offer(store, hashes)
    await store.lease(hashes)
    deadline = time.monotonic() + 5
    while (await store.status()).num_leased_blocks:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_old_blocks_go_for_new_ones_end_of_chain_first(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store("--capacity", "1MiB")
    worker = make_worker()
    first = chain("a", 16)
    await worker.offer(store, first)
    assert await worker.offer(store, chain("b", 6)) == (6, 0, 0)
    assert await store.held(first) == 10
    assert await store.held(chain("b", 6)) == 6


async def test_another_kind_is_refused_by_name(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store()
    await make_worker().offer(store, chain("a", 2))
    other = make_worker("other", layout(b"\x02" * 32))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await other.offer(store, chain("a", 2))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "namespace" in refused.value.details() and "--max-namespaces" in refused.value.details()
    # The same hashes of another namespace are nobody's.
    assert not (await store.lease(chain("a", 2), layout(b"\x02" * 32))).blocks
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await store.lease(chain("a", 2), layout(kv_dtype="bfloat16"))
    assert "kv_dtype" in refused.value.details()


async def test_two_namespaces_never_share_a_block(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store("--max-namespaces", "2", "--capacity", "8MiB")
    kinds = [layout(), layout(b"\x02" * 32, block_bytes=4096)]
    workers = [make_worker(f"w{n}", kind) for n, kind in enumerate(kinds)]
    for worker in workers:
        assert await worker.offer(store, chain("a", 5)) == (5, 0, 0)
    for worker in workers:
        assert await worker.fetch(store, chain("a", 5)) == 5
    status = await store.status()
    assert status.counters["num_namespaces"] == 2
    assert status.num_blocks == 4 * 2**20 // 65536 + 4 * 2**20 // 4096


async def test_what_cannot_be_read_is_refused_and_leaves_nothing(
    start_store: StartStore, make_worker: MakeWorker
) -> None:
    # Over tcp: the holder checks each read against the lease.
    store = await start_store("--transfer-timeout-seconds", "2", "--transports", "tcp")
    worker = make_worker()
    hashes = chain("a", 4)
    worker.compute(hashes)
    held = worker.pool.lease_chain(hashes)
    lease = worker.leases.open("store", "any", [b for b, _ in held], adopt=True)

    async def offer(endpoint: common_pb2.TransferEndpoint, generation_off: int, lease_id: str) -> tuple[int, int, int]:
        handles = [
            common_pb2.BlockHandle(index=i, block_id=b, generation=g + generation_off * (i == 1), block_hash=hashes[i])
            for i, (b, g) in enumerate(held)
        ]
        # A partial block has no hash; a hash of another length is none.
        handles.append(common_pb2.BlockHandle(index=9, block_id=0, generation=0, block_hash=b""))
        answer = await store.blocks.Offer(
            blocks_pb2.OfferRequest(endpoint=endpoint, lease_id=lease_id, blocks=handles), timeout=20
        )
        return answer.num_stored, answer.num_known, answer.num_refused

    endpoint = worker.server.endpoint.to_proto()
    assert await offer(endpoint, 0, "no such lease") == (0, 0, 5)
    assert await offer(endpoint, 1, lease.lease_id) == (3, 0, 2)
    assert await store.held(hashes) == 1
    assert await offer(endpoint, 0, lease.lease_id) == (1, 3, 1)
    gone = common_pb2.TransferEndpoint()
    gone.CopyFrom(endpoint)
    gone.incarnation = "two"
    hashes[:] = chain("b", 4)
    assert await offer(gone, 0, lease.lease_id) == (0, 0, 5)
    status = await store.status()
    assert status.num_used_blocks == 0
    assert status.num_cached_blocks == 4
    assert status.counters["num_unverified"] == 4 + 1 + 4


async def test_more_offers_than_it_reads_at_once_are_refused(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store("--max-offers", "1", "--capacity", "64MiB")
    workers = [make_worker(f"w{n}") for n in range(6)]
    for number, worker in enumerate(workers):
        worker.compute(chain(f"c{number}", 100))
    outcomes = await asyncio.gather(
        *(worker.offer(store, chain(f"c{number}", 100)) for number, worker in enumerate(workers)),
        return_exceptions=True,
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    assert refused and all(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for error in refused)
    assert (100, 0, 0) in outcomes
    assert (await store.counters())["num_offers_refused"] == len(refused)


async def test_a_caller_that_goes_away_costs_nothing(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store("--capacity", "64MiB", "--max-offers", "50")
    worker = make_worker(num_blocks=2000)
    for number in range(20):
        hashes = chain(f"c{number}", 40)
        worker.compute(hashes)
        call = asyncio.create_task(worker.offer(store, hashes))
        await asyncio.sleep(0.001 * (number % 7))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    region = store.process.store.regions[0]
    await eventually(lambda: region.pool.num_used == 0)
    region.residency.check_integrity()
    assert len(region.arrivals) == 0


async def test_publishes_and_registers(
    start_store: StartStore, make_worker: MakeWorker, store_valkey: EmbeddedValkey
) -> None:
    client = connect(store_valkey.url)
    view = IndexView()
    follower = IndexFollower(client, "default", layout().namespace, view, check_seconds=0.2)
    following = asyncio.create_task(follower.run())
    store = await start_store("--redis-url", store_valkey.url, "--node-id", "kvstore-7", "--capacity", "1MiB")
    registry = Registry(client)
    deadline = time.monotonic() + 5
    while not (nodes := await registry.list()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert (nodes[0].node_id, nodes[0].role, nodes[0].state) == ("kvstore-7", "kvstore", "ready")
    hashes = chain("a", 10)
    worker = make_worker()
    await worker.offer(store, hashes)
    await eventually(lambda: view.longest_chain(hashes) == [("kvstore-7", 10)])
    await worker.offer(store, chain("b", 10))
    await eventually(lambda: view.longest_chain(hashes) == [("kvstore-7", 6)])
    await store.stop()
    await eventually(lambda: view.holders() == {})
    assert await registry.list() == []
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await client.aclose()


async def test_drain_waits_for_readers_and_takes_no_offers(start_store: StartStore, make_worker: MakeWorker) -> None:
    store = await start_store()
    worker = make_worker()
    hashes = chain("a", 5)
    await worker.offer(store, hashes)
    lease = await store.lease(hashes)
    await store.node.Drain(node_pb2.DrainRequest(timeout_seconds=30))
    deadline = time.monotonic() + 5
    while (await store.status()).state != "draining":
        assert time.monotonic() < deadline
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.offer(store, chain("b", 1))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not store._running.done()
    await store.blocks.Release(blocks_pb2.ReleaseRequest(lease_ids=[lease.lease_id]))
    await asyncio.wait_for(store._running, 5)
