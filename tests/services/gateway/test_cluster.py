"""The gateway with a real registry and index: workers found, routed by what they hold, kept when Redis goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from biphase.cache.hashing import extend_block_hashes, root_hash
from biphase.index.connection import connect
from biphase.index.embedded import EmbeddedValkey
from biphase.index.publisher import IndexPublisher
from biphase.index.registry import NodeRecord, Registry
from biphase.request import BlockHash, NodeId
from tests.fakes import BLOCK_SIZE, NAMESPACE, FakeDecode
from tests.services.gateway.conftest import StartGateway

Says = Callable[..., FakeDecode]


@pytest.fixture
def gateway_redis() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


def _record(worker: FakeDecode) -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(worker.node_id),
        role=worker.role,
        incarnation=worker.incarnation,
        pid=1,
        address=worker.address,
        namespace=NAMESPACE.hex(),
        block_size=BLOCK_SIZE,
    )


async def test_a_gateway_that_has_just_started_lets_requests_wait_for_its_workers(
    start_gateway: StartGateway, says: Says, gateway_redis: EmbeddedValkey
) -> None:
    decode = await says().start()
    redis = connect(gateway_redis.url)
    await Registry(redis, "young").heartbeat(_record(decode))
    await redis.aclose()
    running = await start_gateway(redis_url=gateway_redis.url, cluster="young", max_queue=2)
    running.workers.append(decode)
    gateway = running.gateway
    # As in the first moment after its start, whatever it has found meanwhile.
    for node in gateway.nodes.nodes:
        node.info = None
    answers = [asyncio.create_task(running.chat()) for _ in range(3)]
    codes = sorted([(await answer).status_code for answer in answers])
    assert codes in ([200, 200, 200], [200, 200, 429]), codes


async def test_discovery_routing_and_loss(
    start_gateway: StartGateway, says: Says, gateway_redis: EmbeddedValkey
) -> None:
    redis = connect(gateway_redis.url)
    registry = Registry(redis)
    running = await start_gateway(redis_url=gateway_redis.url)
    assert (await running.chat()).status_code == 503
    decode = await says().start()
    prefills = [await says(role="prefill").start() for _ in range(3)]
    running.workers.extend([decode, *prefills])
    for worker in running.workers:
        await registry.heartbeat(_record(worker))
    directory = running.gateway.nodes
    await running.settle(lambda: len(directory.usable("prefill")) == 3 and len(directory.usable("decode")) == 1)
    records = await registry.list()
    assert {record.role for record in records} == {"decode", "prefill", "gateway"}

    prompt = list(range(100, 100 + 10 * BLOCK_SIZE))
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, root_hash(NAMESPACE, ""), prompt, BLOCK_SIZE)
    holder = prefills[1]
    publisher = IndexPublisher(redis, "default", NAMESPACE, NodeId(holder.node_id), holder.incarnation, lambda: hashes)
    publisher.on_stored([(block_hash, place) for place, block_hash in enumerate(hashes)])
    publishing = asyncio.create_task(publisher.run())
    cluster = running.gateway._cluster
    assert cluster is not None
    await running.settle(lambda: cluster.num_leading_blocks(hashes) == {holder.incarnation: 10})
    assert (await running.complete(prompt=[*prompt, 5])).status_code == 200
    assert decode.seen[-1].request.prefill_candidates[0].node_id == holder.node_id

    publishing.cancel()
    await redis.aclose()
    gateway_redis.stop()
    await asyncio.sleep(1.0)
    assert (await running.complete(prompt=prompt)).status_code == 200
    assert len(directory.usable("prefill")) == 3


async def test_a_worker_that_only_redis_has_lost_is_used_until_it_ends(
    start_gateway: StartGateway, says: Says, gateway_redis: EmbeddedValkey
) -> None:
    """Its heartbeats do not come through, and it answers: the registry's silence alone takes nobody out."""
    redis = connect(gateway_redis.url)
    registry = Registry(redis, ttl_seconds=1.5)
    running = await start_gateway(redis_url=gateway_redis.url)
    directory = running.gateway.nodes
    kept, other = [await says().start() for _ in range(2)]
    running.workers.extend([kept, other])
    for worker in (kept, other):
        await registry.heartbeat(_record(worker))
    await running.settle(lambda: len(directory.usable("decode")) == 2)
    await running.settle(lambda: all(node.is_unlisted for node in directory.nodes))
    assert (await running.chat()).status_code == 200
    # Another life at the address of one: nobody has told of it.
    other.incarnation = "of another cluster"
    await running.settle(lambda: [node.node_id for node in directory.nodes] == [kept.node_id])
    await registry.heartbeat(_record(kept))
    await running.settle(lambda: not directory.nodes[0].is_unlisted)
    await kept.stop()
    await running.settle(lambda: not directory.nodes)
    await redis.aclose()
