"""Publisher and follower together over a real server: what the pool holds is what the view says, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from biphase.cache.block_pool import BlockPool
from biphase.index.connection import connect
from biphase.index.embedded import EmbeddedValkey
from biphase.index.events import IndexKeys
from biphase.index.follower import IndexFollower
from biphase.index.publisher import IndexPublisher
from biphase.index.view import IndexView
from biphase.request import BlockHash, NodeId

NAMESPACE = b"\x01" * 32
KEYS = IndexKeys.of("default", NAMESPACE)


def h(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


class Holder:
    """A block pool that publishes, as a worker does."""

    def __init__(
        self, client: Redis, name: str, incarnation: str = "one", num_blocks: int = 64, **options: Any
    ) -> None:
        self.node_id = NodeId(name)
        self.pool = BlockPool(num_blocks)
        self.publisher = IndexPublisher(
            client, "default", NAMESPACE, self.node_id, incarnation, self.pool.committed_hashes,
            **{"flush_seconds": 0.01, "check_seconds": 0.1, **options},
        )  # fmt: skip
        self.publisher.attach(self.pool)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.publisher.run())

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def hold(self, *numbers: int) -> None:
        blocks = self.pool.allocate(len(numbers))
        assert blocks is not None
        self.pool.commit_chain(blocks, [h(n) for n in numbers])
        self.pool.release(blocks)

    def held(self) -> set[bytes]:
        return set(self.pool.committed_hashes())


class Watcher:
    """A view that follows, as a gateway has it."""

    def __init__(self, client: Redis, **options: Any) -> None:
        self.view = IndexView()
        self.follower = IndexFollower(
            client, "default", NAMESPACE, self.view, **{"check_seconds": 0.1, "block_seconds": 0.05, **options}
        )
        self.task = asyncio.create_task(self.follower.run())

    def sees(self, holder: Holder, universe: int = 200) -> bool:
        known = {h(n) for n in range(universe) if holder.node_id in self.view.holders_of(h(n))}
        return known == holder.held() and self.view.num_blocks(holder.node_id) == len(known)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        while self.view.sweep():
            pass
        self.view.check_integrity()


class Cluster:
    def __init__(self, server: EmbeddedValkey, client: Redis) -> None:
        self.server = server
        self.client = client
        self._holders: list[Holder] = []
        self._watchers: list[Watcher] = []

    def holder(self, name: str = "a", incarnation: str = "one", **options: Any) -> Holder:
        holder = Holder(self.client, name, incarnation, **options)
        holder.start()
        self._holders.append(holder)
        return holder

    def watcher(self, **options: Any) -> Watcher:
        watcher = Watcher(self.client, **options)
        self._watchers.append(watcher)
        return watcher

    async def close(self) -> None:
        for holder in self._holders:
            await holder.kill()
        for watcher in self._watchers:
            await watcher.stop()


@pytest.fixture
async def index(index_server: EmbeddedValkey, index_client: Redis) -> AsyncIterator[Cluster]:
    cluster = Cluster(index_server, index_client)
    yield cluster
    await cluster.close()


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_follows_what_a_pool_holds(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(1, 2, 3)
    await eventually(lambda: watcher.sees(holder) and watcher.view.num_blocks(holder.node_id) == 3)
    gaps = watcher.follower.stats.num_gaps
    # 64 blocks: the first ones are evicted.
    for start in range(10, 80, 7):
        holder.hold(*range(start, start + 7))
    await eventually(lambda: watcher.sees(holder))
    assert watcher.view.longest_chain([h(n) for n in range(40, 50)]) == [(holder.node_id, 10)]
    assert watcher.view.holders_of(h(1)) == []
    assert watcher.follower.stats.num_gaps == gaps


async def test_a_late_reader_and_a_warm_pool(index: Cluster) -> None:
    holder = Holder(index.client, "a")
    holder.hold(*range(20))
    holder.start()
    await eventually(lambda: holder.publisher.stats.num_snapshots == 1)
    holder.hold(30, 31)
    watcher = index.watcher()
    await asyncio.wait_for(watcher.follower.wait_first(), 5)
    await eventually(lambda: watcher.sees(holder))
    await holder.kill()


async def test_two_holders_of_one_block(index: Cluster) -> None:
    first, second, watcher = index.holder("a"), index.holder("b"), index.watcher()
    first.hold(1, 2)
    second.hold(2, 3)
    await eventually(lambda: watcher.sees(first) and watcher.sees(second))
    assert watcher.view.holders_of(h(2)) == ["a", "b"]
    second.pool.drop_cached()
    await eventually(lambda: watcher.view.holders_of(h(2)) == ["a"])


async def test_trimmed_stream_leads_to_a_snapshot_and_never_to_ghosts(index: Cluster) -> None:
    holder = index.holder(max_stream_entries=5, check_seconds=0.05)
    for start in range(0, 500, 5):
        holder.hold(*range(start, start + 5))
        await holder.publisher.flush()
        # Approximate trimming lets small streams be.
        await index.client.xtrim(KEYS.events, maxlen=5, approximate=False)
    watcher = index.watcher()
    await eventually(lambda: watcher.sees(holder, 500))
    assert watcher.follower.stats.num_snapshots >= 1


async def test_events_lost_to_a_reader_that_was_away(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(*range(10))
    await eventually(lambda: watcher.sees(holder))
    watcher.task.cancel()
    holder.pool.drop_cached()
    holder.hold(50)
    await holder.publisher.flush()
    # The removal is trimmed, and nothing comes after it that could show a gap.
    await index.client.xtrim(KEYS.events, maxlen=0, approximate=False)
    watcher.task = asyncio.create_task(watcher.follower.run())
    await eventually(lambda: watcher.sees(holder))


async def test_a_new_life_voids_and_a_farewell_too(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(1, 2)
    await eventually(lambda: watcher.sees(holder))
    await holder.kill()
    again = index.holder(incarnation="two")
    again.hold(3)
    await eventually(lambda: watcher.sees(again) and watcher.view.num_blocks(again.node_id) == 1)
    await again.kill()
    await again.publisher.close()
    await eventually(lambda: watcher.view.holders() == {})
    late = index.watcher()
    await late.follower.wait_first()
    assert late.view.holders() == {}
    assert await index.client.exists(KEYS.snapshot("a")) == 0


async def test_the_dead_are_voided_and_come_back(index: Cluster) -> None:
    lives = {NodeId("a"): "one", NodeId("b"): "one"}
    known = True
    holder, other = index.holder("a"), index.holder("b")
    watcher = index.watcher(alive=lambda: lives if known else None)
    holder.hold(1, 2)
    other.hold(2)
    await eventually(lambda: watcher.sees(holder) and watcher.sees(other))
    known = False
    await asyncio.sleep(0.5)
    assert watcher.sees(holder)
    known = True
    del lives[NodeId("a")]
    await eventually(lambda: watcher.view.holders_of(h(2)) == ["b"])
    lives[NodeId("a")] = "one"
    await eventually(lambda: watcher.sees(holder))


async def test_dropped_changes_are_made_up_for(index: Cluster) -> None:
    holder, watcher = index.holder(max_buffered=50), index.watcher()
    holder.hold(*range(5))
    await eventually(lambda: watcher.sees(holder))
    index.server.stop()
    for start in range(10, 190, 10):
        holder.hold(*range(start, start + 10))
        await asyncio.sleep(0.02)
    # A burst between two turns of the task.
    for _ in range(200):
        holder.hold(199)
    assert watcher.view.num_blocks(holder.node_id) == 5
    # A stopped server is gone with its folder: give the publisher its successor.
    index.server.start()
    successor = connect(index.server.url, timeout_seconds=0.5)
    holder.publisher._redis = watcher.follower._redis = successor
    await eventually(lambda: watcher.sees(holder))
    assert holder.publisher.stats.num_overflows >= 1
    await index.close()
    await successor.aclose()


async def test_redis_killed_and_back_empty(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(*range(10))
    await eventually(lambda: watcher.sees(holder))
    os.kill(index.server.pid, signal.SIGKILL)
    holder.hold(20, 21)
    await eventually(lambda: not watcher.follower.available and not holder.publisher.available)
    assert watcher.view.num_blocks(holder.node_id) == 10
    index.server.start()
    await eventually(lambda: watcher.sees(holder))
    late = index.watcher()
    await eventually(lambda: late.sees(holder))


async def test_redis_replaced_by_an_empty_one_unnoticed(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(*range(10))
    await eventually(lambda: watcher.sees(holder))
    await index.client.flushall()
    late = index.watcher()
    await eventually(lambda: late.sees(holder))
    holder.hold(30)
    await eventually(lambda: watcher.sees(holder) and late.sees(holder))


async def test_redis_back_with_old_data(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(*range(10))
    await eventually(lambda: watcher.sees(holder))
    old = {key: await index.client.dump(key) for key in await index.client.keys("*")}
    holder.pool.drop_cached()
    holder.hold(*range(5, 15))
    await eventually(lambda: watcher.sees(holder))
    async with index.client.pipeline(transaction=True) as pipe:
        pipe.flushall()
        for key, value in old.items():
            pipe.restore(key, 0, value)
        await pipe.execute()
    late = index.watcher()
    await eventually(lambda: late.sees(holder))
    holder.hold(60)
    await eventually(lambda: watcher.sees(holder) and late.sees(holder))


async def test_redis_paused(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(*range(10))
    await eventually(lambda: watcher.sees(holder))
    os.kill(index.server.pid, signal.SIGSTOP)
    try:
        slowest = 0.0
        for step in range(60):
            start = time.monotonic()
            holder.hold(20 + step)
            slowest = max(slowest, time.monotonic() - start)
            await asyncio.sleep(0.05)
        assert slowest < 0.1
        assert watcher.view.num_blocks(holder.node_id) == 10
    finally:
        os.kill(index.server.pid, signal.SIGCONT)
    await eventually(lambda: watcher.sees(holder))


async def test_rubbish_in_redis_is_skipped(index: Cluster) -> None:
    holder, watcher = index.holder(), index.watcher()
    holder.hold(1)
    await eventually(lambda: watcher.sees(holder))
    await index.client.xadd(KEYS.events, {"what": "ever"})
    await index.client.hset(KEYS.holders, "evil", b"\xff")
    await index.client.hset(KEYS.holders, "liar", "7 one")
    await index.client.set(KEYS.snapshot("liar"), b"{")
    holder.hold(2)
    await eventually(lambda: watcher.sees(holder) and watcher.follower.stats.num_unreadable >= 3)
    assert not watcher.task.done()


async def test_random_trouble_ends_in_agreement(index: Cluster) -> None:
    rng = random.Random(7)
    holders = [index.holder(name, num_blocks=24, max_buffered=40) for name in "abc"]
    watchers = [index.watcher(), index.watcher()]
    numbers = iter(range(100_000))
    for step in range(120):
        holder = rng.choice(holders)
        if rng.random() < 0.1:
            holder.pool.drop_cached()
        holder.hold(*(n % 200 for _, n in zip(range(rng.randrange(1, 12)), numbers, strict=False)))
        if step % 30 == 10:
            with redis.Redis.from_url(index.server.url) as client:
                client.xtrim(KEYS.events, maxlen=rng.randrange(3), approximate=False)
        if step % 40 == 20:
            index.server.restart()
        if step % 50 == 25:
            os.kill(index.server.pid, signal.SIGSTOP)
            await asyncio.sleep(0.7)
            os.kill(index.server.pid, signal.SIGCONT)
        await asyncio.sleep(rng.random() * 0.03)
    await eventually(lambda: all(w.sees(holder) for w in watchers for holder in holders))
