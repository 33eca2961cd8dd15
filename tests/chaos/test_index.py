"""Redis stopped for half a minute, back empty, back with old data; the store killed amid offers and reads; all while
two gateways race for the same workers. Every answer is the right one, and ten seconds later no view names a block that
its holder does not have. Part of `make chaos` only.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import redis

from biphase.cache.hashing import extend_block_hashes, root_hash
from biphase.index.connection import connect
from biphase.index.follower import IndexFollower
from biphase.index.registry import Registry, RegistryWatch
from biphase.index.view import IndexView
from biphase.request import BlockHash
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, node_pb2, node_pb2_grpc
from biphase.transfer.layout import KVLayout
from tests.chaos.cluster import ChaosCluster, ClusterPlan, running_cluster
from tests.chaos.load import Answer, Asker, Question, Verdict, draw_questions, judge, undisturbed

LONG = int(os.environ.get("CHAOS_FAULTS", "25")) >= 200

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not LONG, reason="minutes long: part of `make chaos`"),
]

_GHOST_SECONDS = 10.0
_PAUSE_SECONDS = 30.0


@pytest.fixture(scope="module")
def raced(chaos_model: Path) -> Iterator[ChaosCluster]:
    """Two gateways over one pool of workers with few blocks, so that blocks come and go."""
    with running_cluster(chaos_model, ClusterPlan(num_gateways=2, proxied=False, num_blocks=200)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def chats(raced: ChaosCluster) -> dict[Question, Answer]:
    """Questions of which many begin alike."""
    draw = random.Random(3)
    stems = [draw_questions(draw, 1, lengths=(500,), outputs=(1,))[0].token_ids for _ in range(4)]
    tails = draw_questions(draw, 32, lengths=(1, 40, 200), outputs=(8, 60))
    questions = [
        Question(draw.choice(stems) + tail.token_ids, tail.max_tokens, tail.temperature, tail.seed) for tail in tails
    ]

    async def ask() -> dict[Question, Answer]:
        asker = Asker(raced.base_url, 60.0)
        try:
            return await undisturbed(asker, questions)
        finally:
            await asker.close()

    return asyncio.run(ask())


class Race:
    """The same questions to both gateways at the same moment, over and over."""

    def __init__(self, cluster: ChaosCluster, chats: dict[Question, Answer]) -> None:
        self._chats = chats
        self._deadline = cluster.plan.request_timeout_seconds + 5.0
        self._askers = [Asker(url, self._deadline + 5.0) for url in cluster.base_urls]
        self._ended = False
        self.num_equal = 0
        self.findings: list[tuple[Verdict, Answer]] = []
        self._tasks = [asyncio.create_task(self._pairs(number)) for number in range(4)]

    async def _pairs(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._ended:
            question = draw.choice(list(self._chats))
            answers = await asyncio.gather(*(asker.ask(question, stream=draw.random() < 0.5) for asker in self._askers))
            for answer in answers:
                verdict = judge(answer, self._chats[question], self._deadline)
                if verdict is Verdict.EQUAL:
                    self.num_equal += 1
                else:
                    self.findings.append((verdict, answer))

    async def end(self) -> None:
        self._ended = True
        await asyncio.gather(*self._tasks)
        for asker in self._askers:
            await asker.close()


@pytest.fixture
async def race(raced: ChaosCluster, chats: dict[Question, Answer]) -> AsyncIterator[Race]:
    race = Race(raced, chats)
    await asyncio.sleep(2.0)
    yield race
    await race.end()
    assert race.num_equal > 20
    assert not race.findings, race.findings[:3]
    # In this thread, as the processes that it starts end with the thread that did.
    raced.heal()
    assert await ghosts(raced, chats) == []


async def ghosts(cluster: ChaosCluster, chats: dict[Question, Answer]) -> list[str]:
    """What a fresh view and what each holder say differently, ten seconds from now at the latest."""
    client = connect(cluster.valkey.url)
    view, registry = IndexView(), Registry(client)
    watch = RegistryWatch(registry)
    infos = {node["id"]: node for node in cluster.nodes()}
    worker = next(node for node in infos.values() if node["role"] == "prefill")
    async with grpc.aio.insecure_channel(worker["address"]) as channel:
        layout = (await node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest())).layout
    kind = KVLayout.from_proto(layout)
    follower = IndexFollower(client, "default", kind.namespace, view, alive=lambda: None)
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(watch.run())]
    deadline = time.monotonic() + _GHOST_SECONDS
    found: list[str] = ["never looked"]
    try:
        while found and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            found = []
            for question in chats:
                chain: list[BlockHash] = []
                extend_block_hashes(chain, root_hash(kind.namespace, ""), question.token_ids, kind.block_size_tokens)
                for node_id, length in view.longest_chain(chain):
                    if node_id not in infos:
                        found.append(f"{node_id} is not there")
                        continue
                    held = await _held(infos[node_id]["address"], layout, chain[:length])
                    if held < length:
                        found.append(f"{node_id} has {held} of {length} blocks")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()
    assert view.holders(), "nobody says anything"
    return found


async def _held(address: str, layout: object, chain: list[BlockHash]) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = blocks_pb2_grpc.BlockHolderStub(channel)
        answer = await stub.Lease(
            blocks_pb2.LeaseRequest(
                block_hashes=chain, layout=layout, reader_node_id="looker", reader_incarnation="one"
            ),  # type: ignore[arg-type]
            timeout=5,
        )
        await stub.Release(blocks_pb2.ReleaseRequest(lease_ids=[answer.lease_id]))
    return len(answer.blocks)


async def test_two_gateways_race(race: Race) -> None:
    await asyncio.sleep(10.0)


async def test_redis_is_paused_for_half_a_minute(raced: ChaosCluster, race: Race) -> None:
    raced.freeze_valkey()
    try:
        before = race.num_equal
        await asyncio.sleep(_PAUSE_SECONDS)
        assert race.num_equal > before + 20
    finally:
        raced.thaw_valkey()
    await asyncio.sleep(5.0)


async def test_redis_comes_back_empty(raced: ChaosCluster, race: Race) -> None:
    for _ in range(3):
        raced.kill_valkey()
        await asyncio.sleep(3.0)
        raced.valkey.restart()
        await asyncio.sleep(4.0)


async def test_redis_comes_back_with_old_data(raced: ChaosCluster, race: Race) -> None:
    with redis.Redis.from_url(raced.valkey.url) as client:
        old = {key: (client.dump(key), max(client.pttl(key), 0)) for key in client.scan_iter("*")}
        await asyncio.sleep(8.0)
        with client.pipeline(transaction=True) as pipe:
            pipe.flushall()
            for key, (value, milliseconds) in old.items():
                if value is not None:
                    pipe.restore(key, milliseconds, value)
            pipe.execute()
    await asyncio.sleep(5.0)


async def test_the_store_is_killed_amid_offers_and_reads(raced: ChaosCluster, race: Race) -> None:
    (store,) = raced.of_role("kvstore")
    draw = random.Random(5)
    for _ in range(5):
        await asyncio.sleep(draw.random() * 3)
        store.kill()
        await asyncio.sleep(0.5)
        store.start()
    await asyncio.sleep(3.0)
